//! The responder: the far end of `mpvpn measure`, at the server's addresses in the tunnel.
//!
//! In: orders by TCP and datagrams, of clients through the tunnel. Out: bytes, datagrams and figures. Always
//! holds: only hosts of the tunnel's networks are served; datagrams are sent only to the address of an open
//! TCP connection, an answer to a datagram is as long as that, and a host gets datagrams for one order at a
//! time; connections and what is kept are bounded, for each host and in all; the load is made by a thread of
//! its own, whose packets pass the server's data plane and the limits of the user like all others.

mod connection;
mod hosts;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    rc::Rc,
    thread::JoinHandle,
    time::Duration,
};

use ipnet::IpNet;
use mpvpn_os::{UdpOptions, UdpSocket};
use mpvpn_status::measure::{Datagram, DatagramKind, RESPONDER_PORT};
use tokio::{
    net::{TcpListener, UdpSocket as TokioUdpSocket},
    sync::oneshot,
    task::{LocalSet, spawn_local},
};

use self::hosts::Hosts;

/// Bytes of the receive buffer for datagrams: 0.1 s of 300 Mbit/s, for times in which the thread gets no
/// processor.
const RECEIVE_BUFFER_BYTES: usize = 4 << 20;
/// How long the listener waits after a failure, mostly a lack of file descriptors.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The running responder. It ends when this is dropped.
pub(super) struct Responder {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The sockets at one address of the server in the tunnel.
struct Sockets {
    tcp: std::net::TcpListener,
    udp: std::net::UdpSocket,
}

impl Responder {
    /// Starts it at the addresses in `tunnel`, which have the prefix lengths of the clients' networks. A port
    /// that is taken is no reason not to serve clients: it is said in the log.
    pub(super) fn start(device: &str, tunnel: &[IpNet]) -> Option<Self> {
        let bound = tunnel.iter().filter_map(|own| match Sockets::bind(device, own.addr()) {
            Ok(sockets) => Some(sockets),
            Err(error) => {
                tracing::warn!(
                    address = %own.addr(), port = RESPONDER_PORT, %error,
                    "cannot answer measurements there: end the program that has the port, and reload"
                );
                None
            }
        });
        let bound: Vec<_> = bound.collect();
        if bound.is_empty() {
            return None;
        }
        let networks = tunnel.iter().map(IpNet::trunc).collect();
        let (stop, stopped) = oneshot::channel();
        let started = std::thread::Builder::new().name("responder".to_owned()).spawn(move || {
            if let Err(error) = serve(bound, networks, stopped) {
                tracing::warn!(%error, "cannot answer measurements");
            }
        });
        match started {
            Ok(thread) => {
                tracing::info!(
                    port = RESPONDER_PORT,
                    "answers `mpvpn measure` at the server's addresses in the tunnel"
                );
                Some(Self { stop: Some(stop), thread: Some(thread) })
            }
            Err(error) => {
                tracing::warn!(%error, "cannot start the thread that answers measurements");
                None
            }
        }
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic there was already logged.
            let _ = thread.join();
        }
    }
}

impl Sockets {
    fn bind(device: &str, address: IpAddr) -> io::Result<Self> {
        let address = SocketAddr::new(address, RESPONDER_PORT);
        // Connections that travel as streams come from this machine, so only datagrams are bound to the
        // device.
        let options = UdpOptions {
            device: Some(device.to_owned()),
            recv_buffer: Some(RECEIVE_BUFFER_BYTES),
            v6only: true,
            ..UdpOptions::new(address)
        };
        let udp = UdpSocket::bind(&options).map_err(io::Error::other)?.into_blocking()?;
        udp.set_nonblocking(true)?;
        let tcp = std::net::TcpListener::bind(address)?;
        tcp.set_nonblocking(true)?;
        Ok(Self { tcp, udp })
    }
}

/// The thread: serves until `stopped`.
fn serve(bound: Vec<Sockets>, networks: Vec<IpNet>, stopped: oneshot::Receiver<()>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let hosts = Rc::new(Hosts::new(networks));
    LocalSet::new().block_on(&runtime, async move {
        for sockets in bound {
            let udp = Rc::new(TokioUdpSocket::from_std(sockets.udp)?);
            spawn_local(answer_datagrams(Rc::clone(&udp), Rc::clone(&hosts)));
            spawn_local(accept(TcpListener::from_std(sockets.tcp)?, udp, Rc::clone(&hosts)));
        }
        // An error means that the sender is gone.
        let _ = stopped.await;
        Ok(())
    })
}

async fn accept(listener: TcpListener, udp: Rc<TokioUdpSocket>, hosts: Rc<Hosts>) {
    loop {
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::debug!(%error, "no connection can be accepted");
                tokio::time::sleep(RETRY_INTERVAL).await;
                continue;
            }
        };
        let Some(place) = Hosts::enter(&hosts, from.ip()) else {
            tracing::debug!(%from, "a measurement is refused: no host of the tunnel, or too many connections");
            continue;
        };
        let udp = Rc::clone(&udp);
        spawn_local(async move {
            if let Err(error) = connection::serve(stream, &udp, &place).await {
                tracing::debug!(%from, %error, "a connection of a measurement has ended");
            }
        });
    }
}

/// Answers echo requests, and counts data.
async fn answer_datagrams(udp: Rc<TokioUdpSocket>, hosts: Rc<Hosts>) {
    let mut buffer = vec![0; 65_536];
    loop {
        let (length, from) = match udp.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                // An ICMP error about an earlier answer.
                tracing::trace!(%error, "no datagram can be received");
                tokio::task::yield_now().await;
                continue;
            }
        };
        let datagram = &mut buffer[..length];
        let Some(header) = Datagram::parse(datagram) else { continue };
        // Without a TCP connection the address is not known to be that of the sender.
        let Some(host) = hosts.get(from.ip()) else { continue };
        match header.kind {
            DatagramKind::EchoRequest => {
                let answer = Datagram { kind: DatagramKind::EchoReply, ..header };
                datagram[..Datagram::HEADER_BYTES].copy_from_slice(&answer.encode());
                // An answer that does not fit into the queue of the socket is a loss, which the client
                // counts.
                let _ = udp.try_send_to(datagram, from);
            }
            DatagramKind::Data => host.count(hosts.now_us(), &header, length),
            DatagramKind::EchoReply => {}
        }
    }
}

#[cfg(test)]
mod tests;
