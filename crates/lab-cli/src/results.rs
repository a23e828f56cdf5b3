//! Writes the results of a run: a picture, and figures as JSON.

use std::{
    fs,
    path::{Path, PathBuf},
};

use mpvpn_lab::LabError;
use serde::Serialize;

/// Writes a picture (SVG) and figures (JSON) into `dir`, each under its name, and returns their paths.
pub(crate) fn write(
    dir: &Path,
    (picture, svg): (&str, String),
    (name, figures): (&str, &impl Serialize),
) -> Result<(PathBuf, PathBuf), LabError> {
    fs::create_dir_all(dir).map_err(LabError::io(format!("create {}", dir.display())))?;
    let write = |name: &str, text: String| {
        let path = dir.join(name);
        fs::write(&path, text).map_err(LabError::io(format!("write {}", path.display())))?;
        Ok::<_, LabError>(path)
    };
    let json = serde_json::to_string_pretty(figures)
        .map_err(|error| LabError::Io { operation: "write the figures".to_owned(), source: error.into() })?;
    Ok((write(picture, svg)?, write(name, json + "\n")?))
}
