//! Lines that are seen while something runs: in place on a terminal, one below the other elsewhere.

use std::io::{IsTerminal, Write};

/// What has been shown last, so that it can be replaced.
pub(crate) struct Screen {
    place: Place,
    lines: usize,
}

/// Where it is seen.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Terminal,
    Log,
}

impl Screen {
    /// Standard output.
    pub(crate) fn new() -> Self {
        let place = if std::io::stdout().is_terminal() { Place::Terminal } else { Place::Log };
        Self { place, lines: 0 }
    }

    /// Shows `lines` in the place of those before, or `line` below what was said before where that cannot be done.
    pub(crate) fn show(&mut self, lines: &[String], line: &str) {
        match self.place {
            Place::Log => println!("{line}"),
            Place::Terminal => {
                let mut text = String::new();
                if self.lines > 0 {
                    text += &format!("\x1b[{}A", self.lines);
                }
                for line in lines {
                    text += &format!("\x1b[K{line}\n");
                }
                self.lines = lines.len();
                print!("{text}");
                let _ = std::io::stdout().flush();
            }
        }
    }
}
