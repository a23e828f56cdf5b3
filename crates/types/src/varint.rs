/// Length in bytes of the shortest variable-length integer encoding of `value`: 1, 2, 4 or 8 (RFC 9000 §16).
pub const fn varint_len(value: u64) -> usize {
    match value {
        0..=0x3f => 1,
        0x40..=0x3fff => 2,
        0x4000..=0x3fff_ffff => 4,
        _ => 8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variable_length_integers_are_as_long_as_their_values_need() {
        for (value, len) in
            [(0, 1), (63, 1), (64, 2), (16_383, 2), (16_384, 4), ((1 << 30) - 1, 4), (1 << 30, 8)]
        {
            assert_eq!(varint_len(value), len, "{value}");
        }
    }
}
