//! Classes of traffic: `[[class]]` in a client's file, and the rules that assign packets to them.
//!
//! In: the parsed tables ([`ClassTables`]), and the options that they must agree with. Out: all classes,
//! built-in ones included, and the rules in the order of evaluation. Always holds: contradictions are refused
//! with the line of the file.

mod check;
pub(crate) mod steering;
pub(crate) mod table;

use std::path::PathBuf;

use derive_more::Display;
use mpvpn_class::{BUILT_IN_RULES, BULK, BuiltInRule, CRITICAL, Rule, Rules};
use mpvpn_types::{ClassId, Fec, Portion, Weight};

use super::{
    LinkConfig, SharedNetwork,
    file::{OrFallback, SourceText},
    links::is_match,
};
use mpvpn_input::Result;
use mpvpn_path::Scheduler;
use mpvpn_types::{CongestionControl, FlowMode};

pub use steering::{KernelMatch, Mark, SteeringRule};
pub use table::ClassTables;

/// The settings of a class of traffic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClassConfig {
    /// Its number: `default` is 0, `critical` 1, `bulk` 2, others follow in the order of the file. The
    /// number stays the same when the file is read again.
    pub id: ClassId,
    /// Its name.
    pub name: String,
    /// How its TCP connections travel where no rule decides; `None`: as the client's.
    pub lane: Option<FlowMode>,
    /// The congestion controller of its paths; `None`: the client's.
    pub cc: Option<CongestionControl>,
    /// How its packets are spread over the paths; `None`: as the client's.
    pub scheduler: Option<Scheduler>,
    /// On how many links each packet travels, 1 to [`mpvpn_class::MAX_COPIES`].
    pub copies: u8,
    /// How its packets are protected against loss.
    pub fec: Fec,
    /// Its share of a link relative to other classes that compete for it.
    pub weight: Weight,
    /// The guaranteed rate on each link.
    pub min: Option<Portion>,
    /// The limit on each link. A class with [`priority`](Self::priority) precedes others up to this limit.
    pub max: Option<Portion>,
    /// The DSCP of the tunnel's packets that carry it (RFC 2474), 0 to 63; `None`: that of the link.
    pub dscp: Option<u8>,
    /// Links that it uses as long as one of them works: names, or patterns of names.
    pub prefer: Vec<String>,
    /// Links that it never uses: names, or patterns of names.
    pub exclude: Vec<String>,
    /// The only links that it ever uses; all if it is empty. Measurements set it, not files.
    pub only: Vec<String>,
    /// Its own TUN device, if it has one. All packets from this device belong to the class, whatever the
    /// rules say.
    pub tun: Option<String>,
    /// Whether its packets are sent before those of classes without priority.
    pub priority: bool,
    /// Whether its packets travel on its own connection only.
    pub pinned: bool,
    /// Whether it has a connection from its first packet on, and not only while a link is full or loses
    /// packets: a table in the file says in which way the class travels.
    pub connects_at_once: bool,
}

impl ClassConfig {
    /// The built-in classes, at the index of their number.
    pub fn built_in() -> [Self; 3] {
        let default = Self::new(ClassId::DEFAULT, "default".into());
        // 46 is EF (RFC 3246). 8 is CS1 for bulk traffic: more networks know it than LE (RFC 8622).
        let critical = Self {
            max: Some(Portion::Percent(50)),
            dscp: Some(46),
            priority: true,
            ..Self::new(CRITICAL, "critical".into())
        };
        let bulk = Self { weight: weight(1), dscp: Some(8), ..Self::new(BULK, "bulk".into()) };
        [default, critical, bulk]
    }

    fn new(id: ClassId, name: String) -> Self {
        Self { id, name, copies: 1, weight: weight(4), ..Self::default() }
    }

    fn excludes(&self, link: &str) -> bool {
        self.exclude.iter().any(|pattern| is_match(pattern, link))
    }
}

/// A weight from a constant that is within the limits.
fn weight(number: u64) -> Weight {
    Weight::new(number).unwrap_or_default()
}

/// A rule that assigns packets to a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatchRule {
    /// Where the rule is defined.
    pub origin: RuleOrigin,
    /// The packets that it matches, and their class.
    pub rule: Rule,
}

/// Where a rule is defined.
#[derive(Clone, Debug, Display, PartialEq, Eq)]
pub enum RuleOrigin {
    /// A `[[class.match]]`.
    #[display("{}, line {line}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// The line of its head, counted from 1.
        line: usize,
    },
    /// It is a built-in rule with this name.
    #[display("built-in `{_0}`")]
    BuiltIn(&'static str),
}

impl MatchRule {
    /// The built-in rules.
    pub fn built_in() -> Vec<Self> {
        let one = |built_in: &BuiltInRule| Self {
            origin: RuleOrigin::BuiltIn(built_in.name),
            rule: built_in.rule(),
        };
        BUILT_IN_RULES.iter().map(one).collect()
    }
}

/// The rules without their origins, in the form that classifies packets.
pub fn rules_of(rules: &[MatchRule]) -> Rules {
    Rules::new(rules.iter().map(|found| found.rule.clone()).collect())
}

/// All classes, and all rules in the order of evaluation.
pub(super) struct ResolvedClasses {
    pub(super) list: Vec<ClassConfig>,
    pub(super) rules: Vec<MatchRule>,
    pub(super) steering: Vec<SteeringRule>,
}

/// The options of the client that its classes must agree with.
pub(super) struct ClassContext<'a> {
    pub(super) paths: &'a [String],
    pub(super) links: &'a [LinkConfig],
    pub(super) tun_name: &'a str,
    pub(super) share: &'a [SharedNetwork],
}

impl OrFallback for ClassTables {
    fn is_given(&self) -> bool {
        !self.tables.is_empty()
    }
}

impl ClassTables {
    pub(super) fn set_source(&mut self, source: SourceText) {
        self.source = source;
    }

    /// Fills in defaults, and refuses what contradicts itself or the options in `context`.
    pub(super) fn resolve(&self, context: &ClassContext<'_>) -> Result<ResolvedClasses> {
        let list = self.classes()?;
        let (mut rules, mut steering) = (Vec::new(), Vec::new());
        let origin = |line| RuleOrigin::File { file: self.source.file().into(), line };
        for table in &self.tables {
            let id = list
                .iter()
                .find(|class| class.name == table.name())
                .map_or(ClassId::DEFAULT, |class| class.id);
            rules.extend(table.rules().map(|(span, rule)| MatchRule {
                origin: origin(self.source.line(span.start)),
                rule: Rule { class: id, ..rule.clone() },
            }));
            steering.extend(table.steering().map(|(span, rule, kernel_match)| SteeringRule {
                origin: origin(self.source.line(span.start)),
                rule: Rule { class: id, ..rule.clone() },
                kernel_match: kernel_match.clone(),
            }));
        }
        check::ClassCheck { tables: self, list: &list, context }.all(&rules, &steering)?;
        rules.extend(MatchRule::built_in());
        Ok(ResolvedClasses { list, rules, steering })
    }

    /// All classes with their numbers and the settings of their tables.
    fn classes(&self) -> Result<Vec<ClassConfig>> {
        let mut list = Vec::from(ClassConfig::built_in());
        for (at, table) in self.tables.iter().enumerate() {
            let name = table.name();
            if self.tables[..at].iter().any(|other| other.name() == name) {
                let why = format!("there are two [[class]] with the name `{name}`: say all of it in one");
                return Err(self.source.error_at(table.name_span(), why));
            }
            let place = match list.iter().position(|class| class.name == name) {
                Some(place) => place,
                None if list.len() == usize::from(ClassId::MAX) => {
                    let why = format!(
                        "`{name}` is one class too many: {} are possible, and critical, default and bulk are always there",
                        ClassId::MAX
                    );
                    return Err(self.source.error_at(table.name_span(), why));
                }
                None => {
                    let id = ClassId(list.len() as u8);
                    list.push(ClassConfig::new(id, name.to_owned()));
                    list.len() - 1
                }
            };
            table.apply(&mut list[place]);
        }
        Ok(list)
    }
}

#[cfg(test)]
mod tests;
