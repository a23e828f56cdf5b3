//! The slow thread: a tokio runtime for everything that may block. It serves the local API, metrics and the
//! dashboard, keeps the log of events, resolves names, and runs services that only one end has.

use std::{
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use mpvpn_dashboard::Dashboard;
use mpvpn_error::RunError;
use mpvpn_input::values::ServerAddr;
use mpvpn_names::{
    lookup::{Resolve, ReverseLookup, look_up},
    resolver::{MAX_CONCURRENT_LOOKUPS, Resolver, ResolverHandle, resolver},
};
use mpvpn_os::poll::PollWaker;
use mpvpn_status::events::{EventReceiver, EventSender, SharedEventLog, event_channel};
use tokio::{runtime::Handle, sync::mpsc};

use crate::service_manager::LoopActivity;

/// Messages queued to the data plane. More: memory. Fewer: requests of the local API are refused while the
/// data plane is busy. Chosen.
const MAX_QUEUED_MESSAGES: usize = 64;
/// How often the runtime shows that it goes on. More often: wake-ups; less often: it counts as stuck while it
/// is only busy.
const ACTIVITY_INTERVAL: Duration = Duration::from_secs(5);
/// The answer to a request for a link to the dashboard where there is none.
const NO_DASHBOARD: &str = "this process serves no dashboard";

/// A message to the data plane.
pub enum Message {
    /// A request of the local API.
    ApiRequest(mpvpn_api::ControlRequest),
    /// The result of [`SlowThread::resolve`].
    Resolved(ServerAddr, Result<Vec<SocketAddr>, String>),
    /// The result of [`SlowThread::reverse_resolve`]: an address and its name, if it has one.
    ReverseResolved(IpAddr, Option<String>),
}

/// A request of the data plane.
enum Request {
    Lookup(ServerAddr),
    ReverseLookup(ReverseLookup),
}

/// The services that the thread runs.
#[derive(Default)]
pub struct Services {
    /// The local API.
    pub api: Option<mpvpn_api::Server>,
    /// The metrics.
    pub metrics: Option<mpvpn_api::metrics::Server>,
    /// The page for browsers.
    pub dashboard: Option<Dashboard>,
    /// The services that only this end has.
    pub own: Option<OwnServices>,
}

/// Makes the future that runs services, on the thread where it is polled.
pub type RunServices = Box<dyn FnOnce(EventSender) -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// Services that only one end has.
pub struct OwnServices {
    /// Runs them, with the sender of their events.
    pub run: RunServices,
    /// Waited for before the thread ends, while they still run.
    pub last: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// The data plane's end. Dropping it ends the thread.
pub struct SlowThread {
    requests: Option<mpsc::UnboundedSender<Request>>,
    resolver: ResolverHandle,
    messages: Receiver<Message>,
    runtime: Option<Handle>,
    events: EventSender,
    thread: Option<JoinHandle<()>>,
}

impl SlowThread {
    /// Starts the thread. `resolve` is an app's resolver; `None` uses the system's.
    pub fn start(offers: Services, resolve: Option<Resolve>, wake: PollWaker) -> Result<Self, RunError> {
        let (sender, requests) = mpsc::unbounded_channel();
        let (handle, resolver) = resolver();
        let (post, messages) = sync_channel(MAX_QUEUED_MESSAGES);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            // Each lookup occupies a thread.
            .max_blocking_threads(MAX_CONCURRENT_LOOKUPS + 8)
            .build()
            .map_err(RunError::io("start the runtime"))?;
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
            .map_err(RunError::io("start a thread"))?;
        let (requests, runtime, thread) = (Some(sender), Some(runtime_handle), Some(thread));
        Ok(Self { requests, resolver: handle, messages, runtime, events, thread })
    }

    /// A handle without a thread, where nothing needs one.
    pub fn disabled() -> Self {
        let (_, messages) = sync_channel(1);
        let events = EventSender::to_log_lines();
        Self { requests: None, resolver: resolver().0, messages, runtime: None, events, thread: None }
    }

    /// Starts a lookup of a server's addresses; the result is a [`Message::Resolved`].
    pub fn resolve(&self, server: &ServerAddr) {
        self.send(Request::Lookup(server.clone()));
    }

    /// Starts a reverse lookup; the result is a [`Message::ReverseResolved`].
    pub fn reverse_resolve(&self, lookup: ReverseLookup) {
        self.send(Request::ReverseLookup(lookup));
    }

    fn send(&self, request: Request) {
        if let Some(requests) = &self.requests {
            // The thread runs as long as this value exists.
            let _ = requests.send(request);
        }
    }

    /// The sender of events. Without the thread, events become log lines only.
    pub fn events(&self) -> EventSender {
        self.events.clone()
    }

    /// Shows how far the thread has come, from now on.
    pub fn show_activity(&self) -> LoopActivity {
        let activity = LoopActivity::default();
        if let Some(runtime) = &self.runtime {
            runtime.spawn(mark_activity(activity.clone()));
        }
        activity
    }

    /// The tokio runtime, if there is a thread.
    pub fn runtime(&self) -> Option<&Handle> {
        self.runtime.as_ref()
    }

    /// The handle from which other threads get a resolver client.
    pub fn resolver(&self) -> ResolverHandle {
        self.resolver.clone()
    }

    /// The next message.
    pub fn next(&self) -> Option<Message> {
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
    (Services { api, metrics, dashboard, own }, recorder, events): (Services, EventReceiver, EventSender),
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
    let source: mpvpn_api::RequestHandler = Arc::new(move |question| match question {
        mpvpn_api::ControlRequest::DashboardLink(reply) => {
            let links = login_links.as_ref().ok_or_else(|| NO_DASHBOARD.to_owned());
            drop(reply.send(links.and_then(|links| links.create().map_err(|error| error.to_string()))));
        }
        question => ask(Message::ApiRequest(question)),
    });
    let metrics_source = Arc::clone(&source);
    let dashboard_source = Arc::clone(&source);
    // It runs as long as this task: other threads may query until then.
    tokio::spawn(resolver.serve());
    let log = SharedEventLog::default();
    tokio::spawn(recorder.fill(log.clone()));
    let (dashboard_log, dashboard_events) = (log.clone(), events.clone());
    let (run_own, last) = own.map(|own| (own.run, own.last)).unzip();
    let lookups = async move {
        while let Some(request) = requests.recv().await {
            match request {
                Request::Lookup(server) => {
                    let found = look_up(server.clone(), resolve.clone()).await;
                    post(Message::Resolved(server, found));
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
        if let Some(last) = last {
            last.await;
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
    let own = async move {
        if let Some(run) = run_own {
            run(events).await;
        }
    };
    let services = async {
        tokio::join!(api, metrics, dashboard, own);
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
