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
    front::Front,
    resolver::{LOOKUPS, Names, Resolver, resolver},
};

/// Messages that may wait for the data plane.
const MESSAGES: usize = 64;
/// Whoever asks for the name of an address does so in passing.
const NAMED_WITHIN: Duration = Duration::from_secs(20);

/// How an app resolves names: the addresses of one, or why there is none. It may take its time.
pub type Resolve = Arc<dyn Fn(&str) -> Result<Vec<IpAddr>, String> + Send + Sync>;

/// What the slow thread wants of the data plane.
pub(crate) enum Message {
    /// Somebody asks over the local API.
    Asked(api::ControlRequest),
    /// A name was resolved, or could not be.
    Resolved(Result<Vec<SocketAddr>, String>),
    /// An address has this name, or none is known.
    Named(IpAddr, Option<String>),
}

/// What the data plane asks for.
enum Request {
    Addresses(ServerAddr),
    Name(IpAddr),
}

/// What this process offers to others, as far as the thread serves it.
#[derive(Default)]
pub(crate) struct Offers {
    pub(crate) api: Option<api::Server>,
    pub(crate) metrics: Option<metrics::Server>,
    pub(crate) front: Option<Front>,
}

/// The data plane's end of the slow thread. Dropping it ends the thread.
pub(crate) struct Slow {
    requests: Option<mpsc::UnboundedSender<Request>>,
    names: Names,
    messages: Receiver<Message>,
    runtime: Option<Handle>,
    events: EventSender,
    thread: Option<JoinHandle<()>>,
}

impl Slow {
    /// Starts the thread. Without `resolve` the system resolves the server's name.
    pub(crate) fn start(
        offers: Offers,
        resolve: Option<Resolve>,
        wake: PollWaker,
    ) -> Result<Self, EngineError> {
        let (sender, requests) = mpsc::unbounded_channel();
        let (names, resolver) = resolver();
        let (post, messages) = sync_channel(MESSAGES);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            // A name that is looked up keeps a thread busy.
            .max_blocking_threads(LOOKUPS + 8)
            .build()
            .map_err(EngineError::io("start the runtime"))?;
        let handle = runtime.handle().clone();
        let (events, recorder) = event_channel();
        let thread = std::thread::Builder::new()
            .name("slow".to_owned())
            .spawn(move || {
                let ours = resolve.is_none();
                runtime.block_on(serve((offers, recorder), resolve, requests, resolver, post, wake));
                // Nobody waits for name servers that do not answer; but no app is called when all is over.
                if ours {
                    runtime.shutdown_background();
                }
            })
            .map_err(EngineError::io("start a thread"))?;
        let (requests, runtime, thread) = (Some(sender), Some(handle), Some(thread));
        Ok(Self { requests, names, messages, runtime, events, thread })
    }

    /// No thread, where nobody needs one.
    pub(crate) fn idle() -> Self {
        let (_, messages) = sync_channel(1);
        let events = EventSender::to_log_lines();
        Self { requests: None, names: resolver().0, messages, runtime: None, events, thread: None }
    }

    /// Asks for the addresses of a server; they come as a [`Message::Resolved`].
    pub(crate) fn resolve(&self, server: &ServerAddr) {
        self.ask(Request::Addresses(server.clone()));
    }

    /// Asks for the name that the DNS has for an address; it comes as a [`Message::Named`].
    pub(crate) fn name(&self, address: IpAddr) {
        self.ask(Request::Name(address));
    }

    fn ask(&self, request: Request) {
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
    pub(crate) fn names(&self) -> Names {
        self.names.clone()
    }

    /// The next message.
    pub(crate) fn next(&self) -> Option<Message> {
        self.messages.try_recv().ok()
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was reported when it happened.
            let _ = thread.join();
        }
    }
}

async fn serve(
    (Offers { api, metrics, front }, recorder): (Offers, EventReceiver),
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
    let asked = post.clone();
    let source: api::RequestHandler = Arc::new(move |question| asked(Message::Asked(question)));
    let watched = Arc::clone(&source);
    // Its end is that of this task: other threads may ask until then.
    tokio::spawn(resolver.serve());
    let log = SharedEventLog::default();
    tokio::spawn(recorder.fill(log.clone()));
    let last_words = front.as_ref().map(Front::last_words);
    let lookups = async move {
        while let Some(request) = requests.recv().await {
            match request {
                Request::Addresses(server) => {
                    post(Message::Resolved(look_up(server, resolve.clone()).await));
                }
                // An app that resolves names by itself does not say how to ask for those of addresses.
                Request::Name(address) if resolve.is_some() => post(Message::Named(address, None)),
                Request::Name(address) => {
                    let post = post.clone();
                    tokio::spawn(async move { post(Message::Named(address, name_of(address).await)) });
                }
            }
        }
        if let Some(last_words) = last_words {
            last_words.await;
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
            && let Err(error) = metrics.serve(watched).await
        {
            tracing::warn!(%error, "metrics are not offered any more");
        }
    };
    let front = async move {
        if let Some(front) = front
            && let Err(error) = front.serve().await
        {
            tracing::warn!(%error, "TCP connections are not taken any more");
        }
    };
    let asked = async {
        tokio::join!(api, metrics, front);
        // Names are resolved all the same.
        std::future::pending().await
    };
    tokio::select! {
        () = asked => {}
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
async fn name_of(address: IpAddr) -> Option<String> {
    let found = timeout(NAMED_WITHIN, spawn_blocking(move || dns_lookup::lookup_addr(&address)));
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
        let name = runtime.block_on(name_of(IpAddr::from([127, 0, 0, 1])));
        assert_eq!(name.as_deref(), Some("localhost"));
    }
}
