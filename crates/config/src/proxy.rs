//! The configuration of `mpvpn proxy`: a client that is a proxy for apps and has no TUN device. Options about
//! a TUN device are refused on the command line and ignored in a file, so that one file can serve a client
//! and a proxy.

use std::{net::SocketAddr, path::Path};

use super::{ClientOptions, Shards};
use crate::{
    defaults::first_repeated,
    file::{OrFallback, first_given},
    resolve::ClientConfig,
};
use mpvpn_input::{Error, Result, dirs, role::Role};
use mpvpn_types::FlowMode;

/// Default of `--name` for a proxy.
const DEFAULT_NAME: &str = "proxy";

/// The addresses at which a client offers proxies to apps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proxies {
    /// TCP addresses of SOCKS5 proxies.
    pub socks5: Vec<SocketAddr>,
    /// TCP addresses of HTTP proxies.
    pub http: Vec<SocketAddr>,
}

impl Proxies {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.socks5.is_empty() && self.http.is_empty()
    }
}

impl ClientConfig {
    /// Merges the options `cli` with those of `file`, for a proxy. There is no default file: the client's
    /// belongs to root.
    pub fn load_proxy(file: Option<&Path>, cli: ClientOptions) -> Result<Self> {
        if let Some(option) = tun_only_option(&cli) {
            return Err(Error::usage(
                format!("--{option} is about a TUN device, which a proxy does not have"),
                "leave it out, or use `mpvpn client`",
            ));
        }
        let resolve = |cli: ClientOptions, from_file| {
            let options = cli.or_fallback(from_file);
            let via = super::via::or_from_environment(options.via, super::servers::first(&options.server));
            Self::resolve_proxy(ClientOptions { via, ..options })
        };
        match file {
            Some(file) => super::file::load_named(file)?.resolve(cli, resolve),
            None => resolve(cli, ClientOptions::default()),
        }
    }

    /// Fills in the defaults of a proxy, and refuses options that contradict each other.
    pub fn resolve_proxy(options: ClientOptions) -> Result<Self> {
        let proxies = Proxies { socks5: options.socks5.clone(), http: options.http.clone() };
        if proxies.is_empty() {
            return Err(Error::usage(
                "no option says at which address the proxy listens",
                "add --socks5 127.0.0.1:1080 or --http 127.0.0.1:8080, or both",
            ));
        }
        let all: Vec<_> = proxies.socks5.iter().chain(&proxies.http).copied().collect();
        if let Some(twice) = first_repeated(&all).filter(|address| address.port() != 0) {
            return Err(Error::usage(
                format!("{twice} is given twice"),
                "give every proxy an address of its own",
            ));
        }
        let name = options.name.clone().unwrap_or_else(|| DEFAULT_NAME.to_owned());
        let api_socket = options.api_socket.clone();
        let api_socket =
            api_socket.map_or_else(|| mpvpn_input::role::user_socket(Role::Client, &name), Ok)?;
        let state_dir = options.state_dir.clone().unwrap_or_else(dirs::state_dir);
        let options = ClientOptions {
            name: Some(name),
            api_socket: Some(api_socket),
            state_dir: Some(state_dir),
            ..without_tun_only(options)
        };
        let mut config =
            Self { proxies, lane: FlowMode::Stream, shards: Shards::Auto, ..Self::resolve(options)? };
        // A file for a client and a proxy may name TUN devices of classes: a proxy ignores them.
        for class in &mut config.classes {
            class.lane = None;
            config.ignored_class_tuns.extend(class.tun.take());
        }
        config.class_steering.clear();
        Ok(config)
    }
}

impl ClientConfig {
    /// A sentence about ignored settings, for status and log.
    pub fn note(&self) -> Option<String> {
        let tuns = self.ignored_class_tuns.iter().map(|tun| format!("`{tun}`")).collect::<Vec<_>>();
        (!tuns.is_empty()).then(|| {
            format!("a proxy has no TUN devices: `tun` of [[class]] is ignored ({})", tuns.join(" and "))
        })
    }
}

/// Defines the functions about these options, which have their keys behind them.
macro_rules! tun_only_options {
    ($($field:ident $key:literal)+) => {
        /// The first given option that only applies with a TUN device.
        pub(super) fn tun_only_option(options: &ClientOptions) -> Option<&'static str> {
            first_given!(options; $($field $key)+)
        }

        /// The options without those that only apply with a TUN device.
        fn without_tun_only(options: ClientOptions) -> ClientOptions {
            ClientOptions { $($field: Default::default(),)+ ..options }
        }
    };
}

tun_only_options! {
    tun_name "tun-name" lane "lane" routes "routes" keep_routes "keep-routes" dns "dns" dns_local "dns-local"
    kill_switch "kill-switch" kill_switch_lan "kill-switch-lan" share "share" announce "announce"
    accept_from "accept-from" masquerade "masquerade" forward "forward" bypass "bypass" route "route"
    tun_persist "tun-persist" tun_carrier "tun-carrier" when_down "when-down" shards "shards"
}

#[cfg(test)]
mod tests {
    use mpvpn_input::values::ServerAddr;

    use super::*;

    fn options(socks5: &[&str], http: &[&str]) -> ClientOptions {
        let list = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        ClientOptions {
            server: vec!["vpn.example".parse::<ServerAddr>().unwrap().into()],
            insecure: true,
            api_socket: Some("api.sock".into()),
            socks5: list(socks5),
            http: list(http),
            ..ClientOptions::default()
        }
    }

    #[test]
    fn a_proxy_says_where_it_is_and_has_no_tun() {
        let config =
            ClientConfig::load_proxy(None, options(&["127.0.0.1:1080"], &["127.0.0.1:8080"])).unwrap();
        assert_eq!((config.proxies.socks5.len(), config.proxies.http.len()), (1, 1));
        assert_eq!((config.name.as_str(), config.lane), ("proxy", FlowMode::Stream));
        let refused = |options| ClientConfig::load_proxy(None, options).unwrap_err().to_string();
        assert!(refused(options(&[], &[])).contains("no option says at which address the proxy listens"));
        assert!(refused(options(&["127.0.0.1:1"], &["127.0.0.1:1"])).contains("127.0.0.1:1 is given twice"));
        let tun = ClientOptions { tun_name: Some("tun7".into()), ..options(&["127.0.0.1:1"], &[]) };
        assert!(refused(tun).contains("--tun-name is about a TUN device"));
    }

    #[test]
    fn one_file_may_serve_both_a_client_and_a_proxy() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("both.toml");
        let text = "server = 'vpn.example'\ninsecure = true\napi-socket = 'a'\ntun-name = 'tun7'\nshards = 2\n\
                    socks5 = ['127.0.0.1:1080']\n";
        std::fs::write(&file, text).unwrap();
        let config = ClientConfig::load_proxy(Some(&file), ClientOptions::default()).unwrap();
        assert_eq!(config.proxies.socks5, ["127.0.0.1:1080".parse().unwrap()]);
        let config = ClientConfig::load(Some(&file), ClientOptions::default()).unwrap();
        assert!(config.proxies.is_empty());
        assert_eq!(config.tun_name, "tun7");
        let with_option = options(&["127.0.0.1:1080"], &[]);
        let error = ClientConfig::load(Some(&file), with_option).unwrap_err().to_string();
        assert!(error.contains("`mpvpn proxy`") || error.contains("a proxy"), "{error}");
    }
}
