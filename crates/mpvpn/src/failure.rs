use std::{error::Error as StdError, process::ExitCode};

use mpvpn_control::tls::CertificateRefusal;

/// The next step for errors that have none of their own.
pub(crate) const LOG: &str = "read the log above; --log-level debug shows more";

/// The exit codes of all commands.
#[cfg(test)]
pub(crate) const EXIT_CODES: [(u8, &str); 3] = [
    (0, "The command ended as asked. `mpvpn check`: a client would have at least one link."),
    (
        WORLD,
        "Failure: a file, the network, the kernel or another process. `mpvpn check`: no link would work.",
    ),
    (USAGE, "Bad usage or configuration: an option, a key, or a combination of them is wrong."),
];
const WORLD: u8 = 1;
const USAGE: u8 = 2;

/// Why the program ends with a code other than 0.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    what: String,
    why: String,
    next: String,
    code: u8,
}

impl Failure {
    /// Bad usage or configuration.
    pub(crate) fn usage(what: &str, why: impl Into<String>, next: impl Into<String>) -> Self {
        Self { what: what.into(), why: why.into(), next: next.into(), code: USAGE }
    }

    /// A failure of a file, the network, the kernel or another process.
    pub(crate) fn world(what: &str, why: impl Into<String>, next: impl Into<String>) -> Self {
        Self { what: what.into(), why: why.into(), next: next.into(), code: WORLD }
    }

    /// An error of configuration or the local API.
    pub(crate) fn control(what: &str, error: &mpvpn_control::Error) -> Self {
        let kind = if error.is_usage() { Self::usage } else { Self::world };
        kind(what, error.to_string(), error.next_step())
    }

    /// An error of a running server, client or lab. The next step is that of its cause, if the cause is an error of
    /// configuration or a refused certificate; else `next`.
    pub(crate) fn run(what: &str, error: &(dyn StdError + 'static), next: &str) -> Self {
        let mut next = next.to_owned();
        let mut code = WORLD;
        for cause in causes(error) {
            if let Some(control) = cause.downcast_ref::<mpvpn_control::Error>() {
                next = control.next_step();
                code = if control.is_usage() { USAGE } else { WORLD };
            } else if let Some(refusal) = cause.downcast_ref::<CertificateRefusal>() {
                next = refusal.next_step().into();
            }
        }
        Self { what: what.into(), why: chain(error), next, code }
    }

    /// Prints the failure to stderr.
    pub(crate) fn report(&self) -> ExitCode {
        eprintln!("{}", self.text());
        ExitCode::from(self.code)
    }

    pub(crate) fn text(&self) -> String {
        format!("mpvpn: {}: {}\n  next: {}", self.what, self.why, self.next)
    }
}

/// The error and its causes in one line; a cause that is already part of the line is left out.
fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    for cause in causes(error).skip(1) {
        let said = cause.to_string();
        if !text.contains(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
    }
    text
}

fn causes<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |error| {
        let error: &'a (dyn StdError + 'static) = *error;
        error.source()
    })
}

#[cfg(test)]
mod tests {
    use mpvpn_control::config::{ClientConfig, ClientOptions};

    use super::*;

    #[derive(Debug)]
    struct Wrapped(Box<dyn StdError + 'static>);

    impl std::fmt::Display for Wrapped {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("no session")
        }
    }

    impl StdError for Wrapped {
        fn source(&self) -> Option<&(dyn StdError + 'static)> {
            Some(&*self.0)
        }
    }

    #[test]
    fn a_cause_that_knows_what_to_do_next_is_asked() {
        let refusal = CertificateRefusal::NotOwner { why: "bad signature".into() };
        let failure = Failure::run("the client ended", &Wrapped(Box::new(refusal.clone())), "look");
        assert_eq!(
            failure.text(),
            format!("mpvpn: the client ended: no session: {refusal}\n  next: {}", refusal.next_step())
        );
        assert_eq!(failure.code, 1);

        let usage = ClientConfig::resolve(ClientOptions::default()).unwrap_err();
        let failure = Failure::run("the client ended", &Wrapped(Box::new(usage)), "look");
        assert_eq!(failure.code, 2);
        assert!(failure.text().ends_with("no server is given\n  next: add --server HOST:PORT"));
    }

    #[test]
    fn other_causes_leave_the_general_advice() {
        let failure = Failure::run("the client ended", &Wrapped("the cable is cut".into()), "look");
        assert_eq!(failure.text(), "mpvpn: the client ended: no session: the cable is cut\n  next: look");
    }
}
