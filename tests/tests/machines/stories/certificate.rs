//! A server whose certificate is renewed while clients use it.

use std::time::Duration;

use crate::{
    isolation,
    machine::Machine,
    network::INTERNET,
    report::step,
    site::{Site, wait_for_tunnel},
};

/// Makes a CA and a first certificate of the server.
const CA: &str = "
mkdir -p /etc/mpvpn/tls && cd /etc/mpvpn/tls
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -keyout ca.key -out ca.crt -days 30 -nodes -subj /CN=ca 2>&1
chmod 700 ca.key";
/// Makes a certificate with the number $1 in place of the one before it, as a program does that renews it.
const CERTIFICATE: &str = "
cd /etc/mpvpn/tls
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -keyout new.key -out new.csr -nodes -subj /CN=server 2>&1
printf 'subjectAltName=IP:203.0.113.10\\nextendedKeyUsage=serverAuth\\n' >new.ext
openssl x509 -req -in new.csr -CA ca.crt -CAkey ca.key -set_serial $1 -days 30 -extfile new.ext -out new.crt 2>&1
chown root:mpvpn-admin new.key && chmod 640 new.key
mv new.key server.key && mv new.crt server.crt";

pub(super) fn run() {
    let site = Site::new("certificate", &[], &[]);
    site.set_up();
    let Site { server, alpha, beta, .. } = &site;
    step("change to a certificate of a CA", || {
        server.shell(CA);
        make_certificate(server, 1001);
        server.shell(
            "touch /etc/mpvpn/server.toml && chgrp mpvpn-admin /etc/mpvpn/server.toml && chmod 640 /etc/mpvpn/server.toml
             printf 'cert = \"/etc/mpvpn/tls/server.crt\"\\nkey = \"/etc/mpvpn/tls/server.key\"\\n' \
             | cat - /etc/mpvpn/server.toml >/etc/mpvpn/new.toml
             cat /etc/mpvpn/new.toml >/etc/mpvpn/server.toml && rm /etc/mpvpn/new.toml",
        );
        server.run(&["systemctl", "restart", "mpvpn-server"]);
        let ca = server.run(&["cat", "/etc/mpvpn/tls/ca.crt"]);
        for client in [alpha, beta] {
            client.write("etc/mpvpn/ca.crt", &ca);
            client.shell("sed -i 's#^pin = .*#ca = \"/etc/mpvpn/ca.crt\"#' /etc/mpvpn/client.toml");
            client.run(&["systemctl", "restart", "mpvpn-client"]);
            wait_for_tunnel(client);
        }
        assert_eq!(serial(server), "03E9");
    });
    step("the certificate is replaced, and the server reads it again", || {
        let pings = [alpha, beta].map(|client| client.ping(INTERNET, Duration::from_millis(10), 5));
        make_certificate(server, 1002);
        server.run(&["systemctl", "reload", "mpvpn-server"]);
        for pings in pings.into_iter().flatten().map(mpvpn_tests::ping::Ping::finish) {
            assert_eq!(pings.missing(), 0, "of {} pings", pings.sent);
        }
    });
    step("new connections see it", || {
        assert_eq!(serial(server), "03EA");
        beta.run(&["systemctl", "restart", "mpvpn-client"]);
        wait_for_tunnel(beta);
    });
}

fn make_certificate(server: &Machine, serial: u32) {
    server.run(&["sh", "-euc", CERTIFICATE, "sh", &serial.to_string()]);
}

/// The number of the certificate that the server shows over TCP, as openssl prints it.
fn serial(server: &Machine) -> String {
    let address = server.links()[0].address();
    let script = "timeout 5 openssl s_client -connect $0:443 -alpn h2 </dev/null 2>/dev/null | openssl x509 -noout -serial";
    isolation::run("sh", &["-euc", script, &address]).trim().trim_start_matches("serial=").to_owned()
}
