//! Root file systems of machines: layers that all machines share, and below each machine a layer of its own.
//!
//! In: archives that `tests/machines/setup` made. Out: mounted folders. Always holds: what a machine writes
//! stays over its reboots, in memory of bounded size, and is gone with the machine.

use std::{
    fs,
    path::{Path, PathBuf},
};

use mpvpn_tests::target_dir;

use crate::isolation::run;

/// Memory for what one machine writes. A package in the profile of the tests takes some 100 MB unpacked,
/// twice while it is upgraded. Smaller: upgrades fail. Larger: three machines take more memory than small
/// test machines have.
const WRITABLE: &str = "size=1g,mode=755";
/// Memory for the extracted archives, about 600 MB with all layers.
const SHARED: &str = "size=2g,mode=755";
/// Where everything is mounted. The mount is visible to this program and its machines only.
const FOLDER: &str = "/run/systemd/mpvpn-machines";

/// The folder in which the tests mount and write.
pub(crate) fn folder() -> PathBuf {
    let folder = PathBuf::from(FOLDER);
    if !folder.join("layers").exists() {
        fs::create_dir_all(&folder).expect("our own file system");
        run("mount", &["-t", "tmpfs", "-o", SHARED, "machines", FOLDER]);
        fs::create_dir(folder.join("layers")).expect("a new file system");
    }
    folder
}

/// The root file system of a machine, mounted until it is dropped.
pub(crate) struct RootFileSystem {
    dir: PathBuf,
}

impl RootFileSystem {
    /// Layers from the lowest: `base`, then what further packages changed there.
    pub(crate) fn new(machine: &str, layers: &[&str]) -> Self {
        let dir = folder().join(machine);
        fs::create_dir_all(&dir).expect("our own file system");
        let text = dir.to_str().expect("an ASCII path");
        run("mount", &["-t", "tmpfs", "-o", WRITABLE, "machine", text]);
        for part in ["upper", "scratch", "root"] {
            fs::create_dir(dir.join(part)).expect("our own file system");
        }
        // The root folder must have the owner and mode of a root folder.
        let lower: Vec<String> = layers.iter().rev().map(|name| layer(name).display().to_string()).collect();
        let options = format!("lowerdir={},upperdir={text}/upper,workdir={text}/scratch", lower.join(":"));
        run("mount", &["-t", "overlay", "machine", "-o", &options, &format!("{text}/root")]);
        Self { dir }
    }

    /// The path of the root folder.
    pub(crate) fn path(&self) -> PathBuf {
        self.dir.join("root")
    }
}

impl Drop for RootFileSystem {
    fn drop(&mut self) {
        // A mount for which this fails ends with the namespace.
        for mounted in [self.path(), self.dir.clone()] {
            let _ = std::process::Command::new("umount").arg("--lazy").arg(mounted).status();
        }
        let _ = fs::remove_dir(&self.dir);
    }
}

/// The folder with an extracted archive.
fn layer(name: &str) -> PathBuf {
    let extracted = folder().join("layers").join(name);
    if !extracted.exists() {
        let archive = archive(name);
        fs::create_dir(&extracted).expect("our own file system");
        let (archive, folder) = (archive.to_str().expect("ASCII"), extracted.to_str().expect("ASCII"));
        let extraction = ["--numeric-owner", "--xattrs", "--xattrs-include=*", "-p"];
        run("tar", &[&["-C", folder, "-xf", archive], &extraction[..]].concat());
    }
    extracted
}

/// The archive of a layer; it panics with the remedy if it is missing.
fn archive(name: &str) -> PathBuf {
    let archive = data_dir().join(format!("{name}.tar"));
    assert!(archive.exists(), "{} is missing: `sudo ./dev test machines` makes it", archive.display());
    archive
}

/// The folder with root file systems and packages.
pub(crate) fn data_dir() -> PathBuf {
    let folder = target_dir().join("machines");
    folder.canonicalize().unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
}

/// Writes a file of a machine, with the folders to it.
pub(crate) fn write(root: &Path, file: &str, text: &str) {
    let path = root.join(file);
    fs::create_dir_all(path.parent().expect("a folder")).expect("our own file system");
    // A link leads out of the root folder, when it is followed from here.
    let _ = fs::remove_file(&path);
    fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}
