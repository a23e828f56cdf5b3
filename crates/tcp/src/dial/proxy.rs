//! Asks an HTTP proxy for a connection to the server (CONNECT, RFC 9110 §9.3.6).

use std::io;

use mpvpn_input::values::ServerAddr;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::ProxyTarget;

/// The largest head of a response (bytes).
const MAX_HEAD_BYTES: usize = 8 << 10;
/// The largest number of fields in it.
const MAX_FIELDS: usize = 64;
/// Characters of the proxy's reason phrase that are shown.
const MAX_REASON_CHARS: usize = 60;

/// Why a proxy gives no connection.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// 407 without configured credentials.
    #[error("the proxy requires credentials (407): give --via http://USER:PASSWORD@PROXY:PORT")]
    CredentialsMissing,
    /// 407, or 401 from some proxies, with configured credentials.
    #[error("the proxy does not accept this name and password ({0}): check those in --via")]
    CredentialsRefused(u16),
    /// 403.
    #[error(
        "the proxy forbids connections to {0} (403): ask its operator to allow them, or use port 443 at the server"
    )]
    Forbidden(ServerAddr),
    /// Any other status that is not 2xx.
    #[error("the proxy refuses a connection to {server}: {status} {reason}")]
    Status {
        /// The target of the request.
        server: ServerAddr,
        /// The status code.
        status: u16,
        /// The reason phrase, reduced to printable characters.
        reason: String,
    },
    /// The response is not HTTP/1.
    #[error("the response of the proxy is not HTTP/1.1: it may be a proxy of another kind")]
    NotHttp,
    /// The proxy closed the connection.
    #[error("the proxy ended the connection without an answer")]
    Closed,
    /// The connection broke.
    #[error("the connection to the proxy broke: {0}")]
    Broken(#[from] io::Error),
}

/// Sends CONNECT on `stream`, which afterwards leads to the server.
pub(super) async fn send_connect<S>(stream: &mut S, proxy_target: &ProxyTarget) -> Result<(), ProxyError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let server = &proxy_target.server;
    let mut request = format!("CONNECT {server} HTTP/1.1\r\nHost: {server}\r\n");
    if let Some(credentials) = &proxy_target.credentials {
        request.push_str(&format!("Proxy-Authorization: {}\r\n", credentials.authorization()));
    }
    request.push_str("\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut head = Vec::with_capacity(1024);
    loop {
        let room = MAX_HEAD_BYTES - head.len();
        if (&mut *stream).take(room as u64).read_buf(&mut head).await? == 0 {
            return Err(if room == 0 { ProxyError::NotHttp } else { ProxyError::Closed });
        }
        if let Some(done) = parse_response(&head, proxy_target) {
            return done;
        }
    }
}

/// The meaning of a response; `None` if it is incomplete.
fn parse_response(head: &[u8], proxy_target: &ProxyTarget) -> Option<Result<(), ProxyError>> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut answer = httparse::Response::new(&mut fields);
    let length = match answer.parse(head) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return None,
        Err(_) => return Some(Err(ProxyError::NotHttp)),
    };
    let (status, reason) = (answer.code.unwrap_or_default(), answer.reason.unwrap_or_default());
    Some(match status {
        // The final response follows (RFC 9110 §15.2).
        100..200 => return parse_response(&head[length..], proxy_target),
        // A TLS server waits for its client, so no bytes can follow.
        200..300 if head.len() == length => Ok(()),
        200..300 => Err(ProxyError::NotHttp),
        401 | 407 if proxy_target.credentials.is_some() => Err(ProxyError::CredentialsRefused(status)),
        407 => Err(ProxyError::CredentialsMissing),
        403 => Err(ProxyError::Forbidden(proxy_target.server.clone())),
        _ => {
            let reason =
                reason.chars().filter(|c| c.is_ascii_graphic() || *c == ' ').take(MAX_REASON_CHARS).collect();
            Err(ProxyError::Status { server: proxy_target.server.clone(), status, reason })
        }
    })
}

#[cfg(test)]
mod tests {
    use mpvpn_config::ViaProxy;

    use super::*;

    fn proxy_target(via: &str) -> ProxyTarget {
        let via: ViaProxy = via.parse().unwrap();
        ProxyTarget { server: "vpn.example:443".parse().unwrap(), credentials: via.credentials }
    }

    /// Returns the result of a response that arrives in these pieces, and the request that was sent.
    fn ask_proxy(via: &str, pieces: &[&str]) -> (Result<(), ProxyError>, String) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (mut here, mut there) = tokio::io::duplex(64 << 10);
            let proxy_target = proxy_target(via);
            let answer = async {
                let mut asked = vec![0; 1024];
                let count = there.read(&mut asked).await.unwrap();
                for piece in pieces {
                    there.write_all(piece.as_bytes()).await.unwrap();
                    tokio::task::yield_now().await;
                }
                drop(there);
                String::from_utf8(asked[..count].to_vec()).unwrap()
            };
            tokio::join!(send_connect(&mut here, &proxy_target), answer)
        })
    }

    #[test]
    fn a_proxy_is_asked_by_connect_with_credentials_where_there_are_some() {
        let (done, asked) = ask_proxy("http://proxy", &["HTTP/1.1 200 OK\r\nVia: x\r\n", "\r\n"]);
        done.unwrap();
        assert_eq!(asked, "CONNECT vpn.example:443 HTTP/1.1\r\nHost: vpn.example:443\r\n\r\n");
        let (done, asked) =
            ask_proxy("http://a:b@proxy", &["HTTP/1.1 103 Hints\r\n\r\nHTTP/1.0 200 established\r\n\r\n"]);
        done.unwrap();
        assert!(asked.ends_with("\r\nProxy-Authorization: Basic YTpi\r\n\r\n"), "{asked}");
    }

    #[test]
    fn refusals_say_what_to_do() {
        let error = |via, answer| ask_proxy(via, &[answer]).0.unwrap_err().to_string();
        let wants = "HTTP/1.1 407 Authentication Required\r\nProxy-Authenticate: Basic\r\n\r\n";
        assert!(error("http://proxy", wants).contains("give --via http://USER:PASSWORD@"));
        assert!(error("http://a:b@proxy", wants).contains("check those in --via"));
        assert!(error("http://proxy", "HTTP/1.1 403 Filtered\r\n\r\n").contains("forbids"));
        let error_of_proxy = error("http://proxy", "HTTP/1.1 502 Bad\u{7f} Gate\r\n\r\n");
        assert!(
            error_of_proxy.contains("not HTTP") || error_of_proxy.contains("502 Bad Gate"),
            "{error_of_proxy}"
        );
    }

    #[test]
    fn what_is_no_answer_is_bounded_and_refused() {
        let of = |pieces: &[&str]| ask_proxy("http://proxy", pieces).0.unwrap_err();
        assert!(matches!(of(&[]), ProxyError::Closed));
        assert!(matches!(of(&["HTTP/1.1 200 OK\r\n"]), ProxyError::Closed));
        assert!(matches!(of(&["SSH-2.0-x\r\n"]), ProxyError::NotHttp));
        assert!(matches!(of(&["HTTP/1.1 200 OK\r\n\r\nmore"]), ProxyError::NotHttp));
        let long = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(MAX_HEAD_BYTES));
        assert!(matches!(of(&[&long]), ProxyError::NotHttp));
        let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: y\r\n".repeat(MAX_FIELDS + 1));
        assert!(matches!(of(&[&many]), ProxyError::NotHttp));
    }
}
