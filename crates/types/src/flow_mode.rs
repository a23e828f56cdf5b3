crate::word_enum! {
    /// How TCP connections travel where no rule decides.
    pub enum FlowMode {
        /// Streams to public addresses, if the server translates addresses and the client has one shard; else packets.
        /// Without translation the far end would see the server's address instead of the client's. A private address
        /// means a host near the server, to which the server may refuse to connect.
        #[default]
        Auto = "auto",
        /// IP packets in QUIC datagrams.
        Datagram = "datagram",
        /// Streams: the connection ends at the client, and the server opens another one to the destination.
        Stream = "stream",
    }
}
