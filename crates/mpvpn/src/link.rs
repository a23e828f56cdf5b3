//! `mpvpn link`: shows the links of a running client, and has one used in another way.

use std::process::ExitCode;

use mpvpn_control::{
    api,
    config::is_link_name,
    status::{Role, render_links},
};

use crate::{
    cli::{LinkCommand, Target},
    failure::Failure,
    status::{print, socket, width},
};

pub(crate) fn perform(command: LinkCommand) -> Result<ExitCode, Failure> {
    match command {
        LinkCommand::Show(Target { name, api_socket }) => {
            const WHAT: &str = "cannot show the links";
            let socket = socket(WHAT, api_socket.as_deref(), name.as_deref())?;
            let status = api::fetch_status(&socket).map_err(|error| Failure::control(WHAT, &error))?;
            if status.role == Role::Server {
                let next = "ask a client: name its socket with --api-socket";
                return Err(Failure::usage(WHAT, "this is a server: links are a client's", next));
            }
            print(&render_links(&status.links, width()))
        }
        LinkCommand::Set { link, change, target: Target { name, api_socket } } => {
            const WHAT: &str = "cannot change the link";
            let next = "see `mpvpn link set --help`";
            if change.is_empty() {
                return Err(Failure::usage(WHAT, "nothing is to change about it", next));
            }
            if !is_link_name(&link) {
                return Err(Failure::usage(WHAT, format!("`{link}` is no interface's name"), next));
            }
            let socket = socket(WHAT, api_socket.as_deref(), name.as_deref())?;
            let link =
                api::change_link(&socket, &link, &change).map_err(|error| Failure::control(WHAT, &error))?;
            print(&render_links(&[link], width()))
        }
    }
}
