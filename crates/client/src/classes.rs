//! The classes of a client: the configuration of each class's connection, and how it uses the links.

use mpvpn_class::{Rules, Share};
use mpvpn_config::{ClassConfig, ClientConfig, is_match, rules_of};
use mpvpn_links::{LinkClass, policies::LinkPolicies};
use mpvpn_tunnel::{ClassProfile, ClassSetup, ClientConfig as TunnelConfig, LinkPolicy};
use mpvpn_types::{ClassId, LinkId, Tier};

/// The classes of a client, the default class first.
#[derive(Clone)]
pub(super) struct Classes {
    list: Vec<ClassConfig>,
    pub(super) rules: Rules,
}

impl Classes {
    /// The classes of a configuration. Without packets (`mpvpn proxy`) there is only the default class,
    /// because rules match packets.
    pub(super) fn from_config(config: &ClientConfig, has_packets: bool) -> Self {
        match has_packets {
            true => Self { list: config.classes.clone(), rules: rules_of(&config.class_rules) },
            false => Self { list: config.classes[..1].to_vec(), rules: Rules::default() },
        }
    }

    /// The parameters of the classes for their sockets.
    pub(super) fn link_classes(&self) -> Vec<LinkClass> {
        self.list.iter().map(|class| LinkClass { id: class.id, dscp: class.dscp }).collect()
    }

    /// The setups of the classes' connections; `tunnel` makes each one's configuration.
    pub(super) fn setups(&self, mut tunnel: impl FnMut(&ClassConfig) -> TunnelConfig) -> Vec<ClassSetup> {
        let has_several = self.list.len() > 1;
        let setup = |class: &ClassConfig| {
            let config = tunnel(class);
            let class_profile = ClassProfile { address: self.address(class.id), ..profile(class) };
            let config = TunnelConfig { class: has_several.then_some(class_profile), ..config };
            let (priority, connects_at_once) = (class.priority, class.connects_at_once);
            ClassSetup { id: class.id, priority, connects_at_once, config }
        };
        self.list.iter().map(setup).collect()
    }

    /// Which of the session's addresses is that of a pinned class's TUN device: the first is the tunnel's.
    fn address(&self, id: ClassId) -> Option<u8> {
        let mut with_tun = self.list.iter().filter(|class| class.tun.is_some());
        let place = with_tun.position(|class| class.id == id && class.pinned)?;
        u8::try_from(place + 1).ok()
    }

    /// The name of a class; empty if it was removed.
    pub(super) fn name(&self, id: ClassId) -> &str {
        self.list.iter().find(|class| class.id == id).map_or("", |class| class.name.as_str())
    }

    /// The classes that `new` lacks.
    pub(super) fn removed_in(&self, new: &Self) -> Vec<ClassId> {
        let stays = |id: ClassId| new.list.iter().any(|class| class.id == id);
        self.list.iter().map(|class| class.id).filter(|id| !stays(*id)).collect()
    }

    /// Whether `new` has this class with the same connection settings. The choice of links does not matter,
    /// since it can change on a live connection, nor does when that begins.
    pub(super) fn has_same_connection(&self, id: ClassId, new: &Self) -> bool {
        let of = |classes: &Self| {
            let class = classes.list.iter().find(|class| class.id == id)?;
            let (prefer, exclude, only, connects_at_once) = Default::default();
            Some(ClassConfig { prefer, exclude, only, connects_at_once, ..class.clone() })
        };
        of(self) == of(new)
    }

    /// The policy of a class's connection for a link, or one of its pipes, of this name.
    pub(super) fn policy(&self, id: LinkId, name: &str, policies: &LinkPolicies) -> LinkPolicy {
        let policy = policies.policy(name);
        let Some(class) = self.list.iter().find(|class| class.id == id.class()) else { return policy };
        let fits = |patterns: &[String]| patterns.iter().any(|pattern| is_match(pattern, name));
        let wanted = class.prefer.is_empty() || fits(&class.prefer);
        let is_unused = !id.is_tcp() && id.path_index() >= policies.path_count(name).used;
        let tier = match policy.tier {
            _ if fits(&class.exclude) || !class.only.is_empty() && !fits(&class.only) => Tier::Never,
            Tier::Primary | Tier::Overflow if !wanted || is_unused => Tier::Backup,
            tier => tier,
        };
        LinkPolicy { tier, ..policy }
    }
}

fn profile(class: &ClassConfig) -> ClassProfile {
    let share = Share { first: class.priority, weight: class.weight, min: class.min, max: class.max };
    let (name, dscp, pinned) = (class.name.clone(), class.dscp, class.pinned);
    ClassProfile { name, share, dscp, pinned, address: None }
}

#[cfg(test)]
mod tests {
    use mpvpn_config::LinkConfig;
    use mpvpn_path::PathCount;
    use mpvpn_status::pipes::Pipes;
    use mpvpn_types::ClassId;

    use super::*;

    #[test]
    fn a_class_takes_the_links_that_it_prefers_and_none_that_it_excludes() {
        let [default, critical, bulk] = ClassConfig::built_in();
        let critical = ClassConfig { prefer: vec!["star*".into()], ..critical };
        let bulk = ClassConfig { exclude: vec!["wwan0".into()], ..bulk };
        let classes = Classes { list: vec![default, critical, bulk], rules: Rules::default() };
        let of = |id, name: &str, tier| {
            let link = LinkConfig { name: name.into(), tier, ..LinkConfig::default() };
            let mut policies = LinkPolicies::new(&[LinkConfig { pipes: Some(Pipes::Auto), ..link }]);
            policies.set_auto_pipes(name, PathCount { open: 2, used: 1 });
            classes.policy(id, name, &policies).tier
        };
        let tier = |class, name, tier| of(LinkId(3).with_class(ClassId(class)), name, tier);
        assert_eq!(tier(0, "wwan0", Tier::Primary), Tier::Primary);
        assert_eq!(tier(1, "star1", Tier::Overflow), Tier::Overflow);
        assert_eq!(tier(1, "wwan0", Tier::Primary), Tier::Backup);
        assert_eq!(tier(1, "wwan0", Tier::Never), Tier::Never);
        assert_eq!(
            (tier(2, "wwan0", Tier::Primary), tier(2, "eth0", Tier::Backup)),
            (Tier::Never, Tier::Backup)
        );
        let unused = LinkId(3).with_path_index(1);
        let [default, ..] = ClassConfig::built_in();
        let only = ClassConfig { id: ClassId(5), only: vec!["eth0".into()], ..default };
        let measured = Classes { list: vec![only], rules: Rules::default() };
        let on = |name: &str, tier| {
            let link = LinkConfig { name: name.into(), tier, ..LinkConfig::default() };
            measured.policy(LinkId(3).with_class(ClassId(5)), name, &LinkPolicies::new(&[link])).tier
        };
        assert_eq!((on("eth0", Tier::Backup), on("eth1", Tier::Primary)), (Tier::Backup, Tier::Never));
        assert_eq!(
            (of(unused, "eth0", Tier::Primary), of(unused, "eth0", Tier::Never)),
            (Tier::Backup, Tier::Never)
        );
        assert_eq!(
            classes.link_classes().iter().map(|class| class.dscp).collect::<Vec<_>>(),
            [None, Some(46), Some(8)]
        );
    }
    #[test]
    fn only_what_a_connection_knows_makes_it_another_one() {
        let classes = |list: Vec<ClassConfig>| Classes { list, rules: Rules::default() };
        let [default, critical, bulk] = ClassConfig::built_in();
        let before = classes(vec![default.clone(), critical.clone(), bulk.clone()]);
        let critical = ClassConfig { prefer: vec!["star*".into()], ..critical };
        let bulk = ClassConfig { copies: 2, ..bulk };
        let added = ClassConfig { id: ClassId(3), name: "cams".into(), ..default.clone() };
        let after = classes(vec![default, bulk, added, critical]);
        assert_eq!(
            [0, 1, 2, 3].map(|id| before.has_same_connection(ClassId(id), &after)),
            [true, true, false, false]
        );
        assert_eq!((before.removed_in(&after), after.removed_in(&before)), (vec![], vec![ClassId(3)]));
    }
}
