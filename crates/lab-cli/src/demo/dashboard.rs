//! The dashboard of the demonstration's client, for a browser of this machine.
//!
//! In: the client, whose dashboard listens in its own namespace. Out: an address of this machine that leads
//! there, and a link that logs in. Always holds: it listens on the loopback only; its threads end with it.

use std::{
    io,
    net::{Shutdown, TcpListener, TcpStream},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use mpvpn_lab::{LabError, Namespace, process::run, signals};

use crate::vpn::{Endpoint, binary};

/// Where the client listens, and this machine, if the port is free there.
pub(super) const ADDRESS: &str = "127.0.0.1:9470";
/// Time for people to open the link before the demonstration begins.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);
/// Time in which a browser that has opened it shows the first figures.
const FIRST_FIGURES: Duration = Duration::from_secs(3);
/// How often a new connection is looked for. Longer delays browsers, shorter costs wake-ups.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(10);

/// Forwards connections to the client's dashboard.
pub(super) struct DashboardForwarder {
    link: String,
    is_opened: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

impl DashboardForwarder {
    /// Forwards to the dashboard of this client in this namespace.
    pub(super) fn start(namespace: &Namespace, client: &Endpoint) -> Result<Self, LabError> {
        let listener = TcpListener::bind(ADDRESS).or_else(|_| TcpListener::bind("127.0.0.1:0"));
        let listener = listener.map_err(LabError::io("listen on the loopback"))?;
        let address = listener.local_addr().map_err(LabError::io("look at a socket"))?;
        listener.set_nonblocking(true).map_err(LabError::io("change a socket"))?;
        let link = run(Command::new(binary()?).args(["dashboard", "--api-socket"]).arg(client.socket()))?;
        // Where the port was taken, another one leads to the same.
        let link = link.trim().replace(ADDRESS, &address.to_string());
        let (is_opened, stop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (opened, stopped, namespace) = (Arc::clone(&is_opened), Arc::clone(&stop), namespace.clone());
        let acceptor = thread::spawn(move || accept(&listener, &namespace, &opened, &stopped));
        Ok(Self { link, is_opened, stop, acceptor: Some(acceptor) })
    }

    /// Prints the link, and waits until a browser has opened it.
    pub(super) fn wait_for_browser(&self) -> Result<(), LabError> {
        println!(
            "The client's dashboard, for a browser on this machine (the link works once):\n  {}\n",
            self.link
        );
        println!("The demonstration begins when it is open, or in {} s.", OPEN_TIMEOUT.as_secs());
        let start = Instant::now();
        while !self.is_opened.load(Ordering::Relaxed) && start.elapsed() < OPEN_TIMEOUT {
            signals::sleep(Duration::from_millis(100))?;
        }
        signals::sleep(FIRST_FIGURES)
    }
}

impl Drop for DashboardForwarder {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

fn accept(listener: &TcpListener, namespace: &Namespace, is_opened: &AtomicBool, stop: &AtomicBool) {
    let mut open: Vec<[TcpStream; 2]> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let Ok((browser, _)) = listener.accept() else {
            thread::sleep(ACCEPT_INTERVAL);
            continue;
        };
        is_opened.store(true, Ordering::Relaxed);
        let Ok(Ok(client)) = namespace.enter(|| TcpStream::connect(ADDRESS)) else { continue };
        let Ok(kept) = forward(&browser, &client) else { continue };
        open.push(kept);
    }
    for stream in open.iter().flatten() {
        let _ = stream.shutdown(Shutdown::Both);
    }
}

/// Copies both ways until one end closes. Returns what ends it.
fn forward(browser: &TcpStream, client: &TcpStream) -> io::Result<[TcpStream; 2]> {
    browser.set_nonblocking(false)?;
    for (from, to) in [(browser, client), (client, browser)] {
        let (mut from, mut to) = (from.try_clone()?, to.try_clone()?);
        thread::spawn(move || {
            let _ = io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Both);
        });
    }
    Ok([browser.try_clone()?, client.try_clone()?])
}
