//! The properties of a class that a client sends to the server, as the extension `class`.
//!
//! In: a [`ClassProfile`], or the member of the extension. Out: the other of the two. Always holds: a member
//! with a malformed name or known parameter counts as absent, and unknown parameters are ignored.

use mpvpn_class::Share;
use mpvpn_masque::structured::{Member, Typed, integer, parameters, set_parameter, string_member};
use mpvpn_types::{BitRate, ClassId, ClassName, Portion, Weight};

/// A class of traffic, as known to both ends of its connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClassProfile {
    /// Its name, a [`ClassName`].
    pub name: String,
    /// Its share of each link, in either direction.
    pub share: Share,
    /// DSCP of the outer packets (RFC 2474), 0 to 63; `None`: that of the link.
    pub dscp: Option<u8>,
    /// Whether its packets travel on its own connection only, and never on that of another class.
    pub pinned: bool,
    /// The number of the session's address of each family that is a pinned class's own, counted from 0 in
    /// the order of assignment; `None`: it has none.
    pub address: Option<u8>,
}

/// Limits that a server sets for a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserLimits {
    /// Most sessions at a time, and most sessions whose addresses are kept; `None`: no limit.
    pub max_sessions: Option<u32>,
    /// Most classes of a session, the default class included.
    pub max_classes: u8,
    /// The most that each priority class may use of a link, towards the client.
    pub max_priority_share: Option<Portion>,
}

impl Default for UserLimits {
    fn default() -> Self {
        Self { max_sessions: None, max_classes: ClassId::MAX, max_priority_share: None }
    }
}

impl UserLimits {
    /// Most connections at a time; `None`: no limit. A session has one of each class in each thread of its
    /// client, and as many that it has replaced may not have ended. Connections without packets, which belong
    /// to no session, count too.
    pub(crate) fn max_connections(&self) -> Option<usize> {
        let of_session = usize::from(self.max_classes) * usize::from(mpvpn_quic::MAX_SHARDS) * 2;
        self.max_sessions.map(|sessions| sessions as usize * of_session)
    }

    /// A share as the limits allow it.
    pub(crate) fn bound(&self, share: Share) -> Share {
        let Some(limit) = self.max_priority_share.filter(|_| share.first) else { return share };
        let least = match (share.max, limit) {
            (Some(Portion::Rate(asked)), Portion::Rate(limit)) => Portion::Rate(asked.min(limit)),
            (Some(Portion::Percent(asked)), Portion::Percent(limit)) => Portion::Percent(asked.min(limit)),
            // A rate and a percentage cannot be compared without the link: the limit of the server applies.
            (_, limit) => limit,
        };
        Share { max: Some(least), min: None, ..share }
    }
}

impl ClassProfile {
    /// The member of the extension: a String with parameters; `None` if the name is no String.
    pub(crate) fn member(&self) -> Option<Member> {
        let Share { first, weight, min, max } = self.share;
        let mut member = string_member(&self.name)?;
        if first {
            set_parameter(&mut member, "first", true);
        }
        set_parameter(&mut member, "weight", weight.get());
        for (name, portion) in [("min", min), ("max", max)] {
            let (unit, number) = match portion {
                Some(Portion::Rate(rate)) => ("kbps", (rate.bps() / 1000).max(1)),
                Some(Portion::Percent(percent)) => ("percent", percent.into()),
                None => continue,
            };
            set_parameter(&mut member, &format!("{name}-{unit}"), integer(number));
        }
        if let Some(dscp) = self.dscp {
            set_parameter(&mut member, "dscp", dscp);
        }
        if self.pinned {
            set_parameter(&mut member, "pinned", true);
        }
        if let Some(address) = self.address {
            set_parameter(&mut member, "address", address);
        }
        Some(member)
    }

    /// Parses the member of the extension; `None` if it is malformed. Unknown parameters are ignored.
    pub(crate) fn parse(member: &Member) -> Option<Self> {
        let name: ClassName = member.string()?.parse().ok()?;
        let mut profile = Self { name: name.to_string(), ..Self::default() };
        let share = &mut profile.share;
        for (key, value) in parameters(member) {
            let rate = || Some(Portion::Rate(BitRate::from_bps(value.integer()?.checked_mul(1000)?)));
            let percent = || Some(Portion::Percent(value.integer_in(1, 100)?));
            match key.as_str() {
                "first" => share.first = value.is_true(),
                "weight" => share.weight = Weight::new(value.integer()?)?,
                "min-kbps" => share.min = Some(rate()?),
                "min-percent" => share.min = Some(percent()?),
                "max-kbps" => share.max = Some(rate()?),
                "max-percent" => share.max = Some(percent()?),
                "dscp" => profile.dscp = Some(value.integer_in(0, 63)?),
                "pinned" => profile.pinned = value.is_true(),
                "address" => profile.address = Some(value.integer_in(0, u8::MAX)?),
                _ => {}
            }
        }
        Some(profile)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        multipath::extensions::{field_of, only_member},
        vectors::{check, number},
    };

    fn parse(value: &str) -> Option<ClassProfile> {
        ClassProfile::parse(&only_member("class", value.as_bytes())?)
    }

    #[test]
    fn a_profile_that_was_written_is_read_back() {
        let share = Share {
            first: true,
            weight: Weight::new(4).unwrap(),
            min: Some(Portion::Rate(BitRate::from_bps(10_000_000))),
            max: Some(Portion::Percent(50)),
        };
        let profile =
            ClassProfile { name: "critical".into(), share, dscp: Some(46), pinned: true, address: Some(2) };
        let text = field_of("class", profile.member().unwrap());
        assert_eq!(
            text,
            r#"class="critical";first;weight=4;min-kbps=10000;max-percent=50;dscp=46;pinned;address=2"#
        );
        assert_eq!(parse(&text), Some(profile));
        let plain = ClassProfile { name: "a-b_2".into(), ..ClassProfile::default() };
        assert_eq!(parse(r#"class="a-b_2";later=1"#), Some(plain));
    }

    #[test]
    fn values_are_those_of_the_vectors() {
        let portion = |portion: Option<Portion>| {
            portion.map(|portion| match portion {
                Portion::Rate(rate) => json!({ "kbps": rate.bps() / 1000 }),
                Portion::Percent(percent) => json!({ "percent": percent }),
            })
        };
        let parse = |value: &[u8]| {
            let member = only_member("class", value).ok_or("absent")?;
            let ClassProfile { name, share, dscp, pinned, address } =
                ClassProfile::parse(&member).ok_or("absent")?;
            Ok(json!({
                "class_name": name,
                "first": share.first,
                "weight": share.weight.get(),
                "min": portion(share.min),
                "max": portion(share.max),
                "dscp": dscp,
                "pinned": pinned,
                "address": address,
            }))
        };
        let portion = |value: &Value| {
            let rate = |kbps: &Value| Portion::Rate(BitRate::from_bps(number(kbps) * 1000));
            let percent = |percent: &Value| Portion::Percent(number(percent) as u8);
            value.get("kbps").map(rate).or_else(|| value.get("percent").map(percent))
        };
        let encode = |fields: &Value| {
            let share = Share {
                first: fields["first"].as_bool().unwrap(),
                weight: Weight::new(number(&fields["weight"])).unwrap(),
                min: portion(&fields["min"]),
                max: portion(&fields["max"]),
            };
            let profile = ClassProfile {
                name: fields["class_name"].as_str().unwrap().to_owned(),
                share,
                dscp: fields["dscp"].as_u64().map(|dscp| dscp as u8),
                pinned: fields["pinned"].as_bool().unwrap(),
                address: fields["address"].as_u64().map(|address| address as u8),
            };
            field_of("class", profile.member().unwrap()).into_bytes()
        };
        check(include_str!("../../../docs/vectors/class.json"), parse, encode);
    }

    #[test]
    fn malformed_values_are_no_class() {
        for text in [
            r#"class="""#,
            r#"class="Calls""#,
            r#"class="seventeen-letters""#,
            r#"class="a";weight=0"#,
            r#"class="a";weight"#,
            r#"class="a";dscp=64"#,
            r#"class="a";max-percent=101"#,
            r#"class="a";address=256"#,
            r#"class="a";min-kbps=99999999999999999999"#,
            "class=a",
            "class",
            "",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_priority_class_gets_no_more_than_the_limit() {
        let limits = |first| UserLimits { max_priority_share: Some(first), ..UserLimits::default() };
        let share = |max| Share { first: true, max, ..Share::default() };
        let rate = |mbit: u64| Portion::Rate(BitRate::from_bps(mbit * 1_000_000));
        for (asked, limit, got) in [
            (None, Portion::Percent(20), Portion::Percent(20)),
            (Some(Portion::Percent(50)), Portion::Percent(20), Portion::Percent(20)),
            (Some(Portion::Percent(10)), Portion::Percent(20), Portion::Percent(10)),
            (Some(rate(30)), rate(10), rate(10)),
            (Some(rate(1)), Portion::Percent(20), Portion::Percent(20)),
        ] {
            assert_eq!(limits(limit).bound(share(asked)).max, Some(got), "{asked:?} {limit:?}");
        }
        let behind = Share { max: Some(rate(30)), ..Share::default() };
        assert_eq!(limits(rate(1)).bound(behind), behind);
        assert_eq!(UserLimits::default().bound(share(None)), share(None));
    }
}
