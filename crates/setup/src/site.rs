//! The site that visitors without credentials see, as somebody who sets a server up wishes it.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
};

use mpvpn_input::role::Role;
use toml_edit::{DocumentMut, Item, Table, value};

use super::{
    instance::Instance,
    machine::MachineFacts,
    plan::{Action, Audience, Step},
};

/// The page that setup makes: as little as many other servers show that nobody has cared for.
pub(super) const PLAIN_PAGE: &str = "<!DOCTYPE html>\n<title>Welcome</title>\n<h1>It works!</h1>\n";

/// The site that visitors without credentials see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SiteWish {
    /// Nothing: each page is missing.
    Nothing,
    /// The pages of the web server at this address, as in `http://127.0.0.1:8080`.
    Upstream(String),
    /// The files of this folder: an absolute path.
    Folder(PathBuf),
    /// One plain page, which setup makes.
    Page,
}

impl FromStr for SiteWish {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let folder = Path::new(text);
        match text {
            "none" => Ok(Self::Nothing),
            "page" => Ok(Self::Page),
            _ if text.contains("://") => Ok(Self::Upstream(text.to_owned())),
            _ if folder.is_absolute() && folder.is_dir() => Ok(Self::Folder(folder.to_owned())),
            _ if folder.is_absolute() => Err(format!("there is no folder {text}: make it first")),
            _ => Err(format!(
                "`{text}` is no site: give the address of a web server as in http://127.0.0.1:8080, the absolute path of a folder, \
                 `page` or `none`"
            )),
        }
    }
}

impl SiteWish {
    /// Writes the table `[site]`; its keys about other things stay.
    pub(super) fn write(&self, document: &mut DocumentMut, instance: &Instance) {
        let (kept, removed, text) = match self {
            Self::Nothing => {
                document.remove("site");
                return;
            }
            Self::Upstream(address) => ("upstream", "root", address.clone()),
            Self::Folder(folder) => ("root", "upstream", folder.display().to_string()),
            Self::Page => ("root", "upstream", page_folder(instance).display().to_string()),
        };
        let site = document.entry("site").or_insert_with(|| Item::Table(Table::new()));
        let Some(site) = site.as_table_like_mut() else { return };
        site.remove(removed);
        site.insert(kept, value(text));
    }

    /// The step that makes the plain page, unless there is one. It must come before the server starts.
    pub(super) fn step(&self, instance: &Instance, machine: &MachineFacts) -> Option<Step> {
        let path = page_file(instance).filter(|_| *self == Self::Page && machine.page.is_none());
        path.map(|path| {
            let write =
                Action::Write { path: path.clone(), text: PLAIN_PAGE.to_owned(), audience: Audience::All };
            Step::new(
                write,
                "visitors without a token see it: change it as you like",
                Some(Action::Remove(path)),
            )
        })
    }
}

/// The folder of the plain page, beside the configuration file. Its name ends in `.d`, so that it is removed
/// with its last file.
fn page_folder(instance: &Instance) -> PathBuf {
    let name = instance.name().map(|name| format!("-{name}")).unwrap_or_default();
    instance.file().with_file_name(format!("site{name}.d"))
}

/// The plain page of a server.
pub(super) fn page_file(instance: &Instance) -> Option<PathBuf> {
    (instance.role() == Role::Server).then(|| page_folder(instance).join("index.html"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_is_an_address_a_folder_a_page_or_none() {
        let read = |text: &str| text.parse::<SiteWish>();
        assert_eq!(read("none"), Ok(SiteWish::Nothing));
        assert_eq!(read("page"), Ok(SiteWish::Page));
        assert_eq!(read("http://127.0.0.1:8080"), Ok(SiteWish::Upstream("http://127.0.0.1:8080".into())));
        assert_eq!(read("/usr"), Ok(SiteWish::Folder("/usr".into())));
        let missing = read("/nowhere/at/all").unwrap_err();
        assert!(missing.contains("make it first"), "{missing}");
        for bad in ["", "www", "./www", "127.0.0.1:8080", "Page"] {
            assert!(read(bad).unwrap_err().contains("`page` or `none`"), "{bad}");
        }
    }
}
