use std::{
    error::Error as StdError,
    io::{self, Write},
    process::ExitCode,
};

use mpvpn_error::RunError;
use mpvpn_identity::tls::CertificateRefusal;

/// The next step for errors that have none of their own.
pub(crate) const READ_THE_LOG: &str = "read the log above; --log-level debug shows more";

/// The exit codes of all commands.
#[cfg(test)]
pub(crate) const EXIT_CODES: [(u8, &str); 3] = [
    (0, "The command ended as asked. `mpvpn check`: a client would have at least one link."),
    (
        RUNTIME_FAILURE,
        "Failure: a file, the network, the kernel or another process. `mpvpn check`: no link would work. `mpvpn status --wait`: not up in time. `mpvpn setup`: the machine lacks something, a step failed and all were taken back, or the person said no.",
    ),
    (BAD_USAGE, "Bad usage or configuration: an option, a key, or a combination of them is wrong."),
];
const RUNTIME_FAILURE: u8 = 1;
const BAD_USAGE: u8 = 2;

/// Why the program ends with a code other than 0.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The failure in a sentence; none where the command has not named it yet.
    summary: Option<String>,
    cause: String,
    next_step: String,
    exit_code: u8,
    is_denied: bool,
}

impl Failure {
    /// Bad usage or configuration.
    pub(crate) fn usage(cause: impl Into<String>, next_step: impl Into<String>) -> Self {
        Self { cause: cause.into(), next_step: next_step.into(), exit_code: BAD_USAGE, ..Self::default() }
    }

    /// A failure of a file, the network, the kernel or another process.
    pub(crate) fn runtime(cause: impl Into<String>, next_step: impl Into<String>) -> Self {
        Self { exit_code: RUNTIME_FAILURE, ..Self::usage(cause, next_step) }
    }

    /// The failure with this summary, unless it has one.
    pub(crate) fn about(self, summary: &str) -> Self {
        Self { summary: self.summary.or_else(|| Some(summary.to_owned())), ..self }
    }

    /// An error of a running server, client or lab. The next step is that of its cause, if the cause has one;
    /// else `default_next_step`.
    pub(crate) fn of(error: &(dyn StdError + 'static), default_next_step: &str) -> Self {
        let mut next_step = default_next_step.to_owned();
        let (mut exit_code, mut is_denied) = (RUNTIME_FAILURE, false);
        for cause in causes(error) {
            if let Some(control) = cause.downcast_ref::<mpvpn_input::Error>() {
                next_step = control.next_step();
                exit_code = if control.is_usage() { BAD_USAGE } else { RUNTIME_FAILURE };
                is_denied = matches!(control, mpvpn_input::Error::Denied(_));
            } else if let Some(refusal) = cause.downcast_ref::<CertificateRefusal>() {
                next_step = refusal.next_step().into();
            } else if let Some(known) = cause.downcast_ref::<RunError>().and_then(RunError::next_step) {
                next_step = known.into();
            }
        }
        Self { summary: None, cause: join_causes(error), next_step, exit_code, is_denied }
    }

    /// Whether it is about usage or configuration.
    pub(crate) fn is_usage(&self) -> bool {
        self.exit_code == BAD_USAGE
    }

    /// Whether this user may not do it, which does not change by waiting.
    pub(crate) fn is_denied(&self) -> bool {
        self.is_denied
    }

    /// Prints the failure to stderr.
    pub(crate) fn report(&self) -> ExitCode {
        // Where stderr is a file on a full disk, the exit code still says it.
        let _ = writeln!(io::stderr(), "{}", self.text());
        ExitCode::from(self.exit_code)
    }

    pub(crate) fn text(&self) -> String {
        let summary = self.summary.as_ref().map_or_else(String::new, |summary| format!("{summary}: "));
        format!("mpvpn: {summary}{}\n  next: {}", self.cause, self.next_step)
    }
}

impl From<mpvpn_input::Error> for Failure {
    fn from(error: mpvpn_input::Error) -> Self {
        Self::of(&error, "")
    }
}

/// The error and its causes in one line; a cause that is already part of the line is left out.
fn join_causes(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    for cause in causes(error).skip(1) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
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
    use mpvpn_config::{ClientConfig, ClientOptions};

    use super::*;
    use crate::tests::errors::run_errors;

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
    fn the_next_step_of_the_cause_is_printed() {
        let refusal = CertificateRefusal::NotOwner { why: "bad signature".into() };
        let failure = Failure::of(&Wrapped(Box::new(refusal.clone())), "look").about("the client ended");
        assert_eq!(
            failure.text(),
            format!("mpvpn: the client ended: no session: {refusal}\n  next: {}", refusal.next_step())
        );
        assert_eq!(failure.exit_code, 1);

        let usage = ClientConfig::resolve(ClientOptions::default()).unwrap_err();
        let failure = Failure::of(&Wrapped(Box::new(usage)), "look");
        assert_eq!(failure.exit_code, 2);
        assert!(failure.text().ends_with("no server is given\n  next: add --server HOST:PORT"));
    }

    #[test]
    fn a_client_or_server_that_ends_by_itself_has_failed() {
        let refused = run_errors().into_iter().filter(|error| error.to_string().contains("401"));
        assert!(refused.count() > 0, "a refused token is among the examples");
        for error in run_errors() {
            let failure = Failure::of(&error, READ_THE_LOG);
            assert_eq!(failure.exit_code, 1, "{error}");
        }
    }

    #[test]
    fn causes_without_a_next_step_get_the_default_one() {
        let failure = Failure::of(&Wrapped("the cable is cut".into()), "look").about("the client ended");
        assert_eq!(failure.text(), "mpvpn: the client ended: no session: the cable is cut\n  next: look");
    }
}
