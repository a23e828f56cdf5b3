//! Holds the block of the kill switch for clients that do not run.

use std::path::Path;

use mpvpn_control::config::BlockWish;
use mpvpn_os::{kill_switch, undo::DEFAULT_FOLDER};

use crate::EngineError;

/// Blocks for a client that wants a kill switch, whether it runs or not; ends that where it wants none. Returns whether it blocks.
///
/// # Errors
/// If nft refuses.
pub fn set(wish: &BlockWish) -> Result<bool, EngineError> {
    let base = Path::new(DEFAULT_FOLDER);
    if wish.kill_switch {
        kill_switch::hold(base, &wish.tun_name)?;
    } else {
        kill_switch::end_hold(base, &wish.tun_name)?;
    }
    Ok(wish.kill_switch)
}

/// Ends the holds of all clients; those that run block on. Returns their names.
///
/// # Errors
/// If nft refuses.
pub fn release() -> Result<Vec<String>, EngineError> {
    Ok(kill_switch::release(Path::new(DEFAULT_FOLDER))?)
}
