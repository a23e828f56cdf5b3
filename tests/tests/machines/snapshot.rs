//! The state of a machine, so that two moments can be compared: files, packages, users, units, and the
//! settings of the kernel for the network.
//!
//! In: a machine that runs. Out: lines in groups, and the lines that differ. Left out are files that any use
//! of apt or systemd changes, each with its reason.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
    time::Duration,
};

use mpvpn_tests::eventually;

use crate::{isolation::run, machine::Machine};

/// Files and folders whose content any installation, removal or boot changes.
const LEFT_OUT: [(&str, &str); 19] = [
    ("proc", "of the kernel"),
    ("sys", "of the kernel"),
    ("dev", "of the container"),
    ("run", "compared by names, as it ends with the boot"),
    ("tmp", "ends with the boot"),
    ("var/tmp", "private folders of services that run"),
    ("var/log", "says what happened"),
    ("var/cache", "can be made again"),
    ("var/lib/apt", "of apt"),
    ("var/lib/dpkg", "compared by the packages that dpkg lists"),
    ("var/lib/systemd", "times and seeds"),
    ("var/lib/private", "private folders of services that run"),
    ("var/lib/NetworkManager", "when its connections were used"),
    ("etc/ld.so.cache", "made again by each installation of a library"),
    ("etc/passwd-", "the state before the last change"),
    ("etc/group-", "the state before the last change"),
    ("etc/shadow-", "the state before the last change"),
    ("etc/gshadow-", "the state before the last change"),
    ("etc/.pwd.lock", "empty, made by the first change of users"),
];

/// The commands whose output is compared, with the name of their group.
const COMMANDS: [(&str, &str); 10] = [
    ("packages", "dpkg-query --show --showformat '${Package} ${Version} ${db:Status-Abbrev}\\n'"),
    ("users", "getent passwd; getent group; getent shadow"),
    ("unit files", "systemctl list-unit-files --no-legend --plain --no-pager"),
    ("failed units", "systemctl --failed --no-legend --plain"),
    ("nftables", "nft --stateless list ruleset"),
    (
        "routes",
        "ip -details route show table all; ip -6 -details route show table all | sed 's/ expires [0-9]*sec//'",
    ),
    ("rules", "ip rule; ip -6 rule"),
    (
        "interfaces",
        "ip -o link | sed 's/ qlen .*//; s/^[0-9]*: //; s/@if[0-9]*:/:/'; ip -o address | sed 's/^[0-9]*: //'",
    ),
    ("kernel parameters", "sysctl -a 2>/dev/null | grep '^net[.]' | grep -v nf_conntrack_count"),
    (
        "files in /run",
        "find /run -mindepth 1 -maxdepth 2 -not -path '/run/systemd*' -not -path '/run/udev*' -not -path '/run/user*' -not -name agetty.reload -not -name ufw.lock",
    ),
];

/// A moment of a machine.
pub(crate) struct Snapshot(BTreeMap<&'static str, BTreeSet<String>>);

impl Snapshot {
    /// The machine as it is now.
    pub(crate) fn take(machine: &Machine) -> Self {
        // IPv6 addresses are tentative for a second (RFC 4862).
        eventually(Duration::from_secs(10), "no address is tentative", || {
            match machine.run(&["ip", "address"]).contains("tentative") {
                true => Err("one is".to_owned()),
                false => Ok(()),
            }
        });
        let mut groups = BTreeMap::new();
        for (group, command) in COMMANDS {
            let lines = machine.shell(command);
            groups.insert(group, lines.lines().map(str::to_owned).collect());
        }
        let root = machine.path("/");
        let mut files = BTreeSet::new();
        list(&root, Path::new(""), &hashes(&root), &mut files);
        assert!(files.len() > 1000, "a root file system has more than {} files", files.len());
        groups.insert("files", files);
        Self(groups)
    }

    /// The lines that are in one of the two only: those that are new with `+`, those that are gone with `-`.
    pub(crate) fn differences(&self, later: &Self) -> Vec<String> {
        let mut differences = Vec::new();
        for (group, lines) in &self.0 {
            let later = &later.0[group];
            differences.extend(lines.difference(later).map(|line| format!("- {group}: {line}")));
            differences.extend(later.difference(lines).map(|line| format!("+ {group}: {line}")));
        }
        differences
    }

    /// The number of compared lines.
    pub(crate) fn len(&self) -> usize {
        self.0.values().map(BTreeSet::len).sum()
    }
}

/// The contents of all files, by their paths.
fn hashes(root: &Path) -> BTreeMap<String, String> {
    let root = root.to_str().expect("ASCII");
    let script = r#"cd "$0" && find . -xdev -type f -print0 | xargs -0 sha256sum"#;
    let listing = run("sh", &["-euc", script, root]);
    let pairs = listing.lines().filter_map(|line| line.split_once("  ./"));
    pairs.map(|(hash, path)| (path.to_owned(), hash[..16].to_owned())).collect()
}

/// Adds the files of a folder, with mode, owner, and content.
fn list(root: &Path, folder: &Path, hashes: &BTreeMap<String, String>, files: &mut BTreeSet<String>) {
    for entry in fs::read_dir(root.join(folder)).into_iter().flatten().flatten() {
        let name = folder.join(entry.file_name());
        let text = name.to_string_lossy();
        if LEFT_OUT.iter().any(|(left_out, _)| *left_out == text) {
            continue;
        }
        let Ok(about) = fs::symlink_metadata(entry.path()) else { continue };
        let kind = about.file_type();
        let content = if kind.is_symlink() {
            fs::read_link(entry.path()).map(|to| format!("-> {}", to.display())).unwrap_or_default()
        } else if kind.is_dir() {
            "folder".to_owned()
        } else {
            hashes.get(text.as_ref()).cloned().unwrap_or_else(|| "no regular file".to_owned())
        };
        let (mode, user, group) = (about.mode() & 0o7777, about.uid(), about.gid());
        files.insert(format!("/{text} {mode:04o} {user}:{group} {content}"));
        if kind.is_dir() {
            list(root, &name, hashes, files);
        }
    }
}
