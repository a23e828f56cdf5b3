//! Control messages (cmsg(3)) of sendmsg(2) and recvmmsg(2), in a buffer on the stack.
//!
//! The kernel's layout: `size_t length, int level, int type`, then the data, padded to a multiple of the size
//! of a `size_t`; `length` counts header and data without the padding after the data.

/// Alignment of headers and data, in bytes.
const CMSG_ALIGN: usize = size_of::<usize>();
/// Bytes of a header (struct cmsghdr).
const CMSG_HEADER_LEN: usize = size_of::<usize>() + 2 * size_of::<libc::c_int>();

/// Bytes for all messages that one datagram can have: packet info, TOS or traffic class, segment size and
/// time take at most 112. In a smaller buffer the kernel drops messages; a larger one is copied for nothing.
pub(super) const CAPACITY: usize = 128;

/// A buffer of control messages with the kernel's alignment, and the number of bytes used.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(8))]
pub(super) struct Control {
    bytes: [u8; CAPACITY],
    used: usize,
}

impl Default for Control {
    fn default() -> Self {
        Self { bytes: [0; CAPACITY], used: 0 }
    }
}

impl Control {
    /// Appends a message. All messages that are ever sent together fit; a message that does not fit is
    /// dropped.
    pub(super) fn push(&mut self, level: libc::c_int, kind: libc::c_int, data: &[u8]) {
        let end = self.used + CMSG_HEADER_LEN + data.len();
        if padded(end) > CAPACITY {
            debug_assert!(false, "control messages of {end} bytes do not fit into {CAPACITY}");
            return;
        }
        let (length, rest) = self.bytes[self.used..].split_at_mut(CMSG_ALIGN);
        length.copy_from_slice(&(CMSG_HEADER_LEN + data.len()).to_ne_bytes());
        rest[..4].copy_from_slice(&level.to_ne_bytes());
        rest[4..8].copy_from_slice(&kind.to_ne_bytes());
        rest[8..8 + data.len()].copy_from_slice(data);
        self.used = padded(end);
    }

    /// Bytes in use, padding included.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    pub(super) fn pointer_mut(&mut self) -> *mut libc::c_void {
        self.bytes.as_mut_ptr().cast()
    }

    /// The messages in the first `length` bytes, a length that the kernel reported; stops at the first
    /// malformed message.
    pub(super) fn messages(&self, length: usize) -> Messages<'_> {
        Messages(&self.bytes[..length.min(CAPACITY)])
    }
}

/// Iterates over (level, type, data).
pub(super) struct Messages<'a>(&'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = (libc::c_int, libc::c_int, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (header, _) = self.0.split_at_checked(CMSG_HEADER_LEN)?;
        let length = usize::from_ne_bytes(header[..CMSG_ALIGN].try_into().ok()?);
        let level = libc::c_int::from_ne_bytes(header[CMSG_ALIGN..CMSG_ALIGN + 4].try_into().ok()?);
        let kind = libc::c_int::from_ne_bytes(header[CMSG_ALIGN + 4..].try_into().ok()?);
        let data = self.0.get(CMSG_HEADER_LEN..length)?;
        self.0 = self.0.get(padded(length)..).unwrap_or_default();
        Some((level, kind, data))
    }
}

fn padded(length: usize) -> usize {
    length.next_multiple_of(CMSG_ALIGN)
}

/// Parses an `int`; some messages have only its first byte.
pub(super) fn integer(data: &[u8]) -> Option<libc::c_int> {
    match data {
        [byte] => Some(libc::c_int::from(*byte)),
        [a, b, c, d, ..] => Some(libc::c_int::from_ne_bytes([*a, *b, *c, *d])),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_layout_is_that_of_libc() {
        // SAFETY: pure arithmetic.
        let (space, length) = unsafe { (libc::CMSG_SPACE(5), libc::CMSG_LEN(5)) };
        let mut control = Control::default();
        control.push(1, 2, &[9; 5]);
        assert_eq!(control.used(), space as usize);
        assert_eq!(control.bytes[..CMSG_ALIGN], (length as usize).to_ne_bytes());
    }

    #[test]
    fn integers_come_in_two_sizes() {
        assert_eq!(integer(&[3]), Some(3));
        assert_eq!(integer(&1200_i32.to_ne_bytes()), Some(1200));
        assert_eq!(integer(&[]), None);
        assert_eq!(integer(&[1, 2]), None);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(list in prop::collection::vec(
            (any::<i32>(), any::<i32>(), prop::collection::vec(any::<u8>(), 0..16)), 0..4))
        {
            let mut control = Control::default();
            for (level, kind, data) in &list {
                control.push(*level, *kind, data);
            }
            let read: Vec<_> =
                control.messages(control.used()).map(|(l, k, d)| (l, k, d.to_vec())).collect();
            prop_assert_eq!(read, list);
        }

        #[test]
        fn any_bytes_are_read_without_panic(
            bytes in prop::collection::vec(any::<u8>(), CAPACITY), length in 0_usize..200
        ) {
            let mut control = Control::default();
            control.bytes.copy_from_slice(&bytes);
            prop_assert!(control.messages(length).count() <= CAPACITY / CMSG_HEADER_LEN);
        }

        #[test]
        fn any_length_field_is_read_without_panic(length in any::<usize>()) {
            let mut control = Control::default();
            control.bytes[..CMSG_ALIGN].copy_from_slice(&length.to_ne_bytes());
            let good = (CMSG_HEADER_LEN..=CAPACITY).contains(&length);
            prop_assert_eq!(control.messages(CAPACITY).next().is_some(), good);
        }
    }
}
