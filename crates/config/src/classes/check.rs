//! Validates the classes of a file: portions, links, TUN devices and rules that contradict each other.

use mpvpn_class::UnreachableReason;
use mpvpn_types::{BitRate, ClassId, Portion};

use super::{
    ClassConfig, ClassContext, ClassTables, MatchRule, SteeringRule, rules_of, steering,
    table::{Key, Table},
};
use crate::{SharedNetwork, is_match};
use mpvpn_input::{Error, Result};

/// The classes, the tables that define them, and the options that they must agree with.
pub(super) struct ClassCheck<'a> {
    pub(super) tables: &'a ClassTables,
    /// The classes, at the index of their number.
    pub(super) list: &'a [ClassConfig],
    pub(super) context: &'a ClassContext<'a>,
}

/// A link whose rate the guaranteed portions of several classes must fit into.
struct SharedLink<'a> {
    /// For error messages: `each link`, or a name.
    name: String,
    rates: Vec<BitRate>,
    classes: Vec<&'a ClassConfig>,
}

impl ClassCheck<'_> {
    /// Runs all checks; `rules` and `steering` are those of the file.
    pub(super) fn all(&self, rules: &[MatchRule], steering: &[SteeringRule]) -> Result<()> {
        self.portions()?;
        for table in &self.tables.tables {
            let class = self.class(table);
            self.links(table, class)?;
            self.tun(table, class)?;
            self.pinned(table, class)?;
        }
        self.rules(rules)?;
        self.steering(steering)
    }

    /// Refuses to pin the class that carries what others do not.
    fn pinned(&self, table: &Table, class: &ClassConfig) -> Result<()> {
        if class.pinned && class.id == ClassId::DEFAULT {
            let why = "the class `default` cannot be `pinned`: it carries the packets that no rule matches";
            return Err(self.error_at(table, Key::Pinned, why.to_owned()));
        }
        Ok(())
    }

    /// Refuses a `min` above `max`, and guarantees that exceed a link.
    fn portions(&self) -> Result<()> {
        let shared_links = self.shared_links();
        for table in &self.tables.tables {
            let class = self.class(table);
            let (Some(min), Some(max)) = (class.min, class.max) else { continue };
            let above = match (min, max) {
                (Portion::Percent(min), Portion::Percent(max)) => min > max,
                (Portion::Rate(min), Portion::Rate(max)) => min > max,
                // A rate and a percentage can only be compared where the rate of a link is configured.
                _ => shared_links
                    .iter()
                    .filter(|link| link.classes.iter().any(|user| user.id == class.id))
                    .any(|link| link.rates.iter().any(|rate| min.of(*rate) > max.of(*rate))),
            };
            if above {
                let why = format!(
                    "`min` of the class `{}` is {min}, which is more than its `max` {max}",
                    class.name
                );
                return Err(self.error_at(table, Key::Min, why));
            }
        }
        shared_links.iter().try_for_each(|link| self.check_sums(link))
    }

    /// The links on which the sum of the guarantees has to be checked.
    fn shared_links(&self) -> Vec<SharedLink<'_>> {
        let classes = |excluded: &dyn Fn(&ClassConfig) -> bool| {
            self.list.iter().filter(|class| class.min.is_some() && !excluded(class)).collect::<Vec<_>>()
        };
        // A link that no table names.
        let any = SharedLink {
            name: "each link".into(),
            rates: Vec::new(),
            classes: classes(&|class| !class.exclude.is_empty()),
        };
        let named = self.context.links.iter().map(|link| SharedLink {
            name: format!("the link `{}`", link.name),
            rates: [link.up, link.down].into_iter().flatten().collect(),
            classes: classes(&|class| class.excludes(&link.name)),
        });
        let paths = self.context.paths.iter().filter(|path| *path != "auto").map(|path| SharedLink {
            name: format!("the link `{path}`"),
            rates: Vec::new(),
            classes: classes(&|class| class.excludes(path)),
        });
        std::iter::once(any).chain(named).chain(paths).collect()
    }

    fn check_sums(&self, link: &SharedLink<'_>) -> Result<()> {
        let mut percents = 0;
        let mut sums = vec![0; link.rates.len()];
        for (at, class) in link.classes.iter().enumerate() {
            let Some(min) = class.min else { continue };
            if let Portion::Percent(percent) = min {
                percents += u32::from(percent);
            }
            for (sum, rate) in sums.iter_mut().zip(&link.rates) {
                *sum += u128::from(min.of(*rate).bps());
            }
            let over = sums.iter().zip(&link.rates).find(|(sum, rate)| **sum > u128::from(rate.bps()));
            let of = match over {
                _ if percents > 100 => format!("100% of {}", link.name),
                Some((_, rate)) => format!("{}, which carries {rate}", link.name),
                None => continue,
            };
            let needs: Vec<_> = link.classes[..=at]
                .iter()
                .filter_map(|class| class.min.map(|min| format!("{min} for {}", class.name)))
                .collect();
            let why = match needs.as_slice() {
                [one] => format!("{one} is more than {of}"),
                several => format!("{} are together more than {of}", several.join(" and ")),
            };
            // The error points to the last table of those whose guarantees were added.
            let last = self.tables.tables.iter().rev().find(|table| {
                table.min.is_some() && link.classes[..=at].iter().any(|class| class.name == *table.name())
            });
            return last.map_or(Ok(()), |table| Err(self.error_at(table, Key::Min, why)));
        }
        Ok(())
    }

    /// Refuses `prefer` and `exclude` that name unknown links, contradict each other, or leave no link.
    fn links(&self, table: &Table, class: &ClassConfig) -> Result<()> {
        let ClassContext { paths, .. } = self.context;
        let is_pattern = |text: &str| text.contains(['*', '?']);
        let all_known = !paths.iter().any(|path| path == "auto" || is_pattern(path));
        // A pattern may match links that appear later.
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
                return Err(self.error_at(table, key, why));
            }
        }
        if let Some(both) = class.prefer.iter().find(|link| class.excludes(link)) {
            let why = format!("the link `{both}` is both in `prefer` and in `exclude`");
            return Err(self.error_at(table, Key::Exclude, why));
        }
        if all_known && paths.iter().all(|path| class.excludes(path)) {
            let why = format!(
                "the class `{}` would have no link: `exclude` names all of {}",
                class.name,
                paths.join(", ")
            );
            return Err(self.error_at(table, Key::Exclude, why));
        }
        Ok(())
    }

    fn tun(&self, table: &Table, class: &ClassConfig) -> Result<()> {
        let Some(tun) = &class.tun else { return Ok(()) };
        let other = self.tables.tables.iter().map(|other| self.class(other));
        let mut before = other.take_while(|other| other.id != class.id);
        let why = if tun == self.context.tun_name {
            format!("`{tun}` is the TUN device of the client itself")
        } else if let Some(other) = before.find(|other| other.tun.as_ref() == Some(tun)) {
            format!("`{tun}` is the TUN device of the class `{}`", other.name)
        } else if self.context.paths.contains(tun) {
            format!("`{tun}` is a link of --path: choose another name for the TUN device of the class")
        } else if self.context.share.iter().any(|share| *share == SharedNetwork::Interface(tun.clone())) {
            format!("`{tun}` is an interface of --share: choose another name for the TUN device of the class")
        } else if tun.contains(['*', '?']) {
            format!("`{tun}` is a pattern: expected the name of one device")
        } else {
            return Ok(());
        };
        Err(self.error_at(table, Key::Tun, why))
    }

    /// Refuses rules that can never decide, because an earlier one matches all their packets or because they
    /// match none.
    fn rules(&self, rules: &[MatchRule]) -> Result<()> {
        let Some(first) = rules_of(rules).unreachable().into_iter().next() else { return Ok(()) };
        let why = match first.reason {
            UnreachableReason::Covered(by) => {
                let by = &rules[by];
                let class = &self.list[usize::from(by.rule.class.0)].name;
                format!(
                    "this rule never decides: the rule at {} (class `{class}`) comes first and matches all its packets",
                    by.origin
                )
            }
            other => format!("this rule never decides: {other}"),
        };
        let mut spans = self.tables.tables.iter().flat_map(|table| table.rules().map(|(span, _)| span));
        let span = spans.nth(first.rule).unwrap_or_default();
        Err(self.tables.source.error_at(span, why))
    }

    /// Refuses rules by which the kernel cannot steer packets.
    fn steering(&self, rules: &[SteeringRule]) -> Result<()> {
        let of_classes = self.list.iter().filter_map(|class| class.tun.as_deref());
        let tuns: Vec<&str> = of_classes.chain([self.context.tun_name]).collect();
        let spans = self.tables.tables.iter().flat_map(|table| table.steering().map(|(span, ..)| span));
        for (found, span) in rules.iter().zip(spans) {
            let class = &self.list[usize::from(found.rule.class.0)];
            if let Some(why) = steering::steering_error(found, class, &tuns) {
                return Err(self.tables.source.error_at(span, why));
            }
        }
        Ok(())
    }

    fn class(&self, table: &Table) -> &ClassConfig {
        // Every table has a class, so the fallback is never used.
        self.list.iter().find(|class| class.name == *table.name()).unwrap_or(&self.list[0])
    }

    fn error_at(&self, table: &Table, key: Key, why: String) -> Error {
        self.tables.source.error_at(table.span(key), why)
    }
}
