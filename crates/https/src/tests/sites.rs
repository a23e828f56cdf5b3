//! The site that clients without credentials see.

use std::{fs, os::unix::fs::symlink};

use mpvpn_config::{Site as SiteConfig, SiteContent};
use mpvpn_identity::cert_files::CertFiles;
use tokio::{io::AsyncBufReadExt, net::TcpListener, sync::mpsc};

use super::*;
use crate::ResponsePart;

/// Status, fields and content of a response over HTTP/2.
async fn get(
    client: &mut h2::client::SendRequest<Bytes>,
    request: http::request::Builder,
) -> (u16, http::HeaderMap, String) {
    let (response, _) = client.send_request(request.body(()).unwrap(), true).unwrap();
    let (head, mut body) = timeout(SOON, response).await.unwrap().unwrap().into_parts();
    let mut content = Vec::new();
    while let Some(data) = timeout(SOON, body.data()).await.unwrap() {
        let data = data.unwrap();
        body.flow_control().release_capacity(data.len()).unwrap();
        content.extend_from_slice(&data);
    }
    (head.status.as_u16(), head.headers, String::from_utf8_lossy(&content).into_owned())
}

fn of_files(root: &std::path::Path) -> SiteConfig {
    SiteConfig { content: SiteContent::Root(root.into()), ..SiteConfig::default() }
}

#[tokio::test]
async fn files_are_shown_and_nothing_beside_them() {
    let www = tempfile::tempdir().unwrap();
    let root = www.path().join("root");
    fs::create_dir_all(root.join("sub")).unwrap();
    fs::write(root.join("index.html"), "<p>hello").unwrap();
    fs::write(root.join("sub/index.html"), "<p>sub").unwrap();
    fs::write(root.join("large.bin"), vec![b'x'; 1_000_000]).unwrap();
    fs::write(root.join(".secret"), "secret").unwrap();
    fs::write(www.path().join("outside"), "secret").unwrap();
    symlink("../outside", root.join("out.html")).unwrap();
    let server = TestServer::start(|config| config.site = of_files(&root));
    let mut client = server.http2().await;
    let uri = |path: &str| format!("https://{}{path}", server.address);

    let (status, head, page) = get(&mut client, Request::get(uri("/"))).await;
    assert_eq!(
        (status, page.as_str(), &head["content-type"]),
        (200, "<p>hello", &"text/html; charset=utf-8".parse().unwrap())
    );
    let known = head["last-modified"].clone();
    let request = Request::get(uri("/")).header("if-modified-since", known);
    assert_eq!(get(&mut client, request).await.0, 304);
    assert_eq!(get(&mut client, Request::get(uri("/sub/"))).await.2, "<p>sub");
    let (status, head, _) = get(&mut client, Request::get(uri("/sub"))).await;
    assert_eq!((status, head["location"].to_str().unwrap()), (308, "/sub/"));
    let (status, head, content) = get(&mut client, Request::get(uri("/large.bin"))).await;
    assert_eq!(
        (status, content.len(), head["content-length"].to_str().unwrap()),
        (200, 1_000_000, "1000000")
    );
    let (status, head, content) = get(&mut client, Request::head(uri("/large.bin"))).await;
    assert_eq!((status, content.len(), head["content-length"].to_str().unwrap()), (200, 0, "1000000"));
    for hidden in ["/.secret", "/out.html", "/../outside", "/%2e%2e/outside", "/nothing", "/sub/nothing"] {
        assert_eq!(get(&mut client, Request::get(uri(hidden))).await.0, 404, "{hidden}");
    }
    assert_eq!(get(&mut client, Request::post(uri("/"))).await.0, 405);
    let (answer, _) = server.http1("GET / HTTP/1.1\r\nhost: x").await;
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("\r\nContent-Length: 8\r\n"), "{answer}");
}

/// Answers each connection with the request that it received.
async fn echo_head(listener: TcpListener) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(async move {
            let mut stream = tokio::io::BufReader::new(stream);
            let (mut head, mut length) = (String::new(), 0);
            while !head.ends_with("\r\n\r\n") {
                let from = head.len();
                stream.read_line(&mut head).await.unwrap();
                if let Some(value) = head[from..].strip_prefix("content-length: ") {
                    length = value.trim().parse().unwrap();
                }
            }
            let mut content = vec![0; length];
            stream.read_exact(&mut content).await.unwrap();
            let answer = format!("{head}{}", String::from_utf8(content).unwrap());
            let head = format!(
                "HTTP/1.1 200 OK\r\nserver: Upstream\r\nkeep-alive: 5\r\nconnection: x-hop\r\nx-hop: 1\r\n\
                 content-length: {}\r\n\r\n",
                answer.len()
            );
            stream.write_all(format!("{head}{answer}").as_bytes()).await.unwrap();
        });
    }
}

#[tokio::test]
async fn the_pages_of_another_server_are_shown_as_its_own() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener.local_addr().unwrap();
    let answering = tokio::spawn(echo_head(listener));
    let content = SiteContent::Upstream(upstream.to_string());
    let server = TestServer::start(|config| config.site = SiteConfig { content, ..SiteConfig::default() });
    let mut client = server.http2().await;
    let uri = format!("https://{}/path?query", server.address);

    let request = Request::get(&uri).header("accept", "text/html").header("te", "trailers");
    let claims = [("x-forwarded-for", "10.1.1.1"), ("forwarded", "for=10.1.1.1"), ("x-real-ip", "10.1.1.1")];
    let request = claims.into_iter().fold(request, |request, (name, value)| request.header(name, value));
    let (status, head, asked) = get(&mut client, request).await;
    assert_eq!((status, head["server"].to_str().unwrap()), (200, "Upstream"));
    assert!(!head.contains_key("x-hop") && !head.contains_key("keep-alive"), "{head:?}");
    assert!(asked.starts_with("GET /path?query HTTP/1.1\r\n"), "{asked}");
    assert!(asked.contains(&format!("\r\nhost: {}\r\n", server.address)), "{asked}");
    assert!(asked.contains("\r\nx-forwarded-for: 127.0.0.1\r\n") && !asked.contains("\r\nte:"), "{asked}");
    assert!(!asked.contains("10.1.1.1"), "a visitor says which address it has: {asked}");

    let post = Request::post(&uri).header("content-length", "5").body(()).unwrap();
    let (response, mut send) = client.send_request(post, false).unwrap();
    send.send_data(Bytes::from_static(b"hello"), true).unwrap();
    let mut body = timeout(SOON, response).await.unwrap().unwrap().into_body();
    let said = timeout(SOON, body.data()).await.unwrap().unwrap().unwrap();
    assert!(said.ends_with(b"\r\n\r\nhello"), "{}", said.escape_ascii());

    answering.abort();
    let _ = answering.await;
    assert_eq!(get(&mut client, Request::get(&uri)).await.0, 502);
    // Requests that are not for pages are not forwarded.
    let (response, _send) = client.send_request(server.self_target_request(None), true).unwrap();
    assert_eq!(timeout(SOON, response).await.unwrap().unwrap().status(), 405);
}

#[tokio::test]
async fn who_hides_answers_wrong_credentials_as_none() {
    let server = TestServer::start(|config| config.site.hide = true);
    let mut client = server.http2().await;
    for credentials in [None, Some("Bearer nobody"), Some("Basic eDp5")] {
        let (response, _send) = client.send_request(server.self_target_request(credentials), true).unwrap();
        let response = timeout(SOON, response).await.unwrap().unwrap();
        assert_eq!(response.status(), 405, "{credentials:?}");
        assert!(!response.headers().contains_key("proxy-status"));
    }
    let (response, _send) =
        client.send_request(server.self_target_request(Some(&server.token)), false).unwrap();
    assert_eq!(timeout(SOON, response).await.unwrap().unwrap().status(), 200);
}

/// Header section and content over HTTP/3, read by a visitor who takes one piece at a time. No more than one
/// may be there.
async fn over_http3(site: &Site, request: &[(&'static str, &'static str)]) -> (Headers, Vec<u8>) {
    let mut headers = Headers::new();
    request.iter().for_each(|(name, value)| headers.push(*name, *value));
    let (to_visitor, mut parts) = mpsc::unbounded_channel();
    let deliver = Arc::new(move |part| drop(to_visitor.send(part)));
    let from = "192.0.2.1:1024".parse().unwrap();
    tokio::spawn(site.clone().answer_http3(headers, None, from, deliver));
    let (mut head, mut content) = (None, Vec::new());
    loop {
        match timeout(SOON, parts.recv()).await.unwrap().unwrap() {
            ResponsePart::Head(headers) => head = Some(headers),
            ResponsePart::Content(piece, permit) => {
                sleep(Duration::from_millis(5)).await;
                assert!(parts.is_empty(), "another piece came before this one had left");
                content.extend_from_slice(&piece);
                drop(permit);
            }
            ResponsePart::End => return (head.unwrap(), content),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn every_version_of_http_says_the_same() {
    let www = tempfile::tempdir().unwrap();
    fs::write(www.path().join("page.txt"), vec![b'x'; 1_000_000]).unwrap();
    let config = of_files(www.path());
    let server = TestServer::start(|server| server.site = config.clone());
    let mut client = server.http2().await;
    let site = Site::new(&config).unwrap();
    for (path, status) in [("/page.txt", 200), ("/nothing", 404)] {
        let request = Request::get(format!("https://{}{path}", server.address));
        let (over_http2, mut head, page) = get(&mut client, request).await;
        let asked = [(":method", "GET"), (":scheme", "https"), (":authority", "x"), (":path", path)];
        let (answer, content) = over_http3(&site, &asked).await;
        assert_eq!((over_http2, answer.status()), (status, Some(status)));
        assert!(content == page.as_bytes(), "{path}: {} bytes", content.len());
        let offered = format!("h3=\":{}\"; ma=2592000", server.address.port());
        assert_eq!(head.remove("alt-svc").unwrap(), offered.as_str());
        let (http1, _) = server.http1(&format!("GET {path} HTTP/1.1\r\nhost: x")).await;
        assert_eq!(http1.lines().count(), head.len() + 3, "{http1}");
        for (name, value) in head.iter().filter(|(name, _)| *name != "date") {
            assert_eq!(answer.single(name.as_str()), Some(value.as_bytes()), "{path}: {name}");
            let line = format!("\r\n{name}: {}\r\n", value.to_str().unwrap());
            assert!(
                format!("{http1}\r\n").to_lowercase().contains(&line.to_lowercase()),
                "{line} in {http1}"
            );
        }
    }
    let malformed = [(":method", "GET"), (":scheme", "https"), (":authority", "x y"), (":path", "/page.txt")];
    assert_eq!(over_http3(&site, &malformed).await.0.status(), Some(400));
}

#[tokio::test]
async fn odd_requests_over_http1_are_answered_in_the_words_of_caddy() {
    let server = TestServer::start(|_| {});
    let ask = async |request: &str| {
        let mut tls = server.tls(b"http/1.1").await;
        tls.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        timeout(SOON, tls.read_to_string(&mut answer)).await.unwrap().unwrap();
        answer
    };
    let unsupported = "505 HTTP Version Not Supported: unsupported protocol version";
    for (request, status) in [
        ("nonsense\r\n\r\n", "400 Bad Request"),
        ("GET / HTTP/1.1\r\nHost: a\r\nb\r\n\r\n", "400 Bad Request"),
        ("GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", "400 Bad Request"),
        ("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "400 Bad Request"),
        ("GET / HTTP/1.1\r\nHost: a\r\nb c: d\r\n\r\n", "400 Bad Request: invalid header name"),
        ("GET / HTTP/1.1\r\n\r\n", "400 Bad Request: missing required Host header"),
        ("GET / HTTP/2.0\r\nHost: a\r\n\r\n", unsupported),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: x\r\n\r\n", "501 Not Implemented"),
    ] {
        let content = if status.starts_with("501") { "Unsupported transfer encoding" } else { status };
        let expected = format!(
            "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n{content}"
        );
        assert_eq!(ask(request).await, expected, "{request}");
    }
    let names = |answer: &str| {
        answer.lines().map(|line| line.split(':').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let failed = ask("GET / HTTP/1.1\r\nHost: a\r\nExpect: x\r\n\r\n").await;
    assert_eq!(
        names(&failed),
        ["HTTP/1.1 417 Expectation Failed", "Connection", "Date", "Content-Length", ""]
    );
    let (answer, _) = server.http1("OPTIONS * HTTP/1.1\r\nhost: a").await;
    assert_eq!(names(&answer), ["HTTP/1.1 200 OK", "Content-Length", "Date", ""]);
    // A second request on a connection is refused alike, and one that is fine is not.
    let both = ask("GET / HTTP/1.1\r\nHost: a\r\n\r\nnonsense\r\n\r\n").await;
    assert!(both.starts_with("HTTP/1.1 404 ") && both.contains("\r\n\r\nHTTP/1.1 400 "), "{both}");
}

#[tokio::test]
async fn the_name_asked_for_decides_which_certificate_is_shown() {
    let home = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["www.example".to_owned()]).unwrap();
    let files = CertFiles { cert: home.path().join("crt"), key: home.path().join("key") };
    fs::write(&files.cert, made.cert.pem()).unwrap();
    fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
    let server = TestServer::start(|config| config.more_certs = vec![files]);
    for (name, is_other) in [("www.example", true), ("vpn.example", false)] {
        let config = mpvpn_identity::tls::client_config(&Trust::Insecure, &[b"h2"]).unwrap();
        let tcp = TcpStream::connect(server.address).await.unwrap();
        let name = ServerName::try_from(name).unwrap();
        let tls = TlsConnector::from(Arc::new(config)).connect(name, tcp).await.unwrap();
        let shown = &tls.get_ref().1.peer_certificates().unwrap()[0];
        assert_eq!(shown == made.cert.der(), is_other);
    }
}
