//! A Prometheus that scrapes mpvpn in a testbed, and evaluates queries and alert rules.

use std::{
    fs::{self, File},
    path::Path,
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use serde_json::Value;

use crate::{
    eventually,
    testbed::{Host, Testbed},
};

/// Where Prometheus listens, on the client's host.
const ADDRESS: &str = "127.0.0.1:9090";

/// A running Prometheus on the client's host. It is ended when dropped, and its files go with the testbed.
pub struct Prometheus<'a> {
    child: Child,
    testbed: &'a Testbed,
}

impl<'a> Prometheus<'a> {
    /// Starts Prometheus, which scrapes these addresses each second and evaluates a file of rules as often.
    pub fn start(testbed: &'a Testbed, targets: &[&str], rules: &Path) -> Self {
        let dir = testbed.dir().join("prometheus");
        fs::create_dir(&dir).expect("a folder");
        let config = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{:?}]\nscrape_configs:\n  - job_name: mpvpn\n    \
             static_configs: [{{targets: {targets:?}}}]\n",
            rules.display().to_string()
        );
        let file = dir.join("prometheus.yml");
        fs::write(&file, config).expect("a file");
        let log = || File::create(dir.join("log")).expect("a file");
        let child = testbed
            .command(Host::Client, "prometheus")
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", dir.join("data").display()))
            .arg(format!("--web.listen-address={ADDRESS}"))
            .stdout(log())
            .stderr(log())
            .spawn()
            .unwrap_or_else(|error| panic!("prometheus: {error} (apt install prometheus)"));
        let prometheus = Self { child, testbed };
        eventually(Duration::from_secs(30), "Prometheus answers", || {
            prometheus.get("-/ready", None).map(drop)
        });
        prometheus
    }

    /// The answer to a GET request with a query.
    fn get(&self, path: &str, query: Option<&str>) -> Result<String, String> {
        let url = format!("http://{ADDRESS}/{path}");
        let query = query.map(|query| format!("query={query}"));
        let mut args = vec!["curl", "-sS", "-G", "--max-time", "20", &url];
        args.extend(query.iter().flat_map(|query| ["--data-urlencode", query.as_str()]));
        let output = self.testbed.output_of(Host::Client, Duration::from_secs(30), &args);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() { Ok(text) } else { Err(String::from_utf8_lossy(&output.stderr).into()) }
    }

    fn data(&self, path: &str, query: Option<&str>) -> Result<Value, String> {
        let answer: Value =
            serde_json::from_str(&self.get(path, query)?).map_err(|error| error.to_string())?;
        match answer["status"].as_str() {
            Some("success") => Ok(answer["data"].clone()),
            _ => Err(format!("{answer}")),
        }
    }

    /// The series that an expression has now: each with its labels, and its value as text.
    ///
    /// # Errors
    /// If Prometheus rejects the expression, with its reason.
    pub fn query(&self, expression: &str) -> Result<Vec<Value>, String> {
        let data = self.data("api/v1/query", Some(expression))?;
        data["result"].as_array().cloned().ok_or_else(|| format!("no list of series: {data}"))
    }

    /// The rules with their health and state.
    pub fn rules(&self) -> Result<Vec<Value>, String> {
        let data = self.data("api/v1/rules", None)?;
        let groups = data["groups"].as_array().ok_or("no groups of rules")?;
        Ok(groups.iter().flat_map(|group| group["rules"].as_array().into_iter().flatten()).cloned().collect())
    }
}

impl Drop for Prometheus<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `promtool` with this text as its standard input.
pub fn promtool(args: &[&str], input: &Path) -> Output {
    Command::new("promtool")
        .args(args)
        .stdin(Stdio::from(File::open(input).expect("a file")))
        .output()
        .unwrap_or_else(|error| panic!("promtool: {error} (apt install prometheus)"))
}
