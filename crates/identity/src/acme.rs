//! Certificates from a CA by ACME (RFC 8555): the files of account and certificate, and the time of the next
//! order.
//!
//! In: the certificate that there is, the time, and the outcome of orders. Out: the time of the next order;
//! files in the state folder. Always holds: the account's key and certificates have mode 0600 from the
//! beginning; a certificate and its key are one file, so that they are replaced together; the order itself is
//! made by the caller.

mod challenge;
mod schedule;
mod store;

pub use challenge::{certificate_request, tls_alpn_certificate};
pub use schedule::{Failure, RenewalWindow, Schedule};
pub use store::AcmeStore;
pub use store::files_in;
