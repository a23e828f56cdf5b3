crate::word_enum! {
    /// How TCP connections travel where no rule decides.
    pub enum FlowMode {
        /// Streams where the server would translate the addresses of packets: only there nobody can tell the difference.
        /// Not to private addresses: those mean a host near the server, to which it may not connect itself.
        #[default]
        Auto = "auto",
        /// Packets.
        Datagram = "datagram",
        /// Streams.
        Stream = "stream",
    }
}
