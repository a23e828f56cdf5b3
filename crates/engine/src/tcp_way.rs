//! QUIC packets of a link inside HTTP/2, where UDP does not get through: the TCP way.

#[allow(dead_code, reason = "both ends are about to use it")]
pub(crate) mod pump;
