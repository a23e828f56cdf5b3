//! Which rights a server and a client keep while they run.
//!
//! In: their configurations. Out: a confined process that is not root's, and a helper where there is a TUN
//! device or root started it. Always holds: files that may belong to other users (tokens, keys) are read, and
//! ports below 1024 are bound, before.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod secrets;

use std::{
    fs,
    path::{Path, PathBuf},
};

use mpvpn_config::{AcmeChallenge, ClientConfig, Confine, Dns, Routes, ServerConfig, ServerDns, Shards};
use mpvpn_error::RunError;
use mpvpn_identity::trust::Trust;
use mpvpn_input::{dirs, files};
use mpvpn_os::{
    confinement::{self, Needs},
    helper, tun, undo,
};
use mpvpn_status::{Confinement, check::KernelCheck};
use mpvpn_users::users_file;

/// Confines a client that has a TUN device or is a proxy. `file`: its configuration file.
///
/// # Errors
/// If the kernel refuses, or the helper cannot be started.
pub fn client(config: &ClientConfig, file: Option<&Path>) -> Result<(), RunError> {
    // The certificate of a server is read again for each transport.
    let ca = config.servers.iter().filter_map(|server| match &server.trust {
        Trust::Ca(file) => Some(file.as_path()),
        // The CAs of the system are in system folders.
        Trust::System | Trust::Pin(_) | Trust::Insecure => None,
    });
    let own = config.cert.iter().flat_map(|files| [files.cert.as_path(), &files.key]);
    let read_again: Vec<_> = file.into_iter().chain(ca).chain(own).collect();
    // A server may have names of its own, which a tunnel that does not take all packets takes.
    let past_tunnel = config.bypass.iter().any(|rule| !rule.rule.domains.is_empty());
    let may_split_names = config.routes != Routes::All && config.dns == Dns::Suggested;
    let needs = Needs {
        network: config.proxies.is_empty(),
        // The resolver that tells names apart listens on port 53.
        low_ports: config.proxies.is_empty()
            && (may_split_names || !config.dns_local.is_empty() || past_tunnel),
        ..Needs::default()
    };
    let folders = Folders {
        own: config.qlog.iter().chain([&config.state_dir]).map(PathBuf::as_path).collect(),
        socket: folder_of(&config.api_socket),
        read: None,
    };
    let queues = usize::from(config.shards.count(1)) * (1 + config.class_tuns().count());
    confine(config.confine, &read_again, folders, needs, queues)
}

/// Confines a server. `file`: its configuration file.
///
/// # Errors
/// If the kernel refuses, or the helper cannot be started.
pub fn server(config: &ServerConfig, file: Option<&Path>) -> Result<(), RunError> {
    let users = users_file(config);
    let certificates = config.cert.iter().chain(&config.more_certs);
    let certificates = certificates.flat_map(|files| [files.cert.as_path(), &files.key]);
    let read_again = file.into_iter().chain([users.as_path()]).chain(config.client_ca.as_deref());
    let read_again: Vec<_> = read_again.chain(config.crl.as_deref()).chain(certificates).collect();
    let has_tun = config.service.has_tun();
    let needs = Needs {
        network: has_tun,
        // Its resolver listens on port 53 of the tunnel's addresses, which come later; a CA looks at port 80.
        low_ports: has_tun && config.dns == ServerDns::Own
            || config.acme.as_ref().is_some_and(|acme| acme.challenge == AcmeChallenge::Http01),
        ..Needs::default()
    };
    let folders = Folders {
        own: config.qlog.iter().chain([&config.state_dir]).map(PathBuf::as_path).collect(),
        socket: folder_of(&config.api_socket),
        read: config.site.folder(),
    };
    let queues = usize::from(config.shards.count(Shards::MAX.into()));
    confine(config.confine, &read_again, folders, needs, queues)
}

/// The folders of a process.
struct Folders<'a> {
    /// The folders in which it makes files.
    own: Vec<&'a Path>,
    /// The folder of its socket.
    socket: PathBuf,
    /// A folder with files that it reads at each request.
    read: Option<&'a Path>,
}

/// `read_again`: files that are read when they change, and may belong to another user. `queues`: of the TUN
/// devices that it makes later, at most.
fn confine(
    wanted: Confine,
    read_again: &[&Path],
    mut folders: Folders<'_>,
    mut needs: Needs,
    queues: usize,
) -> Result<(), RunError> {
    if wanted == Confine::Off {
        return Ok(());
    }
    if needs.network || dirs::is_root() {
        let files: Vec<PathBuf> =
            read_again.iter().filter_map(|file| std::path::absolute(file).ok()).collect();
        helper::start(&files, needs.network)?;
        files::read_by(helper::read);
    }
    if needs.network {
        tun::keep_open(queues);
    }
    let journals = Path::new(undo::DEFAULT_FOLDER);
    if needs.network || folders.socket == journals {
        // First: labs have their folders below.
        folders.own.insert(0, journals);
    }
    needs.readable = read_again.iter().map(|file| folder_of(file)).collect();
    needs.readable.extend(folders.read.map(Path::to_owned));
    needs.writable = folders.own.iter().map(|folder| (*folder).to_owned()).chain([folders.socket]).collect();
    for folder in &needs.writable {
        // A folder that cannot be made now fails, with its reason, where it is needed.
        let _ = files::create_private_dir(folder);
    }
    // The kernel's parameters of the network, which the helper has no task to change.
    needs.writable.extend(needs.network.then(|| PathBuf::from("/proc/sys/net")));
    // A state folder below the default one is reached through that.
    let default = Path::new(dirs::STATE_DIR);
    if folders.own.iter().any(|folder| folder.starts_with(default)) {
        folders.own.insert(0, default);
    }
    confinement::leave_root(&folders.own, folders.read.as_slice())?;
    let confinement = confinement::confine(&needs)?;
    tracing::debug!(target: "mpvpn::confinement", ?confinement, "dropped the rights that are not needed");
    if confinement.landlock.is_none() {
        tracing::info!("this kernel has no Landlock: files are protected by their modes only");
    }
    Ok(())
}

/// A file that is replaced is another one in the same folder, so the folder is what counts.
fn folder_of(file: &Path) -> PathBuf {
    let absolute = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    // A link leads elsewhere.
    let real = fs::canonicalize(&absolute).unwrap_or(absolute);
    real.parent().map_or_else(|| PathBuf::from("/"), Path::to_owned)
}

/// The restrictions of this process, for the status; `None` if it is not confined.
pub fn status() -> Option<Confinement> {
    confinement::current().map(|now| Confinement {
        capabilities: now.capabilities.clone(),
        system_calls: now.system_calls,
        landlock: now.landlock,
    })
}

/// The life of the service that changes the name servers for clients that are no root.
///
/// # Errors
/// If it cannot be confined, or was not started by the service manager.
pub fn change_name_servers() -> Result<(), RunError> {
    Ok(mpvpn_os::dns::serve_clients()?)
}

/// The life of the helper process. `readable`: the files that it reads; without `network` it does nothing
/// else.
///
/// # Errors
/// If it cannot be confined, or is not asked by a process of mpvpn.
pub fn help(readable: &[PathBuf], network: bool) -> Result<(), RunError> {
    Ok(helper::serve(readable, network)?)
}

/// By what this kernel can confine a process.
pub fn kernel_check() -> KernelCheck {
    KernelCheck { system_calls: confinement::has_seccomp(), landlock: confinement::landlock_version() }
}
