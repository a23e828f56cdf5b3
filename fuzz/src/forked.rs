//! A process for each input, each a copy of one that has set up a session.
//!
//! A session takes longer to set up than to play an input with. So a process that is made before libFuzzer
//! begins sets it up once, and copies itself by fork(2) for each input that the fuzzer's process sends; the
//! copy plays the input and ends. The counters by which libFuzzer sees which code has run are memory that all
//! of them share. Always holds: nothing else that an input changes lasts.
#![allow(unsafe_code)]

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    process::abort,
    ptr, slice,
    sync::OnceLock,
};

use rustix::{
    mm::{MapFlags, ProtFlags, mmap_anonymous},
    process::{Signal, set_parent_process_death_signal},
};

/// The memory of a copy (KiB): as much as libFuzzer allows its own process (-rss_limit_mb), as it does not
/// see copies.
const MAX_MEMORY: i64 = 1 << 20;

/// The way to the process that copies itself.
static COPIED: OnceLock<UnixStream> = OnceLock::new();

/// Makes the process that sets up what `prepare` returns, and whose copies play one input each. Comes before
/// libFuzzer's handlers of signals, which would take an input of another process for the one that fails.
///
/// # Panics
/// If the system refuses, or the program is not built for libFuzzer.
pub fn prepare_copies<F: FnMut(&[u8])>(prepare: fn() -> F) {
    share_counters();
    let (fuzzer, copied) = UnixStream::pair().expect("a pair of sockets");
    if fork() == 0 {
        drop(fuzzer);
        play_in_copies(copied, prepare());
    }
    COPIED.set(fuzzer).expect("one process that copies itself");
}

/// Plays an input in a copy.
///
/// # Panics
/// If the copy has failed, or has taken too much memory.
pub fn play_in_copy(data: &[u8]) {
    let mut copied = COPIED.get().expect("prepare_copies has run");
    let mut answer = [0; 12];
    let exchanged = copied
        .write_all(&(data.len() as u32).to_ne_bytes())
        .and_then(|()| copied.write_all(data))
        .and_then(|()| copied.read_exact(&mut answer));
    exchanged.expect("the process that copies itself lives");
    let (status, memory) = answer.split_at(4);
    assert_eq!(status, [0; 4], "the copy has failed: wait status {status:x?}");
    let memory = i64::from_ne_bytes(memory.try_into().expect("eight bytes"));
    assert!(memory <= MAX_MEMORY, "{memory} KiB in use");
}

/// Answers each input with the wait status of its copy and the largest memory (KiB) that it had.
fn play_in_copies(mut fuzzer: UnixStream, mut play: impl FnMut(&[u8])) -> ! {
    let mut len = [0; 4];
    let mut data = Vec::new();
    while fuzzer.read_exact(&mut len).is_ok() {
        data.resize(u32::from_ne_bytes(len) as usize, 0);
        fuzzer.read_exact(&mut data).expect("an input");
        let copy = fork();
        if copy == 0 {
            play(&data);
            exit();
        }
        let (status, memory) = wait(copy);
        let answer = [&status.to_ne_bytes()[..], &memory.to_ne_bytes()].concat();
        fuzzer.write_all(&answer).expect("the fuzzer lives");
    }
    exit();
}

unsafe extern "C" {
    /// fork(2) without handlers (glibc 2.34). AddressSanitizer's write to more memory than an input does.
    fn _Fork() -> libc::pid_t;
}

/// The copy's process ID, or 0 in the copy, which ends with this process.
fn fork() -> libc::pid_t {
    // SAFETY: this process has one thread.
    let copy = unsafe { _Fork() };
    assert!(copy >= 0, "fork: {}", io::Error::last_os_error());
    if copy == 0 && set_parent_process_death_signal(Some(Signal::KILL)).is_err() {
        abort();
    }
    copy
}

fn exit() -> ! {
    // SAFETY: nothing has to be cleaned up.
    unsafe { libc::_exit(0) }
}

/// The wait status of a process, and the largest memory (KiB) that it had.
fn wait(copy: libc::pid_t) -> (i32, i64) {
    let mut status = 0;
    // SAFETY: all fields are numbers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are valid.
    while unsafe { libc::wait4(copy, &raw mut status, 0, &raw mut usage) } == -1 {
        let error = io::Error::last_os_error();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted, "wait4: {error}");
    }
    (status, usage.ru_maxrss)
}

unsafe extern "C" {
    /// The counters of all code, which the linker puts side by side.
    static mut __start___sancov_cntrs: u8;
    static mut __stop___sancov_cntrs: u8;
}

/// Replaces the memory of the counters by memory that copies of the process share. Pages with other variables
/// stay.
fn share_counters() {
    let page = rustix::param::page_size();
    let (start, stop) = (&raw mut __start___sancov_cntrs, &raw mut __stop___sancov_cntrs);
    let first = start.wrapping_add(start.align_offset(page));
    let len = stop.addr().saturating_sub(first.addr()) / page * page;
    assert!(len > 0, "no counters: not built for libFuzzer");
    // SAFETY: the memory between both symbols belongs to the counters, which any byte is valid for.
    let counters = unsafe { slice::from_raw_parts(first, len) }.to_vec();
    // SAFETY: as above. Only this thread runs code that counts.
    unsafe {
        mmap_anonymous(
            first.cast(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::FIXED,
        )
        .expect("memory for the counters");
        ptr::copy_nonoverlapping(counters.as_ptr(), first, len);
    }
}
