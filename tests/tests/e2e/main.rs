//! End-to-end tests: the binary in network namespaces with real ping, iperf3 and curl. One file per topic.
//!
//! Bounds are generous, because tests run on busy machines; `./dev bench` measures exact figures.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // Edge: tests run processes, sockets and clocks.

mod access;
mod alone;
mod auto_pipes;
mod blocked_udp;
mod bonding;
mod by_flows;
mod by_proxy;
mod check;
mod class_tun;
mod classes;
mod cleanup;
mod clients;
mod configuration;
mod confinement;
mod credentials;
mod cut;
mod download;
mod embed;
mod events;
mod first_contact;
mod flows;
mod front;
mod guides;
mod hostile;
mod inbound;
mod instances;
mod interop;
mod lab_command;
mod lasting_sessions;
mod leaks;
mod legacy;
mod links;
mod many_links;
mod metrics;
mod moved_server;
mod name_servers;
mod packet_sizes;
mod pipes;
mod proxy;
mod qlog;
mod reload;
mod reload_server;
mod restart;
mod routes;
mod segments;
mod setup;
mod shards;
mod sharing;
mod status;
mod streams;
mod testbed;
mod users;
mod without_root;
