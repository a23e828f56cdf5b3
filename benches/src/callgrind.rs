//! Runs one benchmark under callgrind, and parses its result.
//!
//! The count must not depend on the machine or its user. valgrind emulates the same processor on every
//! machine with AVX2, so that libraries choose the same code. The environment is empty, because its size
//! changes the alignment of the stack.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

use crate::plan::Benchmark;

/// Functions during which callgrind counts: the macros of gungraun put the measured code, without its setup,
/// into a module of this name.
const MEASURED: &str = "*::__gungraun_wrapper_mod::*";

/// The command that runs `benchmark` of `binary` and writes callgrind's file to `out`.
pub fn command(valgrind: &Path, binary: &Path, benchmark: &Benchmark, out: &Path) -> Command {
    let mut command = Command::new(valgrind);
    let mut file = OsString::from("--callgrind-out-file=");
    file.push(out);
    command
        .env_clear()
        .args(["--tool=callgrind", "--quiet", "--error-exitcode=1"])
        // A cache simulation would double the time.
        .args(["--cache-sim=no", "--compress-strings=no", "--compress-pos=no", "--combine-dumps=yes"])
        .arg(format!("--toggle-collect={MEASURED}"))
        .arg(file);
    // The program's path is on its stack, too; run from its folder, it is always the same.
    if let (Some(folder), Some(name)) = (binary.parent(), binary.file_name()) {
        command.current_dir(folder).arg(Path::new(".").join(name));
    }
    command.args(&benchmark.arguments);
    command
}

/// The total number of instructions in a callgrind file.
///
/// # Errors
/// If there is no line with totals, or the total is 0 because no function matched `MEASURED`.
pub fn total(file: &str) -> Result<u64, String> {
    let total = file.lines().find_map(|line| line.strip_prefix("totals:"));
    let total = total.ok_or("callgrind left no totals")?.trim();
    match total.parse() {
        Ok(0) => Err(format!("nothing was counted: there is no function {MEASURED}")),
        Ok(total) => Ok(total),
        Err(_) => Err(format!("callgrind left totals that are no number: '{total}'")),
    }
}

/// Finds a program in `path`, a list of folders as in `PATH`.
pub fn find(name: &str, path: &std::ffi::OsStr) -> Option<PathBuf> {
    std::env::split_paths(path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_benchmark_is_run_with_an_empty_environment_from_its_folder() {
        let benchmark =
            Benchmark { name: "packet::update".to_owned(), arguments: vec!["--gungraun-run".to_owned()] };
        let valgrind = Path::new("/usr/bin/valgrind");
        let command = command(valgrind, Path::new("/t/deps/packet-1"), &benchmark, Path::new("/t/o.out"));
        let words: Vec<_> = command.get_args().collect();
        assert!(words.contains(&std::ffi::OsStr::new("--callgrind-out-file=/t/o.out")));
        assert_eq!(words[words.len() - 2..], ["./packet-1", "--gungraun-run"]);
        assert_eq!(command.get_current_dir(), Some(Path::new("/t/deps")));
        assert_eq!(command.get_envs().count(), 0);
    }

    #[test]
    fn the_total_is_read() {
        assert_eq!(total("version: 1\nfn=a\n1 20\n\ntotals: 1234\n"), Ok(1234));
    }

    #[test]
    fn a_file_in_which_nothing_is_counted_is_an_error() {
        for file in ["", "fn=a\n", "totals: 0\n", "totals: many\n"] {
            assert!(total(file).is_err(), "{file:?}");
        }
    }

    #[test]
    fn a_program_is_found_in_the_first_folder_that_has_it() {
        let path = std::ffi::OsStr::new("/nowhere:/bin:/usr/bin");
        assert_eq!(find("sh", path), Some(PathBuf::from("/bin/sh")));
        assert_eq!(find("no-such-program", path), None);
    }
}
