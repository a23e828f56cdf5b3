//! One QUIC connection of the gateway to its own server: a socket on the loopback, and a task that drives it.
//!
//! In: requests, and the bytes and datagrams of their streams. Out: responses, and bytes and datagrams from
//! the server. Always holds: a waiting task is woken when it can continue or when the connection closes; the
//! connection closes when nobody uses it any more.

use std::{
    collections::BTreeMap,
    future::poll_fn,
    io,
    net::SocketAddr,
    os::fd::AsFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use mpvpn_masque::{h3::code, headers::Headers};
use mpvpn_os::{RecvBatch, UdpSocket, udp::SendFailure};
use mpvpn_quic::{ClientSetup, Transmit};
use mpvpn_sockets::packet_io::{for_each_datagram, outgoing};
use mpvpn_tunnel::{ForwardEvent, Forwarder, RelayId, RelayRead, ResponseStatus};
use tokio::{
    io::Interest,
    sync::Notify,
    time::{sleep_until, timeout},
};

/// How long the connection to the server may take, on the loopback. Chosen.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Receive calls before the packets are processed. More: longer turns. Fewer: system calls. Chosen.
const MAX_RECV_CALLS: usize = 8;
/// A read returns at least this many bytes if they have arrived. Larger: fewer, larger writes to the client,
/// more memory. Chosen.
const MIN_READ_BYTES: usize = 32 << 10;
/// Messages (datagrams, or GRO batches of them) of one receive call.
const MAX_MESSAGES_PER_RECV: usize = 8;

/// A connection; closes when dropped.
#[derive(Debug)]
pub(super) struct GatewayConnection {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Wakes the driver task.
    work: Notify,
}

#[derive(Debug)]
struct State {
    forwarder: Forwarder,
    /// The wakers of each request.
    requests: BTreeMap<RelayId, RequestWakers>,
    /// Tasks that wait until the connection accepts requests.
    waiting_for_connection: Vec<Waker>,
}

/// The wakers of the tasks that wait for one request.
#[derive(Debug, Default)]
struct RequestWakers {
    reader: Option<Waker>,
    writer: Option<Waker>,
    /// How the server's half of the stream ended.
    end: Option<ReadEnd>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReadEnd {
    Finished,
    Broken,
}

impl RequestWakers {
    fn wake(&mut self) {
        self.reader.take().into_iter().chain(self.writer.take()).for_each(Waker::wake);
    }
}

impl GatewayConnection {
    /// Opens a connection from `socket` to the server at `to`. `guards` is dropped when the connection has
    /// closed.
    pub(super) fn open(
        setup: &ClientSetup,
        to: SocketAddr,
        name: &str,
        socket: UdpSocket,
        buffers: Arc<Mutex<IoBuffers>>,
        guards: impl Send + 'static,
    ) -> io::Result<Self> {
        let forwarder = Forwarder::connect(Instant::now(), setup, to, name).map_err(io::Error::other)?;
        let state = State { forwarder, requests: BTreeMap::new(), waiting_for_connection: Vec::new() };
        let shared = Arc::new(Shared { state: Mutex::new(state), work: Notify::new() });
        let driven = Driver { socket: Socket::new(socket)?, buffers, waiting: None }.run(shared.clone());
        tokio::spawn(async move {
            driven.await;
            drop(guards);
        });
        Ok(Self { shared })
    }

    /// Whether it accepts no more requests.
    pub(super) fn is_closed(&self) -> bool {
        self.shared.lock().forwarder.is_over()
    }

    /// The number of open requests.
    pub(super) fn open_requests(&self) -> usize {
        self.shared.lock().forwarder.requests()
    }

    /// Sends a request once the connection is established. Returns `None` if it is not established in time.
    pub(super) async fn request(self: &Arc<Self>, headers: &Headers) -> Option<GatewayRequest> {
        let asked = poll_fn(|cx| {
            let mut state = self.shared.lock();
            if state.forwarder.is_over() {
                return Poll::Ready(None);
            }
            let Some(id) = state.forwarder.request(headers) else {
                state.waiting_for_connection.push(cx.waker().clone());
                return Poll::Pending;
            };
            state.requests.insert(id, RequestWakers::default());
            Poll::Ready(Some(id))
        });
        let id = timeout(CONNECT_TIMEOUT, asked).await.ok().flatten()?;
        self.shared.work.notify_one();
        Some(GatewayRequest { connection: self.clone(), id })
    }
}

impl Drop for GatewayConnection {
    fn drop(&mut self) {
        self.shared.lock().forwarder.close(Instant::now(), "the gateway's client has disconnected");
        self.shared.work.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while the lock was held has ended that task only.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Wakes the tasks for which something has happened.
    fn wake_waiters(&mut self) {
        while let Some(event) = self.forwarder.poll_event() {
            match event {
                ForwardEvent::Ready => self.waiting_for_connection.drain(..).for_each(Waker::wake),
                ForwardEvent::Readable(id) => {
                    let is_open = self.forwarder.is_open(id);
                    match self.requests.get_mut(&id) {
                        Some(waiting) if is_open => waiting.reader.take().into_iter().for_each(Waker::wake),
                        // A broken stream concerns both reader and writer.
                        waiting => waiting.into_iter().for_each(RequestWakers::wake),
                    }
                }
                ForwardEvent::Writable(id) => {
                    let writer = self.requests.get_mut(&id).and_then(|waiting| waiting.writer.take());
                    writer.into_iter().for_each(Waker::wake);
                }
                ForwardEvent::Lost(reason) => {
                    tracing::debug!(%reason, "the gateway's connection to its server has closed");
                    self.waiting_for_connection.drain(..).for_each(Waker::wake);
                    self.requests.values_mut().for_each(RequestWakers::wake);
                }
            }
        }
    }
}

/// A request and its stream. Dropping it cancels the stream.
#[derive(Debug)]
pub(super) struct GatewayRequest {
    connection: Arc<GatewayConnection>,
    id: RelayId,
}

impl GatewayRequest {
    /// Runs `work` on the request, then wakes the driver to send.
    fn with_state<T>(&self, work: impl FnOnce(&mut State, RelayId) -> T) -> T {
        let done = work(&mut self.connection.shared.lock(), self.id);
        self.connection.shared.work.notify_one();
        done
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.connection.shared.lock()
    }

    /// The response; `None` if the stream or the connection broke before.
    pub(super) async fn response(&self) -> Option<Headers> {
        poll_fn(|cx| {
            let mut state = self.lock();
            match state.forwarder.answer(Instant::now(), self.id) {
                ResponseStatus::Received(headers) => Poll::Ready(Some(headers)),
                ResponseStatus::Failed => Poll::Ready(None),
                ResponseStatus::Pending => state.register_reader(self.id, cx),
            }
        })
        .await
    }

    /// The next bytes from the server, of several packets if they have arrived; `None` at the end of the
    /// stream.
    pub(super) fn poll_read(&self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        let (mut state, now) = (self.lock(), Instant::now());
        let State { forwarder, requests, .. } = &mut *state;
        let Some(waiting) = requests.get_mut(&self.id) else { return Poll::Ready(Err(reset_error())) };
        let (mut first, mut all) = (Bytes::new(), BytesMut::new());
        while waiting.end.is_none() && first.len().max(all.len()) < MIN_READ_BYTES {
            match forwarder.read(now, self.id) {
                RelayRead::Data(data) if first.is_empty() => first = data,
                RelayRead::Data(data) => {
                    if all.is_empty() {
                        all.extend_from_slice(&first);
                    }
                    all.extend_from_slice(&data);
                }
                RelayRead::Finished => waiting.end = Some(ReadEnd::Finished),
                RelayRead::Broken => waiting.end = Some(ReadEnd::Broken),
                RelayRead::Blocked => {
                    waiting.reader = Some(cx.waker().clone());
                    break;
                }
            }
        }
        if !first.is_empty() {
            // Reading has opened the flow-control window, which the driver must tell the server.
            self.connection.shared.work.notify_one();
            return Poll::Ready(Ok(Some(if all.is_empty() { first } else { all.freeze() })));
        }
        match waiting.end {
            Some(ReadEnd::Finished) => Poll::Ready(Ok(None)),
            Some(ReadEnd::Broken) => Poll::Ready(Err(reset_error())),
            None => Poll::Pending,
        }
    }

    /// The next datagram from the server. If there is none, the task is woken as by [`Self::poll_read`].
    pub(super) fn next_datagram(&self, cx: &mut Context<'_>) -> Option<Bytes> {
        let mut state = self.lock();
        let datagram = state.forwarder.next_datagram(Instant::now(), self.id);
        if datagram.is_none() {
            let _: Poll<()> = state.register_reader(self.id, cx);
        }
        datagram
    }

    /// The number of bytes that may be written now.
    pub(super) fn poll_writable_bytes(&self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut state = self.lock();
        if !state.forwarder.is_open(self.id) {
            return Poll::Ready(Err(reset_error()));
        }
        match state.forwarder.available_window(self.id) {
            0 => {
                if let Some(waiting) = state.requests.get_mut(&self.id) {
                    waiting.writer = Some(cx.waker().clone());
                }
                Poll::Pending
            }
            room => Poll::Ready(Ok(room)),
        }
    }

    /// Sends bytes to the server.
    pub(super) fn write(&self, data: Bytes) {
        self.with_state(|state, id| state.forwarder.write(id, data));
    }

    /// Sends a datagram to the server. Returns false if it does not fit into a QUIC datagram now.
    pub(super) fn send_datagram(&self, value: &[u8]) -> bool {
        self.with_state(|state, id| state.forwarder.send_datagram(Instant::now(), id, value))
    }

    /// Ends this side's half of the stream.
    pub(super) fn finish(&self) {
        self.with_state(|state, id| state.forwarder.finish(id));
    }

    /// Cancels the stream with an HTTP/3 error code.
    pub(super) fn cancel(&self, code: u64) {
        self.with_state(|state, id| {
            state.forwarder.end(id, code);
            state.requests.remove(&id);
        });
    }
}

impl Drop for GatewayRequest {
    fn drop(&mut self) {
        self.cancel(code::REQUEST_CANCELLED);
    }
}

impl State {
    fn register_reader<T>(&mut self, id: RelayId, cx: &mut Context<'_>) -> Poll<T> {
        if let Some(waiting) = self.requests.get_mut(&id) {
            waiting.reader = Some(cx.waker().clone());
        }
        Poll::Pending
    }
}

/// The error for a stream that the server reset or that broke with the connection.
fn reset_error() -> io::Error {
    io::ErrorKind::ConnectionReset.into()
}

/// A socket, registered with the runtime by a duplicate descriptor.
struct Socket {
    socket: UdpSocket,
    ready: tokio::net::UdpSocket,
}

impl Socket {
    fn new(socket: UdpSocket) -> io::Result<Self> {
        let ready = tokio::net::UdpSocket::from_std(socket.as_fd().try_clone_to_owned()?.into())?;
        Ok(Self { socket, ready })
    }

    fn send(&self, transmit: &Transmit, data: &[u8]) -> SendBufferSpace {
        let out = outgoing(transmit, data, None);
        match self.ready.try_io(Interest::WRITABLE, || self.socket.send(&out)) {
            Err(error) if SendFailure::of(&error) == SendFailure::Busy => return SendBufferSpace::Full,
            Err(error) => tracing::debug!(%error, "cannot send to this server's QUIC socket"),
            Ok(()) => {}
        }
        SendBufferSpace::Available
    }
}

/// Whether the kernel's send buffer had space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SendBufferSpace {
    Full,
    Available,
}

/// Receive and send buffers, shared by all connections.
pub(super) struct IoBuffers {
    batch: RecvBatch,
    buffer: Vec<u8>,
}

impl Default for IoBuffers {
    fn default() -> Self {
        Self { batch: RecvBatch::new(MAX_MESSAGES_PER_RECV), buffer: Vec::new() }
    }
}

/// Moves packets between a connection and its socket.
struct Driver {
    socket: Socket,
    buffers: Arc<Mutex<IoBuffers>>,
    /// A packet for which the kernel's send buffer had no space.
    waiting: Option<(Transmit, Vec<u8>)>,
}

impl Driver {
    /// Receives what has arrived.
    fn receive(&self, now: Instant, forwarder: &mut Forwarder) {
        let batch = &mut self.buffers.lock().unwrap_or_else(PoisonError::into_inner).batch;
        for _ in 0..MAX_RECV_CALLS {
            let received = self.socket.ready.try_io(Interest::READABLE, || {
                match self.socket.socket.recv_batch(batch)? {
                    0 => Err(io::ErrorKind::WouldBlock.into()),
                    count => Ok(count),
                }
            });
            match received {
                Ok(_) => for_each_datagram(batch, |datagram| {
                    forwarder.handle_datagram(now, datagram.remote, datagram.ecn, datagram.data);
                }),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => return tracing::debug!(%error, "cannot receive from this server's QUIC socket"),
            }
        }
    }

    /// Sends until the connection has nothing to send or the kernel's send buffer is full.
    fn send(&mut self, now: Instant, forwarder: &mut Forwarder) {
        let buffer = &mut self.buffers.lock().unwrap_or_else(PoisonError::into_inner).buffer;
        if let Some((transmit, data)) = self.waiting.take()
            && self.socket.send(&transmit, &data) == SendBufferSpace::Full
        {
            self.waiting = Some((transmit, data));
            return;
        }
        loop {
            buffer.clear();
            let Some(transmit) = forwarder.poll_transmit(now, buffer) else { return };
            if self.socket.send(&transmit, buffer) == SendBufferSpace::Full {
                self.waiting = Some((transmit, buffer[..transmit.size].to_vec()));
                return;
            }
        }
    }

    /// Runs until the connection has closed.
    async fn run(mut self, shared: Arc<Shared>) {
        loop {
            let (deadline, over) = {
                let mut state = shared.lock();
                let now = Instant::now();
                if state.forwarder.poll_timeout(now).is_some_and(|at| at <= now) {
                    state.forwarder.handle_timeout(now);
                }
                self.send(now, &mut state.forwarder);
                state.wake_waiters();
                (state.forwarder.poll_timeout(now), state.forwarder.is_over())
            };
            if over {
                return;
            }
            let deadline = deadline.unwrap_or_else(|| Instant::now() + CONNECT_TIMEOUT);
            let is_full = self.waiting.is_some();
            tokio::select! {
                ready = self.socket.ready.readable() => {
                    if ready.is_err() {
                        return;
                    }
                    let (mut state, now) = (shared.lock(), Instant::now());
                    self.receive(now, &mut state.forwarder);
                    state.forwarder.handle_batch(now);
                }
                room = self.socket.ready.writable(), if is_full => {
                    if room.is_err() {
                        return;
                    }
                }
                () = sleep_until(deadline.into()) => {}
                () = shared.work.notified() => {}
            }
        }
    }
}
