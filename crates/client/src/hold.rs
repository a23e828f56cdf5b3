//! Holds the block of the kill switch for clients that do not run.

use std::path::Path;

use mpvpn_config::BlockWish;
use mpvpn_error::RunError;
use mpvpn_os::{kill_switch, undo::DEFAULT_FOLDER};

pub use mpvpn_os::kill_switch::Blocked;

/// Blocks for those of these clients that want a kill switch, whether they run or not; the holds of all
/// others end. Returns the names of their TUN devices.
///
/// # Errors
/// If nft refuses.
pub fn set(wishes: &[BlockWish]) -> Result<Vec<String>, RunError> {
    let names = wishes.iter().filter(|wish| wish.kill_switch).map(|wish| wish.tun_name.clone());
    let names: Vec<String> = names.collect();
    kill_switch::hold(Path::new(DEFAULT_FOLDER), &names)?;
    Ok(names)
}

/// Ends the blocks of all clients that do not run; those that run block on. Returns their names.
///
/// # Errors
/// If nft refuses.
pub fn release() -> Result<Vec<String>, RunError> {
    Ok(kill_switch::release(Path::new(DEFAULT_FOLDER))?)
}

/// The blocks of clients that do not run.
///
/// # Errors
/// If their records cannot be read.
pub fn blocked() -> Result<Vec<Blocked>, RunError> {
    Ok(kill_switch::blocked(Path::new(DEFAULT_FOLDER))?)
}
