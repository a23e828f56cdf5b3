//! Answers the requests of the local API, as a client and as a server.
//!
//! In: a [`Question`]. Out: its answer, at once or after every shard has reported. Always holds: a requester that is gone
//! is no error.

use std::time::Instant;

use mpvpn_control::api::Question;

use crate::{
    EngineError,
    client::{Running as Client, member::Word as ClientWord},
    server::{Running as Server, plane::Word as ServerWord},
    turn::Turns,
};

/// Answers as a client.
pub(crate) fn of_client(
    client: &mut Client,
    turns: &Turns,
    now: Instant,
    question: Question,
) -> Result<(), EngineError> {
    match question {
        Question::Status(reply) => {
            // When the status says `up`, addresses, routes and resolvers are set. Streams are filled soon.
            client.apply_events(turns, now)?;
            if let Some(round) = client.asking.ask(now, reply) {
                client.crew.tell(|| ClientWord::Report(round));
                let own = client.status(now);
                client.asking.report(round, own);
            }
        }
        Question::Flows(reply) => {
            if let Some(round) = client.listing.ask(now, reply) {
                client.crew.tell(|| ClientWord::List(round));
                client.listing.report(round, client.flows(now));
            }
        }
        Question::Reload(reply) => drop(reply.send(client.reload(turns, now))),
        Question::Link { name, change, reply } => drop(reply.send(client.change_link(now, &name, &change))),
    }
    Ok(())
}

/// Answers as a server.
pub(crate) fn of_server(server: &mut Server, now: Instant, question: Question) {
    match question {
        Question::Status(reply) => {
            if let Some(round) = server.asking.ask(now, reply) {
                server.crew.tell(|| ServerWord::Report(round));
                server.asking.report(round, server.plane.report(now));
            }
        }
        Question::Flows(reply) => {
            if let Some(round) = server.listing.ask(now, reply) {
                server.crew.tell(|| ServerWord::List(round));
                server.listing.report(round, server.plane.flows(now));
            }
        }
        Question::Reload(reply) => drop(reply.send(server.reload())),
        Question::Link { reply, .. } => {
            drop(reply.send(Err("this is a server: links are a client's".to_owned())));
        }
    }
}
