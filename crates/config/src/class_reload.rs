//! Applies a changed list of classes while a client runs.

use std::collections::BTreeMap;

use mpvpn_types::ClassId;

use crate::classes::{ClassConfig, MatchRule, SteeringRule, rules_of};
use crate::resolve::ClientConfig;

/// The result of reading the classes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClassReload {
    /// The classes are the same.
    Unchanged,
    /// The new classes are in use.
    Applied,
    /// TUN devices of classes or their steering rules differ. These are created at the start only, so nothing
    /// changed.
    NeedsRestart,
}

impl ClientConfig {
    /// Replaces the classes and rules. A class that stays keeps its number, which identifies its connection
    /// and sockets.
    pub(crate) fn reload_classes(
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
        // A rule that only moved within the file is not a change.
        let is_changed = self.classes != classes || rules_of(&self.class_rules) != rules_of(&rules);
        (self.classes, self.class_rules, self.class_steering) = (classes, rules, steering);
        if is_changed { ClassReload::Applied } else { ClassReload::Unchanged }
    }
}

fn devices(classes: &[ClassConfig]) -> BTreeMap<&str, &str> {
    classes.iter().filter_map(|class| Some((class.name.as_str(), class.tun.as_deref()?))).collect()
}

/// The new classes, sorted by their final numbers, and a map from their numbers in the new file to the final
/// ones.
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
