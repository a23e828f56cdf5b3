//! `mpvpn class`: shows the classes of traffic of a configuration, and which one a packet belongs to.

use std::{path::Path, process::ExitCode};

use mpvpn_control::config::{ClientConfig, Packet, render_classes};

use crate::{
    cli::ClassCommand,
    failure::Failure,
    status::{in_json, print, width},
};

pub(crate) fn perform(command: ClassCommand) -> Result<ExitCode, Failure> {
    match command {
        ClassCommand::List { config } => {
            print(&render_classes(&load("cannot show the classes", config.as_deref())?, width()))
        }
        ClassCommand::Test { config, json, packet } => {
            const WHAT: &str = "cannot test the packet";
            let packet: Packet = packet
                .join(" ")
                .parse()
                .map_err(|why: String| Failure::usage(WHAT, why, "see `mpvpn class test --help`"))?;
            let ruling = load(WHAT, config.as_deref())?.class_of(&packet);
            print(&if json { in_json(WHAT, serde_json::to_string(&ruling))? } else { format!("{ruling}\n") })
        }
    }
}

fn load(what: &str, file: Option<&Path>) -> Result<ClientConfig, Failure> {
    ClientConfig::load_without_server(file).map_err(|error| Failure::control(what, &error))
}
