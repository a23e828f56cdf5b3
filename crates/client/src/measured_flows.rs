//! The class of measured flows: `mpvpn measure` puts its own flows on chosen links, and on no others.
//!
//! In: requests of the local API, the time. Out: a configuration with one more class, whose connection uses
//! the chosen links, and a rule for flows to the responder. Always holds: the class and the rule of a
//! measurement are gone when it ends, and [`LEASE_DURATION`] after its last request; the classes of the file
//! stay as they are.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::{Duration, Instant},
};

use ipnet::IpNet;
use mpvpn_class::Rule;
use mpvpn_config::{ClassConfig, ClientConfig, MatchRule, RuleOrigin};
use mpvpn_packet::protocol;
use mpvpn_status::measure::{
    MAX_LINKS_OF_REQUEST, MEASURE_CLASS, MeasureRequest, MeasureState, RESPONDER_PORT,
};
use mpvpn_threads::event_loop::EventLoop;
use mpvpn_types::{ClassId, target::CLASSES};

use super::{Running, other_shard::ClientMessage};

/// How long a request counts. `mpvpn measure` repeats it each second: shorter ends measurements on a busy
/// machine, longer keeps the class of a killed command. Chosen.
const LEASE_DURATION: Duration = Duration::from_secs(10);

/// A running measurement.
#[derive(Clone, Debug)]
pub(super) struct MeasuredFlows {
    request: MeasureRequest,
    /// The addresses of the server in the tunnel.
    responders: Vec<IpAddr>,
    until: Instant,
}

impl MeasuredFlows {
    /// When the measurement ends.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// Adds the class and its rule; why not, if they cannot be added.
    pub(super) fn add_to(&self, config: &mut ClientConfig) -> Result<(), String> {
        if config.classes.iter().any(|class| class.name == MEASURE_CLASS) {
            return Err(format!(
                "a [[class]] has the name `{MEASURE_CLASS}`, which the class of measured flows needs: give it another name"
            ));
        }
        let is_free = |id: &ClassId| config.class(*id).is_none();
        let Some(id) = (1..ClassId::MAX).rev().map(ClassId).find(is_free) else {
            return Err(format!(
                "all {} classes are in use: take one out of the file while you measure",
                ClassId::MAX
            ));
        };
        let Some(default) = config.class(ClassId::DEFAULT) else { return Err("there are no classes".into()) };
        let mut class = ClassConfig {
            id,
            name: MEASURE_CLASS.to_owned(),
            tun: None,
            priority: false,
            connects_at_once: true,
            ..default.clone()
        };
        class.lane = self.request.lane.or(class.lane);
        if !self.request.only.is_empty() {
            (class.prefer, class.exclude) = (Vec::new(), Vec::new());
            class.only.clone_from(&self.request.only);
        }
        class.exclude.extend(self.request.exclude.iter().cloned());
        let rule = Rule {
            protocols: vec![protocol::TCP, protocol::UDP],
            to: self.responders.iter().copied().map(IpNet::from).collect(),
            ports: vec![RESPONDER_PORT..=RESPONDER_PORT],
            class: id,
            ..Rule::default()
        };
        config.classes.push(class);
        config.class_rules.insert(0, MatchRule { origin: RuleOrigin::BuiltIn(MEASURE_CLASS), rule });
        Ok(())
    }
}

/// Removes the class of measured flows.
pub(super) fn remove_from(config: &mut ClientConfig) {
    config.classes.retain(|class| class.name != MEASURE_CLASS);
    config.class_rules.retain(|found| found.origin != RuleOrigin::BuiltIn(MEASURE_CLASS));
}

/// The server's address in a network of the tunnel: the first host.
fn server_in(net: &IpNet) -> IpAddr {
    match net.trunc().addr() {
        IpAddr::V4(first) => Ipv4Addr::from(u32::from(first).wrapping_add(1)).into(),
        IpAddr::V6(first) => Ipv6Addr::from(u128::from(first).wrapping_add(1)).into(),
    }
}

impl Running {
    /// Changes how measured flows use the links, begins a measurement, or ends it.
    pub(crate) fn measure(
        &mut self,
        event_loop: &EventLoop,
        now: Instant,
        request: MeasureRequest,
    ) -> Result<MeasureState, String> {
        if self.kind.machine().is_none() {
            return Err("this client has no TUN device: mpvpn proxy cannot measure".to_owned());
        }
        let names: Vec<&str> =
            self.data_plane.sockets.links.uplinks().map(|(_, link)| link.name.as_str()).collect();
        let lists = [&request.only, &request.exclude];
        if lists.iter().any(|list| list.len() > MAX_LINKS_OF_REQUEST) {
            return Err(format!("more than {MAX_LINKS_OF_REQUEST} links"));
        }
        let unknown = lists.into_iter().flatten().find(|name| !names.contains(&name.as_str()));
        if let Some(name) = unknown {
            return Err(format!("there is no link `{name}`: known are {}", names.join(", ")));
        }
        let networks = self.status(now).addresses;
        let responders: Vec<IpAddr> = networks.iter().map(server_in).collect();
        if responders.is_empty() && !request.end {
            return Err("the tunnel is not up yet: wait for it with `mpvpn status --wait 30`".to_owned());
        }
        let state = MeasureState {
            device: self.config.tun_name.clone(),
            responders: responders.iter().map(|ip| SocketAddr::new(*ip, RESPONDER_PORT)).collect(),
        };
        match request.end {
            true => self.end_measurement(event_loop, now, "the command ended it"),
            false => {
                let flows = MeasuredFlows { request, responders, until: now + LEASE_DURATION };
                let is_same = self.measured.as_ref().is_some_and(|before| {
                    (&before.request, &before.responders) == (&flows.request, &flows.responders)
                });
                if !is_same {
                    let mut config = self.config.clone();
                    remove_from(&mut config);
                    flows.add_to(&mut config)?;
                    tracing::debug!(
                        target: CLASSES,
                        only = ?flows.request.only,
                        exclude = ?flows.request.exclude,
                        reason = "a measurement asked for it",
                        "measured flows use these links"
                    );
                    self.set_class_config(event_loop, now, config);
                }
                self.measured = Some(flows);
            }
        }
        Ok(state)
    }

    /// Ends a measurement whose command does not ask any more.
    pub(super) fn expire_measurement(&mut self, event_loop: &EventLoop, now: Instant) {
        if self.measured.as_ref().is_some_and(|flows| flows.until <= now) {
            self.end_measurement(event_loop, now, "its command does not ask any more");
        }
    }

    fn end_measurement(&mut self, event_loop: &EventLoop, now: Instant, reason: &str) {
        if self.measured.take().is_none() {
            return;
        }
        tracing::debug!(target: CLASSES, reason, "a measurement has ended");
        let mut config = self.config.clone();
        remove_from(&mut config);
        self.set_class_config(event_loop, now, config);
    }

    /// Uses the classes and rules of this configuration in all shards.
    pub(super) fn set_class_config(&mut self, event_loop: &EventLoop, now: Instant, config: ClientConfig) {
        self.config = config;
        self.shards.send(|| ClientMessage::Classes(Box::new(self.config.clone())));
        self.data_plane.set_classes(event_loop, now, &self.config);
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_identity::trust::Trust;
    use mpvpn_types::FlowMode;

    use super::*;

    fn flows(request: MeasureRequest) -> MeasuredFlows {
        MeasuredFlows { request, responders: vec![[10, 0, 0, 1].into()], until: Instant::now() }
    }

    #[test]
    fn the_class_comes_with_a_rule_before_all_others_and_goes_without_a_trace() {
        let before = ClientConfig::new("vpn.example".parse().unwrap(), Trust::Insecure);
        let mut config = before.clone();
        let request = MeasureRequest {
            only: vec!["eth1".into()],
            lane: Some(FlowMode::Stream),
            ..MeasureRequest::default()
        };
        flows(request).add_to(&mut config).unwrap();
        let class = config.classes.last().unwrap();
        assert_eq!((class.name.as_str(), class.only.as_slice()), (MEASURE_CLASS, &["eth1".to_owned()][..]));
        assert_eq!(class.lane, Some(FlowMode::Stream));
        assert!(before.class(class.id).is_none(), "its number is free");
        assert_eq!(config.class_rules[0].rule.class, class.id);
        assert_eq!(config.class_rules[0].rule.ports, [RESPONDER_PORT..=RESPONDER_PORT]);
        remove_from(&mut config);
        assert_eq!(config, before);
    }

    #[test]
    fn a_class_of_the_file_with_that_name_stays() {
        let mut config = ClientConfig::new("vpn.example".parse().unwrap(), Trust::Insecure);
        let id = ClassId(3);
        config.classes.push(ClassConfig { id, name: MEASURE_CLASS.into(), ..config.classes[0].clone() });
        let refused = flows(MeasureRequest::default()).add_to(&mut config.clone()).unwrap_err();
        assert!(refused.contains("give it another name"), "{refused}");
        config.classes.pop();
        for id in 3..ClassId::MAX {
            let name = format!("class{id}");
            config.classes.push(ClassConfig { id: ClassId(id), name, ..config.classes[0].clone() });
        }
        let refused = flows(MeasureRequest::default()).add_to(&mut config).unwrap_err();
        assert!(refused.contains("all 8 classes are in use"), "{refused}");
    }

    #[test]
    fn the_server_is_the_first_host_of_the_network() {
        for (own, server) in
            [("10.0.0.7/24", "10.0.0.1"), ("fd00::9/64", "fd00::1"), ("10.1.2.3/8", "10.0.0.1")]
        {
            assert_eq!(server_in(&own.parse().unwrap()), server.parse::<IpAddr>().unwrap(), "{own}");
        }
    }
}
