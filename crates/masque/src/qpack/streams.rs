//! Checks of the peer's encoder and decoder streams (RFC 9204 §4.3 and §4.4) without a dynamic table.
//!
//! In: bytes of the streams, in any pieces. Out: nothing, or an error. Always holds: no instruction has an
//! effect.

/// Checks the peer's encoder stream: setting the capacity to 0 is the only legal instruction.
#[derive(Clone, Copy, Debug, Default)]
pub struct EncoderStream;

impl EncoderStream {
    /// Takes bytes of the stream; `Err` is QPACK_ENCODER_STREAM_ERROR.
    ///
    /// # Errors
    /// On an insertion, a duplication or a capacity above 0: all "exceed the limit" of RFC 9204 §4.3.1
    /// or §3.2.2.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), &'static str> {
        const SET_CAPACITY_ZERO: u8 = 0b0010_0000;
        match bytes.iter().find(|byte| **byte != SET_CAPACITY_ZERO) {
            None => Ok(()),
            Some(byte) if byte & 0b1110_0000 == SET_CAPACITY_ZERO => {
                Err("QPACK encoder sets a dynamic table capacity above the allowed 0")
            }
            Some(_) => Err("QPACK encoder inserts into a dynamic table of capacity 0"),
        }
    }
}

/// Checks the peer's decoder stream: stream cancellation is the only legal instruction, because no section
/// refers to the dynamic table.
#[derive(Clone, Copy, Debug, Default)]
pub struct DecoderStream {
    /// Continuation bytes still allowed in the number being read; 0 between instructions.
    continuation: u8,
}

impl DecoderStream {
    /// Takes bytes of the stream; `Err` is QPACK_DECODER_STREAM_ERROR.
    ///
    /// # Errors
    /// On an acknowledgment or an increment, since no section ever refers to the dynamic table
    /// (RFC 9204 §4.4.1, §4.4.3), and on endless numbers.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), &'static str> {
        for byte in bytes {
            if self.continuation > 0 {
                let is_last = byte & 0x80 == 0;
                self.continuation = if is_last { 0 } else { self.continuation - 1 };
                if !is_last && self.continuation == 0 {
                    return Err("QPACK decoder sends a number of more than 62 bits");
                }
                continue;
            }
            match byte >> 6 {
                // Stream Cancellation (§4.4.2), a number with 6 bits in its first byte.
                0b01 => self.continuation = if byte & 0x3f == 0x3f { 9 } else { 0 },
                0b00 => return Err("QPACK decoder counts insertions that were never made"),
                _ => return Err("QPACK decoder acknowledges a section that used no dynamic table"),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_encoder_stream_may_only_set_capacity_zero() {
        let mut stream = EncoderStream;
        assert_eq!(stream.push(&[0x20, 0x20]), Ok(()));
        for instruction in [0x21, 0x3f, 0x80, 0xc0, 0x40, 0x00] {
            assert!(stream.push(&[instruction]).is_err(), "{instruction:#x}");
        }
    }

    #[test]
    fn the_decoder_stream_may_only_cancel_streams() {
        let mut stream = DecoderStream::default();
        assert_eq!(stream.push(&[0x40, 0x44, 0x7f]), Ok(()));
        assert_eq!(stream.push(&[0x85, 0x01, 0x41]), Ok(()), "a long number, in two pieces");
        for instruction in [0x00, 0x01, 0x80, 0xff] {
            assert!(DecoderStream::default().push(&[instruction]).is_err(), "{instruction:#x}");
        }
        assert!(stream.push(&[0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]).is_err());
    }
}
