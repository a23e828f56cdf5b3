//! The package that the machines install.
//!
//! In: what `./dev package` made, by the environment variable `MPVPN_PACKAGE`. Out: that file, the package of
//! the lab beside it, and one with the same content and a higher version.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{isolation::run, root_file_system::folder};

/// The package file.
pub(crate) fn package() -> PathBuf {
    let path = std::env::var_os("MPVPN_PACKAGE").map(PathBuf::from);
    let path =
        path.expect("MPVPN_PACKAGE names the package: `sudo ./dev test machines` makes it and says so");
    assert!(path.exists(), "{} is missing: `./dev package` makes it", path.display());
    path
}

/// The package of the lab, which is made beside it.
pub(crate) fn lab_package() -> PathBuf {
    let package = package();
    let name = package.file_name().expect("a file").to_str().expect("ASCII");
    package.with_file_name(name.replacen("mpvpn_", "mpvpn-lab_", 1))
}

/// The version of a package file.
pub(crate) fn version_of(package: &Path) -> String {
    run("dpkg-deb", &["--field", package.to_str().expect("ASCII"), "Version"]).trim().to_owned()
}

/// The same package with a higher version.
pub(crate) fn newer_package() -> PathBuf {
    let (tree, newer) = (folder().join("newer"), folder().join("mpvpn-newer.deb"));
    if newer.exists() {
        return newer;
    }
    let (package, tree_text) = (package(), tree.to_str().expect("ASCII"));
    run("dpkg-deb", &["--raw-extract", package.to_str().expect("ASCII"), tree_text]);
    let version = version_of(&package);
    let control = tree.join("DEBIAN/control");
    let text = fs::read_to_string(&control).expect("a package has it");
    let text = text.replace(&format!("Version: {version}\n"), &format!("Version: {version}+newer1\n"));
    fs::write(&control, text).expect("our own file system");
    // Quick rather than small: it is installed once.
    run("dpkg-deb", &["-Znone", "--root-owner-group", "--build", tree_text, newer.to_str().expect("ASCII")]);
    fs::remove_dir_all(&tree).expect("our own file system");
    newer
}
