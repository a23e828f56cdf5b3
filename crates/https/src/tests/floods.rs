//! Floods, slow clients, and clients behind a load balancer.

use super::*;

/// Connects without sending anything.
async fn silent(server: &TestServer) -> TcpStream {
    TcpStream::connect(server.address).await.unwrap()
}

/// Whether the server closes a connection within [`SOON`].
async fn closes(mut stream: impl AsyncRead + Unpin) -> bool {
    let mut buffer = [0; 1024];
    let end = async {
        while let Ok(count) = stream.read(&mut buffer).await {
            if count == 0 {
                break;
            }
        }
    };
    timeout(SOON, end).await.is_ok()
}

/// The number of slots in use.
fn used_slots(room: &Arc<Limiter<ClientNetwork>>) -> usize {
    room.in_use()
}

#[tokio::test]
async fn ten_thousand_that_never_finish_tls_leave_the_others_alone() {
    let server = TestServer::start(|config| {
        config.proxy_protocol_from = vec!["127.0.0.0/8".parse().unwrap()];
    });
    let context = Arc::clone(&server.context);
    let mut client = server.http2_of("192.0.2.1:1000").await;
    let (response, send) =
        client.send_request(server.self_target_request(Some(&server.token)), false).unwrap();
    let response = timeout(SOON, response).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    // From many addresses, a thousand at a time, because the process may not have more descriptors.
    for round in 0..10_u8 {
        let mut waiting = Vec::new();
        for number in 0..1000_u16 {
            let mut stream = silent(&server).await;
            let [high, low] = number.to_be_bytes();
            let line = format!("PROXY TCP4 10.{round}.{high}.{low} 192.0.2.2 1000 443\r\n");
            // An evicted connection may be closed already.
            let _ = stream.write_all(line.as_bytes()).await;
            waiting.push(stream);
            assert!(used_slots(&context.handshakes) <= MAX_HANDSHAKES);
        }
    }
    let mut again = server.http2_of("192.0.2.9:1000").await;
    let (other, _send) = again.send_request(server.self_target_request(Some(&server.token)), false).unwrap();
    assert_eq!(timeout(SOON, other).await.unwrap().unwrap().status(), StatusCode::OK);
    send_and_receive_echo(H2Stream::new(send, response.into_body())).await;
}

#[tokio::test]
async fn one_source_does_not_take_all_the_places() {
    let server = TestServer::start(|_| {});
    let mut streams = Vec::new();
    for _ in 0..MAX_HANDSHAKES_PER_NETWORK + 10 {
        streams.push(silent(&server).await);
    }
    let refused = streams.split_off(MAX_HANDSHAKES_PER_NETWORK);
    for stream in refused {
        assert!(closes(stream).await, "one too many");
    }
    assert_eq!(used_slots(&server.context.handshakes), MAX_HANDSHAKES_PER_NETWORK);
    drop(streams);
    // Slots are released as soon as the server has seen the close.
    let asked = Instant::now();
    while used_slots(&server.context.handshakes) > 0 {
        assert!(asked.elapsed() < SOON, "places are not given back");
        sleep(Duration::from_millis(5)).await;
    }
    server.http2().await;
}

/// A frame of HTTP/2 (RFC 9113 §4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

#[tokio::test]
async fn streams_that_are_reset_at_once_end_the_connection() {
    const HEADERS: u8 = 1;
    const RST_STREAM: u8 = 3;
    const SETTINGS: u8 = 4;
    const GOAWAY: u8 = 7;
    const ENHANCE_YOUR_CALM: u32 = 11;
    let server = TestServer::start(|_| {});
    let mut tls = server.tls(b"h2").await;
    let mut flood = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    flood.extend(frame(SETTINGS, 0, 0, &[]));
    for stream in (1..20_000).step_by(2) {
        // GET https://x/ with END_STREAM, then a reset.
        flood.extend(frame(HEADERS, 5, stream, b"\x82\x87\x84\x01\x01x"));
        flood.extend(frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes()));
    }
    // The server may close before it has read everything.
    let _ = tls.write_all(&flood).await;
    let mut said = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(Ok(count @ 1..)) = timeout(SOON, tls.read(&mut buffer)).await {
        said.extend_from_slice(&buffer[..count]);
    }
    let (mut rest, mut calmed) = (&said[..], false);
    while rest.len() >= 9 {
        let length = u32::from_be_bytes([0, rest[0], rest[1], rest[2]]) as usize;
        let code = rest.get(13..17).map(|code| u32::from_be_bytes(code.try_into().unwrap()));
        calmed |= rest[3] == GOAWAY && code == Some(ENHANCE_YOUR_CALM);
        rest = &rest[(9 + length).min(rest.len())..];
    }
    assert!(calmed, "{}", said.escape_ascii());
    server.http2().await;
}

#[tokio::test]
async fn who_is_slow_is_waited_for_only_so_long() {
    let server = TestServer::start(|_| {});
    let no_tls = silent(&server).await;
    let no_http2 = server.tls(b"h2").await;
    let (reader, mut writer) = tokio::io::split(server.tls(b"http/1.1").await);
    tokio::spawn(async move {
        let head = b"GET / HTTP/1.1\r\nhost: x\r\nx: ";
        for byte in [&head[..], &[b'x'; 1000]].concat() {
            if writer.write_all(&[byte]).await.is_err() {
                return;
            }
            sleep(Duration::from_millis(200)).await;
        }
    });
    let (no_tls, no_http2, no_head) = tokio::join!(closes(no_tls), closes(no_http2), closes(reader));
    assert!(no_tls && no_http2 && no_head, "closed: {no_tls}, {no_http2}, {no_head}");
}

#[tokio::test]
async fn a_head_that_is_too_long_is_refused_and_the_connection_lives() {
    let server = TestServer::start(|_| {});
    let mut client = server.http2().await;
    let mut request = Request::get(format!("https://{}/", server.address));
    for number in 0..40 {
        request = request.header(format!("x-{number}"), "x".repeat(1000));
    }
    let (response, _) = client.send_request(request.body(()).unwrap(), true).unwrap();
    match timeout(SOON, response).await.unwrap() {
        Ok(response) => assert_eq!(response.status(), 431),
        Err(error) => assert!(error.is_reset() || error.is_go_away(), "{error}"),
    }
    server.http2().await;
}

#[tokio::test]
async fn behind_a_load_balancer_the_clients_count_and_nobody_else_is_believed() {
    let server = TestServer::start(|config| {
        config.proxy_protocol_from = vec!["127.0.0.0/8".parse().unwrap()];
    });
    server.http2_of("192.0.2.1:1000").await;
    // From a load balancer's network, the header is required.
    assert!(closes(silent_with(&server, b"\x16\x03\x01\x02\x00").await).await);

    let server = TestServer::start(|config| {
        config.proxy_protocol_from = vec!["192.0.2.0/24".parse().unwrap()];
    });
    server.http2().await;
    let line = b"PROXY TCP4 198.51.100.1 192.0.2.2 1000 443\r\n";
    assert!(closes(silent_with(&server, line).await).await, "no TLS");
}

async fn silent_with(server: &TestServer, bytes: &[u8]) -> TcpStream {
    let mut stream = silent(server).await;
    stream.write_all(bytes).await.unwrap();
    stream
}
