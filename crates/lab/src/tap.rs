//! TAP devices (linux/if_tun.h), and the carrier of their interfaces.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
};

use crate::{error::LabError, namespace::Namespace};

/// Bytes of the virtio-net header in front of each frame; with it frames with incomplete checksums pass from
/// one network stack to the other.
pub(crate) const VNET_HEADER_LEN: usize = 10;
/// Bytes of the Ethernet header.
pub(crate) const ETHERNET_HEADER_LEN: usize = 14;

/// The ethtool command that reads whether an interface has a carrier (`linux/ethtool.h`).
const ETHTOOL_GLINK: u32 = 0x0a;

/// One end of an emulated link: a device in a namespace whose frames this process reads and writes.
pub(crate) struct Tap {
    file: File,
}

/// Whether a device reports a carrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    On,
    Off,
}

impl Tap {
    /// Creates the device `name` in `namespace`; it is removed when this value is dropped.
    pub(crate) fn create(namespace: &Namespace, name: &str) -> Result<Self, LabError> {
        let what = format!("create the TAP device {name}");
        let file = namespace.enter(|| open(name))?.map_err(LabError::io(what))?;
        Ok(Self { file })
    }

    /// Sets the carrier of the device (TUNSETCARRIER).
    pub(crate) fn set_carrier(&self, carrier: Carrier) -> io::Result<()> {
        let on: libc::c_int = (carrier == Carrier::On).into();
        // SAFETY: TUNSETCARRIER reads one int through the pointer, which lives for the whole call.
        check(unsafe { libc::ioctl(self.file.as_raw_fd(), libc::TUNSETCARRIER as _, &raw const on) })
    }

    /// Reads one frame with its virtio-net header and returns the bytes read; `WouldBlock` if no frame waits.
    pub(crate) fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(&self.file, buffer)?)
    }

    /// Writes one frame with its virtio-net header; the namespace receives it.
    pub(crate) fn write(&self, frame: &[u8]) -> io::Result<()> {
        rustix::io::write(&self.file, frame)?;
        Ok(())
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Makes the kernel send the netlink notification about the carrier of the device `name` in `namespace` at
/// once.
///
/// The kernel delays such notifications for up to a second after an earlier one; reading the carrier by
/// ethtool ends the delay.
pub(crate) fn announce_carrier(namespace: &Namespace, name: &str) -> Result<(), LabError> {
    let ask = || -> io::Result<()> {
        let socket =
            rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)?;
        // `struct ethtool_value`: a command, and room for its answer.
        let mut question: [u32; 2] = [ETHTOOL_GLINK, 0];
        let mut request = ifreq_for(name)?;
        request.ifr_ifru.ifru_data = (&raw mut question).cast();
        // SAFETY: SIOCETHTOOL reads and writes the ifreq and the two words it points to; both live long
        // enough.
        check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) })
    };
    namespace.enter(ask)?.map_err(LabError::io(format!("ask for the carrier of {name}")))
}

fn ifreq_for(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: an ifreq is plain data, and all zeros is a valid one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

fn open(name: &str) -> io::Result<File> {
    let file = File::options().read(true).write(true).open("/dev/net/tun")?;
    let mut request = ifreq_for(name)?;
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    let fd = file.as_raw_fd();
    // SAFETY: TUNSETIFF reads and writes one ifreq through the pointer, which lives for the whole call.
    check(unsafe { libc::ioctl(fd, libc::TUNSETIFF as _, &raw mut request) })?;
    let offloads = libc::c_ulong::from(libc::TUN_F_CSUM);
    // SAFETY: TUNSETOFFLOAD takes its flags by value.
    check(unsafe { libc::ioctl(fd, libc::TUNSETOFFLOAD as _, offloads) })?;
    rustix::io::ioctl_fionbio(&file, true)?;
    Ok(file)
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
