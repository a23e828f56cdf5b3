//! Reads the PROXY protocol header (versions 1 and 2) with which a load balancer's connection begins.

use std::{io, net::SocketAddr};

use proxy_header::{ParseConfig, ProxyHeader};
use tokio::io::{AsyncRead, AsyncReadExt};

/// The longest line of version 1, and the fixed part of version 2, which has the length of the rest (both
/// from the specification).
const MAX_V1_LINE_BYTES: usize = 107;
const V2_FIXED_BYTES: usize = 16;
/// The largest variable part of version 2 that is read: addresses and extensions. Chosen.
const MAX_V2_ADDRESS_BYTES: usize = 4096;

/// Reads the header and not a byte more. Returns the client's address, or `None` for a health check of the
/// load balancer itself.
///
/// # Errors
/// If there is no header, or the connection ends.
pub(crate) async fn read_client_address(
    stream: &mut (impl AsyncRead + Unpin),
) -> io::Result<Option<SocketAddr>> {
    let mut head = vec![stream.read_u8().await?];
    match head[0] {
        b'P' => {
            while head.last() != Some(&b'\n') && head.len() < MAX_V1_LINE_BYTES {
                head.push(stream.read_u8().await?);
            }
        }
        b'\r' => {
            head.resize(V2_FIXED_BYTES, 0);
            stream.read_exact(&mut head[1..]).await?;
            let rest = usize::from(u16::from_be_bytes([head[14], head[15]]));
            if rest > MAX_V2_ADDRESS_BYTES {
                return Err(io::ErrorKind::InvalidData.into());
            }
            head.resize(V2_FIXED_BYTES + rest, 0);
            stream.read_exact(&mut head[V2_FIXED_BYTES..]).await?;
        }
        _ => return Err(io::ErrorKind::InvalidData.into()),
    }
    let (header, _) = ProxyHeader::parse(&head, ParseConfig::default()).map_err(io::Error::other)?;
    Ok(header.proxied_address().map(|proxied| proxied.source))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    async fn read(bytes: &[u8]) -> io::Result<(Option<SocketAddr>, usize)> {
        let mut rest = bytes;
        Ok((read_client_address(&mut rest).await?, rest.len()))
    }

    #[tokio::test]
    async fn both_versions_tell_the_client_and_leave_the_rest() {
        let line = b"PROXY TCP4 192.0.2.1 192.0.2.2 1234 443\r\n\x16\x03\x01";
        assert_eq!(read(line).await.unwrap(), (Some("192.0.2.1:1234".parse().unwrap()), 3));
        let mut binary = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c".to_vec();
        binary.extend([192, 0, 2, 1, 192, 0, 2, 2, 4, 210, 1, 187]);
        binary.extend(b"\x16\x03\x01");
        assert_eq!(read(&binary).await.unwrap(), (Some("192.0.2.1:1234".parse().unwrap()), 3));
        // Version 2, command LOCAL: a health check.
        let local = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";
        assert_eq!(read(local).await.unwrap(), (None, 0));
        assert_eq!(read(b"PROXY UNKNOWN\r\n").await.unwrap(), (None, 0));
    }

    #[tokio::test]
    async fn anything_else_is_refused() {
        let endless = [b"PROXY TCP4 ".to_vec(), vec![b'1'; 4096]].concat();
        let large = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\xff\xff".to_vec();
        for bytes in [&endless[..], &large, b"\x16\x03\x01\x02\0\x01", b"GET / HTTP/1.1\r\n", b"PROXY", b""] {
            assert!(read(bytes).await.is_err(), "{}", bytes.escape_ascii());
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(kind in 0..3_u8, rest in prop::collection::vec(any::<u8>(), 0..200)) {
            let start: &[u8] = match kind {
                0 => b"PROXY TCP4 ",
                1 => b"\r\n\r\n\0\r\nQUIT\n",
                _ => b"",
            };
            let bytes = [start, &rest[..]].concat();
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let _ = runtime.block_on(read(&bytes));
        }
    }
}
