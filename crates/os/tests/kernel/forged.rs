//! Records of a process that somebody has taken over, as root finds them.

use std::{
    fs,
    os::unix::fs::{MetadataExt, chown, symlink},
    path::PathBuf,
    sync::mpsc,
    thread,
    time::Duration,
};

use crate::common::{Folder, in_namespace, run};
use mpvpn_os::{UndoJournal, privilege, sysctl, undo::Leftover};
use rustix::fs::{CWD, FileType, Mode};

/// User and group of the folder: "nobody".
const NOBODY: u32 = 65_534;

/// The folder of journals of this network namespace.
fn journals(folder: &Folder) -> PathBuf {
    let namespace = fs::metadata("/proc/thread-self/ns/net").unwrap().ino();
    let journals = folder.0.join(format!("netns-{namespace}"));
    fs::create_dir_all(&journals).unwrap();
    journals
}

/// Has `mpvpn reset` revert a journal with this step; returns its errors.
fn revert(folder: &Folder, step: &str) -> Vec<String> {
    let text = format!(r#"{{"pid": {}, "start_time": 1, "steps": [{step}]}}"#, u32::MAX);
    fs::write(journals(folder).join("forged.json"), text).unwrap();
    let found = UndoJournal::reset_all(&folder.0).unwrap();
    let errors = found.into_iter().flat_map(|(_, leftover)| match leftover {
        Leftover::Reverted(errors) => errors,
        Leftover::Running => panic!("no process has this number"),
    });
    errors.map(|error| error.to_string()).collect()
}

#[test]
fn a_journal_asks_for_nothing_but_the_network() {
    in_namespace(|| {
        let (folder, others) = (Folder::new(), Folder::new());
        let pattern = || fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
        let before = pattern();
        let set = before.trim().replace('\\', "\\\\").replace('"', "\\\"");
        let sysctl =
            |key: &str| format!(r#"{{"Sysctl": {{"key": "{key}", "before": "core", "set": "{set}"}}}}"#);
        for key in ["kernel/core_pattern", "net/../kernel/core_pattern"] {
            let errors = revert(&folder, &sysctl(key));
            assert!(errors.iter().any(|error| error.contains("core_pattern")), "{errors:?}");
            assert_eq!(pattern(), before);
        }
        let victim = others.0.join("crontab");
        fs::write(&victim, "root's").unwrap();
        let path = victim.display();
        let resolver = format!(
            r#"{{"Resolver": {{"path": "{path}", "before": {{"Text": "forged"}}, "set": "root's"}}}}"#
        );
        for step in [resolver, format!(r#"{{"File": {{"path": "{path}"}}}}"#)] {
            revert(&folder, &step);
            assert_eq!(fs::read_to_string(&victim).unwrap(), "root's", "{step}");
        }
    });
}

#[test]
fn what_is_no_record_stops_nobody_from_reverting_the_others() {
    in_namespace(|| {
        let (folder, others) = (Folder::new(), Folder::new());
        let key = |value: &str| sysctl::write("net/ipv4/conf/lo/rp_filter", value).unwrap();
        let journal = |before: &str| {
            let step = format!(
                r#"{{"Sysctl": {{"key": "net/ipv4/conf/lo/rp_filter", "before": "{before}", "set": "1"}}}}"#
            );
            format!(r#"{{"pid": {}, "start_time": 1, "steps": [{step}]}}"#, u32::MAX)
        };
        let journals = journals(&folder);
        let pipe = |name: &str| {
            rustix::fs::mknodat(CWD, journals.join(name), FileType::Fifo, Mode::from_raw_mode(0o600), 0)
                .unwrap();
        };
        pipe("pipe.json");
        fs::create_dir_all(journals.join("links")).unwrap();
        pipe("links/128");
        // A journal elsewhere, which the owner of the folder could not write.
        fs::write(others.0.join("journal"), journal("2")).unwrap();
        symlink(others.0.join("journal"), journals.join("link.json")).unwrap();
        fs::create_dir(journals.join("folder.lock")).unwrap();
        fs::write(journals.join("folder.json"), journal("2")).unwrap();
        fs::write(journals.join("right.json"), journal("0")).unwrap();
        key("1");
        let base = folder.0.clone();
        let (tell, told) = mpsc::channel();
        thread::spawn(move || tell.send(UndoJournal::reset_all(&base).unwrap()));
        let found =
            told.recv_timeout(Duration::from_secs(10)).expect("it waits for nobody who writes into a pipe");
        assert_eq!(sysctl::read("net/ipv4/conf/lo/rp_filter").unwrap(), "0");
        let failed: Vec<_> = found
            .iter()
            .filter(|(_, it)| !matches!(it, Leftover::Reverted(errors) if errors.is_empty()))
            .map(|(name, _)| name.as_str())
            .collect();
        assert_eq!(failed, ["folder"], "{found:?}");
    });
}

#[test]
fn a_link_in_the_folder_is_not_followed() {
    in_namespace(|| {
        let (folder, others) = (Folder::new(), Folder::new());
        let victim = others.0.join("crontab");
        for name in ["a.new", "a.lock", "a.json"] {
            fs::write(&victim, "root's").unwrap();
            symlink(&victim, journals(&folder).join(name)).unwrap();
            drop(UndoJournal::open(&folder.0, "a"));
            assert_eq!(fs::read_to_string(&victim).unwrap(), "root's", "{name}");
            let _ = fs::remove_file(journals(&folder).join(name));
        }
        fs::remove_file(&victim).unwrap();
        symlink(&victim, journals(&folder).join("a.lock")).unwrap();
        UndoJournal::open(&folder.0, "a").unwrap();
        assert!(!victim.exists());
    });
}

#[test]
fn root_leaves_its_rights_for_those_of_the_owner() {
    in_namespace(|| {
        let (folder, others) = (Folder::new(), Folder::new());
        assert!(!privilege::is_root_at_folder_of_other(&folder.0), "root's own folder");
        chown(&folder.0, Some(NOBODY), Some(NOBODY)).unwrap();
        assert!(privilege::is_root_at_folder_of_other(&folder.0));
        privilege::become_owner_of(&folder.0).unwrap();
        assert_eq!(rustix::process::geteuid().as_raw(), NOBODY);
        assert!(fs::write(others.0.join("file"), "").is_err(), "a folder of root");
        assert!(fs::read("/etc/shadow").is_err());
        fs::write(folder.0.join("file"), "").unwrap();
        assert!(privilege::has_net_admin());
        sysctl::write("net/ipv4/conf/lo/rp_filter", "1").unwrap();
    });
}

/// A record without steps, whose process has ended.
const RECORD: &str = r#"{"pid": 4294967295, "start_time": 1, "steps": []}"#;

#[test]
fn a_link_a_pipe_and_an_endless_file_are_no_journals() {
    in_namespace(|| {
        let (folder, others) = (Folder::new(), Folder::new());
        let journals = journals(&folder);
        fs::write(others.0.join("record"), RECORD).unwrap();
        symlink(others.0.join("record"), journals.join("link.json")).unwrap();
        fs::write(journals.join("long.json"), format!("{RECORD}{}", " ".repeat(20 << 20))).unwrap();
        run("mkfifo", &journals.join("pipe.json").display().to_string());
        fs::write(journals.join("record.json"), RECORD).unwrap();
        let (base, (sender, ended)) = (folder.0.clone(), mpsc::channel());
        // It waits for a writer of the pipe for ever, if at all.
        thread::spawn(move || sender.send(UndoJournal::reset_all(&base)));
        let found = ended.recv_timeout(Duration::from_secs(20)).expect("it ends").unwrap();
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["record"]);
    });
}

#[test]
fn a_name_that_no_message_of_the_kernel_holds_is_an_error() {
    in_namespace(|| {
        let folder = Folder::new();
        let name = "x".repeat(70_000);
        let rule = format!(
            r#"{{"Rule": {{"rule": {{"family": "V4", "priority": 7, "table": 9, "mark": null, "invert": false,
            "suppress_prefix_length": null, "input": "{name}"}}}}}}"#
        );
        let errors = revert(&folder, &rule);
        assert!(errors.iter().any(|error| error.contains("too long")), "{errors:?}");
    });
}
