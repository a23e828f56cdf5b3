//! The running process to which a command connects.

use std::path::{Path, PathBuf};

use clap::Args;
use mpvpn_client::hold::{self, Blocked};

use crate::{commands::events::local_time_of_day, failure::Failure};

/// The options that select a running process.
#[derive(Args, Debug)]
pub(crate) struct ProcessSelector {
    /// Connect to the running client with this name [default: the only mpvpn process that runs]
    #[arg(long, value_name = "NAME", conflicts_with = "api_socket")]
    pub(crate) name: Option<String>,
    /// Connect to the process at this unix socket, instead of by name
    #[arg(long, value_name = "PATH")]
    pub(crate) api_socket: Option<PathBuf>,
}

/// The help of `--name` for commands that ask servers and clients.
pub(crate) fn help_for_any_role(name: clap::Arg) -> clap::Arg {
    name.help(
        "Connect to the running server or client with this name [default: the only mpvpn process that runs]",
    )
}

impl ProcessSelector {
    /// The socket of the process: the given one, that of the given name, or that of the only process.
    pub(crate) fn socket(&self) -> Result<PathBuf, Failure> {
        match &self.api_socket {
            Some(path) => Ok(path.clone()),
            None => select(mpvpn_api::list_sockets(), self.name.as_deref()).or_else(|failure| {
                if failure.is_usage() {
                    return Err(failure);
                }
                mpvpn_api::may_list()?;
                Err(self.block().unwrap_or(failure))
            }),
        }
    }

    /// The block of a client that does not run, if one is in force.
    fn block(&self) -> Option<Failure> {
        // Records that cannot be read say nothing.
        let mut blocked = hold::blocked().unwrap_or_default().into_iter();
        let is_meant = |blocked: &Blocked| self.name.as_ref().is_none_or(|name| *name == blocked.name);
        let Blocked { name, is_hold, since } = blocked.find(is_meant)?;
        let since = since.map_or_else(|| "an unknown time".to_owned(), local_time_of_day);
        Some(match is_hold {
            true => Failure::runtime(
                format!("blocked: {name} does not run, and its kill switch is held since {since}"),
                "start its service; or `sudo mpvpn kill-switch release` lets packets pass",
            ),
            false => Failure::runtime(
                format!(
                    "blocked by the kill switch of {name}, a client that ended without lifting it; last changed at {since}"
                ),
                "start it again; or `sudo mpvpn reset` opens",
            ),
        })
    }
}

fn select(mut sockets: Vec<PathBuf>, name: Option<&str>) -> Result<PathBuf, Failure> {
    if let Some(name) = name {
        let names = ["server", "client"].map(|role| format!("{role}-{name}.sock"));
        sockets.retain(|path| {
            names.iter().any(|name| path.file_name().is_some_and(|file| file == name.as_str()))
        });
    }
    match sockets.as_slice() {
        [socket] => Ok(socket.clone()),
        [] => {
            let named = name.map_or_else(String::new, |name| format!(" with the name `{name}`"));
            Err(Failure::runtime(
                format!("no mpvpn{named} answers in {}", mpvpn_input::dirs::SOCKET_DIR),
                "start `mpvpn server`, `mpvpn client` or `mpvpn proxy`, or name its socket with --api-socket",
            ))
        }
        several => Err(Failure::usage(
            format!("several mpvpn processes run here\n{}", list(several)),
            "choose one with --api-socket PATH",
        )),
    }
}

fn list(sockets: &[PathBuf]) -> String {
    let lines: Vec<_> = sockets.iter().map(|path| format!("  {}", Path::display(path))).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sockets(names: &[&str]) -> Vec<PathBuf> {
        names.iter().map(|name| Path::new(mpvpn_input::dirs::SOCKET_DIR).join(name)).collect()
    }

    #[test]
    fn the_only_process_needs_no_name() {
        let one = sockets(&["client-mpvpn0.sock"]);
        assert_eq!(select(one.clone(), None), Ok(one[0].clone()));
    }

    #[test]
    fn a_name_chooses_among_several() {
        let all = sockets(&["client-home.sock", "client-my-home.sock", "server-edge.sock"]);
        assert_eq!(select(all.clone(), Some("home")), Ok(all[0].clone()));
    }

    #[test]
    fn several_processes_with_the_name_are_listed() {
        let failure = select(sockets(&["client-a.sock", "server-a.sock"]), Some("a")).unwrap_err();
        assert_eq!(
            failure.about("cannot show the status").text(),
            "mpvpn: cannot show the status: several mpvpn processes run here\n  /run/mpvpn/client-a.sock\n  \
             /run/mpvpn/server-a.sock\n  next: choose one with --api-socket PATH"
        );
    }

    #[test]
    fn a_name_without_a_process_is_an_error() {
        let failure = select(Vec::new(), Some("home")).unwrap_err();
        assert!(failure.text().contains("no mpvpn with the name `home` answers in /run/mpvpn"));
    }
}
