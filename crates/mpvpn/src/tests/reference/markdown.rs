//! Tables and texts of Markdown.

/// The comment at the beginning of a generated page.
pub(super) const GENERATED: &str =
    "<!-- Written by `./dev reference` from the definitions in the code: change those instead. -->\n\n";

/// A table with these heads.
pub(super) struct Table {
    text: String,
}

impl Table {
    pub(super) fn new(heads: &[&str]) -> Self {
        let rule = heads.iter().map(|_| "---|").collect::<String>();
        Self { text: format!("| {} |\n|{rule}\n", heads.join(" | ")) }
    }

    pub(super) fn row(&mut self, cells: &[String]) {
        let cells: Vec<_> = cells.iter().map(|cell| escaped(cell)).collect();
        self.text += &format!("| {} |\n", cells.join(" | "));
    }

    pub(super) fn end(self) -> String {
        self.text + "\n"
    }
}

/// A cell is one line, and a bar would end it.
fn escaped(cell: &str) -> String {
    cell.trim().replace('|', "\\|").replace('\n', "<br>")
}

/// A text that is shown as it is written.
pub(super) fn code(text: &str) -> String {
    match text.contains('`') {
        true => format!("`` {text} ``"),
        false => format!("`{text}`"),
    }
}

/// A page with one empty line between its parts, and a line feed at its end.
pub(super) fn tidy(page: &str) -> String {
    let mut text = page.trim_end().to_owned() + "\n";
    while text.contains("\n\n\n") {
        text = text.replace("\n\n\n", "\n\n");
    }
    text
}

/// A text of several lines, in one.
pub(super) fn line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A description and the default that it ends with, as in `Name of the TUN device [default: mpvpn0]`.
pub(super) fn split_default(text: &str) -> (String, String) {
    let text = line(text);
    match text.rsplit_once(" [default: ") {
        Some((head, tail)) if tail.ends_with(']') => (head.to_owned(), tail[..tail.len() - 1].to_owned()),
        _ => (text, String::new()),
    }
}

/// Words and their meanings, for the lines below a description.
pub(super) fn meanings(words: impl IntoIterator<Item = (String, String)>) -> String {
    let lines = words.into_iter().map(|(word, meaning)| format!("\n`{word}`: {}", line(&meaning)));
    lines.collect()
}

#[test]
fn a_default_is_taken_from_the_end_of_a_description() {
    let split = |text: &str| split_default(text);
    assert_eq!(split("Name\n  of it [default: a, b]"), ("Name of it".into(), "a, b".into()));
    assert_eq!(split("Name [default: a] of it"), ("Name [default: a] of it".into(), String::new()));
}
