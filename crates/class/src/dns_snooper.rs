//! Which addresses belong to the domains that rules ask for.
//!
//! In: the DNS messages between clients and resolvers that pass through the tunnel over UDP (RFC 1035), questions and
//! answers. Out: whether an address was given to a name below a domain.
//!
//! Always holds:
//! - only answers to questions that were seen count: same ends, same ID, once, and soon;
//! - only names that a rule asks for are kept, for as long as the answer says, but at least [`SHORTEST`] and at most
//!   [`LONGEST`];
//! - no more than [`MAX_KNOWN`] addresses and [`MAX_ASKED`] questions are kept: the oldest make room;
//! - no message makes it panic, and work and memory for one are bounded by its length.

mod pattern;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use mpvpn_types::{Duration, Instant};
// `simple-dns` reads messages without unsafe code, and follows pointers backwards only and no further than the longest
// name. What it lacks is a bound on the memory that a header may claim: see `is_plausible`. `domain` has one, but brings
// a library of time zones; `hickory-proto` brings even more.
use simple_dns::{CLASS, Name, Packet, PacketFlag, QCLASS, RCODE, header_buffer, rdata::RData};

pub use pattern::{DomainPattern, ParseDomainPatternError};

/// Addresses that are known, counted for each domain.
const MAX_KNOWN: usize = 4096;
/// Questions that wait for their answers.
const MAX_ASKED: usize = 1024;
/// How long they wait: resolvers give up earlier.
const PATIENCE: Duration = Duration::from_secs(10);
/// Apps go on using an address for a while, whatever its time to live.
const SHORTEST: Duration = Duration::from_secs(60);
/// What was true for that long may have changed, whatever its time to live.
const LONGEST: Duration = Duration::from_secs(3600);
/// Names that lead from one to the next (CNAME) in one answer.
const MAX_CHAIN: usize = 16;
/// Addresses that one answer adds.
const MAX_ADDRESSES: usize = 64;
/// The shortest record: the name of the root, type, class, time to live and length (RFC 1035 §4.1.3).
const SHORTEST_RECORD: usize = 11;
/// The shortest question: the name of the root, type and class.
const SHORTEST_QUESTION: usize = 5;

/// One question: who asked whom, with which ID.
type Question = (SocketAddr, SocketAddr, u16);

/// What is known about names.
#[derive(Clone, Debug, Default)]
pub struct DnsSnooper {
    /// Sorted.
    patterns: Vec<DomainPattern>,
    /// Until when an address belongs to a pattern, which is counted from 0.
    known: BTreeMap<(IpAddr, usize), Instant>,
    /// The same, those first that end first.
    ends: BTreeSet<(Instant, IpAddr, usize)>,
    asked: BTreeMap<Question, Instant>,
    /// The same in order, and some that have been answered.
    queue: VecDeque<(Instant, Question)>,
}

impl DnsSnooper {
    /// Nothing is known yet about these domains.
    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a DomainPattern>) -> Self {
        let patterns: BTreeSet<&DomainPattern> = patterns.into_iter().collect();
        Self { patterns: patterns.into_iter().cloned().collect(), ..Self::default() }
    }

    /// Other domains are asked for from now on; what is known of those that stay is kept.
    pub fn set_patterns<'a>(&mut self, patterns: impl IntoIterator<Item = &'a DomainPattern>) {
        let before = std::mem::replace(self, Self::new(patterns));
        (self.asked, self.queue) = (before.asked, before.queue);
        for (until, address, pattern) in before.ends {
            if let Ok(at) = self.patterns.binary_search(&before.patterns[pattern]) {
                self.insert(address, at, until);
            }
        }
    }

    /// Whether anybody asks for domains; if not, no message need be shown.
    pub fn has_patterns(&self) -> bool {
        !self.patterns.is_empty()
    }

    /// Whether `address` was given to a name that `pattern` stands for.
    pub fn matches(&self, now: Instant, address: IpAddr, pattern: &DomainPattern) -> bool {
        let at = self.patterns.binary_search(pattern);
        at.ok().and_then(|at| self.known.get(&(address, at))).is_some_and(|until| now < *until)
    }

    /// The payload of a UDP packet from a client to port 53 of a resolver.
    pub fn on_query(&mut self, now: Instant, client: SocketAddr, resolver: SocketAddr, message: &[u8]) {
        let is_answer = header_buffer::has_flags(message, PacketFlag::RESPONSE);
        let Ok(id) = header_buffer::id(message) else { return };
        if !self.has_patterns() || is_answer != Ok(false) {
            return;
        }
        while let Some((at, question)) = self.queue.front() {
            if self.queue.len() < MAX_ASKED && now.saturating_duration_since(*at) < PATIENCE {
                break;
            }
            // It may have been asked again since.
            if self.asked.get(question) == Some(at) {
                self.asked.remove(question);
            }
            self.queue.pop_front();
        }
        let question = (client, resolver, id);
        self.asked.insert(question, now);
        self.queue.push_back((now, question));
    }

    /// The payload of a UDP packet from port 53 of a resolver to a client.
    pub fn on_response(&mut self, now: Instant, resolver: SocketAddr, client: SocketAddr, message: &[u8]) {
        let Ok(id) = header_buffer::id(message) else { return };
        let asked = self.asked.remove(&(client, resolver, id));
        if asked.is_none_or(|at| now.saturating_duration_since(at) >= PATIENCE) || !is_plausible(message) {
            return;
        }
        let Ok(packet) = Packet::parse(message) else { return };
        if packet.has_flags(PacketFlag::RESPONSE) && packet.rcode() == RCODE::NoError {
            self.learn(now, &packet);
        }
    }

    /// Takes an address for one that was given to `name`, as a resolver would say it, for an hour.
    pub fn add_mapping(&mut self, now: Instant, address: IpAddr, name: &str) {
        let labels: Vec<&str> = name.trim_end_matches('.').split('.').collect();
        for at in self.fitting(&labels).collect::<Vec<_>>() {
            self.insert(address, at, now + LONGEST);
        }
    }

    fn learn(&mut self, now: Instant, packet: &Packet<'_>) {
        let [question] = packet.questions.as_slice() else { return };
        if question.qclass != QCLASS::CLASS(CLASS::IN) {
            return;
        }
        let mut wanted: BTreeSet<usize> = self.fitting(question.qname.get_labels()).collect();
        let mut name = &question.qname;
        let mut ttl = u32::MAX;
        for _ in 0..MAX_CHAIN {
            let next = packet.answers.iter().find_map(|record| match &record.rdata {
                RData::CNAME(target) if is_same(&record.name, name) => Some((&target.0, record.ttl)),
                _ => None,
            });
            let Some((target, valid)) = next else { break };
            (name, ttl) = (target, ttl.min(valid));
            wanted.extend(self.fitting(name.get_labels()));
        }
        let addresses = packet.answers.iter().filter(|record| is_same(&record.name, name));
        let addresses = addresses.filter_map(|record| match &record.rdata {
            RData::A(a) => Some((IpAddr::V4(Ipv4Addr::from_bits(a.address)), record.ttl)),
            RData::AAAA(aaaa) => {
                Some((IpAddr::V6(Ipv6Addr::from_bits(aaaa.address)).to_canonical(), record.ttl))
            }
            _ => None,
        });
        for (address, valid) in addresses.take(MAX_ADDRESSES) {
            let lasts = Duration::from_secs(ttl.min(valid).into()).clamp(SHORTEST, LONGEST);
            for at in &wanted {
                self.insert(address, *at, now + lasts);
            }
        }
    }

    fn fitting<L: AsRef<[u8]>>(&self, labels: &[L]) -> impl Iterator<Item = usize> {
        let fits = self.patterns.iter().enumerate().filter(|(_, pattern)| pattern.fits(labels));
        fits.map(|(at, _)| at)
    }

    fn insert(&mut self, address: IpAddr, pattern: usize, until: Instant) {
        let key = (address, pattern);
        if let Some(before) = self.known.get(&key).copied() {
            self.ends.remove(&(before, address, pattern));
        } else if self.known.len() >= MAX_KNOWN
            && let Some((_, address, pattern)) = self.ends.pop_first()
        {
            self.known.remove(&(address, pattern));
        }
        self.known.insert(key, until);
        self.ends.insert((until, address, pattern));
    }
}

/// Whether the message is long enough for what its header counts: the library reserves memory by these counts.
fn is_plausible(message: &[u8]) -> bool {
    let records = [header_buffer::answers, header_buffer::name_servers, header_buffer::additional_records];
    let records: usize = records.iter().filter_map(|count| count(message).ok()).map(usize::from).sum();
    let questions = header_buffer::questions(message).map_or(0, usize::from);
    12 + records * SHORTEST_RECORD + questions * SHORTEST_QUESTION <= message.len()
}

/// Without regard to case (RFC 4343).
fn is_same(one: &Name<'_>, other: &Name<'_>) -> bool {
    let (one, other) = (one.get_labels(), other.get_labels());
    one.len() == other.len()
        && one.iter().zip(other).all(|(a, b)| a.as_ref().eq_ignore_ascii_case(b.as_ref()))
}

#[cfg(test)]
mod tests;
