//! Arithmetic in GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1: elements are bytes, addition is XOR,
//! and every element but 0 has an inverse.

/// x^8 as a sum of lower powers: the polynomial without its first term.
const REDUCE: u8 = 0x1d;
/// Bytes that are multiplied at a time: their eight multiples (2 KiB) stay in the first-level cache. Larger
/// blocks leave it; smaller ones cost more loops.
const BLOCK: usize = 256;

const fn times_x(value: u8) -> u8 {
    value << 1 ^ if value & 0x80 == 0 { 0 } else { REDUCE }
}

/// The powers of x.
const EXP: [u8; 255] = {
    let mut table = [1; 255];
    let mut at = 1;
    while at < 255 {
        table[at] = times_x(table[at - 1]);
        at += 1;
    }
    table
};

/// The discrete logarithm of each element to the base x; that of 0 is meaningless.
const LOG: [u8; 256] = {
    let mut table = [0; 256];
    let mut at = 0;
    while at < 255 {
        table[EXP[at] as usize] = at as u8;
        at += 1;
    }
    table
};

/// The product of two elements.
pub(super) fn product(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    let power = usize::from(LOG[usize::from(a)]) + usize::from(LOG[usize::from(b)]);
    EXP[power % 255]
}

/// The multiplicative inverse; 0 has none, and gives 1.
pub(super) fn inverse(a: u8) -> u8 {
    EXP[(255 - usize::from(LOG[usize::from(a)])) % 255]
}

/// Adds `factor(n) × bytes` to `sums[n]` from byte `at` on, for all `n`; the sums must be long enough.
///
/// The multiples of the bytes by powers of x are computed once for all sums, by shifts and XOR that compilers
/// vectorise; tables would be slower without `unsafe`.
pub(super) fn add_multiples(sums: &mut [Vec<u8>], at: usize, bytes: &[u8], factor: impl Fn(usize) -> u8) {
    let mut powers = [[0; BLOCK]; 8];
    let mut at = at;
    for block in bytes.chunks(BLOCK) {
        powers[0][..block.len()].copy_from_slice(block);
        for power in 1..8 {
            let (before, rest) = powers.split_at_mut(power);
            for (to, from) in rest[0].iter_mut().zip(&before[power - 1]) {
                *to = from << 1 ^ REDUCE & (from >> 7).wrapping_neg();
            }
        }
        for (n, sum) in sums.iter_mut().enumerate() {
            let factor = factor(n);
            let Some(sum) = sum.get_mut(at..at + block.len()) else { continue };
            for (bit, power) in powers.iter().enumerate() {
                if factor >> bit & 1 == 1 {
                    sum.iter_mut().zip(power).for_each(|(to, from)| *to ^= from);
                }
            }
        }
        at += block.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_but_zero_has_an_inverse() {
        for a in 1..=255 {
            assert_eq!(product(a, inverse(a)), 1, "{a}");
            assert_eq!((product(a, 1), product(a, 0), product(0, a)), (a, 0, 0));
        }
    }

    #[test]
    fn multiples_of_many_bytes_are_those_of_each() {
        let bytes: Vec<u8> = (0..700u32).map(|n| (n * 31) as u8).collect();
        let mut sums = vec![vec![5; 703]; 256];
        add_multiples(&mut sums, 3, &bytes, |n| n as u8);
        for (n, sum) in sums.iter().enumerate() {
            assert_eq!(sum[..3], [5; 3]);
            let right = |(sum, byte): (&u8, &u8)| *sum == 5 ^ product(n as u8, *byte);
            assert!(sum[3..].iter().zip(&bytes).all(right), "{n}");
        }
    }
}
