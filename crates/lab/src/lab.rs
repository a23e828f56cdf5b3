//! Creates and removes a lab: namespaces, links and addresses.

use std::{
    fmt::Write,
    net::{Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
};

use crate::{
    cleanup::{LabClaim, remove_abandoned},
    emulator::{EmulatedLink, Emulator},
    error::LabError,
    link::{Kind, LinkHandle},
    namespace::Namespace,
    process::{Process, run},
    requirements,
    spec::{LinkKind, LinkSpec},
    tap::Tap,
};

/// The server's IPv4 address, reachable over every link.
pub const SERVER_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// The server's IPv6 address, reachable over every link.
pub const SERVER_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
/// The IPv4 address of the host behind the server.
pub const INET_V4: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
/// The IPv6 address of the host behind the server.
pub const INET_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 2);

/// Most links of a lab: the address plan has networks 10.101.0.0/24 to 10.164.0.0/24 for them.
const MAX_LINKS: usize = 64;

/// The description of a lab that shall be created.
#[derive(Clone, Debug, Default)]
pub struct LabBuilder {
    links: Vec<LinkSpec>,
    lan: bool,
    other: bool,
    seed: u64,
}

impl LabBuilder {
    /// Adds a link between client and server.
    pub fn link(mut self, spec: LinkSpec) -> Self {
        self.links.push(spec);
        self
    }

    /// Adds links between client and server.
    pub fn links(mut self, specs: impl IntoIterator<Item = LinkSpec>) -> Self {
        self.links.extend(specs);
        self
    }

    /// Whether there is a host in a network of its own behind the client: 192.168.77.2/24 and fd00:77::2/64,
    /// behind the client's interface `lan0`.
    pub fn lan(mut self, wanted: bool) -> Self {
        self.lan = wanted;
        self
    }

    /// Whether there is a second client: its `eth1` is a plain veth pair to the server.
    pub fn other_client(mut self, wanted: bool) -> Self {
        self.other = wanted;
        self
    }

    /// The seed of the random draws; by default the same in every lab.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Removes what labs of killed processes left, and creates this lab.
    pub fn build(self) -> Result<Lab, LabError> {
        if !(1..=MAX_LINKS).contains(&self.links.len()) {
            return Err(LabError::LinkCount(self.links.len()));
        }
        requirements::check(&[requirements::IP])?;
        remove_abandoned();
        let claim = LabClaim::take()?;
        let namespace = |role: &str| Namespace::create(format!("{}-{role}", claim.prefix()));
        let (client, server, inet) = (namespace("client")?, namespace("server")?, namespace("inet")?);
        server.ip(&format!("addr add {SERVER_V4}/32 dev lo\naddr add {SERVER_V6}/128 dev lo nodad\n"))?;
        connect_inet(&server, &inet)?;
        let lan = self.lan.then(|| namespace("lan")).transpose()?;
        if let Some(lan) = &lan {
            connect_lan(&client, lan)?;
        }
        let other = self.other.then(|| namespace("other")).transpose()?;
        if let Some(other) = &other {
            connect_link(other, &server, "eth1", "other1", 99, 1500)?;
        }
        let (emulator, links) = self.connect_links(&client, &server)?;
        Ok(Lab {
            _emulator: emulator,
            links,
            client,
            server,
            inet,
            lan,
            other,
            processes: AtomicUsize::new(0),
            specs: self.links,
            claim,
        })
    }

    fn connect_links(
        &self,
        client: &Namespace,
        server: &Namespace,
    ) -> Result<(Option<Emulator>, Vec<LinkHandle>), LabError> {
        let mut emulated_links = Vec::new();
        let mut emulated = Vec::new();
        for (index, spec) in self.links.iter().enumerate() {
            let (near, far) = (format!("eth{}", index + 1), format!("up{}", index + 1));
            match spec.kind {
                LinkKind::Emulated => {
                    let (near, far) = (Tap::create(client, &near)?, Tap::create(server, &far)?);
                    let seed = self.seed.wrapping_mul(MAX_LINKS as u64).wrapping_add(index as u64);
                    emulated.push(Some(emulated_links.len()));
                    emulated_links.push(EmulatedLink::new(near, far, spec, seed));
                }
                LinkKind::Veth => {
                    veth(client, &near, server, &far)?;
                    emulated.push(None);
                }
            }
        }
        // The emulator runs before the devices are configured, because configuring them sends frames.
        let mtu = self.links.iter().map(LinkSpec::device_mtu).max().unwrap_or(1500);
        let emulator =
            if emulated_links.is_empty() { None } else { Some(Emulator::start(emulated_links, mtu)?) };
        let mut links = Vec::new();
        for (index, (spec, index_in_emulator)) in self.links.iter().zip(emulated).enumerate() {
            let number = index + 1;
            configure_link(
                client,
                server,
                &format!("eth{number}"),
                &format!("up{number}"),
                number,
                spec.device_mtu(),
            )?;
            let kind = match (index_in_emulator, &emulator) {
                (Some(index_in_emulator), Some(emulator)) => {
                    Kind::Emulated { handle: emulator.handle(), link: index_in_emulator }
                }
                _ => Kind::Veth,
            };
            let link = LinkHandle { index, kind, client: client.clone(), server: server.clone() };
            link.report_up()?;
            links.push(link);
        }
        Ok((emulator, links))
    }
}

/// A running lab; dropping it removes its processes, devices and namespaces.
pub struct Lab {
    // The order of fields is the order of drops: devices are removed before their namespaces.
    _emulator: Option<Emulator>,
    links: Vec<LinkHandle>,
    client: Namespace,
    server: Namespace,
    inet: Namespace,
    lan: Option<Namespace>,
    other: Option<Namespace>,
    processes: AtomicUsize,
    specs: Vec<LinkSpec>,
    claim: LabClaim,
}

impl Lab {
    /// An empty description of a lab.
    pub fn builder() -> LabBuilder {
        LabBuilder::default()
    }

    /// The namespace of the client, with the links `eth1`, `eth2`…
    pub fn client(&self) -> &Namespace {
        &self.client
    }

    /// The namespace of the server, at [`SERVER_V4`] and [`SERVER_V6`].
    pub fn server(&self) -> &Namespace {
        &self.server
    }

    /// The namespace of a host behind the server, at [`INET_V4`] and [`INET_V6`], without a route to any
    /// tunnel address.
    pub fn inet(&self) -> &Namespace {
        &self.inet
    }

    /// The namespace of a host behind the client, if the lab has one.
    pub fn lan(&self) -> Option<&Namespace> {
        self.lan.as_ref()
    }

    /// The namespace of the second client, if the lab has one.
    pub fn other_client(&self) -> Option<&Namespace> {
        self.other.as_ref()
    }

    /// Link `index`, counted from 0: the one whose device is `eth<index + 1>`.
    pub fn link(&self, index: usize) -> Result<&LinkHandle, LabError> {
        let count = self.links.len();
        self.links.get(index).ok_or(LabError::NoSuchLink { wanted: index + 1, count })
    }

    /// All links.
    pub fn links(&self) -> &[LinkHandle] {
        &self.links
    }

    /// The descriptions of the links.
    pub fn specs(&self) -> &[LinkSpec] {
        &self.specs
    }

    /// A directory that exists as long as the lab, with the output of its processes.
    pub fn dir(&self) -> &Path {
        self.claim.dir()
    }

    /// A directory outside of [`dir`](Self::dir) that every user may read and that exists as long as the lab.
    /// It is created at the first call.
    pub fn public_dir(&self) -> Result<PathBuf, LabError> {
        self.claim.public_dir()
    }

    /// The prefix of the names of the namespaces.
    pub fn prefix(&self) -> &str {
        self.claim.prefix()
    }

    /// Starts a program in `namespace`, with its output going to files in [`dir`](Self::dir).
    ///
    /// The program is killed when the returned value is dropped, and when the thread that calls this ends.
    pub fn spawn(&self, namespace: &Namespace, mut command: Command) -> Result<Process, LabError> {
        let number = self.processes.fetch_add(1, Ordering::Relaxed);
        let program = Path::new(command.get_program()).file_name().unwrap_or_default();
        let base = self.dir().join(format!("{number:02}-{}", program.to_string_lossy()));
        namespace.run_inside(&mut command);
        Process::spawn(command, &base)
    }
}

fn veth(one: &Namespace, one_name: &str, two: &Namespace, two_name: &str) -> Result<(), LabError> {
    let (one, two) = (one.name(), two.name());
    run(Command::new("ip")
        .args(["link", "add", one_name, "netns", one, "type", "veth", "peer"])
        .args(["name", two_name, "netns", two]))?;
    Ok(())
}

fn connect_inet(server: &Namespace, inet: &Namespace) -> Result<(), LabError> {
    veth(server, "inet0", inet, "eth0")?;
    inet.ip(&format!(
        "link set eth0 up\naddr add {INET_V4}/24 dev eth0\naddr add {INET_V6}/64 dev eth0 nodad\n"
    ))?;
    server.ip(&format!(
        "link set inet0 up\naddr add 198.51.100.1/24 dev inet0\naddr add 2001:db8:1::1/64 dev inet0 nodad\n\
         route add default via {INET_V4}\nroute add ::/0 via {INET_V6}\n"
    ))
}

fn connect_lan(client: &Namespace, lan: &Namespace) -> Result<(), LabError> {
    veth(client, "lan0", lan, "eth0")?;
    client
        .ip("link set lan0 up\naddr add 192.168.77.1/24 dev lan0\naddr add fd00:77::1/64 dev lan0 nodad\n")?;
    lan.ip("link set eth0 up\naddr add 192.168.77.2/24 dev eth0\naddr add fd00:77::2/64 dev eth0 nodad\n\
         route add default via 192.168.77.1\nroute add ::/0 via fd00:77::1\n")
}

fn connect_link(
    client: &Namespace,
    server: &Namespace,
    near: &str,
    far: &str,
    number: usize,
    mtu: u32,
) -> Result<(), LabError> {
    veth(client, near, server, far)?;
    configure_link(client, server, near, far, number, mtu)
}

/// Gives a link its addresses (10.<100+n>.0.0/24, fd00:<100+n>::/64) and the client a default route over it.
fn configure_link(
    client: &Namespace,
    server: &Namespace,
    near: &str,
    far: &str,
    number: usize,
    mtu: u32,
) -> Result<(), LabError> {
    let net = 100 + number;
    let metric = 100 + number;
    let mut setup = String::new();
    // Bursts wait in the queue of the device (10,000 packets) until the emulator reads them, instead of being
    // dropped uncounted.
    let _ = writeln!(setup, "link set {far} mtu {mtu} txqueuelen 10000 up");
    let _ = writeln!(setup, "addr add 10.{net}.0.1/24 dev {far}");
    let _ = writeln!(setup, "addr add fd00:{net}::1/64 dev {far} nodad");
    server.ip(&setup)?;
    setup.clear();
    let _ = writeln!(setup, "link set {near} mtu {mtu} txqueuelen 10000 up");
    let _ = writeln!(setup, "addr add 10.{net}.0.2/24 dev {near}");
    let _ = writeln!(setup, "addr add fd00:{net}::2/64 dev {near} nodad");
    let _ = writeln!(setup, "route add default via 10.{net}.0.1 dev {near} metric {metric}");
    let _ = writeln!(setup, "route add ::/0 via fd00:{net}::1 dev {near} metric {metric}");
    client.ip(&setup)
}
