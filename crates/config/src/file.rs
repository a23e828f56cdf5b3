//! Reads configuration files (TOML). Every error shows its line and column.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use serde::de::DeserializeOwned;

use mpvpn_input::{Error, Result, files};
use mpvpn_types::most_similar;

/// Keys that users write into the wrong table, and where they belong.
const MISPLACED_KEYS: &[(&str, &str)] =
    &[("fec", "it is a key of each [[class]] in the client's file, as in fec = \"auto\"")];

/// The content of a configuration file.
pub(super) trait ConfigFile: DeserializeOwned + Default {
    /// Stores the text of the file, for errors that are found after parsing.
    fn set_source(&mut self, _source: SourceText) {}
}

/// The path and text of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SourceText {
    file: PathBuf,
    text: String,
}

impl SourceText {
    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    /// The line of the byte offset `at`, counted from 1.
    pub(super) fn line(&self, at: usize) -> usize {
        line_of(&self.text, at)
    }

    /// The same error with the place of the first key that it names as an option, if the file has one.
    fn place(&self, error: Error) -> Error {
        let Error::Usage { why, next } = &error else { return error };
        let Ok(document) = toml_edit::Document::parse(self.text.as_str()) else { return error };
        let words = why.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
        let mut spans =
            words.filter_map(|word| document.as_table().get_key_value(word.strip_prefix("--")?)?.0.span());
        match spans.next() {
            Some(span) => self.error_at(span, format!("{why}: {next}")),
            None => error,
        }
    }

    /// The error for a mistake in the byte range `span`.
    pub(super) fn error_at(&self, span: Range<usize>, why: String) -> Error {
        let (line, column, shown) = locate(&self.text, span);
        Error::ConfigFile { file: self.file.clone(), line, column, why, shown }
    }
}

/// The content of a file, and its text.
#[derive(Clone, Debug)]
pub(super) struct Loaded<T> {
    pub(super) content: T,
    source: SourceText,
}

impl<T: ConfigFile + Clone> Loaded<T> {
    /// The configuration that results from the file and the command line by `resolve`. That is called again
    /// without the command line to find out where a mistake is: one in the file is an error with its
    /// place.
    pub(super) fn resolve<C>(self, cli: T, resolve: impl Fn(T, T) -> Result<C>) -> Result<C> {
        resolve(cli, self.content.clone()).map_err(|error| {
            match resolve(T::default(), self.content.clone()) {
                Err(of_file) if of_file.to_string() == error.to_string() => self.source.place(error),
                _ => error,
            }
        })
    }
}

/// Reads the named file.
pub(super) fn load_named<T: ConfigFile>(named: &Path) -> Result<Loaded<T>> {
    load(Some(named), named)
}

/// Reads the named file, or the default one if it exists; else the content is empty.
pub(super) fn load<T: ConfigFile>(named: Option<&Path>, default: &Path) -> Result<Loaded<T>> {
    let path = match named {
        Some(path) if !files::may_exist(path) => {
            return Err(Error::Usage {
                why: format!("--config names {}, which does not exist", path.display()),
                next: "check that the path is right".into(),
            });
        }
        Some(path) => path,
        None if files::may_exist(default) => default,
        None => return Ok(Loaded { content: T::default(), source: SourceText::default() }),
    };
    let text = files::read_text(path)?;
    let content = parse(&text, path)?;
    Ok(Loaded { content, source: SourceText { file: path.into(), text } })
}

/// Parses `text`, the content of `file`.
pub(super) fn parse<T: ConfigFile>(text: &str, file: &Path) -> Result<T> {
    let source = SourceText { file: file.into(), text: text.into() };
    match toml::from_str::<T>(text) {
        Ok(mut content) => {
            content.set_source(source);
            Ok(content)
        }
        Err(error) => Err(source.error_at(error.span().unwrap_or(0..0), explain(error.message()))),
    }
}

/// Rewords a message of the parser, with the key that was probably meant.
fn explain(message: &str) -> String {
    let Some((key, known)) =
        message.strip_prefix("unknown field `").and_then(|rest| rest.split_once("`, expected one of "))
    else {
        return message.trim().replace('\n', ", ");
    };
    let known: Vec<_> = known.split(", ").map(|key| key.trim_matches('`')).collect();
    if let Some((_, place)) = MISPLACED_KEYS.iter().find(|(other, _)| *other == key) {
        return format!("`{key}` is not a key of this table: {place}");
    }
    match most_similar(key, &known) {
        Some(similar) => format!("unknown key `{key}`: did you mean `{similar}`?"),
        None => format!("unknown key `{key}`; known are: {}", known.join(", ")),
    }
}

/// Line and column of the start of `span`, counted from 1, and its line underlined.
fn locate(text: &str, span: Range<usize>) -> (usize, usize, String) {
    let start = floor_char(text, span.start);
    let end = floor_char(text, span.end).max(start);
    let line_start = text[..start].rfind('\n').map_or(0, |at| at + 1);
    let line_end = text[start..].find('\n').map_or(text.len(), |at| start + at);
    let line = text[..start].matches('\n').count() + 1;
    let before = text[line_start..start].chars().count();
    let marked = text[start..end.clamp(start, line_end)].chars().count().max(1);

    let number = line.to_string();
    let gutter = " ".repeat(number.len());
    let source = text[line_start..line_end].trim_end_matches('\r').replace('\t', " ");
    let shown = format!(" {number} | {source}\n {gutter} | {}{}", " ".repeat(before), "^".repeat(marked));
    (line, before + 1, shown)
}

/// The line of the byte offset `at` in `text`, counted from 1.
pub(super) fn line_of(text: &str, at: usize) -> usize {
    locate(text, at..at).0
}

fn floor_char(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

/// An option that may be missing, in one of two layers of options.
pub(super) trait OrFallback: Sized {
    /// Whether it is there.
    fn is_given(&self) -> bool;

    /// This option, or `fallback` if this one is missing.
    fn or_fallback(self, fallback: Self) -> Self {
        if self.is_given() { self } else { fallback }
    }
}

impl<T> OrFallback for Option<T> {
    fn is_given(&self) -> bool {
        self.is_some()
    }
}

impl<T> OrFallback for Vec<T> {
    fn is_given(&self) -> bool {
        !self.is_empty()
    }
}

impl OrFallback for bool {
    fn is_given(&self) -> bool {
        *self
    }
}

/// The key of the first of these options that is given.
macro_rules! first_given {
    ($options:expr; $($field:ident $key:literal)+) => {
        [$(($options.$field.is_given(), $key)),+].iter().find(|(is_given, _)| *is_given).map(|(_, key)| *key)
    };
}
pub(super) use first_given;
