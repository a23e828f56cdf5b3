//! Changes of the configuration while a server runs.
//!
//! In: the configuration, read again on SIGHUP, by `mpvpn config reload`, or when a file changes. Out: the
//! settings that count from now on, at all shards, and the names of the keys that need a restart. Always
//! holds: everything that can fail is done before anything changes, so a reload that fails changes nothing;
//! no connection is closed; reloads are done one after the other.

use std::{
    collections::BTreeSet,
    io::ErrorKind,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Instant, SystemTime},
};

use mpvpn_access::Access;
use mpvpn_config::{LimitRule, ReloadMode, ServerChanges, ServerConfig, ServerDns, ServerSetting, log};
use mpvpn_https::{ConfiguredSite, Site};
use mpvpn_identity::{client_ca::ClientCa, tls::ServerCertificates};
use mpvpn_input::{Error, shared::Shared, short_text::ShortText};
use mpvpn_os::poll::{Interest, WATCH_TOKEN};
use mpvpn_status::{
    events::Event,
    reload_report::{ConfigValue, LockoutPolicy, ReloadReport},
};
use mpvpn_threads::{
    event_loop::{EventLoop, Iteration, reload_event},
    watched_files::WatchedFiles,
};
use mpvpn_tunnel::Reconfiguration;
use mpvpn_users::{
    client_certificates::{self, ClientCertificates},
    credentials::{Certificates, Reachability},
    given_pins::{GivenPins, Lockout},
};
use tokio::sync::oneshot;

use super::{
    Running,
    data_plane::{ServerMessage, ShardSettings},
    forwards::{self, ForwardTable},
    machine::Machine,
    names::TunnelNames,
    packet_filter::{FilterMessage, NewRules, UserProfiles},
    resolver,
    responder::Responder,
};

/// Takes the report of a reload, or why nothing changed.
pub(crate) type Reply = oneshot::Sender<Result<ReloadReport, String>>;

/// The parts that a reload changes, beside the configuration and the shards.
pub(super) struct Reloadable {
    /// The certificates of QUIC and TCP.
    pub(super) certificates: ServerCertificates,
    /// The CAs of clients' certificates, if these count.
    pub(super) client_ca: Option<ClientCa>,
    /// The site, over all versions of HTTP.
    pub(super) site: Site,
    /// The limits that all shards apply.
    pub(super) limits: Shared<Vec<LimitRule>>,
    /// Whether the rules for packets differ between users.
    pub(super) has_rules_of_users: Arc<AtomicBool>,
    /// Answers measurements; `None` if it is off, or cannot listen.
    pub(super) responder: Option<Responder>,
    /// The ports that lead to clients.
    pub(super) forwards: ForwardTable,
    /// The names that clients are answered, if there are any.
    pub(super) names: Option<TunnelNames>,
    /// Where the server's own resolver listens.
    pub(super) own_resolver: Vec<IpAddr>,
    /// The certificates, and with `reload = "auto"` the configuration; `None` if they cannot be watched.
    pub(super) files: Option<WatchedFiles>,
    /// A reload that waits until the rules for packets are replaced.
    pub(super) pending: Option<PendingReload>,
    /// Requests for another one since then.
    pub(super) later: Vec<(LockoutPolicy, Option<Reply>)>,
}

/// A reload of which everything succeeded but the last step.
pub(super) struct PendingReload {
    prepared: Prepared,
    replies: Vec<Reply>,
}

/// A configuration that can be applied.
struct Prepared {
    config: ServerConfig,
    policy: LockoutPolicy,
    at_once: Vec<ServerSetting>,
    restart: Vec<String>,
    certificates: Option<Certificates>,
    client_certificates: Option<ClientCertificates>,
    site: Option<ConfiguredSite>,
    /// Those for packets, if they have to be replaced.
    rules: Option<UserProfiles>,
}

/// The files that a server with this configuration watches, beside that of the users.
pub(super) fn files_to_watch(config: &ServerConfig, file: Option<PathBuf>) -> Vec<PathBuf> {
    let certificates = config.cert.iter().chain(&config.more_certs);
    let certificates = certificates.flat_map(|files| [files.cert.clone(), files.key.clone()]);
    // The list of revoked certificates is watched with the users.
    certificates
        .chain(config.client_ca.clone())
        .chain(file.filter(|_| config.reload == ReloadMode::Auto))
        .collect()
}

impl Running {
    /// Reads files that have changed.
    pub(super) fn read_changed_files(&mut self, now: Instant, iteration: &Iteration) {
        let Some(files) = &mut self.reloadable.files else { return };
        if iteration.ready.iter().any(|event| event.token == WATCH_TOKEN) {
            files.on_ready(now);
        }
        let changed = files.take_changed(now);
        if changed.is_empty() {
            return;
        }
        match self.origin.file_to_watch().is_some_and(|file| changed.contains(&file)) {
            true => self.reload(now, LockoutPolicy::Keep, None),
            false => self.read_certificates(&changed),
        }
    }

    /// Reads the certificates again.
    fn read_certificates(&mut self, changed: &BTreeSet<PathBuf>) {
        tracing::debug!(?changed, "files of certificates have changed");
        let refused = |error: Error| Event::CertificatesRefused { reason: error.to_string().as_str().into() };
        match Certificates::load(&self.config) {
            Ok(certificates) if certificates.are_shown_by(&self.reloadable.certificates) => {}
            Ok(certificates) => match self.lockout(&certificates) {
                None => self.show_certificates(certificates),
                Some(lockout) => self.keep_certificates(lockout),
            },
            Err(error) => self.events.report(refused(error)),
        }
        if self.config.client_ca.as_ref().is_some_and(|file| changed.contains(file)) {
            match ClientCertificates::load(&self.config) {
                Ok(clients) => clients.into_iter().for_each(|clients| self.take_client_ca(&clients.ca)),
                Err(error) => self.events.report(refused(error)),
            }
        }
    }

    /// The clients that do not know these certificates, if they are others than those that are shown.
    fn lockout(&self, new: &Certificates) -> Option<Lockout> {
        let pin = new.first.fingerprint();
        let users = self.user_list.as_ref()?.now();
        if pin == self.reloadable.certificates.first().fingerprint() {
            return None;
        }
        let given = GivenPins::load(&self.config.state_dir);
        given.unwrap_or_else(|error| {
            tracing::warn!(%error, "the pins that were given out are unknown, so another certificate may lock clients out");
            GivenPins::default()
        })
        .lockout(pin, &users)
    }

    fn keep_certificates(&self, lockout: Lockout) {
        self.events.report(Event::CertificatesRefused { reason: ShortText::of(&lockout) });
    }

    /// Verifies certificates of clients by these CAs in new handshakes.
    fn take_client_ca(&self, new: &ClientCa) {
        if self.reloadable.client_ca.as_ref().is_some_and(|ca| ca.replace(new)) {
            tracing::info!(
                "the CAs of clients' certificates are new: they count for connections from now on"
            );
        }
    }

    /// Shows these certificates in new handshakes.
    fn show_certificates(&mut self, certificates: Certificates) {
        let pin = certificates.first.fingerprint();
        if let Err(error) = Reachability::keep(&self.config, &certificates.first) {
            tracing::warn!(%error, "`mpvpn user add` prints join links with the pin of the certificate before");
        }
        self.reloadable.certificates.replace(certificates.first, certificates.others);
        self.events.report(Event::CertificatesRead { pin: pin.to_string().as_str().into() });
    }

    /// The values of the configuration, and where each comes from.
    pub(crate) fn config_values(&self) -> Result<Vec<ConfigValue>, Error> {
        self.origin.values()
    }

    /// Reads the configuration again, applies what can change while the server runs, and reports the rest.
    pub(crate) fn reload(&mut self, now: Instant, policy: LockoutPolicy, reply: Option<Reply>) {
        if self.reloadable.pending.is_some() {
            return self.reloadable.later.push((policy, reply));
        }
        self.start_reload(now, policy, reply.into_iter().collect());
    }

    fn start_reload(&mut self, now: Instant, policy: LockoutPolicy, replies: Vec<Reply>) {
        self.service_manager.reloading();
        let prepared = match self.prepare(policy) {
            Ok(prepared) => prepared,
            Err(error) => return self.finish_reload(Err(error.to_string()), replies),
        };
        match self.user_list.as_mut().map(|list| list.read(now, SystemTime::now())) {
            Some(Err(reason)) => return self.finish_reload(Err(reason), replies),
            Some(Ok(Some(change))) => self.on_users_read(now, Ok(change)),
            Some(Ok(None)) | None => {}
        }
        self.commit_or_wait(now, PendingReload { prepared, replies });
    }

    /// Applies a configuration, after the rules for packets are replaced if they have to be.
    fn commit_or_wait(&mut self, now: Instant, mut reload: PendingReload) {
        match (reload.prepared.rules.take(), &self.data_plane.filter) {
            (Some(users), Some(filter)) => {
                // First: sessions that begin from now on are in the new rules, or ask to be filtered by them.
                if users.differ() {
                    self.reloadable.has_rules_of_users.store(true, Ordering::SeqCst);
                }
                let is_isolated = reload.prepared.config.isolate;
                let forwarded = forwards::ports(&reload.prepared.config.forwards);
                let rules = NewRules { users, is_isolated, forwarded };
                filter.send(FilterMessage::Replace(Box::new(rules)));
                self.reloadable.pending = Some(reload);
            }
            _ => {
                let report = self.commit(now, reload.prepared);
                self.finish_reload(Ok(report), reload.replies);
            }
        }
    }

    /// The rules for packets were replaced, or cannot be.
    pub(super) fn on_rules_replaced(&mut self, now: Instant, replaced: Result<(), String>) {
        let Some(PendingReload { prepared, replies }) = self.reloadable.pending.take() else { return };
        let result = match replaced {
            Ok(()) => Ok(self.commit(now, prepared)),
            Err(reason) => Err(format!("the rules for clients' packets cannot be replaced: {reason}")),
        };
        let differ = UserProfiles::new(&self.config.access).differ();
        self.reloadable.has_rules_of_users.store(differ, Ordering::SeqCst);
        self.finish_reload(result, replies);
        let later = std::mem::take(&mut self.reloadable.later);
        if let Some(policy) = later.iter().map(|(policy, _)| *policy).max() {
            self.start_reload(now, policy, later.into_iter().filter_map(|(_, reply)| reply).collect());
        }
    }

    fn finish_reload(&mut self, result: Result<ReloadReport, String>, replies: Vec<Reply>) {
        self.service_manager.ready();
        self.events.report(reload_event(&result));
        for reply in replies {
            // It is no error if the requester has disconnected.
            let _ = reply.send(result.clone());
        }
    }

    /// Does everything that can fail, and changes nothing.
    fn prepare(&mut self, policy: LockoutPolicy) -> Result<Prepared, Error> {
        let config = self.origin.load()?;
        let mut changes = self.config.compare(&config);
        let (mut certificates, mut site) = (None, None);
        match Certificates::load(&config) {
            Ok(new) if new.are_shown_by(&self.reloadable.certificates) => {}
            Ok(new) => match self.lockout(&new).filter(|_| policy != LockoutPolicy::Allow) {
                None => certificates = Some(new),
                Some(lockout) if policy == LockoutPolicy::Keep => {
                    self.keep_certificates(lockout);
                    changes.at_once.retain(|setting| *setting != ServerSetting::Certificates);
                    changes.restart.push(ServerSetting::Certificates.keys().to_owned());
                }
                Some(lockout) => return Err(lockout.into()),
            },
            Err(error) => postpone_if_unreadable(&mut changes, ServerSetting::Certificates, error)?,
        }
        let client_certificates = match ClientCertificates::load(&config) {
            Ok(new) => new,
            Err(error) => {
                postpone_if_unreadable(&mut changes, ServerSetting::ClientCertificates, error)?;
                None
            }
        };
        if changes.at_once.contains(&ServerSetting::Site) {
            match readable_site(&config) {
                Ok(new) => site = Some(new),
                Err(error) => postpone_if_unreadable(&mut changes, ServerSetting::Site, error)?,
            }
        }
        if changes.at_once.contains(&ServerSetting::Forwards) {
            forwards::check(&config.forwards)?;
        }
        let of_packets = [ServerSetting::Access, ServerSetting::Forwards];
        let is_changed = of_packets.iter().any(|setting| changes.at_once.contains(setting));
        let rules = is_changed.then(|| UserProfiles::new(&config.access));
        let (at_once, restart) = (changes.at_once, changes.restart);
        Ok(Prepared { config, policy, at_once, restart, certificates, client_certificates, site, rules })
    }

    /// Applies a configuration.
    fn commit(&mut self, now: Instant, prepared: Prepared) -> ReloadReport {
        let Prepared {
            config,
            policy,
            at_once,
            mut restart,
            certificates,
            client_certificates,
            site,
            rules: _,
        } = prepared;
        let mut applied = Vec::new();
        for setting in at_once {
            if setting == ServerSetting::Dns && !self.can_suggest(&config.dns) {
                restart.push(setting.keys().to_owned());
                continue;
            }
            self.config.take(setting, &config);
            if setting == ServerSetting::Forwards {
                self.reloadable.forwards.replace(&self.config.forwards);
                self.registry.set_forwarded_users(forwards::users(&self.config.forwards));
            }
            if setting == ServerSetting::Measure {
                // The one before frees the port first.
                self.reloadable.responder = None;
                self.reloadable.responder = responder(&self.config, self.machine.as_ref());
            }
            applied.push(setting.keys().to_owned());
        }
        if let Some(names) = &self.reloadable.names {
            names.update(&self.config);
        }
        if let Some(certificates) = certificates {
            let pin = certificates.first.fingerprint();
            self.show_certificates(certificates);
            if policy == LockoutPolicy::Allow
                && self.user_list.is_some()
                && let Err(error) = GivenPins::accept(&self.config, pin)
            {
                tracing::warn!(%error, "the next reload asks about the clients with another pin once more");
            }
            let keys = ServerSetting::Certificates.keys();
            if !applied.iter().any(|known| known == keys) {
                applied.push(keys.to_owned());
            }
        }
        if let Some(ClientCertificates { ca, revoked }) = client_certificates {
            self.take_client_ca(&ca);
            let list = self.user_list.as_mut();
            let revoked = list.map(|list| list.replace_revocations(self.config.crl.clone(), revoked));
            self.end_certificates(now, revoked.unwrap_or_default(), client_certificates::REVOKED);
        }
        if let Some(site) = site {
            self.reloadable.site.replace(site);
        }
        self.reloadable.limits.replace(self.config.limits.clone());
        log::set_level(self.config.log_level);
        let settings = Arc::new(self.shard_settings());
        self.data_plane.reconfigure(now, &settings);
        self.shards.send(|| ServerMessage::Reconfigured(Arc::clone(&settings)));
        self.watch_files();
        ReloadReport { applied, restart, ..ReloadReport::default() }
    }

    /// Whether these resolvers can be suggested; starts the server's own if it has to.
    fn can_suggest(&mut self, dns: &ServerDns) -> bool {
        let own = &mut self.reloadable.own_resolver;
        if *dns == ServerDns::Own && own.is_empty() {
            let tunnel = self.machine.as_ref().map_or(&[][..], Machine::addresses);
            // Clients that ask it go on doing so until they connect again, so it never ends.
            let names = self.reloadable.names.as_ref();
            *own = resolver::start(dns, tunnel, (&self.registry, names), self.slow.runtime());
            return !own.is_empty();
        }
        true
    }

    /// The settings of all shards.
    fn shard_settings(&self) -> ShardSettings {
        let tunnel = self.machine.as_ref().map_or(&[][..], Machine::addresses);
        ShardSettings {
            tunnel: Reconfiguration {
                routes: self.config.routes.clone(),
                dns: resolver::suggested(&self.config.dns, &self.reloadable.own_resolver),
                hide_wrong_credentials: self.config.site.hide,
            },
            access: Arc::new(access(&self.config, tunnel.to_vec())),
        }
    }

    /// Watches the files that the configuration names now.
    fn watch_files(&mut self) {
        let names = files_to_watch(&self.config, self.origin.file_to_watch());
        if let Some(files) = &mut self.reloadable.files
            && let Err(error) = files.replace(names)
        {
            tracing::warn!(%error, "changes of the files are not noticed: run `mpvpn config reload` after each");
        }
    }

    /// Reads files again from now on when they change.
    pub(super) fn watch_configuration(&mut self, event_loop: &EventLoop) {
        if let Some(files) = &self.reloadable.files
            && let Err(error) = event_loop.poller.add(files, WATCH_TOKEN, Interest::Read)
        {
            tracing::warn!(%error, "changes of the files are not noticed: run `mpvpn config reload` after each");
        }
    }
}

/// The responder of a configuration.
pub(super) fn responder(config: &ServerConfig, machine: Option<&Machine>) -> Option<Responder> {
    let machine = machine.filter(|_| config.measure)?;
    Responder::start(&config.tun_name, machine.addresses())
}

/// The site of a configuration, if this process may read its folder.
fn readable_site(config: &ServerConfig) -> Result<ConfiguredSite, Error> {
    if let Some(folder) = config.site.folder() {
        // A confined process may open a folder that it may not read.
        std::fs::read_dir(folder).map_err(|source| unreadable(folder, source))?;
    }
    ConfiguredSite::new(&config.site)
}

fn unreadable(path: &Path, source: std::io::Error) -> Error {
    Error::File { doing: "read", path: path.to_owned(), source }
}

/// Where clients of a server with this configuration may connect to. `tunnel`: its addresses in the tunnel.
pub(super) fn access(config: &ServerConfig, tunnel: Vec<ipnet::IpNet>) -> Access {
    let access = Access::new(config.access.clone(), tunnel).with_isolation(config.isolate);
    if config.service.has_tun() { access.with_routes(config.routes.clone()) } else { access }
}

/// The setting needs a restart if it names a file that this process may not read, as a process that starts
/// may.
fn postpone_if_unreadable(
    changes: &mut ServerChanges,
    setting: ServerSetting,
    error: Error,
) -> Result<(), Error> {
    let is_forbidden =
        matches!(&error, Error::File { source, .. } if source.kind() == ErrorKind::PermissionDenied);
    if !is_forbidden || !changes.at_once.contains(&setting) {
        return Err(error);
    }
    changes.at_once.retain(|other| *other != setting);
    changes.restart.push(format!("{} ({error}, since it gave up its rights)", setting.keys()));
    Ok(())
}
