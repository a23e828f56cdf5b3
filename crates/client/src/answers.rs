//! Answers the requests of the local API.
//!
//! In: a [`ControlRequest`]. Out: its answer, immediately or after every shard has reported. Always holds: it
//! is no error if the requester has disconnected.

use std::time::Instant;

use mpvpn_api::ControlRequest;
use mpvpn_error::RunError;
use mpvpn_threads::event_loop::EventLoop;

use crate::running::Running as Client;

/// Answers a request at a client.
pub(crate) fn answer_client_request(
    client: &mut Client,
    event_loop: &EventLoop,
    now: Instant,
    question: ControlRequest,
) -> Result<(), RunError> {
    match question {
        ControlRequest::Status(reply) => {
            // Pending events come first: the status must not say `up` before addresses, routes and resolvers
            // are set. Whether streams have more to send does not matter here.
            client.apply_events(event_loop, now)?;
            if let Some(round) = client.shards.ask_status(now, reply) {
                let own = client.status(now);
                client.shards.report_status(round, own);
            }
        }
        ControlRequest::Flows(reply) => {
            if let Some(round) = client.shards.ask_flows(now, reply) {
                client.shards.report_flows(round, client.flows(now));
            }
        }
        ControlRequest::Config(reply) => {
            drop(reply.send(client.config_values().map_err(|error| error.to_string())));
        }
        ControlRequest::Reload(_, reply) => drop(reply.send(client.reload(event_loop, now))),
        // Only a server has an overview; the slow thread answers about the dashboard.
        ControlRequest::Overview { .. } | ControlRequest::DashboardLink(_) => {}
        ControlRequest::Link(name, change, reply) => {
            drop(reply.send(client.change_link(now, &name, &change)))
        }
        ControlRequest::Echoes(request, reply) => {
            drop(reply.send(client.echo_paths(now, request.identifier)))
        }
        ControlRequest::Measure(request, reply) => drop(reply.send(client.measure(event_loop, now, request))),
    }
    Ok(())
}
