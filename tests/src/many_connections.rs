//! Many TCP connections: short ones in sequence, each with one request, or many at the same time.
//!
//! In: an address, and a duration or a number of connections. Out: numbers of successful and failed
//! connections, and durations. Both ends are separate processes in the namespaces of a testbed. The server
//! closes short connections, so that no port of the client stays in TIME-WAIT.

use std::{
    io::Read,
    net::{Ipv4Addr, SocketAddr},
    process::{Child, Stdio},
    rc::Rc,
    thread,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    sync::{Barrier, Semaphore},
    task::{JoinSet, LocalSet},
    time,
};

use crate::{
    files::allow_files,
    testbed::{Host, Testbed},
};

/// The argument that makes a binary of this crate run as one end: `PROGRAM visits serve ADDRESS:PORT`,
/// `PROGRAM visits repeat ADDRESS:PORT SECONDS` or `PROGRAM visits hold ADDRESS:PORT COUNT`.
pub const SUBCOMMAND: &str = "visits";

/// Port of the server.
const PORT: u16 = 5203;
/// Length of a request and of its answer, bytes.
const MESSAGE_BYTES: usize = 300;
/// First byte of a request after whose answer the server closes the connection.
const CLOSE_AFTER_ANSWER: u8 = 1;
/// Maximum of concurrent short connections, and of connections that are being opened. Larger: SYNs overflow
/// the listener's backlog. Smaller: the round trip limits the rate.
const MAX_CONCURRENT: usize = 128;
/// Timeout of each step of a connection: longer than TCP's retransmissions of a lost SYN (1, 3, 7 and 15 s).
const STEP_TIMEOUT: Duration = Duration::from_secs(20);
/// How long all connections stay idle before each is used once.
const HOLD_TIME: Duration = Duration::from_secs(2);
/// Limit of open files: above the largest number of connections.
const MAX_OPEN_FILES: u64 = 65_536;

/// Errors of an end are only printed.
type Result<T> = std::result::Result<T, String>;

/// A TCP server on the testbed's server; ended when dropped.
pub struct ConnectionServer(Child);

/// Result of short connections.
#[derive(Clone, Debug, PartialEq)]
pub struct ShortConnections {
    /// Successful connections.
    pub done: u64,
    /// Failed connections.
    pub failed: u64,
    /// Duration of the whole run.
    pub time: Duration,
    /// Error of the first failed connection; may be empty.
    pub first_error: String,
}

/// Result of concurrent connections.
#[derive(Clone, Debug, PartialEq)]
pub struct HeldConnections {
    /// Connections that could not be opened, or were not answered after `HOLD_TIME`.
    pub failed: u64,
    /// Time to open all connections.
    pub opening: Duration,
    /// Time until all requests, sent at once, were answered.
    pub asking: Duration,
    /// Error of the first failed connection; may be empty.
    pub first_error: String,
}

impl ConnectionServer {
    /// Starts a server on every IPv4 address, and waits until it listens.
    pub fn start(testbed: &Testbed) -> Result<Self> {
        let mut command = testbed.command(Host::Server, &program()?);
        command.args([SUBCOMMAND, "serve", &SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT)).to_string()]);
        let connection_server =
            Self(command.spawn().map_err(|error| format!("the server does not start: {error}"))?);
        for _ in 0..250 {
            thread::sleep(Duration::from_millis(20));
            if !testbed.run(Host::Server, &["ss", "-ltnH", &format!("sport = :{PORT}")]).is_empty() {
                return Ok(connection_server);
            }
        }
        Err("the server does not listen after 5 s".to_owned())
    }

    /// Opens short connections from the client to `address`, `MAX_CONCURRENT` at a time, for `seconds`.
    pub fn repeat(&self, testbed: &Testbed, address: &str, seconds: u32) -> Result<ShortConnections> {
        let (numbers, first_error) = self.ask(testbed, "repeat", address, seconds, seconds)?;
        let [done, failed, ms] = numbers[..] else { return Err(format!("no result: {numbers:?}")) };
        Ok(ShortConnections { done, failed, time: Duration::from_millis(ms), first_error })
    }

    /// Opens `count` connections from the client to `address`, holds them, and uses each once.
    pub fn hold(&self, testbed: &Testbed, address: &str, count: u32) -> Result<HeldConnections> {
        let (numbers, first_error) = self.ask(testbed, "hold", address, count, 120)?;
        let [failed, opening, asking] = numbers[..] else { return Err(format!("no result: {numbers:?}")) };
        let (opening, asking) = (Duration::from_millis(opening), Duration::from_millis(asking));
        Ok(HeldConnections { failed, opening, asking, first_error })
    }

    /// Runs the client's end; returns the numbers that it prints, and the text after them.
    fn ask(
        &self,
        testbed: &Testbed,
        what: &str,
        address: &str,
        number: u32,
        seconds: u32,
    ) -> Result<(Vec<u64>, String)> {
        let limit = (seconds + 45).to_string();
        let mut command = testbed.command(Host::Client, "timeout");
        command.args(["-k", "2", &limit, &program()?, SUBCOMMAND, what, &format!("{address}:{PORT}")]);
        command.arg(number.to_string()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("the client does not start: {error}"))?;
        let mut line = String::new();
        if let Some(mut output) = child.stdout.take() {
            output.read_to_string(&mut line).map_err(|error| error.to_string())?;
        }
        let status = child.wait().map_err(|error| error.to_string())?;
        if !status.success() {
            return Err(format!("the client ended with {status}"));
        }
        let (numbers, first_error) = line.trim().split_once(';').ok_or("the client has printed nothing")?;
        let numbers = numbers.split_whitespace().map(str::parse).collect::<std::result::Result<_, _>>();
        Ok((numbers.map_err(|error| format!("{line}: {error}"))?, first_error.trim().to_owned()))
    }
}

impl Drop for ConnectionServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn program() -> Result<String> {
    let program = std::env::current_exe().map_err(|error| format!("this program's own path: {error}"))?;
    program.into_os_string().into_string().map_err(|_| "this program's own path is not UTF-8".to_owned())
}

/// Runs one end: the server forever, the client until its task is done.
pub fn run(args: &[String]) -> Result<()> {
    // If the limit stays too low, opening a connection fails with an error.
    allow_files(MAX_OPEN_FILES)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("{SUBCOMMAND}: no runtime: {error}"))?;
    let address = |text: &str| text.parse().map_err(|error| format!("{text}: {error}"));
    let number = |text: &str| text.parse::<u32>().map_err(|error| format!("{text}: {error}"));
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let tasks = LocalSet::new();
    let result = match args[..] {
        ["serve", at] => tasks.block_on(&runtime, serve(address(at)?)),
        ["repeat", to, seconds] => {
            let time = Duration::from_secs(number(seconds)?.into());
            tasks.block_on(&runtime, repeat(address(to)?, time))
        }
        ["hold", to, count] => tasks.block_on(&runtime, hold(address(to)?, number(count)? as usize)),
        _ => {
            return Err(format!(
                "{SUBCOMMAND} takes serve ADDRESS, repeat ADDRESS SECONDS or hold ADDRESS COUNT"
            ));
        }
    };
    result.map_err(|error| format!("{SUBCOMMAND}: {error}"))
}

async fn serve(at: SocketAddr) -> Result<()> {
    let listen = || {
        let socket = TcpSocket::new_v4()?;
        socket.set_reuseaddr(true)?;
        socket.bind(at)?;
        socket.listen(4096)
    };
    let listener = listen().map_err(|error| format!("{at}: {error}"))?;
    loop {
        let (stream, _) = listener.accept().await.map_err(|error| format!("accept: {error}"))?;
        // The client reports errors of the connection.
        tokio::task::spawn_local(async move { drop(answer(stream).await) });
    }
}

async fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut message = [0; MESSAGE_BYTES];
    loop {
        stream.read_exact(&mut message).await?;
        stream.write_all(&message).await?;
        if message[0] == CLOSE_AFTER_ANSWER {
            return stream.shutdown().await;
        }
    }
}

async fn repeat(to: SocketAddr, length: Duration) -> Result<()> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..MAX_CONCURRENT {
        tasks.spawn_local(async move {
            let (mut done, mut complaints) = (0_u64, Vec::new());
            while began.elapsed() < length {
                match short_connection(to).await {
                    Ok(()) => done += 1,
                    Err(complaint) => complaints.push(complaint),
                }
            }
            (done, complaints)
        });
    }
    let found = tasks.join_all().await;
    let done: u64 = found.iter().map(|(done, _)| done).sum();
    let complaints: Vec<&String> = found.iter().flat_map(|(_, complaints)| complaints).collect();
    let first_error = complaints.first().map_or("", |first_error| first_error.as_str());
    println!("{done} {} {} ; {first_error}", complaints.len(), began.elapsed().as_millis());
    Ok(())
}

/// Opens a connection, sends one request, and waits for the server to close.
async fn short_connection(to: SocketAddr) -> Result<()> {
    let mut stream = connect(to).await?;
    exchange(&mut stream, CLOSE_AFTER_ANSWER).await?;
    let rest = time::timeout(STEP_TIMEOUT, stream.read(&mut [0])).await;
    match rest {
        Ok(Ok(0)) => Ok(()),
        Ok(Ok(_)) => Err("more than an answer".to_owned()),
        Ok(Err(error)) => Err(format!("the end: {error}")),
        Err(_) => Err("no end".to_owned()),
    }
}

async fn hold(to: SocketAddr, count: usize) -> Result<()> {
    let began = Instant::now();
    let (permits, all_open) = (Rc::new(Semaphore::new(MAX_CONCURRENT)), Rc::new(Barrier::new(count + 1)));
    let mut tasks = JoinSet::new();
    for _ in 0..count {
        let (permits, all_open) = (Rc::clone(&permits), Rc::clone(&all_open));
        tasks.spawn_local(async move {
            let made = match permits.acquire().await {
                Ok(_door) => connect(to).await,
                Err(error) => Err(error.to_string()),
            };
            all_open.wait().await;
            time::sleep(HOLD_TIME).await;
            let mut stream = made?;
            exchange(&mut stream, 0).await?;
            // The stream is returned so that no connection closes before all have been answered.
            Ok(stream)
        });
    }
    all_open.wait().await;
    let opening = began.elapsed();
    let found: Vec<Result<TcpStream>> = tasks.join_all().await;
    let asking = began.elapsed().saturating_sub(opening + HOLD_TIME);
    let complaints: Vec<&String> = found.iter().filter_map(|found| found.as_ref().err()).collect();
    let first_error = complaints.first().map_or("", |first_error| first_error.as_str());
    println!("{} {} {} ; {first_error}", complaints.len(), opening.as_millis(), asking.as_millis());
    Ok(())
}

async fn connect(to: SocketAddr) -> Result<TcpStream> {
    let stream = time::timeout(STEP_TIMEOUT, TcpStream::connect(to)).await;
    let stream = stream.map_err(|_| "no connection in time".to_owned())?;
    let stream = stream.map_err(|error| format!("connect: {error}"))?;
    stream.set_nodelay(true).map_err(|error| error.to_string())?;
    Ok(stream)
}

/// Sends a request that begins with `first`, and checks its answer.
async fn exchange(stream: &mut TcpStream, first: u8) -> Result<()> {
    let (mut question, mut answer) = ([0x55; MESSAGE_BYTES], [0; MESSAGE_BYTES]);
    question[0] = first;
    let both = async {
        stream.write_all(&question).await?;
        stream.read_exact(&mut answer).await
    };
    let read = time::timeout(STEP_TIMEOUT, both).await.map_err(|_| "no answer in time".to_owned())?;
    read.map_err(|error| format!("the answer: {error}"))?;
    if answer == question { Ok(()) } else { Err("another answer".to_owned()) }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn connections_are_answered_and_ended() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        LocalSet::new().block_on(&runtime, async {
            tokio::task::spawn_local(serve(free));
            tokio::task::yield_now().await;
            assert_eq!(short_connection(free).await, Ok(()));
            let mut stream = connect(free).await.expect("a connection");
            assert_eq!((exchange(&mut stream, 0).await, exchange(&mut stream, 0).await), (Ok(()), Ok(())));
        });
    }

    #[test]
    fn a_refused_connection_is_a_failure() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        assert!(
            runtime
                .block_on(short_connection(free))
                .is_err_and(|first_error| first_error.starts_with("connect: "))
        );
    }
}
