//! Writes the report, the raw values and the plots of a run.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    thread,
};

use mpvpn_tests::target_dir;
use serde_json::{Value, json};

use crate::figure::{Figure, table};

/// Folder of reports if it is not `target/bench/`.
static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();

/// Folder of reports.
pub(crate) fn directory() -> PathBuf {
    DIRECTORY.get().cloned().unwrap_or_else(|| target_dir().join("bench"))
}

/// Sets the folder of reports.
pub(crate) fn set_directory(directory: &Path) {
    let _ = DIRECTORY.set(directory.to_owned());
}

/// The results of a rig.
#[derive(Default)]
pub(crate) struct Outcome {
    pub(crate) figures: Vec<Figure>,
    /// Its chapter of the report, Markdown.
    pub(crate) chapter: String,
    /// All measured values.
    pub(crate) raw: Value,
    /// Plots: file names and SVG.
    pub(crate) plots: Vec<(String, String)>,
}

impl From<Vec<Figure>> for Outcome {
    fn from(figures: Vec<Figure>) -> Self {
        Self { figures, ..Self::default() }
    }
}

/// Writes everything to [`directory`].
pub(crate) fn write(args: &[String], outcomes: &[(&str, Outcome)]) -> io::Result<()> {
    let directory = directory();
    fs::create_dir_all(&directory)?;
    let (machine, date) = (machine(), date());
    let command = format!("bench {}", args.join(" "));
    let figures: Vec<&Figure> = outcomes.iter().flat_map(|(_, outcome)| &outcome.figures).collect();
    let mut report =
        format!("# mpvpn, measured\n\n{machine}; {date}; `{}`\n\n{}", command.trim(), table(&figures));
    for (_, outcome) in outcomes {
        report += &outcome.chapter;
        for (name, picture) in &outcome.plots {
            report += &format!("\n![{name}]({name})\n");
            write_file(&directory.join(name), picture)?;
        }
    }
    write_file(&directory.join("report.md"), &report)?;
    let list: Vec<Value> = figures
        .iter()
        .map(|figure| {
            json!({ "rig": figure.rig, "name": figure.name, "note": figure.note, "value": figure.value,
                    "unit": figure.unit, "better": figure.bar.better().map(|better| better.name()),
                    "bar": figure.bar(), "ok": figure.is_good() })
        })
        .collect();
    let raw: serde_json::Map<String, Value> = outcomes
        .iter()
        .filter(|(_, outcome)| !outcome.raw.is_null())
        .map(|(name, outcome)| ((*name).to_owned(), outcome.raw.clone()))
        .collect();
    let all =
        json!({ "machine": machine, "date": date, "command": command.trim(), "figures": list, "raw": raw });
    write_file(&directory.join("report.json"), &format!("{all:#}\n"))
}

/// Writes intermediate results, so that they remain if the run is interrupted.
pub(crate) fn save_record(rig: &str, name: &str, record: &Value) {
    let folder = directory().join(rig);
    let path = folder.join(format!("{name}.json"));
    let kept = fs::create_dir_all(&folder).and_then(|()| fs::write(&path, format!("{record:#}\n")));
    if let Err(error) = kept {
        eprintln!("  {} cannot be written: {error}", path.display());
    }
}

fn write_file(path: &Path, text: &str) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    fs::write(path, text)?;
    eprintln!("wrote {}", path.display());
    Ok(())
}

/// Processor model, number of cores and kernel version.
pub(crate) fn machine() -> String {
    let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        processors.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or(": unknown processor");
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cores = thread::available_parallelism().map_or(0, usize::from);
    format!("{}, {cores} cores, Linux {}", model.trim_start_matches(['\t', ' ', ':']), kernel.trim())
}

/// Current date and time, UTC.
pub(crate) fn date() -> String {
    let output = Command::new("date").args(["-u", "+%Y-%m-%d %H:%M UTC"]).output();
    output.map_or_else(
        |_| "no date".to_owned(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    )
}
