//! A program that speaks to the dashboard as its page does, or as no page would.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::Value;

use crate::testbed::{Host, MpvpnProcess, Testbed, binary};

/// Where processes of a test serve their dashboards.
pub const DASHBOARD: &str = "127.0.0.1:9470";
/// Longest wait for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// The status code.
    pub code: u16,
    /// Status line and header fields; the names are in small letters.
    pub head: String,
    /// The body.
    pub body: String,
}

impl Answer {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The body as JSON, if the code is 200.
    pub fn ok(&self) -> Value {
        assert_eq!(self.code, 200, "{self:?}");
        self.json()
    }

    /// The value of a header field.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }
}

/// A browser on a host of a testbed.
pub struct Browser<'a> {
    testbed: &'a Testbed,
    host: Host,
    /// Header fields of a session.
    session: Vec<(String, String)>,
    token: String,
}

/// The code in a new link of `mpvpn dashboard`.
pub fn login_code(process: &MpvpnProcess) -> String {
    let link = login_link(process);
    let (_, code) = link.split_once("#login=").unwrap_or_else(|| panic!("no code in {link}"));
    code.to_owned()
}

/// A new link of `mpvpn dashboard`.
pub fn login_link(process: &MpvpnProcess) -> String {
    let output = Command::new(binary())
        .args(["dashboard", "--api-socket"])
        .arg(process.socket())
        .stdin(Stdio::null())
        .output()
        .expect("mpvpn runs");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text").trim().to_owned()
}

impl<'a> Browser<'a> {
    /// One that is not logged in.
    pub fn new(testbed: &'a Testbed, host: Host) -> Self {
        Self { testbed, host, session: Vec::new(), token: String::new() }
    }

    /// One that is logged in at a process on the same host.
    pub fn logged_in(testbed: &'a Testbed, host: Host, process: &MpvpnProcess) -> Self {
        let mut browser = Self::new(testbed, host);
        let answer = browser.log_in(&login_code(process));
        assert_eq!(answer.code, 200, "{answer:?}\n{}", process.log());
        browser
    }

    /// Logs in; keeps the session if that works.
    pub fn log_in(&mut self, code: &str) -> Answer {
        let answer = self.post("/api/login", &serde_json::json!({ "code": code }));
        if answer.code == 200 {
            let cookie = answer.field("set-cookie").and_then(|cookie| cookie.split(';').next());
            let cookie = cookie.expect("a cookie").to_owned();
            self.token = answer.json()["csrf"].as_str().expect("a token").to_owned();
            self.session =
                vec![("Cookie".to_owned(), cookie), ("X-CSRF-Token".to_owned(), self.token.clone())];
        }
        answer
    }

    /// The fields of the session.
    pub fn session(&self) -> &[(String, String)] {
        &self.session
    }

    /// Gets a path of the page or of its API.
    pub fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[("Host", DASHBOARD)], "")
    }

    /// Posts JSON, as the page does.
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        let origin = format!("http://{DASHBOARD}");
        let fields = [("Host", DASHBOARD), ("Origin", &origin), ("Content-Type", "application/json")];
        self.send("POST", path, &fields, &body.to_string())
    }

    /// Sends a request with these fields and those of the session.
    pub fn send(&self, method: &str, path: &str, fields: &[(&str, &str)], body: &str) -> Answer {
        let mut stream = self.connect();
        self.write_request(&mut stream, method, path, fields, body);
        let mut bytes = Vec::new();
        // A reset after the answer does not matter.
        let _ = stream.read_to_end(&mut bytes);
        let text = String::from_utf8_lossy(&bytes);
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let code = head.split_whitespace().nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        let field = |line: &str| match line.split_once(": ") {
            Some((name, value)) => format!("{}: {value}\n", name.to_ascii_lowercase()),
            None => format!("{line}\n"),
        };
        Answer { code, head: head.lines().map(field).collect(), body: body.to_owned() }
    }

    fn connect(&self) -> TcpStream {
        let address: SocketAddr = DASHBOARD.parse().expect("an address");
        let stream = self.testbed.in_namespace(self.host, || TcpStream::connect(address));
        let stream = stream.unwrap_or_else(|error| panic!("no dashboard at {DASHBOARD}: {error}"));
        stream.set_read_timeout(Some(ANSWER_TIMEOUT)).expect("a socket");
        stream
    }

    fn write_request(
        &self,
        stream: &mut TcpStream,
        method: &str,
        path: &str,
        fields: &[(&str, &str)],
        body: &str,
    ) {
        let own = self.session.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let fields: String =
            fields.iter().copied().chain(own).map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let length = body.len();
        let request = format!("{method} {path} HTTP/1.1\r\n{fields}Content-Length: {length}\r\n\r\n{body}");
        // A server may refuse before it has read all.
        let _ = stream.write_all(request.as_bytes());
    }

    /// Opens a stream of messages, by the token in the query as browsers do it. `query` begins with `&` or is
    /// empty.
    pub fn messages(&self, query: &str) -> Messages {
        let mut stream = self.connect();
        let path = format!("/api/live?csrf={}{query}", self.token);
        self.write_request(&mut stream, "GET", &path, &[("Host", DASHBOARD)], "");
        Messages(BufReader::new(stream))
    }
}

/// A stream of server-sent events.
pub struct Messages(BufReader<TcpStream>);

impl Messages {
    /// The name and the data of the next message.
    pub fn next_message(&mut self) -> (String, Value) {
        let (mut name, mut line) = (String::new(), String::new());
        loop {
            line.clear();
            let read = self.0.read_line(&mut line).unwrap_or_else(|error| panic!("no message: {error}"));
            assert!(read > 0, "the stream has ended");
            if let Some(event) = line.strip_prefix("event: ") {
                event.trim().clone_into(&mut name);
            } else if let Some(data) = line.strip_prefix("data: ") {
                let data = serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {data}"));
                return (name, data);
            }
        }
    }

    /// The next status.
    pub fn next_status(&mut self) -> Value {
        loop {
            let (name, data) = self.next_message();
            if name == "status" {
                return data;
            }
        }
    }

    /// The code of the answer. Called first.
    pub fn code(&mut self) -> u16 {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap_or_else(|error| panic!("no answer: {error}"));
        line.split_whitespace().nth(1).and_then(|code| code.parse().ok()).unwrap_or(0)
    }
}
