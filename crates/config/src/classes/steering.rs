//! Rules on firewall mark, VLAN and incoming interface. A packet read from a TUN device does not show these
//! any more, so the kernel evaluates such rules and steers matching packets into the TUN device of the class.

use std::fmt;

use mpvpn_class::{Rule, Rules};

use super::{ClassConfig, RuleOrigin};
use mpvpn_input::values::{Text, is_link_name};

/// Bits of the firewall mark that mpvpn itself sets to steer packets (docs/design/machine.md): rules on them
/// could not match. More bits would leave fewer for other programs; fewer could not number the devices of 8
/// classes.
const RESERVED_MARK_BITS: u32 = 0x0f00_0000;

/// A rule by which the kernel steers packets into the TUN device of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SteeringRule {
    /// Where the rule is defined.
    pub origin: RuleOrigin,
    /// The class, and the conditions on fields of the packet.
    pub rule: Rule,
    /// The conditions that only the kernel can evaluate.
    pub kernel_match: KernelMatch,
}

/// Conditions that only the kernel can evaluate. A list matches if one of its values does, or if it is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelMatch {
    /// Firewall marks.
    pub marks: Vec<Mark>,
    /// VLAN IDs (IEEE 802.1Q).
    pub vlans: Vec<u16>,
    /// Incoming interfaces.
    pub ingress: Vec<String>,
}

impl KernelMatch {
    /// Whether there is no condition.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The name of the first key with a condition.
    pub(crate) fn key(&self) -> &'static str {
        match (self.marks.is_empty(), self.vlans.is_empty()) {
            (false, _) => "mark",
            (_, false) => "vlan",
            _ => "ingress",
        }
    }
}

/// A condition on a firewall mark: `mark & mask == value`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The value of the bits in the mask.
    pub value: u32,
    /// The bits that are compared.
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

/// Parses a firewall mark: decimal, or hexadecimal after `0x`.
pub(crate) fn mark_number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// A VLAN ID, 1 to 4094.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Vlan(pub(crate) u16);

impl Text for Vlan {
    const EXPECTED: &'static str = "the number of a VLAN from 1 to 4094";
    const EXAMPLE: &'static str = "20";

    fn read(text: &str) -> Result<Self, String> {
        let number = text.parse().ok().filter(|number| (1..=4094).contains(number));
        number.map(Self).ok_or_else(|| format!("`{text}` is not a VLAN: expected 1 to 4094"))
    }
}

/// The name of an incoming interface; patterns are not possible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ingress(pub(crate) String);

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

/// Why the kernel cannot steer by a rule; `None` if it can. `tuns`: the TUN devices of the client and of its
/// classes.
pub(crate) fn steering_error(found: &SteeringRule, class: &ClassConfig, tuns: &[&str]) -> Option<String> {
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
