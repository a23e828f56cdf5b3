//! Classes that are read again while a client runs.

use std::collections::BTreeMap;

use mpvpn_types::ClassId;

use super::{ClassConfig, MatchRule, SteeringRule, rules_of};
use crate::config::ClientConfig;

/// What came of classes that were read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::config) enum ClassReload {
    /// They are the same.
    Unchanged,
    /// Others count from now on.
    Applied,
    /// Devices differ, or what is steered there, which is made at the start: all stays as it is.
    NeedsRestart,
}

impl ClientConfig {
    /// Takes over the classes and rules of `new`. A class keeps its number, which its connection and its sockets know it
    /// by, as long as it is there.
    pub(in crate::config) fn reload_classes(
        &mut self,
        classes: Vec<ClassConfig>,
        mut rules: Vec<MatchRule>,
        mut steering: Vec<SteeringRule>,
    ) -> ClassReload {
        let devices_differ = devices(&self.classes) != devices(&classes);
        let (classes, numbers) = renumbered(&self.classes, classes);
        let all = rules.iter_mut().map(|found| &mut found.rule);
        for rule in all.chain(steering.iter_mut().map(|found| &mut found.rule)) {
            rule.class = numbers.get(&rule.class).copied().unwrap_or_default();
        }
        let steered = |all: &[SteeringRule]| {
            all.iter().map(|found| (found.rule.clone(), found.kernel_match.clone())).collect::<Vec<_>>()
        };
        if devices_differ || steered(&self.class_steering) != steered(&steering) {
            return ClassReload::NeedsRestart;
        }
        // Where a rule is written does not matter.
        let is_changed = self.classes != classes || rules_of(&self.class_rules) != rules_of(&rules);
        (self.classes, self.class_rules, self.class_steering) = (classes, rules, steering);
        if is_changed { ClassReload::Applied } else { ClassReload::Unchanged }
    }
}

fn devices(classes: &[ClassConfig]) -> BTreeMap<&str, &str> {
    classes.iter().filter_map(|class| Some((class.name.as_str(), class.tun.as_deref()?))).collect()
}

/// The new classes in the order of the numbers that they get, and these by those that they had.
fn renumbered(
    old: &[ClassConfig],
    mut new: Vec<ClassConfig>,
) -> (Vec<ClassConfig>, BTreeMap<ClassId, ClassId>) {
    let known = |name: &str| old.iter().find(|class| class.name == name).map(|class| class.id);
    let kept: Vec<ClassId> = new.iter().filter_map(|class| known(&class.name)).collect();
    let mut free = (0..ClassId::MAX).map(ClassId).filter(|id| !kept.contains(id));
    let mut numbers = BTreeMap::new();
    for class in &mut new {
        // There are no more classes than numbers.
        let id = known(&class.name).or_else(|| free.next()).unwrap_or(class.id);
        numbers.insert(std::mem::replace(&mut class.id, id), id);
    }
    new.sort_by_key(|class| class.id);
    (new, numbers)
}
