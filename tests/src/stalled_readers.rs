//! TCP connections whose readers stop reading while their writers continue.
//!
//! In: a testbed with a route from the client to `address`, the number of flows, a duration. Out: the number
//! of bytes that the writers could send. Unread data must not grow the memory of a tunnel in between.

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use crate::testbed::{Direction, Host, Testbed};

/// Bytes that a reader reads before it stops: beyond the first window, so that the connection is at full
/// rate.
const READ_BEFORE_STALL_BYTES: usize = 256 << 10;
/// Size of one read or write call, bytes.
const WRITE_BYTES: usize = 64 << 10;
/// Socket timeout: how often a blocked reader or writer checks the deadline.
const DEADLINE_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Opens `flows` connections from the client to `address` and keeps them for `time` with readers that have
/// stopped. With [`Direction::Both`] every second connection sends up, else all send down. Returns the bytes
/// that the writers sent.
pub fn run_stalled_readers(
    testbed: &Testbed,
    address: IpAddr,
    flows: usize,
    directions: Direction,
    time: Duration,
) -> Result<u64, String> {
    let listener = testbed
        .in_namespace(Host::Server, || TcpListener::bind((address, 0)))
        .map_err(|error| format!("no listener at {address}: {error}"))?;
    let target = listener.local_addr().map_err(|error| error.to_string())?;
    let deadline = Instant::now() + time;
    let mut written = 0;
    thread::scope(|scope| {
        let mut tasks = Vec::new();
        for number in 0..flows {
            let (near, far) = connect(testbed, &listener, target)?;
            let is_up = directions == Direction::Both && number % 2 == 0;
            let (writer, reader) = if is_up { (near, far) } else { (far, near) };
            tasks.push(scope.spawn(move || write_until(writer, deadline)));
            tasks.push(scope.spawn(move || stop_reading(reader, deadline)));
        }
        for task in tasks {
            let result = task.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            written += result.map_err(|error| format!("a stalled flow broke: {error}"))?;
        }
        Ok(written)
    })
}

fn connect(
    testbed: &Testbed,
    listener: &TcpListener,
    target: SocketAddr,
) -> Result<(TcpStream, TcpStream), String> {
    let limit = Duration::from_secs(3);
    let near = testbed
        .in_namespace(Host::Client, || TcpStream::connect_timeout(&target, limit))
        .map_err(|error| format!("cannot connect to {target}: {error}"))?;
    let (far, _) = listener.accept().map_err(|error| format!("cannot accept at {target}: {error}"))?;
    Ok((near, far))
}

/// Writes until the deadline, and returns the number of bytes.
fn write_until(mut stream: TcpStream, deadline: Instant) -> std::io::Result<u64> {
    stream.set_write_timeout(Some(DEADLINE_POLL_INTERVAL))?;
    let chunk = vec![0x55; WRITE_BYTES];
    let mut written = 0;
    while Instant::now() < deadline {
        match stream.write(&chunk) {
            Ok(count) => written += count as u64,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(written)
}

fn stop_reading(mut stream: TcpStream, deadline: Instant) -> std::io::Result<u64> {
    stream.set_read_timeout(Some(DEADLINE_POLL_INTERVAL))?;
    let (mut taken, mut buffer) = (0, vec![0; WRITE_BYTES]);
    while taken < READ_BEFORE_STALL_BYTES && Instant::now() < deadline {
        match stream.read(&mut buffer) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => taken += count,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
    }
    // Closing earlier would be an error for the writer, which checks the deadline every
    // DEADLINE_POLL_INTERVAL.
    thread::sleep(deadline.saturating_duration_since(Instant::now()) + 2 * DEADLINE_POLL_INTERVAL);
    Ok(0)
}
