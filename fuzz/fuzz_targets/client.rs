//! The target `client` for libFuzzer: one process an input.
#![no_main]

libfuzzer_sys::fuzz_target!(
    init: mpvpn_fuzz::prepare_copies(mpvpn_fuzz::client_with_session),
    |data: &[u8]| mpvpn_fuzz::play_in_copy(data)
);
