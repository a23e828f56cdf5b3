//! Several sockets on one port, each for the packets of one thread.
//!
//! In: an address and how many sockets it shall have. Out: the sockets, in order. Always holds: a
//! datagram goes to the socket whose number is the low four bits of the first byte of its QUIC
//! destination connection ID, modulo the number of sockets, wherever it comes from; the kernel's own
//! spreading by addresses would tear a connection with several paths apart.

use std::{io, os::fd::AsRawFd};

use super::{Reuse, UdpOptions, UdpSocket, check, set_int};
use crate::error::OsError;

/// Instructions of the program.
const LENGTH: usize = 8;

/// `BPF_LD | BPF_B | BPF_ABS`: the accumulator becomes the byte at `k`.
const LOAD: u16 = 0x30;
/// `BPF_JMP | BPF_JSET | BPF_K`: skips `jt` instructions if a bit of `k` is set, else `jf`.
const IF_SET: u16 = 0x45;
/// `BPF_JMP | BPF_JA`: skips `k` instructions.
const SKIP: u16 = 0x05;
/// `BPF_ALU | BPF_AND | BPF_K`.
const AND: u16 = 0x54;
/// `BPF_ALU | BPF_MOD | BPF_K`.
const MOD: u16 = 0x94;
/// `BPF_RET | BPF_A`: the accumulator is the answer.
const RETURN: u16 = 0x16;

/// Binds `count` sockets (at least one) to `options.local`, and steers by connection ID among them.
///
/// # Errors
/// If the address is in use, be it by a process that shares its port.
pub fn bind_reuseport_group(options: &UdpOptions, count: u8) -> Result<Vec<UdpSocket>, OsError> {
    if count <= 1 {
        return Ok(vec![UdpSocket::bind(options)?]);
    }
    let failed = |source| OsError::Bind { local: options.local, device: options.device.clone(), source };
    // Alone first: a port that is shared may be shared with another process, which would then get
    // half of our packets without anybody noticing. It is shared from then on rather than bound anew: a
    // child that another thread is just starting may hold the socket open beyond its close.
    let first = UdpSocket::bind(&UdpOptions { reuse: Reuse::No, ..options.clone() })?;
    let local = first.local_addr().map_err(failed)?;
    set_int(&first.fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1).map_err(failed)?;
    let options = UdpOptions { local, reuse: Reuse::Port, ..options.clone() };
    let mut sockets = vec![first];
    for _ in 1..count {
        let socket = UdpSocket::bind(&options)?;
        if sockets.len() == 1 {
            // The program belongs to the whole group, and without it the kernel spreads by addresses. A
            // group begins with its second socket.
            attach(&socket, count).map_err(|error| OsError::kernel("steer datagrams at", local, error))?;
        }
        sockets.push(socket);
    }
    Ok(sockets)
}

fn attach(socket: &UdpSocket, count: u8) -> io::Result<()> {
    let mut program = program(count);
    let filter = libc::sock_fprog { len: LENGTH as u16, filter: program.as_mut_ptr() };
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

/// Byte 0 is the first of the UDP payload. A load beyond the end answers 0, so what is too short goes to
/// the first socket.
fn program(count: u8) -> [libc::sock_filter; LENGTH] {
    let line = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    [
        line(LOAD, 0, 0, 0),
        // In a long header version and length of the ID come before it (RFC 9000 §17.2).
        line(IF_SET, 2, 0, 0x80),
        line(LOAD, 0, 0, 1),
        line(SKIP, 0, 0, 1),
        line(LOAD, 0, 0, 6),
        line(AND, 0, 0, 0x0f),
        line(MOD, 0, 0, u32::from(count.max(1))),
        line(RETURN, 0, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel does with the program.
    fn run(program: &[libc::sock_filter], payload: &[u8]) -> u32 {
        let (mut at, mut accumulator) = (0, 0);
        loop {
            let line = &program[at];
            at += 1;
            match line.code {
                LOAD => match payload.get(line.k as usize) {
                    Some(byte) => accumulator = u32::from(*byte),
                    None => return 0,
                },
                IF_SET => at += usize::from(if accumulator & line.k != 0 { line.jt } else { line.jf }),
                SKIP => at += line.k as usize,
                AND => accumulator &= line.k,
                MOD => accumulator %= line.k,
                RETURN => return accumulator,
                code => panic!("instruction {code:#x}"),
            }
        }
    }

    #[test]
    fn short_and_long_headers_are_steered_by_the_first_byte_of_the_id() {
        for count in 1..=16 {
            let program = program(count);
            for first in 0..=u8::MAX {
                let wanted = u32::from((first & 0x0f) % count);
                let short = [0x40, first, 0xee, 0xee, 0xee, 0xee, 0xee, 0xee, 0xee];
                assert_eq!(run(&program, &short), wanted, "{first:#x} of {count}, short header");
                let long = [0xc0, 0, 0, 0, 1, 8, first, 0xee, 0xee];
                assert_eq!(run(&program, &long), wanted, "{first:#x} of {count}, long header");
            }
        }
    }

    #[test]
    fn what_is_too_short_goes_to_the_first_socket() {
        for payload in [&[][..], &[0x40], &[0xc0, 0, 0, 0, 1, 8]] {
            assert_eq!(run(&program(16), payload), 0, "{payload:?}");
        }
    }
}
