//! Keys and certificates of the ends, made once, and TLS as clients and servers have it.

use std::sync::{Arc, LazyLock};

use mpvpn_identity::{identity::Identity, tls, trust::Trust};
use mpvpn_quic::{ClientSetup, ServerSetup, TransportOptions};
use rustls::client::Resumption;

/// The transports of a client and of a server, with fixed seeds: an input does the same each time.
pub(super) static SETUPS: LazyLock<(ClientSetup, ServerSetup)> = LazyLock::new(|| {
    let home = tempfile::tempdir().expect("a folder");
    let identity = Identity::load_or_create(home.path()).expect("a certificate");
    let mut client = tls::client_config(&Trust::Insecure, &[b"h3"]).expect("a configuration");
    client.resumption = Resumption::disabled();
    let mut server = tls::server_config(&identity.into(), &[b"h3"]).expect("a configuration");
    server.send_tls13_tickets = 0;
    (
        ClientSetup::new(Arc::new(client), &options(1), &[1; 32]).expect("a setup"),
        ServerSetup::new(Arc::new(server), &options(2), &[2; 32]).expect("a setup"),
    )
});

fn options(seed: u8) -> TransportOptions {
    /// One probe above the MTU with which every path begins. Its padding, a frame each byte, takes more time
    /// than anything else of an input.
    const MAX_UDP_PAYLOAD: u16 = 1330;
    TransportOptions {
        max_udp_payload: MAX_UDP_PAYLOAD,
        max_udp_payload_inside_tcp: MAX_UDP_PAYLOAD,
        rng_seed: Some([seed; 32]),
        ..TransportOptions::default()
    }
}
