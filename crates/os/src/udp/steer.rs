//! Several sockets on one port (SO_REUSEPORT), one for each shard, and a BPF program that steers datagrams to
//! them.
//!
//! In: an address and a number of sockets. Out: the sockets, in order. Always holds: a datagram goes to the
//! socket whose index is the low four bits of the first byte of its QUIC destination connection ID, modulo
//! the number of sockets, whatever its source. The kernel's own choice, by a hash of the addresses, would
//! spread a connection with several paths over several sockets.

use std::{io, os::fd::AsRawFd};

use super::{PortReuse, UdpOptions, UdpSocket, check, set_int};
use crate::error::OsError;

/// Number of instructions of the program.
const PROGRAM_LEN: usize = 8;

/// `BPF_LD | BPF_B | BPF_ABS`: the accumulator becomes the byte at `k`.
const BPF_LOAD_BYTE: u16 = 0x30;
/// `BPF_JMP | BPF_JSET | BPF_K`: skips `jt` instructions if a bit of `k` is set, else `jf`.
const BPF_JUMP_IF_BITS_SET: u16 = 0x45;
/// `BPF_JMP | BPF_JA`: skips `k` instructions.
const BPF_JUMP: u16 = 0x05;
/// `BPF_ALU | BPF_AND | BPF_K`: the accumulator becomes its bitwise AND with `k`.
const BPF_AND: u16 = 0x54;
/// `BPF_ALU | BPF_MOD | BPF_K`: the accumulator becomes its remainder modulo `k`.
const BPF_MODULO: u16 = 0x94;
/// `BPF_RET | BPF_A`: returns the accumulator, the index of the socket.
const BPF_RETURN_A: u16 = 0x16;

/// Binds `count` sockets (at least one) to `options.local`, and steers datagrams to them by connection ID.
///
/// # Errors
/// If the address is in use, even by a process that shares its port.
pub fn bind_reuseport_group(options: &UdpOptions, count: u8) -> Result<Vec<UdpSocket>, OsError> {
    if count <= 1 {
        return Ok(vec![UdpSocket::bind(options)?]);
    }
    let failed = |source| OsError::Bind { local: options.local, device: options.device.clone(), source };
    // The first socket is bound without SO_REUSEPORT, because otherwise another process that shares the port
    // would silently get a part of the packets. The option is set on this socket afterwards instead of
    // binding another one: a child process that another thread is just starting may keep a closed socket
    // open.
    let first = UdpSocket::bind(&UdpOptions { reuse: PortReuse::Exclusive, ..options.clone() })?;
    let local = first.local_addr().map_err(failed)?;
    set_int(&first.fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1).map_err(failed)?;
    let options = UdpOptions { local, reuse: PortReuse::Shared, ..options.clone() };
    let mut sockets = vec![first];
    for _ in 1..count {
        let socket = UdpSocket::bind(&options)?;
        if sockets.len() == 1 {
            // The program belongs to the whole group of sockets, which exists from the second socket on.
            attach(&socket, count).map_err(|error| OsError::kernel("steer datagrams at", local, error))?;
        }
        sockets.push(socket);
    }
    Ok(sockets)
}

fn attach(socket: &UdpSocket, count: u8) -> io::Result<()> {
    let mut program = program(count);
    let filter = libc::sock_fprog { len: PROGRAM_LEN as u16, filter: program.as_mut_ptr() };
    let size = size_of::<libc::sock_fprog>() as libc::socklen_t;
    // SAFETY: `filter` and the program it points to outlive the call, and `size` is its size.
    check(unsafe {
        libc::setsockopt(
            socket.fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const filter).cast(),
            size,
        )
    })
}

/// The BPF program. Offset 0 is the first byte of the UDP payload. A load beyond the end makes the program
/// return 0, so a datagram that is too short goes to the first socket.
fn program(count: u8) -> [libc::sock_filter; PROGRAM_LEN] {
    let instruction = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    [
        instruction(BPF_LOAD_BYTE, 0, 0, 0),
        // In a long header the version and the length of the ID precede the ID (RFC 9000 §17.2).
        instruction(BPF_JUMP_IF_BITS_SET, 2, 0, 0x80),
        instruction(BPF_LOAD_BYTE, 0, 0, 1),
        instruction(BPF_JUMP, 0, 0, 1),
        instruction(BPF_LOAD_BYTE, 0, 0, 6),
        instruction(BPF_AND, 0, 0, 0x0f),
        instruction(BPF_MODULO, 0, 0, u32::from(count.max(1))),
        instruction(BPF_RETURN_A, 0, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the program as the kernel does.
    fn run(program: &[libc::sock_filter], payload: &[u8]) -> u32 {
        let (mut at, mut accumulator) = (0, 0);
        loop {
            let instruction = &program[at];
            at += 1;
            match instruction.code {
                BPF_LOAD_BYTE => match payload.get(instruction.k as usize) {
                    Some(byte) => accumulator = u32::from(*byte),
                    None => return 0,
                },
                BPF_JUMP_IF_BITS_SET => {
                    at += usize::from(if accumulator & instruction.k != 0 {
                        instruction.jt
                    } else {
                        instruction.jf
                    })
                }
                BPF_JUMP => at += instruction.k as usize,
                BPF_AND => accumulator &= instruction.k,
                BPF_MODULO => accumulator %= instruction.k,
                BPF_RETURN_A => return accumulator,
                code => panic!("instruction {code:#x}"),
            }
        }
    }

    #[test]
    fn short_and_long_headers_are_steered_by_the_first_byte_of_the_id() {
        for count in 1..=16 {
            let program = program(count);
            for first in 0..=u8::MAX {
                let expected = u32::from((first & 0x0f) % count);
                let short = [0x40, first, 0xee, 0xee, 0xee, 0xee, 0xee, 0xee, 0xee];
                assert_eq!(run(&program, &short), expected, "{first:#x} of {count}, short header");
                let long = [0xc0, 0, 0, 0, 1, 8, first, 0xee, 0xee];
                assert_eq!(run(&program, &long), expected, "{first:#x} of {count}, long header");
            }
        }
    }

    #[test]
    fn a_datagram_that_is_too_short_goes_to_the_first_socket() {
        for payload in [&[][..], &[0x40], &[0xc0, 0, 0, 0, 1, 8]] {
            assert_eq!(run(&program(16), payload), 0, "{payload:?}");
        }
    }
}
