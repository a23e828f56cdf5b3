//! The thread for everything that may block: the local API with the log of events, metrics, name resolution, and a
//! server's TCP side.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use mpvpn_control::{
    api,
    config::ServerAddr,
    events::{EventReceiver, EventSender, SharedEventLog, event_channel},
    metrics,
};
use mpvpn_os::poll::PollWaker;
use tokio::{runtime::Handle, sync::mpsc, task::spawn_blocking, time::timeout};

use crate::{
    EngineError,
    https_server::HttpsServer,
    resolver::{MAX_CONCURRENT_LOOKUPS, Resolver, ResolverHandle, resolver},
};

/// Messages that may wait for the data plane.
const MAX_QUEUED_MESSAGES: usize = 64;
/// Whoever asks for the name of an address does so in passing.
const REVERSE_LOOKUP_TIMEOUT: Duration = Duration::from_secs(20);

/// How an app resolves names: the addresses of one, or why there is none. It may take its time.
pub type Resolve = Arc<dyn Fn(&str) -> Result<Vec<IpAddr>, String> + Send + Sync>;

/// What the slow thread wants of the data plane.
pub(crate) enum Message {
    /// Somebody asks over the local API.
    ApiRequest(api::ControlRequest),
    /// A name was resolved, or could not be.
    Resolved(Result<Vec<SocketAddr>, String>),
    /// An address has this name, or none is known.
    ReverseResolved(IpAddr, Option<String>),
}

/// What the data plane asks for.
enum Request {
    Lookup(ServerAddr),
    ReverseLookup(IpAddr),
}

/// What this process offers to others, as far as the thread serves it.
#[derive(Default)]
pub(crate) struct Services {
    pub(crate) api: Option<api::Server>,
    pub(crate) metrics: Option<metrics::Server>,
    pub(crate) https_server: Option<HttpsServer>,
}

/// The data plane's end of the slow thread. Dropping it ends the thread.
pub(crate) struct SlowThread {
    requests: Option<mpsc::UnboundedSender<Request>>,
    resolver: ResolverHandle,
    messages: Receiver<Message>,
    runtime: Option<Handle>,
    events: EventSender,
    thread: Option<JoinHandle<()>>,
}

impl SlowThread {
    /// Starts the thread. Without `resolve` the system resolves the server's name.
    pub(crate) fn start(
        offers: Services,
        resolve: Option<Resolve>,
        wake: PollWaker,
    ) -> Result<Self, EngineError> {
        let (sender, requests) = mpsc::unbounded_channel();
        let (handle, resolver) = resolver();
        let (post, messages) = sync_channel(MAX_QUEUED_MESSAGES);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            // A name that is looked up keeps a thread busy.
            .max_blocking_threads(MAX_CONCURRENT_LOOKUPS + 8)
            .build()
            .map_err(EngineError::io("start the runtime"))?;
        let runtime_handle = runtime.handle().clone();
        let (events, recorder) = event_channel();
        let thread = std::thread::Builder::new()
            .name("slow".to_owned())
            .spawn(move || {
                let uses_system_resolver = resolve.is_none();
                runtime.block_on(serve((offers, recorder), resolve, requests, resolver, post, wake));
                // Nobody waits for name servers that do not answer; but no app is called when all is over.
                if uses_system_resolver {
                    runtime.shutdown_background();
                }
            })
            .map_err(EngineError::io("start a thread"))?;
        let (requests, runtime, thread) = (Some(sender), Some(runtime_handle), Some(thread));
        Ok(Self { requests, resolver: handle, messages, runtime, events, thread })
    }

    /// No thread, where nobody needs one.
    pub(crate) fn disabled() -> Self {
        let (_, messages) = sync_channel(1);
        let events = EventSender::to_log_lines();
        Self { requests: None, resolver: resolver().0, messages, runtime: None, events, thread: None }
    }

    /// Asks for the addresses of a server; they come as a [`Message::Resolved`].
    pub(crate) fn resolve(&self, server: &ServerAddr) {
        self.send(Request::Lookup(server.clone()));
    }

    /// Asks for the name that the DNS has for an address; it comes as a [`Message::ReverseResolved`].
    pub(crate) fn reverse_resolve(&self, address: IpAddr) {
        self.send(Request::ReverseLookup(address));
    }

    fn send(&self, request: Request) {
        if let Some(requests) = &self.requests {
            // The thread ends only with this value.
            let _ = requests.send(request);
        }
    }

    /// Reports events. Without the thread they become log lines only.
    pub(crate) fn events(&self) -> EventSender {
        self.events.clone()
    }

    /// Where what waits for the network can run, if there is a thread.
    pub(crate) fn runtime(&self) -> Option<&Handle> {
        self.runtime.as_ref()
    }

    /// Where other threads get the means to resolve names.
    pub(crate) fn resolver(&self) -> ResolverHandle {
        self.resolver.clone()
    }

    /// The next message.
    pub(crate) fn next(&self) -> Option<Message> {
        self.messages.try_recv().ok()
    }
}

impl Drop for SlowThread {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was reported when it happened.
            let _ = thread.join();
        }
    }
}

async fn serve(
    (Services { api, metrics, https_server }, recorder): (Services, EventReceiver),
    resolve: Option<Resolve>,
    mut requests: mpsc::UnboundedReceiver<Request>,
    resolver: Resolver,
    messages: SyncSender<Message>,
    wake: PollWaker,
) {
    let post = {
        let (messages, wake) = (messages.clone(), wake.clone());
        move |message| {
            // A data plane that is this far behind answers nobody; dropping the request says so.
            let _ = messages.try_send(message);
            wake.wake();
        }
    };
    let ask = post.clone();
    let source: api::RequestHandler = Arc::new(move |question| ask(Message::ApiRequest(question)));
    let metrics_source = Arc::clone(&source);
    // Its end is that of this task: other threads may ask until then.
    tokio::spawn(resolver.serve());
    let log = SharedEventLog::default();
    tokio::spawn(recorder.fill(log.clone()));
    let wait_for_close_frames = https_server.as_ref().map(HttpsServer::wait_for_close_frames);
    let lookups = async move {
        while let Some(request) = requests.recv().await {
            match request {
                Request::Lookup(server) => {
                    post(Message::Resolved(look_up(server, resolve.clone()).await));
                }
                // An app that resolves names by itself does not say how to ask for those of addresses.
                Request::ReverseLookup(address) if resolve.is_some() => {
                    post(Message::ReverseResolved(address, None))
                }
                Request::ReverseLookup(address) => {
                    let post = post.clone();
                    tokio::spawn(async move {
                        post(Message::ReverseResolved(address, reverse_lookup(address).await))
                    });
                }
            }
        }
        if let Some(wait_for_close_frames) = wait_for_close_frames {
            wait_for_close_frames.await;
        }
    };
    let api = async move {
        if let Some(api) = api
            && let Err(error) = api.serve(source, log).await
        {
            tracing::warn!(%error, "the local API has ended");
        }
    };
    let metrics = async move {
        if let Some(metrics) = metrics
            && let Err(error) = metrics.serve(metrics_source).await
        {
            tracing::warn!(%error, "metrics are not offered any more");
        }
    };
    let https_server = async move {
        if let Some(https_server) = https_server
            && let Err(error) = https_server.serve().await
        {
            tracing::warn!(%error, "TCP connections are not taken any more");
        }
    };
    let services = async {
        tokio::join!(api, metrics, https_server);
        // ResolverHandle are resolved all the same.
        std::future::pending().await
    };
    tokio::select! {
        () = services => {}
        () = lookups => {}
    }
}

async fn look_up(server: ServerAddr, resolve: Option<Resolve>) -> Result<Vec<SocketAddr>, String> {
    let Some(resolve) = resolve else {
        let found = tokio::net::lookup_host((server.host.as_str(), server.port)).await;
        return found.map(Iterator::collect).map_err(|error| error.to_string());
    };
    let port = server.port;
    let found = spawn_blocking(move || resolve(&server.host)).await;
    let addresses = found.unwrap_or_else(|_| Err("the resolver of the app panicked".to_owned()))?;
    Ok(addresses.into_iter().map(|ip| SocketAddr::new(ip, port)).collect())
}

/// The name that the system's resolver finds for an address.
async fn reverse_lookup(address: IpAddr) -> Option<String> {
    let found = timeout(REVERSE_LOOKUP_TIMEOUT, spawn_blocking(move || dns_lookup::lookup_addr(&address)));
    let name = found.await.ok()?.ok()?.ok()?;
    // Without a name the system says the address.
    (!name.is_empty() && name.parse::<IpAddr>().is_err()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_the_name_that_the_hosts_file_gives_it() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let name = runtime.block_on(reverse_lookup(IpAddr::from([127, 0, 0, 1])));
        assert_eq!(name.as_deref(), Some("localhost"));
    }
}
