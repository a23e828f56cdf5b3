//! Programs in a pseudo terminal: the screen that a person sees, and keys.
//!
//! In: a command, and keys. Out: the characters on the screen. Always holds: a control sequence that is not
//! known here fails the test, so that the screen is never guessed; the program is killed when dropped.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::{FromRawFd, OwnedFd},
    process::{Child, Command, ExitStatus},
    ptr,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use crate::eventually;

/// Rows and columns of a screen on which everything has room.
const LARGE: [u16; 2] = [30, 120];

/// A program in a terminal of its own.
pub struct Terminal {
    child: Child,
    keys: File,
    screen: Arc<Mutex<Screen>>,
}

impl Terminal {
    /// Starts a command in a new terminal of 30 rows and 120 columns.
    pub fn start(command: Command) -> Self {
        Self::with_size(LARGE, command)
    }

    /// Starts a command in a new terminal with this number of rows and columns.
    pub fn with_size(size: [u16; 2], mut command: Command) -> Self {
        let [near, far] = open(size);
        let copy = |fd: &OwnedFd| fd.try_clone().expect("a second handle");
        command.env("TERM", "xterm-256color").env("LC_ALL", "C.UTF-8");
        let child = command.stdin(copy(&far)).stdout(copy(&far)).stderr(far).spawn();
        let child = child.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        // The handles of the far end in `command` would keep the terminal open after the program has ended.
        drop(command);
        let screen = Arc::new(Mutex::new(Screen::new(size)));
        let (mut output, shown) = (File::from(copy(&near)), Arc::clone(&screen));
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                shown.lock().expect("the screen").take(&bytes[..count]);
            }
        });
        Self { child, keys: File::from(near), screen }
    }

    /// Types these keys.
    pub fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("the terminal takes keys");
    }

    /// The lines on the screen, without spaces at their ends.
    pub fn lines(&self) -> Vec<String> {
        let screen = self.screen.lock().expect("the screen");
        screen.rows.iter().map(|row| row.iter().collect::<String>().trim_end().to_owned()).collect()
    }

    /// Waits until the screen is as wanted, and returns its lines.
    #[track_caller]
    pub fn wait_for(
        &self,
        limit: Duration,
        what: &str,
        is_wanted: impl Fn(&[String]) -> bool,
    ) -> Vec<String> {
        eventually(limit, what, || {
            let lines = self.lines();
            if is_wanted(&lines) { Ok(lines) } else { Err(format!("\n{}", lines.join("\n"))) }
        })
    }

    /// Waits for the end of the program. Returns its exit status, and whether it has left the alternate
    /// screen, so that what was on the terminal before is shown again.
    pub fn wait_for_end(&mut self, limit: Duration) -> (ExitStatus, bool) {
        let status = eventually(limit, "its end", || {
            self.child.try_wait().expect("our own child").ok_or_else(|| self.lines().join("\n"))
        });
        (status, !self.screen.lock().expect("the screen").is_alternate)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Both ends of a new terminal.
fn open([rows, columns]: [u16; 2]) -> [OwnedFd; 2] {
    let (mut near, mut far) = (-1, -1);
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the pointers are valid or null, as openpty(3) allows; on success both descriptors are new and
    // ours.
    unsafe {
        let code = libc::openpty(&raw mut near, &raw mut far, ptr::null_mut(), ptr::null(), &raw const size);
        assert_eq!(code, 0, "openpty: {}", std::io::Error::last_os_error());
        [OwnedFd::from_raw_fd(near), OwnedFd::from_raw_fd(far)]
    }
}

/// The content of a terminal.
struct Screen {
    rows: Vec<Vec<char>>,
    row: usize,
    column: usize,
    is_alternate: bool,
    /// The beginning of a character or of a control sequence.
    rest: Vec<u8>,
}

impl Screen {
    fn new([rows, columns]: [u16; 2]) -> Self {
        let rows = vec![vec![' '; columns.into()]; rows.into()];
        Self { rows, row: 0, column: 0, is_alternate: false, rest: Vec::new() }
    }

    fn take(&mut self, bytes: &[u8]) {
        self.rest.extend(bytes);
        let text = match std::str::from_utf8(&self.rest) {
            Ok(text) => text.to_owned(),
            Err(error) => String::from_utf8_lossy(&self.rest[..error.valid_up_to()]).into_owned(),
        };
        let mut chars = text.chars();
        loop {
            let before = chars.as_str();
            let Some(next) = chars.next() else { break };
            if next != '\x1b' {
                self.put(next);
            } else if self.control(&mut chars).is_none() {
                chars = before.chars();
                break;
            }
        }
        self.rest.drain(..text.len() - chars.as_str().len());
    }

    fn put(&mut self, next: char) {
        match next {
            '\r' => self.column = 0,
            '\n' => self.row = (self.row + 1).min(self.rows.len() - 1),
            _ => {
                assert!(!next.is_control(), "an unknown control character {next:?}");
                if let Some(cell) = self.rows[self.row].get_mut(self.column) {
                    *cell = next;
                }
                self.column += 1;
            }
        }
    }

    /// Performs a control sequence (ECMA-48, 5.4); `None` if its end has not arrived.
    fn control(&mut self, chars: &mut std::str::Chars<'_>) -> Option<()> {
        assert_eq!(chars.next()?, '[', "an unknown escape sequence");
        let mut parameters = String::new();
        let last = loop {
            match chars.next()? {
                next @ ('0'..='9' | ';' | '?') => parameters.push(next),
                last => break last,
            }
        };
        let number =
            |at: usize| parameters.split(';').nth(at).and_then(|text| text.parse().ok()).unwrap_or(1);
        match (last, parameters.as_str()) {
            ('H', _) => (self.row, self.column) = (number(0) - 1, number(1) - 1),
            ('J', "2") => self.rows.iter_mut().for_each(|row| row.fill(' ')),
            ('h' | 'l', "?1049") => self.is_alternate = last == 'h',
            // Colours and attributes; whether the cursor is shown.
            ('m', _) | ('h' | 'l', "?25") => {}
            _ => panic!("an unknown control sequence: CSI {parameters}{last}"),
        }
        Some(())
    }
}

#[test]
fn a_screen_is_what_the_control_sequences_make_of_it() {
    let mut screen = Screen::new(LARGE);
    for part in ["\x1b[?1049h\x1b[2Jab\x1b[2;3", "Hc", "d\x1b[1m\u{2581}\x1b[0m\r\ne"] {
        part.bytes().for_each(|byte| screen.take(&[byte]));
    }
    let lines: Vec<String> = screen.rows.iter().map(|row| row.iter().collect::<String>()).collect();
    assert_eq!([0, 1, 2].map(|at| lines[at].trim_end()), ["ab", "  cd\u{2581}", "e"]);
    assert!(screen.is_alternate && screen.rest.is_empty());
}
