//! The programs that hold a port of this network namespace, from `/proc` (proc(5)).
//!
//! In: ports. Out: a [`PortHolder`] for each UDP socket at one of them and each TCP socket that listens
//! there. Always holds: a process that ends meanwhile, or that this user may not look into, has no name.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::SocketAddr,
    path::Path,
};

use mpvpn_types::{PortHolder, PortProtocol};

use crate::tunnel_net::tcp_sockets::address;

/// The state TCP_LISTEN of linux/net/tcp_states.h.
const LISTEN: &str = "0A";
/// The state of a UDP socket without a peer: TCP_CLOSE of linux/net/tcp_states.h.
const UNCONNECTED: &str = "07";

/// The sockets that hold `port`.
pub fn holders_of(port: u16) -> Vec<PortHolder> {
    holders(|_, other| other == port)
}

/// The sockets that hold a port that is wanted.
pub fn holders(is_wanted: impl Fn(PortProtocol, u16) -> bool) -> Vec<PortHolder> {
    let tables = [
        ("udp", PortProtocol::Udp),
        ("udp6", PortProtocol::Udp),
        ("tcp", PortProtocol::Tcp),
        ("tcp6", PortProtocol::Tcp),
    ];
    let read = |name: &str| fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap_or_default();
    let sockets: Vec<Socket> = tables
        .iter()
        .flat_map(|(name, protocol)| sockets_of(&read(name), *protocol))
        .filter(|socket| is_wanted(socket.protocol, socket.address.port()))
        .collect();
    let inodes = sockets.iter().map(|socket| socket.inode).collect();
    let processes = if sockets.is_empty() { BTreeMap::new() } else { processes_with(&inodes) };
    let holder = |socket: Socket| {
        let (program, unit) = processes.get(&socket.inode).cloned().unwrap_or_default();
        PortHolder { protocol: socket.protocol, address: socket.address, program, unit }
    };
    sockets.into_iter().map(holder).collect()
}

#[derive(Debug, PartialEq, Eq)]
struct Socket {
    protocol: PortProtocol,
    address: SocketAddr,
    inode: u64,
}

/// The sockets in a table of the kernel that wait for packets of any sender.
fn sockets_of(table: &str, protocol: PortProtocol) -> Vec<Socket> {
    let state = match protocol {
        PortProtocol::Udp => UNCONNECTED,
        PortProtocol::Tcp => LISTEN,
    };
    let parse = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let (local, its_state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
        let address = address(local)?;
        (*its_state == state).then_some(Socket { protocol, address, inode: inode.parse().ok()? })
    };
    table.lines().skip(1).filter_map(parse).collect()
}

/// Name and unit of the process of each of these sockets. Of several processes that share a socket, the first
/// counts.
fn processes_with(inodes: &BTreeSet<u64>) -> BTreeMap<u64, (Option<String>, Option<String>)> {
    let mut found = BTreeMap::new();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok());
    for process in processes {
        let folder = process.path();
        let files = fs::read_dir(folder.join("fd")).into_iter().flatten().flatten();
        for target in files.filter_map(|file| fs::read_link(file.path()).ok()) {
            let Some(inode) = socket_inode(&target).filter(|inode| inodes.contains(inode)) else { continue };
            found.entry(inode).or_insert_with(|| {
                let text = |name: &str| fs::read_to_string(folder.join(name)).ok();
                (text("comm").map(|name| name.trim().to_owned()), text("cgroup").as_deref().and_then(unit_in))
            });
        }
    }
    found
}

/// The inode in the target of `/proc/PID/fd/N`, if that is a socket: `socket:[INODE]`.
fn socket_inode(target: &Path) -> Option<u64> {
    target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// The service in the text of `/proc/PID/cgroup`.
fn unit_in(cgroup: &str) -> Option<String> {
    let parts = cgroup.lines().flat_map(|line| line.split('/'));
    let mut services = parts.filter(|part| part.ends_with(".service"));
    services.next_back().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_sockets_of_this_process_are_found_with_its_name() {
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let udp = std::net::UdpSocket::bind("[::1]:0").unwrap();
        let name = fs::read_to_string("/proc/self/comm").unwrap();
        for (protocol, address) in
            [(PortProtocol::Tcp, tcp.local_addr().unwrap()), (PortProtocol::Udp, udp.local_addr().unwrap())]
        {
            let holders = holders_of(address.port());
            let holder = holders.iter().find(|holder| holder.protocol == protocol);
            let holder = holder.unwrap_or_else(|| panic!("{address}: {holders:?}"));
            assert_eq!((holder.address, holder.program.as_deref()), (address, Some(name.trim())));
        }
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        assert!(holders_of(free).iter().all(|holder| holder.protocol == PortProtocol::Udp));
    }

    #[test]
    fn connected_sockets_hold_no_port() {
        let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
        let line = |state: &str| format!("   0: 00000000:01BB 00000000:0000 {state} 0:0 00:0 0 0 0 4711 1\n");
        let table = format!("{head}{}{}", line("0A"), line("01"));
        let found = sockets_of(&table, PortProtocol::Tcp);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].inode, found[0].address.port()), (4711, 443));
    }

    #[test]
    fn the_unit_is_the_innermost_service() {
        assert_eq!(unit_in("0::/system.slice/nginx.service\n").as_deref(), Some("nginx.service"));
        assert_eq!(unit_in("0::/user.slice/user-0.slice/session-1.scope\n"), None);
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_panic(text in "\\PC*") {
            let _ = sockets_of(&format!("\n{text}"), PortProtocol::Udp);
            let _ = unit_in(&text);
            let _ = socket_inode(Path::new(&text));
        }
    }
}
