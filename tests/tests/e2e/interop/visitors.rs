//! A server with a site beside Caddy with the same pages and the same certificate: somebody without a token
//! sees the same of both, but for the list in `docs/security.md`.

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use mpvpn_tests::{
    eventually,
    interop_peer::{InteropPeer, Program},
    machine_share::{MachineShare, Share},
    testbed::{Host, Testbed},
};
use serde_json::Value;

/// How long all that is looked at may take: some questions wait a second for an answer that must not come.
const TIMEOUT: Duration = Duration::from_secs(300);
const CADDYFILE: &str = "{
	admin off
	auto_https disable_redirects
	persist_config off
}
https://:4434 {
	tls server.crt server.key
	root * www
	file_server
}
";

/// Everything that was looked at, and what was seen.
type Seen = BTreeMap<String, Value>;

fn visit(testbed: &Testbed, port: &str) -> Seen {
    let visitor =
        InteropPeer::start(testbed, Host::Client, Program::Python("visitor.py"), &["192.0.2.1", port]);
    let output = visitor.wait_for_success(TIMEOUT);
    serde_json::from_str(&output).unwrap_or_else(|error| panic!("{error}: {output}"))
}

/// The rows of the list of differences: how the names of what was looked at begin.
fn listed() -> Vec<String> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/security.md");
    let text = fs::read_to_string(file).expect("the page is there");
    let table = text.split("| a visitor looks at |").nth(1).expect("the list of differences");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with("| "));
    rows.map(|row| row.split('|').nth(1).expect("a first column").trim().replace('`', "")).collect()
}

fn pages(testbed: &Testbed) {
    let www = testbed.dir().join("www");
    for folder in ["folder", "empty"] {
        fs::create_dir_all(www.join(folder)).expect("a folder");
    }
    let large: Vec<u8> = (0..300_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for (name, content) in [
        ("index.html", &b"<p>hello\n"[..]),
        ("page.txt", b"plain\n"),
        ("large.bin", &large),
        ("folder/index.html", b"<p>folder\n"),
    ] {
        fs::write(www.join(name), content).expect("a page");
    }
}

#[test]
fn a_visitor_cannot_tell_a_site_from_that_of_caddy_but_by_what_is_listed() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_links();
    pages(&testbed);
    fs::write(testbed.dir().join("server.toml"), "[site]\nroot = \"www\"\n").expect("a file");
    fs::write(testbed.dir().join("Caddyfile"), CADDYFILE).expect("a file");
    let args = ["--auth", "token", "--state-dir", "state", "--config", "server.toml"];
    let _server = testbed.server(&args);
    let arguments = ["run", "--config", "Caddyfile"];
    let caddy = InteropPeer::start(&testbed, Host::Server, Program::Caddy, &arguments);
    eventually(TIMEOUT, "Caddy serves", || match caddy.log() {
        log if log.contains("serving initial configuration") => Ok(()),
        log => Err(log),
    });
    let (ours, theirs) = (visit(&testbed, "4433"), visit(&testbed, "4434"));
    caddy.terminate();

    let names = ["mpvpn", "masque", "multipath", "proxy"];
    for (what, seen) in &ours {
        let seen = seen.to_string().to_lowercase();
        assert!(!names.iter().any(|name| seen.contains(name)), "{what} names the program: {seen}");
    }
    assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
    let mut listed: BTreeMap<_, _> = listed().into_iter().map(|row| (row, 0)).collect();
    let mut unlisted = Vec::new();
    for (what, seen) in ours.iter().filter(|(what, seen)| theirs[*what] != **seen) {
        let line = format!("{what}\n  mpvpn: {seen}\n  Caddy: {}", theirs[what]);
        println!("{line}");
        let rows = listed.iter_mut().filter(|(row, _)| what.starts_with(row.as_str()));
        let rows = rows.map(|(_, count)| *count += 1).count();
        if rows == 0 {
            unlisted.push(line);
        }
    }
    assert!(unlisted.is_empty(), "docs/security.md does not list this:\n{}", unlisted.join("\n"));
    let equal: Vec<_> = listed.iter().filter(|(_, count)| **count == 0).map(|(row, _)| row).collect();
    assert!(equal.is_empty(), "docs/security.md lists these, which do not differ: {equal:?}");
}
