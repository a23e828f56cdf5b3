//! Talks to the service manager that has started this process (sd_notify(3), systemd.service(5)
//! `Type=notify`).
//!
//! In: lines such as `READY=1`. Out: one datagram each time, to the socket of the environment variable
//! `NOTIFY_SOCKET`. Always holds: sending never waits.

use std::{
    env,
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};

/// The socket of the service manager.
#[derive(Debug)]
pub struct NotifySocket(UnixDatagram);

impl NotifySocket {
    /// The socket that the environment names; `None` without a service manager that wants to be told.
    ///
    /// # Errors
    /// If the name is no address of a socket, or no socket can be made.
    pub fn from_environment() -> io::Result<Option<Self>> {
        env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()).map(|name| Self::at(&name)).transpose()
    }

    /// The socket with this name, which is a path, or a name that begins with `@` and is not in the file
    /// system (unix(7)).
    fn at(name: &OsStr) -> io::Result<Self> {
        let address = match name.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(name)?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        // A confined process connects to nothing later.
        socket.connect_addr(&address)?;
        Ok(Self(socket))
    }

    /// Sends lines.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if the service manager is behind, or why it is not reached.
    pub fn send(&self, lines: &str) -> io::Result<()> {
        self.0.send(lines.as_bytes()).map(drop)
    }
}

/// Within which time the service manager wants a sign of life of this process each time; `None` if it wants
/// none.
pub fn watchdog_interval() -> Option<Duration> {
    let number = |name| env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    // The variables of a service are inherited by what it starts.
    let is_meant = env::var_os("WATCHDOG_PID").is_none()
        || number("WATCHDOG_PID") == Some(u64::from(std::process::id()));
    number("WATCHDOG_USEC").filter(|time| is_meant && *time > 0).map(Duration::from_micros)
}

/// The time of `MONOTONIC_USEC=` (µs).
pub fn monotonic_microseconds() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_arrive_at_a_path_and_at_a_name_that_is_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let name = format!("mpvpn-test-{}", std::process::id());
        let listeners = [
            (UnixDatagram::bind(&path).unwrap(), path.as_os_str().to_owned()),
            (
                UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap(),
                format!("@{name}").into(),
            ),
        ];
        for (listener, name) in listeners {
            NotifySocket::at(&name).unwrap().send("READY=1\n").unwrap();
            let mut bytes = [0; 64];
            let length = listener.recv(&mut bytes).unwrap();
            assert_eq!(&bytes[..length], b"READY=1\n", "{name:?}");
        }
    }

    #[test]
    fn a_service_manager_that_is_behind_or_gone_makes_nobody_wait() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let listener = UnixDatagram::bind(&path).unwrap();
        let socket = NotifySocket::at(path.as_os_str()).unwrap();
        let failed = (0..10_000).find_map(|_| socket.send("WATCHDOG=1\n").err()).unwrap();
        assert_eq!(failed.kind(), io::ErrorKind::WouldBlock);
        drop(listener);
        socket.send("WATCHDOG=1\n").unwrap_err();
        std::fs::remove_file(&path).unwrap();
        socket.send("WATCHDOG=1\n").unwrap_err();
    }
}
