//! `mpvpn check`: measures what each link can carry to the server, without a tunnel.
//!
//! In: the configuration of a client. Out: what was measured over each link, and what a client would use
//! there. Always holds: nothing on the machine changes, no privilege is needed, each step has a timeout, and
//! all links are measured at the same time.

mod udp;

use std::{net::SocketAddr, sync::Arc};

use mpvpn_config::ClientConfig;
use mpvpn_confine::kernel_check;
use mpvpn_error::RunError;
use mpvpn_identity::{
    random,
    tls::{self, LastRefusal},
};
use mpvpn_links::{
    LinkSocketOptions, Links,
    policies::{LinkMeters, LinkPolicies},
};
use mpvpn_os::{
    poll::Poller,
    tcp::{ConnectFailure, MptcpState},
};
use mpvpn_quic::{ClientSetup, TransportOptions};
use mpvpn_sockets::{
    bind_options::BindOptions,
    payload::{IPV4_UDP_HEADER_BYTES, IPV6_UDP_HEADER_BYTES, max_udp_payload},
};
use mpvpn_status::check::{CheckReport, LinkCheck, Mptcp, TcpMeasurement, TokenCheck, TransportCheck};
use mpvpn_tcp::{
    connection::TcpTransportConfig,
    dial::DialError,
    probe::{TcpProbe, probe},
};
use mpvpn_tunnel::ClientConfig as TunnelConfig;
use mpvpn_types::Duration;
use tokio::runtime::{Builder, Runtime};

use super::start::tunnel_config;

/// The user's next step where this machine sends nothing to the server.
const NEXT_IF_NOT_SENT: &str = "`mpvpn status` shows whether a kill switch of mpvpn blocks, which `sudo mpvpn kill-switch release` ends \
    where no client runs; else look at `ip route` and `sudo nft list ruleset`";

/// A link to be measured.
struct Candidate {
    bind_options: BindOptions,
    remote: Option<SocketAddr>,
    mtu: u32,
    /// Why it cannot be used; empty if it can.
    reason: &'static str,
}

/// Measures every link. Calls `report` from several threads with each result, as text.
///
/// # Errors
/// If the links of this machine cannot be listed, or the configuration is not usable.
pub fn run(config: &ClientConfig, report: &(dyn Fn(&str) + Sync)) -> Result<CheckReport, RunError> {
    let remotes = resolve_server(config, report)?;
    let policies = LinkPolicies::new(&config.links);
    let candidates = candidates(config, &policies, remotes.clone())?;
    let check_candidate = |candidate: &Candidate| {
        let name = candidate.bind_options.name.clone();
        let link = check_link(config, candidate, &remotes, report)?;
        Ok(link.judge(policies.tier(&name), policies.transport(&name)))
    };
    let links = std::thread::scope(|scope| {
        let threads: Vec<_> =
            candidates.iter().map(|candidate| scope.spawn(|| check_candidate(candidate))).collect();
        threads.into_iter().map(join_thread).collect::<Result<Vec<_>, RunError>>()
    })?;
    let kernel = kernel_check();
    let via = config.via.as_ref().map(|via| via.proxy.to_string());
    Ok(CheckReport { server: config.server.to_string(), via, links, kernel })
}

fn join_thread<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The addresses of the server. Behind a proxy, an unresolved name is no error, because the proxy resolves
/// it.
fn resolve_server(
    config: &ClientConfig,
    report: &(dyn Fn(&str) + Sync),
) -> Result<Vec<SocketAddr>, RunError> {
    let server = &config.server;
    if let Some(address) = server.socket_addr() {
        return Ok(vec![address]);
    }
    let found = runtime()?.block_on(tokio::net::lookup_host((server.host.as_str(), server.port)));
    match found {
        Ok(found) => Ok(found.collect()),
        Err(source) if config.via.is_some() => {
            report(&format!("{}: the name cannot be resolved here: {source}", server.host));
            Ok(Vec::new())
        }
        Err(source) => Err(RunError::Unresolved { name: server.host.clone(), source }),
    }
}

fn candidates(
    config: &ClientConfig,
    policies: &LinkPolicies,
    remotes: Vec<SocketAddr>,
) -> Result<Vec<Candidate>, RunError> {
    let poller = Poller::new().map_err(RunError::io("make an epoll instance"))?;
    let socket_options =
        LinkSocketOptions { tuns: vec![config.tun_name.clone()], ..LinkSocketOptions::default() };
    let mut links = Links::new(&config.paths, Vec::new(), &LinkMeters::default(), socket_options, &poller)?;
    links.set_remotes(remotes);
    links.rescan(&poller, policies)?;
    let candidate = |(id, link): (_, &mpvpn_links::Link)| {
        Some(Candidate {
            bind_options: links.bind_options(id)?,
            remote: link.remote,
            mtu: link.mtu,
            reason: link.reason,
        })
    };
    Ok(links.uplinks().filter_map(candidate).collect())
}

fn check_link(
    config: &ClientConfig,
    candidate: &Candidate,
    remotes: &[SocketAddr],
    report: &(dyn Fn(&str) + Sync),
) -> Result<LinkCheck, RunError> {
    let name = &candidate.bind_options.name;
    let addresses = candidate.bind_options.addresses.clone();
    let has_proxy = config.via.is_some() && !addresses.is_empty();
    if candidate.remote.is_none() && !has_proxy {
        report(&format!("{name}: {}", candidate.reason));
        return Ok(LinkCheck::unusable(name, addresses, candidate.reason));
    }
    let (udp, tcp) = std::thread::scope(|scope| {
        let udp = scope.spawn(|| check_udp(config, candidate, report));
        let tcp = scope.spawn(|| check_tcp(config, candidate, remotes, report));
        (join_thread(udp), join_thread(tcp))
    });
    let (udp, tcp) = (udp?, tcp?);
    let verdicts = [udp.authorized, tcp.as_ref().ok().map(|probe| probe.authorized)];
    let refusal = udp.refusal.or_else(|| tcp.as_ref().ok().and_then(|probe| probe.refusal.clone()));
    let credentials = match (verdicts.contains(&Some(false)), verdicts.contains(&Some(true))) {
        (true, _) => TokenCheck::Refused,
        (false, true) => TokenCheck::Accepted,
        (false, false) => TokenCheck::Unknown,
    };
    let next = match &tcp {
        Err(error) if udp.next.is_empty() => next_step(error),
        _ => udp.next,
    };
    Ok(LinkCheck {
        next,
        remote: candidate.remote,
        udp: TransportCheck::from(udp.found),
        tcp: TransportCheck::from(tcp.map(tcp_result)),
        credentials,
        refusal,
        ..LinkCheck::unusable(name, addresses, "")
    })
}

fn check_udp(
    config: &ClientConfig,
    candidate: &Candidate,
    report: &(dyn Fn(&str) + Sync),
) -> Result<udp::UdpOutcome, RunError> {
    let name = &candidate.bind_options.name;
    let Some(remote) = candidate.remote else {
        return Ok(udp::UdpOutcome::failed("the address of the server is not known".to_owned()));
    };
    let refusal = LastRefusal::default();
    let tunnel = probe_config(config, candidate.mtu, remote, &refusal)?;
    let mut outcome = udp::probe(&candidate.bind_options, remote, &tunnel);
    if let Some(refusal) = refusal.take() {
        (outcome.found, outcome.next) = (Err(refusal.to_string()), refusal.next_step());
    }
    match &outcome.found {
        Ok(found) => report(&format!("{name}: UDP works, {:.1} ms", found.ms)),
        Err(error) => report(&format!("{name}: UDP fails: {error}")),
    }
    Ok(outcome)
}

fn check_tcp(
    config: &ClientConfig,
    candidate: &Candidate,
    remotes: &[SocketAddr],
    report: &(dyn Fn(&str) + Sync),
) -> Result<Result<TcpProbe, DialError>, RunError> {
    let name = &candidate.bind_options.name;
    let runtime = runtime()?;
    let token = config.load_token()?;
    let tcp_config = TcpTransportConfig::new(config, token.as_ref(), runtime.handle().clone(), None)?;
    let probed = runtime.block_on(probe(&tcp_config, candidate.bind_options.clone(), remotes.to_vec()));
    match &probed {
        Ok(probe) => report(&format!("{name}: TCP works, {:.1} ms", ms(probe.connect))),
        Err(error) => report(&format!("{name}: TCP fails: {error}")),
    }
    Ok(probed)
}

/// The user's next step after a TCP transport has failed; empty if the failure does not tell.
fn next_step(error: &DialError) -> &'static str {
    match error {
        DialError::Refused(refusal) => refusal.next_step(),
        DialError::Connect { source, .. } => match ConnectFailure::of(source) {
            ConnectFailure::Refused => {
                "check the port in --server (443 unless given), and that the server runs and listens there: `mpvpn status` on \
                 its machine"
            }
            ConnectFailure::Unroutable | ConnectFailure::Forbidden => NEXT_IF_NOT_SENT,
            _ => "",
        },
        _ => "",
    }
}

fn tcp_result(probe: TcpProbe) -> TcpMeasurement {
    TcpMeasurement {
        connect_ms: ms(probe.connect),
        proxy_ms: probe.proxy.map(ms),
        tls_ms: ms(probe.tls),
        http2_ms: ms(probe.http2),
        mptcp: match probe.multipath {
            Some(MptcpState::Active) => Mptcp::Works,
            Some(MptcpState::Fallback) => Mptcp::FellBack,
            Some(MptcpState::NotUsed) => Mptcp::Missing,
            None => Mptcp::NoAnswer,
        },
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

fn runtime() -> Result<Runtime, RunError> {
    Builder::new_current_thread().enable_all().build().map_err(RunError::io("start the runtime"))
}

/// The configuration of a client that only makes a QUIC connection over one link.
fn probe_config(
    config: &ClientConfig,
    mtu: u32,
    remote: SocketAddr,
    refusal: &LastRefusal,
) -> Result<TunnelConfig, RunError> {
    let tls = tls::client_config_reporting(&config.trust, config.cert.as_ref(), &[b"h3"], refusal)?;
    let headers = if remote.is_ipv4() { IPV4_UDP_HEADER_BYTES } else { IPV6_UDP_HEADER_BYTES };
    let max_udp_payload = max_udp_payload(mtu, headers);
    let options = TransportOptions { max_udp_payload, ..TransportOptions::default() };
    let secret = random::<32>().map_err(RunError::io("get random numbers"))?;
    tunnel_config(config, ClientSetup::new(Arc::new(tls), &options, &secret)?, config.load_token()?)
}
