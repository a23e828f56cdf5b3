//! A forwarding resolver (a DNS proxy, RFC 5625): it answers hosts by asking other resolvers.
//!
//! In: queries by UDP and TCP at the addresses that it listens at; [`Upstreams`]; a [`Zone`] that it answers
//! itself. Out: the responses of the upstream resolvers, as they came. Always holds: a query that is not
//! understood gets no answer or FORMERR, never a crash; a response counts only from the resolver that was
//! asked, with the ID and the question that were sent, each query by a socket and source port of its own (RFC
//! 5452); the number of queries that wait and of connections is bounded, and no user keeps others from being
//! answered.

mod marked;
pub(crate) mod message;
mod reverse;
mod zone;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use mpvpn_http::limiter::Limiter;
use mpvpn_os::{TcpOptions, TcpSocket, UdpOptions};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, join},
    net::{TcpListener, TcpStream, UdpSocket},
    time::timeout,
};

pub use marked::{addresses, marked_resolver};
pub(crate) use reverse::name_in_tunnel;
pub use zone::{Zone, part_below};

/// Says how a name is looked up now. The name is in lower case, without a dot at its end.
pub type Upstreams = Arc<dyn Fn(&str) -> Lookup + Send + Sync>;

/// How a name is looked up.
#[derive(Default)]
pub struct Lookup {
    /// The resolvers to ask, the best first.
    pub resolvers: Vec<SocketAddr>,
    /// The firewall mark of the packets to them.
    pub mark: Option<u32>,
    /// Takes the response before the host gets it.
    pub before_answer: Option<BeforeAnswer>,
}

/// Takes a response, and says whether the host may have it. It may wait.
pub type BeforeAnswer = Box<dyn FnOnce(&[u8]) -> bool + Send>;

impl From<Vec<SocketAddr>> for Lookup {
    fn from(resolvers: Vec<SocketAddr>) -> Self {
        Self { resolvers, ..Self::default() }
    }
}

/// The user to whom a host belongs, so that nobody has more of the resolver by having more addresses.
pub type UserOfHost = Arc<dyn Fn(IpAddr) -> String + Send + Sync>;

/// The port of DNS (RFC 1035, section 4.2).
pub const PORT: u16 = 53;
/// Queries by UDP that wait for an upstream resolver, of all users. Each holds a socket and a buffer of some
/// 64 KiB, so 32 MiB at most; fewer would refuse names when many clients start at once.
const MAX_QUERIES: usize = 512;
/// Connections by TCP, of all users. A resolver falls back to TCP where an answer is too long for UDP.
const MAX_CONNECTIONS: usize = 128;
/// How long one upstream resolver is waited for before the next is asked. Resolvers that have to ask others
/// need up to a second; programs ask again after 5 s (resolv.conf(5), `timeout`).
const UPSTREAM_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a TCP connection may send nothing (RFC 7766, section 6.2.3: some seconds).
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest message (RFC 1035, section 4.2.2: two bytes of length).
const MAX_MESSAGE: usize = 65535;

/// A resolver that listens.
pub struct Forwarder {
    udp: Vec<std::net::UdpSocket>,
    tcp: Vec<std::net::TcpListener>,
    shared: Shared,
}

/// State shared by all tasks of a forwarder.
#[derive(Clone)]
struct Shared {
    upstreams: Upstreams,
    /// Names that it answers itself.
    zone: Option<Arc<dyn Zone>>,
    /// Hosts outside of these networks get no answer: a resolver for everybody would serve attacks (RFC
    /// 5358).
    networks: Arc<[IpNet]>,
    user_of: UserOfHost,
    queries: Arc<Limiter<String>>,
    connections: Arc<Limiter<String>>,
}

impl Shared {
    fn serves(&self, host: IpAddr) -> bool {
        self.networks.iter().any(|network| network.contains(&host.to_canonical()))
    }

    /// The response to a query for a name that the resolver answers itself.
    fn own_answer(&self, query: &[u8], asker: IpAddr) -> Option<Vec<u8>> {
        zone::answer(query, asker.to_canonical(), self.zone.as_deref()?)
    }
}

impl Forwarder {
    /// Listens at port `port` of an address, for the hosts of these networks.
    ///
    /// # Errors
    /// If an address does not exist here, or the port is taken.
    pub fn bind(
        addresses: &[IpAddr],
        port: u16,
        networks: &[IpNet],
        user_of: UserOfHost,
        upstreams: Upstreams,
    ) -> io::Result<Self> {
        let (mut udp, mut tcp) = (Vec::new(), Vec::new());
        for address in addresses {
            let socket = std::net::UdpSocket::bind((*address, port))?;
            socket.set_nonblocking(true)?;
            let listener = std::net::TcpListener::bind((*address, socket.local_addr()?.port()))?;
            listener.set_nonblocking(true)?;
            udp.push(socket);
            tcp.push(listener);
        }
        let networks = networks.iter().map(IpNet::trunc).collect();
        let [queries, connections] = [MAX_QUERIES, MAX_CONNECTIONS].map(|most| Limiter::new(most, most));
        let zone = None;
        Ok(Self { udp, tcp, shared: Shared { upstreams, zone, networks, user_of, queries, connections } })
    }

    /// Answers the names of a domain itself.
    #[must_use]
    pub fn with_zone(mut self, zone: Arc<dyn Zone>) -> Self {
        self.shared.zone = Some(zone);
        self
    }

    /// Answers until it is dropped.
    pub async fn serve(self) {
        let mut tasks = tokio::task::JoinSet::new();
        for socket in self.udp {
            match UdpSocket::from_std(socket) {
                Ok(socket) => drop(tasks.spawn(serve_udp(Arc::new(socket), self.shared.clone()))),
                Err(error) => tracing::warn!(%error, "the resolver does not answer by UDP"),
            }
        }
        for listener in self.tcp {
            match TcpListener::from_std(listener) {
                Ok(listener) => drop(tasks.spawn(serve_tcp(listener, self.shared.clone()))),
                Err(error) => tracing::warn!(%error, "the resolver does not answer by TCP"),
            }
        }
        while tasks.join_next().await.is_some() {}
    }
}

async fn serve_udp(socket: Arc<UdpSocket>, shared: Shared) {
    let mut buffer = vec![0; MAX_MESSAGE];
    loop {
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                // An ICMP error of an earlier response, or a device that is gone for a moment.
                tracing::debug!(%error, "no query can be received");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        if !shared.serves(from.ip()) {
            continue;
        }
        let query = &buffer[..length];
        let Some(name) = message::question(query) else {
            if let Some(refusal) = message::format_error(query) {
                let _ = socket.try_send_to(&refusal, from);
            }
            continue;
        };
        if let Some(response) = shared.own_answer(query, from.ip()) {
            let _ = socket.try_send_to(&response, from);
            continue;
        }
        let (query, socket, upstreams) = (query.to_vec(), Arc::clone(&socket), Arc::clone(&shared.upstreams));
        // A user that asks more than its share is not answered, and asks again later.
        shared.queries.spawn((shared.user_of)(from.ip()), async move {
            let lookup = upstreams(&name);
            let path = PathOut { mark: lookup.mark, device: None };
            let exchange = |resolver| exchange_by_udp(resolver, &query, path);
            let response =
                checked(first_response(&lookup.resolvers, exchange).await, lookup.before_answer).await;
            let response = response.or_else(|| message::server_failure(&query));
            if let Some(response) = response {
                let _ = socket.send_to(&response, from).await;
            }
        });
    }
}

async fn serve_tcp(listener: TcpListener, shared: Shared) {
    loop {
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::debug!(%error, "no connection can be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        if !shared.serves(from.ip()) {
            continue;
        }
        let own = shared.clone();
        shared.connections.spawn((shared.user_of)(from.ip()), async move {
            let own_answer = |query: &[u8]| own.own_answer(query, from.ip());
            let _ = serve_connection(stream, own_answer, &own.upstreams, exchange_by_tcp).await;
        });
    }
}

/// Answers the queries of a host on one connection; `own_answer` is the response to one that no other
/// resolver is asked for, `exchange` asks a resolver.
async fn serve_connection<F: Future<Output = io::Result<Vec<u8>>>>(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    own_answer: impl Fn(&[u8]) -> Option<Vec<u8>>,
    upstreams: &Upstreams,
    exchange: impl Fn(SocketAddr, Option<u32>, Arc<[u8]>) -> F,
) -> io::Result<()> {
    loop {
        let query: Arc<[u8]> = timeout(IDLE_TIMEOUT, read_message(&mut stream)).await??.into();
        let Some(name) = message::question(&query) else { return Ok(()) };
        let response = match own_answer(&query) {
            Some(response) => Some(response),
            None => {
                let Lookup { resolvers, mark, before_answer } = upstreams(&name);
                let exchange = |resolver| exchange(resolver, mark, Arc::clone(&query));
                checked(first_response(&resolvers, exchange).await, before_answer).await
            }
        };
        let Some(response) = response.or_else(|| message::server_failure(&query)) else { return Ok(()) };
        timeout(IDLE_TIMEOUT, write_message(&mut stream, &response)).await??;
    }
}

/// The answers on a connection with these bytes; the resolver that is asked sends `answer` each time.
pub(crate) async fn answer_bytes(sent: &[u8], answer: &[u8]) -> Vec<u8> {
    let resolver: SocketAddr = (Ipv4Addr::LOCALHOST, PORT).into();
    let upstreams: Upstreams = Arc::new(move |_| vec![resolver].into());
    let mut got = Vec::new();
    let exchange =
        |_, _, query: Arc<[u8]>| async move { exchange_on(&mut join(answer, Vec::new()), &query).await };
    // It ends with an error where the bytes do.
    let _ = serve_connection(join(sent, &mut got), |_| None, &upstreams, exchange).await;
    got
}

/// The response of the first resolver that answers; `exchange` asks one.
async fn first_response<F: Future<Output = io::Result<Vec<u8>>>>(
    resolvers: &[SocketAddr],
    exchange: impl Fn(SocketAddr) -> F,
) -> Option<Vec<u8>> {
    for resolver in resolvers {
        match timeout(UPSTREAM_TIMEOUT, exchange(*resolver)).await {
            Ok(Ok(response)) => return Some(response),
            Ok(Err(error)) => tracing::debug!(%resolver, %error, "a resolver cannot be asked"),
            Err(_) => tracing::debug!(%resolver, "a resolver does not answer in time"),
        }
    }
    None
}

/// The response, if the host may have it.
async fn checked(response: Option<Vec<u8>>, before_answer: Option<BeforeAnswer>) -> Option<Vec<u8>> {
    let response = response?;
    let Some(check) = before_answer else { return Some(response) };
    // It may wait.
    let checked = tokio::task::spawn_blocking(move || check(&response).then_some(response));
    checked.await.ok().flatten()
}

/// Where packets to a resolver leave.
#[derive(Clone, Copy, Default)]
struct PathOut<'a> {
    /// Their firewall mark.
    mark: Option<u32>,
    /// The network device.
    device: Option<&'a str>,
}

async fn exchange_by_udp(resolver: SocketAddr, query: &[u8], path: PathOut<'_>) -> io::Result<Vec<u8>> {
    let any = if resolver.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let options = UdpOptions { mark: path.mark, ..UdpOptions::new(SocketAddr::new(any, 0)) };
    let socket = mpvpn_os::UdpSocket::bind(&options).map_err(io::Error::other)?.into_blocking()?;
    socket.set_nonblocking(true)?;
    let socket = UdpSocket::from_std(socket)?;
    if let Some(device) = path.device {
        socket.bind_device(Some(device.as_bytes()))?;
    }
    socket.connect(resolver).await?;
    socket.send(query).await?;
    let mut buffer = vec![0; MAX_MESSAGE];
    loop {
        let length = socket.recv(&mut buffer).await?;
        if message::answers(&buffer[..length], query) {
            buffer.truncate(length);
            buffer.shrink_to_fit();
            return Ok(buffer);
        }
    }
}

async fn exchange_by_tcp(resolver: SocketAddr, mark: Option<u32>, query: Arc<[u8]>) -> io::Result<Vec<u8>> {
    let mut stream = match mark {
        None => TcpStream::connect(resolver).await?,
        Some(_) => {
            let options = TcpOptions { mark, ..TcpOptions::default() };
            let connect = move || TcpSocket::connect_within(resolver, &options, UPSTREAM_TIMEOUT);
            let stream = tokio::task::spawn_blocking(connect).await??;
            stream.set_nonblocking(true)?;
            TcpStream::from_std(stream)?
        }
    };
    exchange_on(&mut stream, &query).await
}

/// Asks the resolver at the other end of a connection.
async fn exchange_on(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    query: &[u8],
) -> io::Result<Vec<u8>> {
    write_message(stream, query).await?;
    let response = read_message(stream).await?;
    let is_answer = message::answers(&response, query);
    is_answer.then_some(response).ok_or_else(|| io::Error::other("it answers something else"))
}

async fn read_message(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut message = vec![0; length.into()];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

async fn write_message(stream: &mut (impl AsyncWrite + Unpin), message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(|_| io::ErrorKind::InvalidData)?;
    stream.write_all(&[&length.to_be_bytes(), message].concat()).await
}

#[cfg(test)]
mod tests;
