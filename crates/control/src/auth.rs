//! Users and their tokens, shown as bearer tokens (RFC 6750) or as passwords (RFC 7617).
//!
//! In: the users' file, and the `authorization` field of a request. Out: the [`User`], or why the request is refused.
//! Always holds: the file has only the SHA-256 of a token. A check looks the SHA-256 of the shown token up and then compares
//! in constant time. The time of the look-up may depend on the hash; of a token with 256 random bits that tells nothing,
//! because nobody can choose tokens whose hash comes closer to that of another one step by step.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::Path,
    str::FromStr,
};

use aws_lc_rs::{
    constant_time::verify_slices_are_equal,
    digest,
    rand::{SecureRandom, SystemRandom},
};
use base64::{
    Engine,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Error, Result,
    config::{rules::UserName, schema},
    files,
    identity::Fingerprint,
};

/// Longest token (bytes). Own tokens have 49; other identity providers use up to a few hundred. A longer limit makes each
/// refused request cost more hashing; a shorter one refuses such tokens.
const MAX_TOKEN_BYTES: usize = 512;
/// Prefix of the tokens that mpvpn makes, so that people and secret scanners recognise them.
const TOKEN_PREFIX: &str = "mpvpn_";
/// Users in a file. Chosen. More: a file that takes long to read and to write.
const MAX_USERS: usize = 10_000;

/// A secret that identifies a user. It never appears in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// A new token with 256 random bits.
    pub fn generate() -> Result<Self> {
        let mut bits = [0; 32];
        SystemRandom::new().fill(&mut bits).map_err(|_| Error::Random)?;
        Ok(Self(format!("{TOKEN_PREFIX}{}", URL_SAFE_NO_PAD.encode(bits))))
    }

    /// The secret text, for the place that sends or shows it.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// The value of the `authorization` field with this token (RFC 6750 §2.1).
    pub fn authorization(&self) -> String {
        format!("Bearer {}", self.0)
    }

    fn hash(&self) -> [u8; 32] {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest::digest(&digest::SHA256, self.0.as_bytes()).as_ref());
        hash
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// A text that is not a token. The message does not repeat the text, which may be a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is not a token: expected 1 to {MAX_TOKEN_BYTES} letters, digits and - . _ ~ + / =")]
pub struct ParseTokenError;

impl FromStr for Token {
    type Err = ParseTokenError;

    /// `b64token` of RFC 6750, section 2.1.
    fn from_str(text: &str) -> std::result::Result<Self, ParseTokenError> {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || b"-._~+/=".contains(&b);
        match (1..=MAX_TOKEN_BYTES).contains(&text.len()) && text.bytes().all(allowed) {
            true => Ok(Self(text.into())),
            false => Err(ParseTokenError),
        }
    }
}

/// The authenticated user of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The name in the users' file; `anonymous` without authentication.
    pub name: String,
}

/// Why a request is refused. The response is 401 in all cases, so that a stranger does not learn which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// No `authorization` field.
    #[error("no token was shown")]
    Missing,
    /// The field is neither `Bearer` and a token, nor `Basic` with a name and a token.
    #[error("the authorization field has neither a bearer token nor a user's name and token")]
    Malformed,
    /// No user has this token, or another user than the named one.
    #[error("no user has this token")]
    Unknown,
}

/// Decides whether a request may use the server.
#[derive(Clone, Debug)]
pub enum Authenticator {
    /// Every request is accepted.
    None,
    /// Requests with the token of a user are accepted.
    Tokens(Users),
}

impl Authenticator {
    /// The user whose token is in `authorization`, the value of the request's field of that name.
    pub fn check(&self, authorization: Option<&str>) -> std::result::Result<User, Denied> {
        let users = match self {
            Self::None => return Ok(User { name: "anonymous".into() }),
            Self::Tokens(users) => users,
        };
        let (scheme, rest) =
            authorization.ok_or(Denied::Missing)?.split_once(' ').ok_or(Denied::Malformed)?;
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
        let holder =
            users.user_with(&token.map_err(|ParseTokenError| Denied::Malformed)?).ok_or(Denied::Unknown)?;
        match name.is_none_or(|name| name == holder.name) {
            true => Ok(holder),
            false => Err(Denied::Unknown),
        }
    }
}

/// Name and password of Basic credentials (RFC 7617 §2); the password is the token.
fn name_and_password(encoded: &str) -> Option<(String, String)> {
    // Longer credentials cannot have a valid token: they are not decoded.
    let decoded = (encoded.len() <= 4 * MAX_TOKEN_BYTES).then(|| STANDARD.decode(encoded).ok()).flatten()?;
    let text = String::from_utf8(decoded).ok()?;
    let (name, password) = text.split_once(':')?;
    Some((name.to_owned(), password.to_owned()))
}

/// The users of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Users {
    /// Name and hash of the token, in the order of the file.
    all: Vec<(String, [u8; 32])>,
    /// The place of a hash in `all`. With it a guess costs the same whether there is one user or 10,000.
    by_hash: BTreeMap<[u8; 32], usize>,
}

impl Users {
    /// Reads a users' file.
    pub fn load(path: &Path) -> Result<Self> {
        Self::parse(&files::read_secret(path)?, path)
    }

    /// Parses the content of the users' file `path`.
    pub fn parse(content: &[u8], path: &Path) -> Result<Self> {
        let bad = |found: String| Error::Content {
            path: path.into(),
            expected: "users, each with a name and the SHA-256 of a token",
            found,
        };
        let text = str::from_utf8(content).map_err(|_| bad("bytes that are no UTF-8".into()))?;
        let file: UsersFile = toml::from_str(text).map_err(|error| bad(error.to_string()))?;
        if file.user.len() > MAX_USERS {
            return Err(bad(format!("{} users, at most {MAX_USERS} work", file.user.len())));
        }
        let (mut users, mut names) = (Self::default(), BTreeSet::new());
        for entry in file.user {
            let hash: Fingerprint =
                entry.token_sha256.parse().map_err(|error| bad(format!("user `{}`: {error}", entry.name)))?;
            if !names.insert(entry.name.clone()) {
                return Err(bad(format!("user `{}` twice", entry.name)));
            }
            users.all.push((entry.name, hash.0));
        }
        users.update_hashes();
        Ok(users)
    }

    /// Writes a users' file, for its owner only.
    pub fn save(&self, path: &Path) -> Result<()> {
        files::write_secret(path, self.to_toml(path)?.as_bytes())
    }

    /// The content of the users' file `path`.
    pub fn to_toml(&self, path: &Path) -> Result<String> {
        let user = self.all.iter().map(|(name, hash)| UserEntry {
            name: name.clone(),
            token_sha256: Fingerprint(*hash).to_string(),
        });
        toml::to_string(&UsersFile { user: user.collect() }).map_err(|error| Error::Content {
            path: path.into(),
            expected: "users that can be written",
            found: error.to_string(),
        })
    }

    /// Gives the user `name` a new token, which replaces an earlier one.
    pub fn create_token(&mut self, name: &str) -> Result<Token> {
        let token = Token::generate()?;
        self.all.retain(|(other, _)| other != name);
        self.all.push((name.into(), token.hash()));
        self.update_hashes();
        Ok(token)
    }

    /// Whether there are no users, so that every request is refused.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The user with this token.
    fn user_with(&self, token: &Token) -> Option<User> {
        let hash = token.hash();
        let (name, known) = self.all.get(*self.by_hash.get(&hash)?)?;
        verify_slices_are_equal(known, &hash).ok().map(|()| User { name: name.clone() })
    }

    fn update_hashes(&mut self) {
        self.by_hash = self.all.iter().enumerate().map(|(place, (_, hash))| (*hash, place)).collect();
    }
}

/// The file of the users of a server, `users.toml`, at most 10,000 of them.
#[derive(JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct UsersFile {
    /// Users: the tables `[[user]]`
    #[serde(default)]
    user: Vec<UserEntry>,
}

/// A user and the hash of the user's token. The token itself is stored nowhere.
#[derive(JsonSchema, Serialize, Deserialize)]
#[schemars(rename = "user")]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct UserEntry {
    /// Name of the user, as in status and in `users` of `[[access]]` and `[[limit]]`
    #[schemars(schema_with = "schema::one::<UserName>")]
    name: String,
    /// SHA-256 of the token, as in `printf %s "$TOKEN" | sha256sum`
    #[schemars(schema_with = "schema::one::<Fingerprint>")]
    token_sha256: String,
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use proptest::prelude::*;

    use super::*;

    fn alice() -> (Authenticator, Token) {
        let mut users = Users::default();
        let token = users.create_token("alice").unwrap();
        users.create_token("bob").unwrap();
        (Authenticator::Tokens(users), token)
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
        assert_eq!(Authenticator::Tokens(Users::default()).check(Some("Bearer x")), Err(Denied::Unknown));
    }

    #[test]
    fn a_guess_costs_little_among_ten_thousand_users() {
        let mut users = Users {
            all: (0..MAX_USERS)
                .map(|number| {
                    (format!("user-{number}"), [number as u8; 32].map(|byte| byte ^ (number >> 8) as u8))
                })
                .collect(),
            by_hash: BTreeMap::new(),
        };
        let token = users.create_token("alice").unwrap();
        let auth = Authenticator::Tokens(users);
        let guesses: Vec<_> = (0..20_000).map(|number| format!("Bearer guess{number}")).collect();
        let start = std::time::Instant::now();
        assert!(guesses.iter().all(|guess| auth.check(Some(guess)) == Err(Denied::Unknown)));
        // 20 microseconds each; comparing with all took some 50 times as long.
        assert!(start.elapsed() < std::time::Duration::from_millis(400), "{:?}", start.elapsed());
        assert_eq!(auth.check(Some(&token.authorization())).unwrap().name, "alice");
    }

    #[test]
    fn with_no_auth_everybody_is_anonymous() {
        assert_eq!(Authenticator::None.check(None).unwrap().name, "anonymous");
    }

    #[test]
    fn a_token_has_256_bits_and_is_never_logged() {
        let token = Token::generate().unwrap();
        assert_eq!(token.reveal().len(), TOKEN_PREFIX.len() + 43);
        assert_ne!(token, Token::generate().unwrap());
        assert!(!format!("{token:?}").contains(&token.reveal()[6..]));
    }

    #[test]
    fn the_file_keeps_users_but_no_token() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("users.toml");
        let mut users = Users::default();
        let old = users.create_token("alice").unwrap();
        let new = users.create_token("alice").unwrap();
        users.save(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(!std::fs::read_to_string(&path).unwrap().contains(new.reveal()));
        let auth = Authenticator::Tokens(Users::load(&path).unwrap());
        assert!(auth.check(Some(&new.authorization())).is_ok());
        assert_eq!(auth.check(Some(&old.authorization())), Err(Denied::Unknown));
    }

    #[test]
    fn a_damaged_file_is_an_error_that_names_it() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("users.toml");
        let hash = "00".repeat(32);
        let twice = format!("[[user]]\nname='a'\ntoken-sha256='{hash}'\n").repeat(2);
        for (content, said) in [
            ("user = 3", "expected"),
            ("[[user]]\nname='a'\ntoken-sha256='12'", "user `a`: `12` is not a SHA-256"),
            ("[[user]]\nname='a'\npassword='12'", "unknown field `password`"),
            (&twice, "user `a` twice"),
        ] {
            std::fs::write(&path, content).unwrap();
            let error = Users::load(&path).unwrap_err().to_string();
            assert!(error.contains(said) && error.contains("users.toml"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_field_value_makes_the_check_fail_badly(value in ".{0,200}") {
            prop_assert!(alice().0.check(Some(&value)).is_err());
        }
    }
}
