//! Configuration files: a client's, a server's, the users'.

use mpvpn_config::SharedNetwork;
use std::path::Path;

use mpvpn_config::{ClientConfig, ClientOptions, Rights, ServerConfig, ServerOptions, render_classes};
use mpvpn_input::values::ServerAddr;
use mpvpn_users::Users;

use crate::input::Input;

/// `kind of file, text`.
pub fn config(data: &[u8]) {
    let mut input = Input(data);
    let kind = input.below(4);
    let path = Path::new("users.toml");
    if kind == 2 {
        let Ok(users) = Users::parse(input.0, path) else { return };
        // A schedule that has an end ends.
        let mut moment = std::time::SystemTime::UNIX_EPOCH;
        for _ in 0..=users.iter().count() {
            let Some(next) = users.next_expiry(moment) else { break };
            assert!(next > moment);
            moment = next;
        }
        return assert_eq!(users.next_expiry(moment), None);
    }
    let Ok(text) = str::from_utf8(input.0) else { return };
    match kind {
        0 => client(text),
        1 => server(text),
        _ => values(text),
    }
}

fn client(text: &str) {
    let Ok(options) = ClientOptions::parse(text).inspect_err(says_what_to_do) else { return };
    let _ = ClientConfig::resolve_app(options.clone()).inspect_err(says_what_to_do);
    let _ = ClientConfig::resolve_proxy(options.clone()).inspect_err(says_what_to_do);
    let Ok(config) = ClientConfig::resolve(options.clone()).inspect_err(says_what_to_do) else { return };
    assert_eq!(ClientConfig::resolve(options).ok().as_ref(), Some(&config), "the same twice");
    // A reload of the same file changes nothing.
    let mut reloaded = config.clone();
    let report = reloaded.apply_reload(config.clone());
    assert!(
        !report.links && !report.classes && report.applied.is_empty() && report.restart.is_empty(),
        "{report:?}"
    );
    assert_eq!(reloaded, config);
    let _ = render_classes(&config, 80);
}

fn server(text: &str) {
    let Ok(options) = ServerOptions::parse(text).inspect_err(says_what_to_do) else { return };
    for rights in [Rights::ALL, Rights { network: false, port_443: false }] {
        let Ok(config) = ServerConfig::resolve(options.clone(), rights).inspect_err(says_what_to_do) else {
            continue;
        };
        assert!(!config.listen.is_empty() && config.max_user_relays <= config.max_relays);
        let report = config.compare(&config);
        assert!(report.at_once.is_empty() && report.restart.is_empty(), "{report:?}");
    }
}

/// A printed value is read again.
fn values(text: &str) {
    if let Ok(server) = text.parse::<ServerAddr>() {
        assert_eq!(server.to_string().parse(), Ok(server));
    }
    if let Ok(share) = text.parse::<SharedNetwork>() {
        assert_eq!(share.to_string().parse(), Ok(share));
    }
}

/// Errors for people say what failed and what to do next.
fn says_what_to_do(error: &mpvpn_input::Error) {
    assert!(!error.to_string().is_empty() && !error.next_step().is_empty());
    if let mpvpn_input::Error::ConfigFile { line, column, .. } = error {
        assert!(*line >= 1 && *column >= 1);
    }
}
