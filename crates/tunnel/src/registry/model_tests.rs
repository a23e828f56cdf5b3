//! A model of sessions, of which every state within bounds is explored.
//!
//! Parties: a device of alice; a second device, with a copy of alice's state folder or of bob; and mallory, a
//! user of the same server. All of them know every secret that was ever made, and mallory also shows the
//! process number of alice's device. Nobody knows a token of another user, which TLS keeps. Events, in every
//! order: a party asks for the initial connection or joins, a connection is lost, a device starts its process
//! again, an administrator ends the access of a user, removes users or gives out a new token, the server is
//! started again. There are two shards: what shard 0 does at once, shard 1 learns by messages that may be
//! late.
//!
//! The sessions are those of the [`Registry`] itself. Beside it stands what it must do: which processes have
//! had each session, and the addresses of each secret ([`World::may_have`]). Three rules of
//! [`Server`](crate::Server) stand here in short, whose own form the crate `server` tests (`access_tests`):
//! each request shows a token that is valid now; connections are closed when their token has ended; and when
//! another connection has replaced them.
//!
//! The properties that always hold are in [`World::ask`] and [`World::check`].

use std::collections::VecDeque;

use super::*;

const USERS: [&str; 3] = ["alice", "bob", "mallory"];
/// The parties: the first two are devices, whose users are parameters of the model.
const MALLORY: usize = 2;
const PARTIES: usize = 3;

/// The end of the exploration: states beyond are checked, and not explored further.
#[derive(Clone, Copy)]
struct Bounds {
    /// Secrets that the server makes.
    secrets: u8,
    connections: usize,
    /// Tokens of a user.
    tokens: u8,
    /// Processes of a device.
    processes: u8,
    /// Whether the second device also leaves out its process number.
    leaves_out_process: bool,
    subnet: &'static str,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A party asks for a connection as a process of `process_of`, or does not say which process it is, and
    /// shows a secret.
    Ask {
        party: usize,
        process_of: Option<usize>,
        secret: Option<u8>,
        number: u8,
    },
    /// A connection is lost, or the message that it was replaced has arrived.
    Lose(usize),
    StartProcess(usize),
    EndAccess(usize),
    /// A user has access by a new token.
    GiveToken(usize),
    /// Users without access are removed.
    RemoveUsers,
    /// Shard 1 learns that access has ended.
    Deliver,
    StartServer,
}

/// A connection; `serial` names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Connection {
    secret: SessionSecret,
    number: ConnectionNumber,
    user: usize,
    token: u8,
    instance: Option<ClientInstance>,
    is_replaced: bool,
    serial: u64,
}

impl Connection {
    fn shard(&self) -> u8 {
        self.number.number()
    }
}

/// The processes of a session that lives.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Processes {
    /// Those that have had it; the last one has it.
    had: Vec<ClientInstance>,
    /// Those that took it over from one that came back: they have to leave it.
    later: Vec<ClientInstance>,
}

/// The server and its clients.
#[derive(Clone)]
struct World {
    registry: Registry,
    subnet: &'static str,
    now: Instant,
    /// The sessions that live.
    sessions: BTreeMap<SessionSecret, Processes>,
    /// The addresses of each session that lives or can be resumed.
    addresses: BTreeMap<SessionSecret, Vec<IpAddr>>,
    connections: Vec<Connection>,
    /// The users of the two devices, and mallory.
    users: [usize; PARTIES],
    /// The user of each secret.
    owners: Vec<usize>,
    /// The valid token of each user; `None`: no access.
    tokens: [Option<u8>; 3],
    /// The number of tokens that each user was given.
    given: [u8; 3],
    processes: [u8; PARTIES],
    /// Whether a message about the end of access is on its way to shard 1.
    is_pending: bool,
}

impl Processes {
    /// A process is admitted to the session; `None`: it does not say which, and has what others have.
    fn admit(&mut self, instance: Option<ClientInstance>) {
        let Some(instance) = instance else { return };
        if let Some(at) = self.had.iter().position(|other| *other == instance) {
            self.had.remove(at);
            self.later.extend(if at < self.had.len() { self.had.pop() } else { None });
        }
        self.had.push(instance);
    }
}

impl World {
    fn new(second: usize, subnet: &'static str) -> Self {
        Self {
            registry: empty_registry(subnet),
            subnet,
            now: Instant::now(),
            sessions: BTreeMap::new(),
            addresses: BTreeMap::new(),
            connections: Vec::new(),
            users: [0, second, MALLORY],
            owners: Vec::new(),
            tokens: [Some(0); 3],
            given: [1; 3],
            processes: [0; PARTIES],
            is_pending: false,
        }
    }

    /// Returns the world after an event, or the property that the event breaks.
    fn after(&self, event: Event) -> Result<Self, &'static str> {
        let inner = Arc::new(Mutex::new(self.registry.lock().clone()));
        let mut world = self.clone();
        let (leases_changed, count_due, sites_due, sites_change, forwards_due) = Default::default();
        world.registry = Registry { inner, leases_changed, count_due, sites_due, sites_change, forwards_due };
        match event {
            Event::Ask { party, process_of, secret, number } => {
                let instance = process_of.map(|party| world.instance(party));
                world.ask(world.users[party], instance, secret, number)?;
            }
            Event::Lose(at) => world.close(|own| own.serial == self.connections[at].serial),
            Event::StartProcess(party) => world.processes[party] += 1,
            Event::EndAccess(user) => {
                world.tokens[user] = None;
                world.end_access();
            }
            Event::GiveToken(user) => {
                world.tokens[user] = Some(world.given[user]);
                world.given[user] += 1;
                world.end_access();
            }
            Event::RemoveUsers => {
                let tokens = world.tokens;
                let has_access = |user: usize| tokens[user].is_some();
                let known = |name: &str| USERS.iter().position(|user| *user == name).is_some_and(has_access);
                world.registry.end_leases_of_unknown(known);
                let (sessions, owners) = (&world.sessions, &world.owners);
                world.addresses.retain(|secret, _| {
                    sessions.contains_key(secret) || has_access(owners[usize::from(secret[0]) - 1])
                });
            }
            Event::Deliver => {
                world.is_pending = false;
                world.close_without_access(1);
            }
            Event::StartServer => {
                (world.is_pending, world.connections) = (false, Vec::new());
                world.sessions.clear();
                let leases = world.registry.leases();
                world.registry = empty_registry(world.subnet);
                if !world.registry.restore_leases(world.now, leases).is_empty() {
                    return Err("a lease that cannot be restored");
                }
            }
        }
        world.connections.sort();
        world.check().map(|()| world)
    }

    fn instance(&self, party: usize) -> ClientInstance {
        [16 * party as u8 + self.processes[party]; 16]
    }

    /// A request with the newest token of a user.
    fn ask(
        &mut self,
        user: usize,
        instance: Option<ClientInstance>,
        shown: Option<u8>,
        number: u8,
    ) -> Result<(), &'static str> {
        let Some(token) = self.tokens[user] else { return Ok(()) };
        let (shown, new) = (shown.map(|secret| [secret; 16]), [self.owners.len() as u8 + 1; 16]);
        let number = ConnectionNumber::new(number).unwrap();
        let request = AdmissionRequest {
            user: USERS[user],
            secret: shown,
            instance,
            number,
            limits: UserLimits::default(),
            shard: number.number(),
            connection: ConnectionHandle(0),
        };
        let own = shown.filter(|secret| self.may_have(user, instance, *secret, number));
        let Ok(admission) = self.registry.admit(&request, || new) else {
            let is_join = number != ConnectionNumber::INITIAL;
            return if own.is_none() && is_join {
                Ok(())
            } else {
                Err("a refused owner, or a refused session")
            };
        };
        let Admission { secret, addresses, serial, replaced, .. } = admission;
        if own.is_some_and(|own| own != secret) {
            return Err("a secret that does not lead its owner to its session");
        }
        for slot in replaced {
            let old = self.connections.iter_mut().find(|own| own.serial == slot.serial);
            let old = old.filter(|own| !own.is_replaced).ok_or("a replaced connection that is not there")?;
            old.is_replaced = true;
        }
        let new_connection = Connection { secret, number, user, token, instance, is_replaced: false, serial };
        self.connections.push(new_connection);
        // At the same shard without delay.
        self.close(|own| own.is_replaced && own.shard() == number.number());
        self.sessions.entry(secret).or_default().admit(instance);
        if secret == new {
            self.owners.push(user);
            if number != ConnectionNumber::INITIAL {
                return Err("a join made a session");
            }
        } else if shown != Some(secret) {
            return Err("a session whose secret was not shown");
        } else if self.owners[usize::from(secret[0]) - 1] != user {
            return Err("a secret admitted another user");
        } else if own.is_none() {
            return Err(
                "a secret admitted a process that has to leave, or to wait for the initial connection",
            );
        }
        if addresses.is_none() { self.assign(secret, user) } else { Ok(()) }
    }

    /// Whether a process of a user gets the session of a secret that it shows: of the user's own sessions
    /// each that has ended; and each that lives, if the process has it or takes it over by the initial
    /// connection, unless another one took it back from this process.
    fn may_have(
        &self,
        user: usize,
        instance: Option<ClientInstance>,
        secret: SessionSecret,
        number: ConnectionNumber,
    ) -> bool {
        let is_own = self.addresses.contains_key(&secret) && self.owners[usize::from(secret[0]) - 1] == user;
        let (Some(session), Some(instance)) = (self.sessions.get(&secret), instance) else { return is_own };
        let may_take_over = number == ConnectionNumber::INITIAL && !session.later.contains(&instance);
        is_own && (session.had.last() == Some(&instance) || may_take_over)
    }

    /// The session gets addresses; those of one that has ended if no others are free.
    fn assign(&mut self, secret: SessionSecret, user: usize) -> Result<(), &'static str> {
        let assigned = self.registry.assign(secret, USERS[user], &[]);
        let left: BTreeSet<_> = self.registry.leases().iter().map(|lease| lease.secret).collect();
        let lost: Vec<_> = self.addresses.extract_if(.., |secret, _| !left.contains(secret)).collect();
        let capacity = self.registry.lock().pool.capacity() as usize;
        match assigned {
            _ if lost.iter().any(|(secret, _)| self.sessions.contains_key(secret)) => {
                Err("a session that lives lost its addresses")
            }
            Ok(_) if lost.len() != usize::from(self.addresses.len() + lost.len() == capacity) => {
                Err("addresses were taken from a session although others were free")
            }
            Ok(addresses) => {
                self.addresses.insert(secret, addresses.iter().collect());
                Ok(())
            }
            Err(_) if self.addresses.keys().any(|secret| !self.sessions.contains_key(secret)) => {
                Err("no addresses, although a session that has ended has some")
            }
            Err(_) => {
                self.close(|own| own.secret == secret);
                Ok(())
            }
        }
    }

    fn close(&mut self, ends: impl Fn(&Connection) -> bool) {
        for own in self.connections.extract_if(.., |own| ends(own)) {
            self.registry.remove(self.now, &own.secret, own.number, own.serial);
        }
        let connections = &self.connections;
        let lives = |secret: &_| connections.iter().any(|own| own.secret == *secret && !own.is_replaced);
        self.sessions.retain(|secret, _| lives(secret));
    }

    /// Closes the connections of a shard whose tokens have ended.
    fn close_without_access(&mut self, shard: u8) {
        let tokens = self.tokens;
        self.close(|own| own.shard() == shard && tokens[own.user] != Some(own.token));
    }

    fn end_access(&mut self) {
        self.is_pending = true;
        self.close_without_access(0);
    }

    fn check(&self) -> Result<(), &'static str> {
        let inner = self.registry.lock();
        for own in &self.connections {
            let may_live = self.tokens[own.user] == Some(own.token) || self.is_pending && own.shard() == 1;
            let session = inner.sessions.get(&own.secret);
            let slot = session.and_then(|session| session.connections.get(&own.number));
            let has_slot = slot.is_some_and(|slot| slot.serial == own.serial);
            if !may_live {
                return Err("a connection lives after the end of access, or with a token before the newest");
            }
            if has_slot == own.is_replaced {
                return Err("a connection without a place, or a replaced one with a place");
            }
            let holds = session.is_some_and(|session| session.holder.claim(own.instance) == Claim::Holder);
            if !own.is_replaced && !holds {
                return Err("a session of two processes");
            }
        }
        let places: usize = inner.sessions.values().map(|session| session.connections.len()).sum();
        if places != self.connections.iter().filter(|own| !own.is_replaced).count() {
            return Err("a place of a connection that is closed");
        }
        let leases = inner.pool.leases().map(|lease| (lease.secret, lease.addresses));
        if !leases.eq(self.addresses.clone()) {
            return Err("a session without its addresses, or addresses of a session that cannot be resumed");
        }
        if !inner.sessions.keys().eq(self.sessions.keys()) {
            return Err("a session without connections, or connections without a session");
        }
        let mut addresses = BTreeSet::new();
        for lease in inner.pool.leases() {
            if lease.idle_since.is_some() == inner.sessions.contains_key(&lease.secret) {
                return Err("addresses in use by nobody, or free although a session lives");
            }
            if lease.user != USERS[self.owners[usize::from(lease.secret[0]) - 1]] {
                return Err("addresses of another user's session");
            }
            if !lease.addresses.iter().all(|ip| addresses.insert(*ip)) {
                return Err("an address of two sessions");
            }
            let is_routed = inner.sessions.contains_key(&lease.secret).then_some(lease.secret);
            if lease.addresses.iter().any(|ip| inner.by_ip.get(ip).copied() != is_routed) {
                return Err("an address leads to a session that has ended, or to none");
            }
        }
        let counts = USERS.map(|user| inner.sessions.values().filter(|own| own.user == user).count());
        let counted = USERS.map(|user| inner.users.get(user).copied().unwrap_or(0) as usize);
        if counts != counted { Err("sessions of a user that do not exist are counted") } else { Ok(()) }
    }

    /// Everything on which the future depends: all but serial numbers.
    fn key(&self) -> impl Ord + use<> {
        let inner = self.registry.lock();
        let connections = self.connections.iter().map(|own| Connection { serial: 0, ..own.clone() });
        let holders = inner.sessions.iter().map(|(secret, session)| (*secret, session.holder.clone()));
        let leases = inner.pool.leases().map(|own| (own.secret, own.addresses, own.idle_since.is_some()));
        (
            connections.collect::<Vec<_>>(),
            self.sessions.clone(),
            holders.collect::<Vec<_>>(),
            leases.collect::<Vec<_>>(),
            self.owners.clone(),
            (self.tokens, self.given, self.processes, self.is_pending),
        )
    }

    fn events(&self, bounds: Bounds) -> Vec<Event> {
        let mut events = vec![Event::StartServer];
        for party in 0..PARTIES {
            let secrets = (1..=self.owners.len() as u8).map(Some).chain([None]);
            let processes = match party {
                MALLORY => vec![Some(0), Some(MALLORY)],
                0 => vec![Some(0)],
                _ if bounds.leaves_out_process => vec![Some(party), None],
                _ => vec![Some(party)],
            };
            for (secret, number) in secrets.flat_map(|secret| [(secret, 0), (secret, 1)]) {
                let ask = |process_of: &Option<usize>| Event::Ask {
                    party,
                    process_of: *process_of,
                    secret,
                    number,
                };
                events.extend(processes.iter().map(ask));
            }
        }
        events.extend((0..self.connections.len()).map(Event::Lose));
        events.extend(
            (0..MALLORY).filter(|at| self.processes[*at] + 1 < bounds.processes).map(Event::StartProcess),
        );
        let users: BTreeSet<_> = self.users[..MALLORY].iter().copied().collect();
        let with_access = users.iter().filter(|user| self.tokens[**user].is_some());
        events.extend(with_access.map(|user| Event::EndAccess(*user)));
        let may_get = |user: &&usize| self.given[**user] < bounds.tokens;
        events.extend(users.iter().filter(may_get).map(|user| Event::GiveToken(*user)));
        events.extend(self.is_pending.then_some(Event::Deliver));
        events.push(Event::RemoveUsers);
        events
    }

    fn is_within(&self, bounds: Bounds) -> bool {
        self.owners.len() <= usize::from(bounds.secrets) && self.connections.len() <= bounds.connections
    }
}

fn empty_registry(subnet: &str) -> Registry {
    Registry::new(subnet.parse().unwrap(), None, 100)
}

/// Explores all states, the nearest first, so that a failure is told with a shortest way to it. Returns the
/// number of states.
fn explore(second: usize, bounds: Bounds) -> usize {
    let first = World::new(second, bounds.subnet);
    let mut seen = BTreeSet::from([first.key()]);
    let (mut next, mut origins) = (VecDeque::from([(0, first)]), vec![None]);
    while let Some((number, world)) = next.pop_front() {
        for event in world.events(bounds) {
            let after = world.after(event).unwrap_or_else(|wrong| {
                let back = std::iter::successors(origins[number], |(from, _)| origins[*from]);
                let mut events: Vec<Event> = back.map(|(_, event)| event).collect();
                events.reverse();
                panic!("{wrong} after {events:?} and {event:?}")
            });
            if after.is_within(bounds) && seen.insert(after.key()) {
                next.push_back((origins.len(), after));
                origins.push(Some((number, event)));
            }
        }
    }
    seen.len()
}

/// Explores all states within bounds, with a second device of alice and with one of bob.
fn explore_with_either_device(bounds: Bounds) {
    for second in [0, 1] {
        let states = explore(second, bounds);
        println!("{states} states with a second device of {}", USERS[second]);
        assert!(states > 1000, "{states}");
    }
}

const SMALL: Bounds = Bounds {
    secrets: 2,
    connections: 2,
    tokens: 1,
    processes: 2,
    leaves_out_process: false,
    subnet: "10.0.0.0/24",
};

#[test]
fn a_secret_admits_its_user_alone_until_access_ends() {
    explore_with_either_device(SMALL);
}

#[test]
fn sessions_that_live_keep_the_last_address_also_without_process_numbers() {
    let one_process = Bounds { processes: 1, leaves_out_process: true, ..SMALL };
    explore_with_either_device(Bounds { subnet: "10.0.0.0/30", ..one_process });
}

/// 360,000 states.
#[test]
#[ignore = "takes a minute"]
fn a_secret_admits_its_user_alone_until_access_ends_also_with_another_token() {
    explore_with_either_device(Bounds { tokens: 2, ..SMALL });
}
