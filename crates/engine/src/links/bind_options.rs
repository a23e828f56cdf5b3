//! What the sockets of a link are bound to, whatever they speak.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
};

use super::Protect;

/// EPERM, EACCES.
const PERMISSION_ERRNOS: [i32; 2] = [1, 13];
/// ENODEV.
const ENODEV: i32 = 19;

/// A link, as a socket sees it.
#[derive(Clone)]
pub(crate) struct BindOptions {
    /// Its interface, or the name that an app has for it.
    pub(crate) name: String,
    /// Its addresses.
    pub(crate) addresses: Vec<IpAddr>,
    /// The mark of the tunnel's own packets, which needs privilege.
    pub(crate) mark: Option<u32>,
    pub(crate) protect: Option<Protect>,
    /// Whether the app told of it: its name may be none of a device then.
    pub(crate) is_from_app: bool,
}

impl BindOptions {
    /// A socket to `remote` by `make`, which gets a device and a local address to bind it to: the device of the link, or
    /// where that is forbidden (old kernels let nobody but root do so) its address. Returns that address, too. An app's leave to use the
    /// socket may bind it to a network instead.
    pub(crate) fn bind_socket<T, E>(
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

    /// Whether the app, if there is one, lets the socket be used.
    pub(crate) fn is_protected(&self, socket: BorrowedFd<'_>) -> bool {
        self.protect.as_ref().is_none_or(|protect| protect(socket, &self.name))
    }
}
