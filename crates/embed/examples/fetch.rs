//! A page over HTTPS, fetched through a tunnel by an ordinary user: no TUN device, no route, no privilege.
//! The TCP/IP stack is smoltcp, inside this process, whose packets go into the tunnel.
//!
//! ```sh
//! cargo run --example fetch -- calls client.toml 9.9.9.9:53 https://example.org/ page.pem
//! ```
//!
//! The words: how packets are handed over (`calls` or `descriptor`), the configuration, a name server, which
//! is asked through the tunnel by UDP, the page, and the certificates that its server may have. The page goes
//! to standard output, what happens to standard error.
// An example has a clock, threads and files.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

#[path = "fetch/dns.rs"]
mod dns;
#[path = "fetch/stack.rs"]
mod stack;
#[path = "fetch/web.rs"]
mod web;

use std::{
    error::Error,
    io::{self, Write},
    net::{IpAddr, SocketAddr},
    os::{fd::OwnedFd, unix::net::UnixDatagram},
    process::ExitCode,
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
    time::Duration,
};

use mpvpn::{Builder, Event, Network, Tunnel};
use stack::{Port, Stack};

/// How long the tunnel may take to come up.
const TIMEOUT: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fetch: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [way, configuration, name_server, url, certificates] = words.as_slice() else {
        return Err(
            "usage: fetch calls|descriptor CONFIGURATION NAME-SERVER https://HOST[:PORT]/PATH CERTIFICATES"
                .into(),
        );
    };
    let page = web::Page::parse(url)?;
    let name_server: SocketAddr = name_server.parse()?;

    let Started { tunnel, port, events } = start(way, &std::fs::read_to_string(configuration)?)?;
    let network = wait_for_network(&events)?;
    eprintln!("up: {:?}, MTU {}", network.addresses, network.mtu);

    let mut stack = Stack::new(port, &network);
    let address = dns::resolve(&mut stack, name_server, &page.host)?;
    eprintln!("resolved: {} is {address}", page.host);
    let body = web::fetch(&mut stack, SocketAddr::new(IpAddr::V4(address), page.port), &page, certificates)?;
    eprintln!("fetched: {} bytes", body.len());
    io::stdout().write_all(&body)?;

    eprintln!("status: {}", tunnel.status_json().ok_or("the tunnel has ended")?);
    drop((tunnel, stack));
    eprintln!("stopped");
    Ok(())
}

/// A tunnel, the way of its packets, and what happens to it.
struct Started {
    tunnel: Arc<Tunnel>,
    port: Port,
    events: Receiver<Event>,
}

fn start(way: &str, configuration: &str) -> Result<Started, Box<dyn Error>> {
    let (told, events) = channel();
    let told = move |event| {
        if !matches!(event, Event::Up(_)) {
            eprintln!("event: {event:?}");
        }
        // Nobody may listen any more.
        let _ = told.send(event);
    };
    let builder = Builder::new(configuration)?.protect(|_, link| {
        // On Android: VpnService.protect, and Network.bindSocket of the link's network.
        eprintln!("a socket of {link} is used");
        true
    });
    match way {
        "calls" => {
            let (sender, packets) = channel();
            let take = move |packet: &[u8]| {
                let _ = sender.send(packet.to_vec());
            };
            let tunnel = Arc::new(builder.start_with_calls(take, told)?);
            let pushed = tunnel.clone();
            let send = Box::new(move |packet: &[u8]| _ = pushed.push(packet));
            Ok(Started { tunnel, port: Port { send, packets }, events })
        }
        "descriptor" => {
            let (ours, its) = UnixDatagram::pair()?;
            let tunnel = Arc::new(builder.start_with_descriptor(OwnedFd::from(its), told)?);
            let (sender, packets) = channel();
            let read = ours.try_clone()?;
            std::thread::spawn(move || {
                let mut packet = vec![0; 65_535];
                while let Ok(length) = read.recv(&mut packet) {
                    if sender.send(packet[..length].to_vec()).is_err() {
                        return;
                    }
                }
            });
            let send = Box::new(move |packet: &[u8]| _ = ours.send(packet));
            Ok(Started { tunnel, port: Port { send, packets }, events })
        }
        other => Err(format!("`{other}` is neither calls nor descriptor").into()),
    }
}

fn wait_for_network(events: &Receiver<Event>) -> Result<Network, Box<dyn Error>> {
    loop {
        match events.recv_timeout(TIMEOUT)? {
            Event::Up(network) => return Ok(network),
            Event::Down(_) => {}
            Event::Failed(reason) => return Err(reason.into()),
        }
    }
}
