//! Random bytes for secrets.

use std::io;

/// Random bytes for secrets.
///
/// # Errors
/// If the generator of the cryptography fails.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| io::Error::other("the generator failed"))?;
    Ok(bytes)
}
