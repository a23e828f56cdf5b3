use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook},
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
};

use mpvpn_config::{ClientConfig, ServerConfig};
use mpvpn_users::Users;

use super::{TARGETS, live, seeds, seeds::texts};

fn folder(kind: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(kind)
}

/// All inputs of a kind, `seeds` or `found`: target, path, bytes.
fn inputs(kind: &str) -> Vec<(String, PathBuf, Vec<u8>)> {
    let mut all = Vec::new();
    for target in fs::read_dir(folder(kind)).into_iter().flatten() {
        let target = target.expect("a folder of this tree").path();
        for file in fs::read_dir(&target).expect("a folder of this tree") {
            let file = file.expect("a file of this tree").path();
            let name = target.file_name().expect("a name").to_string_lossy().into_owned();
            let bytes = fs::read(&file).expect("a file of this tree");
            all.push((name, file, bytes));
        }
    }
    all.sort();
    all
}

#[test]
fn seeds_and_found_inputs_pass() {
    let inputs = [inputs("seeds"), inputs("found")].concat();
    assert!(inputs.len() >= 60, "only {} inputs", inputs.len());
    // A panic in the QUIC library is caught by the product, and is a finding nevertheless.
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    let (before, this_thread) = (take_hook(), std::thread::current().id());
    set_hook(Box::new(move |panic| {
        // Other tests run meanwhile.
        PANICS.fetch_add(usize::from(std::thread::current().id() == this_thread), SeqCst);
        eprintln!("{panic}");
    }));
    let mut failed = Vec::new();
    for (target, path, bytes) in inputs {
        let run =
            TARGETS.iter().find(|(name, _)| *name == target).expect("a folder is named after its target").1;
        let panics = PANICS.load(SeqCst);
        let passed = catch_unwind(AssertUnwindSafe(|| run(&bytes))).is_ok();
        if !passed || PANICS.load(SeqCst) != panics {
            failed.push(path);
        }
    }
    set_hook(before);
    assert!(failed.is_empty(), "these inputs fail: {failed:#?}");
}

#[test]
fn every_target_has_a_program_and_seeds() {
    for (name, _) in TARGETS {
        assert!(folder("fuzz_targets").join(format!("{name}.rs")).exists(), "{name}");
        assert!(seeds::all().iter().any(|(target, ..)| target == name), "{name}");
    }
}

#[test]
fn the_seeds_in_the_tree_are_those_of_the_encoders() {
    let writes = std::env::var_os("MPVPN_WRITE_SEEDS").is_some();
    let mut differ = Vec::new();
    for (target, name, bytes) in seeds::all() {
        let path = folder("seeds").join(target).join(name);
        if writes {
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder can be made");
            fs::write(&path, &bytes).expect("a seed can be written");
        }
        if fs::read(&path).ok().as_ref() != Some(&bytes) {
            differ.push(path);
        }
    }
    let made = seeds::all();
    for (target, path, _) in inputs("seeds") {
        let name = path.file_name().expect("a name").to_string_lossy();
        if !made.iter().any(|(of, made, _)| *of == target && *made == name) {
            differ.push(path);
        }
    }
    assert!(differ.is_empty(), "write them anew by MPVPN_WRITE_SEEDS=1: {differ:#?}");
}

#[test]
fn the_seeds_of_files_are_files_without_a_mistake() {
    let path = Path::new("file.toml");
    ClientConfig::parse(texts::CLIENT, path).unwrap();
    ServerConfig::parse(texts::SERVER, path).unwrap();
    assert_eq!(Users::parse(texts::USERS.as_bytes(), path).unwrap().iter().count(), 2);
}

#[test]
fn the_live_sessions_have_every_extension_and_two_paths() {
    live::tests_support::assert_established();
}
