//! The TUN device: whole IP packets, each preceded by a virtio-net header.
//!
//! In: packets for the network stack of this machine. Out: packets that it sends, up to 64 KiB each, because
//! the kernel leaves segmentation and checksums to the reader (`IFF_VNET_HDR`, `TUNSETOFFLOAD`; header
//! layout: virtio 1.2, 5.1.6, the 10-byte form). Always holds: the descriptor is nonblocking, packets have no
//! packet information header (`IFF_NO_PI`), and the device disappears with its last descriptor, unless it
//! stays ([`TunConfig::stays`]), and its addresses and routes with it.

use std::{
    fs,
    io::{self, IoSlice},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
    sync::Mutex,
};

use rustix::{
    fs::{Mode, OFlags},
    io::retry_on_intr,
};

use crate::{error::OsError, netlink::Netlink};

/// Bytes of the virtio-net header in front of every packet read or written.
pub const VNET_HEADER_LEN: usize = 10;

/// Bytes of a buffer for anything that the device can deliver: the header and the largest IP packet.
pub const READ_BUFFER_LEN: usize = VNET_HEADER_LEN + 65_535;

/// The device node that creates TUN devices.
const DEVICE: &str = "/dev/net/tun";

/// Descriptors of the device node that are open already.
static KEPT: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());

/// Opens the device node for `count` queues that are made later, where only its owner may open it, as in some
/// containers.
pub fn keep_open(count: usize) {
    let is_open_to_all = fs::metadata(DEVICE).is_ok_and(|node| node.mode() & 0o006 == 0o006);
    let count = if is_open_to_all { 0 } else { count };
    let opened = (0..count).map_while(|_| open_device().ok());
    KEPT.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).extend(opened);
}

fn open_device() -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
}

/// Options of a TUN device.
#[derive(Clone, Debug, Default)]
pub struct TunConfig {
    /// The interface name; `None` lets the kernel choose (`tun0`, `tun1`, …).
    pub name: Option<String>,
    /// The MTU in bytes; `None` keeps the kernel's 1500.
    pub mtu: Option<u32>,
    /// Packets that wait in the kernel to be read, at most; it drops further ones. `None` keeps the kernel's
    /// 500.
    pub queue_packets: Option<u32>,
    /// Whether the device has one queue or several.
    pub queues: Queues,
    /// Whether the device stays when the last descriptor is closed.
    pub stays: bool,
    /// Whether the kernel is asked for no offloads: packets of at most the MTU, with complete checksums.
    pub without_offloads: bool,
}

/// Whether several descriptors may be attached to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Queues {
    /// One descriptor.
    #[default]
    Single,
    /// Every `open` of the same name adds a queue (IFF_MULTI_QUEUE). Each queue must be read, or its packets
    /// are lost.
    Multi,
}

/// The offloads that the kernel accepted: work that it leaves to the reader of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Offload {
    /// None: packets of at most the MTU, with complete checksums.
    Nothing,
    /// The reader completes checksums.
    Checksum,
    /// As [`Self::Checksum`], and TCP packets have up to 64 KiB (TSO).
    Tcp,
    /// As [`Self::Tcp`], and UDP packets too (USO, since Linux 6.2).
    TcpAndUdp,
}

impl Offload {
    const MOST_FIRST: [Self; 4] = [Self::TcpAndUdp, Self::Tcp, Self::Checksum, Self::Nothing];

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
    /// Creates the device, or attaches to an existing one that no process has open.
    pub fn open(config: TunConfig) -> Result<Self, OsError> {
        if let Some(name) = &config.name {
            check_interface_name(name)?;
        }
        let kept = KEPT.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).pop();
        let fd = kept.map_or_else(open_device, Ok).map_err(|e| OsError::kernel("open", DEVICE, e))?;
        let name = attach(&fd, &config)?;
        set_header_size(&fd).map_err(|e| OsError::kernel("set the header size of", &name, e))?;
        let wanted = if config.without_offloads { &[Offload::Nothing][..] } else { &Offload::MOST_FIRST };
        let offload =
            set_offload(&fd, wanted).map_err(|e| OsError::kernel("set the offloads of", &name, e))?;

        if config.stays {
            // SAFETY: TUNSETPERSIST takes its argument by value.
            let code = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETPERSIST as _, 1 as libc::c_ulong) };
            check(code).map_err(|e| OsError::kernel("keep", &name, e))?;
        }
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

    /// Creates the device with `count` queues (at least one), one for each thread.
    ///
    /// With several queues, the kernel hands a packet to the queue through which the last packet of the same
    /// flow was written, if that was within the last 3 s, otherwise to a queue chosen by a hash of the
    /// flow. Packets in an attached queue that no thread reads are lost.
    pub fn open_queues(config: TunConfig, count: u8) -> Result<Vec<Self>, OsError> {
        if count <= 1 {
            return Ok(vec![Self::open(config)?]);
        }
        // Without this check the kernel would add these queues to the device of another process.
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

    /// Attaches or detaches this queue of a device with several (TUNSETQUEUE). From a detached queue nothing
    /// can be read or written, and polling reports an error all the time.
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

    /// Sets whether the device has a carrier (TUNSETCARRIER), for the next packet already.
    ///
    /// # Errors
    /// If the kernel is older than 4.20.
    pub fn set_carrier(&self, has_carrier: bool) -> Result<(), OsError> {
        let on = libc::c_int::from(has_carrier);
        // SAFETY: TUNSETCARRIER reads one int, which outlives the call.
        let code = unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::TUNSETCARRIER as _, &raw const on) };
        check(code).map_err(|e| OsError::kernel("set the carrier of", &self.name, e))?;
        Netlink::open()?.set_oper_state(self.index, has_carrier)
    }

    /// The device's name at the time it was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device's interface index.
    pub fn ifindex(&self) -> u32 {
        self.index
    }

    /// The offloads that the kernel accepted.
    pub fn offload(&self) -> Offload {
        self.offload
    }

    /// Reads one packet with its virtio-net header in front, and returns the length of both in bytes. A
    /// buffer smaller than [`READ_BUFFER_LEN`] may get a truncated packet.
    ///
    /// # Errors
    /// `WouldBlock` if no packet waits.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::read(&self.fd, &mut *buffer))?)
    }

    /// Writes one packet with its virtio-net header in front, from at most 1024 pieces (IOV_MAX).
    pub fn write_vectored(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::writev(&self.fd, pieces))?)
    }
}

crate::as_fd!(Tun, fd);

/// Checks an interface name: refuses the names that the kernel's `dev_valid_name` refuses, and those with `%`
/// or `*`, which the kernel and nft would take for patterns.
pub fn check_interface_name(name: &str) -> Result<(), OsError> {
    let has_bad_length = name.is_empty() || name.len() >= libc::IFNAMSIZ;
    let has_bad_byte =
        name.bytes().any(|b| b.is_ascii_whitespace() || b.is_ascii_control() || b"/:%*".contains(&b));
    if has_bad_length || has_bad_byte || name == "." || name == ".." {
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
            in_use("an interface that is no TUN device, or a TUN device with other settings".to_owned())
        }
        _ => OsError::kernel("create the TUN device", name, error),
    }
}

fn exists(name: &str) -> bool {
    Netlink::open().and_then(|mut netlink| netlink.index_of(name)).is_ok()
}

/// The process in this network namespace that has the TUN device `name` open, as text for an error.
fn holder_of(name: &str) -> Option<String> {
    let here = fs::read_link("/proc/thread-self/ns/net").ok()?;
    let processes = fs::read_dir("/proc").ok()?.flatten().filter(is_process).map(|entry| entry.path());
    let holder = processes
        .filter(|process| is_in_namespace(process, &here))
        .find(|process| has_tun_open(process, name))?;
    let command = fs::read_to_string(holder.join("comm")).unwrap_or_default();
    Some(format!("process {} ({})", holder.file_name()?.to_string_lossy(), command.trim()))
}

fn is_process(entry: &fs::DirEntry) -> bool {
    entry.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit())
}

/// Whether any thread of the process is in the network namespace.
fn is_in_namespace(process: &Path, namespace: &Path) -> bool {
    let Ok(threads) = fs::read_dir(process.join("task")) else { return false };
    threads
        .flatten()
        .any(|thread| fs::read_link(thread.path().join("ns/net")).is_ok_and(|there| there == namespace))
}

/// Whether the process has the TUN device open: `/proc/PID/fdinfo` has a line `iff:\tNAME` for each TUN
/// descriptor.
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
    check(code)
}

fn check(code: libc::c_int) -> io::Result<()> {
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sets the first of `wanted` that this kernel accepts: it refuses bits that it does not know with EINVAL.
fn set_offload(fd: &OwnedFd, wanted: &[Offload]) -> io::Result<Offload> {
    let mut refused = io::Error::from_raw_os_error(libc::EINVAL);
    for &offload in wanted {
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
        for pair in Offload::MOST_FIRST.windows(2) {
            assert_eq!(pair[0].bits() & pair[1].bits(), pair[1].bits());
            assert_ne!(pair[0].bits(), pair[1].bits());
        }
    }
}
