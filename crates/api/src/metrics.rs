//! Metrics for Prometheus: `GET /metrics` over HTTP on a TCP address, in the text format.
//!
//! In: the [`Status`](mpvpn_status::Status) at the time of each request. Out: text. Always holds: requests
//! only read, and name a host that no stranger can make lead here.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    sync::{Arc, Mutex, PoisonError},
};

use hyper::{
    Method, Request, StatusCode,
    body::Incoming,
    header::{self, HeaderValue},
    http::uri::Authority,
};

use crate::{ControlRequest, RequestHandler, ask_data_plane};
use mpvpn_http::{HttpResponse, complete};
use mpvpn_input::Result;
use mpvpn_status::metrics::{UserSeries, exposition};

/// Content type of the text format, version 0.0.4.
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A bound address.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    users: UserSeries,
}

impl Server {
    /// Listens at a TCP address. At most `users` users have series of their own.
    ///
    /// # Errors
    /// If the kernel refuses the address.
    pub fn bind(address: SocketAddr, users: u32) -> Result<Self> {
        Ok(Self { listener: mpvpn_http::listen("metrics", address)?, users: UserSeries::new(users) })
    }

    /// Answers requests until dropped; inside a tokio runtime with I/O and time.
    pub async fn serve(self, source: RequestHandler) -> Result<()> {
        let listener = mpvpn_http::into_tokio("metrics", self.listener)?;
        let users = Arc::new(Mutex::new(self.users));
        let answer = move |request, _| {
            let (source, users) = (Arc::clone(&source), Arc::clone(&users));
            async move { answer(&request, &source, &users).await }
        };
        mpvpn_http::serve("metrics", async || Ok(((), listener.accept().await?.0)), answer).await;
        Ok(())
    }
}

async fn answer(
    request: &Request<Incoming>,
    source: &RequestHandler,
    users: &Mutex<UserSeries>,
) -> HttpResponse {
    if !request.headers().get_all(header::HOST).iter().all(is_safe_host) {
        let text =
            "only requests to an address, to localhost or to another name without a dot are answered\n";
        return plain(StatusCode::MISDIRECTED_REQUEST, text.to_owned());
    }
    if request.uri().path() != "/metrics" {
        return plain(StatusCode::NOT_FOUND, "there is only /metrics here\n".to_owned());
    }
    if request.method() != Method::GET {
        return plain(StatusCode::METHOD_NOT_ALLOWED, "only GET works here\n".to_owned());
    }
    match ask_data_plane(source, ControlRequest::Status).await {
        Some(status) => {
            // No code panics while it holds the lock.
            let users = users.lock().unwrap_or_else(PoisonError::into_inner).update(&status.users);
            plain(StatusCode::OK, exposition(&status, &users))
        }
        None => plain(
            StatusCode::SERVICE_UNAVAILABLE,
            "the data plane did not answer within 2 s: ask again\n".to_owned(),
        ),
    }
}

/// Whether a host is an address, or a name without a dot: browsers send other names, which their owners can
/// make lead here (DNS rebinding).
fn is_safe_host(value: &HeaderValue) -> bool {
    let authority = value.to_str().ok().and_then(|text| text.parse::<Authority>().ok());
    authority.is_some_and(|authority| {
        let host = authority.host();
        host.starts_with('[') || !host.contains('.') || host.parse::<Ipv4Addr>().is_ok()
    })
}

fn plain(code: StatusCode, body: String) -> HttpResponse {
    let mut response = complete(body);
    *response.status_mut() = code;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(TEXT_FORMAT));
    response
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use mpvpn_input::role::Role;
    use mpvpn_status::Status;

    #[test]
    fn an_address_that_is_taken_is_told_with_a_way_out() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let error = Server::bind(address, 0).unwrap_err();
        assert!(error.to_string().starts_with(&format!("cannot offer metrics at {address}: ")), "{error}");
        assert!(error.next_step().contains(&format!("`ss -ltnp sport = :{}`", address.port())));
        let error = Server::bind("192.0.2.77:9464".parse().unwrap(), 0).unwrap_err();
        assert!(error.next_step().starts_with("give an address of this machine"), "{error}");
    }

    #[test]
    fn metrics_are_there_to_be_read_and_nothing_else() {
        let server = Server::bind("127.0.0.1:0".parse().unwrap(), 0).unwrap();
        let address = server.listener.local_addr().unwrap();
        let source: RequestHandler = Arc::new(|question| {
            if let ControlRequest::Status(reply) = question {
                let _ = reply.send(Status::new(Role::Server));
            }
        });
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(server.serve(source)).unwrap();
        });
        let ask_host = |head: &str, host: &str| {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
            write!(stream, "{head} HTTP/1.1\r\n{host}\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        };
        let ask = |head: &str| ask_host(head, "host: x\r\n");
        let found = ask("GET /metrics");
        assert!(found.starts_with("HTTP/1.1 200 "), "{found}");
        assert!(found.contains("content-type: text/plain; version=0.0.4"), "{found}");
        assert!(found.contains("\nmpvpn_up 0\n"), "{found}");
        assert!(ask("GET /").starts_with("HTTP/1.1 404 "));
        assert!(ask("POST /metrics").starts_with("HTTP/1.1 405 "));
        for host in ["127.0.0.1:9464", "192.0.2.1", "[::1]:9464", "localhost:9464", "prometheus", "LOCALHOST"]
        {
            let found = ask_host("GET /metrics", &format!("host: {host}\r\n"));
            assert!(found.starts_with("HTTP/1.1 200 "), "{host}: {found}");
        }
        // Names that a stranger can make lead here (DNS rebinding).
        for host in
            ["evil.example:9464", "127.0.0.1.evil.example", "localhost.evil.example", "localhost.", "", "a b"]
        {
            let found = ask_host("GET /metrics", &format!("host: {host}\r\n"));
            assert!(found.starts_with("HTTP/1.1 421 ") && !found.contains("mpvpn_up"), "{host}: {found}");
        }
        let twice = ask_host("GET /metrics", "host: localhost\r\nhost: evil.example\r\n");
        assert!(!twice.contains("mpvpn_up"), "{twice}");
    }
}
