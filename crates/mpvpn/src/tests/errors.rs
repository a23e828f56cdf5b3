//! Examples of the errors, for the reference and for tests. Variable parts are in capitals.

use std::{io, path::PathBuf};

use mpvpn_error::RunError;
use mpvpn_identity::{identity::Fingerprint, tls::CertificateRefusal};
use mpvpn_input::{
    Error,
    groups::{JOIN_ADMINISTRATORS, JOIN_READERS},
};
use mpvpn_os::OsError;
use mpvpn_quic::SetupError;
use mpvpn_tunnel::ClientError;
use rustix::io::Errno;

/// An error of each kind and of each next step.
pub(crate) fn errors() -> Vec<Error> {
    let io = io::Error::from;
    let (file, socket) = (|| PathBuf::from("FILE"), || PathBuf::from("SOCKET"));
    let tcp = ([127, 0, 0, 1], 443).into();
    let monitoring = |option, errno| Error::MonitoringAddress {
        option,
        address: ([127, 0, 0, 1], 9464).into(),
        source: io(errno),
    };
    vec![
        Error::usage("THE MISTAKE IN THE OPTIONS", "THE CORRECTION"),
        Error::ConfigFile {
            file: file(),
            line: 7,
            column: 1,
            why: "THE MISTAKE".into(),
            shown: " 7 | THE LINE".into(),
        },
        Error::File { doing: "read", path: file(), source: io(Errno::ACCESS) },
        Error::File { doing: "read", path: file(), source: io(Errno::NOENT) },
        Error::Content { path: file(), expected: "THE EXPECTED CONTENT", found: "THE CONTENT".into() },
        Error::KeyMismatch { cert: "CERT".into(), key: "KEY".into() },
        Error::MakeCertificate(rcgen::Error::CouldNotParseCertificate),
        Error::Tls(rustls::Error::General("REASON".into())),
        Error::Random,
        monitoring("metrics", Errno::ADDRINUSE),
        monitoring("metrics", Errno::ADDRNOTAVAIL),
        monitoring("metrics", Errno::ACCESS),
        monitoring("metrics", Errno::NOBUFS),
        monitoring("dashboard", Errno::ADDRINUSE),
        Error::TcpAddress { address: tcp, source: io(Errno::ADDRINUSE) },
        Error::TcpAddress { address: tcp, source: io(Errno::ADDRNOTAVAIL) },
        Error::TcpAddress { address: tcp, source: io(Errno::ACCESS) },
        Error::SocketInUse { path: socket(), pid: None },
        Error::SocketPath { path: socket(), bytes: 120 },
        Error::NoAnswer { path: socket(), source: io(Errno::CONNREFUSED) },
        Error::BadAnswer { path: socket(), why: "WHAT CAME INSTEAD".into() },
        Error::Denied(""),
        Error::Denied(JOIN_READERS),
        Error::Denied(JOIN_ADMINISTRATORS),
        Error::machine("WHAT THE MACHINE LACKS", "THE REMEDY"),
    ]
}

/// A refusal of each kind.
pub(crate) fn certificate_refusals() -> Vec<CertificateRefusal> {
    let (asked, presented) = (|| "NAME".to_owned(), || vec!["OTHER-NAME".to_owned()]);
    vec![
        CertificateRefusal::Untrusted { asked: asked(), presented: presented(), file: "CA-FILE".into() },
        CertificateRefusal::OtherName { asked: asked(), presented: presented() },
        CertificateRefusal::UnknownCa { asked: asked(), presented: presented() },
        CertificateRefusal::OtherFingerprint {
            expected: vec![Fingerprint([0xaa; 32])],
            presented: Fingerprint([0xbb; 32]),
        },
        CertificateRefusal::Unusable { asked: asked(), presented: presented(), why: "REASON".into() },
        CertificateRefusal::NotOwner { why: "REASON".into() },
    ]
}

/// Errors with which a client or a server ends, those of the tunnel and of the system that have a text of
/// their own.
pub(crate) fn run_errors() -> Vec<RunError> {
    let io = || io::Error::other("REASON");
    let own = [
        RunError::Privilege,
        RunError::Tunnel(ClientError::Unauthorized(401)),
        RunError::Tunnel(ClientError::AccessDenied { status: 401, detail: Default::default() }),
        RunError::Tunnel(ClientError::CertificateRefused("REASON")),
        RunError::Tunnel(ClientError::AddressInUse([10, 0, 0, 2].into())),
        RunError::Tunnel(ClientError::Tls("REASON".into())),
        RunError::Tunnel(ClientError::Unsupported("FEATURE")),
        RunError::Unresolved { name: "NAME".into(), source: io() },
        RunError::Addresses("REASON".into()),
        RunError::Setup(SetupError::Tls),
        RunError::Io { what: "DO SOMETHING", source: io() },
        RunError::Unprotected,
    ];
    own.into_iter().chain(os_errors().into_iter().map(RunError::Os)).collect()
}

/// One error of each variant.
fn os_errors() -> Vec<OsError> {
    let (name, path) = (|| "NAME".to_owned(), || PathBuf::from("FILE"));
    let io = |errno: Errno| io::Error::from(errno);
    let net = |text: &str| text.parse().unwrap_or_default();
    vec![
        OsError::Kernel { operation: "DO", object: "OBJECT".into(), source: io(Errno::PERM), detail: None },
        OsError::NameInUse { name: name(), holder: "HOLDER".into() },
        OsError::InvalidInterfaceName { name: name() },
        OsError::NoInterface { name: name() },
        OsError::Bind { local: ([0; 4], 443).into(), device: None, source: io(Errno::ADDRINUSE) },
        OsError::Listen { local: ([0; 4], 1080).into(), source: io(Errno::ADDRINUSE) },
        OsError::SubnetInUse {
            subnet: net("10.0.0.0/24"),
            address: net("10.0.0.7/24"),
            interface: "INTERFACE".into(),
        },
        OsError::NftMissing,
        OsError::Nft { table: "TABLE".into(), message: "MESSAGE".into() },
        OsError::AlreadyRunning { name: name(), pid: 4242 },
        OsError::Journal { operation: "write", path: path(), source: io(Errno::NOSPC) },
        OsError::NotPacketOriented { kind: "SOMETHING ELSE" },
        OsError::SharedResolvConf { path: path() },
        OsError::InvalidShareSource { text: "TEXT".into() },
        OsError::NumbersInUse { count: 15, purpose: "NUMBERS FOR A PURPOSE", holders: "NAME (15)".into() },
        OsError::Folder { path: "FOLDER".into(), user: 998 },
    ]
}

/// The number of a variant. A new one is added here, and to the examples.
fn number_of_error(error: &Error) -> usize {
    match error {
        Error::Usage { .. } => 0,
        Error::ConfigFile { .. } => 1,
        Error::File { .. } => 2,
        Error::Content { .. } => 3,
        Error::KeyMismatch { .. } => 4,
        Error::MakeCertificate(_) => 5,
        Error::Tls(_) => 6,
        Error::Random => 7,
        Error::MonitoringAddress { .. } => 8,
        Error::TcpAddress { .. } => 9,
        Error::SocketInUse { .. } => 10,
        Error::SocketPath { .. } => 11,
        Error::NoAnswer { .. } => 12,
        Error::BadAnswer { .. } => 13,
        Error::Denied(_) => 14,
        Error::Machine { .. } => 15,
    }
}

/// The number of a variant. A new one is added here, and to the examples.
fn number_of_os_error(error: &OsError) -> usize {
    match error {
        OsError::Kernel { .. } => 0,
        OsError::NameInUse { .. } => 1,
        OsError::InvalidInterfaceName { .. } => 2,
        OsError::NoInterface { .. } => 3,
        OsError::Bind { .. } => 4,
        OsError::Listen { .. } => 5,
        OsError::SubnetInUse { .. } => 6,
        OsError::NftMissing => 7,
        OsError::Nft { .. } => 8,
        OsError::AlreadyRunning { .. } => 9,
        OsError::Journal { .. } => 10,
        OsError::NotPacketOriented { .. } => 11,
        OsError::SharedResolvConf { .. } => 12,
        OsError::InvalidShareSource { .. } => 13,
        OsError::NumbersInUse { .. } => 14,
        OsError::Folder { .. } => 15,
    }
}

#[test]
fn every_error_has_an_example_with_a_next_step() {
    let mut numbers: Vec<_> = errors().iter().map(number_of_error).collect();
    numbers.dedup();
    assert_eq!(numbers, (0..16).collect::<Vec<_>>());
    assert!(errors().iter().all(|error| !error.next_step().is_empty()));
}

#[test]
fn every_error_of_the_system_has_an_example() {
    let numbers: Vec<_> = os_errors().iter().map(number_of_os_error).collect();
    assert_eq!(numbers, (0..16).collect::<Vec<_>>());
}
