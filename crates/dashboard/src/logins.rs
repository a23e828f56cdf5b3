//! The logged-in browsers. Time is an argument.
//!
//! In: codes of the local API, and those that browsers show. Out: sessions, with a cookie and a token each.
//! Always holds: a code logs in once, and not after [`CODE_LIFETIME`]; codes, sessions and counted networks
//! are bounded; secrets are compared in constant time.
//!
//! A session needs both of its secrets: browsers send a cookie to all ports of a host, so that a server of
//! another user of this machine may see it, and the token, which the page keeps for itself, proves that the
//! page sends the request.

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant},
};

use mpvpn_http::limiter::ClientNetwork;

use crate::secret::Secret;

/// How long a code works. Longer: a link in the history of a terminal stays of use; shorter: people who copy
/// it to another machine are late. Chosen.
pub(crate) const CODE_LIFETIME: Duration = Duration::from_secs(600);
/// Codes that work at a time; a further one replaces the oldest. More: memory; fewer: people disturb each
/// other. Chosen.
const MAX_CODES: usize = 8;
/// Sessions at a time; a further one replaces the one that was used least recently. More: memory; fewer:
/// people disturb each other. Chosen.
const MAX_SESSIONS: usize = 16;
/// A session ends when it was not used for this time, a working day. Longer: a browser that was left open
/// stays logged in; shorter: people log in again and again.
const SESSION_IDLE_LIFETIME: Duration = Duration::from_secs(12 * 3600);
/// Wrong codes of a network within [`ATTEMPT_WINDOW`] before further ones are refused without a look, which
/// bounds log lines and work; 256 random bits are not guessed with any number. Right codes work all the same:
/// else other users of this machine could keep its administrator out.
const MAX_WRONG_ATTEMPTS: u32 = 10;
const ATTEMPT_WINDOW: Duration = Duration::from_secs(60);
/// Networks whose wrong codes are counted; further ones wait for the next window. More: memory for strangers.
/// Chosen.
const MAX_COUNTED_NETWORKS: usize = 256;

/// Codes and sessions.
#[derive(Debug, Default)]
pub(crate) struct Logins {
    codes: VecDeque<Code>,
    sessions: Vec<Session>,
    last_session: u64,
    attempts: HashMap<ClientNetwork, Attempts>,
}

#[derive(Debug)]
struct Code {
    secret: Secret,
    expires: Instant,
}

#[derive(Debug)]
struct Session {
    id: SessionId,
    cookie: Secret,
    token: Secret,
    used: Instant,
}

#[derive(Debug)]
struct Attempts {
    since: Instant,
    wrong: u32,
}

/// A session, numbered in the order of log-ins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SessionId(u64);

/// The secrets of a new session.
#[derive(Debug)]
pub(crate) struct NewSession {
    pub(crate) cookie: Secret,
    pub(crate) token: Secret,
}

/// Why a code does not log in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoginRefusal {
    /// It never was one, was used, or has expired.
    Unknown,
    /// Too many wrong ones came from this network.
    TooMany,
}

impl Logins {
    /// Adds a code that logs in once.
    pub(crate) fn add_code(&mut self, now: Instant, secret: Secret) {
        self.forget_old(now);
        if self.codes.len() >= MAX_CODES {
            self.codes.pop_front();
        }
        self.codes.push_back(Code { secret, expires: now + CODE_LIFETIME });
    }

    /// Logs in with a code that came from `network`; `new` are the secrets of the session.
    pub(crate) fn log_in(
        &mut self,
        now: Instant,
        network: ClientNetwork,
        code: &str,
        new: &NewSession,
    ) -> Result<(), LoginRefusal> {
        self.forget_old(now);
        // All are compared, whichever is the right one.
        let mut found = None;
        for (at, known) in self.codes.iter().enumerate() {
            if known.secret.is(code) {
                found = Some(at);
            }
        }
        let Some(found) = found else { return Err(self.count_wrong(now, network)) };
        self.codes.remove(found);
        if self.sessions.len() >= MAX_SESSIONS {
            self.sessions.sort_by_key(|session| session.used);
            self.sessions.remove(0);
        }
        self.last_session += 1;
        self.sessions.push(Session {
            id: SessionId(self.last_session),
            cookie: new.cookie.clone(),
            token: new.token.clone(),
            used: now,
        });
        Ok(())
    }

    fn count_wrong(&mut self, now: Instant, network: ClientNetwork) -> LoginRefusal {
        if self.attempts.len() >= MAX_COUNTED_NETWORKS && !self.attempts.contains_key(&network) {
            return LoginRefusal::TooMany;
        }
        let attempts = self.attempts.entry(network).or_insert(Attempts { since: now, wrong: 0 });
        attempts.wrong = attempts.wrong.saturating_add(1);
        if attempts.wrong > MAX_WRONG_ATTEMPTS { LoginRefusal::TooMany } else { LoginRefusal::Unknown }
    }

    /// The session with this cookie and this token, which lasts on.
    pub(crate) fn session(&mut self, now: Instant, cookie: &str, token: &str) -> Option<SessionId> {
        self.forget_old(now);
        let mut found = None;
        for session in &mut self.sessions {
            if session.cookie.is(cookie) & session.token.is(token) {
                session.used = now;
                found = Some(session.id);
            }
        }
        found
    }

    /// Whether a session has not ended; it lasts on.
    pub(crate) fn keep(&mut self, now: Instant, id: SessionId) -> bool {
        self.forget_old(now);
        let session = self.sessions.iter_mut().find(|session| session.id == id);
        session.map(|session| session.used = now).is_some()
    }

    /// Ends a session.
    pub(crate) fn log_out(&mut self, id: SessionId) {
        self.sessions.retain(|session| session.id != id);
    }

    fn forget_old(&mut self, now: Instant) {
        self.codes.retain(|code| now < code.expires);
        self.sessions.retain(|session| now.saturating_duration_since(session.used) < SESSION_IDLE_LIFETIME);
        self.attempts.retain(|_, attempts| now.saturating_duration_since(attempts.since) < ATTEMPT_WINDOW);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(last: u8) -> ClientNetwork {
        ClientNetwork::of([192, 0, 2, last].into())
    }

    fn secrets(name: &str) -> NewSession {
        NewSession {
            cookie: Secret::of(&format!("cookie of {name}")),
            token: Secret::of(&format!("token of {name}")),
        }
    }

    fn log_in(logins: &mut Logins, now: Instant, code: &str, name: &str) -> Result<(), LoginRefusal> {
        logins.log_in(now, network(1), code, &secrets(name))
    }

    #[test]
    fn a_code_logs_in_once_and_a_session_needs_both_of_its_secrets() {
        let (now, mut logins) = (Instant::now(), Logins::default());
        logins.add_code(now, Secret::of("one"));
        assert_eq!(log_in(&mut logins, now, "two", "a"), Err(LoginRefusal::Unknown));
        assert_eq!(log_in(&mut logins, now, "one", "a"), Ok(()));
        assert_eq!(log_in(&mut logins, now, "one", "b"), Err(LoginRefusal::Unknown));
        let id = logins.session(now, "cookie of a", "token of a").unwrap();
        for (cookie, token) in [("cookie of a", "token of b"), ("cookie of a", ""), ("", "token of a")] {
            assert_eq!(logins.session(now, cookie, token), None);
        }
        assert!(logins.keep(now, id));
        logins.log_out(id);
        assert!(!logins.keep(now, id) && logins.session(now, "cookie of a", "token of a").is_none());
    }

    #[test]
    fn codes_and_sessions_end_by_time() {
        let (now, mut logins) = (Instant::now(), Logins::default());
        logins.add_code(now, Secret::of("one"));
        logins.add_code(now, Secret::of("two"));
        assert!(log_in(&mut logins, now + CODE_LIFETIME - Duration::from_secs(1), "one", "a").is_ok());
        assert!(log_in(&mut logins, now + CODE_LIFETIME, "two", "b").is_err());
        let used = now + CODE_LIFETIME + SESSION_IDLE_LIFETIME - Duration::from_secs(2);
        assert!(logins.session(used, "cookie of a", "token of a").is_some());
        assert!(logins.session(used + SESSION_IDLE_LIFETIME, "cookie of a", "token of a").is_none());
    }

    #[test]
    fn wrong_codes_are_limited_for_each_network_and_never_keep_a_right_one_out() {
        let (now, mut logins) = (Instant::now(), Logins::default());
        logins.add_code(now, Secret::of("right"));
        let mut attempt = |now, network, code: &str| logins.log_in(now, network, code, &secrets("a"));
        for _ in 0..MAX_WRONG_ATTEMPTS {
            assert_eq!(attempt(now, network(1), "wrong"), Err(LoginRefusal::Unknown));
        }
        assert_eq!(attempt(now, network(1), "wrong"), Err(LoginRefusal::TooMany));
        assert_eq!(attempt(now, network(2), "wrong"), Err(LoginRefusal::Unknown));
        let later = now + ATTEMPT_WINDOW;
        assert_eq!(attempt(later, network(1), "wrong"), Err(LoginRefusal::Unknown));
        for other in 0..=255 {
            let _ = attempt(later, network(other), "wrong");
        }
        let far = ClientNetwork::of([203, 0, 113, 1].into());
        assert_eq!(attempt(later, far, "wrong"), Err(LoginRefusal::TooMany), "no more networks are counted");
        assert_eq!(attempt(later, far, "right"), Ok(()));
        assert_eq!(logins.attempts.len(), MAX_COUNTED_NETWORKS);
    }

    #[test]
    fn neither_codes_nor_sessions_pile_up() {
        let (now, mut logins) = (Instant::now(), Logins::default());
        let at = |number: u64| now + Duration::from_millis(number);
        for number in 0..100 {
            logins.add_code(at(number), Secret::of(&format!("code {number}")));
        }
        assert_eq!(logins.codes.len(), MAX_CODES);
        assert!(log_in(&mut logins, at(100), "code 0", "a").is_err());
        for number in 100..200 {
            logins.add_code(at(number), Secret::of(&format!("code {number}")));
            log_in(&mut logins, at(number), &format!("code {number}"), &number.to_string()).unwrap();
            assert!(
                logins.session(at(number), "cookie of 100", "token of 100").is_some(),
                "a session in use stays"
            );
        }
        assert_eq!(logins.sessions.len(), MAX_SESSIONS);
    }
}
