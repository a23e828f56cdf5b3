//! Kernel settings under `/proc/sys`.
//!
//! In: keys written as paths (`net/ipv4/ip_forward`), because interface names may contain dots. Out:
//! values without their newline. Settings under `net` are those of the calling thread's namespace.

use std::{fs, io, path::PathBuf};

use crate::{
    error::OsError,
    undo::{Step, UndoJournal},
};

/// Reads a setting.
pub fn read(key: &str) -> Result<String, OsError> {
    let value = path(key).and_then(fs::read_to_string);
    value.map(|text| text.trim().to_owned()).map_err(|e| OsError::kernel("read the setting", key, e))
}

/// Writes a setting and journals nothing: for settings that vanish with their interface.
pub fn write(key: &str, value: &str) -> Result<(), OsError> {
    path(key)
        .and_then(|path| fs::write(path, value))
        .map_err(|e| OsError::kernel("write the setting", format!("{key}={value}"), e))
}

/// Whether the setting exists on this kernel.
pub fn exists(key: &str) -> bool {
    path(key).is_ok_and(|path| path.exists())
}

/// Writes a setting through the journal; does nothing if it has that value already.
pub fn set(undo: &mut UndoJournal, key: &str, value: &str) -> Result<(), OsError> {
    let before = read(key)?;
    if before == value {
        return Ok(());
    }
    undo.make(&[Step::Sysctl { key: key.to_owned(), before, set: value.to_owned() }])
}

/// The key of an interface's setting, as in `interface("ipv4", "eth0", "rp_filter")`.
pub fn interface(family: &str, interface: &str, setting: &str) -> String {
    format!("net/{family}/conf/{interface}/{setting}")
}

/// Whether this machine speaks IPv6 (module loaded and not disabled everywhere).
pub fn has_ipv6() -> bool {
    read("net/ipv6/conf/all/disable_ipv6").is_ok_and(|value| value == "0")
}

fn path(key: &str) -> io::Result<PathBuf> {
    let strange = key.split('/').any(|part| part.is_empty() || part == "." || part == "..");
    if strange {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a path of names"));
    }
    Ok(PathBuf::from("/proc/sys").join(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_stay_below_proc_sys() {
        for key in ["../etc/passwd", "net/../../x", "/etc/passwd", "", "net//x"] {
            assert!(read(key).is_err(), "{key} was read");
            assert!(write(key, "1").is_err(), "{key} was written");
        }
    }

    #[test]
    fn values_come_without_their_newline() {
        let value = read("kernel/ostype").expect("every Linux has it");
        assert_eq!(value, "Linux");
        assert!(exists("kernel/ostype"));
    }
}
