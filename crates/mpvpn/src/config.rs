//! `mpvpn config`: has a running process read its configuration again.

use std::process::ExitCode;

use mpvpn_control::{api, config::Reloaded};

use crate::{
    cli::{ConfigCommand, Target},
    failure::Failure,
    status::{print, socket},
};

const WHAT: &str = "cannot reload the configuration";

pub(crate) fn perform(command: ConfigCommand) -> Result<ExitCode, Failure> {
    let ConfigCommand::Reload(Target { name, api_socket }) = command;
    let socket = socket(WHAT, api_socket.as_deref(), name.as_deref())?;
    let reloaded = api::reload(&socket).map_err(|error| Failure::control(WHAT, &error))?;
    print(&text_of(&reloaded))
}

fn text_of(Reloaded { links, classes, restart }: &Reloaded) -> String {
    let mut text = String::new();
    if *classes {
        text += "classes are as the file says now\n";
    }
    if *links {
        text += "links are used as the file says now\n";
    }
    if !restart.is_empty() {
        text += &format!("counts after a restart: {}\n", restart.join(", "));
    }
    if text.is_empty() {
        text += "nothing has changed\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_now_is_told_from_what_counts_later() {
        let text = |links, classes, restart: &[&str]| {
            text_of(&Reloaded { links, classes, restart: restart.iter().map(ToString::to_string).collect() })
        };
        assert_eq!(text(false, false, &[]), "nothing has changed\n");
        assert_eq!(
            text(true, true, &["routes", "cc"]),
            "classes are as the file says now\nlinks are used as the file says now\ncounts after a restart: routes, cc\n"
        );
    }
}
