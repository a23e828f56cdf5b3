//! Asks the process for its status, and gives it to the streams and to the history.
//!
//! In: views of streams, and the clock. Out: a frame for each view that is due, and a sample a second for the
//! history. Always holds: the process is asked once for all streams that are due, and at a server only for
//! details of the sessions that they show; a stream that does not read finds the latest message when it reads
//! again.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use hyper::body::Bytes;
use mpvpn_api::{ControlRequest, RequestHandler, ask_data_plane};
use mpvpn_http::limiter::{LimitReached, Limiter, Slot};
use mpvpn_input::role::Role;
use mpvpn_status::Overview;
use tokio::{
    sync::{Notify, watch},
    time::sleep_until,
};

use crate::{
    event_stream::message,
    frame::RateMeter,
    history::History,
    logins::SessionId,
    view::{Shown, View},
};

/// Streams at once, in all and of one session: one for each open page. More: memory of a frame for each that
/// does not read; fewer: pages of other people have none.
const MAX_STREAMS: usize = 16;
const MAX_STREAMS_PER_SESSION: usize = 6;
/// Time between two samples for the history: a step of the shortest span.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// Time between two frames at the highest rate.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(250);
/// Timers are late by some milliseconds, which must not make a frame miss its turn.
const TIMER_SLACK: Duration = Duration::from_millis(50);
/// The history of a session goes on for this long after a browser has shown it.
const SESSION_HISTORY: Duration = Duration::from_secs(300);
/// Sessions whose history goes on. As many as the history keeps.
const MAX_KEPT_SESSIONS: usize = 512;

/// The streams, and what feeds them.
pub(crate) struct Live {
    role: Role,
    source: RequestHandler,
    started: Instant,
    places: Arc<Limiter<SessionId>>,
    feeds: Arc<Mutex<Feeds>>,
    /// A view without a frame has come.
    new_view: Arc<Notify>,
}

/// The data that the streams read, by their views.
type Feeds = HashMap<View, Feed>;

/// The data that the streams of one view read.
#[derive(Debug)]
struct Feed {
    messages: watch::Sender<Option<Bytes>>,
    /// When the last frame was made; `None` before the first.
    last: Option<Instant>,
    streams: usize,
}

/// A place for a stream, and its messages.
pub(crate) struct Stream {
    pub(crate) messages: watch::Receiver<Option<Bytes>>,
    pub(crate) session: SessionId,
    view: View,
    feeds: Arc<Mutex<Feeds>>,
    _place: Slot<SessionId>,
}

impl Drop for Stream {
    fn drop(&mut self) {
        let mut feeds = lock(&self.feeds);
        if let Some(feed) = feeds.get_mut(&self.view) {
            feed.streams -= 1;
            if feed.streams == 0 {
                feeds.remove(&self.view);
            }
        }
    }
}

fn lock(feeds: &Mutex<Feeds>) -> MutexGuard<'_, Feeds> {
    // The counts are consistent even after a panic elsewhere.
    feeds.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Live {
    pub(crate) fn new(role: Role, source: RequestHandler) -> Self {
        let places = Limiter::new(MAX_STREAMS, MAX_STREAMS_PER_SESSION);
        let (feeds, new_view) = (Arc::default(), Arc::default());
        Self { role, source, started: Instant::now(), places, feeds, new_view }
    }

    /// Time since the start of the dashboard, which is the time of the history.
    pub(crate) fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// A stream with this view; why there is none, if there are too many.
    pub(crate) fn stream(&self, session: SessionId, view: View) -> Result<Stream, String> {
        let place = self.places.try_acquire(session).map_err(|limit| {
            let (LimitReached::PerKey(pages) | LimitReached::Total(pages)) = limit;
            format!("{pages} pages show the dashboard already, which is the limit: close one of them")
        })?;
        let mut feeds = lock(&self.feeds);
        let feed = feeds.entry(view.clone()).or_insert_with(|| Feed {
            messages: watch::Sender::new(None),
            last: None,
            streams: 0,
        });
        feed.streams += 1;
        let messages = feed.messages.subscribe();
        if feed.last.is_none() {
            self.new_view.notify_one();
        }
        drop(feeds);
        Ok(Stream { messages, session, view, feeds: Arc::clone(&self.feeds), _place: place })
    }

    /// Feeds streams and history until dropped.
    pub(crate) async fn run(&self, history: &Mutex<History>) {
        let mut feeder = Feeder::new();
        let mut next = Instant::now();
        loop {
            tokio::select! {
                () = sleep_until(next.into()) => {}
                () = self.new_view.notified() => {}
            }
            let now = Instant::now();
            if let Some(sample) = feeder.feed(self, now).await {
                history.lock().unwrap_or_else(PoisonError::into_inner).take(self.age(), &sample);
            }
            let is_watched_often = lock(&self.feeds).keys().any(|view| view.hz > 1);
            let interval = if is_watched_often { SHORTEST_INTERVAL } else { SAMPLE_INTERVAL };
            // Turns that were missed are not made up for.
            next = (next.max(now - interval) + interval).max(now + TIMER_SLACK);
        }
    }

    /// The views that are due.
    fn due(&self, now: Instant) -> Vec<View> {
        let mut due = Vec::new();
        for (view, feed) in lock(&self.feeds).iter_mut() {
            let interval = Duration::from_secs(1) / u32::from(view.hz);
            let is_due = |last: Instant| now.saturating_duration_since(last) + TIMER_SLACK >= interval;
            if feed.last.is_none_or(is_due) {
                feed.last = Some(now);
                due.push(view.clone());
            }
        }
        due
    }

    fn send(&self, view: &View, message: Bytes) {
        if let Some(feed) = lock(&self.feeds).get(view) {
            feed.messages.send_replace(Some(message));
        }
    }

    /// The number of sessions of each user; none if the process does not answer.
    pub(crate) async fn sessions_of_users(&self) -> BTreeMap<String, u32> {
        let mut numbers = BTreeMap::new();
        let overview = self.overview(Arc::default()).await;
        for session in overview.into_iter().flat_map(|overview| overview.sessions) {
            *numbers.entry(session.user).or_default() += 1;
        }
        numbers
    }

    async fn overview(&self, shown: Arc<BTreeSet<u64>>) -> Option<Overview> {
        ask_data_plane(&self.source, |reply| ControlRequest::Overview { shown, reply }).await
    }
}

/// State kept from one status request to the next.
struct Feeder {
    live_rates: RateMeter,
    /// Rates from sample to sample.
    sample_rates: RateMeter,
    last_sample: Option<Instant>,
    /// The sessions that the last frames have shown.
    shown: Arc<BTreeSet<u64>>,
    /// When streams have shown a session last.
    kept: HashMap<u64, Instant>,
}

impl Feeder {
    fn new() -> Self {
        Self {
            live_rates: RateMeter::live(),
            sample_rates: RateMeter::between_all(),
            last_sample: None,
            shown: Arc::default(),
            kept: HashMap::new(),
        }
    }

    /// Makes the frames that are due; returns the sample of this second if it is due.
    async fn feed(&mut self, live: &Live, now: Instant) -> Option<crate::history::Sample> {
        let due = live.due(now);
        let elapsed = |last: Instant| now.saturating_duration_since(last) + TIMER_SLACK;
        let samples = self.last_sample.is_none_or(|last| elapsed(last) >= SAMPLE_INTERVAL);
        if due.is_empty() && !samples {
            return None;
        }
        let sample = match live.role {
            Role::Client => self.feed_client(live, &due, samples).await,
            Role::Server => self.feed_server(live, &due, (now, samples)).await,
        };
        if samples {
            self.last_sample = Some(now);
        }
        sample
    }

    async fn feed_client(
        &mut self,
        live: &Live,
        due: &[View],
        samples: bool,
    ) -> Option<crate::history::Sample> {
        let status = ask_data_plane(&live.source, ControlRequest::Status).await?;
        let sample = samples.then(|| {
            self.sample_rates.take_status(&status);
            self.sample_rates.sample(&status)
        });
        self.live_rates.take_status(&status);
        if !due.is_empty()
            && let Ok(frame) = self.live_rates.client_frame(status)
        {
            let message = message("status", &frame);
            due.iter().for_each(|view| live.send(view, message.clone()));
        }
        sample
    }

    async fn feed_server(
        &mut self,
        live: &Live,
        due: &[View],
        (now, samples): (Instant, bool),
    ) -> Option<crate::history::Sample> {
        // Where no frame is due, the history needs no details.
        let details = if due.is_empty() { Arc::default() } else { Arc::clone(&self.shown) };
        let mut overview = live.overview(details).await?;
        self.live_rates.take_overview(&overview);
        let views: Vec<Shown> =
            due.iter().map(|view| view.choose(self.live_rates.rated(&overview))).collect();
        if !due.is_empty() {
            let wanted: BTreeSet<u64> = views.iter().flat_map(|shown| &shown.ids).copied().collect();
            let lacks = wanted.iter().any(|id| !overview.shown.contains(id));
            self.shown = Arc::new(wanted);
            if lacks {
                overview = live.overview(Arc::clone(&self.shown)).await?;
                self.live_rates.take_overview(&overview);
            }
            // A page whose frames are never due together with a sample has a history, too.
            self.keep_shown(now);
        }
        let sample = samples.then(|| {
            self.kept.retain(|_, last| now.saturating_duration_since(*last) < SESSION_HISTORY);
            self.sample_rates.take_overview(&overview);
            self.sample_rates.server_sample(&overview, &self.kept.keys().copied().collect())
        });
        let shown: Vec<&Shown> = views.iter().collect();
        if let Ok(frames) = self.live_rates.server_frames(overview, &shown) {
            for (view, frame) in due.iter().zip(frames) {
                live.send(view, message("status", &frame));
            }
        }
        sample
    }

    /// Remembers that the sessions of the last frames were shown now.
    fn keep_shown(&mut self, now: Instant) {
        for id in self.shown.iter() {
            if self.kept.len() < MAX_KEPT_SESSIONS || self.kept.contains_key(id) {
                self.kept.insert(*id, now);
            }
        }
    }
}

#[cfg(test)]
mod tests;
