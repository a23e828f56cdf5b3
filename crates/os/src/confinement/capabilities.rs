//! Capabilities of the calling thread (capabilities(7)).

use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    configure_capability_in_ambient_set, remove_capability_from_bounding_set, set_capabilities,
};

use super::Needs;

/// The highest capability that any kernel may have; those of today end at 40.
const MAX_CAPABILITY: u32 = 63;

/// Keeps those of `needs` that this thread has, and gives up all others. Returns the names of the kept ones.
pub(super) fn keep(needs: &Needs) -> io::Result<Vec<String>> {
    let mut wanted = CapabilitySet::empty();
    wanted.set(CapabilitySet::NET_ADMIN, needs.network);
    wanted.set(CapabilitySet::NET_BIND_SERVICE, needs.low_ports);
    wanted.set(CapabilitySet::DAC_READ_SEARCH, needs.any_file);
    let kept = capabilities(None)?.permitted & wanted;
    for capability in (0..=MAX_CAPABILITY).map(|bit| CapabilitySet::from_bits_retain(1 << bit)) {
        if kept.contains(capability) || !capability_is_in_bounding_set(capability).unwrap_or(false) {
            continue;
        }
        // An ordinary user may not change the set, and cannot gain by it either: no_new_privs is set.
        if remove_capability_from_bounding_set(capability).is_err() {
            break;
        }
    }
    // Programs that this process runs inherit it, also those of an ordinary user.
    let inheritable = if needs.programs { kept & CapabilitySet::NET_ADMIN } else { CapabilitySet::empty() };
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable })?;
    for capability in inheritable {
        configure_capability_in_ambient_set(capability, true)?;
    }
    Ok(kept.iter_names().map(|(name, _)| name.to_ascii_lowercase()).collect())
}
