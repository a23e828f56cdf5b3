//! `mpvpn user`: the users of a server on this machine.

use std::{io::IsTerminal, path::PathBuf, process::ExitCode, time::SystemTime};

use clap::{Args, Parser, Subcommand};
use ipnet::IpNet;
use mpvpn_config::{ConfigSource, ServerConfig, ServerOptions};
use mpvpn_identity::token::Token;
use mpvpn_input::{Error, dirs};
use mpvpn_server as server;
use mpvpn_users::{
    ChangeOptions, ExpiryOption, Joining, LimitOptions, LockedUsers, UserAddress, UserList, UserQuotas,
    UserSettings, Users, check_addresses, host::HostOption, render_user, render_users, site_network,
    unknown_user, users_file,
};
use qrcode::{EcLevel, QrCode, render::unicode::Dense1x2};
use serde_json::{Value, json};

use super::Command;
use crate::{
    failure::Failure,
    output::{print, width},
};

const EXAMPLES: &str = "\
Examples:
  mpvpn user add alice
      prints a join link, which is all that a client of alice needs, and as a QR code on a terminal
  mpvpn user add phone --expires 90d --sessions 1
      a user whose access ends after 90 days, with one client at a time
  mpvpn user add backup --address 10.0.0.7 --host vpn.example:4433
      a user with a fixed address in the tunnel; the link says how the server is reached
  mpvpn user add office --route 192.168.7.0/24
      a user behind whose clients others reach this network (`announce` at the client)
  mpvpn user add guest --up 5mbit --down 20mbit --quota 50GB
      all clients of guest together send at most 5 and receive at most 20 Mbit/s, and carry 50 GB a month
  mpvpn user set guest --down none --quota 100GB --expires 2027-01-31
      other limits from now on, for sessions that run, too; what is not named stays
  mpvpn user rotate alice
      a new token, after the old one was lost: sessions with the old one end
  mpvpn user revoke alice
      no access from now on; `mpvpn user rotate alice` gives it back
  mpvpn user add alice@example.org
      where clients show certificates (--auth mtls), the user that a certificate names; there is no token

No server need run. A running one acts within a second: it takes the new users, and ends the sessions of those who lost
access, with the reason. Changed limits count for sessions that run. The users are in users.toml in the state folder, or where --users or the server's file says.";

/// Add, show, change and remove the users of the server on this machine
#[derive(Debug, Parser)]
#[command(name = "user", after_help = EXAMPLES)]
pub(crate) struct User {
    #[command(subcommand)]
    command: UserCommand,
}

#[derive(Debug, Subcommand)]
enum UserCommand {
    /// Add a user, and print how a client joins
    Add {
        #[command(flatten)]
        user: Name,
        /// When the access ends: a number of days from now, or the last day [default: never]
        #[arg(long, value_name = "90d|2027-01-31")]
        expires: Option<ExpiryOption>,
        /// Address that this user has and nobody else: in the tunnel, or a public one that is led to this
        /// machine, or a network, as 2001:db8:7::/64, for hosts behind the client; repeatable
        #[arg(long, value_name = "IP|CIDR")]
        address: Vec<UserAddress>,
        /// Network that the user's clients may announce, whole or in parts, so that others reach it there;
        /// repeatable
        #[arg(long, value_name = "CIDR", value_parser = site_network)]
        route: Vec<IpNet>,
        /// Number of sessions (connected clients) at once [default: 64]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        sessions: Option<u32>,
        #[command(flatten)]
        limits: LimitOptions,
        #[command(flatten)]
        shown: Shown,
        #[command(flatten)]
        files: ServerFiles,
    },
    /// Change settings of a user, which count at once; what is not named stays
    Set {
        #[command(flatten)]
        user: Name,
        #[command(flatten)]
        change: ChangeOptions,
        #[command(flatten)]
        files: ServerFiles,
    },
    /// List the users
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        files: ServerFiles,
    },
    /// Show a user
    Show {
        #[command(flatten)]
        user: Name,
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        files: ServerFiles,
    },
    /// Give a user a new token, which replaces the old one, and print how a client joins with it. Where
    /// clients show certificates (--auth mtls), give a revoked user the access back
    Rotate {
        #[command(flatten)]
        user: Name,
        #[command(flatten)]
        shown: Shown,
        #[command(flatten)]
        files: ServerFiles,
    },
    /// Take the access of a user away; name and settings stay
    Revoke {
        #[command(flatten)]
        user: Name,
        #[command(flatten)]
        files: ServerFiles,
    },
    /// Remove a user
    Remove {
        #[command(flatten)]
        user: Name,
        #[command(flatten)]
        files: ServerFiles,
    },
}

#[derive(Args, Debug)]
struct Name {
    /// Name of the user
    #[arg(value_name = "NAME", id = "user_name")]
    name: String,
}

/// How a new token is shown.
#[derive(Args, Debug)]
struct Shown {
    /// How clients reach the server, for the join link; without a port, at that of the server [default: the
    /// key `public` of the server's file, else an address of this machine]
    #[arg(long, value_name = "HOST[:PORT]")]
    host: Option<HostOption>,
    /// Print JSON: user, token, link, command
    #[arg(long)]
    json: bool,
}

/// Where the users are.
#[derive(Args, Debug)]
pub(super) struct ServerFiles {
    /// Configuration file of the server [default: /etc/mpvpn/server.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// File with the users [default: as the configuration file says, else users.toml in the state folder]
    #[arg(long, value_name = "FILE")]
    users: Option<PathBuf>,
    /// State folder of the server [default: as the configuration file says, else /var/lib/mpvpn; without
    /// root $XDG_STATE_HOME/mpvpn]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
}

impl ServerFiles {
    pub(super) fn load(self) -> mpvpn_input::Result<ServerConfig> {
        let Self { config, users, state_dir } = self;
        let is_named = config.is_some() || users.is_some() || state_dir.is_some();
        // No socket is used, so none needs a folder.
        let api_socket = dirs::runtime_dir().is_none().then(PathBuf::new);
        let options = ServerOptions { users, state_dir, api_socket, ..ServerOptions::default() };
        let config = ConfigSource::of_server(config, options, server::rights()).load()?;
        // The server on this machine is root's or a service, unless this user has one.
        let is_own = is_named || dirs::is_root() || users_file(&config).exists();
        if is_own || !PathBuf::from(dirs::STATE_DIR).exists() { Ok(config) } else { Err(Error::Denied("")) }
    }
}

impl Command for User {
    fn summary(&self) -> &'static str {
        match &self.command {
            UserCommand::Add { .. } => "cannot add the user",
            UserCommand::Set { .. } => "cannot change the user",
            UserCommand::List { .. } => "cannot list the users",
            UserCommand::Show { .. } => "cannot show the user",
            UserCommand::Rotate { .. } => "cannot give the user a new token",
            UserCommand::Revoke { .. } => "cannot take the access away",
            UserCommand::Remove { .. } => "cannot remove the user",
        }
    }

    fn run(self) -> Result<ExitCode, Failure> {
        print(&self.command.perform()?)
    }
}

impl UserCommand {
    /// Does it; returns what to print.
    fn perform(self) -> mpvpn_input::Result<String> {
        let now = SystemTime::now();
        let text = match self {
            Self::Add { user: Name { name }, expires, address, route, sessions, limits, shown, files } => {
                let config = files.load()?;
                check_addresses(&config, &address)?;
                let expires = expires.map(|option| option.resolve_ahead(now)).transpose()?;
                let joining = Joining::new(&config, shown.host)?;
                let LimitOptions { up, down, quota } = limits;
                let settings = UserSettings { expires, address, route, sessions, up, down, quota };
                let mut users = LockedUsers::open(&users_file(&config))?;
                let token = users.add_with_credential(&name, &settings, joining.credential)?;
                drop(users);
                give_out(&joining, &name, token, shown.json)
            }
            Self::Set { user: Name { name }, change, files } => {
                let config = files.load()?;
                let change = change.resolve(now)?;
                check_addresses(&config, change.address.as_deref().unwrap_or_default())?;
                let mut users = LockedUsers::open(&users_file(&config))?;
                users.set(&name, &change)?;
                show(users.users(), &name, &config, now)?
            }
            Self::Rotate { user: Name { name }, shown, files } => {
                let config = files.load()?;
                let joining = Joining::new(&config, shown.host)?;
                let token = LockedUsers::open(&users_file(&config))?.renew(&name, joining.credential)?;
                give_out(&joining, &name, token, shown.json)
            }
            Self::Revoke { user: Name { name }, files } => {
                LockedUsers::open(&users_file(&files.load()?))?.revoke(&name)?;
                format!("{name} has no access any more; `mpvpn user rotate {name}` gives it back\n")
            }
            Self::Remove { user: Name { name }, files } => {
                let config = files.load()?;
                LockedUsers::open(&users_file(&config))?.remove(&name)?;
                // Another user may get the name.
                UserQuotas::forget(&config.state_dir, &name)?;
                format!("{name} is removed\n")
            }
            Self::List { json, files } => {
                let config = files.load()?;
                let list = load_list(&config, now)?;
                match json {
                    true => json_text(&list.json(now)),
                    false => render_users(&list.users, &list.quotas, now, width()),
                }
            }
            Self::Show { user: Name { name }, json, files } => {
                let config = files.load()?;
                let list = load_list(&config, now)?;
                let entry = list.users.get(&name).ok_or_else(|| unknown_user(&list.users, &name))?;
                match json {
                    true => json_text(&list.json_of(entry, now)),
                    false => render_user(&list.users, entry, &list.quotas, now, width()),
                }
            }
        };
        Ok(text)
    }
}

/// The users, with what they have used by the count of the server if it runs, else by its file.
fn load_list(config: &ServerConfig, now: SystemTime) -> mpvpn_input::Result<UserList> {
    let list = UserList::load(config, now)?;
    let counted = mpvpn_api::fetch_status(&config.api_socket).map(|status| status.users).unwrap_or_default();
    Ok(list.with_used(now, counted.into_iter().filter_map(|user| Some((user.name, user.quota_used_bytes?)))))
}

fn show(users: &Users, name: &str, config: &ServerConfig, now: SystemTime) -> mpvpn_input::Result<String> {
    // Usage does not matter here, and may be unreadable for a process that may change users.
    let quotas = UserQuotas::read(&config.state_dir).unwrap_or_default();
    let entry = users.get(name).ok_or_else(|| unknown_user(users, name))?;
    Ok(render_user(users, entry, &quotas, now, width()))
}

/// How `user` joins, with this token if there is one. Remembers the pin that is given out.
pub(super) fn give_out(joining: &Joining, user: &str, token: Option<Token>, json: bool) -> String {
    if let Err(error) = joining.remember_pin_of(user) {
        eprintln!(
            "mpvpn: warning: nobody will be asked before another certificate locks {user} out: {error}"
        );
    }
    let Some(token) = token else { return text_for_certificate(joining, user, json) };
    let link = joining.link(token);
    let command = link.client_command();
    if json {
        let token = link.token.reveal();
        return json_text(
            &json!({ "user": user, "token": token, "link": link.to_string(), "command": command }),
        );
    }
    let mut text = format!("{user} joins with this link, which is shown this once:\n  {link}\n");
    text += &format!("on the client, as root:\n  {command}\n");
    text += "`mpvpn setup client` instead of `mpvpn client` makes it a service there.\n";
    text += &note_of_guess(joining);
    if std::io::stdout().is_terminal() {
        text += &qr_code(&link.to_string());
    }
    text
}

/// How `user` joins by a certificate.
fn text_for_certificate(joining: &Joining, user: &str, json: bool) -> String {
    let command = joining.certificate_command();
    if json {
        return json_text(&json!({ "user": user, "command": command }));
    }
    let mut text = format!(
        "{user} has access with a certificate that a CA of `client-ca` signed, and that names {user}: as the first e-mail \
         address, DNS name or URI of its subjectAltName, or without these as its common name. There is no token.\n\
         On the client, as root, with the files of the certificate and of its key:\n  {command}\n"
    );
    text += &note_of_guess(joining);
    text
}

/// Says that nobody said how the server is reached, if that is so.
fn note_of_guess(joining: &Joining) -> String {
    if !joining.is_guess {
        return String::new();
    }
    format!(
        "{} is an address of this machine. If clients reach it by another one, say so by --host, or by `public` in the \
         server's file.\n",
        joining.server
    )
}

/// The text as a QR code for terminals; empty if it is too long for one.
fn qr_code(text: &str) -> String {
    QrCode::with_error_correction_level(text, EcLevel::L).map_or_else(
        |_| String::new(),
        |code| {
            // Most terminals are dark: with its colours swapped, the code looks as on paper.
            let image =
                code.render::<Dense1x2>().dark_color(Dense1x2::Light).light_color(Dense1x2::Dark).build();
            format!("{image}\n")
        },
    )
}

fn json_text(value: &Value) -> String {
    format!("{value:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qr_code_has_the_link_and_fits_on_a_terminal() {
        let link = format!("mpvpn://mpvpn_{}@vpn.example.org:443/?pin={}", "x".repeat(43), "0".repeat(64));
        let code = qr_code(&link);
        let widest = code.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(widest <= 80 && code.lines().count() < 40, "{widest} × {}", code.lines().count());
    }
}
