//! Changes the links of a lab that another process runs (`mpvpn lab link`).
//!
//! In: a request, one line of JSON over a Unix socket. Out: an answer, one line of JSON. Always holds: a
//! request is applied completely or, if one of its changes is wrong, not at all.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    thread::JoinHandle,
    time::Duration,
};

use mpvpn_lab::{ChannelParams, Direction, Lab, LabError, LinkHandle, RUN_DIR};
use serde::{Deserialize, Serialize};

/// Longest request or answer, in bytes; the rest is not read. Requests have about 100 bytes; a larger limit
/// would let a peer take memory, a smaller one would cut long lists of changes.
const MAX_LINE: u64 = 4096;
/// Time that the peer has to send its line. The lab answers at once; longer keeps the control thread from
/// serving others, shorter fails on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Serialize, Deserialize)]
struct Request {
    /// Counted from 1.
    link: usize,
    direction: String,
    changes: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct Answer {
    error: Option<String>,
}

/// The control socket of a running lab; dropping it removes the socket and ends its thread.
pub(crate) struct ControlSocket {
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl ControlSocket {
    /// Opens the socket of `lab` under `name`.
    pub(crate) fn open(lab: &Lab, name: &str) -> Result<Self, LabError> {
        let path = socket_path(name)?;
        if UnixStream::connect(&path).is_ok() {
            return Err(LabError::NameTaken(name.to_owned()));
        }
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(LabError::io(format!("open {}", path.display())))?;
        let links = lab.links().to_vec();
        let thread = std::thread::Builder::new()
            .name("lab-control".to_owned())
            .spawn(move || serve(&listener, &links))
            .map_err(LabError::io("start the control thread"))?;
        Ok(Self { path, thread: Some(thread) })
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        // An empty request tells the thread to end. Only root can open the socket.
        let ended = UnixStream::connect(&self.path).and_then(|mut stream| stream.write_all(b"\n"));
        let _ = std::fs::remove_file(&self.path);
        if let (Ok(()), Some(thread)) = (ended, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

/// Asks the lab `name` to change link `link` (counted from 1). Without a name exactly one lab must be
/// running.
pub(crate) fn ask(
    name: Option<&str>,
    link: usize,
    direction: &str,
    changes: &[String],
) -> Result<(), LabError> {
    let (name, mut stream) = connect(name)?;
    let request = Request { link, direction: direction.to_owned(), changes: changes.to_vec() };
    let talk = LabError::io(format!("talk to the lab `{name}`"));
    let answer = (|| {
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.write_all(format!("{}\n", serde_json::to_string(&request)?).as_bytes())?;
        let mut line = String::new();
        BufReader::new(stream.take(MAX_LINE)).read_line(&mut line)?;
        Ok(serde_json::from_str::<Answer>(&line)?)
    })()
    .map_err(talk)?;
    answer.error.map_or(Ok(()), |error| Err(LabError::Refused(error)))
}

fn connect(name: Option<&str>) -> Result<(String, UnixStream), LabError> {
    let open = |name: &str| Ok::<_, LabError>(UnixStream::connect(socket_path(name)?).ok());
    if let Some(name) = name {
        let stream = open(name)?.ok_or_else(|| {
            LabError::NoLabChosen(format!("no lab named `{name}` is running: start one with `mpvpn lab up`"))
        })?;
        return Ok((name.to_owned(), stream));
    }
    let mut running = Vec::new();
    for entry in std::fs::read_dir(RUN_DIR).into_iter().flatten().flatten() {
        let file = entry.file_name();
        let Some(name) = file.to_str().and_then(|file| file.strip_suffix(".sock")) else { continue };
        if let Ok(Some(stream)) = open(name) {
            running.push((name.to_owned(), stream));
        }
    }
    if running.len() > 1 {
        let names: Vec<_> = running.iter().map(|(name, _)| name.as_str()).collect();
        return Err(LabError::NoLabChosen(format!(
            "several labs are running: choose one with --lab, of {}",
            names.join(", ")
        )));
    }
    running
        .pop()
        .ok_or_else(|| LabError::NoLabChosen("no lab is running: start one with `mpvpn lab up`".to_owned()))
}

fn socket_path(name: &str) -> Result<PathBuf, LabError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if !(1..=32).contains(&name.len()) || !name.bytes().all(allowed) {
        return Err(LabError::BadName(name.to_owned()));
    }
    Ok(PathBuf::from(format!("{RUN_DIR}/{name}.sock")))
}

fn serve(listener: &UnixListener, links: &[LinkHandle]) {
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let mut line = String::new();
        let read = stream
            .set_read_timeout(Some(TIMEOUT))
            .and_then(|()| BufReader::new((&stream).take(MAX_LINE)).read_line(&mut line));
        if read.is_err() {
            continue;
        }
        if line == "\n" {
            return;
        }
        let error = match serde_json::from_str::<Request>(&line) {
            Ok(request) => apply(links, &request).err().map(|error| error.to_string()),
            Err(error) => Some(format!("the request is not valid JSON for a change of a link: {error}")),
        };
        if let Ok(answer) = serde_json::to_string(&Answer { error }) {
            let _ = stream.write_all(format!("{answer}\n").as_bytes());
        }
    }
}

/// Makes all changes of a request, or none if one of them is wrong.
fn apply(links: &[LinkHandle], request: &Request) -> Result<(), LabError> {
    let link = request
        .link
        .checked_sub(1)
        .and_then(|index| links.get(index))
        .ok_or(LabError::NoSuchLink { wanted: request.link, count: links.len() })?;
    let direction: Direction =
        request.direction.parse().map_err(|_| LabError::InvalidChange(request.direction.clone()))?;
    let mut settings = Vec::new();
    for change in &request.changes {
        match change.split_once('=') {
            Some((key, value)) => {
                ChannelParams::default().set(key, value)?;
                settings.push((key.to_owned(), value.to_owned()));
            }
            None if change == "up" || change == "down" => {}
            None => return Err(LabError::InvalidChange(change.clone())),
        }
    }
    if !settings.is_empty() {
        link.set(direction, move |params| {
            for (key, value) in &settings {
                // The loop above has checked it: it cannot fail.
                let _ = params.set(key, value);
            }
        })?;
    }
    for change in &request.changes {
        match change.as_str() {
            "up" => link.up()?,
            "down" => link.down()?,
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_lab_applies_valid_changes_and_explains_invalid_ones() {
        let lab = Lab::builder().link("100mbit,1ms".parse().unwrap()).build().unwrap();
        let name = format!("test-{}", std::process::id());
        let _control_socket = ControlSocket::open(&lab, &name).unwrap();
        let request = |link, direction, changes: &[&str]| {
            let changes: Vec<String> = changes.iter().map(|text| (*text).to_owned()).collect();
            ask(Some(&name), link, direction, &changes).map_err(|error| error.to_string())
        };
        let carrier = || {
            let output = lab.client().command("cat").arg("/sys/class/net/eth1/carrier").output().unwrap();
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        };
        assert_eq!(request(1, "both", &["loss=10%", "delay=5ms", "down"]), Ok(()));
        assert_eq!(carrier(), "0");
        assert_eq!(request(1, "up", &["up"]), Ok(()));
        assert_eq!(carrier(), "1");
        for (link, direction, change, expected) in [
            (2, "both", "down", "no link 2"),
            (0, "both", "down", "no link 0"),
            (1, "sideways", "down", "`sideways`"),
            (1, "both", "hello", "`hello`"),
            (1, "both", "loss=200%", "not a share"),
        ] {
            let error = request(link, direction, &[change]).unwrap_err();
            assert!(error.contains(expected), "{change}: {error}");
        }
        assert!(matches!(ControlSocket::open(&lab, &name), Err(LabError::NameTaken(_))));
        assert!(matches!(ControlSocket::open(&lab, "../x"), Err(LabError::BadName(_))));
    }
}
