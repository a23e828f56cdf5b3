//! A link's sockets for packets inside TCP: UDP sockets on the loopback, connected to the local end of the
//! TCP transport.

use std::net::{Ipv4Addr, SocketAddr};

use mpvpn_error::RunError;
use mpvpn_os::{
    UdpOptions, UdpSocket,
    poll::{FIRST_SOCKET_TOKEN, Interest, Poller},
};
use mpvpn_sockets::packet_io::{BufferedUdpSocket, SOCKET_BUFFER_BYTES};
use mpvpn_types::LinkId;

use super::Links;

impl Links {
    /// Opens a link's loopback sockets, one per class, unless they exist; returns their addresses.
    pub fn open_tcp_sockets(
        &mut self,
        uplink: LinkId,
        poller: &Poller,
    ) -> Result<Vec<(LinkId, SocketAddr)>, RunError> {
        let Some(name) = self.links.get(&uplink).map(|link| link.name.clone()) else { return Ok(Vec::new()) };
        let first = uplink.with_path_index(LinkId::TCP_PATH_INDEX);
        let mut all = Vec::new();
        for id in self.classes.iter().map(|class| first.with_class(class.id)).collect::<Vec<_>>() {
            if !self.links.contains_key(&id) {
                self.insert(id, &name, 1);
            }
            let Some(link) = self.links.get_mut(&id) else { continue };
            let socket = match link.socket.take() {
                Some(socket) => socket,
                None => {
                    let socket = UdpSocket::bind(&UdpOptions {
                        recv_buffer: Some(SOCKET_BUFFER_BYTES),
                        send_buffer: Some(SOCKET_BUFFER_BYTES),
                        ..UdpOptions::new((Ipv4Addr::LOCALHOST, 0).into())
                    })?;
                    poller
                        .add(&socket, FIRST_SOCKET_TOKEN + u64::from(id.0), Interest::Read)
                        .map_err(RunError::io("watch a socket"))?;
                    BufferedUdpSocket::new(socket)
                }
            };
            let address = socket.socket.local_addr().map_err(RunError::io("ask for the address of a socket"));
            link.socket = Some(socket);
            all.push((id, address?));
        }
        Ok(all)
    }

    /// Sets the loopback address where a path's packets enter the TCP transport; `None` if it is down.
    pub fn set_tcp_entry(&mut self, id: LinkId, entry: Option<SocketAddr>) {
        let Some(link) = self.links.get_mut(&id) else { return };
        if let (Some(socket), Some(entry)) = (&link.socket, entry)
            && let Err(error) = socket.socket.connect(entry)
        {
            // Without the connect, other local processes could send to this socket; QUIC would reject their
            // packets.
            tracing::debug!(%error, "cannot connect a loopback socket");
        }
        link.remote = entry;
    }

    /// Closes a link's loopback sockets; returns the removed paths.
    pub fn close_tcp_sockets(&mut self, uplink: LinkId) -> Vec<LinkId> {
        let closed: Vec<LinkId> = self.tcp_paths(uplink).collect();
        self.links.retain(|id, _| !closed.contains(id));
        closed
    }

    /// A link's paths inside TCP.
    pub fn tcp_paths(&self, uplink: LinkId) -> impl Iterator<Item = LinkId> {
        self.links.keys().copied().filter(move |id| id.is_tcp() && id.uplink() == uplink)
    }
}
