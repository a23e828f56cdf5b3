//! Apps that get no connection, or no more of it: they are told why, and left.

use std::{
    fmt,
    hash::Hash,
    io::{self, IoSlice},
    time::{Duration, Instant},
};

use bytes::{Buf, Bytes, BytesMut};
use mpvpn_masque::connect::ProxyError;
use mpvpn_os::poll::{Interest, Poller};

use super::{App, HEAD, Leaving, Protocol, Proxy, Stage, Tunnel, http, socks5::Reply};

/// How long an app may take to read a refusal and close.
pub(super) const LEAVING: Duration = Duration::from_secs(2);

impl<Id, Flow> Proxy<Id, Flow>
where
    Id: Copy + Eq + Hash + fmt::Debug,
    Flow: Copy + Eq + Hash + fmt::Debug,
{
    /// There will be no connection.
    pub(super) fn refuse<T: Tunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        token: u64,
        failure: ProxyError,
        why: &str,
    ) {
        let Some(app) = self.apps.get(&token) else { return };
        let (Stage::Waiting(_) | Stage::Connecting(..), Some(to)) = (&app.stage, &app.to) else { return };
        tracing::debug!(%to, why, "no connection for an app");
        let answer = match app.protocol {
            Protocol::Socks5 => Reply::of(failure).bytes(),
            Protocol::Http => {
                let why = format!("no connection to {to}: {why}");
                http::answer(http::status_of(failure), &why)
            }
        };
        self.see_off(now, poller, tunnel, token, answer);
    }

    /// Says a last word to an app that has no connection, and lets it read that.
    pub(super) fn see_off<T: Tunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        token: u64,
        answer: Bytes,
    ) {
        let Some(mut app) = self.take(token) else { return };
        let socket = match app.stage {
            Stage::Asking(asking) => asking.socket,
            Stage::Waiting(wish) => wish.socket,
            Stage::Connecting(id, wish) => {
                if self.tokens.remove(&id).is_some() {
                    tunnel.abort(id);
                }
                wish.socket
            }
            Stage::Leaving(leaving) => leaving.socket,
            Stage::Associated(socket, token) => {
                self.associations.close(tunnel, token);
                socket
            }
            Stage::Open(id, pipe) => {
                self.tokens.remove(&id);
                tunnel.abort(id);
                return pipe.reset();
            }
        };
        if answer.is_empty() {
            return;
        }
        app.stage = Stage::Leaving(Leaving { socket, answer });
        self.put(token, App { due: now + LEAVING, ..app });
        self.say_good_bye(poller, tunnel, token);
    }

    /// Writes the last word, then waits until the app has read it: what it still sends would else break the connection
    /// before it has.
    pub(super) fn say_good_bye<T: Tunnel<Id = Id, Flow = Flow>>(
        &mut self,
        poller: &Poller,
        tunnel: &mut T,
        token: u64,
    ) {
        let Some(app) = self.apps.get_mut(&token) else { return };
        let Stage::Leaving(leaving) = &mut app.stage else { return };
        let mut go_on = || -> io::Result<bool> {
            while !leaving.answer.is_empty() {
                match leaving.socket.write(&[IoSlice::new(&leaving.answer)]) {
                    Ok(count) => leaving.answer.advance(count),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        poller.modify(&leaving.socket, token, Interest::Write)?;
                        return Ok(true);
                    }
                    Err(error) => return Err(error),
                }
                if leaving.answer.is_empty() {
                    leaving.socket.finish()?;
                    poller.modify(&leaving.socket, token, Interest::Read)?;
                }
            }
            let mut sink = BytesMut::with_capacity(HEAD);
            match leaving.socket.read(&mut sink, HEAD) {
                Ok(0) => Ok(false),
                Ok(_) => Ok(true),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
                Err(error) => Err(error),
            }
        };
        if !go_on().unwrap_or(false) {
            self.leave_now(tunnel, token);
        }
    }

    /// Ends a connection without a word. One that stood is reset.
    pub(super) fn leave_now<T: Tunnel<Id = Id, Flow = Flow>>(&mut self, tunnel: &mut T, token: u64) {
        let Some(app) = self.take(token) else { return };
        let (id, pipe) = match app.stage {
            Stage::Open(id, pipe) => (id, Some(pipe)),
            Stage::Connecting(id, _) => (id, None),
            Stage::Asking(_) | Stage::Waiting(_) | Stage::Leaving(_) => return,
            Stage::Associated(_, token) => return self.associations.close(tunnel, token),
        };
        // One that is gone was taken from the list.
        if self.tokens.remove(&id).is_some() {
            tunnel.abort(id);
        }
        if let Some(pipe) = pipe {
            pipe.reset();
        }
    }
}

/// Says what the server found.
pub(super) fn words(failure: ProxyError) -> &'static str {
    match failure {
        ProxyError::Dns => "the name has no address",
        ProxyError::Prohibited => "the mpvpn server does not allow it",
        ProxyError::Refused => "nobody listens there",
        ProxyError::Unroutable => "no route leads there, or the host is down",
        ProxyError::TimedOut => "it does not answer",
        ProxyError::Busy => "the mpvpn server has too many connections",
        ProxyError::Other => "the mpvpn server could not make it",
    }
}
