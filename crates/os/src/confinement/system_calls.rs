//! System calls that this process may use, by seccomp(2).
//!
//! The filter is a list of what is allowed: files, memory, sockets, clocks, signals and threads. It leaves
//! out what could change the machine beyond files and network (mounts, modules, clocks, other processes),
//! what debugs, and, unless programs are needed, what starts programs. The kernel keeps the decision for each
//! number, so an allowed call costs nothing more.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use libc::{c_int, c_long, c_void, siginfo_t};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};
use syscalls::Sysno;

use super::Needs;

/// The numbers of the calls with these names.
macro_rules! calls {
    ($($name:ident)+) => { &[$(Sysno::$name as c_long),+] };
}

/// The calls of a program that has its files and sockets, and runs threads.
const ALLOWED: &[c_long] = calls! {
    // Files.
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 openat openat2 close close_range
    lseek statx fstat statfs fstatfs getdents64 readlinkat faccessat faccessat2 fcntl flock
    ftruncate fallocate fsync fdatasync mkdirat unlinkat renameat renameat2 linkat symlinkat fchmod fchmodat
    fchown fchownat utimensat umask getcwd fadvise64 copy_file_range sendfile splice tee ioctl dup dup3 pipe2
    memfd_create inotify_init1 inotify_add_watch inotify_rm_watch eventfd2 signalfd4 timerfd_create
    timerfd_settime timerfd_gettime epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 ppoll pselect6
    // Memory.
    brk mmap munmap mremap mprotect madvise mlock munlock msync mincore membarrier
    // Sockets; `socket` has a rule of its own.
    socketpair bind connect listen accept accept4 getsockname getpeername getsockopt setsockopt shutdown
    sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg
    // Time and signals.
    clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday rt_sigaction rt_sigprocmask rt_sigreturn
    rt_sigpending rt_sigtimedwait sigaltstack restart_syscall kill tgkill pidfd_open
    // Threads and this process; `clone` has a rule of its own.
    futex set_robust_list get_robust_list set_tid_address rseq gettid getpid getppid getpgid getuid geteuid
    getgid getegid getgroups getresuid getresgid capget prctl prlimit64 getrusage sched_yield
    sched_getaffinity sched_getparam sched_getscheduler getcpu getrandom uname sysinfo exit exit_group wait4
    waitid landlock_create_ruleset
};

/// The older forms of some of them, which newer processors do not have.
#[cfg(target_arch = "x86_64")]
const ALLOWED_LEGACY: &[c_long] = calls! {
    open stat lstat access readlink unlink rename mkdir rmdir link symlink chmod chown dup2 pipe poll select
    epoll_wait epoll_create time getdents arch_prctl getpgrp
};
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_LEGACY: &[c_long] = &[];

/// System calls that start programs; `clone` has a rule of its own.
const PROGRAMS: &[c_long] = &[libc::SYS_execve, libc::SYS_execveat];
#[cfg(target_arch = "x86_64")]
const PROGRAMS_LEGACY: &[c_long] = &[libc::SYS_fork, libc::SYS_vfork];
#[cfg(not(target_arch = "x86_64"))]
const PROGRAMS_LEGACY: &[c_long] = &[];

/// Calls of a terminal that type into it, or change what reads it.
const TERMINAL_CALLS: [u64; 4] = [libc::TIOCSTI, libc::TIOCLINUX, libc::TIOCCONS, libc::TIOCSETD];

/// Kinds of sockets: of the internet, of this machine, and of the kernel (netlink).
const SOCKET_FAMILIES: [c_int; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// The bits of a socket's type beside its flags (`SOCK_TYPE_MASK` of the kernel's linux/net.h).
const SOCKET_KIND: u64 = 0xf;

/// Whether this kernel filters system calls, and the library knows this processor.
pub fn is_supported() -> bool {
    architecture().is_some() && std::path::Path::new("/proc/sys/kernel/seccomp/actions_avail").exists()
}

fn architecture() -> Option<TargetArch> {
    TargetArch::try_from(std::env::consts::ARCH).ok()
}

/// Filters the system calls of the calling thread from now on.
pub(super) fn restrict(needs: &Needs) -> io::Result<()> {
    report_denied_calls()?;
    let unsupported = || io::Error::from(io::ErrorKind::Unsupported);
    let arch = architecture().ok_or_else(unsupported)?;
    // The arguments of `clone3` are in memory, where a filter cannot look. The C library uses `clone` where
    // it is missing.
    let missing = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let absent = SeccompAction::Errno(libc::ENOSYS as u32);
    apply(SeccompFilter::new(missing, SeccompAction::Allow, absent, arch))?;
    // Without a line: the C library starts programs with all signals blocked, so the handler could not run,
    // and tries a UNIX socket for each name before it goes on without.
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    apply(SeccompFilter::new(refused_calls(needs)?, SeccompAction::Allow, refused, arch))?;
    apply(SeccompFilter::new(allowed_calls()?, SeccompAction::Trap, SeccompAction::Allow, arch))
}

fn apply(filter: Result<SeccompFilter, seccompiler::BackendError>) -> io::Result<()> {
    let program: BpfProgram = filter.and_then(TryInto::try_into).map_err(io::Error::other)?;
    seccompiler::apply_filter(&program).map_err(io::Error::other)
}

/// The calls that the last filter lets pass. Those of [`refused_calls`] were answered by another one.
fn allowed_calls() -> io::Result<BTreeMap<c_long, Vec<SeccompRule>>> {
    // The name of the last one differs by processor.
    let more = &[libc::SYS_clone, libc::SYS_clone3, libc::SYS_newfstatat];
    let others = PROGRAMS.iter().chain(PROGRAMS_LEGACY).chain(more);
    let all = ALLOWED.iter().chain(ALLOWED_LEGACY).chain(others);
    let mut allowed: BTreeMap<c_long, Vec<SeccompRule>> = all.map(|number| (*number, Vec::new())).collect();
    let families = SOCKET_FAMILIES.map(|family| argument(0, SeccompCmpOp::Eq, family as u64));
    allowed.insert(libc::SYS_socket, families.into_iter().collect::<io::Result<_>>()?);
    Ok(allowed)
}

/// The calls that are refused without a line: those that begin a process or a program, or make a UNIX socket
/// that could be connected, and those of terminals.
fn refused_calls(needs: &Needs) -> io::Result<BTreeMap<c_long, Vec<SeccompRule>>> {
    let rules = |index, operator: SeccompCmpOp, values: &[u64]| {
        values.iter().map(|value| argument(index, operator.clone(), *value)).collect::<io::Result<Vec<_>>>()
    };
    let terminal = rules(1, SeccompCmpOp::Eq, &TERMINAL_CALLS)?;
    let mut refused = BTreeMap::from([(libc::SYS_ioctl, terminal)]);
    if !needs.programs {
        refused.extend(PROGRAMS.iter().chain(PROGRAMS_LEGACY).map(|number| (*number, Vec::new())));
        let no_thread = SeccompCmpOp::MaskedEq(libc::CLONE_THREAD as u64);
        refused.insert(libc::SYS_clone, rules(0, no_thread, &[0])?);
    }
    if !needs.unix_sockets {
        refused.insert(libc::SYS_socket, rules(0, SeccompCmpOp::Eq, &[libc::AF_UNIX as u64])?);
        // A pair of streams stays a pair; datagrams of a pair may be sent elsewhere.
        let kinds = [libc::SOCK_DGRAM as u64, libc::SOCK_RAW as u64];
        refused.insert(libc::SYS_socketpair, rules(1, SeccompCmpOp::MaskedEq(SOCKET_KIND), &kinds)?);
    }
    Ok(refused)
}

/// A rule about an argument of a call, by its index.
fn argument(index: u8, operator: SeccompCmpOp, value: u64) -> io::Result<SeccompRule> {
    SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value)
        .and_then(|condition| SeccompRule::new(vec![condition]))
        .map_err(io::Error::other)
}

/// Makes a call that is not allowed fail with EPERM, after a line on standard error.
fn report_denied_calls() -> io::Result<()> {
    let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_denied_call;
    // SAFETY: a zeroed sigaction is valid, and is filled with a handler for SA_SIGINFO and an empty mask
    // before it is used. The handler only calls what signal-safety(7) allows.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Bytes of the longest line about a denied call.
const LINE_BYTES: usize = 160;

extern "C" fn on_denied_call(_signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel calls the handler with pointers to structures of these types, valid until it
    // returns. For SIGSYS the number of the call follows the address of the call and three integers
    // (sigaction(2), `si_syscall`).
    let number = unsafe { &*info.cast::<SigsysInfo>() }.number;
    let mut line = [0; LINE_BYTES];
    let length = denied_line(number, &mut line);
    // SAFETY: the buffer has `length` bytes, and descriptor 2 is standard error or closed.
    unsafe { libc::write(2, line.as_ptr().cast(), length) };
    // SAFETY: as above; the register is the one in which the kernel returns the result.
    unsafe { set_result(&mut *context.cast::<libc::ucontext_t>(), -c_long::from(libc::EPERM)) };
}

/// The beginning of `siginfo_t` for SIGSYS (`_sigsys` in the kernel's asm-generic/siginfo.h).
#[repr(C)]
struct SigsysInfo {
    _signal_errno_code: [c_int; 3],
    _call_address: *const c_void,
    number: c_int,
}

#[cfg(target_arch = "x86_64")]
fn set_result(context: &mut libc::ucontext_t, result: c_long) {
    context.uc_mcontext.gregs[libc::REG_RAX as usize] = result;
}

#[cfg(target_arch = "aarch64")]
fn set_result(context: &mut libc::ucontext_t, result: c_long) {
    context.uc_mcontext.regs[0] = result as u64;
}

/// Without a known register the call returns its number, as the kernel left it.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn set_result(_context: &mut libc::ucontext_t, _result: c_long) {}

/// Writes the line into `buffer`, without allocation; returns its length.
fn denied_line(number: c_int, buffer: &mut [u8]) -> usize {
    let name = usize::try_from(number).ok().and_then(Sysno::new).map_or("unknown", |call| call.name());
    let (number, room) = (number.unsigned_abs(), buffer.len());
    let mut rest = buffer;
    // It fails only where the line is longer than the buffer, and has written what fits.
    let _ = writeln!(
        rest,
        "mpvpn: the system call {name} ({number}) is not allowed to this process and failed with EPERM; --confine off allows all"
    );
    room - rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_names_the_call() {
        let mut buffer = [0; LINE_BYTES];
        let length = denied_line(libc::SYS_mount as c_int, &mut buffer);
        let line = std::str::from_utf8(&buffer[..length]).unwrap();
        assert!(line.contains("system call mount (") && line.ends_with("allows all\n"), "{line}");
        let length = denied_line(i32::MAX, &mut buffer);
        assert!(std::str::from_utf8(&buffer[..length]).unwrap().contains("unknown (2147483647)"));
    }
}
