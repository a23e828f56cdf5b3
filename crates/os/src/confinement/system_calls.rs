//! System calls that this process may use, by seccomp(2).
//!
//! The filter is a list of what is allowed: files, memory, sockets, clocks, signals and threads. It leaves
//! out what could change the machine beyond files and network (mounts, modules, clocks, other processes),
//! what debugs, and, unless programs are needed, what starts programs. The kernel keeps the decision for each
//! number, so an allowed call costs nothing more.

use std::{collections::BTreeMap, io};

use libc::{c_int, c_long, c_void, siginfo_t};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

/// The calls of a program that has its files and sockets, and runs threads.
const ALLOWED: &[c_long] = &[
    // Files.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_lseek,
    libc::SYS_statx,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_getdents64,
    libc::SYS_readlinkat,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_umask,
    libc::SYS_getcwd,
    libc::SYS_fadvise64,
    libc::SYS_copy_file_range,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_tee,
    libc::SYS_ioctl,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_memfd_create,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_rm_watch,
    libc::SYS_eventfd2,
    libc::SYS_signalfd4,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    // Memory.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_mlock,
    libc::SYS_munlock,
    libc::SYS_msync,
    libc::SYS_mincore,
    libc::SYS_membarrier,
    // Sockets; `socket` has a rule of its own.
    libc::SYS_socketpair,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    // Time and signals.
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_kill,
    libc::SYS_tgkill,
    libc::SYS_pidfd_open,
    // Threads and this process; `clone` has a rule of its own.
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getpgid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getgroups,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_capget,
    libc::SYS_prctl,
    libc::SYS_prlimit64,
    libc::SYS_getrusage,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_getcpu,
    libc::SYS_getrandom,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_landlock_create_ruleset,
];

/// The older forms of some of them, which newer processors do not have.
#[cfg(target_arch = "x86_64")]
const ALLOWED_LEGACY: &[c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_link,
    libc::SYS_symlink,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_dup2,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_create,
    libc::SYS_time,
    libc::SYS_getdents,
    libc::SYS_arch_prctl,
    libc::SYS_getpgrp,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_LEGACY: &[c_long] = &[];

/// System calls that start programs; `clone` has a rule of its own.
const PROGRAMS: &[c_long] = &[libc::SYS_execve, libc::SYS_execveat];
#[cfg(target_arch = "x86_64")]
const PROGRAMS_LEGACY: &[c_long] = &[libc::SYS_fork, libc::SYS_vfork];
#[cfg(not(target_arch = "x86_64"))]
const PROGRAMS_LEGACY: &[c_long] = &[];

/// Kinds of sockets: of the internet, of this machine, and of the kernel (netlink).
const SOCKET_FAMILIES: [c_int; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// Whether this kernel filters system calls, and the library knows this processor.
pub fn is_supported() -> bool {
    architecture().is_some() && std::path::Path::new("/proc/sys/kernel/seccomp/actions_avail").exists()
}

fn architecture() -> Option<TargetArch> {
    TargetArch::try_from(std::env::consts::ARCH).ok()
}

/// Filters the system calls of the calling thread from now on.
pub(super) fn restrict(programs: bool) -> io::Result<()> {
    report_denied_calls()?;
    let unsupported = || io::Error::from(io::ErrorKind::Unsupported);
    let arch = architecture().ok_or_else(unsupported)?;
    // The arguments of `clone3` are in memory, where a filter cannot look. The C library uses `clone` where
    // it is missing.
    let missing = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let absent = SeccompAction::Errno(libc::ENOSYS as u32);
    apply(SeccompFilter::new(missing, SeccompAction::Allow, absent, arch))?;
    if !programs {
        // The C library starts programs with all signals blocked, so the handler could not run.
        let refused = SeccompAction::Errno(libc::EPERM as u32);
        apply(SeccompFilter::new(starts_of_programs()?, SeccompAction::Allow, refused, arch))?;
    }
    apply(SeccompFilter::new(allowed_calls()?, SeccompAction::Trap, SeccompAction::Allow, arch))
}

fn apply(filter: Result<SeccompFilter, seccompiler::BackendError>) -> io::Result<()> {
    let program: BpfProgram = filter.and_then(TryInto::try_into).map_err(io::Error::other)?;
    seccompiler::apply_filter(&program).map_err(io::Error::other)
}

/// The calls that the last filter lets pass. Those of programs were answered by another one where programs
/// are not needed.
fn allowed_calls() -> io::Result<BTreeMap<c_long, Vec<SeccompRule>>> {
    let others = PROGRAMS.iter().chain(PROGRAMS_LEGACY).chain(&[libc::SYS_clone, libc::SYS_clone3]);
    let all = ALLOWED.iter().chain(ALLOWED_LEGACY).chain(others);
    let mut allowed: BTreeMap<c_long, Vec<SeccompRule>> = all.map(|number| (*number, Vec::new())).collect();
    let families = SOCKET_FAMILIES.map(|family| first_argument(SeccompCmpOp::Eq, family as u64));
    allowed.insert(libc::SYS_socket, families.into_iter().collect::<io::Result<_>>()?);
    Ok(allowed)
}

/// The calls that begin a process or a program.
fn starts_of_programs() -> io::Result<BTreeMap<c_long, Vec<SeccompRule>>> {
    let all = PROGRAMS.iter().chain(PROGRAMS_LEGACY);
    let mut refused: BTreeMap<c_long, Vec<SeccompRule>> = all.map(|number| (*number, Vec::new())).collect();
    let no_thread = first_argument(SeccompCmpOp::MaskedEq(libc::CLONE_THREAD as u64), 0)?;
    refused.insert(libc::SYS_clone, vec![no_thread]);
    Ok(refused)
}

/// A rule about the first argument of a call.
fn first_argument(operator: SeccompCmpOp, value: u64) -> io::Result<SeccompRule> {
    SeccompCondition::new(0, SeccompCmpArgLen::Dword, operator, value)
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
    let name =
        usize::try_from(number).ok().and_then(syscalls::Sysno::new).map_or("unknown", |call| call.name());
    let mut digits = [0; 11];
    let mut first = digits.len();
    let mut rest = number.unsigned_abs();
    while first == digits.len() || rest > 0 {
        first -= 1;
        digits[first] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    let parts: [&[u8]; 5] = [
        b"mpvpn: the system call ",
        name.as_bytes(),
        b" (",
        &digits[first..],
        b") is not allowed to this process and failed with EPERM; --confine off allows all\n",
    ];
    let mut length = 0;
    for byte in parts.into_iter().flatten().take(buffer.len()) {
        buffer[length] = *byte;
        length += 1;
    }
    length
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
