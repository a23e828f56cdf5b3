use super::*;
use mpvpn_packet::{
    ip, split,
    tcp_flags::{FIN, PSH},
};
use mpvpn_packets::{Packet, Tcp, has_valid_lengths_and_checksums};

const MTU: usize = 1400;

/// A segment as an app gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Got {
    seq: u32,
    ack: u32,
    flags: u8,
    window: u16,
    mss: Option<u16>,
    scale: Option<u8>,
    payload: Vec<u8>,
}

/// An app, segment by segment.
struct App {
    packet: Packet,
    seq: u32,
    ack: u32,
    window: u16,
}

impl App {
    fn new(packet: Packet) -> Self {
        Self { packet, seq: u32::MAX - 3, ack: 0, window: 1000 }
    }

    fn bytes(&self, flags: u8, options: &[u8], payload: &[u8]) -> Vec<u8> {
        let tcp = Tcp { seq: self.seq, ack: self.ack, flags, window: self.window, options: options.to_vec() };
        self.packet.tcp_with(&tcp, payload)
    }
}

struct Stage {
    now: Instant,
    proxy: SplitTcpProxy,
}

impl Stage {
    fn new() -> Self {
        Self::with(ProxyLimits::default())
    }

    fn with(limits: ProxyLimits) -> Self {
        let now = Instant::now();
        Self { now, proxy: SplitTcpProxy::new(now, limits, [1, 2], MTU) }
    }

    fn give(&mut self, bytes: &[u8]) {
        self.proxy.handle_packet(self.now, &ip::parse(bytes).unwrap());
    }

    /// The packets that all apps get, cut as the kernel cuts them.
    fn got(&mut self) -> Vec<Got> {
        let mut got = Vec::new();
        while let Some(joined) = self.proxy.poll_packet(self.now) {
            let whole = joined.to_vec().split_off(mpvpn_packet::VNET_HDR_LEN);
            let (mut out, mut ranges) = (Default::default(), Vec::new());
            split::split(joined.vnet(), &whole, MTU, &[], &mut out, &mut ranges).unwrap();
            for range in ranges {
                assert!(has_valid_lengths_and_checksums(&out[range.clone()]));
                let view = ip::parse(&out[range]).unwrap();
                let Some(segment) = Segment::of(&view) else { continue };
                got.push(Got {
                    seq: segment.seq(),
                    ack: segment.ack(),
                    flags: segment.flags(),
                    window: segment.window(),
                    mss: segment.mss(),
                    scale: segment.window_scale(),
                    payload: segment.payload().to_vec(),
                });
            }
        }
        got
    }

    fn one(&mut self) -> Got {
        let mut got = self.got();
        assert_eq!(got.len(), 1, "{got:?}");
        got.remove(0)
    }

    fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.proxy.poll_event()).collect()
    }

    fn ask(&mut self, app: &mut App, options: &[u8]) -> FlowId {
        self.events();
        self.give(&app.bytes(SYN, options, b""));
        let [Event::ConnectRequested { id, from, to }] = self.events()[..] else { panic!("a request") };
        assert_eq!((from, to), (app.packet.src, app.packet.dst));
        assert!(self.got().is_empty(), "no answer before the far side's");
        id
    }

    fn connect(&mut self, app: &mut App) -> FlowId {
        let id = self.ask(app, &[2, 4, 5, 120, 3, 3, 7, 0]);
        self.proxy.accept(self.now, id);
        let answer = self.one();
        app.seq = app.seq.wrapping_add(1);
        assert_eq!((answer.flags, answer.ack), (SYN | ACK, app.seq));
        app.ack = answer.seq.wrapping_add(1);
        self.give(&app.bytes(ACK, &[], b""));
        assert!(self.got().is_empty());
        id
    }

    fn send(&mut self, app: &mut App, flags: u8, payload: &[u8]) {
        self.give(&app.bytes(ACK | flags, &[], payload));
        let end = u32::from(flags & (FIN | SYN) != 0);
        app.seq = app.seq.wrapping_add(payload.len() as u32 + end);
    }

    fn read(&mut self, id: FlowId) -> Read {
        self.proxy.read(self.now, id, usize::MAX)
    }

    fn write(&mut self, id: FlowId, bytes: &[u8]) {
        self.proxy.write(self.now, id, Bytes::copy_from_slice(bytes));
    }

    fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(at) = self.proxy.poll_timeout()
            && at <= end
        {
            self.now = self.now.max(at);
            self.proxy.handle_timeout(self.now);
        }
        self.now = end;
    }
}

fn data(bytes: &'static [u8]) -> Read {
    Read::Data(Bytes::from_static(bytes))
}

#[test]
fn a_connection_is_answered_when_the_far_side_agrees_and_not_before() {
    for packet in [Packet::v4(), Packet::v6()] {
        let mut stage = Stage::new();
        let mut app = App::new(packet);
        let headers = if app.packet.src.is_ipv4() { 40 } else { 60 };
        let id = stage.ask(&mut app, &[2, 4, 5, 120, 1, 3, 3, 7]);
        stage.give(&app.bytes(SYN, &[], b""));
        assert!(stage.events().is_empty() && stage.got().is_empty(), "a repeated SYN is no second request");
        stage.proxy.accept(stage.now, id);
        let answer = stage.one();
        assert_eq!((answer.flags, answer.ack), (SYN | ACK, app.seq.wrapping_add(1)));
        assert_eq!((answer.mss, answer.scale), (Some((MTU - headers) as u16), Some(4)));
        stage.give(&app.bytes(SYN, &[], b""));
        assert_eq!(stage.one(), answer, "the answer may have been lost");
        stage.wait(Duration::from_millis(2500));
        assert_eq!(stage.one(), answer);
    }
}

#[test]
fn an_app_that_knows_no_scaling_gets_windows_without() {
    let mut stage = Stage::new();
    let mut app = App::new(Packet::v4());
    let id = stage.ask(&mut app, &[]);
    stage.proxy.accept(stage.now, id);
    let answer = stage.one();
    assert_eq!((answer.scale, answer.window), (None, u16::MAX));
    app.seq = app.seq.wrapping_add(1);
    app.ack = answer.seq.wrapping_add(1);
    stage.send(&mut app, 0, b"hello");
    assert_eq!(stage.one().window, u16::MAX);
    stage.write(id, &[7; 1500]);
    let sizes: Vec<_> = stage.got().iter().map(|got| got.payload.len()).collect();
    assert_eq!(sizes, [536, 464], "the default segment size, and not more than its window");
}

#[test]
fn a_refusal_reaches_the_app_as_what_it_was() {
    let gateway: IpAddr = [10, 0, 0, 1].into();
    let mut stage = Stage::new();
    let mut app = App::new(Packet::v4());
    let id = stage.ask(&mut app, &[]);
    stage.proxy.refuse(id, Refusal::Reset);
    let reset = stage.one();
    assert_eq!((reset.flags, reset.seq, reset.ack), (RST | ACK, 0, app.seq.wrapping_add(1)));

    let id = stage.ask(&mut app, &[]);
    stage.proxy.refuse(id, Refusal::Unreachable(Unreachable::AddressUnreachable, gateway));
    let error = stage.proxy.poll_packet(stage.now).unwrap().to_vec();
    let view = ip::parse(&error[mpvpn_packet::VNET_HDR_LEN..]).unwrap();
    assert_eq!((view.protocol(), view.src(), &view.transport()[..2]), (1, gateway, &[3, 1][..]));
    assert_eq!(&view.transport()[8 + 20..8 + 24], &app.bytes(SYN, &[], b"")[20..24], "it quotes the SYN");

    let id = stage.ask(&mut app, &[]);
    stage.proxy.refuse(id, Refusal::Silence);
    assert!(stage.got().is_empty());
    assert_eq!(stage.proxy.flow_count(), 0);
}

#[test]
fn bytes_and_ends_of_both_directions_pass() {
    let mut stage = Stage::new();
    let mut app = App::new(Packet::v4());
    let id = stage.connect(&mut app);
    stage.send(&mut app, PSH, b"request");
    assert_eq!(stage.events(), [Event::Readable(id)]);
    assert_eq!(stage.one().ack, app.seq);
    assert_eq!((stage.read(id), stage.read(id)), (data(b"request"), Read::Blocked));

    stage.send(&mut app, FIN, b"!");
    assert_eq!(stage.one().ack, app.seq, "the end is acknowledged, too");
    assert_eq!((stage.read(id), stage.read(id)), (data(b"!"), Read::Finished));
    // The app has ended and still reads.
    stage.write(id, b"answer");
    let got = stage.one();
    assert_eq!((got.payload.as_slice(), got.flags), (&b"answer"[..], ACK | PSH));
    app.ack = app.ack.wrapping_add(6);
    stage.give(&app.bytes(ACK, &[], b""));
    stage.proxy.finish(stage.now, id);
    assert_eq!(stage.one().flags, ACK | FIN);
    app.ack = app.ack.wrapping_add(1);
    stage.give(&app.bytes(ACK, &[], b""));
    assert_eq!((stage.proxy.flow_count(), stage.read(id)), (0, Read::UnknownFlow));
    assert_eq!(stage.proxy.poll_timeout(), None, "nothing is left behind");
}

#[test]
fn a_connection_tells_how_far_it_is_and_what_it_carried() {
    let (mut stage, mut app) = (Stage::new(), App::new(Packet::v4()));
    let found = |stage: &Stage| {
        let mut all = stage.proxy.summaries();
        let found = all.next().map(|flow| (flow.state, flow.up_bytes, flow.down_bytes));
        assert!(all.next().is_none());
        found
    };
    assert_eq!(found(&stage), None);
    let start = stage.now;
    let id = stage.ask(&mut app, &[]);
    assert_eq!(found(&stage), Some((ConnectionState::Opening, 0, 0)));
    stage.proxy.refuse(id, Refusal::Silence);
    assert_eq!(found(&stage), None);
    let id = stage.connect(&mut app);
    stage.wait(Duration::from_millis(10));
    stage.send(&mut app, 0, b"hello");
    assert_eq!(found(&stage), Some((ConnectionState::Open, 0, 0)), "the stream has not taken it");
    assert_eq!(stage.read(id), data(b"hello"));
    stage.write(id, b"good day");
    assert_eq!(found(&stage), Some((ConnectionState::Open, 5, 8)));
    stage.wait(Duration::from_millis(10));
    stage.send(&mut app, FIN, b"");
    assert_eq!(found(&stage), Some((ConnectionState::AppEnded, 5, 8)));
    let flow = stage.proxy.summaries().next().unwrap();
    assert_eq!((flow.key.source(), flow.key.destination()), (app.packet.src, app.packet.dst));
    assert_eq!((flow.started, flow.last_active), (start, start + Duration::from_millis(20)));
}

#[test]
fn the_end_that_comes_from_afar_first_is_remembered_for_a_moment() {
    let mut stage = Stage::new();
    let mut app = App::new(Packet::v4());
    let id = stage.connect(&mut app);
    stage.write(id, b"bye");
    stage.proxy.finish(stage.now, id);
    let got = stage.one();
    assert_eq!((got.flags, got.payload.as_slice()), (ACK | PSH | FIN, &b"bye"[..]));
    app.ack = app.ack.wrapping_add(4);
    // Half closed the other way: the app goes on sending.
    stage.send(&mut app, 0, b"more");
    stage.send(&mut app, FIN, b"");
    stage.got();
    assert_eq!((stage.read(id), stage.read(id)), (data(b"more"), Read::Finished));
    assert_eq!(stage.proxy.flow_count(), 1);
    // The acknowledgement of its end was lost.
    app.seq = app.seq.wrapping_sub(1);
    stage.send(&mut app, FIN, b"");
    assert_eq!(stage.one().ack, app.seq);
    // The port may be used again at once.
    app.seq = app.seq.wrapping_add(1000);
    let next = stage.ask(&mut app, &[]);
    assert_ne!(next, id);
    stage.proxy.abort(next);
    stage.wait(Duration::from_secs(4));
    assert_eq!(stage.proxy.flow_count(), 0);
}

#[test]
fn both_ends_may_close_at_the_same_time() {
    let mut stage = Stage::new();
    let mut app = App::new(Packet::v6());
    let id = stage.connect(&mut app);
    stage.proxy.finish(stage.now, id);
    assert_eq!(stage.one().flags, ACK | FIN);
    stage.send(&mut app, FIN, b"");
    assert_eq!(stage.one().ack, app.seq);
    app.ack = app.ack.wrapping_add(1);
    stage.give(&app.bytes(ACK, &[], b""));
    assert_eq!(stage.read(id), Read::Finished);
    stage.wait(Duration::from_secs(4));
    assert_eq!((stage.proxy.flow_count(), stage.events().len()), (0, 1));
}

#[test]
fn what_was_sent_before_the_end_can_be_read_after_it() {
    let mut stage = Stage::new();
    let mut app = App::new(Packet::v4());
    let id = stage.connect(&mut app);
    stage.send(&mut app, FIN, b"last words");
    stage.proxy.finish(stage.now, id);
    stage.got();
    app.ack = app.ack.wrapping_add(1);
    stage.give(&app.bytes(ACK, &[], b""));
    stage.wait(Duration::from_secs(60));
    assert_eq!((stage.read(id), stage.read(id)), (data(b"last words"), Read::Finished));
    assert_eq!(stage.proxy.flow_count(), 0);
}

#[test]
fn resets_pass_both_ways() {
    let mut stage = Stage::new();
    let mut app = App::new(Packet::v4());
    let id = stage.connect(&mut app);
    let seq = app.seq;
    app.seq = seq.wrapping_add(5);
    stage.give(&app.bytes(RST, &[], b""));
    assert_eq!(stage.one().flags, ACK, "a reset that misses is asked back (RFC 5961)");
    app.seq = seq;
    stage.give(&app.bytes(RST, &[], b""));
    assert_eq!(stage.events(), [Event::Aborted(id)]);
    assert_eq!(stage.proxy.flow_count(), 0);

    let id = stage.connect(&mut app);
    stage.proxy.abort(id);
    let reset = stage.one();
    assert_eq!((reset.flags, reset.seq), (RST | ACK, app.ack));
    assert!(stage.events().is_empty());
}

#[test]
fn segments_of_no_connection_are_disowned_and_resets_are_not_answered() {
    let mut stage = Stage::new();
    let mut app = App::new(Packet::v4());
    app.ack = 77;
    stage.give(&app.bytes(ACK, &[], b"x"));
    let got = stage.one();
    assert_eq!((got.flags, got.seq), (RST, 77));
    stage.give(&app.bytes(FIN, &[], b"x"));
    let got = stage.one();
    assert_eq!((got.flags, got.seq, got.ack), (RST | ACK, 0, app.seq.wrapping_add(2)));
    stage.give(&app.bytes(RST, &[], b""));
    stage.give(&app.packet.udp(b"no segment"));
    assert!(stage.got().is_empty() && stage.events().is_empty());
}

#[test]
fn an_app_that_asks_anew_before_it_was_answered_is_asked_for_anew() {
    let mut stage = Stage::new();
    let mut app = App::new(Packet::v4());
    let first = stage.ask(&mut app, &[]);
    app.seq = app.seq.wrapping_add(100_000);
    stage.give(&app.bytes(SYN, &[], b""));
    let [Event::Aborted(gone), Event::ConnectRequested { id, .. }] = stage.events()[..] else {
        panic!("two events")
    };
    assert_eq!(gone, first);
    stage.proxy.accept(stage.now, first);
    assert!(stage.got().is_empty(), "the answer to the first is too late");
    stage.proxy.accept(stage.now, id);
    assert_eq!(stage.one().ack, app.seq.wrapping_add(1));
}

#[test]
fn an_old_answer_to_a_syn_is_disowned() {
    let mut stage = Stage::new();
    let mut app = App::new(Packet::v4());
    let id = stage.ask(&mut app, &[]);
    stage.proxy.accept(stage.now, id);
    app.seq = app.seq.wrapping_add(1);
    app.ack = stage.one().seq.wrapping_add(500);
    stage.give(&app.bytes(ACK, &[], b""));
    assert_eq!((stage.one().flags, stage.proxy.flow_count()), (RST, 1));
}

#[test]
fn who_does_not_read_stops_the_app_and_nobody_else() {
    let mut stage = Stage::with(ProxyLimits { max_flow_bytes: 10_000, ..ProxyLimits::default() });
    let mut slow = App::new(Packet::v4());
    let mut quick = App::new(Packet::v4());
    quick.packet.src.set_port(1);
    let (stuck, lively) = (stage.connect(&mut slow), stage.connect(&mut quick));
    stage.send(&mut slow, 0, &[1; 1300]);
    let window = stage.one().window;
    assert_eq!(usize::from(window) << 4, (10_000usize - 1300).div_ceil(16) * 16);
    for _ in 0..10 {
        stage.send(&mut slow, 0, &[1; 1300]);
    }
    let last = stage.got().pop().unwrap();
    assert_eq!(last.window, 0);
    slow.seq = last.ack;
    // A probe of the closed window is answered.
    stage.give(&slow.bytes(ACK, &[], b"x"));
    assert_eq!(
        (stage.one().window, stage.proxy.held_bytes()),
        (0, last.ack.wrapping_sub(u32::MAX - 2) as usize)
    );

    stage.send(&mut quick, 0, b"hi");
    stage.got();
    assert_eq!(stage.read(lively), data(b"hi"));

    let read = std::iter::from_fn(|| match stage.read(stuck) {
        Read::Data(bytes) => Some(bytes.len()),
        _ => None,
    });
    assert!(read.sum::<usize>() >= 10_000);
    assert!(stage.one().window >= 10_000 / 2 / 16, "the app learns that it may go on");
    stage.send(&mut slow, 0, b"x");
    assert_eq!(stage.one().window, 10_000 / 16, "and with the next answer by how much");
}

#[test]
fn an_app_that_does_not_read_stops_the_stream() {
    let mut stage = Stage::with(ProxyLimits { max_flow_bytes: 5000, ..ProxyLimits::default() });
    let mut app = App::new(Packet::v4());
    app.window = 1;
    let id = stage.connect(&mut app);
    while stage.proxy.writable_bytes(id) > 0 {
        stage.write(id, &[9; 500]);
    }
    assert_eq!(stage.proxy.held_bytes(), 5000);
    assert_eq!(stage.one().payload.len(), 128, "its window, scaled");
    app.ack = app.ack.wrapping_add(128);
    app.window = 0;
    stage.give(&app.bytes(ACK, &[], b""));
    stage.wait(Duration::from_millis(400));
    assert_eq!(stage.one().payload.len(), 1, "a probe");
    assert!(stage.events().is_empty());
    app.window = 100;
    let mut received = 128;
    stage.give(&app.bytes(ACK, &[], b""));
    loop {
        let got = stage.got();
        if got.is_empty() {
            break;
        }
        let bytes: usize = got.iter().map(|got| got.payload.len()).sum();
        received += bytes;
        app.ack = app.ack.wrapping_add(bytes as u32);
        stage.give(&app.bytes(ACK, &[], b""));
    }
    assert_eq!((received, stage.events()), (5000, vec![Event::Writable(id)]));
}

#[test]
fn a_keep_alive_is_answered_and_nonsense_only_now_and_then() {
    let mut stage = Stage::new();
    let mut app = App::new(Packet::v4());
    stage.connect(&mut app);
    let seq = app.seq;
    for payload in [&b""[..], b"x"] {
        app.seq = seq.wrapping_sub(1);
        stage.give(&app.bytes(ACK, &[], payload));
        assert_eq!(stage.one().ack, seq);
    }
    app.seq = seq.wrapping_add(1 << 30);
    stage.give(&app.bytes(ACK, &[], b""));
    assert_eq!(stage.one().ack, seq);
    stage.give(&app.bytes(ACK, &[], b""));
    assert!(stage.got().is_empty(), "two kernels would answer each other without end");
}

#[test]
fn urgent_bytes_are_bytes() {
    let mut stage = Stage::new();
    let mut app = App::new(Packet::v4());
    let id = stage.connect(&mut app);
    stage.send(&mut app, mpvpn_packet::tcp_flags::URG, b"now!");
    assert_eq!(stage.read(id), data(b"now!"));
}

#[test]
fn super_packets_pass_whole() {
    let mut stage = Stage::new();
    let mut app = App::new(Packet::v4());
    app.window = u16::MAX;
    let id = stage.connect(&mut app);
    stage.send(&mut app, 0, &[3; 60_000]);
    assert_eq!(stage.got().len(), 1);
    assert!(matches!(stage.read(id), Read::Data(bytes) if bytes.len() == 60_000));
    stage.write(id, &[4; 100_000]);
    let first = stage.proxy.poll_packet(stage.now).unwrap();
    assert!(first.len() > 60_000, "{} bytes", first.len());
    assert_eq!(first.vnet().gso_size, 1360, "segments that fit the MTU");
}

#[test]
fn all_flows_together_are_bounded() {
    let limits = ProxyLimits { max_flow_bytes: 100_000, max_total_bytes: 500_000, ..ProxyLimits::default() };
    let mut stage = Stage::with(limits);
    let mut flows = Vec::new();
    for port in 1..=100 {
        let mut app = App::new(Packet::v4());
        app.packet.src.set_port(port);
        let id = stage.connect(&mut app);
        let mut sent = 0;
        for _ in 0..20 {
            stage.send(&mut app, 0, &[1; 10_000]);
            let room = stage.proxy.writable_bytes(id).min(10_000);
            stage.write(id, &vec![2; room]);
            sent += room;
        }
        stage.got();
        assert!(sent > 0, "each has something");
        flows.push(id);
    }
    // Windows promised before memory became short are kept.
    assert!(stage.proxy.held_bytes() < 3 * limits.max_total_bytes, "{} bytes", stage.proxy.held_bytes());
    for id in flows {
        stage.proxy.abort(id);
    }
    assert_eq!((stage.proxy.held_bytes(), stage.proxy.flow_count()), (0, 0));
}

#[test]
fn more_connections_than_allowed_are_not_answered() {
    let mut stage = Stage::with(ProxyLimits { max_flows: 1, ..ProxyLimits::default() });
    stage.connect(&mut App::new(Packet::v4()));
    let mut app = App::new(Packet::v6());
    stage.give(&app.bytes(SYN, &[], b""));
    app.seq = 0;
    assert!(stage.events().is_empty() && stage.got().is_empty());
}

#[test]
fn who_is_gone_is_forgotten() {
    let mut stage = Stage::new();
    let mut app = App::new(Packet::v4());
    let unanswered = stage.ask(&mut app, &[]);
    stage.wait(Duration::from_secs(131));
    assert_eq!(stage.events(), [Event::Aborted(unanswered)]);

    // It never says that it has got the answer.
    let silent = stage.ask(&mut app, &[]);
    stage.proxy.accept(stage.now, silent);
    let mut answers = 0;
    while stage.proxy.flow_count() > 0 {
        answers += stage.got().iter().filter(|got| got.flags & SYN != 0).count();
        stage.wait(Duration::from_secs(1));
    }
    assert_eq!((answers, stage.events()), (5, vec![Event::Aborted(silent)]));

    stage.got();
    let idle = stage.connect(&mut app);
    stage.wait(Duration::from_secs(3 * 3600));
    assert_eq!((stage.events(), stage.one().flags), (vec![Event::Aborted(idle)], RST | ACK));
    assert_eq!(stage.proxy.poll_timeout(), None);
}

#[test]
fn a_quiet_flow_holds_next_to_nothing() {
    let mut stage = Stage::new();
    let mut app = App::new(Packet::v4());
    app.window = u16::MAX;
    let id = stage.connect(&mut app);
    stage.send(&mut app, 0, &[3; 60_000]);
    assert!(matches!(stage.read(id), Read::Data(_)));
    stage.write(id, &[4; 60_000]);
    stage.got();
    app.ack = app.ack.wrapping_add(60_000);
    stage.give(&app.bytes(ACK, &[], b""));
    assert!(stage.proxy.slots[0].flow.as_ref().unwrap().has_spare());
    stage.wait(Duration::from_secs(3));
    assert!(!stage.proxy.slots[0].flow.as_ref().unwrap().has_spare());
    assert!(size_of::<Flow>() + size_of::<Slot>() < 1024, "{} bytes", size_of::<Flow>());
}
