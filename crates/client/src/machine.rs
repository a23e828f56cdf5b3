//! The changes of a client to its machine: TUN devices, addresses, routes, rules and name servers.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use mpvpn_class::Rule;
use mpvpn_config::{ClientConfig, Dns, Forward, ForwardHost, KernelMatch, RouteRule, Routes, SteeringRule};
use mpvpn_error::RunError;
use mpvpn_masque::capsule::IpRange;
use mpvpn_os::{
    Tun, TunConfig, UndoJournal,
    dns::{ResolverConfig, link_resolvers, uses_systemd_resolved},
    firewall::{ForwardCounters, MarkBits, PacketMatch, PortForward, SiteNetwork, SiteRules},
    netlink::{Interface, MAIN_TABLE},
    tunnel_net::{
        self, BypassNet, ClassNet, ClassSteering, ClassTun, ClientNet, ClientNetConfig, ClientNetState,
        ClientSite, DeviceAddresses, InboundNet, ShareSource, StaticRoute, share_tunnel,
    },
    undo::{self, CLASS_MARKS, INSTANCE_NUMBERS, Step},
};
use mpvpn_sockets::packet_io::{TUN_QUEUE_PACKETS, undo_changes};
use mpvpn_status::{ForwardedPort, KillSwitchState};
use mpvpn_tunnel::{AddressesInUse, Assignment};
use mpvpn_types::Domain;
use tokio::runtime::Handle;

use super::{
    bypass::{self, Bypass},
    device::{ClassQueue, Device, Devices},
    kill_switch::ClientKillSwitch,
    local_names::{BypassedNames, LocalNames, NameSplit},
};

/// How often at most the tunnel's routes are adapted to those of the machine. More often: a machine whose
/// routes change all the time lists them so often; less often: a route that a user adds counts later. Chosen.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest prefixes of public networks that a server may draw into the tunnel by advertising them
/// (bits), for IPv4 and IPv6. Shorter: a server draws more traffic than that to its own networks; longer: the
/// networks of large organisations are left out. The largest that are assigned to one are of 8 bits, and 19
/// (IANA, RIPE NCC).
const MIN_ADVERTISED_PREFIX: (u8, u8) = (8, 16);
/// Advertised routes that are used. More: a server makes the kernel and the journal hold more; fewer: a
/// server's networks are left out. Chosen.
const MAX_ADVERTISED_ROUTES: usize = 1024;

/// The network configuration of a client.
pub(super) struct Machine {
    net: ClientNet,
    /// Connections that came in over links.
    pub(super) inbound: InboundNet,
    /// The classes' own TUN devices, and their names.
    classes: ClassNet,
    class_tuns: Vec<String>,
    tun_name: String,
    /// The firewall mark of the tunnel's own packets.
    pub(super) mark: u32,
    is_shared: bool,
    /// Packets past the tunnel.
    pub(super) bypass: Bypass,
    /// The networks behind this machine.
    site: ClientSite,
    forward_counters: ForwardCounters,
    resolver: ResolverConfig,
    /// The name servers that were applied last, and the domain below which names are asked for there.
    applied_resolvers: Option<(Vec<IpAddr>, Option<Arc<Domain>>)>,
    /// Which name servers are asked outside of the tunnel, and what to do about it.
    pub(super) dns_leak: Option<String>,
    /// Answers names of the local network. `None` where it is not asked for, or cannot be.
    local_names: Option<LocalNames>,
    /// Why names of the local network fail, and what to do about it.
    pub(super) local_names_fail: Option<String>,
    /// For tasks that answer programs of this machine.
    pub(super) runtime: Option<Handle>,
    /// `None` where it is off.
    pub(super) kill_switch: Option<ClientKillSwitch>,
    pub(super) undo: UndoJournal,
    pub(super) assignment: Option<Assignment>,
    /// The addresses of other interfaces.
    pub(super) addresses_in_use: AddressesInUse,
    /// When the tunnel's routes are adapted to those of the machine, and when that was done last.
    pub(super) refresh_at: Option<Instant>,
    refreshed_at: Option<Instant>,
}

/// The networks of the server's routes that `--routes advertised` sends into the tunnel, and one that is left
/// out, if any is.
fn advertised_networks(routes: &[IpRange]) -> (Vec<IpNet>, Option<IpNet>) {
    let is_taken = |net: &IpNet| {
        let least = if net.addr().is_ipv4() { MIN_ADVERTISED_PREFIX.0 } else { MIN_ADVERTISED_PREFIX.1 };
        tunnel_net::is_private(net) || net.prefix_len() >= least
    };
    let networks = routes.iter().flat_map(|range| range.to_nets());
    // One more than is used, to know whether there are too many.
    let (mut taken, large): (Vec<IpNet>, Vec<IpNet>) =
        networks.take(MAX_ADVERTISED_ROUTES + 1).partition(is_taken);
    let surplus = (taken.len() + large.len() > MAX_ADVERTISED_ROUTES).then(|| taken.pop()).flatten();
    (taken, large.first().copied().or(surplus))
}

/// The server's routes, if they leave out part of an address family that the client has.
fn limited_routes(assignment: &Assignment) -> Option<String> {
    let is_whole = |range: &IpRange| range.protocol() == 0 && range.to_nets()[0].prefix_len() == 0;
    let of_family = |v4: bool| assignment.routes.iter().filter(move |range| range.start().is_ipv4() == v4);
    let leads_everywhere = |v4: bool| of_family(v4).any(is_whole);
    let mut families = assignment.addresses.iter().map(|net| net.addr().is_ipv4());
    let list = || assignment.routes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    families.any(|v4| !leads_everywhere(v4)).then(list)
}

impl Machine {
    /// Opens the queues of the TUN devices, after undoing what a killed process left.
    pub(super) fn open(config: &ClientConfig) -> Result<(Self, Vec<Devices>), RunError> {
        let tuns = config.class_tuns().map(|(_, tun)| tun).chain([&*config.tun_name]).map(str::to_owned);
        let kept = if config.tun_persist { tuns.collect() } else { Vec::new() };
        let mut undo = UndoJournal::open_keeping(Path::new(undo::DEFAULT_FOLDER), &config.tun_name, kept)?;
        let number = undo.take_number(&INSTANCE_NUMBERS, None)?;
        // One shard suits most clients: their links are slower than one thread.
        let shards = config.shards.count(1);
        let open = |name: &str| {
            let config = TunConfig {
                name: Some(name.to_owned()),
                queue_packets: Some(TUN_QUEUE_PACKETS),
                stays: config.tun_persist,
                ..TunConfig::default()
            };
            let queues = Tun::open_queues(config, shards)?;
            let interface = Interface { name: queues[0].name().to_owned(), index: queues[0].ifindex() };
            Ok::<_, RunError>((interface, queues))
        };
        let (interface, queues) = open(&config.tun_name)?;
        let mut devices: Vec<Devices> = queues.into_iter().map(|tun| Device::Tun(tun).into()).collect();
        let mut tuns = Vec::new();
        for (class, name) in config.class_tuns() {
            let (interface, queues) = open(name)?;
            for (devices, tun) in devices.iter_mut().zip(queues) {
                devices.classes.push(ClassQueue::new(class.id, tun));
            }
            let is_steered = config.class_steering.iter().any(|steering| steering.rule.class == class.id);
            // The usual mark of a class is its number plus one.
            let mark = match is_steered {
                true => Some(undo.take_number(&CLASS_MARKS, Some(class.id.0 + 1))?),
                false => None,
            };
            tuns.push(ClassTun { interface, number: class.id.0, mark, is_pinned: class.pinned });
        }
        if config.tun_persist {
            let devices = tuns.iter().map(|tun| &tun.interface).chain([&interface]);
            let steps = devices.map(|interface| Step::Device { interface: interface.clone() });
            let new = steps.filter(|step| !undo.steps().contains(step)).collect::<Vec<_>>();
            undo.record_all(new)?;
        }
        let tun_name = interface.name.clone();
        let class_tuns: Vec<String> = tuns.iter().map(|tun| tun.interface.name.clone()).collect();
        let keep_routes = config.keep_routes.clone();
        let class_tun_interfaces = tuns.iter().map(|tun| tun.interface.clone()).collect();
        let net_config = ClientNetConfig {
            keep_routes,
            class_tuns: class_tun_interfaces,
            static_routes: config.static_routes.iter().flat_map(static_routes).collect(),
            has_carrier_of_tunnel: config.has_carrier_of_tunnel(),
            ..ClientNetConfig::new(interface, number)
        };
        let mark = net_config.mark();
        let all_tuns: Vec<String> = std::iter::once(&tun_name).chain(&class_tuns).cloned().collect();
        let bypass = Bypass::new(BypassNet::new(net_config.clone(), all_tuns.clone())?);
        let mut inbound = InboundNet::new(net_config.clone())?;
        // First: nothing else may cut the connection over which the client was started.
        update_inbound(&mut inbound, &mut undo, all_tuns.iter().map(String::as_str));
        let kill_switch = ClientKillSwitch::arm(config, all_tuns, mark)?;
        let steering = config.class_steering.iter().map(steering).collect();
        let mut classes = ClassNet::new(net_config.clone(), tuns, steering)?;
        let mut net = ClientNet::new(net_config)?;
        classes.adopt(&undo);
        net.adopt(&undo);
        let forward_counters = ForwardCounters::of_client(&tun_name);
        let mut machine = Self {
            net,
            inbound,
            classes,
            class_tuns,
            resolver: ResolverConfig::new(&tun_name),
            tun_name,
            mark,
            is_shared: false,
            bypass,
            site: ClientSite::default(),
            forward_counters,
            applied_resolvers: None,
            dns_leak: None,
            local_names: None,
            local_names_fail: None,
            runtime: None,
            kill_switch,
            undo,
            assignment: None,
            addresses_in_use: AddressesInUse::default(),
            refresh_at: None,
            refreshed_at: None,
        };
        machine.find_addresses_in_use();
        machine.set_bypass(config)?;
        Ok((machine, devices))
    }

    /// Sets the name servers again when it is configured next.
    pub(super) fn forget_resolvers(&mut self) {
        self.applied_resolvers = None;
    }

    /// The names of all TUN devices.
    pub(super) fn tuns(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.tun_name).chain(&self.class_tuns).map(String::as_str)
    }

    /// The server has these addresses now.
    pub(super) fn set_servers(&mut self, servers: &[SocketAddr]) -> Result<(), RunError> {
        self.kill_switch.as_mut().map_or(Ok(()), |kill_switch| kill_switch.set_servers(servers))
    }

    /// The state of the kill switch.
    pub(super) fn kill_switch_state(&self, is_up: bool) -> KillSwitchState {
        match (&self.kill_switch, is_up) {
            (None, _) => KillSwitchState::Off,
            (Some(_), true) => KillSwitchState::Armed,
            (Some(_), false) => KillSwitchState::Blocking,
        }
    }

    /// Prepares a link to carry the tunnel's packets.
    pub(super) fn prepare_link(&mut self, name: &str) {
        if let Err(error) = self.net.loosen_reverse_path_filter(&mut self.undo, name) {
            tracing::warn!(link = %name, %error, "cannot prepare a link");
        }
    }

    /// Stores the server's assignment; [`Self::configure`] applies it.
    pub(super) fn assign(&mut self, config: &ClientConfig, assignment: Assignment) {
        let before = self.assignment.replace(assignment);
        let Some(given) = &self.assignment else { return };
        if before.is_some_and(|before| before.routes == given.routes) {
            return;
        }
        match config.routes {
            Routes::All => {
                if let Some(routes) = limited_routes(given) {
                    tracing::warn!(
                        routes,
                        "the server carries packets to these addresses only, but all traffic is routed into the tunnel: \
                         --routes advertised uses the tunnel for these alone"
                    );
                }
            }
            Routes::Advertised => {
                if let (_, Some(network)) = advertised_networks(&given.routes) {
                    tracing::warn!(
                        %network,
                        "the server advertises networks that are too large, or too many of them, for --routes advertised, which \
                         leaves them out: --routes all sends everything into the tunnel"
                    );
                }
            }
            Routes::None => {}
        }
    }

    /// Applies addresses, routes and the MTU (bytes), once there are addresses.
    pub(super) fn configure(&mut self, config: &ClientConfig, mtu: u32) -> Result<(), RunError> {
        let Some(assignment) = &self.assignment else { return Ok(()) };
        let routes = match config.routes {
            Routes::All => tunnel_net::Routes::All,
            Routes::None => tunnel_net::Routes::None,
            Routes::Advertised => {
                let own = config.site.networks.iter().map(|one| one.announced);
                let own: Vec<_> = own.chain(assignment.networks.iter().copied()).collect();
                let is_elsewhere = |net: &IpNet| !own.iter().any(|own| own.contains(net));
                let advertised = advertised_networks(&assignment.routes).0.into_iter();
                tunnel_net::Routes::Advertised(advertised.filter(is_elsewhere).collect())
            }
        };
        let behind = config.site.networks.iter().map(|one| one.network);
        let behind = behind.chain(self.assigned_networks(config)).collect();
        let wanted = ClientNetState { addresses: assignment.addresses.clone(), routes, behind, mtu };
        self.net.apply(&mut self.undo, &wanted)?;
        let given = (0..self.class_tuns.len()).map(|at| class_addresses(assignment, at)).collect();
        self.classes.apply(&mut self.undo, given, mtu)?;
        self.set_site(config)?;
        self.set_resolvers(config)
    }

    /// Updates the steering rules to the present interfaces, and plans to adapt the routes.
    pub(super) fn interfaces_changed(&mut self, now: Instant) {
        self.find_addresses_in_use();
        self.refresh_at = Some(self.refreshed_at.map_or(now, |at| now.max(at + REFRESH_INTERVAL)));
        if let Err(error) = self.classes.update_vlan_interfaces(&mut self.undo) {
            tracing::warn!(%error, "cannot update the steering rules, which stay as they were");
        }
        if let Some(kill_switch) = &mut self.kill_switch
            && let Err(error) = kill_switch.update()
        {
            tracing::warn!(%error, "the kill switch lets the same networks pass as before");
        }
    }

    /// Finds the addresses that the server cannot assign.
    fn find_addresses_in_use(&mut self) {
        match self.net.addresses_of_other_interfaces() {
            Ok(addresses) => self.addresses_in_use.set(addresses),
            Err(error) => tracing::warn!(%error, "cannot find out which addresses this machine has"),
        }
    }

    /// Adapts the tunnel's routes, and those for connections that come in over links, to those of the
    /// machine, when due.
    pub(super) fn refresh_routes(&mut self, now: Instant) {
        if self.refresh_at.take_if(|at| *at <= now).is_none() {
            return;
        }
        self.refreshed_at = Some(now);
        let tuns = std::iter::once(&self.tun_name).chain(&self.class_tuns).map(String::as_str);
        update_inbound(&mut self.inbound, &mut self.undo, tuns);
        self.update_bypass();
        let net = self.net.refresh(&mut self.undo);
        if let Err(error) = net.and_then(|()| self.classes.refresh(&mut self.undo)) {
            tracing::warn!(%error, "cannot adapt the tunnel's routes to those of the machine: they stay as they were");
        }
    }

    /// The configured or suggested resolvers that can be asked through the tunnel.
    pub(super) fn tunnel_resolvers(&self, config: &ClientConfig) -> Vec<IpAddr> {
        let Some(assignment) = &self.assignment else { return Vec::new() };
        let is_reachable =
            |ip: &&IpAddr| assignment.addresses.iter().any(|own| own.addr().is_ipv4() == ip.is_ipv4());
        match &config.dns {
            Dns::Servers(servers) => servers.clone(),
            Dns::Suggested => assignment.dns.iter().filter(is_reachable).copied().collect(),
            Dns::Untouched => Vec::new(),
        }
    }

    /// Makes the system use the configured or suggested name servers: for all names, or where the tunnel does
    /// not take all packets, for those below the domain of the server.
    fn set_resolvers(&mut self, config: &ClientConfig) -> Result<(), RunError> {
        let Some(assignment) = &self.assignment else { return Ok(()) };
        let is_partial = config.dns == Dns::Suggested && config.routes != Routes::All;
        let domain = assignment.dns_domain.clone().filter(|_| is_partial);
        let servers = if is_partial && domain.is_none() { Vec::new() } else { self.tunnel_resolvers(config) };
        let wanted = (servers, domain);
        if self.applied_resolvers.as_ref() == Some(&wanted) {
            return Ok(());
        }
        let (servers, domain) = self.applied_resolvers.insert(wanted).clone();
        let names = domain.as_ref().map_or_else(|| "names".to_owned(), |it| format!("names below {it}"));
        let bypassed = if domain.is_none() { bypass::names(config) } else { Vec::new() };
        let split = match &domain {
            // It tells names apart itself.
            Some(_) if uses_systemd_resolved() => None,
            Some(domain) => Some(NameSplit::InTunnel(domain.as_ref().clone())),
            None if config.dns_local.is_empty() && bypassed.is_empty() => None,
            None => Some(NameSplit::AtLinks(config.dns_local.clone())),
        };
        let must_split = matches!(split, Some(NameSplit::InTunnel(_)));
        let local = self.find_local_names(split.filter(|_| !servers.is_empty()), &servers, bypassed);
        let asked = match local {
            Some(address) => vec![address],
            // The file could only send all names there.
            None if must_split => Vec::new(),
            None => servers.clone(),
        };
        match self.resolver.apply(&mut self.undo, &asked, domain.as_deref()) {
            Ok(()) if asked.is_empty() => {}
            Ok(()) => tracing::info!(?servers, "{names} are resolved through the tunnel"),
            Err(error) if config.dns == Dns::Suggested => {
                tracing::warn!(?servers, %error, "cannot set the resolvers that the server suggests");
            }
            Err(error) => return Err(error.into()),
        }
        self.find_dns_leak(config);
        Ok(())
    }

    /// Starts the resolver that tells names apart, if one is needed and not there. Returns its address if
    /// there is one.
    fn find_local_names(
        &mut self,
        split: Option<NameSplit>,
        servers: &[IpAddr],
        bypassed: Vec<BypassedNames>,
    ) -> Option<IpAddr> {
        if self.local_names.as_ref().map(LocalNames::split) != split.as_ref() {
            (self.local_names, self.local_names_fail) = (None, None);
        }
        let runtime = self.runtime.as_ref()?;
        let split = split?;
        if self.local_names.is_none() {
            let below = match &split {
                NameSplit::AtLinks(domains) => domains.join(", "),
                NameSplit::InTunnel(domain) => domain.to_string(),
            };
            // Programs ask it by way of systemd-resolved, too, where names go past the tunnel.
            let resolved_alone = uses_systemd_resolved() && bypassed.is_empty();
            // As they were before clients rewrote the file.
            let of_links = link_resolvers(Path::new(undo::DEFAULT_FOLDER));
            let failure = match &split {
                NameSplit::AtLinks(domains) if domains.is_empty() => None,
                NameSplit::AtLinks(_) if resolved_alone => Some(format!(
                    "names below {below} are not asked for at the local network, because systemd-resolved answers programs: \
                     `resolvectl domain LINK '~DOMAIN'` tells it to"
                )),
                NameSplit::AtLinks(_) if self.kill_switch.is_some() => Some(format!(
                    "names below {below} fail: the kill switch blocks the resolvers of the links"
                )),
                _ if of_links.is_empty() => {
                    Some(format!("names below {below} fail: /etc/resolv.conf names no resolver of a link"))
                }
                _ => None,
            };
            if let Some(failure) = &failure {
                tracing::warn!("{failure}");
            }
            self.local_names_fail = failure;
            if resolved_alone || matches!(split, NameSplit::InTunnel(_)) && of_links.is_empty() {
                return None;
            }
            let of_links = if self.kill_switch.is_some() { Vec::new() } else { of_links };
            match LocalNames::start(runtime, split, of_links, self.bypass.addresses()) {
                Ok(names) => self.local_names = Some(names),
                Err(error) => {
                    let names = match &*below {
                        "" => "of [[bypass]] are not known".to_owned(),
                        below => format!("below {below} fail"),
                    };
                    let next = match error.kind() {
                        io::ErrorKind::PermissionDenied => {
                            ": start the client again, it may not do that any more"
                        }
                        _ => "",
                    };
                    let failure =
                        format!("names {names}: no resolver for them can be started: {error}{next}");
                    tracing::warn!("{failure}");
                    self.local_names_fail = Some(failure);
                }
            }
        }
        let names = self.local_names.as_ref()?;
        names.set_resolvers(servers, bypassed);
        Some(names.address())
    }

    /// Finds name servers that are asked outside of the tunnel although all packets should use it: their
    /// operators see which names are visited.
    fn find_dns_leak(&mut self, config: &ClientConfig) {
        self.dns_leak = None;
        if config.routes != Routes::All || config.dns == Dns::Untouched {
            return;
        }
        match self.resolver.name_servers_outside_tunnel() {
            Ok(servers) if servers.is_empty() => {}
            Ok(servers) => {
                let list = servers.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
                let leak = format!(
                    "names are asked past the tunnel, at {list}: give --dns ADDR with a resolver beyond the tunnel, \
                     or --dns off if that is meant"
                );
                tracing::warn!("{leak}");
                self.dns_leak = Some(leak);
            }
            Err(error) => tracing::debug!(%error, "cannot find out which resolvers the system uses"),
        }
    }

    /// Lets other machines use the tunnel.
    pub(super) fn share(&mut self, config: &ClientConfig) -> Result<(), RunError> {
        self.classes.enable_forwarding(&mut self.undo)?;
        if config.share.is_empty() || self.is_shared {
            return Ok(());
        }
        let sources =
            config.share.iter().map(|text| text.parse()).collect::<Result<Vec<ShareSource>, _>>()?;
        share_tunnel(&mut self.undo, &self.tun_name, &sources)?;
        self.is_shared = true;
        Ok(())
    }

    /// The networks that the server assigned, where others share the tunnel and can use them.
    fn assigned_networks(&self, config: &ClientConfig) -> impl Iterator<Item = IpNet> {
        let given = self.assignment.as_ref().filter(|_| !config.share.is_empty());
        given.into_iter().flat_map(|given| given.networks.iter().copied())
    }

    /// Lets packets pass between the tunnel and the networks behind this machine, as configured and assigned.
    pub(super) fn set_site(&mut self, config: &ClientConfig) -> Result<(), RunError> {
        let site = &config.site;
        let announced = site.networks.iter().map(|one| (one.network, one.announced));
        let networks = announced.chain(self.assigned_networks(config).map(|net| (net, net)));
        let rules = SiteRules {
            tun: self.tun_name.clone(),
            networks: networks.map(|(network, announced)| SiteNetwork { network, announced }).collect(),
            accept_from: site.accept_from.clone(),
            masquerade: site.masquerade,
            forwards: site.forwards.iter().filter_map(port_forward).collect(),
        };
        if rules.networks.is_empty() && rules.forwards.is_empty() && self.site.is_empty() {
            return Ok(());
        }
        self.forward_counters.read();
        let result = self.site.set(&mut self.undo, rules);
        // The counters of a new table begin at 0.
        self.forward_counters.read();
        Ok(result?)
    }

    /// The ports that lead to hosts behind this machine.
    pub(super) fn forwards(&mut self, config: &ClientConfig) -> Vec<ForwardedPort> {
        if config.site.forwards.is_empty() {
            return Vec::new();
        }
        self.forward_counters.read();
        let of = |forward: &Forward| {
            let bytes = self.forward_counters.of(forward.ports.protocol_number(), forward.ports.range.0);
            ForwardedPort {
                port: forward.ports.to_string(),
                to: forward.to.to_string(),
                addresses: port_forward(forward).map_or(Vec::new(), |forward| forward.to),
                from: forward.from.clone(),
                tx_bytes: bytes.to_host,
                rx_bytes: bytes.from_host,
            }
        };
        config.site.forwards.iter().map(of).collect()
    }

    /// Takes back what was changed. The kill switch is lifted only where the client was told to end.
    pub(super) fn end(mut self, is_orderly: bool) -> Result<(), RunError> {
        let undone = undo_changes(&mut self.undo);
        match self.kill_switch {
            None => undone,
            Some(kill_switch) if is_orderly => undone.and(kill_switch.lift()),
            Some(_) => {
                tracing::warn!(
                    "the kill switch stays in force and blocks this machine's traffic: start the client again, or run \
                     `mpvpn reset` to end it"
                );
                undone
            }
        }
    }
}

fn update_inbound<'a>(inbound: &mut InboundNet, undo: &mut UndoJournal, tuns: impl Iterator<Item = &'a str>) {
    if let Err(error) = inbound.update(undo, &tuns.collect::<Vec<_>>()) {
        tracing::warn!(%error, "replies to connections from outside may go into the tunnel instead of back over their link");
    }
}

/// The addresses of a class's TUN device; `at` counts the classes with one. Its source rules also cover the
/// client's addresses, because answers to them arrive through the client's own TUN device.
fn class_addresses(assignment: &Assignment, at: usize) -> DeviceAddresses {
    let (addresses, own) = assignment.additional_or_first(at);
    DeviceAddresses { addresses, own }
}

/// The routes of a table `[[route]]`.
fn static_routes(rule: &RouteRule) -> impl Iterator<Item = StaticRoute> + '_ {
    let (metric, table) = (rule.metric, rule.table.unwrap_or(MAIN_TABLE));
    rule.to.iter().map(move |to| StaticRoute { to: *to, metric, table })
}

fn port_forward(forward: &Forward) -> Option<PortForward> {
    let ForwardHost::Address(to) = forward.to.host else { return None };
    Some(PortForward {
        protocol: forward.ports.protocol_number(),
        ports: forward.ports.range,
        from: forward.from.clone(),
        to: vec![to],
        to_port: forward.to.port,
    })
}

fn steering(rule: &SteeringRule) -> ClassSteering {
    let SteeringRule { rule, kernel_match, .. } = rule;
    let packets = packet_match(rule, kernel_match);
    ClassSteering { number: rule.class.0, packets, vlans: kernel_match.vlans.clone() }
}

/// The packets of a rule, as far as domains and VLANs are not concerned.
pub(super) fn packet_match(rule: &Rule, kernel_match: &KernelMatch) -> PacketMatch {
    let ports =
        |ranges: &[RangeInclusive<u16>]| ranges.iter().map(|range| (*range.start(), *range.end())).collect();
    let marks = kernel_match.marks.iter().map(|mark| MarkBits { value: mark.value, mask: mark.mask });
    PacketMatch {
        marks: marks.collect(),
        ingress: kernel_match.ingress.clone(),
        protocols: rule.protocols.clone(),
        from: rule.from.clone(),
        to: rule.to.clone(),
        from_ports: ports(&rule.from_ports),
        ports: ports(&rule.ports),
        dscp: rule.dscp.clone(),
        ..PacketMatch::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advertised_networks_are_bounded_in_size_and_number() {
        let range =
            |start: &str, end: &str| IpRange::new(start.parse().unwrap(), end.parse().unwrap(), 0).unwrap();
        let nets = |list: &[&str]| list.iter().map(|net| net.parse().unwrap()).collect::<Vec<IpNet>>();
        let all = [range("0.0.0.0", "255.255.255.255")];
        assert_eq!(advertised_networks(&all), (Vec::new(), "0.0.0.0/0".parse().ok()));
        let halves = [range("0.0.0.0", "127.255.255.255"), range("128.0.0.0", "255.255.255.255")];
        assert_eq!(advertised_networks(&halves), (Vec::new(), "0.0.0.0/1".parse().ok()));
        let office = [
            range("17.0.0.0", "17.255.255.255"),
            range("172.16.0.0", "172.31.255.255"),
            range("fc00::", "fd00::ff"),
        ];
        let (taken, left_out) = advertised_networks(&office);
        assert_eq!(left_out, None);
        assert_eq!(taken, nets(&["17.0.0.0/8", "172.16.0.0/12", "fc00::/8", "fd00::/120"]));
        let single = |number: u32| {
            let address = std::net::Ipv4Addr::from_bits(0x0a00_0000 + 2 * number).to_string();
            range(&address, &address)
        };
        let many: Vec<IpRange> = (0..5000).map(single).collect();
        let (taken, left_out) = advertised_networks(&many);
        assert_eq!(taken.len(), MAX_ADVERTISED_ROUTES);
        assert_eq!(left_out, "10.0.8.0/32".parse().ok());
        assert_eq!(advertised_networks(&many[..MAX_ADVERTISED_ROUTES]).1, None);
    }
}
