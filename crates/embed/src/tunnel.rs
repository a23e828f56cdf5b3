//! The Rust API of a tunnel inside an app: a builder of the running tunnel.

use std::{
    net::IpAddr,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

pub use mpvpn_client::embedded::Tunnel;
use mpvpn_client::embedded::{App, Packets, start};
use mpvpn_config::ClientOptions;
use mpvpn_names::lookup::Resolve;
use mpvpn_sockets::bind_options::Protect;

use crate::{Error, Event, Level, Link, log};

/// A tunnel that is about to be started.
pub struct Builder {
    options: ClientOptions,
    protect: Option<Protect>,
    resolve: Option<Resolve>,
    links: Option<Vec<Link>>,
    log: Option<tracing::Dispatch>,
}

impl Builder {
    /// Creates a builder from a configuration: TOML with the keys of `client.toml`, except those about a TUN
    /// device, proxies and the log. It must contain `server`, and one of `ca`, `pin` and `insecure`.
    ///
    /// # Errors
    /// If the text does not parse. Contradictory keys are an error of the start.
    pub fn new(configuration: &str) -> Result<Self, Error> {
        let options = ClientOptions::parse(configuration)?;
        Ok(Self { options, protect: None, resolve: None, links: None, log: None })
    }

    /// Sets a callback that gets every socket, with the name of its link, before anything is sent through it.
    /// The app excludes the socket from the tunnel (`VpnService.protect`), and may bind it to a network
    /// (`Network.bindSocket`). If the callback returns `false`, the link is not used.
    #[must_use]
    pub fn protect(mut self, protect: impl Fn(BorrowedFd<'_>, &str) -> bool + Send + Sync + 'static) -> Self {
        self.protect = Some(Arc::new(protect));
        self
    }

    /// Sets a callback that resolves the server's name instead of the system, whose resolver may send its
    /// queries through this tunnel. A separate thread calls it, so it may block; the tunnel stops only
    /// after it has returned.
    #[must_use]
    pub fn resolve(
        mut self,
        resolve: impl Fn(&str) -> Result<Vec<IpAddr>, String> + Send + Sync + 'static,
    ) -> Self {
        self.resolve = Some(Arc::new(resolve));
        self
    }

    /// Sets the links, instead of those that the kernel reports. Android does not report them to apps. If the
    /// configuration has the key `path`, only the links in it are used.
    #[must_use]
    pub fn links(mut self, links: Vec<Link>) -> Self {
        self.links = Some(links);
        self
    }

    /// Sets a callback for log lines of a level up to `max_level`. The tunnel's thread calls it. Without it,
    /// log lines go to the `tracing` subscriber of the process, if it has one.
    #[must_use]
    pub fn log(mut self, max_level: Level, sink: impl Fn(Level, &str, &str) + Send + Sync + 'static) -> Self {
        self.log = Some(log::subscriber(max_level, Box::new(sink)));
        self
    }

    /// Starts the tunnel without a descriptor for packets, which [`Tunnel::set_descriptor`] sets later:
    /// Android's `VpnService` needs the tunnel's addresses to create one, and these are known from
    /// [`Event::Up`].
    ///
    /// `events` is called by the tunnel's thread and must not wait.
    ///
    /// # Errors
    /// If the configuration cannot be used.
    pub fn start(self, events: impl FnMut(Event) + Send + 'static) -> Result<Tunnel, Error> {
        self.start_with(Packets::Later, Box::new(events))
    }

    /// Starts the tunnel with a descriptor whose reads and writes carry one packet each: that of a
    /// `VpnService`, or one end of a socket pair (SOCK_SEQPACKET, SOCK_DGRAM). The descriptor and all its
    /// duplicates become nonblocking.
    ///
    /// `events` is called by the tunnel's thread and must not wait.
    ///
    /// # Errors
    /// If the configuration or the descriptor cannot be used.
    pub fn start_with_descriptor(
        self,
        packets: OwnedFd,
        events: impl FnMut(Event) + Send + 'static,
    ) -> Result<Tunnel, Error> {
        self.start_with(Packets::Descriptor(packets), Box::new(events))
    }

    /// Starts the tunnel with calls for packets: [`Tunnel::push`] takes packets of the app, and `packets`
    /// gets packets for the app. Each is a whole IP packet with valid checksums.
    ///
    /// `packets` and `events` are called by the tunnel's thread and must not wait.
    ///
    /// # Errors
    /// If the configuration cannot be used.
    pub fn start_with_calls(
        self,
        packets: impl FnMut(&[u8]) + Send + 'static,
        events: impl FnMut(Event) + Send + 'static,
    ) -> Result<Tunnel, Error> {
        self.start_with(Packets::Calls(Box::new(packets)), Box::new(events))
    }

    pub(crate) fn start_with(
        self,
        packets: Packets,
        events: Box<dyn FnMut(Event) + Send>,
    ) -> Result<Tunnel, Error> {
        let Self { options, protect, resolve, links, log } = self;
        start(App { options, packets, events, protect, resolve, links, log })
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        sync::{Mutex, mpsc::channel},
        time::{Duration, Instant},
    };

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    const UNREACHABLE_SERVER: &str = "server = '127.0.0.1:9'\ninsecure = true\n";

    fn start(text: &str) -> Result<Tunnel, Error> {
        let given = vec![Link { address: Some([127, 0, 0, 1].into()), ..Link::new("lo") }];
        Builder::new(text)?.links(given).start_with_calls(|_| {}, |_| {})
    }

    #[test]
    fn unusable_input_is_an_error() {
        let text = |result: Result<Tunnel, Error>| result.err().expect("an error").to_string();
        assert!(text(start("server = 'a'")).contains("how to verify the server"));
        assert!(text(start("server")).contains("line 1"));
        assert!(
            text(start(&format!("{UNREACHABLE_SERVER}share = ['lan0']"))).contains("`share` does not apply")
        );
        let pipe = fs::File::open("/proc/self/exe").unwrap();
        let started = Builder::new(UNREACHABLE_SERVER).unwrap().start_with_descriptor(pipe.into(), |_| {});
        assert!(text(started).contains("one packet a read"));
    }

    #[test]
    fn several_tunnels_run_beside_each_other_and_stop() {
        let tunnels: Vec<_> = (0..3).map(|_| start(UNREACHABLE_SERVER).unwrap()).collect();
        for tunnel in &tunnels {
            let status = tunnel.status().expect("a status");
            assert_eq!((status.links.len(), status.links[0].name.as_str()), (1, "lo"));
            assert!(tunnel.status_json().unwrap().contains("\"connecting\""));
            assert!(tunnel.push(&[0x45; 20]), "a packet is taken before there is a connection");
            assert!(!tunnel.push(&[0; 65_536]), "larger than any packet");
        }
        tunnels.into_iter().for_each(Tunnel::stop);
    }

    #[test]
    fn a_link_whose_socket_the_app_refuses_is_not_used() {
        let (asked, names) = channel();
        let given = vec![Link { address: Some([127, 0, 0, 1].into()), ..Link::new("lo") }];
        let builder = Builder::new(UNREACHABLE_SERVER).unwrap().links(given).protect(move |_, name| {
            let _ = asked.send(name.to_owned());
            false
        });
        let tunnel = builder.start_with_calls(|_| {}, |_| {}).unwrap();
        let next = || names.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!(next(), "lo");
        let link = tunnel.status().unwrap().links.remove(0);
        assert!(link.reason.contains("the app"), "{}", link.reason);
        tunnel.set_links(vec![Link::new("other")]);
        // Each class has a socket of its own.
        assert_eq!(std::iter::repeat_with(next).find(|name| name != "lo").as_deref(), Some("other"));
    }

    #[test]
    fn a_descriptor_whose_other_end_is_closed_ends_the_tunnel() {
        let (sender, events) = channel();
        let (ours, its) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let builder = Builder::new(UNREACHABLE_SERVER).unwrap().links(Vec::new());
        let tunnel = builder.start_with_descriptor(its, move |event| _ = sender.send(event)).unwrap();
        assert!(!tunnel.push(&[0x45; 20]), "packets come by the descriptor");
        drop(ours);
        let event = events.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(
            matches!(&event, Event::Failed(reason) if reason.contains("packets of the app")),
            "{event:?}"
        );
        // The thread is about to end.
        assert!(events.recv_timeout(Duration::from_secs(10)).is_err());
        assert!(tunnel.status().is_none());
    }

    #[test]
    fn a_tunnel_may_be_stopped_in_a_call_of_its_own_thread() {
        let place = Arc::new(Mutex::new(None::<Tunnel>));
        let (done, calls) = channel();
        let inside = place.clone();
        let builder = Builder::new(UNREACHABLE_SERVER).unwrap().links(Vec::new()).protect(move |_, _| {
            let tunnel = inside.lock().unwrap().take().expect("it was put there");
            let _ = done.send(tunnel.status().is_none());
            tunnel.stop();
            true
        });
        let tunnel = builder.start(|_| {}).unwrap();
        let mut guard = place.lock().unwrap();
        guard
            .insert(tunnel)
            .set_links(vec![Link { address: Some([127, 0, 0, 1].into()), ..Link::new("lo") }]);
        drop(guard);
        assert!(
            calls.recv_timeout(Duration::from_secs(10)).unwrap(),
            "its own thread cannot wait for itself"
        );
        // The thread has let go of the callback.
        assert!(calls.recv_timeout(Duration::from_secs(10)).is_err());
        assert_eq!(Arc::strong_count(&place), 1);
    }

    #[test]
    fn the_app_resolves_the_name() {
        let (asked, names) = channel();
        let builder = Builder::new("server = 'vpn.example'\ninsecure = true\n").unwrap().links(Vec::new());
        let builder = builder.resolve(move |name| {
            let _ = asked.send(name.to_owned());
            Err("nobody knows".to_owned())
        });
        let tunnel = builder.start_with_calls(|_| {}, |_| {}).unwrap();
        assert_eq!(names.recv_timeout(Duration::from_secs(10)).unwrap(), "vpn.example");
        let start = Instant::now();
        tunnel.stop();
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}
