crate::word_enum! {
    /// The transport of the paths over a link.
    pub enum Transport {
        /// QUIC over UDP; QUIC inside HTTP/2 over TCP while UDP is blocked.
        #[default]
        Auto = "auto",
        /// QUIC over UDP only.
        Quic = "quic",
        /// QUIC inside HTTP/2 over TCP only.
        Tcp = "tcp",
    }
}
