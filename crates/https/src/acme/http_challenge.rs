//! The answers to HTTP-01 challenges of a CA (RFC 8555 §8.3).

use std::collections::BTreeMap;

use http_body_util::BodyExt;
use hyper::{Method, Response, StatusCode};

/// Where a CA looks for the answer to HTTP-01 (RFC 8555 §8.3).
const HTTP_FOLDER: &str = "/.well-known/acme-challenge/";

/// Answers HTTP-01 on `listener` until dropped, inside a tokio runtime: the key authorization (RFC 8555 §8.1)
/// of each token.
pub(super) async fn serve_http_challenges(
    listener: &tokio::net::TcpListener,
    answers: BTreeMap<String, String>,
) {
    let accept = async || listener.accept().await.map(|(stream, _)| ((), stream));
    let answers = std::sync::Arc::new(answers);
    mpvpn_http::serve("the answer to HTTP-01", accept, move |request, _| {
        let is_read = [Method::GET, Method::HEAD].contains(request.method());
        let token = request.uri().path().strip_prefix(HTTP_FOLDER).filter(|_| is_read);
        let found = token.and_then(|token| answers.get(token)).cloned();
        async move {
            match found {
                Some(answer) => mpvpn_http::complete(answer),
                None => {
                    let mut response = Response::new(http_body_util::Empty::new().boxed_unsync());
                    *response.status_mut() = StatusCode::NOT_FOUND;
                    response
                }
            }
        }
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_has_its_answer_and_all_else_is_not_found() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};

        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let answers = BTreeMap::from([("token".to_owned(), "token.thumbprint".to_owned())]);
            let ask = async {
                for (request, expected) in [
                    ("GET /.well-known/acme-challenge/token", "token.thumbprint"),
                    ("GET /.well-known/acme-challenge/other", "404"),
                    ("POST /.well-known/acme-challenge/token", "404"),
                    ("GET /token", "404"),
                    ("GET /.well-known/acme-challenge/", "404"),
                ] {
                    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
                    let text = format!("{request} HTTP/1.1\r\nHost: vpn.example\r\n\r\n");
                    stream.write_all(text.as_bytes()).await.unwrap();
                    let mut answer = String::new();
                    stream.read_to_string(&mut answer).await.unwrap();
                    assert!(answer.contains(expected), "{request}: {answer}");
                }
            };
            tokio::select! {
                () = serve_http_challenges(&listener, answers) => panic!("it has no end"),
                () = ask => {}
            }
        });
    }
}
