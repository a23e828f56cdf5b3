//! The installed files: the archive with its script, the units, the examples.

use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::LazyLock,
};

use mpvpn_config::{ClientConfig, ClientOptions, Rights, ServerConfig, ServerOptions};
use mpvpn_tests::testbed::binary;
use tempfile::TempDir;

/// The exposures that `systemd-analyze security` may find, times ten.
const MAX_EXPOSURE: [(&str, &str); 6] = [
    ("mpvpn-server.service", "26"),
    ("mpvpn-server@.service", "26"),
    ("mpvpn-client.service", "30"),
    ("mpvpn-client@.service", "30"),
    ("mpvpn-dns.service", "26"),
    ("mpvpn-kill-switch.service", "26"),
];
const VERSION: &str = "9.9.9";

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging")
}

fn output(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

#[track_caller]
fn run(command: &mut Command) -> String {
    let output = output(command);
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}:\n{said}");
    said
}

/// A release that is signed with a key of this test.
struct Release {
    folder: TempDir,
    archive: String,
}

impl Release {
    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// A secret key without a passphrase.
fn new_key(folder: &Path) -> String {
    let home = folder.join("gnupg");
    fs::create_dir(&home).unwrap();
    fs::set_permissions(&home, fs::Permissions::from_mode(0o700)).unwrap();
    let gpg = |args: &[&str]| {
        run(Command::new("gpg")
            .env("GNUPGHOME", &home)
            .args(["--batch", "--quiet", "--passphrase", ""])
            .args(args))
    };
    gpg(&["--quick-generate-key", "test@example.invalid", "ed25519", "sign", "never"]);
    let key = gpg(&["--armor", "--export-secret-keys"]);
    let _ = Command::new("gpgconf").env("GNUPGHOME", &home).args(["--kill", "gpg-agent"]).status();
    key
}

static RELEASE: LazyLock<Release> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let work = tempfile::tempdir().unwrap();
    let key = new_key(work.path());
    let build = packaging().join("build-archive");
    let mut build = Command::new(build);
    build.arg(VERSION).arg(binary()).arg(binary().with_file_name("mpvpn-lab")).arg(folder.path());
    run(build.env("MPVPN_SIGNING_KEY", key));
    let names = fs::read_dir(folder.path()).unwrap();
    let mut names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let archive = names.find(|name| name.ends_with(".tar.gz")).expect("an archive");
    Release { folder, archive }
});

/// All files and folders below a folder.
fn tree(root: &Path) -> Vec<String> {
    let found = run(Command::new("find").arg(root).args(["-mindepth", "1", "-printf", "%P\\n"]));
    let mut found: Vec<String> = found.lines().map(str::to_owned).collect();
    found.sort();
    found
}

fn install(root: &Path, args: &[&str]) -> Output {
    output(Command::new("sh").arg(RELEASE.file("install.sh")).arg("--root").arg(root).args(args))
}

#[test]
fn the_archive_is_installed_again_and_removed_without_a_trace() {
    let root = tempfile::tempdir().unwrap();
    // As on a fresh Debian, where these folders are there and empty.
    fs::create_dir_all(root.path().join("usr/local/bin")).unwrap();
    fs::create_dir_all(root.path().join("etc")).unwrap();
    let before = tree(root.path());
    let from = RELEASE.folder.path().to_str().unwrap();
    for _ in 0..2 {
        let installed = install(root.path(), &["--from", from]);
        assert!(installed.status.success(), "{}", String::from_utf8_lossy(&installed.stderr));
    }
    let program = root.path().join("usr/local/bin/mpvpn");
    assert!(run(Command::new(&program).arg("--version")).starts_with("mpvpn "));
    let unit = fs::read_to_string(root.path().join("etc/systemd/system/mpvpn-client@.service")).unwrap();
    assert!(
        unit.contains("ExecStart=/usr/local/bin/mpvpn client --config /etc/mpvpn/client-%i.toml"),
        "{unit}"
    );
    assert!(!unit.contains("/usr/bin/mpvpn"), "{unit}");
    // Nothing in PATH: the lab is the file beside the program.
    let help = run(Command::new(&program).args(["lab", "up", "--help"]).env("PATH", ""));
    assert!(help.contains("Usage: mpvpn lab up [OPTIONS] --link <SPEC>"), "{help}");
    for page in ["mpvpn-client", "mpvpn-lab", "mpvpn-lab-up"] {
        let page = root.path().join(format!("usr/local/share/man/man1/{page}.1.gz"));
        assert!(page.exists(), "{}", page.display());
    }

    // A file of an administrator stays, until it is purged.
    fs::write(root.path().join("etc/mpvpn/server.toml"), "").unwrap();
    let removed = install(root.path(), &["--uninstall"]);
    assert!(removed.status.success(), "{}", String::from_utf8_lossy(&removed.stderr));
    assert!(root.path().join("etc/mpvpn/server.toml").exists());
    assert!(install(root.path(), &["--from", from]).status.success());
    assert!(install(root.path(), &["--uninstall", "--purge"]).status.success());
    // systemd-sysusers has made the user in this folder's files.
    let left: Vec<String> = tree(root.path())
        .into_iter()
        .filter(|path| {
            !["passwd", "group", "shadow", "gshadow", ".pwd.lock"].iter().any(|name| path.contains(name))
        })
        .collect();
    assert_eq!(left, before);
    let none = install(root.path(), &["--uninstall"]);
    assert!(String::from_utf8_lossy(&none.stderr).contains("no installation by install.sh"));
}

#[test]
fn a_newer_version_is_replaced_by_an_older_one_only_if_that_is_asked_for() {
    let root = tempfile::tempdir().unwrap();
    let program = root.path().join("usr/local/bin/mpvpn");
    let from = RELEASE.folder.path().to_str().unwrap();
    fs::create_dir_all(program.parent().unwrap()).unwrap();
    for (installed, is_older) in
        [("9.9.10", false), ("10.0.0-rc1", false), ("9.9.9", true), ("9.9.9-rc1", true), ("9.10.0", false)]
    {
        fs::write(&program, format!("#!/bin/sh\necho mpvpn {installed}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let tried = install(root.path(), &["--from", from]);
        let said = String::from_utf8_lossy(&tried.stderr);
        assert_eq!(tried.status.success(), is_older, "{installed}: {said}");
        let is_there = fs::read(&program).unwrap().starts_with(b"#!/bin/sh");
        assert_eq!(is_there, !is_older, "{installed}");
        let refusal = format!("mpvpn {installed} is installed, which is newer than {VERSION}");
        assert_eq!(said.contains(&refusal) && said.contains("--downgrade"), !is_older, "{said}");
    }
    let asked = install(root.path(), &["--from", from, "--downgrade"]);
    assert!(asked.status.success(), "{}", String::from_utf8_lossy(&asked.stderr));
    assert!(!fs::read(&program).unwrap().starts_with(b"#!/bin/sh"));
}

/// The message of install.sh when it refuses; nothing may be installed.
#[track_caller]
fn refused(release: &Path, args: &[&str]) -> String {
    let root = tempfile::tempdir().unwrap();
    let script = release.join("install.sh");
    let output = output(
        Command::new("sh")
            .arg(script)
            .arg("--root")
            .arg(root.path())
            .args(["--from", release.to_str().unwrap()])
            .args(args),
    );
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("next: "), "{said}");
    assert_eq!(tree(root.path()), Vec::<String>::new(), "{said}");
    said
}

/// A copy of the release.
fn copy() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(RELEASE.folder.path()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

#[test]
fn what_is_damaged_or_signed_by_others_is_not_installed() {
    let release = copy();
    let archive = release.path().join(&RELEASE.archive);
    let mut bytes = fs::read(&archive).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&archive, &bytes).unwrap();
    let said = refused(release.path(), &[]);
    assert!(said.contains("is damaged: its SHA-256 is"), "{said}");
    // With a list of checksums that fits the damage, the signature does not.
    let sums = run(Command::new("sha256sum").arg(&RELEASE.archive).current_dir(release.path()));
    fs::write(release.path().join("SHA256SUMS"), sums).unwrap();
    let said = refused(release.path(), &[]);
    assert!(said.contains("the signature is not of this key"), "{said}");

    let release = copy();
    fs::remove_file(release.path().join("SHA256SUMS.sig")).unwrap();
    assert!(refused(release.path(), &[]).contains("SHA256SUMS.sig is not at"));
    let other = tempfile::tempdir().unwrap();
    let key = other.path().join("other.asc");
    let secret = new_key(other.path());
    fs::write(other.path().join("secret"), secret).unwrap();
    let home = other.path().join("gnupg");
    run(Command::new("gpg")
        .env("GNUPGHOME", &home)
        .args(["--batch", "--armor", "--export", "--output"])
        .arg(&key));
    let said = refused(copy().path(), &["--key", key.to_str().unwrap()]);
    assert!(said.contains("the signature is not of this key"), "{said}");

    // Without a key in the script, nothing is believed unless it is asked for.
    let release = copy();
    let script = fs::read_to_string(release.path().join("install.sh")).unwrap();
    let start = script.find("public_key='").unwrap();
    let end = start + script[start..].find('\n').unwrap();
    let without = format!("{}public_key=''{}", &script[..start], &script[end..]);
    fs::write(release.path().join("install.sh"), without).unwrap();
    assert!(refused(release.path(), &[]).contains("built without a signing key"));
    let root = tempfile::tempdir().unwrap();
    let script = release.path().join("install.sh");
    run(Command::new("sh")
        .arg(script)
        .arg("--unsigned")
        .arg("--root")
        .arg(root.path())
        .args(["--from", release.path().to_str().unwrap()]));
    let said = refused(release.path(), &["--unsigned", "--from", "http://127.0.0.1:9/"]);
    assert!(said.contains("is not at") || said.contains("by http"), "{said}");
}

#[test]
fn the_archive_is_fetched_from_a_url() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/releases", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut head = vec![0; 4096];
            let length = stream.read(&mut head).unwrap_or(0);
            let head = String::from_utf8_lossy(&head[..length]).into_owned();
            let name = head.split_whitespace().nth(1).and_then(|path| path.strip_prefix("/releases/"));
            let found = name.and_then(|name| fs::read(RELEASE.file(name)).ok());
            let (status, body) = found.map_or(("404 Not Found", Vec::new()), |body| ("200 OK", body));
            let head =
                format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
        }
    });
    let root = tempfile::tempdir().unwrap();
    let installed = install(root.path(), &["--from", &url]);
    assert!(installed.status.success(), "{}", String::from_utf8_lossy(&installed.stderr));
    let failed = install(root.path(), &["--from", &format!("{url}/elsewhere")]);
    assert!(String::from_utf8_lossy(&failed.stderr).contains("SHA256SUMS is not at"));
}

#[test]
fn the_units_are_correct_and_expose_little() {
    let root = tempfile::tempdir().unwrap();
    run(Command::new(packaging().join("stage")).arg(root.path()).arg(binary()));
    for (unit, limit) in MAX_EXPOSURE {
        let file = root.path().join("usr/lib/systemd/system").join(unit);
        let args = ["security", "--offline=true", "--no-pager", "--threshold", limit];
        let said = run(Command::new("systemd-analyze").args(args).arg(&file));
        let level = said.lines().last().unwrap_or_default();
        println!("{level}");
        assert!(level.contains("Overall exposure level"), "{said}");
    }
    // The names of sections and keys, and the dependencies.
    let said = output(
        Command::new("systemd-analyze")
            .args(["verify", "--man=no", "--recursive-errors=no", "--root"])
            .arg(root.path())
            .args([
                "mpvpn-server.service",
                "mpvpn-client.service",
                "mpvpn-client@work.service",
                "mpvpn-dns.service",
                "mpvpn-kill-switch.service",
            ]),
    );
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    for line in said.lines().filter(|line| line.contains("mpvpn")) {
        assert!(!line.contains("Unknown") && !line.contains("Failed to parse"), "{line}");
    }
}

#[test]
fn the_examples_are_configurations_that_work() {
    let mut count = 0;
    for entry in fs::read_dir(packaging().join("examples")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with("server") {
            ServerConfig::load(Some(&path), ServerOptions::default(), Rights::ALL)
                .unwrap_or_else(|error| panic!("{error}"));
        } else {
            ClientConfig::load(Some(&path), ClientOptions::default())
                .unwrap_or_else(|error| panic!("{error}"));
        }
        count += 1;
    }
    assert!(count >= 5, "{count}");
}
