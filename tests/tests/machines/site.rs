//! A server and its clients, as two persons set them up: what they type, and what they see.
//!
//! In: booted machines. Out: a tunnel. Each function is one thing that a person does, by the commands of the
//! README.

use std::{
    panic::resume_unwind,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use mpvpn_tests::eventually;
use serde_json::Value;

use crate::{
    machine::Machine,
    network::{INTERNET, Link, Network},
    package::package,
    report::step,
};

/// How long a client may take to connect after it was started. A second is usual; machines that compile
/// beside it take longer.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// How long an installation may take on a busy machine.
const INSTALL_TIMEOUT: Duration = Duration::from_secs(120);

/// A server and two clients with two links each.
pub(crate) struct Site {
    /// The server.
    pub(crate) server: Machine,
    /// The first client.
    pub(crate) alpha: Machine,
    /// The second client.
    pub(crate) beta: Machine,
    /// The router between them.
    pub(crate) network: Network,
}

impl Site {
    /// Machines that have started, with these layers above the base at the server and at the clients.
    pub(crate) fn new(test: &str, server: &[&str], clients: &[&str]) -> Self {
        let links = [1, 2].map(|client| [1, 2].map(|number| Link::of_client(client, number)));
        let server_link = Link::of_server(1);
        let network = Network::new(&[std::slice::from_ref(&server_link), links.as_flattened()].concat());
        let (server, clients) = ([&["base"], server].concat(), [&["base"], clients].concat());
        let mut site = Self {
            server: Machine::new(test, "server", &server, &[server_link]),
            alpha: Machine::new(test, "alpha", &clients, &links[0]),
            beta: Machine::new(test, "beta", &clients, &links[1]),
            network,
        };
        step("three machines boot", || {
            let machines = [&mut site.server, &mut site.alpha, &mut site.beta];
            side_by_side(machines, Machine::boot);
        });
        site
    }

    /// Sets all of it up: the package everywhere, the server, and both clients with the users `alpha` and
    /// `beta`.
    pub(crate) fn set_up(&self) {
        step("install, set up and join: a server and two clients", || {
            [&self.server, &self.alpha, &self.beta].into_iter().for_each(install);
            set_up_server(&self.server);
            for client in [&self.alpha, &self.beta] {
                join(client, &add_user(&self.server, client.name()));
                wait_for_tunnel(client);
            }
        });
    }
}

/// Runs a task for each machine, all at the same time.
pub(crate) fn side_by_side<M: Send, T: Send, const N: usize>(
    machines: [M; N],
    task: impl Fn(M) -> T + Sync,
) -> [T; N] {
    thread::scope(|scope| {
        let tasks = machines.map(|machine| scope.spawn(|| task(machine)));
        tasks.map(|task| task.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

/// Installs the package from a file, as `apt-get install ./mpvpn.deb` does. No package index is there, so all
/// that it needs has to be on a bare system.
pub(crate) fn install(machine: &Machine) {
    install_file(machine, &package());
}

/// Installs this file, or upgrades to it.
pub(crate) fn install_file(machine: &Machine, file: &Path) {
    machine.copy_in(file, "root/mpvpn.deb");
    let install = ["sh", "-euc", "cd /root && apt-get install --yes ./mpvpn.deb && rm mpvpn.deb"];
    let output = machine.output(INSTALL_TIMEOUT, &install);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "the package cannot be installed:\n{out}\n{err}");
}

/// Makes a server of the machine, and returns the join link of its first user.
pub(crate) fn set_up_server(server: &Machine) -> String {
    if !has_setup(server) {
        server.run(&["systemctl", "enable", "--now", "mpvpn-server"]);
        return add_user(server, "first");
    }
    link_in(&server.run(&["mpvpn", "setup", "server", "--yes"]))
}

/// Adds a server of that name to the machine, and returns the join link of its first user.
pub(crate) fn set_up_named_server(server: &Machine, name: &str, port: u16) -> String {
    let port = port.to_string();
    link_in(&server.run(&["mpvpn", "setup", "server", "--name", name, "--port", &port, "--yes"]))
}

/// The join link in what a command has printed.
fn link_in(text: &str) -> String {
    let word = text.split(|c: char| c.is_whitespace() || c == '\'').find(|word| word.starts_with("mpvpn://"));
    word.unwrap_or_else(|| panic!("`mpvpn setup server` prints no join link:\n{text}")).to_owned()
}

/// Makes a client of the machine, as the first one of a server.
pub(crate) fn set_up_client(client: &Machine, link: &str) {
    match has_setup(client) {
        true => drop(client.run(&["mpvpn", "setup", "client", link, "--yes"])),
        false => join(client, link),
    }
}

/// Takes away what setup has made.
pub(crate) fn remove(machine: &Machine) {
    if has_setup(machine) {
        machine.run(&["mpvpn", "setup", "remove", "--yes"]);
    }
}

/// Whether the installed version has the command.
fn has_setup(machine: &Machine) -> bool {
    machine.succeeds(&["mpvpn", "setup", "--help"])
}

/// Adds a user, and returns the join link.
pub(crate) fn add_user(server: &Machine, name: &str) -> String {
    let text = server.run(&["mpvpn", "user", "add", name, "--json"]);
    let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    value["link"].as_str().expect("a link").to_owned()
}

/// Makes a client of the machine, which starts now and at each boot.
pub(crate) fn join(client: &Machine, link: &str) {
    client.run(&["mpvpn", "join", link, "--start"]);
}

/// Waits until the client has a tunnel over two links that carries packets to the internet. Returns how long
/// that took.
pub(crate) fn wait_for_tunnel(client: &Machine) -> Duration {
    let began = Instant::now();
    eventually(CONNECT_TIMEOUT, &format!("{} connects", client.name()), || {
        let status = client.status()?;
        let links = status["links"].as_array().map_or(0, Vec::len);
        match status["state"].as_str() {
            Some("up") if links == client.links().len() => Ok(()),
            state => Err(format!("state {state:?}, {links} links")),
        }
    });
    eventually(CONNECT_TIMEOUT, &format!("{} reaches the internet", client.name()), || {
        if client.reaches(INTERNET) { Ok(()) } else { Err("no answer to a ping".to_owned()) }
    });
    began.elapsed()
}

/// The sessions at the server, as users' names.
pub(crate) fn connected_users(server: &Machine) -> Vec<String> {
    let status = server.status().unwrap_or_else(|error| panic!("no status of the server: {error}"));
    let clients = status["clients"].as_array().expect("a list").iter();
    clients.filter_map(|client| client["user"].as_str()).map(str::to_owned).collect()
}

/// Waits until the user has no session at the server, and returns how long that took.
pub(crate) fn wait_until_gone(server: &Machine, user: &str) -> Duration {
    let began = Instant::now();
    eventually(CONNECT_TIMEOUT, &format!("the session of {user} ends"), || {
        match connected_users(server).iter().any(|name| name == user) {
            true => Err("it goes on".to_owned()),
            false => Ok(()),
        }
    });
    began.elapsed()
}
