//! Copies that people make by hand: a machine's state folder, and the program itself.

use mpvpn_tests::eventually;

use crate::{
    isolation,
    machine::Machine,
    network::INTERNET,
    package::package,
    report::step,
    site::{CONNECT_TIMEOUT, Site, add_user, install, set_up_server, wait_for_tunnel},
};

/// A unit as a person writes it who has only the binary.
const UNIT: &str = "\
[Service]
ExecStart=/usr/local/bin/mpvpn client --config /etc/mpvpn/client.toml
[Install]
WantedBy=multi-user.target
";
const UNIT_FILE: &str = "/etc/systemd/system/mpvpn-client.service";

pub(super) fn state_folder() {
    let site = Site::new("copied_state", &[], &[]);
    site.set_up();
    let Site { server, alpha, beta, .. } = &site;
    let addresses = alpha.tunnel_addresses();
    step("a machine gets a copy of another one's settings and state, as clones of an image have it", || {
        beta.run(&["systemctl", "stop", "mpvpn-client"]);
        for folder in ["etc/mpvpn", "var/lib/mpvpn"] {
            let [from, to] = [alpha, beta].map(|machine| machine.path(folder).display().to_string());
            isolation::run("rm", &["-r", &to]);
            isolation::run("cp", &["-a", &from, &to]);
        }
        beta.run(&["systemctl", "start", "mpvpn-client"]);
    });
    step("both machines and the server are told, and the copy has addresses of its own", || {
        has_note(alpha, "a copy of this client's state folder: this client keeps its addresses");
        has_note(beta, "a copy of this client's state folder: this client has addresses of its own");
        has_note(server, "two machines have shown the secret of one session");
        wait_for_tunnel(alpha);
        wait_for_tunnel(beta);
        assert_eq!(alpha.tunnel_addresses(), addresses, "the first machine has other addresses");
        assert_ne!(beta.tunnel_addresses(), addresses, "two machines have the same addresses");
    });
    step("from now on they are two machines", || {
        let copy = beta.tunnel_addresses();
        beta.run(&["systemctl", "restart", "mpvpn-client"]);
        wait_for_tunnel(beta);
        assert_eq!(beta.tunnel_addresses(), copy, "the copy has other addresses after a restart");
        assert!(alpha.reaches(INTERNET), "the restart of the copy interrupts the first machine");
        assert_eq!(alpha.tunnel_addresses(), addresses, "the first machine has other addresses");
    });
}

pub(super) fn program() {
    let site = Site::new("copied_program", &[], &[]);
    let Site { server, alpha, .. } = &site;
    install(server);
    set_up_server(server);
    step("a client has only the binary, and a unit that somebody wrote", || {
        alpha.copy_in(&package(), "root/mpvpn.deb");
        alpha.shell("dpkg-deb --extract /root/mpvpn.deb /root/x && cp /root/x/usr/bin/mpvpn /usr/local/bin/ && rm -r /root/x");
        alpha.run(&["mpvpn", "join", &add_user(server, "alpha")]);
        alpha.write(UNIT_FILE, UNIT);
        alpha.run(&["systemctl", "enable", "--now", "mpvpn-client"]);
        wait_for_tunnel(alpha);
    });
    let (addresses, settings) = (alpha.tunnel_addresses(), alpha.run(&["cat", "/etc/mpvpn/client.toml"]));
    let told = step("the installation names both copies and interrupts nothing", || {
        let process = alpha.run(&["systemctl", "show", "--property", "MainPID", "mpvpn-client"]);
        let told = alpha.shell("cd /root && apt-get install --yes ./mpvpn.deb 2>&1");
        assert_eq!(alpha.run(&["systemctl", "show", "--property", "MainPID", "mpvpn-client"]), process);
        assert!(alpha.reaches(INTERNET), "the installation interrupts the client");
        told
    });
    for line in [
        "there is also /usr/local/bin/mpvpn, which the shell finds before /usr/bin/mpvpn: remove it",
        "/etc/systemd/system/mpvpn-client.service counts instead of the unit of this package: remove it",
    ] {
        assert!(told.contains(line), "the installation does not say `{line}`:\n{told}");
    }
    step("without the copies the package's client goes on with the same settings and addresses", || {
        alpha.run(&["rm", "/usr/local/bin/mpvpn", UNIT_FILE]);
        alpha.run(&["systemctl", "daemon-reload"]);
        alpha.run(&["systemctl", "restart", "mpvpn-client"]);
        wait_for_tunnel(alpha);
        assert_eq!(alpha.tunnel_addresses(), addresses, "the client has other addresses");
        assert_eq!(alpha.run(&["cat", "/etc/mpvpn/client.toml"]), settings);
        let user = alpha.run(&["systemctl", "show", "--property", "User", "mpvpn-client"]);
        assert_eq!(user.trim(), "User=mpvpn", "it is not the package's unit that runs");
    });
}

/// Waits until the status of the machine has a note with this text.
fn has_note(machine: &Machine, text: &str) {
    eventually(CONNECT_TIMEOUT, &format!("{} is told", machine.name()), || {
        let notes = machine.status()?["notes"].to_string();
        if notes.contains(text) { Ok(()) } else { Err(format!("its notes: {notes}")) }
    });
}
