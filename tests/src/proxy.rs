//! An HTTP proxy as in company networks: tinyproxy on the server's host.

use std::{
    fs,
    net::TcpStream,
    process::{Child, Stdio},
    time::Duration,
};

use crate::{
    eventually,
    testbed::{Host, Testbed},
};

/// Address of the proxy, on the server's host.
const HOST: &str = "192.0.2.1";
const PORT: u16 = 3128;

/// A running proxy that allows user `anna` with password `secret` to connect to port 4433.
pub struct HttpProxy {
    child: Child,
}

impl HttpProxy {
    /// Starts the proxy, and waits until it accepts connections.
    pub fn start(testbed: &Testbed) -> Self {
        let file = testbed.dir().join("tinyproxy.conf");
        let lines = format!(
            "Port {PORT}\nListen {HOST}\nTimeout 600\nMaxClients 50\nBasicAuth anna secret\nConnectPort 4433\n"
        );
        fs::write(&file, lines).expect("a file");
        let child = testbed
            .command(Host::Server, "tinyproxy")
            .args(["-d", "-c"])
            .arg(&file)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("tinyproxy: {error} (apt install tinyproxy-bin)"));
        eventually(Duration::from_secs(10), "the proxy answers", || {
            let connect = || TcpStream::connect((HOST, PORT)).map_err(|error| error.to_string());
            testbed.in_namespace(Host::Server, connect).map(drop)
        });
        Self { child }
    }

    /// Address and port of the proxy.
    pub fn address(&self) -> String {
        format!("{HOST}:{PORT}")
    }

    /// The value of `--via` for a user.
    pub fn url(&self, user: &str, password: &str) -> String {
        format!("http://{user}:{password}@{HOST}:{PORT}")
    }
}

impl Drop for HttpProxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
