//! VLANs, which take a kernel with IEEE 802.1Q.

use crate::{emulated_machine::EmulatedMachine, report::step};

/// Part of the names of the stories (`tests/tests/e2e/vlan.rs`).
const STORIES: &str = "vlan::";
/// How many stories that are at least. Fewer: the name above is not theirs any more.
const MIN_STORIES: usize = 4;

pub(super) fn run() {
    let mut machine = EmulatedMachine::new("vlan");
    let passed = step("Debian's kernel boots in an emulated machine and runs the stories", || {
        machine.run_stories(STORIES)
    });
    passed.iter().for_each(|story| println!("            {story}"));
    assert!(passed.len() >= MIN_STORIES, "{} stories ran: {passed:?}", passed.len());
}
