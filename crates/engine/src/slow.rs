//! The thread for everything that may block: the local API, metrics and name resolution.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::JoinHandle,
};

use mpvpn_control::{api, config::ServerAddr, metrics};
use mpvpn_os::poll::Wake;
use tokio::sync::mpsc;

use crate::{
    EngineError,
    resolver::{LOOKUPS, Names, Resolver, resolver},
};

/// Messages that may wait for the data plane.
const MESSAGES: usize = 64;

/// How an app resolves names: the addresses of one, or why there is none. It may take its time.
pub type Resolve = Arc<dyn Fn(&str) -> Result<Vec<IpAddr>, String> + Send + Sync>;

/// What the slow thread wants of the data plane.
pub(crate) enum Message {
    /// Somebody asks over the local API.
    Asked(api::Question),
    /// A name was resolved, or could not be.
    Resolved(Result<Vec<SocketAddr>, String>),
}

/// The data plane's end of the slow thread. Dropping it ends the thread.
pub(crate) struct Slow {
    servers: Option<mpsc::UnboundedSender<ServerAddr>>,
    names: Names,
    messages: Receiver<Message>,
    thread: Option<JoinHandle<()>>,
}

impl Slow {
    /// Starts the thread. Without an API and metrics nobody asks; without `resolve` the system resolves the server's name.
    pub(crate) fn start(
        api: Option<api::Server>,
        metrics: Option<metrics::Server>,
        resolve: Option<Resolve>,
        wake: Wake,
    ) -> Result<Self, EngineError> {
        let (servers, requests) = mpsc::unbounded_channel();
        let (names, resolver) = resolver();
        let (sender, messages) = sync_channel(MESSAGES);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            // A name that is looked up keeps a thread busy.
            .max_blocking_threads(LOOKUPS + 8)
            .build()
            .map_err(EngineError::io("start the runtime"))?;
        let thread = std::thread::Builder::new()
            .name("slow".to_owned())
            .spawn(move || {
                let ours = resolve.is_none();
                runtime.block_on(serve((api, metrics), resolve, requests, resolver, sender, wake));
                // Nobody waits for name servers that do not answer; but no app is called when all is over.
                if ours {
                    runtime.shutdown_background();
                }
            })
            .map_err(EngineError::io("start a thread"))?;
        Ok(Self { servers: Some(servers), names, messages, thread: Some(thread) })
    }

    /// No thread, where nobody needs one.
    pub(crate) fn idle() -> Self {
        let (_, messages) = sync_channel(1);
        Self { servers: None, names: resolver().0, messages, thread: None }
    }

    /// Asks for the addresses of a server; they come as a [`Message::Resolved`].
    pub(crate) fn resolve(&self, server: &ServerAddr) {
        if let Some(servers) = &self.servers {
            // The thread ends only with this value.
            let _ = servers.send(server.clone());
        }
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
        self.servers = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was reported when it happened.
            let _ = thread.join();
        }
    }
}

async fn serve(
    (api, metrics): (Option<api::Server>, Option<metrics::Server>),
    resolve: Option<Resolve>,
    mut requests: mpsc::UnboundedReceiver<ServerAddr>,
    resolver: Resolver,
    messages: SyncSender<Message>,
    wake: Wake,
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
    let source: api::Source = Arc::new(move |question| asked(Message::Asked(question)));
    let watched = Arc::clone(&source);
    // Its end is that of this task: other threads may ask until then.
    tokio::spawn(resolver.serve());
    let servers = async move {
        while let Some(server) = requests.recv().await {
            post(Message::Resolved(look_up(server, resolve.clone()).await));
        }
    };
    let api = async move {
        if let Some(api) = api
            && let Err(error) = api.serve(source).await
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
    let asked = async {
        tokio::join!(api, metrics);
        // Names are resolved all the same.
        std::future::pending().await
    };
    tokio::select! {
        () = asked => {}
        () = servers => {}
    }
}

async fn look_up(server: ServerAddr, resolve: Option<Resolve>) -> Result<Vec<SocketAddr>, String> {
    let Some(resolve) = resolve else {
        let found = tokio::net::lookup_host((server.host.as_str(), server.port)).await;
        return found.map(Iterator::collect).map_err(|error| error.to_string());
    };
    let port = server.port;
    let found = tokio::task::spawn_blocking(move || resolve(&server.host)).await;
    let addresses = found.unwrap_or_else(|_| Err("the resolver of the app panicked".to_owned()))?;
    Ok(addresses.into_iter().map(|ip| SocketAddr::new(ip, port)).collect())
}
