//! Reads configuration files (TOML). Every error shows its line and column.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use serde::de::DeserializeOwned;

use crate::{Error, Result, files};

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
        locate(&self.text, at..at).0
    }

    /// The error for a mistake in the byte range `span`.
    pub(super) fn error_at(&self, span: Range<usize>, why: String) -> Error {
        let (line, column, shown) = locate(&self.text, span);
        Error::ConfigFile { file: self.file.clone(), line, column, why, shown }
    }
}

/// Reads the named file.
pub(super) fn load_named<T: ConfigFile>(named: &Path) -> Result<T> {
    load(Some(named), named)
}

/// Reads the named file, or the default one if it exists; else the content is empty.
pub(super) fn load<T: ConfigFile>(named: Option<&Path>, default: &Path) -> Result<T> {
    let path = match named {
        Some(path) if !path.exists() => {
            return Err(Error::Usage {
                why: format!("--config names {}, which does not exist", path.display()),
                next: "check that the path is right".into(),
            });
        }
        Some(path) => path,
        None if default.exists() => default,
        None => return Ok(T::default()),
    };
    parse(&files::read_text(path)?, path)
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
    let hyphens = key.replace('_', "-");
    if known.contains(&hyphens.as_str()) {
        return format!("unknown key `{key}`: did you mean `{hyphens}`?");
    }
    format!("unknown key `{key}`; known are: {}", known.join(", "))
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

fn floor_char(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}
