//! Changes of classes while a client runs.

use std::{fs, time::Duration};

use mpvpn_tests::{
    ping::reaches,
    testbed::{Host, MpvpnProcess, TUNNEL, Testbed},
};
use serde_json::Value;

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(10);
const BOTH: &str = "[[class]]\nname = \"critical\"\n[[class]]\nname = \"bulk\"\nweight = 2\n";

fn write(testbed: &Testbed, text: &str) {
    fs::write(testbed.dir().join("client.toml"), text).expect("a file");
}

fn reload(testbed: &Testbed, process: &MpvpnProcess) -> (Option<i32>, String) {
    let socket = process.socket().to_str().expect("an ASCII path").to_owned();
    let output = testbed.mpvpn(Host::Client, &["config", "reload", "--api-socket", &socket]);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.code(), format!("{out}{err}"))
}

/// Waits until exactly these classes exist and each is up on both links. Sends packets in `critical` and
/// `bulk`, which are asleep otherwise.
fn wait_for_classes(testbed: &Testbed, client: &MpvpnProcess, names: &[&str]) -> Value {
    client.wait_for_status(TIMEOUT, &format!("the classes {names:?}"), |status| {
        ["critical", "bulk"].iter().for_each(|class| testbed.wake_class(class));
        let list = |key: &str| status[key].as_array().cloned().unwrap_or_default();
        let classes = list("classes");
        let found: Vec<_> = classes.iter().filter_map(|class| class["name"].as_str()).collect();
        let works = |name: &str| {
            let own =
                list("paths").into_iter().filter(|path| path["class"] == name && path["state"] == "active");
            own.count() == 2
        };
        let up = |class: &Value| class["state"] == "up";
        match found == names && classes.iter().all(up) && names.iter().all(|name| works(name)) {
            true => Ok(()),
            false => Err(format!("{:#} {:#}", status["classes"], status["paths"])),
        }
    })
}

/// The local addresses and ports of a class's paths.
fn local_addresses(status: &Value, class: &str) -> Vec<String> {
    let paths = status["paths"].as_array().into_iter().flatten();
    paths.filter(|path| path["class"] == class).map(|path| path["local"].to_string()).collect()
}

#[test]
fn classes_are_added_changed_and_removed_without_affecting_others() {
    let testbed = Testbed::two_links();
    let server = testbed.server(&[]);
    write(&testbed, BOTH);
    let client = testbed.client(&["--config", "client.toml", "--state-dir", "state"]);
    let before = wait_for_classes(&testbed, &client, &["default", "critical", "bulk"]);

    let cams = "[[class]]\nname = \"cams\"\ndscp = 20\n[[class.match]]\nprotocol = \"icmp\"\n";
    write(&testbed, &format!("{BOTH}{cams}"));
    assert_eq!(reload(&testbed, &client), (Some(0), "classes are as the file says now\n".to_owned()));
    let status = client.status();
    assert_eq!(status["classes"][3]["state"], "asleep", "nobody has used it: {status:#}");
    reaches(&testbed, Host::Client, TUNNEL);
    let with_cams = wait_for_classes(&testbed, &client, &["default", "critical", "bulk", "cams"]);
    reaches(&testbed, Host::Client, TUNNEL);
    let status = client.wait_for_status(TIMEOUT, "pings of the new class", |status| {
        let bytes = status["classes"][3]["tx_bytes"].as_u64().unwrap_or(0);
        if bytes > 0 { Ok(()) } else { Err(format!("{:#}", status["classes"])) }
    });
    for class in ["default", "critical", "bulk"] {
        assert_eq!(
            local_addresses(&status, class),
            local_addresses(&before, class),
            "{class} has other sockets"
        );
    }

    // A new mark needs new sockets; a change of links does not.
    let changed = cams.replace("20", "22");
    let changed = format!("{BOTH}exclude = [\"eth2\"]\n{changed}");
    write(&testbed, &changed.replace("dscp = 22", "fec = \"sometimes\""));
    let (code, said) = reload(&testbed, &client);
    assert!(
        code == Some(2) && said.contains("client.toml, line 9") && said.contains("fec"),
        "{code:?}: {said}"
    );
    wait_for_classes(&testbed, &client, &["default", "critical", "bulk", "cams"]);
    write(&testbed, &changed);
    assert_eq!(reload(&testbed, &client).0, Some(0));
    let status = client.wait_for_status(TIMEOUT, "bulk off eth2, and other sockets for cams", |status| {
        let paths = status["paths"].as_array().cloned().unwrap_or_default();
        let of = |class: &str, state: &str| {
            paths.iter().filter(|path| path["class"] == class && path["state"] == state).count()
        };
        let cams = local_addresses(status, "cams");
        let is_new =
            cams.len() == 2 && cams.iter().all(|end| !local_addresses(&with_cams, "cams").contains(end));
        match of("bulk", "active") == 1 && is_new && of("cams", "active") == 2 {
            true => Ok(()),
            false => Err(format!("{:#}", status["paths"])),
        }
    });
    for class in ["default", "critical"] {
        assert_eq!(
            local_addresses(&status, class),
            local_addresses(&before, class),
            "{class} has other sockets"
        );
    }

    write(&testbed, BOTH);
    client.reload();
    let status = wait_for_classes(&testbed, &client, &["default", "critical", "bulk"]);
    assert_eq!(local_addresses(&status, "default"), local_addresses(&before, "default"));
    assert_eq!(status["session"]["resumed"], 0);
    reaches(&testbed, Host::Client, TUNNEL);
    server.wait_for_status(TIMEOUT, "the connection of the class to be gone", |status| {
        let client = &status["clients"][0];
        let paths = client["paths"].as_array().into_iter().flatten();
        match paths.filter(|path| path["class"] == "cams").count() {
            0 => Ok(()),
            _ => Err(format!("{client:#}")),
        }
    });
}
