//! `mpvpn status`: asks a running server or client how it is.

use std::{
    io::{ErrorKind, IsTerminal, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use mpvpn_control::{api, status};

use crate::{cli::StatusArgs, failure::Failure};

const WHAT: &str = "cannot show the status";

pub(crate) fn show(args: &StatusArgs) -> Result<ExitCode, Failure> {
    let socket = socket(WHAT, args.api_socket.as_deref(), args.name.as_deref())?;
    let failed = |error| Failure::control(WHAT, &error);
    if args.flows {
        let flows = api::fetch_flows(&socket).map_err(failed)?;
        return print(&if args.json {
            in_json(WHAT, serde_json::to_string(&flows))?
        } else {
            status::render_flows(&flows, width())
        });
    }
    let status = api::fetch_status(&socket).map_err(failed)?;
    print(&if args.json {
        in_json(WHAT, serde_json::to_string(&status))?
    } else {
        status::render(&status, width())
    })
}

pub(crate) fn in_json(what: &str, written: serde_json::Result<String>) -> Result<String, Failure> {
    let json =
        written.map_err(|error| Failure::world(what, error.to_string(), "report it as a fault of mpvpn"))?;
    Ok(format!("{json}\n"))
}

/// The socket of the process that is meant: the one given, or that of the one with this name, or of the
/// only one.
pub(crate) fn socket(what: &str, given: Option<&Path>, name: Option<&str>) -> Result<PathBuf, Failure> {
    match given {
        Some(path) => Ok(path.to_owned()),
        None => choose(what, api::list_sockets(), name),
    }
}

fn choose(what: &str, mut sockets: Vec<PathBuf>, name: Option<&str>) -> Result<PathBuf, Failure> {
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
            Err(Failure::world(
                what,
                format!("no mpvpn{named} answers in {}", api::SOCKET_DIR),
                "start `mpvpn server`, `mpvpn client` or `mpvpn proxy`, or name its socket with --api-socket",
            ))
        }
        several => Err(Failure::usage(
            what,
            format!("several mpvpn processes run here\n{}", list(several)),
            "choose one with --api-socket PATH",
        )),
    }
}

fn list(sockets: &[PathBuf]) -> String {
    let lines: Vec<_> = sockets.iter().map(|path| format!("  {}", Path::display(path))).collect();
    lines.join("\n")
}

/// Columns of the terminal; no limit where the output goes elsewhere.
pub(crate) fn width() -> usize {
    if !std::io::stdout().is_terminal() {
        return usize::MAX;
    }
    terminal_size::terminal_size().map_or(usize::MAX, |(width, _)| usize::from(width.0))
}

/// Writes to stdout; a reader that has seen enough is no failure.
pub(crate) fn print(text: &str) -> Result<ExitCode, Failure> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::world("cannot write to stdout", error.to_string(), "check where the output goes"))
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sockets(names: &[&str]) -> Vec<PathBuf> {
        names.iter().map(|name| Path::new(api::SOCKET_DIR).join(name)).collect()
    }

    #[test]
    fn the_only_process_needs_no_name() {
        let one = sockets(&["client-mpvpn0.sock"]);
        assert_eq!(choose(WHAT, one.clone(), None), Ok(one[0].clone()));
    }

    #[test]
    fn a_name_chooses_among_several() {
        let all = sockets(&["client-home.sock", "client-my-home.sock", "server-edge.sock"]);
        assert_eq!(choose(WHAT, all.clone(), Some("home")), Ok(all[0].clone()));
    }

    #[test]
    fn several_and_none_named_are_listed() {
        let failure = choose(WHAT, sockets(&["client-a.sock", "server-a.sock"]), Some("a")).unwrap_err();
        assert_eq!(
            failure.text(),
            "mpvpn: cannot show the status: several mpvpn processes run here\n  /run/mpvpn/client-a.sock\n  \
             /run/mpvpn/server-a.sock\n  next: choose one with --api-socket PATH"
        );
    }

    #[test]
    fn nobody_is_told_as_such() {
        let failure = choose(WHAT, Vec::new(), Some("home")).unwrap_err();
        assert!(failure.text().contains("no mpvpn with the name `home` answers in /run/mpvpn"));
    }
}
