crate::word_enum! {
    /// How the tunnel carries TCP connections that match no rule.
    pub enum FlowMode {
        /// Streams to public addresses, if the server translates addresses and the client has one shard; else
        /// packets. Without address translation the destination would see the server's address instead of the
        /// client's. A private address means a host near the server, to which the server may refuse to
        /// connect.
        #[default]
        Auto = "auto",
        /// IP packets in QUIC datagrams.
        Datagram = "datagram",
        /// QUIC streams: the client terminates the TCP connection, and the server opens another one to the
        /// destination.
        Stream = "stream",
    }
}
