//! What classes say that cannot be, alone or together.

use mpvpn_class::UnreachableReason;
use mpvpn_types::{BitRate, Portion};

use super::{
    ClassConfig, ClassTables, MatchRule, SteeringRule, Surroundings, rules_of, steer,
    table::{Key, Table},
};
use crate::{
    Error, Result,
    config::{SharedNetwork, is_match},
};

/// The classes and what they came from.
pub(super) struct Check<'a> {
    pub(super) tables: &'a ClassTables,
    /// Each with its number as its place.
    pub(super) list: &'a [ClassConfig],
    pub(super) around: &'a Surroundings<'a>,
}

/// What carries the portions that classes ask for.
struct Carrier<'a> {
    /// As in "of each link".
    name: String,
    rates: Vec<BitRate>,
    users: Vec<&'a ClassConfig>,
}

impl Check<'_> {
    /// All of it; `rules` and `steering` are those of the file.
    pub(super) fn all(&self, rules: &[MatchRule], steering: &[SteeringRule]) -> Result<()> {
        self.portions()?;
        for table in &self.tables.tables {
            let class = self.class(table);
            self.links(table, class)?;
            self.tun(table, class)?;
        }
        self.rules(rules)?;
        self.steering(steering)
    }

    /// Portions that contradict each other.
    fn portions(&self) -> Result<()> {
        let carriers = self.carriers();
        for table in &self.tables.tables {
            let class = self.class(table);
            let (Some(min), Some(max)) = (class.min, class.max) else { continue };
            let above = match (min, max) {
                (Portion::Percent(min), Portion::Percent(max)) => min > max,
                (Portion::Rate(min), Portion::Rate(max)) => min > max,
                // One says nothing about the other until the rate of a link is known.
                _ => carriers
                    .iter()
                    .filter(|carrier| carrier.users.iter().any(|user| user.id == class.id))
                    .any(|carrier| carrier.rates.iter().any(|rate| min.of(*rate) > max.of(*rate))),
            };
            if above {
                let why = format!("the class `{}` would get {min} at least and {max} at most", class.name);
                return Err(self.mistake(table, Key::Min, why));
            }
        }
        carriers.iter().try_for_each(|carrier| self.sums(carrier))
    }

    /// What could carry less than classes need together.
    fn carriers(&self) -> Vec<Carrier<'_>> {
        let users = |excluded: &dyn Fn(&ClassConfig) -> bool| {
            self.list.iter().filter(|class| class.min.is_some() && !excluded(class)).collect::<Vec<_>>()
        };
        // Some link is there that has no name here.
        let any = Carrier {
            name: "each link".into(),
            rates: Vec::new(),
            users: users(&|class| !class.exclude.is_empty()),
        };
        let named = self.around.links.iter().map(|link| Carrier {
            name: format!("the link `{}`", link.name),
            rates: [link.up, link.down].into_iter().flatten().collect(),
            users: users(&|class| class.excludes(&link.name)),
        });
        let paths = self.around.paths.iter().filter(|path| *path != "auto").map(|path| Carrier {
            name: format!("the link `{path}`"),
            rates: Vec::new(),
            users: users(&|class| class.excludes(path)),
        });
        std::iter::once(any).chain(named).chain(paths).collect()
    }

    fn sums(&self, carrier: &Carrier<'_>) -> Result<()> {
        let mut percents = 0;
        let mut sums = vec![0; carrier.rates.len()];
        for (at, class) in carrier.users.iter().enumerate() {
            let Some(min) = class.min else { continue };
            if let Portion::Percent(percent) = min {
                percents += u32::from(percent);
            }
            for (sum, rate) in sums.iter_mut().zip(&carrier.rates) {
                *sum += u128::from(min.of(*rate).bps());
            }
            let over = sums.iter().zip(&carrier.rates).find(|(sum, rate)| **sum > u128::from(rate.bps()));
            let of = match over {
                _ if percents > 100 => format!("100% of {}", carrier.name),
                Some((_, rate)) => format!("{}, which carries {rate}", carrier.name),
                None => continue,
            };
            let needs: Vec<_> = carrier.users[..=at]
                .iter()
                .filter_map(|class| class.min.map(|min| format!("{min} for {}", class.name)))
                .collect();
            let why = match needs.as_slice() {
                [one] => format!("{one} is more than {of}"),
                several => format!("{} are together more than {of}", several.join(" and ")),
            };
            // Of the classes whose needs were added, the one that comes last in the file is the one to look at.
            let last = self.tables.tables.iter().rev().find(|table| {
                table.min.is_some() && carrier.users[..=at].iter().any(|class| class.name == *table.name())
            });
            return last.map_or(Ok(()), |table| Err(self.mistake(table, Key::Min, why)));
        }
        Ok(())
    }

    /// Links that a class cannot have.
    fn links(&self, table: &Table, class: &ClassConfig) -> Result<()> {
        let Surroundings { paths, .. } = self.around;
        let is_pattern = |text: &str| text.contains(['*', '?']);
        let all_known = !paths.iter().any(|path| path == "auto" || is_pattern(path));
        // A pattern may stand for links that come later.
        let is_possible = |said: &str| {
            paths.iter().any(|path| path == "auto" || is_match(path, said) || is_match(said, path))
                || is_pattern(said) && !all_known
        };
        for (key, name, said) in
            [(Key::Prefer, "prefer", &class.prefer), (Key::Exclude, "exclude", &class.exclude)]
        {
            if let Some(unknown) = said.iter().find(|said| !is_possible(said)) {
                let why =
                    format!("`{name}` names the link `{unknown}`, which is none of: {}", paths.join(", "));
                return Err(self.mistake(table, key, why));
            }
        }
        if let Some(both) = class.prefer.iter().find(|link| class.excludes(link)) {
            let why = format!("the link `{both}` is preferred and excluded");
            return Err(self.mistake(table, Key::Exclude, why));
        }
        if all_known && paths.iter().all(|path| class.excludes(path)) {
            let why = format!(
                "the class `{}` would have no link: all of {} are excluded",
                class.name,
                paths.join(", ")
            );
            return Err(self.mistake(table, Key::Exclude, why));
        }
        Ok(())
    }

    fn tun(&self, table: &Table, class: &ClassConfig) -> Result<()> {
        let Some(tun) = &class.tun else { return Ok(()) };
        let other = self.tables.tables.iter().map(|other| self.class(other));
        let mut before = other.take_while(|other| other.id != class.id);
        let why = if tun == self.around.tun_name {
            format!("`{tun}` is the TUN device of the client itself")
        } else if let Some(other) = before.find(|other| other.tun.as_ref() == Some(tun)) {
            format!("`{tun}` is the TUN device of the class `{}`", other.name)
        } else if self.around.paths.contains(tun) {
            format!("`{tun}` is one of the links")
        } else if self.around.share.iter().any(|share| *share == SharedNetwork::Interface(tun.clone())) {
            format!("`{tun}` is to share the tunnel, and would be the tunnel")
        } else if tun.contains(['*', '?']) {
            format!("`{tun}` is a pattern: expected a name")
        } else {
            return Ok(());
        };
        Err(self.mistake(table, Key::Tun, why))
    }

    /// Rules that can never decide.
    fn rules(&self, rules: &[MatchRule]) -> Result<()> {
        let Some(first) = rules_of(rules).unreachable().into_iter().next() else { return Ok(()) };
        let why = match first.reason {
            UnreachableReason::Covered(by) => {
                let by = &rules[by];
                let class = &self.list[usize::from(by.rule.class.0)].name;
                format!(
                    "this rule never decides: the one at {} (class `{class}`) comes first and fits all that it fits",
                    by.origin
                )
            }
            other => format!("this rule never decides: {other}"),
        };
        let mut spans = self.tables.tables.iter().flat_map(|table| table.rules().map(|(span, _)| span));
        let span = spans.nth(first.rule).unwrap_or_default();
        Err(self.tables.source.mistake(span, why))
    }

    /// Rules for packets that the kernel is to steer and cannot.
    fn steering(&self, rules: &[SteeringRule]) -> Result<()> {
        let of_classes = self.list.iter().filter_map(|class| class.tun.as_deref());
        let tuns: Vec<&str> = of_classes.chain([self.around.tun_name]).collect();
        let spans = self.tables.tables.iter().flat_map(|table| table.steering().map(|(span, ..)| span));
        for (found, span) in rules.iter().zip(spans) {
            let class = &self.list[usize::from(found.rule.class.0)];
            if let Some(why) = steer::objection(found, class, &tuns) {
                return Err(self.tables.source.mistake(span, why));
            }
        }
        Ok(())
    }

    fn class(&self, table: &Table) -> &ClassConfig {
        // Every table has its class, so the other way out is never taken.
        self.list.iter().find(|class| class.name == *table.name()).unwrap_or(&self.list[0])
    }

    fn mistake(&self, table: &Table, key: Key, why: String) -> Error {
        self.tables.source.mistake(table.span(key), why)
    }
}
