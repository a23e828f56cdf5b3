//! The body of `GET /api/live`: server-sent events (HTML, "Server-sent events").
//!
//! In: frames of a view, and events of the process. Out: messages. Always holds: a message is made when the
//! connection can send it, so that a browser that does not read occupies no memory beyond one message; the
//! stream ends with its session.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use hyper::body::Bytes;
use mpvpn_http::{ResponseBody, pulled_body};
use mpvpn_status::events::EventReader;
use tokio::time::timeout;

use crate::{Shared, live::Stream};

/// Silence after which a comment is sent, so that networks between do not forget the connection. Longer: some
/// do; shorter: more packets. Also how soon a stream ends after its session.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// A message that browsers skip.
const KEEP_ALIVE: &[u8] = b":\n\n";

/// The sources of the messages.
struct Source {
    stream: Stream,
    events: EventReader,
    shared: Arc<Shared>,
    /// Whether a status was sent: it is the first message.
    has_begun: bool,
}

/// The messages of a stream.
pub(crate) fn messages(stream: Stream, events: EventReader, shared: Arc<Shared>) -> ResponseBody {
    pulled_body(Source { stream, events, shared, has_begun: false }, next)
}

async fn next(mut source: Source) -> Option<(Bytes, Source)> {
    // An open page keeps its session.
    if !source.shared.logins().keep(Instant::now(), source.stream.session) {
        return None;
    }
    let message = timeout(KEEP_ALIVE_INTERVAL, source.next_message()).await;
    match message {
        Ok(message) => Some((message?, source)),
        Err(_) => Some((Bytes::from_static(KEEP_ALIVE), source)),
    }
}

impl Source {
    /// `None` at the end of the process.
    async fn next_message(&mut self) -> Option<Bytes> {
        if !self.has_begun {
            self.stream.messages.wait_for(Option::is_some).await.ok()?;
            self.has_begun = true;
            return Some(self.status());
        }
        tokio::select! {
            changed = self.stream.messages.changed() => {
                changed.ok()?;
                Some(self.status())
            }
            lines = self.events.next() => {
                let lines = lines?;
                let messages: Vec<Bytes> = lines
                    .split(|byte| *byte == b'\n')
                    .filter(|line| !line.is_empty())
                    .map(|line| message("event", line))
                    .collect();
                Some(messages.concat().into())
            }
        }
    }

    fn status(&mut self) -> Bytes {
        self.stream.messages.borrow_and_update().clone().unwrap_or_default()
    }
}

/// A message with this data, which has no line end.
pub(crate) fn message(event: &str, data: &[u8]) -> Bytes {
    [format!("event: {event}\ndata: ").as_bytes(), data, b"\n\n"].concat().into()
}
