crate::word_enum! {
    /// The congestion controller of a path.
    pub enum CongestionControl {
        /// A model of rate and round-trip time, as BBR has it: keeps the path busy and its queue short.
        #[default]
        Bbr = "bbr",
        /// CUBIC (RFC 9438): fills queues until they overflow.
        Cubic = "cubic",
    }
}
