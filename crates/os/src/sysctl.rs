//! Kernel parameters of the network, under `/proc/sys/net` (sysctl(8)).
//!
//! In: keys written as paths (`net/ipv4/ip_forward`), because interface names may contain dots. Out: values
//! without their newline. Always holds: parameters are those of the network namespace of the calling thread;
//! no key leads out of `/proc/sys/net`.

use std::{fs, io, path::PathBuf};

use crate::error::OsError;

/// Reads a parameter.
pub fn read(key: &str) -> Result<String, OsError> {
    let value = path(key).and_then(fs::read_to_string);
    value.map(|text| text.trim().to_owned()).map_err(|e| OsError::kernel("read the setting", key, e))
}

/// Writes a parameter. Without the journal (`UndoJournal::set_sysctl`) only where it vanishes with its
/// interface.
pub fn write(key: &str, value: &str) -> Result<(), OsError> {
    path(key)
        .and_then(|path| fs::write(path, value))
        .map_err(|e| OsError::kernel("write the setting", format!("{key}={value}"), e))
}

/// Whether this kernel has the parameter.
pub fn exists(key: &str) -> bool {
    path(key).is_ok_and(|path| path.exists())
}

/// The key of a parameter of an interface, as in `interface_key("ipv4", "eth0", "rp_filter")`.
pub fn interface_key(family: &str, interface: &str, setting: &str) -> String {
    format!("net/{family}/conf/{interface}/{setting}")
}

/// Whether this machine has IPv6: the module is loaded, and IPv6 is not disabled on all interfaces.
pub fn has_ipv6() -> bool {
    read("net/ipv6/conf/all/disable_ipv6").is_ok_and(|value| value == "0")
}

pub(crate) fn path(key: &str) -> io::Result<PathBuf> {
    let is_invalid = key.split('/').any(|part| part.is_empty() || part == "." || part == "..");
    if is_invalid || !key.starts_with("net/") {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a path of names"));
    }
    Ok(PathBuf::from("/proc/sys").join(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_stay_below_the_network() {
        for key in ["../etc/passwd", "net/../../x", "/etc/passwd", "", "net//x", "net", "kernel/core_pattern"]
        {
            assert!(read(key).is_err(), "{key} was read");
            assert!(write(key, "1").is_err(), "{key} was written");
        }
    }

    #[test]
    fn values_come_without_their_newline() {
        let value = read("net/core/default_qdisc").expect("every Linux has it");
        assert_eq!(value, value.trim());
        assert!(!value.is_empty() && exists("net/core/default_qdisc"));
    }
}
