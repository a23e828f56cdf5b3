//! `mpvpn check`: tries every link to a server, and says what works.

use std::{
    io::{IsTerminal, Write},
    process::ExitCode,
};

use mpvpn_control::{check, config::ClientConfig, log};

use crate::{
    cli::CheckArgs,
    failure::Failure,
    run,
    status::{in_json, print, width},
};

const WHAT: &str = "cannot check the links";

pub(crate) fn perform(args: CheckArgs) -> Result<ExitCode, Failure> {
    let config = ClientConfig::load(args.client.config.as_deref(), args.client.options)
        .map_err(|error| Failure::control(WHAT, &error))?;
    log::init(config.log_level);
    // A program reads the end only.
    let shows = std::io::stderr().is_terminal() || !args.json;
    let tell = |line: &str| {
        if shows {
            // Who does not want to hear of it misses nothing.
            let _ = writeln!(std::io::stderr(), "{line}");
        }
    };
    tell(&format!("checking the links to {}, for up to 20 s", config.server));
    let next = "check --server, and that names are resolved here";
    let found = run::check(&config, &tell).map_err(|error| Failure::run(WHAT, &error, next))?;
    print(&if args.json {
        in_json(WHAT, serde_json::to_string(&found))?
    } else {
        check::render(&found, width())
    })?;
    Ok(if found.works() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
