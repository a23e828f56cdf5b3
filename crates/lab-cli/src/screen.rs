//! Progress output: lines that are replaced in place on a terminal, and appended elsewhere.

use std::io::{IsTerminal, Write};

/// The output and the number of lines shown last, which the next output replaces.
pub(crate) struct Screen {
    kind: OutputKind,
    lines: usize,
}

/// The kind of standard output.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OutputKind {
    Terminal,
    Plain,
}

impl Screen {
    /// A screen on standard output.
    pub(crate) fn new() -> Self {
        let kind = if std::io::stdout().is_terminal() { OutputKind::Terminal } else { OutputKind::Plain };
        Self { kind, lines: 0 }
    }

    /// On a terminal replaces the previous lines by `lines`; elsewhere appends `line`.
    pub(crate) fn show(&mut self, lines: &[String], line: &str) {
        match self.kind {
            OutputKind::Plain => println!("{line}"),
            OutputKind::Terminal => {
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
