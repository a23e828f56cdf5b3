//! The connection for orders to the responder of the server.

use std::{
    io::{self, BufRead, BufReader, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use mpvpn_os::{TcpOptions, TcpSocket, UdpOptions, UdpSocket};
use mpvpn_status::measure::{Order, ResponderReport};
use serde::de::DeserializeOwned;

/// How long an answer or a connection is waited for: several retransmissions over a link of 600 ms. Chosen.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Longest answer (bytes): several times the longest one.
const MAX_ANSWER_BYTES: u64 = 4096;
/// Bytes of the receive buffer for datagrams, for times in which a thread gets no processor.
const RECEIVE_BUFFER_BYTES: usize = 4 << 20;

/// Where the responder is, and how it is reached.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) device: String,
    pub(super) address: SocketAddr,
}

impl Target {
    /// A connection through the tunnel.
    pub(super) fn connect(&self) -> io::Result<TcpStream> {
        let options = TcpOptions { device: Some(self.device.clone()), ..TcpOptions::default() };
        TcpSocket::connect_within(self.address, &options, TIMEOUT)
    }

    /// A connection on which an order was sent, for its flow of bytes.
    pub(super) fn flow(&self, order: Order) -> io::Result<TcpStream> {
        let mut stream = self.connect()?;
        stream.write_all(order.line().as_bytes())?;
        Ok(stream)
    }

    /// A socket for datagrams through the tunnel, which waits for `timeout` at a time.
    pub(super) fn datagrams(&self, timeout: Duration) -> io::Result<std::net::UdpSocket> {
        let any: SocketAddr = match self.address {
            SocketAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
            SocketAddr::V6(_) => ([0u16; 8], 0).into(),
        };
        let options = UdpOptions {
            device: Some(self.device.clone()),
            recv_buffer: Some(RECEIVE_BUFFER_BYTES),
            v6only: true,
            ..UdpOptions::new(any)
        };
        let socket = UdpSocket::bind(&options).map_err(io::Error::other)?.into_blocking()?;
        socket.connect(self.address)?;
        socket.set_read_timeout(Some(timeout))?;
        Ok(socket)
    }
}

/// The responder, reached as one kind of traffic: where, and the connection for orders.
#[derive(Debug)]
pub(super) struct Responder {
    pub(super) target: Target,
    pub(super) orders: Orders,
}

impl Responder {
    /// Connects, and waits for a first answer.
    pub(super) fn reach(target: Target) -> io::Result<Self> {
        let orders = Orders::open(&target)?;
        orders.ask::<ResponderReport>(Order::Report)?;
        Ok(Self { target, orders })
    }

    /// Opens the connection for orders anew, as one that is a stream ends with its links.
    pub(super) fn reconnect(&mut self) -> io::Result<()> {
        self.orders = Orders::open(&self.target)?;
        Ok(())
    }
}

/// The connection for orders.
#[derive(Debug)]
pub(super) struct Orders {
    stream: TcpStream,
}

impl Orders {
    /// Connects.
    pub(super) fn open(target: &Target) -> io::Result<Self> {
        let stream = target.connect()?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        Ok(Self { stream })
    }

    /// Gives an order, and waits for its answer.
    pub(super) fn ask<T: DeserializeOwned>(&self, order: Order) -> io::Result<T> {
        let mut stream = &self.stream;
        stream.write_all(order.line().as_bytes())?;
        let mut line = String::new();
        // Nothing follows an answer before the next order.
        BufReader::new(io::Read::take(stream, MAX_ANSWER_BYTES)).read_line(&mut line)?;
        if line.is_empty() {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        Ok(serde_json::from_str(&line)?)
    }
}
