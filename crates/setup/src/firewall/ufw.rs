//! Rules of ufw, which have a comment.

use super::{DNS_PORT, NOT_NEEDED, Rule, adding};
use crate::plan::{Action, Step};

/// The steps by which ufw has these rules with the comment `tag`, and no others with it. `added` is the
/// output of `ufw show added`.
pub(super) fn changes(added: &str, tag: &str, rules: &[Rule]) -> Vec<Step> {
    let mark = format!(" comment '{tag}'");
    let lines = || added.lines().filter_map(|line| line.trim().strip_prefix("ufw "));
    let own: Vec<&str> = lines().filter_map(|line| line.strip_suffix(&mark)).collect();
    // ufw would give its own comment to an equal rule of somebody else.
    let others: Vec<&str> = lines()
        .filter(|line| !line.ends_with(&mark))
        .map(|line| line.split(" comment '").next().unwrap_or(line))
        .collect();
    let mut wanted: Vec<(String, &Rule)> = Vec::new();
    for rule in rules {
        if let Some(text) = text_of(rule).filter(|text| wanted.iter().all(|(other, _)| other != text)) {
            wanted.push((text, rule));
        }
    }
    let mut steps = Vec::new();
    for text in own.iter().filter(|text| wanted.iter().all(|(wanted, _)| wanted != *text)) {
        steps.push(Step::new(delete(text), NOT_NEEDED, Some(add(text, tag))));
    }
    for (text, rule) in &wanted {
        let is_there = own.contains(&text.as_str()) || others.iter().any(|other| covers(other, text));
        if !is_there {
            let Action::Run(words) = add(text, tag) else { continue };
            steps.push(adding(words, rule, delete(text)));
        }
    }
    steps
}

/// A rule as `ufw show added` prints it, without `ufw` and comment. ufw lets answers pass by itself.
fn text_of(rule: &Rule) -> Option<String> {
    match rule {
        Rule::Port(protocol, port) => Some(format!("allow {port}/{}", protocol.as_str())),
        Rule::Resolver(_, device) => Some(format!("allow in on {device} to any port {DNS_PORT}")),
        Rule::From(device) => Some(format!("route allow in on {device}")),
        Rule::To(device) => Some(format!("route allow out on {device}")),
        Rule::Replies(_) => None,
    }
}

/// Whether `other` lets pass all that `rule` does: it is equal, or the same port of both protocols.
fn covers(other: &str, rule: &str) -> bool {
    other == rule || rule.strip_prefix(other).is_some_and(|rest| rest == "/udp" || rest == "/tcp")
}

fn add(text: &str, tag: &str) -> Action {
    Action::run(["ufw"].into_iter().chain(text.split(' ')).chain(["comment", tag]))
}

fn delete(text: &str) -> Action {
    let (route, rest) = match text.strip_prefix("route ") {
        Some(rest) => (Some("route"), rest),
        None => (None, text),
    };
    Action::run(["ufw"].into_iter().chain(route).chain(["delete"]).chain(rest.split(' ')))
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            Openings,
            tests::{openings, texts},
        },
        *,
    };

    const NONE: &str = "Added user rules (see 'ufw status' for running firewall):\n(None)\n";

    #[test]
    fn rules_are_added_once_and_with_the_comment() {
        let steps = changes(NONE, "mpvpn-server", &openings().rules());
        assert_eq!(
            texts(&steps),
            [
                "ufw allow 443/udp comment mpvpn-server",
                "ufw allow 443/tcp comment mpvpn-server",
                "ufw allow in on mpvpn0 to any port 53 comment mpvpn-server",
                "ufw route allow in on mpvpn0 comment mpvpn-server",
            ]
        );
        assert_eq!(steps[3].undo.as_ref().unwrap().to_string(), "ufw route delete allow in on mpvpn0");
        // As ufw prints them then, with quotes.
        let added: String = texts(&steps)
            .iter()
            .map(|line| line.replace("comment mpvpn-server", "comment 'mpvpn-server'") + "\n")
            .collect();
        assert_eq!(changes(&added, "mpvpn-server", &openings().rules()), []);
        let removal = texts(&changes(&added, "mpvpn-server", &Openings::default().rules()));
        assert_eq!(removal[2], "ufw delete allow in on mpvpn0 to any port 53");
        assert_eq!(removal.len(), 4);
        assert_eq!(changes(&added, "mpvpn-server-work", &[]), [], "rules of another instance stay");
    }

    #[test]
    fn rules_of_others_stay_theirs() {
        let added = "ufw allow 443 comment 'web'\nufw allow 22/tcp\nufw route allow in on mpvpn0\n";
        let steps = texts(&changes(added, "mpvpn-server", &openings().rules()));
        assert_eq!(steps, ["ufw allow in on mpvpn0 to any port 53 comment mpvpn-server"]);
    }

    #[test]
    fn another_port_replaces_the_one_before() {
        let rules = [Rule::Port(mpvpn_types::PortProtocol::Udp, 4433)];
        let steps = texts(&changes("ufw allow 443/udp comment 'mpvpn-server'\n", "mpvpn-server", &rules));
        assert_eq!(steps, ["ufw delete allow 443/udp", "ufw allow 4433/udp comment mpvpn-server"]);
    }
}
