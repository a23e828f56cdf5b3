//! Identities: certificates, keys, tokens and pins, and the TLS that they make.
//!
//! In: PEM files, tokens, the folder of state. Out: a server's [`identity::Identity`], rustls configurations
//! ([`tls`]), the CAs of clients ([`client_ca`]), files of certificates by ACME ([`acme`]). Always holds: a
//! server has to prove that it owns the private key of its certificate; files with secrets have mode 0600
//! from the beginning.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod acme;
pub mod cert_files;
pub mod client_ca;
pub mod identity;
pub mod provider;
mod random;
pub mod tls;
pub mod token;
pub mod trust;

pub use random::random;
