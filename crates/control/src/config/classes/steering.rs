//! What a packet no longer shows when it is read from a TUN: its firewall mark, its VLAN, and the interface by which it
//! came in. The kernel looks at these, and steers what fits into the TUN of the class.

use std::fmt;

use mpvpn_class::{Rule, Rules};

use super::{ClassConfig, RuleOrigin};
use crate::config::{is_link_name, values::Text};

/// Of the firewall mark these bits say where packets are steered.
const RESERVED_MARK_BITS: u32 = 0x0f00_0000;

/// Packets that go into the TUN of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SteeringRule {
    /// Who says so.
    pub origin: RuleOrigin,
    /// The class, and what the packets show as well.
    pub rule: Rule,
    /// What they no longer show in a TUN.
    pub kernel_match: KernelMatch,
}

/// What only the kernel sees. Each list fits if one of it does, or if it is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelMatch {
    /// Their firewall mark.
    pub marks: Vec<Mark>,
    /// Their VLAN (IEEE 802.1Q).
    pub vlans: Vec<u16>,
    /// The interface by which they come in.
    pub ingress: Vec<String>,
}

impl KernelMatch {
    /// Whether nothing is asked for.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The first key that is there.
    pub(super) fn key(&self) -> &'static str {
        match (self.marks.is_empty(), self.vlans.is_empty()) {
            (false, _) => "mark",
            (_, false) => "vlan",
            _ => "ingress",
        }
    }
}

/// Some bits of a firewall mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// How they are.
    pub value: u32,
    /// Which they are.
    pub mask: u32,
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mask {
            u32::MAX => write!(f, "{:#x}", self.value),
            mask => write!(f, "{:#x}/{mask:#x}", self.value),
        }
    }
}

impl Text for Mark {
    const EXPECTED: &'static str = "a firewall mark as in 0x10, or with a mask in quotes as in \"0x10/0xff\"";
    const EXAMPLE: &'static str = "0x10/0xff";

    fn read(text: &str) -> Result<Self, String> {
        let (value, mask) = text.split_once('/').unwrap_or((text, "0xffffffff"));
        let mark = mark_number(value).zip(mark_number(mask)).map(|(value, mask)| Self { value, mask });
        let Some(mark) = mark else {
            return Err(format!("`{text}` is not a firewall mark: expected one as in 0x10, or 0x10/0xff"));
        };
        match mark.value {
            0 if mark.mask == 0 => Err(format!("`{text}` matches every mark: leave the key out")),
            value if value & !mark.mask != 0 => {
                Err(format!("`{text}` matches no mark: the value has bits that the mask leaves out"))
            }
            value if value & RESERVED_MARK_BITS != 0 => Err(format!(
                "`{text}` uses bits of {RESERVED_MARK_BITS:#x}, which mpvpn itself uses to steer packets"
            )),
            _ => Ok(mark),
        }
    }
}

/// A number as it is written, or after `0x` in hexadecimal digits.
pub(super) fn mark_number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The number of a VLAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Vlan(pub(super) u16);

impl Text for Vlan {
    const EXPECTED: &'static str = "the number of a VLAN from 1 to 4094";
    const EXAMPLE: &'static str = "20";

    fn read(text: &str) -> Result<Self, String> {
        let number = text.parse().ok().filter(|number| (1..=4094).contains(number));
        number.map(Self).ok_or_else(|| format!("`{text}` is not a VLAN: expected 1 to 4094"))
    }
}

/// The name of an interface, and no pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ingress(pub(super) String);

impl Text for Ingress {
    const EXPECTED: &'static str = "an interface's name in quotes";
    const EXAMPLE: &'static str = "lan0";

    fn read(text: &str) -> Result<Self, String> {
        match is_link_name(text) && !text.contains(['*', '?']) {
            true => Ok(Self(text.into())),
            false => Err(format!(
                "`{text}` is not an interface's name: expected 1 to 15 letters, digits, - _ or ."
            )),
        }
    }
}

/// Why a rule cannot be, if it cannot. `tuns` are the devices of the client and of its classes.
pub(super) fn steering_error(found: &SteeringRule, class: &ClassConfig, tuns: &[&str]) -> Option<String> {
    let SteeringRule { rule, kernel_match, .. } = found;
    let key = kernel_match.key();
    if class.tun.is_none() {
        return Some(format!(
            "only the kernel sees `{key}` of a packet, mpvpn does not: give the class `{}` a TUN device, as in \
             tun = \"cr0\", into which the kernel steers such packets",
            class.name
        ));
    }
    if !rule.domains.is_empty() {
        return Some(format!(
            "`domain` cannot be combined with `{key}`: the kernel, which steers such packets, does not know domain names"
        ));
    }
    if let Some(tun) = kernel_match.ingress.iter().find(|name| tuns.contains(&name.as_str())) {
        return Some(format!(
            "`ingress` names the TUN device `{tun}`: packets that come in there have left the tunnel already"
        ));
    }
    let unreachable = Rules::new(vec![rule.clone()]).unreachable();
    unreachable.first().map(|found| format!("this rule never decides: {}", found.reason))
}
