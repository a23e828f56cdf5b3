//! QUIC packets of a link inside HTTP/2, where UDP does not get through: the TCP way.

pub(crate) mod carriage;
pub(crate) mod control;
pub(crate) mod pump;
pub(crate) mod trial;
