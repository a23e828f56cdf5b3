//! The request for a certificate, and the answers to the challenges of a CA.

use std::collections::BTreeMap;

use http_body_util::BodyExt;
use hyper::{Method, Response, StatusCode};

use crate::{Error, Result, http, identity::Identity};

/// The protocol by which a CA asks for the answer to TLS-ALPN-01 (RFC 8737 §6.2).
pub const ACME_TLS_ALPN: &[u8] = b"acme-tls/1";
/// Where a CA looks for the answer to HTTP-01 (RFC 8555 §8.3).
const HTTP_FOLDER: &str = "/.well-known/acme-challenge/";
/// Bytes of a SHA-256.
const DIGEST_BYTES: usize = 32;

/// A new private key, as PEM, and the request for a certificate for these names with it, as DER (RFC 2986).
///
/// # Errors
/// If no key can be made.
pub fn certificate_request(domains: &[String]) -> Result<(String, Vec<u8>)> {
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?;
    let mut params = rcgen::CertificateParams::new(domains)?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    let request = params.serialize_request(&key)?;
    Ok((key.serialize_pem(), request.der().to_vec()))
}

/// The certificate that answers TLS-ALPN-01 for a name; `digest` is the SHA-256 of the key authorization (RFC
/// 8737 §3).
///
/// # Errors
/// If no certificate can be made.
pub fn tls_alpn_certificate(domain: &str, digest: &[u8]) -> Result<Identity> {
    if digest.len() != DIGEST_BYTES {
        return Err(Error::Tls(rustls::Error::General(format!("a digest of {} bytes", digest.len()))));
    }
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?;
    let mut params = rcgen::CertificateParams::new(vec![domain.to_owned()])?;
    params.custom_extensions = vec![rcgen::CustomExtension::new_acme_identifier(digest)];
    let cert = params.self_signed(&key)?;
    Identity::unchecked(key.serialize_der(), cert.der().clone())
}

/// Answers HTTP-01 on `listener` until dropped, inside a tokio runtime: the key authorization (RFC 8555 §8.1)
/// of each token.
pub async fn serve_http_challenges(listener: &tokio::net::TcpListener, answers: BTreeMap<String, String>) {
    let accept = async || listener.accept().await.map(|(stream, _)| stream);
    let answers = std::sync::Arc::new(answers);
    http::serve("the answer to HTTP-01", accept, move |request| {
        let is_read = [Method::GET, Method::HEAD].contains(request.method());
        let token = request.uri().path().strip_prefix(HTTP_FOLDER).filter(|_| is_read);
        let found = token.and_then(|token| answers.get(token)).cloned();
        async move {
            match found {
                Some(answer) => http::complete(answer),
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
    fn the_answer_to_tls_alpn_has_the_digest_in_a_critical_extension() {
        let identity = tls_alpn_certificate("vpn.example", &[7; 32]).unwrap();
        let (_, cert) = x509_parser::parse_x509_certificate(&identity.certs()[0]).unwrap();
        // id-pe-acmeIdentifier (RFC 8737 §6.1).
        let found = cert.extensions().iter().find(|e| e.oid.to_id_string() == "1.3.6.1.5.5.7.1.31").unwrap();
        assert!(found.critical);
        assert_eq!(found.value, [&[4, 32][..], &[7; 32]].concat());
        assert!(identity.is_for(&["vpn.example".to_owned()]));
        assert!(tls_alpn_certificate("vpn.example", &[7; 31]).is_err());
    }

    #[test]
    fn a_request_is_for_all_names() {
        let domains = ["a.example", "b.example"].map(String::from);
        let (key, request) = certificate_request(&domains).unwrap();
        assert!(key.starts_with("-----BEGIN PRIVATE KEY-----"), "{key}");
        let text = String::from_utf8_lossy(&request).into_owned();
        assert!(domains.iter().all(|domain| text.contains(domain.as_str())));
    }

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
