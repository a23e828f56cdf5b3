crate::word_enum! {
    /// The congestion control algorithm of a path.
    pub enum CongestionControl {
        /// A model of the path's rate and round-trip time, like BBR: keeps the path busy and its queue short.
        #[default]
        Bbr = "bbr",
        /// CUBIC (RFC 9438): fills queues until they overflow.
        Cubic = "cubic",
    }
}
