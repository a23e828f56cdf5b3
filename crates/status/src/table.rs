//! Tables and sentences for a terminal. Always holds: a number is shown in full or not at all; no control
//! character of a name reaches the terminal.

/// Columns that a text column keeps at least when it is cut: fewer say nothing. Chosen.
const MIN_TEXT_COLUMNS: usize = 8;

/// Stands for a figure that is not known.
pub const UNKNOWN: &str = "–";

/// A text table with columns as wide as their widest cell, the most important ones first. A head that starts
/// with `>` makes its column right-aligned, as one of numbers.
pub struct Table {
    right: Vec<bool>,
    /// The cells of each row; the first row is the head.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with this head, names of columns separated by `|`, and no other row.
    pub fn new(head: &str) -> Self {
        let head: Vec<_> = head.split('|').collect();
        Self {
            right: head.iter().map(|name| name.starts_with('>')).collect(),
            rows: vec![head.iter().map(|name| name.trim_start_matches('>').to_owned()).collect()],
        }
    }

    /// The table without the columns in which all rows are empty or unknown.
    pub fn without_empty_columns(mut self) -> Self {
        for column in (0..self.right.len()).rev() {
            if self.rows[1..].iter().all(|row| row[column].is_empty() || row[column] == UNKNOWN) {
                self.right.remove(column);
                self.rows.iter_mut().for_each(|row| drop(row.remove(column)));
            }
        }
        self
    }

    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.into());
    }

    /// The widths of the columns that fit, from the left: the last one is cut if it is one of text.
    fn widths_within(&self, width: usize) -> Vec<usize> {
        let widest = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max();
        let mut widths: Vec<_> = (0..self.right.len()).filter_map(widest).collect();
        while let Some(last) = widths.len().checked_sub(1).filter(|last| *last > 0) {
            let mark = if widths.len() < self.right.len() { 2 } else { 0 };
            let excess = (widths.iter().sum::<usize>() + 2 * last + mark).saturating_sub(width);
            let least = self.rows[0][last].chars().count().max(MIN_TEXT_COLUMNS);
            if excess == 0 || !self.right[last] && widths[last] >= least + excess {
                widths[last] -= excess;
                break;
            }
            widths.pop();
        }
        widths
    }
}

/// Appends the table to `text`, after an empty line; nothing if it has no row. Columns for which `width` has
/// no room are left out, from the last one on; the head has a mark then.
pub fn section(text: &mut String, table: Table, width: usize) {
    if table.rows.len() < 2 {
        return;
    }
    let widths = table.widths_within(width);
    text.push('\n');
    for (at, row) in table.rows.iter().enumerate() {
        let cells = row.iter().zip(&widths).zip(&table.right).map(|((cell, width), right)| match right {
            true => format!("{cell:>width$}"),
            false => format!("{:<width$}", shorten(cell, *width)),
        });
        let mark = if at == 0 && widths.len() < row.len() { " …" } else { "" };
        text.push_str((cells.collect::<Vec<_>>().join("  ") + mark).trim_end());
        text.push('\n');
    }
}

/// A text of at most `width` characters: as many of its words as fit.
fn shorten(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let room = width.saturating_sub(1);
    wrap(text, room)[0].chars().take(room).chain(['…']).collect()
}

/// The lines of a sentence, of at most `width` characters unless a word is longer; all but the first are
/// indented, as the labels of sentences are 10 columns wide. There is at least one. A number stays with its
/// unit.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let indent = " ".repeat((width / 2).min(10));
    let is_number = |word: &str| !word.is_empty() && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    let mut lines: Vec<String> = Vec::new();
    let mut words = text.split(' ');
    while let Some(mut word) = words.next().map(str::to_owned) {
        if is_number(&word) {
            word.extend(words.next().map(|unit| format!(" {unit}")));
        }
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.extend([" ", &word]);
            }
            Some(_) => lines.push(indent.clone() + &word),
            None => lines.push(word),
        }
    }
    lines
}

/// Cuts lines to `width` columns, and replaces control characters: names come from files and from the far
/// end, and must not control the terminal.
pub fn fit(text: &str, width: usize) -> String {
    let safe = |c: char| if c.is_control() { '?' } else { c };
    let cut = |line: &str| -> String {
        match line.chars().count() {
            n if n <= width => line.chars().map(safe).collect(),
            _ => line.chars().map(safe).take(width.saturating_sub(1)).chain(['…']).collect(),
        }
    };
    text.lines().map(|line| cut(line) + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(width: usize) -> String {
        let mut table = Table::new("name|>rate|why|>sent");
        table.row(["eth0", "97.4 Mbit/s", "UDP gets no answer for 3 s", "5.0 MiB"].map(str::to_owned));
        table.row(["wwan0", UNKNOWN, "", "0 B"].map(str::to_owned));
        let mut text = String::new();
        section(&mut text, table, width);
        text
    }

    #[test]
    fn columns_that_do_not_fit_are_left_out_and_no_number_is_cut() {
        assert_eq!(
            shown(56),
            "
name          rate  why                            sent
eth0   97.4 Mbit/s  UDP gets no answer for 3 s  5.0 MiB
wwan0            –                                  0 B
"
        );
        assert_eq!(
            shown(45),
            "
name          rate  why                     …
eth0   97.4 Mbit/s  UDP gets no answer for…
wwan0            –
"
        );
        assert_eq!(shown(29), "\nname          rate …\neth0   97.4 Mbit/s\nwwan0            –\n");
        assert_eq!(shown(12), "\nname  …\neth0\nwwan0\n");
        for width in 0..70 {
            let text = shown(width);
            assert!(text.lines().all(|line| line.chars().count() <= width.max(7)), "{width}: {text}");
            assert_eq!(text.contains("97.4"), text.contains("97.4 Mbit/s"), "{width}: {text}");
            assert_eq!(text.contains("for 3"), text.contains("for 3 s"), "{width}: {text}");
        }
    }

    #[test]
    fn a_sentence_continues_on_indented_lines() {
        assert_eq!(wrap("note      it works", 80), ["note      it works"]);
        assert_eq!(wrap("note      it works", 14), ["note      it", "       works"]);
        assert_eq!(wrap("down for 3 s now", 11), ["down for", "     3 s", "     now"]);
        assert_eq!(wrap("interminable", 4), ["interminable"]);
        assert_eq!(wrap("", 0), [""]);
    }
}
