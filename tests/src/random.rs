//! Repeatable random numbers for tests.

/// A random number generator (xorshift64). A test is repeated exactly with the same seed.
pub struct Random(u64);

impl Random {
    /// `seed` must not be 0. It is printed, so that the log of a failed test contains it.
    pub fn new(seed: u64) -> Self {
        println!("seed {seed:#x}");
        Self(seed)
    }

    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `bound`, which must not be 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    /// True with probability 1 in `n`.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// 1 to `longest` random bytes.
    pub fn noise(&mut self, longest: usize) -> Vec<u8> {
        let length = 1 + self.below(longest);
        (0..length).map(|_| self.bits() as u8).collect()
    }

    /// A random element.
    pub fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    /// Changes up to five bytes; sometimes truncates, or repeats the end.
    pub fn mutate(&mut self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        for _ in 0..self.below(6) {
            let at = self.below(bytes.len());
            bytes[at] = self.bits() as u8;
        }
        if self.one_in(4) {
            bytes.truncate(1 + self.below(bytes.len()));
        }
        if self.one_in(8) {
            let from = self.below(bytes.len());
            bytes.extend_from_within(from..);
        }
    }
}
