//! Tests with tight bounds on time or throughput, which other load would break: each takes the whole machine
//! ([`mpvpn_tests::machine_share`]).
//!
//! Tests start in the order of their names, and this module's name is the first, so these tests run one after
//! the other at the start, and no other test waits for them while processors idle.

mod blocked_udp;
mod bonding;
mod budget;
mod cut;
mod dashboard_page;
mod hostile;
mod limits;
mod many_links;
mod measure;
mod pipes;
mod rules;
mod streams;
mod testbed;
