use std::{io, net::SocketAddr, path::PathBuf};

use ipnet::IpNet;

/// An operation that the kernel, a helper program or the journal refused, as a sentence for users.
#[derive(Debug, thiserror::Error)]
pub enum OsError {
    /// A system call or netlink request failed.
    #[error("cannot {operation} {object}: {source}{}{}{}", in_parentheses(.detail), hint(.source), exists_hint(.operation, .source))]
    Kernel {
        /// The attempted operation, as in "add route".
        operation: &'static str,
        /// The object of the operation, as in "10.0.0.0/8 dev mpvpn0".
        object: String,
        /// The kernel's answer.
        source: io::Error,
        /// The kernel's explanation beyond the error number (netlink extended acknowledgement).
        detail: Option<String>,
    },
    /// The TUN device's name is taken.
    #[error("the name {name} is in use by {holder}: stop that, or choose another name with --tun-name")]
    NameInUse {
        /// The name of the device.
        name: String,
        /// The process or kind of interface that holds the name, as far as it can be found.
        holder: String,
    },
    /// The kernel would refuse this interface name.
    #[error("`{name}` is no interface name: 1 to 15 bytes without `/`, space or control characters")]
    InvalidInterfaceName {
        /// The rejected name.
        name: String,
    },
    /// No interface has this name.
    #[error("there is no interface {name}; `ip link` lists those that exist")]
    NoInterface {
        /// The name asked for.
        name: String,
    },
    /// A UDP socket could not be bound.
    #[error("cannot bind UDP {local}{}: {source}{}", on_device(.device), bind_hint(.source))]
    Bind {
        /// The address asked for.
        local: SocketAddr,
        /// The device asked for.
        device: Option<String>,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on TCP {local}: {source}{}", listen_hint(.source))]
    Listen {
        /// The address asked for.
        local: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Another interface already has an address in the tunnel's subnet.
    #[error("{address} of {interface} is inside the tunnel's subnet {subnet}: choose another subnet")]
    SubnetInUse {
        /// The tunnel's subnet.
        subnet: IpNet,
        /// The other interface's address.
        address: IpNet,
        /// The other interface.
        interface: String,
    },
    /// The program `nft` is not installed.
    #[error(
        "the program `nft` is missing, which filters packets and translates addresses: apt install nftables"
    )]
    NftMissing,
    /// `nft` refused a transaction; nothing was changed.
    #[error("nft refused the table `inet {table}`: {message}")]
    Nft {
        /// The name of the table.
        table: String,
        /// The output of nft.
        message: String,
    },
    /// All numbers of a pool are held by instances of this network namespace.
    #[error(
        "all {count} {purpose} are in use, by {holders}: stop one of these instances; `mpvpn reset` frees what ended ones held"
    )]
    NumbersInUse {
        /// How many there are.
        count: u32,
        /// The purpose of the numbers.
        purpose: &'static str,
        /// The holders, each with the count of its numbers.
        holders: String,
    },
    /// Another process of the same name runs in this network namespace.
    #[error(
        "`{name}` already runs in this network namespace as process {pid}: stop it, or choose another name with --tun-name"
    )]
    AlreadyRunning {
        /// The name of the journal.
        name: String,
        /// The process that owns the journal.
        pid: u32,
    },
    /// A process of root goes on as another user, which cannot use a folder.
    #[error(
        "this process goes on as the user {user}, which cannot use the folder {}: choose another folder, or `chown {user}` it and let that user enter those above",
        path.display()
    )]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The number of the user.
        user: u32,
    },
    /// The journal could not be written or locked, so nothing was changed.
    #[error("cannot {operation} the journal {}: {source}{}", path.display(), hint(.source))]
    Journal {
        /// The attempted operation, as in "write".
        operation: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A descriptor that an app provides does not keep the boundaries of packets.
    #[error(
        "the descriptor for packets is {kind}: it must carry one packet a read, as a TUN device, SOCK_SEQPACKET or SOCK_DGRAM"
    )]
    NotPacketOriented {
        /// The kind of file that the descriptor refers to, as in "a pipe".
        kind: &'static str,
    },
    /// `/etc/resolv.conf` belongs to the whole machine, and this process runs in another network namespace.
    #[error(
        "{} is the whole machine's, and this is a network namespace of its own: give it a file of its own, as \
         `ip netns exec NAME` does with /etc/netns/NAME/resolv.conf, or use --dns off", path.display()
    )]
    SharedResolvConf {
        /// The file.
        path: PathBuf,
    },
    /// `--share` names neither an interface nor a network.
    #[error("`{text}` is neither an interface nor a network as in 192.168.1.0/24")]
    InvalidShareSource {
        /// The rejected text.
        text: String,
    },
}

impl OsError {
    /// An error of `operation` on `object` without further detail.
    pub(crate) fn kernel(
        operation: &'static str,
        object: impl ToString,
        source: impl Into<io::Error>,
    ) -> Self {
        Self::Kernel { operation, object: object.to_string(), source: source.into(), detail: None }
    }

    /// The kernel's error number, if the error came from the kernel.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Kernel { source, .. }
            | Self::Bind { source, .. }
            | Self::Listen { source, .. }
            | Self::Journal { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// Whether a removal failed because the object did not exist.
    pub(crate) fn is_gone(&self) -> bool {
        let gone = [libc::ESRCH, libc::ENOENT, libc::ENODEV, libc::EADDRNOTAVAIL, libc::ENXIO];
        self.errno().is_some_and(|errno| gone.contains(&errno))
    }

    /// Whether an addition failed because the object exists already.
    pub(crate) fn is_present(&self) -> bool {
        self.errno() == Some(libc::EEXIST)
    }
}

/// Turns "does not exist" into `Ok`: the result of a removal whose object is gone already.
pub(crate) fn ignore_gone(result: Result<(), OsError>) -> Result<(), OsError> {
    match result {
        Err(error) if error.is_gone() => Ok(()),
        other => other,
    }
}

fn in_parentheses(detail: &Option<String>) -> String {
    detail.as_ref().map(|text| format!(" ({text})")).unwrap_or_default()
}

fn on_device(device: &Option<String>) -> String {
    device.as_ref().map(|name| format!(" on {name}")).unwrap_or_default()
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => "; run as root, or with the capability CAP_NET_ADMIN",
        _ => "",
    }
}

fn exists_hint(operation: &str, error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EEXIST) if ["add the rule", "add the route"].contains(&operation) => {
            "; another program made it, or an instance of mpvpn that was killed: `mpvpn reset` removes what such instances left, \
             `ip rule` and `ip route show table all` show the rest"
        }
        _ => "",
    }
}

fn listen_hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EADDRINUSE) => "; `ss -tlpn` shows which process has the port",
        Some(libc::EADDRNOTAVAIL) => "; no interface has that address",
        Some(libc::EACCES) => "; ports below 1024 need root or CAP_NET_BIND_SERVICE",
        _ => "",
    }
}

fn bind_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EADDRINUSE) => "; `ss -ulpn` shows which process has the port",
        Some(libc::EADDRNOTAVAIL) => "; no interface has that address",
        Some(libc::ENODEV) => "; `ip link` lists the interfaces that exist",
        Some(libc::EACCES) => "; ports below 1024 need root or CAP_NET_BIND_SERVICE",
        Some(libc::EPERM) => "; run as root, or with the capability CAP_NET_ADMIN",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_operation_object_and_remedy() {
        let error =
            OsError::kernel("add route", "10.0.0.0/8 dev mpvpn0", io::Error::from_raw_os_error(libc::EPERM));
        let text = error.to_string();
        assert!(text.starts_with("cannot add route 10.0.0.0/8 dev mpvpn0: "), "{text}");
        assert!(text.contains("CAP_NET_ADMIN"), "{text}");
        assert!(!error.is_gone());
    }

    #[test]
    fn the_error_for_a_taken_port_names_the_command_that_finds_its_owner() {
        let error = OsError::Bind {
            local: ([0, 0, 0, 0], 443).into(),
            device: Some("eth0".into()),
            source: io::Error::from_raw_os_error(libc::EADDRINUSE),
        };
        let text = error.to_string();
        assert!(text.contains("0.0.0.0:443 on eth0") && text.contains("ss -ulpn"), "{text}");
    }
}
