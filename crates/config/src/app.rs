//! The configuration of a client inside an app. The app hands over packets and changes the machine itself, so
//! the keys about a TUN device, proxies and the log are refused.

use std::path::Path;

use super::{ClientOptions, file, proxy::tun_only_option};
use crate::resolve::ClientConfig;
use mpvpn_input::{Error, Result};

/// Default of `name` for a client inside an app.
const DEFAULT_NAME: &str = "app";

impl ClientOptions {
    /// Reads the text of a configuration file.
    pub fn parse(text: &str) -> Result<Self> {
        file::parse(text, Path::new("configuration"))
    }
}

impl ClientConfig {
    /// Fills in the defaults of a client inside an app, and refuses keys that contradict each other or do not
    /// apply. Only files that `options` name are read.
    pub fn resolve_app(options: ClientOptions) -> Result<Self> {
        let other_options = [
            (!options.socks5.is_empty(), "socks5"),
            (!options.http.is_empty(), "http"),
            (options.dashboard.is_some(), "dashboard"),
            (options.log_level.is_some(), "log-level"),
        ];
        // `lane` does apply to an app: its TCP connections may travel as streams.
        let lane = options.lane;
        let options = ClientOptions { lane: None, ..options };
        let other_options = other_options.iter().find(|(is_given, _)| *is_given).map(|(_, option)| *option);
        if let Some(option) = tun_only_option(&options).or(other_options) {
            return Err(not_applicable(option));
        }
        let name = options.name.clone().unwrap_or_else(|| DEFAULT_NAME.to_owned());
        let config = Self::resolve(ClientOptions { lane, name: Some(name), ..options })?;
        match config.classes.iter().any(|class| class.tun.is_some()) {
            true => Err(not_applicable("tun")),
            false => Ok(config),
        }
    }
}

fn not_applicable(option: &str) -> Error {
    Error::usage(
        format!("`{option}` does not apply to a client inside an app"),
        "leave it out: the app itself handles packets, routes and the log",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpvpn_types::FlowMode;

    fn resolve(text: &str) -> Result<ClientConfig> {
        ClientConfig::resolve_app(ClientOptions::parse(text)?)
    }

    #[test]
    fn the_keys_are_those_of_a_client_but_what_an_app_does_itself() {
        let base = "server = 'vpn.example'\ninsecure = true\n";
        let config = resolve(&format!("{base}lane = 'stream'\n[[link]]\nname = 'wwan*'\ntier = 'backup'\n"));
        let config = config.unwrap();
        assert_eq!((config.lane, config.links.len(), config.name.as_str()), (FlowMode::Stream, 1, "app"));
        for key in [
            "tun-name = 'a'",
            "routes = 'all'",
            "share = ['lan0']",
            "shards = 2",
            "log-level = 'info'",
            "tun = 'cr0'",
        ] {
            let head = if key.starts_with("tun ") { "[[class]]\nname = 'critical'\n" } else { "" };
            let error = resolve(&format!("{base}{head}{key}\n")).unwrap_err().to_string();
            let name = key.split(' ').next().unwrap();
            assert!(error.contains(&format!("`{name}` does not apply")), "{error}");
        }
        let error = resolve("server = 'vpn.example'\nsever = 1\n").unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains("sever"), "{error}");
    }
}
