//! The packet device of a client: the kernel's TUN device, which segments and joins packets, or an app, which
//! does not; and the classes' own TUN devices.
//!
//! Always holds: packets to an app are complete, checksums included, and not larger than they were in the
//! tunnel; packets that wait for an app are bounded in bytes, and dropped beyond that.

use std::{collections::VecDeque, io, net::IpAddr, ops::Range, os::fd::AsFd, sync::mpsc::Receiver};

use bytes::BytesMut;
use ipnet::IpNet;
use mpvpn_error::RunError;
use mpvpn_os::{
    OsError, PacketFd, Tun,
    poll::{FIRST_CLASS_TUN_TOKEN, Interest, PollWaker, Poller, TUN_TOKEN},
    tun::READ_BUFFER_LEN,
};
use mpvpn_packet::{
    TunPacket, VNET_HDR_LEN, VnetHdr,
    ip::{self, MAX_PACKET},
    split::split,
};
use mpvpn_sockets::packet_io::{MAX_TUN_READS, read_tun, write_tun};
use mpvpn_types::ClassId;

/// Packets queued for an app's descriptor (bytes). Larger: old packets. Smaller: losses. Chosen.
const MAX_QUEUED_BYTES: usize = 1 << 20;

/// The app's function that takes its packets.
pub type Out = Box<dyn FnMut(&[u8]) + Send>;

/// The devices of a shard.
pub(super) struct Devices {
    pub(super) main: Device,
    pub(super) classes: Vec<ClassQueue>,
    is_attached: bool,
    buffer: Vec<u8>,
}

impl From<Device> for Devices {
    fn from(main: Device) -> Self {
        Self { main, classes: Vec::new(), is_attached: true, buffer: vec![0; READ_BUFFER_LEN] }
    }
}

/// A shard's queue of a class's own TUN device.
pub(super) struct ClassQueue {
    class: ClassId,
    tun: Tun,
    /// The class's addresses: packets to them are written to this device.
    addresses: Vec<IpAddr>,
}

impl ClassQueue {
    /// A queue without addresses.
    pub(super) fn new(class: ClassId, tun: Tun) -> Self {
        Self { class, tun, addresses: Vec::new() }
    }
}

impl Devices {
    /// Registers the devices with the poller.
    pub(super) fn watch(&self, poller: &Poller) -> Result<(), RunError> {
        self.main.watch(poller)?;
        self.classes
            .iter()
            .zip(FIRST_CLASS_TUN_TOKEN..)
            .try_for_each(|(queue, token)| watch(poller, &queue.tun, token))
    }

    /// Attaches or detaches the TUN queues (TUNSETQUEUE). The kernel uses attached queues only; they are
    /// attached at first.
    pub(super) fn set_attached(&mut self, poller: &Poller, attached: bool) -> Result<(), RunError> {
        if self.is_attached == attached {
            return Ok(());
        }
        if let Device::Tun(tun) = &self.main {
            set_attached(poller, tun, TUN_TOKEN, attached)?;
        }
        let mut queues = self.classes.iter().zip(FIRST_CLASS_TUN_TOKEN..);
        queues.try_for_each(|(queue, token)| set_attached(poller, &queue.tun, token, attached))?;
        self.is_attached = attached;
        Ok(())
    }

    /// The classes with a device of their own, in the order of their devices.
    pub(super) fn classes(&self) -> impl Iterator<Item = ClassId> {
        self.classes.iter().map(|queue| queue.class)
    }

    /// Sets which devices have a carrier: that of the tunnel, and those of the classes.
    ///
    /// # Errors
    /// If the kernel does not know how.
    pub(super) fn set_carriers(&self, carriers: &[bool]) -> Result<(), OsError> {
        let main = match &self.main {
            Device::Tun(tun) => Some(tun),
            _ => None,
        };
        let tuns = std::iter::once(main).chain(self.classes.iter().map(|queue| Some(&queue.tun)));
        let mut devices = tuns.zip(carriers);
        devices.try_for_each(|(tun, carrier)| tun.map_or(Ok(()), |tun| tun.set_carrier(*carrier)))
    }

    /// Reads packets of the main device, at most [`MAX_TUN_READS`]; the poller reports the rest again.
    ///
    /// # Errors
    /// If the device cannot be read any more.
    pub(super) fn read(
        &mut self,
        wake: &PollWaker,
        each: impl FnMut(VnetHdr, &mut [u8]),
    ) -> Result<(), RunError> {
        self.main.read(&mut self.buffer, wake, each)
    }

    /// Sets the addresses of the classes with a TUN device, in their order.
    pub(super) fn assign(&mut self, given: &[Vec<IpNet>]) {
        for (queue, given) in self.classes.iter_mut().zip(given) {
            queue.addresses = given.iter().map(IpNet::addr).collect();
        }
    }

    /// Reads packets of the class's device with this token, within the same bounds.
    pub(super) fn read_class(&mut self, token: u64, mut each: impl FnMut(ClassId, VnetHdr, &mut [u8])) {
        let queue = self.classes.iter().zip(FIRST_CLASS_TUN_TOKEN..).find(|(_, other)| *other == token);
        if let Some((queue, _)) = queue {
            read_tun(&queue.tun, &mut self.buffer, |hdr, packet| each(queue.class, hdr, packet));
        }
    }

    /// Writes a packet to the device to which its destination belongs.
    pub(super) fn write(&mut self, poller: &Poller, joined: &TunPacket) {
        if !self.classes.is_empty()
            && let Some(dst) = ip::dst_of(joined.leading_bytes())
            && let Some(queue) = self.classes.iter().find(|queue| queue.addresses.contains(&dst))
        {
            return write_tun(&queue.tun, joined);
        }
        self.main.write(poller, joined);
    }
}

fn watch(poller: &Poller, device: &impl AsFd, token: u64) -> Result<(), RunError> {
    poller.add(device, token, Interest::Read).map_err(RunError::io("watch the device for packets"))
}

fn set_attached(poller: &Poller, tun: &Tun, token: u64, attached: bool) -> Result<(), RunError> {
    if attached {
        tun.set_attached(true)?;
        return watch(poller, tun, token);
    }
    // A detached queue would report an error event all the time.
    poller.remove(tun).map_err(RunError::io("stop watching the TUN"))?;
    Ok(tun.set_attached(false)?)
}

/// The main device of a shard.
pub(super) enum Device {
    Tun(Tun),
    App(Box<AppDevice>),
}

/// An app as a packet device.
pub(super) struct AppDevice {
    packets: AppPackets,
    /// Buffers for segmenting joined packets.
    joined_packet: Vec<u8>,
    segments: BytesMut,
    ranges: Vec<Range<usize>>,
}

pub(super) enum AppPackets {
    /// Packets are not connected yet.
    NotConnected,
    Descriptor {
        fd: PacketFd,
        queued: VecDeque<Vec<u8>>,
        queued_bytes: usize,
    },
    Callback {
        packets: Receiver<Vec<u8>>,
        out: Out,
    },
}

impl Device {
    /// Registers the device with the poller.
    fn watch(&self, poller: &Poller) -> Result<(), RunError> {
        match self {
            Self::Tun(tun) => watch(poller, tun, TUN_TOKEN),
            Self::App(app) => match &app.packets {
                AppPackets::Descriptor { fd, .. } => watch(poller, fd, TUN_TOKEN),
                AppPackets::Callback { .. } | AppPackets::NotConnected => Ok(()),
            },
        }
    }

    /// Whether packets arrive with a wake-up call.
    pub(super) fn uses_callback(&self) -> bool {
        matches!(self, Self::App(app) if matches!(app.packets, AppPackets::Callback { .. }))
    }

    /// Reads packets, at most [`MAX_TUN_READS`]; the rest is reported again.
    ///
    /// # Errors
    /// If the device cannot be read any more.
    fn read(
        &self,
        buffer: &mut [u8],
        wake: &PollWaker,
        mut each: impl FnMut(VnetHdr, &mut [u8]),
    ) -> Result<(), RunError> {
        let app = match self {
            Self::Tun(tun) => {
                read_tun(tun, buffer, each);
                return Ok(());
            }
            Self::App(app) => app,
        };
        for _ in 0..MAX_TUN_READS {
            match &app.packets {
                AppPackets::Descriptor { fd, .. } => match fd.read(buffer) {
                    Ok(length) => each(VnetHdr::NONE, &mut buffer[..length]),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                    Err(error) => return Err(RunError::io("read the packets of the app")(error)),
                },
                AppPackets::Callback { packets, .. } => match packets.try_recv() {
                    Ok(mut packet) => each(VnetHdr::NONE, &mut packet),
                    Err(_) => return Ok(()),
                },
                AppPackets::NotConnected => return Ok(()),
            }
        }
        if self.uses_callback() {
            wake.wake();
        }
        Ok(())
    }

    /// Replaces the descriptor for the app's packets.
    pub(super) fn set_descriptor(&mut self, poller: &Poller, fd: PacketFd) -> Result<(), RunError> {
        let Self::App(app) = self else { return Ok(()) };
        if let AppPackets::Descriptor { fd, .. } = &app.packets {
            // The old descriptor may be closed at its other end.
            let _ = poller.remove(fd);
        }
        app.packets = AppPackets::descriptor(fd);
        self.watch(poller)
    }

    /// Writes one packet.
    fn write(&mut self, poller: &Poller, joined: &TunPacket) {
        match self {
            Self::Tun(tun) => write_tun(tun, joined),
            Self::App(app) => app.write(poller, joined),
        }
    }

    /// Writes queued packets, after the descriptor became writable.
    pub(super) fn flush(&mut self, poller: &Poller) {
        let Self::App(app) = self else { return };
        let AppPackets::Descriptor { fd, queued, queued_bytes } = &mut app.packets else { return };
        while let Some(packet) = queued.front() {
            if would_block(&fd.write(packet)) {
                return;
            }
            *queued_bytes -= packet.len();
            queued.pop_front();
        }
        let _ = poller.modify(&*fd, TUN_TOKEN, Interest::Read);
    }
}

impl AppDevice {
    /// A device that uses a descriptor.
    pub(super) fn descriptor(fd: PacketFd) -> Box<Self> {
        Self::new(AppPackets::descriptor(fd))
    }

    /// A device whose packets are exchanged like this.
    pub(super) fn new(packets: AppPackets) -> Box<Self> {
        Box::new(Self { packets, joined_packet: Vec::new(), segments: BytesMut::new(), ranges: Vec::new() })
    }

    fn write(&mut self, poller: &Poller, joined: &TunPacket) {
        if let Some(packet) = joined.as_single_packet() {
            return self.packets.write(poller, packet);
        }
        self.joined_packet.clear();
        joined.io_slices().for_each(|part| self.joined_packet.extend_from_slice(&part));
        self.segments.clear();
        self.ranges.clear();
        let joined_packet = &self.joined_packet[VNET_HDR_LEN..];
        // Each segment has its size from before it was joined, or what the app's own MSS allows.
        match split(joined.vnet(), joined_packet, MAX_PACKET, &[], &mut self.segments, &mut self.ranges) {
            Ok(()) => {
                self.ranges.iter().for_each(|range| self.packets.write(poller, &self.segments[range.clone()]))
            }
            Err(error) => tracing::debug!(%error, "cannot segment a packet for the app"),
        }
    }
}

impl AppPackets {
    fn descriptor(fd: PacketFd) -> Self {
        Self::Descriptor { fd, queued: VecDeque::new(), queued_bytes: 0 }
    }

    fn write(&mut self, poller: &Poller, packet: &[u8]) {
        let (fd, queued, queued_bytes) = match self {
            Self::NotConnected => return,
            Self::Callback { out, .. } => return out(packet),
            Self::Descriptor { fd, queued, queued_bytes } => (fd, queued, queued_bytes),
        };
        if queued.is_empty() {
            let written = fd.write(packet);
            if let Err(error) = &written
                && !would_block(&written)
            {
                tracing::debug!(%error, bytes = packet.len(), "the app's descriptor refused a packet");
            }
            if !would_block(&written) {
                return;
            }
            // Without an event for writability, queued packets would leave only with the next one.
            let _ = poller.modify(&*fd, TUN_TOKEN, Interest::ReadWrite);
        }
        if *queued_bytes + packet.len() <= MAX_QUEUED_BYTES {
            *queued_bytes += packet.len();
            queued.push_back(packet.to_vec());
        }
    }
}

fn would_block(written: &io::Result<()>) -> bool {
    written.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests {
    use std::{
        os::{fd::OwnedFd, unix::net::UnixDatagram},
        sync::{
            Arc, Mutex,
            mpsc::{Sender, channel},
        },
    };

    use bytes::Bytes;
    use mpvpn_packet::GroCoalescer;
    use mpvpn_packets::{Packet, Tcp, has_valid_lengths_and_checksums};

    use super::*;

    /// `count` segments of one flow, as they come through the tunnel.
    fn segments(count: usize) -> Vec<Vec<u8>> {
        let segment = |n: usize| {
            Packet::v6().tcp_with(&Tcp { seq: (n * 1000) as u32, ..Tcp::default() }, &[n as u8; 1000])
        };
        (0..count).map(segment).collect()
    }

    fn join(packets: &[Vec<u8>]) -> TunPacket {
        let mut coalescer = GroCoalescer::new();
        packets.iter().for_each(|packet| coalescer.push(Bytes::from(packet.clone())));
        coalescer.flush();
        let joined = coalescer.pop().unwrap();
        assert_eq!(joined.segments(), packets.len());
        joined
    }

    /// The packets that the app received.
    type ReceivedPackets = Arc<Mutex<Vec<Vec<u8>>>>;

    fn callback_device() -> (Device, Sender<Vec<u8>>, ReceivedPackets) {
        let (sender, packets) = channel();
        let got = Arc::new(Mutex::new(Vec::new()));
        let put = got.clone();
        let out = Box::new(move |packet: &[u8]| put.lock().unwrap().push(packet.to_vec()));
        (Device::App(AppDevice::new(AppPackets::Callback { packets, out })), sender, got)
    }

    #[test]
    fn an_app_gets_what_was_joined_in_the_packets_of_before() {
        let (mut device, _sender, got) = callback_device();
        let packets = segments(20);
        device.write(&Poller::new().unwrap(), &join(&packets));
        let got = got.lock().unwrap();
        assert_eq!(*got, packets);
        assert!(got.iter().all(|packet| has_valid_lengths_and_checksums(packet)));
    }

    #[test]
    fn more_packets_than_fit_a_turn_are_announced_again() {
        let (device, sender, _) = callback_device();
        let wake = PollWaker::new().unwrap();
        for _ in 0..MAX_TUN_READS + 1 {
            sender.send(vec![0; 20]).unwrap();
        }
        let read = || {
            let mut count = 0;
            device.read(&mut [], &wake, |_, _| count += 1).unwrap();
            count
        };
        assert_eq!(read(), MAX_TUN_READS);
        assert!(wake.drain());
        assert_eq!(read(), 1);
        assert!(!wake.drain());
    }

    #[test]
    fn what_a_descriptor_has_no_room_for_waits_within_bounds() {
        let (near, far) = UnixDatagram::pair().unwrap();
        let poller = Poller::new().unwrap();
        let mut device = Device::App(AppDevice::descriptor(PacketFd::new(OwnedFd::from(near)).unwrap()));
        device.watch(&poller).unwrap();
        let joined = join(&segments(50));
        for _ in 0..40 {
            device.write(&poller, &joined);
        }
        far.set_nonblocking(true).unwrap();
        let mut buffer = [0; 2000];
        let mut count = 0;
        let mut drain = || {
            while far.recv(&mut buffer).is_ok() {
                count += 1;
            }
            count
        };
        let first = drain();
        assert!(first > 0);
        let mut all = first;
        loop {
            device.flush(&poller);
            let more = drain();
            if more == all {
                break;
            }
            all = more;
        }
        let kept = (all - first) * 1060;
        assert!(
            all < 2000 && kept <= MAX_QUEUED_BYTES && kept > MAX_QUEUED_BYTES / 2,
            "{first} at once, {all} in all"
        );
    }
}
