//! TCP connections of users whose access ends.

use mpvpn_users::{ExpiryOption, LockedUsers, SettingsChange, UserSettings, Users};

use super::*;

/// The time after which nothing of a user without access lives.
pub(super) const LIMIT: Duration = Duration::from_secs(1);

/// The TCP transport of a user over HTTP/2, and its connection.
async fn http2_transport(server: &TestServer, token: &str) -> (H2Stream, h2::client::SendRequest<Bytes>) {
    let mut client = server.http2().await;
    let (response, send) = client.send_request(server.self_target_request(Some(token)), false).unwrap();
    let response = timeout(SOON, response).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    (H2Stream::new(send, response.into_body()), client)
}

/// Waits until nothing can be read any more.
async fn ends(stream: &mut (impl AsyncRead + Unpin)) -> bool {
    let end = async { while stream.read(&mut [0; 1000]).await.is_ok_and(|count| count > 0) {} };
    timeout(LIMIT, end).await.is_ok()
}

/// Waits until a connection takes no more requests.
async fn is_closed(client: h2::client::SendRequest<Bytes>) -> bool {
    let closed = async {
        while client.clone().ready().await.is_ok() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LIMIT, closed).await.is_ok()
}

#[tokio::test]
async fn connections_of_a_user_end_with_the_access_and_those_of_others_stay() {
    let expired = "2020-01-01".parse::<ExpiryOption>().unwrap().resolve(std::time::SystemTime::now());
    let expire = SettingsChange { expires: Some(Some(expired)), ..SettingsChange::default() };
    type Change<'a> = &'a dyn Fn(&mut LockedUsers);
    let changes: [(&str, Change<'_>); 4] = [
        ("revoked", &|users| users.revoke("alice").unwrap()),
        ("rotated", &|users| drop(users.rotate("alice").unwrap())),
        ("expired", &|users| users.set("alice", &expire).unwrap()),
        ("removed", &|users| users.remove("alice").unwrap()),
    ];
    for (name, change) in changes {
        let server = TestServer::start(|_| {});
        let file = server._state_dir.path().join("users.toml");
        let shared = server.credentials.authenticator.users().unwrap();
        let mut users = LockedUsers::open(&file).unwrap();
        let alice = users.add("alice", &UserSettings::default()).unwrap().authorization();
        drop(users);
        shared.replace(Users::load(&file).unwrap());

        let (mut held, held_by) = http2_transport(&server, &alice).await;
        let (left, parked) = http2_transport(&server, &alice).await;
        drop(left);
        let head = format!(
            "GET {} HTTP/1.1\r\nhost: {}\r\nconnection: Upgrade\r\nupgrade: connect-udp\r\n\
             capsule-protocol: ?1\r\nauthorization: {alice}",
            server.self_target_path(),
            server.address
        );
        let (answer, mut upgraded) = server.http1(&head).await;
        assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
        let (other, mut other_by) = http2_transport(&server, &server.token).await;
        // A connection belongs to one user.
        let (response, _) = other_by.send_request(server.self_target_request(Some(&alice)), true).unwrap();
        assert_eq!(timeout(SOON, response).await.unwrap().unwrap().status(), StatusCode::MISDIRECTED_REQUEST);

        change(&mut LockedUsers::open(&file).unwrap());
        shared.replace(Users::load(&file).unwrap());
        server.context.access_ends.send_replace(());
        assert!(ends(&mut held).await && is_closed(held_by).await, "{name}: a TCP transport over HTTP/2");
        assert!(is_closed(parked).await, "{name}: a connection without requests");
        assert!(ends(&mut upgraded).await, "{name}: a TCP transport over HTTP/1.1");
        send_and_receive_echo(other).await;
    }
}

#[tokio::test]
async fn a_newer_token_keeps_nothing_that_was_opened_with_the_older_one() {
    let server = TestServer::start(|_| {});
    let file = server._state_dir.path().join("users.toml");
    let shared = server.credentials.authenticator.users().unwrap();
    let older = LockedUsers::open(&file).unwrap().add("alice", &UserSettings::default()).unwrap();
    shared.replace(Users::load(&file).unwrap());
    let (mut held, mut client) = http2_transport(&server, &older.authorization()).await;
    let newer = LockedUsers::open(&file).unwrap().rotate("alice").unwrap().authorization();
    shared.replace(Users::load(&file).unwrap());
    // Before the connection learns of it.
    let (response, _) = client.send_request(server.self_target_request(Some(&newer)), false).unwrap();
    let status = timeout(SOON, response).await.unwrap().unwrap().status();
    assert!([StatusCode::OK, StatusCode::MISDIRECTED_REQUEST].contains(&status), "{status}");
    server.context.access_ends.send_replace(());
    assert!(ends(&mut held).await && is_closed(client).await, "what the older token has opened lives");
}

#[tokio::test]
async fn a_user_without_access_is_told_why_where_a_stranger_sees_the_site_and_stays_a_stranger() {
    let expired = "2020-01-01".parse::<ExpiryOption>().unwrap().resolve(std::time::SystemTime::now());
    for hide in [false, true] {
        let server = TestServer::start(|config| config.site.hide = hide);
        let file = server._state_dir.path().join("users.toml");
        let settings = UserSettings { expires: Some(expired), ..UserSettings::default() };
        let alice = LockedUsers::open(&file).unwrap().add("alice", &settings).unwrap().authorization();
        server.credentials.authenticator.users().unwrap().replace(Users::load(&file).unwrap());
        let mut client = server.http2().await;
        let mut answers = Vec::new();
        for token in ["Bearer nobody", &alice] {
            let (response, _send) =
                client.send_request(server.self_target_request(Some(token)), true).unwrap();
            let response = timeout(SOON, response).await.unwrap().unwrap();
            let reason = response.headers().get("proxy-status").map(|text| text.to_str().unwrap().to_owned());
            answers.push((response.status().as_u16(), reason));
        }
        let details = |text: &str| Some(format!("proxy; details=\"{text}\""));
        let of_stranger = if hide { (405, None) } else { (401, details("no user has this token")) };
        let told = (403, details("the access of this user ended on 2020-01-01"));
        assert_eq!(answers, [of_stranger, told], "hide = {hide}");
        assert_eq!(server.context.unauthenticated.in_use(), 1, "no connection of a user");
        let head = format!("CONNECT 192.0.2.1:80 HTTP/1.1\r\nhost: 192.0.2.1:80\r\nauthorization: {alice}");
        let (answer, _) = server.http1(&head).await;
        assert!(answer.starts_with("HTTP/1.1 403 ") && answer.contains("ended on 2020-01-01"), "{answer}");
    }
}
