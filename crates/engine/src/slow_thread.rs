//! The slow thread: a tokio runtime for everything that may block. It serves the local API, metrics, the
//! dashboard and a server's HTTPS over TCP, orders certificates, keeps the log of events, and resolves names.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use mpvpn_dashboard::Dashboard;
use mpvpn_input::values::ServerAddr;
use mpvpn_os::poll::PollWaker;
use mpvpn_status::events::{EventReceiver, EventSender, SharedEventLog, event_channel};
use tokio::{runtime::Handle, sync::mpsc, task::spawn_blocking, time::timeout};

use crate::{
    EngineError,
    acme::Acme,
    dns,
    https_server::HttpsServer,
    resolver::{MAX_CONCURRENT_LOOKUPS, Resolver, ResolverHandle, resolver},
    service_manager::LoopActivity,
};

/// Messages queued to the data plane. More: memory. Fewer: requests of the local API are refused while the
/// data plane is busy. Chosen.
const MAX_QUEUED_MESSAGES: usize = 64;
/// Timeout of a reverse lookup. Its result is only a hint for the number of pipes, so a long timeout costs a
/// thread and nothing else. Chosen.
const REVERSE_LOOKUP_TIMEOUT: Duration = Duration::from_secs(20);

/// How often the runtime shows that it goes on. More often: wake-ups; less often: it counts as stuck while it
/// is only busy.
const ACTIVITY_INTERVAL: Duration = Duration::from_secs(5);

/// An app's resolver: returns the addresses of a name, or an error text. It may block.
pub type Resolve = Arc<dyn Fn(&str) -> Result<Vec<IpAddr>, String> + Send + Sync>;

/// A message to the data plane.
pub(crate) enum Message {
    /// A request of the local API.
    ApiRequest(mpvpn_api::ControlRequest),
    /// The result of [`SlowThread::resolve`].
    Resolved(Result<Vec<SocketAddr>, String>),
    /// The result of [`SlowThread::reverse_resolve`]: an address and its name, if it has one.
    ReverseResolved(IpAddr, Option<String>),
}

/// A request of the data plane.
enum Request {
    Lookup(ServerAddr),
    ReverseLookup(ReverseLookup),
}

/// A question for the name of an address.
#[derive(Debug)]
pub(crate) enum ReverseLookup {
    /// The system's resolver is asked.
    BySystem(IpAddr),
    /// These resolvers are asked through the tunnel's device, one after the other.
    InTunnel { address: IpAddr, resolvers: Vec<IpAddr>, device: String },
}

impl ReverseLookup {
    fn address(&self) -> IpAddr {
        match self {
            Self::BySystem(address) | Self::InTunnel { address, .. } => *address,
        }
    }

    async fn name(self) -> Option<String> {
        match self {
            Self::BySystem(address) => reverse_lookup(address).await,
            Self::InTunnel { address, resolvers, device } => {
                dns::name_in_tunnel(address, &resolvers, &device).await
            }
        }
    }
}

/// The services that the thread runs.
#[derive(Default)]
pub(crate) struct Services {
    pub(crate) api: Option<mpvpn_api::Server>,
    pub(crate) metrics: Option<mpvpn_api::metrics::Server>,
    pub(crate) dashboard: Option<Dashboard>,
    pub(crate) https_server: Option<HttpsServer>,
    pub(crate) acme: Option<Acme>,
}

/// The data plane's end. Dropping it ends the thread.
pub(crate) struct SlowThread {
    requests: Option<mpsc::UnboundedSender<Request>>,
    resolver: ResolverHandle,
    messages: Receiver<Message>,
    runtime: Option<Handle>,
    events: EventSender,
    thread: Option<JoinHandle<()>>,
}

impl SlowThread {
    /// Starts the thread. `resolve` is an app's resolver; `None` uses the system's.
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
            // Each lookup occupies a thread.
            .max_blocking_threads(MAX_CONCURRENT_LOOKUPS + 8)
            .build()
            .map_err(EngineError::io("start the runtime"))?;
        let runtime_handle = runtime.handle().clone();
        let (events, recorder) = event_channel();
        let reporter = events.clone();
        let thread = std::thread::Builder::new()
            .name("slow".to_owned())
            .spawn(move || {
                let uses_system_resolver = resolve.is_none();
                runtime.block_on(serve(
                    (offers, recorder, reporter),
                    resolve,
                    requests,
                    resolver,
                    post,
                    wake,
                ));
                // Lookups of the system are abandoned, but an app's resolver must not be called after this
                // thread has ended.
                if uses_system_resolver {
                    runtime.shutdown_background();
                }
            })
            .map_err(EngineError::io("start a thread"))?;
        let (requests, runtime, thread) = (Some(sender), Some(runtime_handle), Some(thread));
        Ok(Self { requests, resolver: handle, messages, runtime, events, thread })
    }

    /// A handle without a thread, where nothing needs one.
    pub(crate) fn disabled() -> Self {
        let (_, messages) = sync_channel(1);
        let events = EventSender::to_log_lines();
        Self { requests: None, resolver: resolver().0, messages, runtime: None, events, thread: None }
    }

    /// Starts a lookup of a server's addresses; the result is a [`Message::Resolved`].
    pub(crate) fn resolve(&self, server: &ServerAddr) {
        self.send(Request::Lookup(server.clone()));
    }

    /// Starts a reverse lookup; the result is a [`Message::ReverseResolved`].
    pub(crate) fn reverse_resolve(&self, lookup: ReverseLookup) {
        self.send(Request::ReverseLookup(lookup));
    }

    fn send(&self, request: Request) {
        if let Some(requests) = &self.requests {
            // The thread runs as long as this value exists.
            let _ = requests.send(request);
        }
    }

    /// The sender of events. Without the thread, events become log lines only.
    pub(crate) fn events(&self) -> EventSender {
        self.events.clone()
    }

    /// Shows how far the thread has come, from now on.
    pub(crate) fn show_activity(&self) -> LoopActivity {
        let activity = LoopActivity::default();
        if let Some(runtime) = &self.runtime {
            runtime.spawn(mark_activity(activity.clone()));
        }
        activity
    }

    /// The tokio runtime, if there is a thread.
    pub(crate) fn runtime(&self) -> Option<&Handle> {
        self.runtime.as_ref()
    }

    /// The handle from which other threads get a resolver client.
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
            // A panic there was already logged.
            let _ = thread.join();
        }
    }
}

async fn serve(
    (Services { api, metrics, dashboard, https_server, acme }, recorder, events): (
        Services,
        EventReceiver,
        EventSender,
    ),
    resolve: Option<Resolve>,
    mut requests: mpsc::UnboundedReceiver<Request>,
    resolver: Resolver,
    messages: SyncSender<Message>,
    wake: PollWaker,
) {
    let post = {
        let (messages, wake) = (messages.clone(), wake.clone());
        move |message| {
            // If the data plane is this far behind, the dropped request answers its sender with an error.
            let _ = messages.try_send(message);
            wake.wake();
        }
    };
    let ask = post.clone();
    let login_links = dashboard.as_ref().map(Dashboard::login_links);
    let source: mpvpn_api::RequestHandler = Arc::new(move |question| match (question, &login_links) {
        (mpvpn_api::ControlRequest::DashboardLink(reply), Some(login_links)) => {
            drop(reply.send(login_links.create().map_err(|error| error.to_string())));
        }
        (question, _) => ask(Message::ApiRequest(question)),
    });
    let metrics_source = Arc::clone(&source);
    let dashboard_source = Arc::clone(&source);
    // It runs as long as this task: other threads may query until then.
    tokio::spawn(resolver.serve());
    let log = SharedEventLog::default();
    tokio::spawn(recorder.fill(log.clone()));
    let (dashboard_log, dashboard_events) = (log.clone(), events.clone());
    let wait_for_close_frames = https_server.as_ref().map(HttpsServer::wait_for_close_frames);
    let lookups = async move {
        while let Some(request) = requests.recv().await {
            match request {
                Request::Lookup(server) => {
                    post(Message::Resolved(look_up(server, resolve.clone()).await));
                }
                // An app's resolver has no reverse lookup.
                Request::ReverseLookup(lookup) if resolve.is_some() => {
                    post(Message::ReverseResolved(lookup.address(), None))
                }
                Request::ReverseLookup(lookup) => {
                    let (post, address) = (post.clone(), lookup.address());
                    tokio::spawn(async move { post(Message::ReverseResolved(address, lookup.name().await)) });
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
            tracing::warn!(%error, "the metrics listener has ended");
        }
    };
    let dashboard = async move {
        if let Some(dashboard) = dashboard
            && let Err(error) = dashboard.serve(dashboard_source, dashboard_log, dashboard_events).await
        {
            tracing::warn!(%error, "the dashboard has ended");
        }
    };
    let https_server = async move {
        if let Some(https_server) = https_server
            && let Err(error) = https_server.serve().await
        {
            tracing::warn!(%error, "the HTTPS server has ended");
        }
    };
    let acme = async move {
        if let Some(acme) = acme {
            acme.run(events).await;
        }
    };
    let services = async {
        tokio::join!(api, metrics, dashboard, https_server, acme);
        // Even without services, name resolution goes on.
        std::future::pending().await
    };
    tokio::select! {
        () = services => {}
        () = lookups => {}
    }
}

/// Shows that the runtime goes on.
async fn mark_activity(activity: LoopActivity) {
    let mut interval = tokio::time::interval(ACTIVITY_INTERVAL);
    loop {
        interval.tick().await;
        activity.mark();
    }
}

/// The addresses of a server or proxy, by an app's resolver if there is one.
pub(crate) async fn look_up(server: ServerAddr, resolve: Option<Resolve>) -> Result<Vec<SocketAddr>, String> {
    let Some(resolve) = resolve else {
        let found = tokio::net::lookup_host((server.host.as_str(), server.port)).await;
        return found.map(Iterator::collect).map_err(|error| error.to_string());
    };
    let port = server.port;
    if let Some(ip) = server.ip() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let found = spawn_blocking(move || resolve(&server.host)).await;
    let addresses = found.unwrap_or_else(|_| Err("the resolver of the app panicked".to_owned()))?;
    Ok(addresses.into_iter().map(|ip| SocketAddr::new(ip, port)).collect())
}

/// The name that the system's resolver finds for an address.
async fn reverse_lookup(address: IpAddr) -> Option<String> {
    let found = timeout(REVERSE_LOOKUP_TIMEOUT, spawn_blocking(move || dns_lookup::lookup_addr(&address)));
    let name = found.await.ok()?.ok()?.ok()?;
    // If there is no name, the system returns the address as text.
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
