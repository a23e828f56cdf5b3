//! Which rights a server and a client keep while they run.
//!
//! In: their configurations. Out: a confined process, and a helper where there is a TUN device. Always holds:
//! files that may belong to other users (tokens, keys) are read, and ports below 1024 are bound, before.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod secrets;

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use mpvpn_config::{AcmeChallenge, ClientConfig, Confine, ServerConfig, ServerDns};
use mpvpn_error::RunError;
use mpvpn_identity::trust::Trust;
use mpvpn_input::files;
use mpvpn_os::{
    confinement::{self, Needs},
    helper, undo,
};
use mpvpn_status::{Confinement, check::KernelCheck};
use mpvpn_users::users_file;

/// Confines a client that has a TUN device or is a proxy. `file`: its configuration file.
///
/// # Errors
/// If the kernel refuses, or the helper cannot be started.
pub fn client(config: &ClientConfig, file: Option<&Path>) -> Result<(), RunError> {
    let folders =
        config.qlog.iter().cloned().chain([config.state_dir.clone(), folder_of(&config.api_socket)]);
    // The certificate of the server is read again for each transport.
    let ca = match &config.trust {
        Trust::Ca(file) => Some(folder_of(file)),
        // The CAs of the system are in system folders.
        Trust::System | Trust::Pin(_) | Trust::Insecure => None,
    };
    let own: Vec<_> = config.cert.iter().flat_map(|files| [files.cert.as_path(), &files.key]).collect();
    let needs = Needs {
        network: config.proxies.is_empty(),
        // The resolver for local names listens on port 53.
        low_ports: config.proxies.is_empty() && !config.dns_local.is_empty(),
        readable: ca.into_iter().collect(),
        writable: folders.collect(),
        ..Needs::default()
    };
    let read_again: Vec<_> = [file].into_iter().chain(own.into_iter().map(Some)).collect();
    confine(config.confine, &read_again, needs)
}

/// Confines a server. `file`: its configuration file.
///
/// # Errors
/// If the kernel refuses, or the helper cannot be started.
pub fn server(config: &ServerConfig, file: Option<&Path>) -> Result<(), RunError> {
    let folders =
        config.qlog.iter().cloned().chain([config.state_dir.clone(), folder_of(&config.api_socket)]);
    let certificates = config.cert.iter().chain(&config.more_certs);
    let certificates: Vec<_> = certificates.flat_map(|files| [&files.cert, &files.key]).collect();
    let files = certificates.iter().copied().chain(&config.users);
    let has_tun = config.service.has_tun();
    let needs = Needs {
        network: has_tun,
        // Its resolver listens on port 53 of the tunnel's addresses, which come later; a CA looks at port 80.
        low_ports: has_tun && config.dns == ServerDns::Own
            || config.acme.as_ref().is_some_and(|acme| acme.challenge == AcmeChallenge::Http01),
        readable: files.map(|file| folder_of(file)).chain(config.site.folder().map(Path::to_owned)).collect(),
        writable: folders.collect(),
        ..Needs::default()
    };
    let users = users_file(config);
    let mut read_again = vec![file, Some(users.as_path())];
    read_again.extend([config.client_ca.as_deref(), config.crl.as_deref()]);
    read_again.extend(certificates.iter().map(|file| Some(file.as_path())));
    confine(config.confine, &read_again, needs)
}

/// `read_again`: files that are read when they change, and may belong to another user.
fn confine(wanted: Confine, read_again: &[Option<&Path>], mut needs: Needs) -> Result<(), RunError> {
    if wanted == Confine::Off {
        return Ok(());
    }
    if needs.network {
        needs.writable.push(undo::DEFAULT_FOLDER.into());
        let files: Vec<PathBuf> =
            read_again.iter().flatten().filter_map(|file| std::path::absolute(file).ok()).collect();
        helper::start(&files)?;
        files::read_by(helper::read);
    }
    needs.readable.extend(read_again.iter().flatten().map(|file| folder_of(file)));
    for folder in &needs.writable {
        // A folder that cannot be made now fails, with its reason, where it is needed.
        let _ = files::create_private_dir(folder);
    }
    // Where the package is installed, folders belong to the user of its services; root's own processes use
    // them as well.
    needs.other_owners = needs.writable.iter().any(|folder| is_of_other_user(folder));
    let confinement = confinement::confine(&needs)?;
    tracing::debug!(target: "mpvpn::confinement", ?confinement, "dropped the rights that are not needed");
    if confinement.landlock.is_none() {
        tracing::info!("this kernel has no Landlock: files are protected by their modes only");
    }
    Ok(())
}

fn is_of_other_user(folder: &Path) -> bool {
    fs::metadata(folder).is_ok_and(|found| found.uid() != 0)
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

/// The life of the helper process.
///
/// # Errors
/// If it cannot be confined, or is not asked by a process of mpvpn.
pub fn help(readable: &[PathBuf]) -> Result<(), RunError> {
    Ok(helper::serve(readable)?)
}

/// By what this kernel can confine a process.
pub fn kernel_check() -> KernelCheck {
    KernelCheck { system_calls: confinement::has_seccomp(), landlock: confinement::landlock_version() }
}
