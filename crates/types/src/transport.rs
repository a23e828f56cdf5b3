crate::word_enum! {
    /// What packets of a link travel in.
    pub enum Transport {
        /// QUIC over UDP where that gets through, else inside HTTP/2 over TCP.
        #[default]
        Auto = "auto",
        /// QUIC over UDP only.
        Quic = "quic",
        /// HTTP/2 over TCP only.
        Tcp = "tcp",
    }
}
