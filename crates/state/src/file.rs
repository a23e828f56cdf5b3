//! Files of state: JSON with mode 0600, written atomically.

use std::path::Path;

use mpvpn_input::{Result, files};
use serde::Serialize;

/// Reads the file `path`. `None` if there is none, or if `parse` does not understand it: then it is renamed
/// to `*.json.bad`, and a warning says that `effect`.
pub(crate) fn load<T>(
    path: &Path,
    parse: impl FnOnce(&[u8]) -> Result<T, String>,
    effect: &str,
) -> Result<Option<T>> {
    let Some(bytes) = files::if_present(files::read_secret(path))? else { return Ok(None) };
    match parse(&bytes) {
        Ok(content) => Ok(Some(content)),
        Err(why) => move_away(path, &why, effect).map(|()| None),
    }
}

/// Renames a file to `*.json.bad`, and warns that it cannot be understood and that `effect`.
pub(crate) fn move_away(path: &Path, why: &str, effect: &str) -> Result<()> {
    let bad = files::move_away(path)?;
    tracing::warn!(
        "{} cannot be understood ({why}), so {effect}; the file was renamed to {}",
        path.display(),
        bad.display()
    );
    Ok(())
}

/// Writes the file `path`, and makes its folder.
pub(crate) fn save(path: &Path, content: &impl Serialize) -> Result<()> {
    if let Some(dir) = path.parent() {
        files::create_private_dir(dir)?;
    }
    files::write_secret(path, &files::json(path, content)?)
}
