//! How the sockets of a link, UDP or TCP, are bound to it.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
    sync::Arc,
};

/// An app's function that decides whether a link's socket may be used. Called with the socket and the link's
/// name before the first packet.
pub type Protect = Arc<dyn Fn(BorrowedFd<'_>, &str) -> bool + Send + Sync>;

/// EPERM and EACCES.
const PERMISSION_ERRNOS: [i32; 2] = [1, 13];
/// ENODEV.
const ENODEV: i32 = 19;

/// A link's socket options.
#[derive(Clone)]
pub struct BindOptions {
    /// The interface, or the app's name for the link.
    pub name: String,
    /// The link's addresses.
    pub addresses: Vec<IpAddr>,
    /// The firewall mark of the tunnel's own packets; setting it needs privilege.
    pub mark: Option<u32>,
    /// The function of the app, if there is one.
    pub protect: Option<Protect>,
    /// Whether the app provides the link, so that its name may not be an interface.
    pub is_from_app: bool,
}

impl BindOptions {
    /// Makes a socket to `remote` by calling `make` with a device and a local address. It is bound to the
    /// link's device (SO_BINDTODEVICE) or, if that is not permitted (before Linux 5.7 without root), to a
    /// local address, which is then returned. Without a local address, the app's `protect` function may
    /// bind it to a network.
    pub fn bind_socket<T, E>(
        &self,
        remote: SocketAddr,
        make: impl Fn(Option<&str>, Option<IpAddr>) -> Result<T, E>,
        errno: impl Fn(&E) -> Option<i32>,
    ) -> Result<(T, Option<IpAddr>), E> {
        let own_address = self.addresses.iter().copied().find(|ip| ip.is_ipv4() == remote.is_ipv4());
        let device_refused = |error: &E| {
            let code = errno(error);
            self.mark.is_none() && code.is_some_and(|code| PERMISSION_ERRNOS.contains(&code))
                || self.is_from_app && code == Some(ENODEV)
        };
        match (make(Some(&self.name), None), own_address) {
            (Err(error), Some(ip)) if device_refused(&error) => Ok((make(None, Some(ip))?, Some(ip))),
            (Err(error), None) if device_refused(&error) && self.protect.is_some() => {
                Ok((make(None, None)?, None))
            }
            (result, _) => Ok((result?, None)),
        }
    }

    /// Whether the app allows the socket; true without an app.
    pub fn is_protected(&self, socket: BorrowedFd<'_>) -> bool {
        self.protect.as_ref().is_none_or(|protect| protect(socket, &self.name))
    }
}
