#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| mpvpn_fuzz::journal(data));
