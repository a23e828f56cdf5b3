//! Refuses and closes the connections of apps.

use std::{
    fmt,
    hash::Hash,
    io::{self, IoSlice},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use mpvpn_masque::connect::ProxyError;
use mpvpn_os::poll::Interest;
use mpvpn_sockets::splice::Context;

use super::{App, MAX_REQUEST_BYTES, Protocol, Proxy, ProxyTunnel, Refusal, Stage, http, socks5::Reply};

/// How long an app may take to read a refusal and close. Longer: slots. Shorter: slow apps see a reset
/// instead. Chosen.
pub(super) const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);

impl<Id, Flow> Proxy<Id, Flow>
where
    Id: Copy + Eq + Hash + fmt::Debug,
    Flow: Copy + Eq + Hash + fmt::Debug,
{
    /// Refuses a request that was waiting for its connection.
    pub(super) fn refuse<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        cx: &mut Context<'_, T>,
        token: u64,
        failure: ProxyError,
        why: &str,
    ) {
        let Some(app) = self.apps.get(&token) else { return };
        let (Stage::AwaitingStream(_) | Stage::Connecting(..), Some(to)) = (&app.stage, &app.to) else {
            return;
        };
        tracing::debug!(%to, why, "refused the connection of an app");
        let answer = match app.protocol {
            Protocol::Socks5 => Reply::of(failure).bytes(),
            Protocol::Http => {
                let why = format!("no connection to {to}: {why}");
                http::response(http::status_of(failure), &why)
            }
        };
        self.send_refusal(cx, token, answer);
    }

    /// Sends a last response to an app without a connection, and closes after the app has read it.
    pub(super) fn send_refusal<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        cx: &mut Context<'_, T>,
        token: u64,
        answer: Bytes,
    ) {
        let Some(mut app) = self.remove(token) else { return };
        let socket = match app.stage {
            Stage::ReadingRequest(reader) => reader.socket,
            Stage::AwaitingStream(pending) => pending.socket,
            Stage::Connecting(id, pending) => {
                if self.tokens.remove(&id).is_some() {
                    cx.streams.abort(id);
                }
                pending.socket
            }
            Stage::Refusing(refusal) => refusal.socket,
            Stage::Associated(socket, token) => {
                self.associations.close(cx.streams, token);
                socket
            }
            Stage::Open(id, splice) => {
                self.tokens.remove(&id);
                cx.streams.abort(id);
                return splice.reset();
            }
        };
        if answer.is_empty() {
            return;
        }
        app.stage = Stage::Refusing(Refusal { socket, answer });
        self.insert(token, App { due: cx.now + REFUSAL_TIMEOUT, ..app });
        self.continue_refusal(cx, token);
    }

    /// Sends the rest of the response, then waits until the app closes: unread bytes at a close would cause a
    /// reset, which can destroy the response.
    pub(super) fn continue_refusal<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        cx: &mut Context<'_, T>,
        token: u64,
    ) {
        let Some(app) = self.apps.get_mut(&token) else { return };
        let Stage::Refusing(refusal) = &mut app.stage else { return };
        let mut go_on = || -> io::Result<bool> {
            while !refusal.answer.is_empty() {
                match refusal.socket.write(&[IoSlice::new(&refusal.answer)]) {
                    Ok(count) => refusal.answer.advance(count),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        cx.poller.modify(&refusal.socket, token, Interest::Write)?;
                        return Ok(true);
                    }
                    Err(error) => return Err(error),
                }
                if refusal.answer.is_empty() {
                    refusal.socket.finish()?;
                    cx.poller.modify(&refusal.socket, token, Interest::Read)?;
                }
            }
            let mut sink = BytesMut::with_capacity(MAX_REQUEST_BYTES);
            match refusal.socket.read(&mut sink, MAX_REQUEST_BYTES) {
                Ok(0) => Ok(false),
                Ok(_) => Ok(true),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
                Err(error) => Err(error),
            }
        };
        if !go_on().unwrap_or(false) {
            self.close_app(cx.streams, token);
        }
    }

    /// Closes a connection without a response. An established one is reset.
    pub(super) fn close_app<T: ProxyTunnel<Id = Id, Flow = Flow>>(&mut self, tunnel: &mut T, token: u64) {
        let Some(app) = self.remove(token) else { return };
        let (id, splice) = match app.stage {
            Stage::Open(id, splice) => (id, Some(splice)),
            Stage::Connecting(id, _) => (id, None),
            Stage::ReadingRequest(_) | Stage::AwaitingStream(_) | Stage::Refusing(_) => return,
            Stage::Associated(_, token) => return self.associations.close(tunnel, token),
        };
        // A stream that was reset is no longer in the table.
        if self.tokens.remove(&id).is_some() {
            tunnel.abort(id);
        }
        if let Some(splice) = splice {
            splice.reset();
        }
    }
}

/// The reason for a failure, as text.
pub(super) fn failure_text(failure: ProxyError) -> &'static str {
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
