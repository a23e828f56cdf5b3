//! Reads a configuration again while the process runs.
//!
//! In: the options of the start, and the file as it is now. Out: settings that apply at once, and the names
//! of changed keys that need a restart. Always holds: a file with an error changes nothing.

use std::path::{Path, PathBuf};

use mpvpn_status::reload_report::{ConfigValue, ReloadReport};
use mpvpn_types::word_enum;

use super::{ClientOptions, LinkConfig, Rights, ServerOptions, inspect::values, words::FileKind};
use crate::class_reload::ClassReload;
use crate::{
    defaults::{CLIENT_FILE, SERVER_FILE},
    resolve::{ClientConfig, ServerConfig},
};
use mpvpn_input::{Result, files};

/// The sources of a configuration: file and command line, from which it can be read again.
#[derive(Clone, Debug)]
pub struct ConfigSource<O> {
    file: Option<PathBuf>,
    options: O,
    kind: Kind,
    /// Used for servers only.
    rights: Rights,
}

/// The kind of client.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Machine,
    Proxy,
    App,
}

impl<O> ConfigSource<O> {
    /// `file`: the value of `--config`. `options`: the rest of the command line.
    pub fn new(file: Option<PathBuf>, options: O) -> Self {
        Self { file, options, kind: Kind::Machine, rights: Rights::ALL }
    }

    /// The file of `--config`.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }
}

impl ConfigSource<ClientOptions> {
    /// The sources of a proxy's configuration.
    pub fn of_proxy(file: Option<PathBuf>, options: ClientOptions) -> Self {
        Self { kind: Kind::Proxy, ..Self::new(file, options) }
    }

    /// The source of the configuration of a client inside an app, which has no file.
    pub fn of_app(options: ClientOptions) -> Self {
        Self { kind: Kind::App, ..Self::new(None, options) }
    }

    /// The file that is read, if there is one: that of `--config`, or the default one.
    pub fn file_to_watch(&self) -> Option<PathBuf> {
        match self.kind {
            Kind::Machine => watchable(self.file.as_deref().unwrap_or(Path::new(CLIENT_FILE))),
            Kind::Proxy => self.file.clone(),
            Kind::App => None,
        }
    }

    /// The values of the running process: of its file as it is now, and of its command line, where tokens are
    /// hidden.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn values(&self) -> Result<Vec<ConfigValue>> {
        let kind = if matches!(self.kind, Kind::Machine) { FileKind::Client } else { FileKind::Proxy };
        values(kind, self.file_to_watch().filter(|file| files::may_exist(file)).as_deref(), &arguments())
    }

    /// The configuration of a client that would start now.
    pub fn load(&self) -> Result<ClientConfig> {
        match self.kind {
            Kind::Machine => ClientConfig::load(self.file.as_deref(), self.options.clone()),
            Kind::Proxy => ClientConfig::load_proxy(self.file.as_deref(), self.options.clone()),
            Kind::App => ClientConfig::resolve_app(self.options.clone()),
        }
    }
}

impl ConfigSource<ServerOptions> {
    /// The sources of the configuration of a server with these rights.
    pub fn of_server(file: Option<PathBuf>, options: ServerOptions, rights: Rights) -> Self {
        Self { rights, ..Self::new(file, options) }
    }

    /// The file that is read, if there is one: that of `--config`, or the default one.
    pub fn file_to_watch(&self) -> Option<PathBuf> {
        watchable(self.file.as_deref().unwrap_or(Path::new(SERVER_FILE)))
    }

    /// The values of the running process: of its file as it is now, and of its command line.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn values(&self) -> Result<Vec<ConfigValue>> {
        values(
            FileKind::Server,
            self.file_to_watch().filter(|file| files::may_exist(file)).as_deref(),
            &arguments(),
        )
    }

    /// The configuration of a server that would start now.
    pub fn load(&self) -> Result<ServerConfig> {
        ServerConfig::load(self.file.as_deref(), self.options.clone(), self.rights)
    }
}

/// The arguments of this process, without its name.
fn arguments() -> Vec<String> {
    std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned()).collect()
}

/// A file, if its folder exists: the file may come later.
fn watchable(file: &Path) -> Option<PathBuf> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let is_folder = folder.is_dir() || folder.try_exists().is_err();
    is_folder.then(|| file.to_owned())
}

/// The keys of the fields in which two values differ.
macro_rules! differing {
    ($a:expr, $b:expr, $($field:ident: $key:literal),+) => {
        [$(($a.$field != $b.$field, $key)),+]
            .into_iter()
            .filter_map(|(differs, key)| differs.then(|| key.to_owned()))
            .collect::<Vec<String>>()
    };
}

impl ClientConfig {
    /// Applies the settings of `new` that can change while a client runs, and reports the others.
    pub fn apply_reload(&mut self, new: Self) -> ReloadReport {
        let mut restart = differing!(
            self, new, servers: "server, ca, pin, insecure, token or token-file", choose: "choose", return_when: "return", when_down: "when-down",
            cert: "cert and key",
            paths: "path", state_dir: "state-dir", tun_name: "tun-name", scheduler: "scheduler", cc: "cc", via: "via",
            lane: "lane", lane_rules: "lane-rule", routes: "routes", keep_routes: "keep-routes",
            dns: "dns", dns_local: "dns-local", kill_switch: "kill-switch or kill-switch-lan",
            static_routes: "route", tun_persist: "tun-persist", tun_carrier: "tun-carrier",
            share: "share", proxies: "socks5 or http", shards: "shards",
            name: "name", api_socket: "api-socket", metrics: "metrics",
            dashboard: "dashboard, dashboard-cert or dashboard-key", qlog: "qlog", confine: "confine",
            reload: "reload"
        );
        let mut applied = Vec::new();
        if self.log_level != new.log_level {
            self.log_level = new.log_level;
            applied.push("log-level".to_owned());
        }
        if self.site != new.site {
            self.site = new.site;
            applied.push("announce, accept-from, masquerade and forward".to_owned());
        }
        if self.bypass != new.bypass {
            self.bypass = new.bypass;
            applied.push("bypass".to_owned());
        }
        let class_reload = self.reload_classes(new.classes, new.class_rules, new.class_steering);
        if class_reload == ClassReload::NeedsRestart {
            restart.push(
                "tun of [[class]] or rules that steer packets there (until then no [[class]] changes)"
                    .to_owned(),
            );
        }
        // The DSCP is set when the socket of a link is opened.
        if dscps(&self.links) != dscps(&new.links) {
            restart.push("dscp of [[link]]".to_owned());
        }
        let links = self.links != new.links;
        self.links = new.links;
        ReloadReport { links, classes: class_reload == ClassReload::Applied, applied, restart }
    }
}

fn dscps(links: &[LinkConfig]) -> Vec<(&str, u8)> {
    links.iter().filter(|link| link.dscp != 0).map(|link| (link.name.as_str(), link.dscp)).collect()
}

word_enum! {
    /// A setting of a server that can change while it runs, with its keys as text for people.
    pub enum ServerSetting {
        /// The targets that clients may reach.
        #[default]
        Access = "access and isolate",
        /// The files of the certificates and keys.
        Certificates = "cert, key and certificate",
        /// The files about certificates of clients, where these count before and after.
        ClientCertificates = "client-ca and crl",
        /// The resolvers for clients.
        Dns = "dns",
        /// The names that clients are answered, beside those of users.
        DnsNames = "dns-name",
        /// Ports that lead to clients.
        Forwards = "forward",
        /// Limits of users.
        Limits = "limit",
        /// How much is logged.
        LogLevel = "log-level",
        /// Whether measurements are answered.
        Measure = "measure",
        /// How clients reach the server, for join links.
        Public = "public",
        /// The networks to which packets are carried.
        Routes = "routes",
        /// The web site.
        Site = "site",
    }
}

impl ServerSetting {
    /// Its keys, as text for people.
    pub const fn keys(self) -> &'static str {
        self.as_str()
    }

    /// Whether taking it from `new` changes the configuration `old`.
    fn differs(self, old: &ServerConfig, new: &ServerConfig) -> bool {
        let mut taken = old.clone();
        taken.take(self, new);
        // Where `auth` differs, all about certificates of clients needs a restart.
        taken != *old && (self != Self::ClientCertificates || old.auth == new.auth)
    }
}

/// The differences between two configurations of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerChanges {
    /// Settings that can change while the server runs.
    pub at_once: Vec<ServerSetting>,
    /// Keys that take effect after a restart.
    pub restart: Vec<String>,
}

impl ServerConfig {
    /// Finds the differences in `new`.
    pub fn compare(&self, new: &Self) -> ServerChanges {
        let restart = differing!(
            self, new, listen: "listen", tcp: "tcp", old_clients: "old-clients", service: "relay-only", acme: "acme",
            proxy_protocol_from: "proxy-protocol-from", subnet: "subnet", subnet6: "subnet6",
            tun_name: "tun-name", auth: "auth", users: "users", state_dir: "state-dir", nat: "nat",
            max_clients: "max-clients", max_relays: "max-relays",
            max_user_relays: "max-user-relays", max_memory: "max-memory", shards: "shards", name: "name", api_socket: "api-socket", metrics: "metrics",
            metrics_users: "metrics-users", dashboard: "dashboard", qlog: "qlog", confine: "confine",
            reload: "reload"
        );
        let domain = (self.dns_names.domain != new.dns_names.domain).then(|| "dns-domain".to_owned());
        let restart = restart.into_iter().chain(domain).collect();
        let at_once =
            ServerSetting::ALL.iter().copied().filter(|setting| setting.differs(self, new)).collect();
        ServerChanges { at_once, restart }
    }

    /// Takes the value of a setting from another configuration.
    pub fn take(&mut self, setting: ServerSetting, from: &Self) {
        match setting {
            ServerSetting::Access => {
                self.access.clone_from(&from.access);
                self.isolate = from.isolate;
            }
            ServerSetting::Certificates => {
                self.cert.clone_from(&from.cert);
                self.more_certs.clone_from(&from.more_certs);
            }
            ServerSetting::ClientCertificates => {
                self.client_ca.clone_from(&from.client_ca);
                self.crl.clone_from(&from.crl);
            }
            ServerSetting::Dns => self.dns.clone_from(&from.dns),
            ServerSetting::DnsNames => self.dns_names.names.clone_from(&from.dns_names.names),
            ServerSetting::Forwards => self.forwards.clone_from(&from.forwards),
            ServerSetting::Limits => self.limits.clone_from(&from.limits),
            ServerSetting::LogLevel => self.log_level = from.log_level,
            ServerSetting::Measure => self.measure = from.measure,
            ServerSetting::Public => self.public.clone_from(&from.public),
            ServerSetting::Routes => self.routes.clone_from(&from.routes),
            ServerSetting::Site => self.site.clone_from(&from.site),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "server = '192.0.2.1'\ninsecure = true\n[[link]]\nname = 'wwan0'\ntier = 'backup'\n";

    #[test]
    fn links_change_at_once_and_the_rest_at_the_next_start() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("client.toml");
        let origin = ConfigSource::new(Some(file.clone()), ClientOptions::default());
        let read = |text: &str| {
            std::fs::write(&file, text).unwrap();
            origin.load()
        };
        let mut config = read(FIRST).unwrap();
        let mut reload = |text: &str| read(text).map(|new| config.apply_reload(new));
        assert_eq!(reload(FIRST).unwrap(), ReloadReport::default());
        let found = reload(&FIRST.replace("backup", "overflow")).unwrap();
        assert_eq!(found, ReloadReport { links: true, ..ReloadReport::default() });
        let other = FIRST.replace("insecure", "scheduler = 'balanced'\nroutes = 'none'\ninsecure");
        let found = reload(&format!("{other}dscp = 46\n")).unwrap();
        assert_eq!(found.restart, ["scheduler", "routes", "dscp of [[link]]"]);
        assert!(found.links);
        let error = reload(&FIRST.replace("backup", "best")).unwrap_err();
        assert!(error.to_string().contains("line 5"), "{error}");
    }

    /// Reads `FIRST` with more behind it, again and again.
    struct Again {
        _home: tempfile::TempDir,
        file: PathBuf,
        origin: ConfigSource<ClientOptions>,
        config: ClientConfig,
    }

    impl Again {
        fn new(text: &str) -> Self {
            let home = tempfile::tempdir().unwrap();
            let file = home.path().join("client.toml");
            std::fs::write(&file, format!("{FIRST}{text}")).unwrap();
            let origin = ConfigSource::new(Some(file.clone()), ClientOptions::default());
            let config = origin.load().unwrap();
            Self { _home: home, file, origin, config }
        }

        fn read(&mut self, text: &str) -> Result<ReloadReport> {
            std::fs::write(&self.file, format!("{FIRST}{text}")).unwrap();
            Ok(self.config.apply_reload(self.origin.load()?))
        }

        fn class(&self, name: &str) -> Option<&super::super::ClassConfig> {
            self.config.classes.iter().find(|class| class.name == name)
        }
    }

    #[test]
    fn classes_change_at_once_and_where_a_rule_is_written_does_not_matter() {
        let class = "[[class]]\nname = 'bulk'\n[[class.match]]\nports = 80\n";
        let mut again = Again::new(class);
        let taken = ReloadReport { classes: true, ..ReloadReport::default() };
        assert_eq!(again.read(&format!("# Backups\n{class}")).unwrap(), ReloadReport::default());
        assert_eq!(again.read(&class.replace("80", "81")).unwrap(), taken);
        assert_eq!(again.read(&class.replace("[[class.m", "copies = 2\n[[class.m")).unwrap(), taken);
        assert_eq!(again.class("bulk").map(|class| class.copies), Some(2));
    }

    #[test]
    fn a_class_keeps_its_number_while_others_come_and_go() {
        let of = |names: &[&str]| {
            let table =
                |name: &&str| format!("[[class]]\nname = '{name}'\n[[class.match]]\ndscp = '{name}'\n");
            names.iter().map(table).collect::<String>()
        };
        let mut again = Again::new(&of(&["af11", "af21", "af31"]));
        let number = |again: &Again, name| again.class(name).map(|class| class.id.0);
        assert!(again.read(&of(&["af31", "af21"])).unwrap().classes);
        assert_eq!(
            (number(&again, "af11"), number(&again, "af21"), number(&again, "af31")),
            (None, Some(4), Some(5))
        );
        assert!(again.read(&of(&["af41", "af31", "af21", "af12"])).unwrap().classes);
        let numbers = ["default", "af41", "af21", "af31", "af12"].map(|name| number(&again, name));
        assert_eq!(numbers, [0, 3, 4, 5, 6].map(Some));
        for (rule, name) in again.config.class_rules.iter().zip(["af41", "af31", "af21", "af12"]) {
            assert_eq!(Some(rule.rule.class.0), number(&again, name), "the rule about {name}");
        }
        let order: Vec<u8> = again.config.classes.iter().map(|class| class.id.0).collect();
        assert_eq!(order, [0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn classes_that_cannot_be_are_refused_with_their_line_and_nothing_changes() {
        let class = "[[class]]\nname = 'bulk'\n[[class.match]]\nports = 80\n";
        let mut again = Again::new(class);
        let before = again.config.clone();
        let error = again.read(&format!("{class}[[class.match]]\nports = 80\n")).unwrap_err();
        assert!(error.to_string().contains("line 10, column 1: this rule never decides"), "{error}");
        assert_eq!(again.config, before);
        let found = again.read("[[class]]\nname = 'bulk'\ntun = 'cr0'\n").unwrap();
        assert!(!found.classes && found.restart[0].starts_with("tun of [[class]]"), "{found:?}");
        assert_eq!(again.config, before);
    }

    #[test]
    fn a_server_says_what_needs_a_restart() {
        let before = ServerConfig::default();
        let after = ServerConfig { max_clients: 7, ..before.clone() };
        assert_eq!(before.compare(&after).restart, ["max-clients"]);
        assert_eq!(before.compare(&before), ServerChanges::default());
    }

    #[test]
    fn a_setting_that_was_taken_differs_no_more() {
        let read =
            |text: &str| ServerConfig::resolve(ServerOptions::parse(text).unwrap(), Rights::ALL).unwrap();
        let before = read("auth = 'mtls'\nclient-ca = 'a'\n");
        let after = read(
            "public = 'a'\nauth = 'mtls'\nclient-ca = 'b'\ncrl = 'c'\nisolate = true\ncert = 'a'\nkey = 'b'\ndns = 'off'\nlog-level = 'debug'\n\
             routes = '10.9.0.0/16'\nmeasure = true\n[site]\nhide = true\n[[limit]]\nmax-classes = 1\n[[forward]]\nport = 'tcp/80'\nto = 'anna'\n",
        );
        let names = read("dns-domain = 'a.b'\n[[dns-name]]\nname = 'nas'\naddress = '10.0.0.7'\n");
        let mut after = after;
        after.dns_names.names = names.dns_names.names;
        let mut changes = before.compare(&after);
        assert_eq!((changes.at_once.as_slice(), changes.restart.len()), (ServerSetting::ALL, 0));
        let mut config = before;
        while let Some(setting) = changes.at_once.pop() {
            config.take(setting, &after);
            assert_eq!(config.compare(&after).at_once, changes.at_once, "{setting:?}");
        }
        assert_eq!(config, after);
    }
}
