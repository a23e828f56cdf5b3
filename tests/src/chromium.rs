//! Chromium on a host of a testbed, for the dashboard's page. `web/browser/driver.ts` drives it.
//!
//! In: what a person does: open, click, type, look. Out: what is shown, and when. Always holds: every wait is
//! bounded; the browser ends with its value; elements are found by role and accessible name.

use std::{
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant, SystemTime},
};

use serde_json::{Value, json};

use crate::testbed::{Host, Testbed};

/// How long the driver may take for one command. Its own waits are shorter; only a browser that hangs takes
/// that long.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// How long the driver may take to end.
const END_LIMIT: Duration = Duration::from_secs(5);

/// Dark or light.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// Light text on dark ground.
    Dark,
    /// Dark text on light ground.
    Light,
}

/// A browser with one page.
pub struct Chromium {
    driver: Child,
    commands: Option<ChildStdin>,
    answers: Receiver<String>,
}

impl Chromium {
    /// Starts a browser on that host. It keeps its files in the testbed's directory.
    pub fn start(testbed: &Testbed, host: Host) -> Self {
        let driver = web().join("dist-browser/driver.mjs");
        assert!(driver.exists(), "no {}: `./dev test e2e` builds it", driver.display());
        let home = testbed.file("browser", host);
        std::fs::create_dir(&home).expect("a folder for the browser");
        let mut driver = testbed
            .command(host, "node")
            .arg(driver)
            .env("HOME", &home)
            .env("TMPDIR", &home)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("node runs");
        let output = BufReader::new(driver.stdout.take().expect("a pipe"));
        let (sender, answers) = channel();
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { commands: driver.stdin.take(), driver, answers }
    }

    fn ask(&mut self, command: Value) -> Value {
        let to = self.commands.as_mut().expect("it is open until the end");
        writeln!(to, "{command}").expect("the driver runs");
        let answer = match self.answers.recv_timeout(ANSWER_LIMIT) {
            Ok(line) => {
                serde_json::from_str::<Value>(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
            }
            Err(RecvTimeoutError::Timeout) => panic!("no answer within {ANSWER_LIMIT:?}: {command}"),
            Err(RecvTimeoutError::Disconnected) => panic!("the driver of the browser ended at {command}"),
        };
        if let Some(error) = answer["error"].as_str() {
            panic!("{command}: {error}");
        }
        answer["ok"].clone()
    }

    /// Size of the window, and dark or light.
    pub fn look(&mut self, width: u32, height: u32, scheme: Scheme) {
        let scheme = if scheme == Scheme::Dark { "dark" } else { "light" };
        self.ask(json!({ "do": "look", "width": width, "height": height, "scheme": scheme }));
    }

    /// Opens an address; returns the address that is shown when the page has loaded.
    pub fn open(&mut self, url: &str) -> String {
        self.ask(json!({ "do": "open", "url": url })).as_str().expect("an address").to_owned()
    }

    /// Waits until a text that matches this regular expression is shown inside of elements with this
    /// selector. Returns when it was.
    pub fn wait_for(&mut self, inside: &str, pattern: &str, limit: Duration) -> SystemTime {
        let timeout = limit.as_millis() as u64;
        let at = self.ask(json!({ "do": "wait", "inside": inside, "text": pattern, "timeout_ms": timeout }));
        SystemTime::UNIX_EPOCH + Duration::from_millis(at.as_u64().expect("a time"))
    }

    /// Clicks on the element with this role and accessible name.
    pub fn click(&mut self, role: &str, name: &str) {
        self.ask(json!({ "do": "click", "role": role, "name": name }));
    }

    /// Types into the field with this accessible name, instead of what is in it.
    pub fn fill(&mut self, name: &str, text: &str) {
        self.ask(json!({ "do": "fill", "role": "textbox", "name": name, "text": text }));
    }

    /// Presses a key; returns kind and name of the element that has the focus then.
    pub fn press(&mut self, key: &str) -> String {
        self.ask(json!({ "do": "press", "text": key })).as_str().expect("a text").to_owned()
    }

    /// The text inside of the element with this selector.
    pub fn text(&mut self, inside: &str) -> String {
        self.ask(json!({ "do": "text", "inside": inside })).as_str().expect("a text").to_owned()
    }

    /// The value of an expression in the page.
    pub fn value(&mut self, expression: &str) -> Value {
        self.ask(json!({ "do": "value", "text": expression }))
    }

    /// The accessibility violations that axe-core finds.
    pub fn violations(&mut self) -> Vec<String> {
        let axe = web().join("node_modules/axe-core/axe.min.js");
        strings(&self.ask(json!({ "do": "violations", "axe": axe })))
    }

    /// Writes a picture of the whole page to `target/dashboard/NAME.png`.
    pub fn screenshot(&mut self, name: &str) {
        let folder = root().join("target/dashboard");
        std::fs::create_dir_all(&folder).expect("a folder for pictures");
        self.ask(json!({ "do": "screenshot", "path": folder.join(format!("{name}.png")) }));
    }

    /// Errors and warnings of the page, and its requests to other hosts, since the last call.
    pub fn complaints(&mut self) -> Vec<String> {
        strings(&self.ask(json!({ "do": "complaints" })))
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        // The driver ends the browser when its input ends.
        self.commands = None;
        let deadline = Instant::now() + END_LIMIT;
        while matches!(self.driver.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

fn strings(list: &Value) -> Vec<String> {
    list.as_array().expect("a list").iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the repository").to_owned()
}

fn web() -> PathBuf {
    root().join("web")
}
