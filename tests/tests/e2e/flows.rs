//! `mpvpn status --flows` lists the flow mode of each flow and its reason.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream, UdpSocket},
    time::Duration,
};

use mpvpn_tests::{
    eventually,
    testbed::{Host, MpvpnProcess, Testbed, inet4},
};
use serde_json::Value;

/// Destination ports: with a rule for streams, without a rule, with a rule for datagrams.
const PORTS: [u16; 3] = [443, 5000, 25];

/// Opens a connection from an app at the client to a server behind the tunnel; returns both ends.
fn connect(testbed: &Testbed, port: u16) -> (TcpStream, TcpStream) {
    let to = format!("{}:{port}", inet4());
    let listener = testbed.in_namespace(Host::Inet, || TcpListener::bind(&to)).expect("a free port");
    let mut near = testbed.in_namespace(Host::Client, || TcpStream::connect(&to)).expect("a way there");
    let (mut far, _) = listener.accept().expect("a connection");
    near.write_all(&[1; 1000]).expect("room");
    far.read_exact(&mut [0; 1000]).expect("all of it");
    far.write_all(&[2; 5000]).expect("room");
    near.read_exact(&mut [0; 5000]).expect("all of it");
    (near, far)
}

/// Waits for the flow to a port until `wanted` accepts it.
fn flow_to(process: &MpvpnProcess, port: u16, wanted: impl Fn(&Value) -> bool) -> Value {
    let to = format!("{}:{port}", inet4());
    eventually(Duration::from_secs(5), &format!("a flow to {to}"), || {
        let flows = process.flows();
        flows.iter().find(|flow| flow["to"] == to && wanted(flow)).cloned().ok_or(format!("{flows:#?}"))
    })
}

fn bytes_moved(flow: &Value) -> (u64, u64) {
    let bytes = |name: &str| flow[name].as_u64().expect("a count of bytes");
    (bytes("up_bytes"), bytes("down_bytes"))
}

#[test]
fn both_ends_list_their_flows_with_flow_mode_reason_and_bytes() {
    let testbed = Testbed::two_links();
    let file = testbed.file("lanes", Host::Client);
    let rules = "[[lane-rule]]\nlane = 'stream'\nports = ['443']\n\n[[lane-rule]]\nlane = 'datagram'\nports = ['25']\n";
    fs::write(&file, rules).expect("a file to write");
    let server = testbed.server(&[]);
    let client = testbed.client(&["--config", file.to_str().expect("a path of text")]);
    let open = PORTS.map(|port| connect(&testbed, port));
    for (port, lane, why, (near, _)) in [
        (443, "stream", "rule 1", &open[0]),
        (5000, "stream", "auto", &open[1]),
        (25, "datagram", "rule 2", &open[2]),
    ] {
        let flow = flow_to(&client, port, |_| true);
        assert_eq!(
            (&flow["lane"], &flow["why"], &flow["protocol"]),
            (&lane.into(), &why.into(), &"tcp".into())
        );
        let own = near.local_addr().expect("an address").to_string();
        assert_eq!(flow["from"], own.as_str(), "{flow:#}");
        let (up, down) = bytes_moved(&flow);
        if lane == "stream" {
            assert_eq!((up, down, &flow["state"]), (1000, 5000, &"open".into()), "{flow:#}");
            let there = flow_to(&server, port, |_| true);
            assert_eq!((bytes_moved(&there), &there["state"]), ((1000, 5000), &"open".into()), "{there:#}");
            assert!(there["user"].is_string() && there.get("from").is_none(), "{there:#}");
        } else {
            assert!((1000..3000).contains(&up) && (5000..8000).contains(&down), "{flow:#}");
            assert!(flow.get("state").is_none(), "{flow:#}");
        }
    }
    // The end of one direction is shown at both ends.
    open[0].0.shutdown(std::net::Shutdown::Write).expect("an open connection");
    for process in [&client, &server] {
        flow_to(process, 443, |flow| flow["state"] == "up-ended");
    }
    let udp = testbed.in_namespace(Host::Client, || UdpSocket::bind("0.0.0.0:0")).expect("a free port");
    udp.send_to(&[0; 72], (inet4().as_str(), 9)).expect("a way there");
    let flow = flow_to(&client, 9, |_| true);
    assert_eq!(
        (&flow["protocol"], &flow["lane"], &flow["why"]),
        (&"udp".into(), &"datagram".into(), &"not TCP".into())
    );
    assert_eq!(bytes_moved(&flow).0, 100);
    let counts = client.status()["flows"].clone();
    assert!(counts["stream"] == 2 && counts["datagram"].as_u64() >= Some(2), "{counts:#}");
    let socket = client.socket().to_str().expect("a path of text");
    let shown = testbed.mpvpn(Host::Client, &["status", "--flows", "--api-socket", socket]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    for expected in ["rule 1", "rule 2", "auto", "not TCP", "up-ended"] {
        assert!(shown.contains(expected), "no {expected:?} in:\n{shown}");
    }
}
