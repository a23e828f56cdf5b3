//! A TCP/IP stack whose packets go into a tunnel.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind},
    net::SocketAddr,
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use mpvpn::Network;
use smoltcp::{
    iface::{Config, Interface, SocketHandle, SocketSet},
    phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken},
    socket::{AnySocket, tcp, udp},
    time::Instant as StackInstant,
    wire::{HardwareAddress, IpAddress, IpCidr},
};

/// Bytes that a TCP connection may have on its way.
const WINDOW: usize = 1 << 20;
/// Without news of the far end, this is how long anything may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Takes packets.
pub(crate) type Sink = Box<dyn Fn(&[u8])>;

/// How packets are handed over.
pub(crate) struct Port {
    /// To the tunnel. What finds no room is lost, as on any link.
    pub(crate) send: Sink,
    /// From the tunnel.
    pub(crate) packets: Receiver<Vec<u8>>,
}

impl Port {
    /// The next packet of the tunnel, if there is one within `wait`.
    fn receive(&self, wait: Duration) -> io::Result<Option<Vec<u8>>> {
        match self.packets.recv_timeout(wait) {
            Ok(packet) => Ok(Some(packet)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// The stack with its sockets.
pub(crate) struct Stack {
    wire: Wire,
    interface: Interface,
    sockets: SocketSet<'static>,
    started: Instant,
}

impl Stack {
    /// One with the addresses of the tunnel, into which everything goes.
    pub(crate) fn new(port: Port, network: &Network) -> Self {
        let mut wire = Wire { port, mtu: network.mtu as usize, received: VecDeque::new() };
        let mut interface = Interface::new(Config::new(HardwareAddress::Ip), &mut wire, StackInstant::ZERO);
        for net in &network.addresses {
            let address = IpAddress::from(net.addr());
            interface.update_ip_addrs(|all| {
                // smoltcp has room for a few.
                let _ = all.push(IpCidr::new(address, net.prefix_len()));
            });
            // A gateway that nobody has to find, as there is one way only.
            let routes = interface.routes_mut();
            let _ = match address {
                IpAddress::Ipv4(ip) => routes.add_default_ipv4_route(ip).map(drop),
                IpAddress::Ipv6(ip) => routes.add_default_ipv6_route(ip).map(drop),
            };
        }
        Self { wire, interface, sockets: SocketSet::new(Vec::new()), started: Instant::now() }
    }

    /// A socket for datagrams.
    pub(crate) fn udp(&mut self) -> io::Result<SocketHandle> {
        let buffer = || udp::PacketBuffer::new(vec![udp::PacketMetadata::EMPTY; 8], vec![0; 8192]);
        let mut socket = udp::Socket::new(buffer(), buffer());
        socket.bind(49_152).map_err(|_| io::Error::from(ErrorKind::AddrInUse))?;
        Ok(self.sockets.add(socket))
    }

    /// A TCP connection, which is there soon.
    pub(crate) fn connect(&mut self, to: SocketAddr) -> io::Result<SocketHandle> {
        let buffer = || tcp::SocketBuffer::new(vec![0; WINDOW]);
        let mut socket = tcp::Socket::new(buffer(), buffer());
        socket
            .connect(self.interface.context(), to, 49_153)
            .map_err(|error| io::Error::other(error.to_string()))?;
        Ok(self.sockets.add(socket))
    }

    /// A socket.
    pub(crate) fn socket<S: AnySocket<'static>>(&mut self, handle: SocketHandle) -> &mut S {
        self.sockets.get_mut(handle)
    }

    /// Moves packets until `done` has an answer.
    pub(crate) fn until<T>(
        &mut self,
        mut done: impl FnMut(&mut Self) -> io::Result<Option<T>>,
    ) -> io::Result<T> {
        let mut heard = Instant::now();
        loop {
            let now = StackInstant::from_micros(self.started.elapsed().as_micros() as i64);
            self.interface.poll(now, &mut self.wire, &mut self.sockets);
            if let Some(answer) = done(self)? {
                return Ok(answer);
            }
            // Packets that the sockets send in reply.
            self.interface.poll(now, &mut self.wire, &mut self.sockets);
            let next = self.interface.poll_delay(now, &self.sockets);
            let wait = next.map_or(TIMEOUT, |delay| Duration::from_micros(delay.total_micros()));
            let mut wait = wait.min(Duration::from_secs(1));
            while let Some(packet) = self.wire.port.receive(wait)? {
                self.wire.received.push_back(packet);
                (heard, wait) = (Instant::now(), Duration::ZERO);
                if self.wire.received.len() >= 64 {
                    break;
                }
            }
            if heard.elapsed() > TIMEOUT {
                return Err(ErrorKind::TimedOut.into());
            }
        }
    }
}

/// The tunnel as smoltcp sees it.
struct Wire {
    port: Port,
    mtu: usize,
    received: VecDeque<Vec<u8>>,
}

struct Received(Vec<u8>);

struct Sending<'a>(&'a Port);

impl RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, take: F) -> R {
        take(&self.0)
    }
}

impl TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, fill: F) -> R {
        let mut packet = vec![0; length];
        let result = fill(&mut packet);
        (self.0.send)(&packet);
        result
    }
}

impl Device for Wire {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _: StackInstant) -> Option<(Received, Sending<'_>)> {
        let packet = self.received.pop_front()?;
        Some((Received(packet), Sending(&self.port)))
    }

    fn transmit(&mut self, _: StackInstant) -> Option<Sending<'_>> {
        Some(Sending(&self.port))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = self.mtu;
        capabilities
    }
}
