/// A TCP sequence number; comparison is modulo 2^32 (RFC 9293 §3.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seq(pub(super) u32);

impl Seq {
    /// The number `bytes` further on.
    pub(super) fn plus(self, bytes: usize) -> Self {
        Self(self.0.wrapping_add(bytes as u32))
    }

    /// Bytes from `other` to this number; negative if it comes before.
    pub(super) fn since(self, other: Self) -> i32 {
        self.0.wrapping_sub(other.0) as i32
    }

    /// Bytes from `other` to this number; 0 if it comes before.
    pub(super) fn beyond(self, other: Self) -> usize {
        self.since(other).max(0) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_wrap() {
        let last = Seq(u32::MAX);
        assert_eq!(last.plus(3), Seq(2));
        assert_eq!((Seq(2).since(last), last.since(Seq(2))), (3, -3));
        assert_eq!((Seq(2).beyond(last), last.beyond(Seq(2))), (3, 0));
    }
}
