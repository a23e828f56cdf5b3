//! Hides secrets in the arguments of this process, which every user of the machine can read
//! (`/proc/PID/cmdline`, `ps`).
//!
//! In: the arguments. Out: the same with asterisks in place of secrets, for others; this process has copied
//! its arguments before. Always holds: nothing but the kernel's view of the arguments is written.

use std::{
    fs::{self, File},
    io,
    ops::Range,
    os::unix::fs::FileExt,
};

/// Fields of `/proc/self/stat` (proc_pid_stat(5)) after the name of the program: those with the addresses of
/// the arguments' first byte and of the byte after the last.
const ARGUMENTS_BEGIN: usize = 45;
const ARGUMENTS_END: usize = 46;

/// Overwrites the secrets among the arguments. `secret_in` gets an argument and the one before it, and says
/// which bytes are secret.
///
/// # Errors
/// If the kernel does not let the process see or change its own arguments.
pub fn hide(secret_in: impl Fn(Option<&[u8]>, &[u8]) -> Option<Range<usize>>) -> io::Result<()> {
    let arguments = fs::read("/proc/self/cmdline")?;
    let secrets = secret_ranges(&arguments, secret_in);
    if secrets.is_empty() {
        return Ok(());
    }
    let (begin, length) = place_of_arguments(&fs::read_to_string("/proc/self/stat")?)
        .ok_or_else(|| io::Error::other("/proc/self/stat does not say where the arguments are"))?;
    if length < arguments.len() as u64 {
        // Something has changed them already.
        return Err(io::Error::other("the arguments are not where they were at the start"));
    }
    let memory = File::options().write(true).open("/proc/self/mem")?;
    for range in secrets {
        memory.write_all_at(&vec![b'*'; range.len()], begin + range.start as u64)?;
    }
    Ok(())
}

/// The places of secrets in the arguments, which are separated by zero bytes.
fn secret_ranges(
    arguments: &[u8],
    secret_in: impl Fn(Option<&[u8]>, &[u8]) -> Option<Range<usize>>,
) -> Vec<Range<usize>> {
    let (mut found, mut at, mut before) = (Vec::new(), 0, None);
    for argument in arguments.split(|byte| *byte == 0) {
        if let Some(range) = secret_in(before, argument).filter(|range| range.end <= argument.len()) {
            found.push(at + range.start..at + range.end);
        }
        at += argument.len() + 1;
        before = Some(argument);
    }
    found
}

/// Address and length of the arguments.
fn place_of_arguments(stat: &str) -> Option<(u64, u64)> {
    // The name of the program may have spaces and brackets.
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split_whitespace().collect();
    let [begin, end] = [ARGUMENTS_BEGIN, ARGUMENTS_END].map(|field| fields.get(field)?.parse::<u64>().ok());
    let (begin, end) = (begin?, end?);
    (begin > 0 && end > begin).then(|| (begin, end - begin))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_places_of_secrets_are_found() {
        let after_token = |before: Option<&[u8]>, argument: &[u8]| {
            (before == Some(b"--token")).then_some(0..argument.len())
        };
        let arguments = b"mpvpn\0client\0--token\0secret\0--path\0eth0\0";
        assert_eq!(secret_ranges(arguments, after_token), std::iter::once(21..27).collect::<Vec<_>>());
        assert_eq!(&arguments[21..27], b"secret");
        assert!(secret_ranges(b"mpvpn\0--token\0", |_, _| Some(0..99)).is_empty());
    }

    #[test]
    fn the_arguments_of_this_process_are_where_the_kernel_says() {
        let stat = fs::read_to_string("/proc/self/stat").unwrap();
        let (begin, length) = place_of_arguments(&stat).unwrap();
        let arguments = fs::read("/proc/self/cmdline").unwrap();
        assert_eq!(length, arguments.len() as u64);
        let mut read = vec![0; arguments.len()];
        File::open("/proc/self/mem").unwrap().read_exact_at(&mut read, begin).unwrap();
        assert_eq!(read, arguments);
        assert_eq!(place_of_arguments("1 (a) b) R 1 2"), None);
    }
}
