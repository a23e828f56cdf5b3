//! Users and their tokens, shown as bearer tokens (RFC 6750) or as passwords (RFC 7617).
//!
//! In: the [`Users`], and the `authorization` field of a request. Out: the [`User`], or why the
//! request is refused. Always holds: a check looks the SHA-256 of the shown token up and then compares in
//! constant time. The time of the look-up may depend on the hash; of a token with 256 random bits that tells
//! nothing, because nobody can choose tokens whose hash comes closer to that of another one step by step.

use std::time::SystemTime;

use base64::{Engine, engine::general_purpose::STANDARD};

use crate::{
    client_certificates::CertificateCheck,
    denied::{Denied, User},
    users::{SharedUsers, Users},
};
use mpvpn_identity::token::{MAX_TOKEN_BYTES, ParseTokenError, Token};

/// Decides whether a request may use the server.
#[derive(Clone, Debug)]
pub enum Authenticator {
    /// Every request is accepted.
    None,
    /// Requests with the token of a user are accepted.
    Tokens(SharedUsers),
    /// Requests of clients whose certificate names a user are accepted.
    Certificates(CertificateCheck),
}

impl Authenticator {
    /// The users, if they are known by name.
    pub fn users(&self) -> Option<&SharedUsers> {
        match self {
            Self::None => None,
            Self::Tokens(users) => Some(users),
            Self::Certificates(check) => Some(check.users()),
        }
    }

    /// The user of a client that shows this value of the field `authorization`, and whose TLS handshake has
    /// verified this certificate (DER); and what names the credential that counts: the SHA-256 of the token,
    /// or the number of the certificate.
    ///
    /// # Errors
    /// If the client has no access.
    pub fn authenticate(
        &self,
        authorization: Option<&str>,
        certificate: Option<&[u8]>,
    ) -> Result<(User, Option<[u8; 32]>), Denied> {
        match self {
            Self::None => Ok((User { name: "anonymous".into() }, None)),
            Self::Tokens(users) => {
                by_token(&users.now(), authorization).map(|(user, hash)| (user, Some(hash)))
            }
            Self::Certificates(check) => {
                let checked = check.check(authorization, certificate, SystemTime::now());
                checked.map(|(user, id)| (user, Some(id)))
            }
        }
    }

    /// The user whose token is in `authorization`, the value of the request's field of that name.
    pub fn check(&self, authorization: Option<&str>) -> Result<User, Denied> {
        self.authenticate(authorization, None).map(|(user, _)| user)
    }

    /// Whether a user has access now by a credential that [`Self::authenticate`] has named. The end of a
    /// certificate's validity does not count here.
    pub fn has_access(&self, user: &str, credential: &[u8; 32]) -> bool {
        let now = SystemTime::now();
        match self {
            Self::None => true,
            Self::Tokens(users) => {
                users.now().user_by_hash(credential, now).is_ok_and(|own| own.name == user)
            }
            Self::Certificates(check) => check.has_access(user, credential, now),
        }
    }
}

/// The user whose token is in `authorization`, and the SHA-256 of the token.
fn by_token(users: &Users, authorization: Option<&str>) -> Result<(User, [u8; 32]), Denied> {
    let (scheme, rest) = authorization.ok_or(Denied::Missing)?.split_once(' ').ok_or(Denied::Malformed)?;
    let rest = rest.trim_matches(' ');
    let (name, token) = match scheme {
        _ if scheme.eq_ignore_ascii_case("bearer") => (None, rest.parse()),
        _ if scheme.eq_ignore_ascii_case("basic") => {
            let (name, password) = name_and_password(rest).ok_or(Denied::Malformed)?;
            (Some(name), password.parse())
        }
        // Clients of the first drafts of MASQUE.
        _ if scheme.eq_ignore_ascii_case("privacytoken") => {
            (None, rest.strip_prefix("token=").ok_or(Denied::Malformed)?.trim_matches('"').parse())
        }
        _ => return Err(Denied::Malformed),
    };
    let token: Token = token.map_err(|ParseTokenError| Denied::Malformed)?;
    let hash = token.hash();
    let holder = users.user_by_hash(&hash, SystemTime::now())?;
    if name.is_none_or(|name| name == holder.name) { Ok((holder, hash)) } else { Err(Denied::Unknown) }
}

/// Name and password of Basic credentials (RFC 7617 §2); the password is the token.
fn name_and_password(encoded: &str) -> Option<(String, String)> {
    // Longer credentials cannot have a valid token: they are not decoded.
    let decoded = (encoded.len() <= 4 * MAX_TOKEN_BYTES).then(|| STANDARD.decode(encoded).ok()).flatten()?;
    let text = String::from_utf8(decoded).ok()?;
    let (name, password) = text.split_once(':')?;
    Some((name.to_owned(), password.to_owned()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::file::{LockedUsers, UserSettings};

    fn alice() -> (Authenticator, Token) {
        let home = tempfile::tempdir().unwrap();
        let mut file = LockedUsers::open(&home.path().join("users.toml")).unwrap();
        let [token, _] = ["alice", "bob"].map(|name| file.add(name, &UserSettings::default()).unwrap());
        (Authenticator::Tokens(file.users().clone().into()), token)
    }

    #[test]
    fn a_users_token_lets_that_user_in() {
        let (auth, token) = alice();
        assert_eq!(auth.check(Some(&token.authorization())), Ok(User { name: "alice".into() }));
        let old = format!("PrivacyToken token={}", token.reveal());
        assert_eq!(auth.check(Some(&old)), Ok(User { name: "alice".into() }));
        let lower = format!("bearer  {}", token.reveal());
        assert_eq!(auth.check(Some(&lower)), Ok(User { name: "alice".into() }));
    }

    #[test]
    fn a_token_is_a_password_where_programs_want_one() {
        let (auth, token) = alice();
        let basic = |text: String| format!("Basic {}", STANDARD.encode(text));
        let shown = basic(format!("alice:{}", token.reveal()));
        assert_eq!(auth.check(Some(&shown)), Ok(User { name: "alice".into() }));
        for (text, why) in [
            (format!("bob:{}", token.reveal()), Denied::Unknown),
            (format!("alice:{}", Token::generate().unwrap().reveal()), Denied::Unknown),
            ("alice:".to_owned(), Denied::Malformed),
            (format!("alice{}", token.reveal()), Denied::Malformed),
            (format!("{}:{}", "a".repeat(9000), token.reveal()), Denied::Malformed),
        ] {
            assert_eq!(auth.check(Some(&basic(text))), Err(why));
        }
        assert_eq!(auth.check(Some("Basic ?")), Err(Denied::Malformed));
    }

    #[test]
    fn everything_else_is_kept_out() {
        let (auth, token) = alice();
        let stranger = Token::generate().unwrap();
        let half = &token.reveal()[..20];
        for (shown, why) in [
            (None, Denied::Missing),
            (Some(""), Denied::Malformed),
            (Some("Bearer"), Denied::Malformed),
            (Some("Bearer "), Denied::Malformed),
            (Some(token.reveal()), Denied::Malformed),
            (Some("Basic YTpi"), Denied::Unknown),
            (Some("Digest YTpi"), Denied::Malformed),
            (Some("PrivacyToken abc"), Denied::Malformed),
            (Some("PrivacyToken token=abc"), Denied::Unknown),
            (Some("Bearer a b"), Denied::Malformed),
            (Some(&*stranger.authorization()), Denied::Unknown),
            (Some(&*format!("Bearer {half}")), Denied::Unknown),
        ] {
            assert_eq!(auth.check(shown), Err(why), "{shown:?}");
        }
        let endless = format!("Bearer {}", "x".repeat(100_000));
        assert_eq!(auth.check(Some(&endless)), Err(Denied::Malformed));
        assert_eq!(
            Authenticator::Tokens(Users::default().into()).check(Some("Bearer x")),
            Err(Denied::Unknown)
        );
    }

    #[test]
    fn clones_see_changes_of_the_users() {
        let (auth, token) = alice();
        let clone = auth.clone();
        let Authenticator::Tokens(users) = &auth else { panic!("users have tokens") };
        assert_eq!(users.replace(Users::default()).iter().count(), 2);
        assert_eq!(clone.check(Some(&token.authorization())), Err(Denied::Unknown));
    }

    #[test]
    fn with_no_auth_everybody_is_anonymous() {
        assert_eq!(Authenticator::None.check(None).unwrap().name, "anonymous");
    }

    proptest! {
        #[test]
        fn no_field_value_makes_the_check_fail_badly(value in ".{0,200}") {
            prop_assert!(alice().0.check(Some(&value)).is_err());
        }
    }
}
