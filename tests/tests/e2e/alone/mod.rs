//! Stories that measure time or throughput so closely that others beside them would make them fail: each has the whole
//! machine ([`mpvpn_tests::machine_share`]).
//!
//! Tests begin in the order of their names, and the name of this module is the first: so these run one after the other at
//! the start, and others never wait for one of them while processors idle.

mod blocked_udp;
mod bonding;
mod the_stage;
