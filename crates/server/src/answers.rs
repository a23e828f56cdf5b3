//! Answers the requests of the local API.
//!
//! In: a [`ControlRequest`]. Out: its answer, immediately or after every shard has reported. Always holds: it
//! is no error if the requester has disconnected.

use std::{sync::Arc, time::Instant};

use mpvpn_api::ControlRequest;

use crate::Running as Server;

/// Answers a request at a server.
pub(crate) fn answer_server_request(server: &mut Server, now: Instant, question: ControlRequest) {
    match question {
        ControlRequest::Status(reply) => {
            if let Some(round) = server.shards.ask_status(now, reply) {
                server.shards.report_status(round, server.data_plane.report(now));
            }
        }
        ControlRequest::Flows(reply) => {
            if let Some(round) = server.shards.ask_flows(now, reply) {
                server.shards.report_flows(round, server.data_plane.flows(now));
            }
        }
        ControlRequest::Overview { shown, reply } => {
            if let Some(round) = server.shards.ask_overview(now, Arc::clone(&shown), reply) {
                server.shards.report_overview(round, server.data_plane.report_overview(now, &shown));
            }
        }
        // The slow thread answers it.
        ControlRequest::DashboardLink(_) => {}
        ControlRequest::Config(reply) => {
            drop(reply.send(server.config_values().map_err(|error| error.to_string())));
        }
        ControlRequest::Reload(policy, reply) => server.reload(now, policy, Some(reply)),
        ControlRequest::Link(.., reply) => {
            drop(reply.send(Err("this is a server: links are a client's".to_owned())));
        }
        ControlRequest::Echoes(_, reply) => {
            drop(reply.send(Err("this is a server: pings are a client's".to_owned())));
        }
        ControlRequest::Measure(_, reply) => {
            drop(reply.send(Err("this is a server: measure at a client".to_owned())));
        }
    }
}
