crate::word_enum! {
    /// The congestion controller of every path.
    pub enum CongestionControl {
        /// A model of the path, in the shape of BBR: keeps the path busy and its queue short.
        #[default]
        Bbr = "bbr",
        /// CUBIC (RFC 9438): fills queues until they overflow.
        Cubic = "cubic",
    }
}
