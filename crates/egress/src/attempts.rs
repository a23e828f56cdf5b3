//! Connects to a host that has several addresses ("happy eyeballs", RFC 8305).
//!
//! In: addresses, time, and results of attempts. Out: the first established connection, or why there is none.
//! Always holds: address families alternate, IPv6 first; the next attempt starts 250 ms after the one before,
//! or as soon as that has failed; each concurrent attempt counts in the budget like a connection, so
//! descriptors stay bounded.

use std::{
    collections::VecDeque,
    io,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use mpvpn_masque::connect::ProxyError;
use mpvpn_os::{
    TcpSocket,
    poll::{Interest, Poller},
    tcp::ConnectFailure,
};

use super::budget::Permit;

/// The recommended "Connection Attempt Delay" (RFC 8305 §8).
const CONNECTION_ATTEMPT_DELAY: Duration = Duration::from_millis(250);
/// Addresses of a host that are tried. More: longer until the failure. Chosen.
const MAX_ADDRESSES: usize = 8;

/// The attempts for one relay.
pub(super) struct Attempts {
    /// Addresses not tried yet.
    remaining: VecDeque<SocketAddr>,
    in_progress: Vec<Attempt>,
    started: u8,
    /// When the next attempt starts, if an address is left.
    next_attempt_at: Instant,
    /// The most specific failure so far.
    failure: Option<(ProxyError, String)>,
}

struct Attempt {
    number: u8,
    to: SocketAddr,
    socket: TcpSocket,
    /// Its permit, if it does not use the relay's own.
    extra_permit: Option<Permit>,
}

/// The state of all attempts.
pub(super) enum AttemptsState {
    /// An attempt runs, or an address is left.
    InProgress,
    /// All addresses have failed.
    Failed(ProxyError, String),
}

impl Attempts {
    /// For addresses in the resolver's order. [`Self::advance`] starts the first attempt.
    pub(super) fn new(now: Instant, addresses: impl IntoIterator<Item = SocketAddr>) -> Self {
        Self {
            remaining: interleaved(addresses),
            in_progress: Vec::new(),
            started: 0,
            next_attempt_at: now,
            failure: None,
        }
    }

    /// When [`Self::advance`] must be called.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        (!self.remaining.is_empty()).then_some(self.next_attempt_at)
    }

    /// Starts the next attempt if it is due or none is running. `permit` is the relay's, and `token` makes an
    /// attempt's poller token from its number.
    pub(super) fn advance(
        &mut self,
        now: Instant,
        poller: &Poller,
        permit: &Permit,
        token: impl Fn(u8) -> u64,
    ) -> AttemptsState {
        while !self.remaining.is_empty() && (self.in_progress.is_empty() || self.next_attempt_at <= now) {
            self.next_attempt_at = now + CONNECTION_ATTEMPT_DELAY;
            let relay_permit_is_free = self.in_progress.iter().all(|attempt| attempt.extra_permit.is_some());
            let extra_permit = match relay_permit_is_free {
                true => None,
                false => match permit.another() {
                    Ok(extra_permit) => Some(extra_permit),
                    // The budget is used up: wait for the running attempts.
                    Err(_) => break,
                },
            };
            let Some(to) = self.remaining.pop_front() else { break };
            let number = self.started;
            self.started += 1;
            let started = TcpSocket::connect(to).and_then(|socket| {
                poller.add(&socket, token(number), Interest::Write)?;
                Ok(socket)
            });
            match started {
                Ok(socket) => {
                    self.in_progress.push(Attempt { number, to, socket, extra_permit });
                    break;
                }
                Err(error) => self.record_failure(to, &error),
            }
        }
        match self.failure.take_if(|_| self.in_progress.is_empty() && self.remaining.is_empty()) {
            Some((failure, reason)) => AttemptsState::Failed(failure, reason),
            None => AttemptsState::InProgress,
        }
    }

    /// Handles an event of an attempt's socket. Returns the socket if it is connected; otherwise
    /// [`Self::advance`] must be called.
    pub(super) fn on_socket_ready(&mut self, now: Instant, number: u8) -> Option<TcpSocket> {
        let at = self.in_progress.iter().position(|attempt| attempt.number == number)?;
        let attempt = self.in_progress.swap_remove(at);
        match attempt.socket.connect_result() {
            Ok(()) => Some(attempt.socket),
            Err(error) => {
                self.record_failure(attempt.to, &error);
                // Start the next attempt at once.
                self.next_attempt_at = now;
                None
            }
        }
    }

    fn record_failure(&mut self, to: SocketAddr, error: &io::Error) {
        let failure = match ConnectFailure::of(error) {
            ConnectFailure::Refused => ProxyError::Refused,
            ConnectFailure::Unroutable => ProxyError::Unroutable,
            ConnectFailure::TimedOut => ProxyError::TimedOut,
            ConnectFailure::Forbidden => ProxyError::Prohibited,
            ConnectFailure::Exhausted => ProxyError::Busy,
            ConnectFailure::Other => ProxyError::Other,
        };
        if self.failure.as_ref().is_none_or(|(before, _)| specificity(failure) >= specificity(*before)) {
            self.failure = Some((failure, format!("{to}: {error}")));
        }
    }
}

/// Ranks failures: a refusal says more about a host than a missing route to one of its addresses.
fn specificity(failure: ProxyError) -> u8 {
    match failure {
        ProxyError::Refused => 5,
        ProxyError::Prohibited => 4,
        ProxyError::TimedOut => 3,
        ProxyError::Busy => 2,
        ProxyError::Unroutable => 1,
        ProxyError::Dns | ProxyError::Other => 0,
    }
}

/// Alternates the address families, IPv6 first, each in its order (RFC 8305 §4).
fn interleaved(addresses: impl IntoIterator<Item = SocketAddr>) -> VecDeque<SocketAddr> {
    let plain = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
    let (v6, v4): (Vec<_>, Vec<_>) =
        addresses.into_iter().map(plain).partition(|address| matches!(address.ip(), IpAddr::V6(_)));
    let longest = v6.len().max(v4.len());
    let turns = (0..longest).flat_map(|at| [v6.get(at), v4.get(at)]);
    turns.flatten().copied().take(MAX_ADDRESSES).collect()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use mpvpn_os::poll::Events;

    use mpvpn_http::limiter::Limiter;

    use super::*;

    fn addresses(list: &[&str]) -> Vec<SocketAddr> {
        list.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn families_take_turns_and_ipv6_begins() {
        let list = ["192.0.2.1:1", "192.0.2.2:1", "[2001:db8::1]:1", "192.0.2.3:1", "[::ffff:192.0.2.4]:1"];
        let expected = ["[2001:db8::1]:1", "192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1", "192.0.2.4:1"];
        assert_eq!(interleaved(addresses(&list)), addresses(&expected));
        assert_eq!(interleaved(vec!["192.0.2.1:1".parse().unwrap(); 100]).len(), MAX_ADDRESSES);
    }

    #[test]
    fn the_next_begins_after_a_pause_and_only_as_many_as_are_allowed() {
        // Nothing polls the attempts, so they stay in progress.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let (poller, budget, mut now) = (Poller::new().unwrap(), Limiter::new(2, 2), Instant::now());
        let permit = budget.try_acquire("anna".into()).unwrap();
        let mut attempts = Attempts::new(now, [to; 4]);
        let advance = |attempts: &mut Attempts, now| {
            assert!(matches!(attempts.advance(now, &poller, &permit, u64::from), AttemptsState::InProgress));
            attempts.in_progress.len()
        };
        assert_eq!(advance(&mut attempts, now), 1);
        assert_eq!(advance(&mut attempts, now + CONNECTION_ATTEMPT_DELAY / 2), 1);
        assert_eq!(attempts.poll_timeout(), Some(now + CONNECTION_ATTEMPT_DELAY));
        now += CONNECTION_ATTEMPT_DELAY;
        assert_eq!(advance(&mut attempts, now), 2);
        assert_eq!(budget.in_use(), 2);
        now += CONNECTION_ATTEMPT_DELAY;
        assert_eq!(advance(&mut attempts, now), 2, "more than the budget has");
        assert_eq!(attempts.poll_timeout(), Some(now + CONNECTION_ATTEMPT_DELAY));
        drop(attempts);
        assert_eq!(budget.in_use(), 1);
    }

    #[test]
    fn the_next_begins_at_once_when_one_fails() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let good = listener.local_addr().unwrap();
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (poller, budget, now) = (Poller::new().unwrap(), Limiter::new(9, 9), Instant::now());
        let permit = budget.try_acquire("anna".into()).unwrap();
        let mut attempts = Attempts::new(now, [closed, good]);
        let mut events = Events::with_capacity(4);
        for _ in 0..3 {
            assert!(matches!(attempts.advance(now, &poller, &permit, u64::from), AttemptsState::InProgress));
            poller.wait(&mut events, Some(Duration::from_secs(5))).unwrap();
            let numbers: Vec<_> = events.iter().map(|event| event.token as u8).collect();
            if numbers.into_iter().find_map(|number| attempts.on_socket_ready(now, number)).is_some() {
                return;
            }
        }
        panic!("no connection");
    }

    #[test]
    fn the_failure_that_says_most_is_told() {
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (poller, budget, now) = (Poller::new().unwrap(), Limiter::new(9, 9), Instant::now());
        let permit = budget.try_acquire("anna".into()).unwrap();
        // Connecting to a multicast address always fails.
        let mut attempts = Attempts::new(now, [closed, "[ff02::1]:1".parse().unwrap()]);
        for _ in 0..9 {
            match attempts.advance(now, &poller, &permit, u64::from) {
                AttemptsState::Failed(failure, reason) => {
                    assert_eq!(failure, ProxyError::Refused);
                    assert!(reason.starts_with(&closed.to_string()), "{reason}");
                    return;
                }
                AttemptsState::InProgress => {
                    let mut events = Events::with_capacity(4);
                    poller.wait(&mut events, Some(Duration::from_secs(5))).unwrap();
                    let numbers: Vec<_> = events.iter().map(|event| event.token as u8).collect();
                    assert!(
                        numbers.into_iter().all(|number| attempts.on_socket_ready(now, number).is_none())
                    );
                }
            }
        }
        panic!("nothing was told");
    }
}
