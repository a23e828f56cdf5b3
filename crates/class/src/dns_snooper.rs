//! DNS snooping: which addresses belong to the domains in rules.
//!
//! In: the DNS queries and responses between clients and resolvers that pass through the tunnel over UDP (RFC
//! 1035). Out: whether an address was returned for a name that a [`DomainPattern`] matches.
//!
//! Always holds:
//! - only a response to a query that was seen counts: same addresses and ports, same ID, once, and in time;
//! - only names in rules are kept, for the time to live of the record, but at least [`MIN_TTL`] and at most
//!   [`MAX_TTL`];
//! - no more than [`MAX_MAPPINGS`] addresses and [`MAX_PENDING_QUERIES`] queries are kept: the oldest are
//!   removed first;
//! - no message causes a panic, and the length of a message bounds the work and memory for it.

mod pattern;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use mpvpn_types::{Duration, Instant};
// `simple-dns` reads messages without unsafe code, and follows pointers backwards only and no further than
// the longest name. What it lacks is a bound on the memory that a header may claim: see
// `has_plausible_counts`. `domain` has one, but brings a library of time zones; `hickory-proto` brings even
// more.
use simple_dns::{CLASS, Name, Packet, PacketFlag, QCLASS, RCODE, header_buffer, rdata::RData};

pub use pattern::{DomainPattern, ParseDomainPatternError};

/// Maximum number of mappings, where a mapping is one address under one pattern. With fewer, rules forget
/// addresses that are in use; with more, a client holds more memory. The number is chosen
/// (docs/design/shaper.md, open questions).
const MAX_MAPPINGS: usize = 4096;
/// Maximum number of queries without a response. With fewer, bursts of queries are missed; with more,
/// unanswered queries hold more memory. The number is chosen (docs/design/shaper.md, open questions).
const MAX_PENDING_QUERIES: usize = 1024;
/// How long to wait for the response to a query: stub resolvers give up earlier (after 5 s in glibc). A
/// longer wait gives an attacker more time to forge a response.
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum time to keep a mapping: applications use an address for some time after its time to live. A
/// shorter time misses their later flows; a longer one matches addresses that belong to another service by
/// then.
const MIN_TTL: Duration = Duration::from_secs(60);
/// Maximum time to keep a mapping, whatever its time to live: a wrong mapping must not last for days. A
/// shorter time misses flows to addresses that an application resolved once and keeps.
const MAX_TTL: Duration = Duration::from_secs(3600);
/// Maximum length of a CNAME chain in one response, which also ends loops. BIND and Unbound follow 11; a
/// shorter limit misses the addresses of longer chains.
const MAX_CNAME_CHAIN_LEN: usize = 16;
/// Maximum number of addresses that one response adds, so that a single name cannot replace all mappings.
const MAX_ADDRESSES_PER_RESPONSE: usize = 64;
/// Length in bytes of the shortest record: root name, type, class, time to live and length (RFC 1035 §4.1.3).
const MIN_RECORD_LEN: usize = 11;
/// Length in bytes of the shortest question: root name, type and class (RFC 1035 §4.1.2).
const MIN_QUESTION_LEN: usize = 5;

/// A query: address of the client, address of the resolver, DNS message ID.
type QueryKey = (SocketAddr, SocketAddr, u16);

/// Maps addresses to the domains in rules, as learned from DNS responses.
#[derive(Clone, Debug, Default)]
pub struct DnsSnooper {
    /// The patterns in rules, sorted.
    patterns: Vec<DomainPattern>,
    /// The expiry of each mapping: address, and index in `patterns`.
    mappings: BTreeMap<(IpAddr, usize), Instant>,
    /// The same mappings, ordered by expiry.
    by_expiry: BTreeSet<(Instant, IpAddr, usize)>,
    pending_queries: BTreeMap<QueryKey, Instant>,
    /// The same queries, oldest first; may still contain answered ones.
    query_queue: VecDeque<(Instant, QueryKey)>,
}

impl DnsSnooper {
    /// A snooper for these patterns, without mappings.
    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a DomainPattern>) -> Self {
        let patterns: BTreeSet<&DomainPattern> = patterns.into_iter().collect();
        Self { patterns: patterns.into_iter().cloned().collect(), ..Self::default() }
    }

    /// Replaces the patterns; mappings of patterns that remain are kept.
    pub fn set_patterns<'a>(&mut self, patterns: impl IntoIterator<Item = &'a DomainPattern>) {
        let before = std::mem::replace(self, Self::new(patterns));
        (self.pending_queries, self.query_queue) = (before.pending_queries, before.query_queue);
        for (until, address, pattern) in before.by_expiry {
            if let Ok(at) = self.patterns.binary_search(&before.patterns[pattern]) {
                self.insert(address, at, until);
            }
        }
    }

    /// Whether there are patterns; if not, DNS messages need not be passed in.
    pub fn has_patterns(&self) -> bool {
        !self.patterns.is_empty()
    }

    /// Whether a response returned `address` for a name that `pattern` matches, and the mapping is still
    /// valid.
    pub fn matches(&self, now: Instant, address: IpAddr, pattern: &DomainPattern) -> bool {
        let at = self.patterns.binary_search(pattern);
        at.ok().and_then(|at| self.mappings.get(&(address, at))).is_some_and(|until| now < *until)
    }

    /// Takes the payload of a UDP packet from a client to port 53 of a resolver.
    pub fn on_query(&mut self, now: Instant, client: SocketAddr, resolver: SocketAddr, message: &[u8]) {
        let is_answer = header_buffer::has_flags(message, PacketFlag::RESPONSE);
        let Ok(id) = header_buffer::id(message) else { return };
        if !self.has_patterns() || is_answer != Ok(false) {
            return;
        }
        while let Some((at, question)) = self.query_queue.front() {
            if self.query_queue.len() < MAX_PENDING_QUERIES
                && now.saturating_duration_since(*at) < QUERY_TIMEOUT
            {
                break;
            }
            // The client may have sent the same query again since.
            if self.pending_queries.get(question) == Some(at) {
                self.pending_queries.remove(question);
            }
            self.query_queue.pop_front();
        }
        let question = (client, resolver, id);
        self.pending_queries.insert(question, now);
        self.query_queue.push_back((now, question));
    }

    /// Takes the payload of a UDP packet from port 53 of a resolver to a client.
    pub fn on_response(&mut self, now: Instant, resolver: SocketAddr, client: SocketAddr, message: &[u8]) {
        let Ok(id) = header_buffer::id(message) else { return };
        let asked = self.pending_queries.remove(&(client, resolver, id));
        if asked.is_none_or(|at| now.saturating_duration_since(at) >= QUERY_TIMEOUT)
            || !has_plausible_counts(message)
        {
            return;
        }
        let Ok(packet) = Packet::parse(message) else { return };
        if packet.has_flags(PacketFlag::RESPONSE) && packet.rcode() == RCODE::NoError {
            self.learn_response(now, &packet);
        }
    }

    /// Adds a mapping as if a resolver had returned `address` for `name`; it lasts for `MAX_TTL`.
    pub fn add_mapping(&mut self, now: Instant, address: IpAddr, name: &str) {
        let labels: Vec<&str> = name.trim_end_matches('.').split('.').collect();
        for at in self.matching_patterns(&labels).collect::<Vec<_>>() {
            self.insert(address, at, now + MAX_TTL);
        }
    }

    fn learn_response(&mut self, now: Instant, packet: &Packet<'_>) {
        let [question] = packet.questions.as_slice() else { return };
        if question.qclass != QCLASS::CLASS(CLASS::IN) {
            return;
        }
        let mut wanted: BTreeSet<usize> = self.matching_patterns(question.qname.get_labels()).collect();
        let mut name = &question.qname;
        let mut ttl = u32::MAX;
        for _ in 0..MAX_CNAME_CHAIN_LEN {
            let next = packet.answers.iter().find_map(|record| match &record.rdata {
                RData::CNAME(target) if is_same_name(&record.name, name) => Some((&target.0, record.ttl)),
                _ => None,
            });
            let Some((target, valid)) = next else { break };
            (name, ttl) = (target, ttl.min(valid));
            wanted.extend(self.matching_patterns(name.get_labels()));
        }
        let addresses = packet.answers.iter().filter(|record| is_same_name(&record.name, name));
        let addresses = addresses.filter_map(|record| match &record.rdata {
            RData::A(a) => Some((IpAddr::V4(Ipv4Addr::from_bits(a.address)), record.ttl)),
            RData::AAAA(aaaa) => {
                Some((IpAddr::V6(Ipv6Addr::from_bits(aaaa.address)).to_canonical(), record.ttl))
            }
            _ => None,
        });
        for (address, valid) in addresses.take(MAX_ADDRESSES_PER_RESPONSE) {
            let lasts = Duration::from_secs(ttl.min(valid).into()).clamp(MIN_TTL, MAX_TTL);
            for at in &wanted {
                self.insert(address, *at, now + lasts);
            }
        }
    }

    fn matching_patterns<L: AsRef<[u8]>>(&self, labels: &[L]) -> impl Iterator<Item = usize> {
        let fits = self.patterns.iter().enumerate().filter(|(_, pattern)| pattern.matches_labels(labels));
        fits.map(|(at, _)| at)
    }

    fn insert(&mut self, address: IpAddr, pattern: usize, until: Instant) {
        let key = (address, pattern);
        if let Some(before) = self.mappings.get(&key).copied() {
            self.by_expiry.remove(&(before, address, pattern));
        } else if self.mappings.len() >= MAX_MAPPINGS
            && let Some((_, address, pattern)) = self.by_expiry.pop_first()
        {
            self.mappings.remove(&(address, pattern));
        }
        self.mappings.insert(key, until);
        self.by_expiry.insert((until, address, pattern));
    }
}

/// Whether the message is long enough for the record counts in its header: the library allocates memory by
/// these counts.
pub fn has_plausible_counts(message: &[u8]) -> bool {
    let records = [header_buffer::answers, header_buffer::name_servers, header_buffer::additional_records];
    let records: usize = records.iter().filter_map(|count| count(message).ok()).map(usize::from).sum();
    let questions = header_buffer::questions(message).map_or(0, usize::from);
    12 + records * MIN_RECORD_LEN + questions * MIN_QUESTION_LEN <= message.len()
}

/// Compares names without regard to case (RFC 4343).
fn is_same_name(one: &Name<'_>, other: &Name<'_>) -> bool {
    let (one, other) = (one.get_labels(), other.get_labels());
    one.len() == other.len()
        && one.iter().zip(other).all(|(a, b)| a.as_ref().eq_ignore_ascii_case(b.as_ref()))
}

#[cfg(test)]
mod tests;
