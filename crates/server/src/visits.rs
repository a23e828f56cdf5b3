//! Visits of the site over HTTP/3: passes requests of this shard's connections to the slow thread, and its
//! responses back.
//!
//! In: requests, readiness of their streams, parts of responses. Out: the same parts on the streams. Always
//! holds: no packet waits for a page; a visit holds at most one piece of content in each direction, and ends
//! at the slow thread when its stream has ended here.

use std::{
    collections::{HashMap, VecDeque},
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Instant,
};

use bytes::Bytes;
use mpvpn_https::{ResponsePart, Site};
use mpvpn_masque::headers::Headers;
use mpvpn_os::poll::PollWaker;
use mpvpn_threads::shards::{Inbox, Outbox, mailbox};
use mpvpn_tunnel::{RelayId, RelayRead, Server};
use tokio::{runtime::Handle, sync::mpsc, task::AbortHandle};

/// The number of a visit: streams are numbered anew in each connection, and connections are, too.
type VisitNumber = u64;

/// The visits of a shard's connections.
pub(super) struct Visits {
    site: Site,
    /// The slow thread.
    runtime: Option<Handle>,
    to_shard: Outbox<(RelayId, VisitNumber, ResponsePart)>,
    parts: Inbox<(RelayId, VisitNumber, ResponsePart)>,
    open: HashMap<RelayId, Visit>,
    last: VisitNumber,
}

struct Visit {
    number: VisitNumber,
    task: AbortHandle,
    /// The parts of the response that have not been written.
    parts: VecDeque<ResponsePart>,
    /// Takes the content of the request, until its end.
    upload: Option<mpsc::Sender<Bytes>>,
    /// Whether the site wants a piece of it.
    wants_content: bool,
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Visits {
    /// No visits yet. `runtime`: the slow thread; `wake` wakes this shard.
    pub(super) fn new(site: Site, runtime: Option<Handle>, wake: PollWaker) -> Self {
        let (to_shard, parts) = mailbox(wake);
        Self { site, runtime, to_shard, parts, open: HashMap::new(), last: 0 }
    }

    /// Begins a visit from an address.
    pub(super) fn begin(
        &mut self,
        now: Instant,
        server: &mut Server,
        id: RelayId,
        (headers, from): (Headers, Option<SocketAddr>),
    ) {
        let Some(runtime) = &self.runtime else { return server.visit_abort(now, id) };
        self.last += 1;
        let (number, to_shard) = (self.last, self.to_shard.clone());
        let deliver = Arc::new(move |part| to_shard.send((id, number, part)));
        let (upload, pieces) = mpsc::channel(1);
        let (upload, pieces) = match server.relay_read(now, id) {
            RelayRead::Finished => (None, None),
            RelayRead::Broken => return,
            RelayRead::Blocked => (Some(upload), Some(pieces)),
            // The first piece is in its place before the site asks.
            RelayRead::Data(data) => {
                let _ = upload.try_send(data);
                (Some(upload), Some(pieces))
            }
        };
        let from = from.unwrap_or_else(|| (Ipv4Addr::UNSPECIFIED, 0).into());
        let answer = self.site.clone().answer_http3(headers, pieces, from, deliver);
        let task = runtime.spawn(answer).abort_handle();
        self.open.insert(id, Visit { number, task, parts: VecDeque::new(), upload, wants_content: false });
    }

    /// Whether a stream is a visit.
    pub(super) fn has(&self, id: RelayId) -> bool {
        self.open.contains_key(&id)
    }

    /// The stream of a visit was closed.
    pub(super) fn end(&mut self, id: RelayId) {
        self.open.remove(&id);
    }

    /// Takes the parts of responses from the slow thread, after a wake-up call.
    pub(super) fn poll(&mut self, now: Instant, server: &mut Server) {
        while let Some((id, number, part)) = self.parts.next() {
            let Some(visit) = self.open.get_mut(&id).filter(|visit| visit.number == number) else { continue };
            match part {
                ResponsePart::WantsContent => {
                    visit.wants_content = true;
                    self.read(now, server, id);
                }
                part => {
                    visit.parts.push_back(part);
                    self.write(now, server, id);
                }
            }
        }
    }

    /// Passes content of a request to the site, if it wants some.
    pub(super) fn read(&mut self, now: Instant, server: &mut Server, id: RelayId) {
        let Some(visit) = self.open.get_mut(&id) else { return };
        // A piece that waits there is the one that is wanted.
        let Some(upload) =
            visit.upload.as_ref().filter(|upload| visit.wants_content && upload.capacity() > 0)
        else {
            visit.wants_content = false;
            return;
        };
        match server.relay_read(now, id) {
            RelayRead::Data(data) => {
                visit.wants_content = upload.try_send(data).is_err();
            }
            RelayRead::Finished => visit.upload = None,
            // An event follows.
            RelayRead::Blocked | RelayRead::Broken => {}
        }
    }

    /// Writes the response as far as the stream takes it.
    pub(super) fn write(&mut self, now: Instant, server: &mut Server, id: RelayId) {
        let Some(visit) = self.open.get_mut(&id) else { return };
        while let Some(part) = visit.parts.front_mut() {
            match part {
                ResponsePart::Head(headers) => server.visit_respond(id, headers),
                ResponsePart::Content(content, _) => {
                    while !content.is_empty() {
                        let some = server.relay_writable_bytes(now, id).min(content.len());
                        if some == 0 {
                            return;
                        }
                        server.relay_write(now, id, content.split_to(some));
                    }
                }
                ResponsePart::End | ResponsePart::Aborted => {
                    match part {
                        ResponsePart::End => server.visit_finish(now, id),
                        _ => server.visit_abort(now, id),
                    }
                    return self.end(id);
                }
                ResponsePart::WantsContent => {}
            }
            visit.parts.pop_front();
        }
    }
}
