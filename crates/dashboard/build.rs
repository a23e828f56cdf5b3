//! Embeds the page that `./dev build` makes in `web/dist`. Without it, the binary says that the page is not
//! inside.
#![allow(clippy::disallowed_methods)] // Edge: it reads what cargo sets, and writes a file.

use std::{env, fs, path::Path};

/// The files of the page, and the constants that hold them.
const FILES: [(&str, &str); 3] = [("INDEX", "index.html"), ("SCRIPT", "app.js"), ("STYLE", "app.css")];

fn main() {
    let web = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../web");
    let dist = web.join("dist");
    let is_there = FILES.iter().all(|(_, name)| dist.join(name).is_file());
    // A path that does not exist would count as changed at each build.
    let watched = [&dist, &web].into_iter().find(|folder| folder.is_dir());
    println!("cargo::rerun-if-changed=build.rs");
    if let Some(watched) = watched {
        println!("cargo::rerun-if-changed={}", watched.display());
    }
    let constants = FILES.map(|(constant, name)| {
        let value = match is_there {
            true => format!("Some(include_bytes!({:?}))", dist.join(name)),
            false => "None".to_owned(),
        };
        format!("const {constant}: Option<&[u8]> = {value};\n")
    });
    let out = Path::new(&env::var("OUT_DIR").expect("cargo sets it")).join("page.rs");
    fs::write(&out, constants.concat()).expect("the folder for what is built can be written");
}
