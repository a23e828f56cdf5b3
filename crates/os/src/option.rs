//! Socket options by raw getsockopt(2) and setsockopt(2), for those that the libraries do not know.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

/// Sets an option whose value is an `int`.
pub(crate) fn set_int(
    fd: impl AsFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    set_bytes(fd, level, name, &value.to_ne_bytes())
}

/// Sets the size of a socket's buffer (bytes): with CAP_NET_ADMIN beyond the system's limit (`force`), else
/// up to it (`plain`).
pub(crate) fn set_buffer(fd: impl AsFd, force: i32, plain: i32, bytes: usize) -> io::Result<()> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    let set = |name| set_int(fd.as_fd(), libc::SOL_SOCKET, name, bytes);
    set(force).or_else(|_| set(plain))
}

/// Sets an option whose value is `value`, in the kernel's layout.
pub(crate) fn set_bytes(
    fd: impl AsFd,
    level: libc::c_int,
    name: libc::c_int,
    value: &[u8],
) -> io::Result<()> {
    let length = value.len() as libc::socklen_t;
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: `value` outlives the call and has `length` bytes.
    check(unsafe { libc::setsockopt(fd, level, name, value.as_ptr().cast(), length) })
}

/// Reads an option into `value` and returns the part that the kernel wrote. For some options `value` also
/// holds input of the kernel.
pub(crate) fn read_bytes(
    fd: impl AsFd,
    level: libc::c_int,
    name: libc::c_int,
    value: &mut [u8],
) -> io::Result<&[u8]> {
    let mut length = libc::socklen_t::try_from(value.len()).unwrap_or(libc::socklen_t::MAX);
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: `value` and `length` outlive the call, and `value` has at least `length` bytes of room.
    check(unsafe { libc::getsockopt(fd, level, name, value.as_mut_ptr().cast(), &raw mut length) })?;
    let length = value.len().min(length as usize);
    Ok(&value[..length])
}

/// The 32-bit number in native byte order at offset `at` (bytes); `None` if `bytes` is too short.
pub(crate) fn number(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes)
}

/// Turns the return value of a system call into a result: a negative value means an error in `errno`.
pub(crate) fn check(code: libc::c_int) -> io::Result<()> {
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
