#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| mpvpn_fuzz::dns_forwarder(data));
