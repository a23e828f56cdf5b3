//! The TUN device: whole IP packets, each preceded by a virtio-net header.
//!
//! In: packets to hand to the machine. Out: packets of the machine, up to 64 KiB each, because the
//! kernel leaves segmentation and checksums to us (`IFF_VNET_HDR`, `TUNSETOFFLOAD`; header layout:
//! virtio 1.2, 5.1.6, the 10-byte form). Always holds: the device is nonblocking, carries no
//! packet information header, and vanishes with its descriptor, and with it its addresses and routes.

use std::{
    fs,
    io::{self, IoSlice},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::fs::{Mode, OFlags};

use crate::{error::OsError, netlink::Netlink};

/// Bytes of the virtio-net header in front of every packet read or written.
pub const VNET_HEADER_LEN: usize = 10;

/// Bytes that hold anything the device can deliver: header and the largest IP packet.
pub const READ_BUFFER_LEN: usize = VNET_HEADER_LEN + 65_535;

const DEVICE: &str = "/dev/net/tun";

/// How to make the device.
#[derive(Clone, Debug, Default)]
pub struct TunConfig {
    /// Its name; `None` lets the kernel choose (`tun0`, `tun1`, …).
    pub name: Option<String>,
    /// Largest packet in bytes that the machine may send through it; `None` keeps the kernel's 1500.
    pub mtu: Option<u32>,
    /// Packets that wait in the kernel for us before it drops; `None` keeps the kernel's 500.
    pub queue_packets: Option<u32>,
    /// One reader or several.
    pub queues: Queues,
}

/// How many descriptors may be attached to one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Queues {
    /// This one only.
    #[default]
    Single,
    /// Every `open` of the same name adds a queue. Each must be read, or its packets are lost.
    Multi,
}

/// What the kernel agreed to leave unsegmented.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Offload {
    /// Packets no larger than the MTU, checksums complete.
    Nothing,
    /// Checksums are ours.
    Checksum,
    /// And TCP comes in segments of up to 64 KiB.
    Tcp,
    /// And UDP too (Linux 6.2).
    TcpAndUdp,
}

impl Offload {
    const BEST_FIRST: [Self; 4] = [Self::TcpAndUdp, Self::Tcp, Self::Checksum, Self::Nothing];

    fn bits(self) -> libc::c_uint {
        let tcp = libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
        match self {
            Self::Nothing => 0,
            Self::Checksum => libc::TUN_F_CSUM,
            Self::Tcp => libc::TUN_F_CSUM | tcp,
            Self::TcpAndUdp => libc::TUN_F_CSUM | tcp | libc::TUN_F_USO4 | libc::TUN_F_USO6,
        }
    }
}

/// An open TUN device.
#[derive(Debug)]
pub struct Tun {
    fd: OwnedFd,
    name: String,
    index: u32,
    offload: Offload,
}

impl Tun {
    /// Makes the device, or attaches to an existing one that no process has open.
    pub fn open(config: TunConfig) -> Result<Self, OsError> {
        if let Some(name) = &config.name {
            check_interface_name(name)?;
        }
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd =
            rustix::fs::open(DEVICE, flags, Mode::empty()).map_err(|e| OsError::kernel("open", DEVICE, e))?;
        let name = attach(&fd, &config)?;
        set_header_size(&fd).map_err(|e| OsError::kernel("set the header size of", &name, e))?;
        let offload = set_offload(&fd).map_err(|e| OsError::kernel("set the offloads of", &name, e))?;

        let mut netlink = Netlink::open()?;
        let index = netlink.index_of(&name)?;
        if let Some(mtu) = config.mtu {
            netlink.set_mtu(index, mtu)?;
        }
        if let Some(packets) = config.queue_packets {
            netlink.set_queue_packets(index, packets)?;
        }
        Ok(Self { fd, name, index, offload })
    }

    /// Makes the device with `count` queues (at least one), each for a thread of its own.
    ///
    /// With several, the kernel hands a packet to the queue through which packets of the same flow
    /// came in the other direction last, if any did in the last 3 s, else to one that a hash of the
    /// flow chooses. Packets that nobody reads from an attached queue are lost.
    pub fn open_queues(config: TunConfig, count: u8) -> Result<Vec<Self>, OsError> {
        if count <= 1 {
            return Ok(vec![Self::open(config)?]);
        }
        // The kernel would add our queues to those of another process.
        if let Some(name) = config.name.as_deref().filter(|name| exists(name))
            && let Some(holder) = holder_of(name)
        {
            return Err(OsError::NameInUse { name: name.to_owned(), holder });
        }
        let first = Self::open(TunConfig { queues: Queues::Multi, ..config })?;
        let more =
            TunConfig { name: Some(first.name.clone()), queues: Queues::Multi, ..TunConfig::default() };
        let mut queues = vec![first];
        while queues.len() < usize::from(count) {
            queues.push(Self::open(more.clone())?);
        }
        Ok(queues)
    }

    /// Lets the kernel use this queue of several, or not. While it does not, nothing can be read or
    /// written here, and polling reports an error all the time.
    pub fn set_attached(&self, attached: bool) -> Result<(), OsError> {
        // SAFETY: an all-zero ifreq is valid: an empty name and no flags.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        let flags = if attached { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE };
        request.ifr_ifru.ifru_flags = flags as libc::c_short;
        // SAFETY: TUNSETQUEUE reads one ifreq, which outlives the call.
        let code = unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::TUNSETQUEUE as _, &raw const request) };
        if code < 0 {
            return Err(OsError::kernel("set a queue of", &self.name, io::Error::last_os_error()));
        }
        Ok(())
    }

    /// The device's name at the time it was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device's interface index.
    pub fn ifindex(&self) -> u32 {
        self.index
    }

    /// What the kernel leaves to us.
    pub fn offload(&self) -> Offload {
        self.offload
    }

    /// Reads one packet, header first, and returns their bytes together; `WouldBlock` when there is
    /// none. A buffer below [`READ_BUFFER_LEN`] may get a packet cut short.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::io::read(&self.fd, &mut *buffer) {
                Err(rustix::io::Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
    }

    /// Writes one packet, header first, from as many pieces as it has (at most 1024).
    pub fn write_vectored(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        loop {
            match rustix::io::writev(&self.fd, pieces) {
                Err(rustix::io::Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
    }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Refuses what the kernel's `dev_valid_name` refuses, and `%` and `*`, which the kernel and nft would
/// take for patterns.
pub fn check_interface_name(name: &str) -> Result<(), OsError> {
    let long = name.is_empty() || name.len() >= libc::IFNAMSIZ;
    let strange =
        name.bytes().any(|b| b.is_ascii_whitespace() || b.is_ascii_control() || b"/:%*".contains(&b));
    if long || strange || name == "." || name == ".." {
        return Err(OsError::InvalidInterfaceName { name: name.to_owned() });
    }
    Ok(())
}

fn attach(fd: &OwnedFd, config: &TunConfig) -> Result<String, OsError> {
    let wanted = config.name.as_deref().unwrap_or("");
    // SAFETY: an all-zero ifreq is valid: an empty name and no flags.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(wanted.bytes()) {
        *to = from as libc::c_char;
    }
    let mut flags = libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    if config.queues == Queues::Multi {
        flags |= libc::IFF_MULTI_QUEUE;
    }
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one ifreq, which outlives the call.
    let code = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) };
    if code < 0 {
        return Err(explain_attach(wanted, io::Error::last_os_error()));
    }
    let name = request.ifr_name.iter().take_while(|&&c| c != 0).map(|&c| c as u8).collect::<Vec<_>>();
    Ok(String::from_utf8_lossy(&name).into_owned())
}

fn explain_attach(name: &str, error: io::Error) -> OsError {
    let in_use = |holder: String| OsError::NameInUse { name: name.to_owned(), holder };
    match error.raw_os_error() {
        Some(libc::EBUSY) => in_use(holder_of(name).unwrap_or_else(|| "another process".to_owned())),
        Some(libc::EINVAL) if !name.is_empty() && exists(name) => {
            in_use("an interface that is no TUN device, or one with other settings".to_owned())
        }
        _ => OsError::kernel("create the TUN device", name, error),
    }
}

fn exists(name: &str) -> bool {
    Netlink::open().and_then(|mut netlink| netlink.index_of(name)).is_ok()
}

/// Looks for the process that has TUN device `name` open, in this network namespace.
fn holder_of(name: &str) -> Option<String> {
    let here = fs::read_link("/proc/thread-self/ns/net").ok()?;
    let processes = fs::read_dir("/proc").ok()?.flatten().filter(is_process).map(|entry| entry.path());
    let holder =
        processes.filter(|process| is_in(process, &here)).find(|process| has_tun_open(process, name))?;
    let command = fs::read_to_string(holder.join("comm")).unwrap_or_default();
    Some(format!("process {} ({})", holder.file_name()?.to_string_lossy(), command.trim()))
}

fn is_process(entry: &fs::DirEntry) -> bool {
    entry.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit())
}

/// Whether any thread of the process is in the network namespace.
fn is_in(process: &Path, namespace: &Path) -> bool {
    let Ok(threads) = fs::read_dir(process.join("task")) else { return false };
    threads
        .flatten()
        .any(|thread| fs::read_link(thread.path().join("ns/net")).is_ok_and(|there| there == namespace))
}

/// The kernel writes a line `iff:\tNAME` about every TUN descriptor.
fn has_tun_open(process: &Path, name: &str) -> bool {
    let Ok(descriptors) = fs::read_dir(process.join("fdinfo")) else { return false };
    descriptors.flatten().any(|descriptor| {
        let text = fs::read_to_string(descriptor.path()).unwrap_or_default();
        text.lines().any(|line| line.strip_prefix("iff:").is_some_and(|rest| rest.trim() == name))
    })
}

fn set_header_size(fd: &OwnedFd) -> io::Result<()> {
    let size = VNET_HEADER_LEN as libc::c_int;
    // SAFETY: TUNSETVNETHDRSZ reads one int, which outlives the call.
    let code = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETVNETHDRSZ as _, &raw const size) };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The most that this kernel takes: it answers EINVAL to bits that it does not know.
fn set_offload(fd: &OwnedFd) -> io::Result<Offload> {
    let mut refused = io::Error::from_raw_os_error(libc::EINVAL);
    for offload in Offload::BEST_FIRST {
        let bits = libc::c_ulong::from(offload.bits());
        // SAFETY: TUNSETOFFLOAD takes its argument by value.
        let code = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETOFFLOAD as _, bits) };
        if code >= 0 {
            return Ok(offload);
        }
        refused = io::Error::last_os_error();
        if refused.raw_os_error() != Some(libc::EINVAL) {
            break;
        }
    }
    Err(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_the_kernel_would_refuse_are_refused_first() {
        for name in ["", ".", "..", "a/b", "a b", "tun%d", "eth*", "eth0:1", "sixteen-bytes-ab", "a\n"] {
            assert!(check_interface_name(name).is_err(), "`{name}` was accepted");
        }
        for name in ["mpvpn0", "eth0.100", "fifteen-bytes-a"] {
            assert!(check_interface_name(name).is_ok(), "`{name}` was refused");
        }
    }

    #[test]
    fn every_offload_includes_the_lesser_ones() {
        for pair in Offload::BEST_FIRST.windows(2) {
            assert_eq!(pair[0].bits() & pair[1].bits(), pair[1].bits());
            assert_ne!(pair[0].bits(), pair[1].bits());
        }
    }
}
