//! The session of a client, and its server, in the status.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The server that a client uses, of several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServerInUse {
    /// Its name or address, and port.
    pub address: String,
    /// Why it is used, as a sentence.
    pub why: String,
    /// The other servers.
    pub others: Vec<String>,
}

/// The session of a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Session {
    /// Address and port of the server.
    pub server: String,
    /// Name of the user at the server.
    pub user: String,
    /// How often the session was resumed.
    pub resumed: u64,
}
