use super::*;
use proptest::prelude::*;

const REQUEST: u64 = 0;
/// First unidirectional streams of a client and of a server.
const CLIENT_UNI: u64 = 2;
const SERVER_UNI: u64 = 3;

fn server() -> H3 {
    H3::new(Side::Server, Settings::default())
}

fn client() -> H3 {
    H3::new(Side::Client, Settings::default())
}

fn peer_uni(side: Side) -> u64 {
    if side == Side::Server { CLIENT_UNI } else { SERVER_UNI }
}

fn frame(kind: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    varint::encode(kind, &mut bytes);
    varint::encode(payload.len() as u64, &mut bytes);
    bytes.extend_from_slice(payload);
    bytes
}

fn number(value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    varint::encode(value, &mut bytes);
    bytes
}

fn connect() -> Headers {
    crate::connect_ip::ConnectIpRequest::new("vpn.example", "/.well-known/masque/ip/*/*/").headers()
}

fn get() -> Headers {
    let mut headers = Headers::new();
    for (name, value) in [(":method", "GET"), (":scheme", "https"), (":authority", "a"), (":path", "/")] {
        headers.push(name, value);
    }
    headers
}

fn encoded(headers: &Headers) -> Vec<u8> {
    encode_headers(headers).to_vec()
}

/// The events of one stream given in one piece, or the connection error's code.
fn feed(h3: &mut H3, id: u64, data: &[u8], fin: bool) -> Result<Vec<Event>, u64> {
    h3.handle_stream(id, Bytes::copy_from_slice(data), fin).map_err(|error| error.code)?;
    Ok(std::iter::from_fn(|| h3.poll()).collect())
}

/// A connection to which the peer's SETTINGS have come.
fn ready(side: Side) -> H3 {
    let mut h3 = H3::new(side, Settings::default());
    assert_eq!(feed(&mut h3, peer_uni(side), &[0, 4, 0], false).unwrap().len(), 1);
    h3
}

fn control(side: Side, frames: &[u8]) -> Result<Vec<Event>, u64> {
    let id = peer_uni(side);
    feed(&mut ready(side), id, frames, false)
}

fn stream_error(events: &[Event]) -> Option<u64> {
    events.iter().find_map(|event| match event {
        Event::StreamError { code, .. } => Some(*code),
        _ => None,
    })
}

#[test]
fn two_ends_greet_each_other_and_may_send_datagrams() {
    let (mut client, mut server) = (client(), server());
    assert!(!client.datagrams_allowed());
    let [encoder, decoder] = client.qpack_prefaces();
    for (id, preface) in [(2, client.control_preface()), (6, encoder), (10, decoder)] {
        server.handle_stream(id, preface, false).unwrap();
    }
    client.handle_stream(3, server.control_preface(), false).unwrap();
    for h3 in [&mut client, &mut server] {
        let settings = *h3.peer_settings().unwrap();
        assert_eq!(h3.poll(), Some(Event::Settings(settings)));
        assert_eq!(h3.poll(), None);
        assert!(settings.enable_connect_protocol);
        assert_eq!(settings.datagrams, Datagrams::Enabled);
        assert_eq!(settings.max_field_section_size, Some(16 * 1024));
        assert_eq!((settings.qpack_max_table_capacity, settings.qpack_blocked_streams), (0, 0));
        assert!(h3.datagrams_allowed());
    }
}

#[test]
fn datagrams_need_both_sides() {
    let mut h3 = H3::new(Side::Client, Settings { datagrams: Datagrams::Disabled, ..Settings::default() });
    feed(&mut h3, SERVER_UNI, &server().control_preface(), false).unwrap();
    assert!(!h3.datagrams_allowed());
    assert!(!ready(Side::Client).datagrams_allowed(), "empty SETTINGS mean no datagrams");
}

#[test]
fn a_request_and_its_data_arrive() {
    let mut h3 = server();
    let bytes = [encoded(&connect()), encode_data(b"abc").to_vec()].concat();
    let events = feed(&mut h3, REQUEST, &bytes, true).unwrap();
    let wanted = [
        Event::Headers { stream: 0, headers: connect() },
        Event::Data { stream: 0, data: Bytes::from_static(b"abc") },
        Event::Finished { stream: 0 },
    ];
    assert_eq!(events, wanted);
    assert_eq!(h3.open_streams(), 0);
}

#[test]
fn a_data_header_announces_the_data_that_follows() {
    for len in [0, 63, 64, 20_000] {
        let data = vec![1; len];
        assert_eq!([encode_data_header(len).as_ref(), &data].concat(), encode_data(&data));
    }
}

#[test]
fn interim_responses_come_before_the_final_one_and_are_few() {
    let interim = encoded(&Headers::response(103));
    let bytes = [interim.clone(), encoded(&Headers::response(200))].concat();
    let events = feed(&mut client(), REQUEST, &bytes, false).unwrap();
    assert!(matches!(events[0], Event::Informational { .. }));
    assert!(matches!(events[1], Event::Headers { .. }));
    let events = feed(&mut client(), REQUEST, &interim.repeat(9), false).unwrap();
    assert_eq!(stream_error(&events), Some(code::EXCESSIVE_LOAD));
    let events = feed(&mut client(), REQUEST, &encoded(&Headers::response(101)), false).unwrap();
    assert_eq!(stream_error(&events), Some(code::MESSAGE_ERROR));
}

#[test]
fn trailers_follow_content_and_end_the_message() {
    let mut trailers = Headers::new();
    trailers.push("checksum", "1");
    let message = [encoded(&get()), frame(0, b"x"), encoded(&trailers)].concat();
    let events = feed(&mut server(), REQUEST, &message, true).unwrap();
    assert!(events.contains(&Event::Trailers { stream: 0, headers: trailers.clone() }));
    for more in [frame(0, b"x"), encoded(&trailers)] {
        let bytes = [message.clone(), more].concat();
        assert_eq!(feed(&mut server(), REQUEST, &bytes, false), Err(code::FRAME_UNEXPECTED));
    }
}

/// RFC 9114 §4.1: "Receipt of an invalid sequence of frames MUST be treated as a connection error of
/// type H3_FRAME_UNEXPECTED". §4.4: only DATA after CONNECT. §7.2: where each frame may be.
#[test]
fn frames_out_of_place_on_a_request_stream_end_the_connection() {
    let connected = encoded(&connect());
    let bad =
        [frame(0, b"x"), frame(3, &[0]), frame(4, &[]), frame(7, &[0]), frame(13, &[0]), frame(5, &[0])];
    for bytes in bad {
        assert_eq!(feed(&mut server(), REQUEST, &bytes, false), Err(code::FRAME_UNEXPECTED), "{bytes:?}");
    }
    for kind in [2, 6, 8, 9] {
        let bytes = [connected.clone(), frame(kind, &[])].concat();
        assert_eq!(feed(&mut server(), REQUEST, &bytes, false), Err(code::FRAME_UNEXPECTED), "{kind}");
    }
    let twice = connected.repeat(2);
    assert_eq!(feed(&mut server(), REQUEST, &twice, false), Err(code::FRAME_UNEXPECTED));
    assert_eq!(feed(&mut client(), REQUEST, &frame(5, &[0]), false), Err(code::ID_ERROR));
}

/// RFC 9114 §7.1.
#[test]
fn a_stream_that_ends_inside_a_frame_ends_the_connection() {
    let bytes = [encoded(&connect()), frame(0, b"abc")].concat();
    for cut in 1..bytes.len() {
        let at_boundary = cut == encoded(&connect()).len();
        let result = feed(&mut server(), REQUEST, &bytes[..cut], true).map(|_| ());
        assert_eq!(result, if at_boundary { Ok(()) } else { Err(code::FRAME_ERROR) }, "cut at {cut}");
    }
    let unknown = [encoded(&connect()), vec![0x21, 5, 1]].concat();
    assert_eq!(feed(&mut server(), REQUEST, &unknown, true), Err(code::FRAME_ERROR));
}

#[test]
fn a_stream_without_a_message_fails_alone() {
    let events = feed(&mut server(), REQUEST, &[], true).unwrap();
    assert_eq!(stream_error(&events), Some(code::REQUEST_INCOMPLETE));
    let events = feed(&mut client(), REQUEST, &frame(0x21, b"grease"), true).unwrap();
    assert_eq!(stream_error(&events), Some(code::MESSAGE_ERROR));
}

#[test]
fn a_malformed_message_fails_alone_and_its_rest_is_thrown_away() {
    let mut h3 = server();
    let mut headers = get();
    headers.push("Upper", "x");
    let events = feed(&mut h3, REQUEST, &encoded(&headers), false).unwrap();
    assert_eq!(stream_error(&events), Some(code::MESSAGE_ERROR));
    assert_eq!(feed(&mut h3, REQUEST, &frame(0, &[0; 100]), false), Ok(vec![]));
    assert_eq!(feed(&mut h3, 4, &encoded(&get()), true).unwrap().len(), 2, "the next request is served");
    assert_eq!(h3.open_streams(), 1);
    h3.forget(REQUEST);
    assert_eq!((h3.open_streams(), h3.buffered()), (0, 0));
}

/// RFC 9114 §4.1.2.
#[test]
fn content_must_have_its_announced_length() {
    let mut headers = get();
    headers.push("content-length", "3");
    let head = encoded(&headers);
    let result = |content: &[u8]| {
        let bytes = [head.clone(), frame(0, content)].concat();
        stream_error(&feed(&mut server(), REQUEST, &bytes, true).unwrap())
    };
    assert_eq!(result(b"abc"), None);
    assert_eq!(result(b"ab"), Some(code::MESSAGE_ERROR));
    assert_eq!(result(b"abcd"), Some(code::MESSAGE_ERROR));
    // Content within its length is passed on, however the stream was cut.
    let events = feed(&mut server(), REQUEST, &[head.clone(), frame(0, b"abcd")].concat(), false).unwrap();
    let content = |event: &Event| matches!(event, Event::Data { data, .. } if data[..] == b"abc"[..]);
    assert!(events.len() == 3 && content(&events[1]), "{events:?}");
    for bad in ["x", "-1", "", "1, 1", "99999999999999999999"] {
        let mut headers = get();
        headers.push("content-length", bad);
        let events = feed(&mut server(), REQUEST, &encoded(&headers), false).unwrap();
        assert_eq!(stream_error(&events), Some(code::MESSAGE_ERROR), "{bad}");
    }
}

#[test]
fn qpack_errors_end_the_connection_and_large_sections_only_the_stream() {
    let dynamic = frame(1, &[0, 0, 0x80]);
    assert_eq!(feed(&mut server(), REQUEST, &dynamic, false), Err(code::QPACK_DECOMPRESSION_FAILED));
    let bomb = frame(1, &[&[0, 0][..], &[0xff, 98 - 63].repeat(1000)].concat());
    let events = feed(&mut server(), REQUEST, &bomb, false).unwrap();
    assert_eq!(stream_error(&events), Some(code::EXCESSIVE_LOAD));
    let announced = [number(1), number(16 * 1024 + 1)].concat();
    let events = feed(&mut server(), REQUEST, &announced, false).unwrap();
    assert_eq!(stream_error(&events), Some(code::EXCESSIVE_LOAD));
}

/// RFC 9114 §6.2.1.
#[test]
fn the_control_stream_starts_with_settings() {
    for first in [frame(0x21, b"grease"), frame(7, &[0]), frame(0, &[]), frame(0xf0700, &[])] {
        let bytes = [vec![0], first].concat();
        assert_eq!(feed(&mut server(), CLIENT_UNI, &bytes, false), Err(code::MISSING_SETTINGS));
    }
}

#[test]
fn frames_out_of_place_on_the_control_stream_end_the_connection() {
    for kind in [0, 1, 2, 4, 5, 6, 8, 9] {
        assert_eq!(control(Side::Server, &frame(kind, &[])), Err(code::FRAME_UNEXPECTED), "{kind}");
    }
    assert_eq!(control(Side::Client, &frame(13, &[0])), Err(code::FRAME_UNEXPECTED));
    assert_eq!(control(Side::Server, &frame(0x21, &[7; 1000])), Ok(vec![]), "grease is skipped");
}

#[test]
fn control_frames_hold_exactly_one_number() {
    for kind in [7, 3, 13] {
        for payload in [&[][..], &[0, 0], &[0x40], &[0; 9]] {
            assert_eq!(
                control(Side::Server, &frame(kind, payload)),
                Err(code::FRAME_ERROR),
                "{kind} {payload:?}"
            );
        }
    }
}

/// RFC 9114 §5.2, §7.2.3, §7.2.6, §7.2.7.
#[test]
fn ids_only_move_in_their_direction() {
    let goaway = |id: u64| encode_goaway(id).to_vec();
    let events = control(Side::Client, &[goaway(8), goaway(8), goaway(4)].concat()).unwrap();
    assert_eq!(events, [Event::GoAway { id: 8 }, Event::GoAway { id: 4 }]);
    assert_eq!(control(Side::Client, &[goaway(4), goaway(8)].concat()), Err(code::ID_ERROR));
    assert_eq!(control(Side::Client, &goaway(3)), Err(code::ID_ERROR));
    assert_eq!(control(Side::Server, &goaway(3)), Ok(vec![Event::GoAway { id: 3 }]), "a push ID");
    assert_eq!(control(Side::Server, &frame(3, &[0])), Err(code::ID_ERROR));
    let max = |id: u8| frame(13, &[id]);
    assert_eq!(control(Side::Server, &[max(1), max(1), max(2)].concat()), Ok(vec![]));
    assert_eq!(control(Side::Server, &[max(2), max(1)].concat()), Err(code::ID_ERROR));
}

/// RFC 9114 §7.2.4 and RFC 9297 §2.1.1.
#[test]
fn settings_are_checked() {
    let settings = |list: &[(u64, u64)]| {
        let payload: Vec<u8> =
            list.iter().flat_map(|(id, value)| [number(*id), number(*value)].concat()).collect();
        feed(&mut server(), CLIENT_UNI, &[vec![0], frame(4, &payload)].concat(), false)
    };
    for bad in [
        &[(0x33, 2)][..],
        &[(0x08, 2)],
        &[(0x06, 1), (0x06, 1)],
        &[(0x21, 1), (0x21, 2)],
        &[(0x00, 0)],
        &[(0x02, 0)],
        &[(0x03, 0)],
        &[(0x04, 0)],
        &[(0x05, 0)],
    ] {
        assert_eq!(settings(bad), Err(code::SETTINGS_ERROR), "{bad:?}");
    }
    let events = settings(&[(0x33, 1), (0x08, 0), (0x21, 9), (0x01, 4096)]).unwrap();
    let Event::Settings(peer) = events[0] else { panic!("{events:?}") };
    assert_eq!((peer.datagrams, peer.qpack_max_table_capacity), (Datagrams::Enabled, 4096));
    let cut = [0, 4, 1, 0x33];
    assert_eq!(feed(&mut server(), CLIENT_UNI, &cut, false), Err(code::FRAME_ERROR));
    let long = [vec![0], number(4), number(5000)].concat();
    assert_eq!(feed(&mut server(), CLIENT_UNI, &long, false), Err(code::EXCESSIVE_LOAD));
}

#[test]
fn streams_that_exist_once_are_not_opened_twice_nor_closed() {
    for (kind, first) in [(0u8, &[0, 4, 0][..]), (2, &[2]), (3, &[3])] {
        let mut h3 = server();
        feed(&mut h3, 2, first, false).unwrap();
        assert_eq!(feed(&mut h3, 6, &[kind], false), Err(code::STREAM_CREATION_ERROR), "{kind}");
        let mut h3 = server();
        assert_eq!(feed(&mut h3, 2, first, true), Err(code::CLOSED_CRITICAL_STREAM), "{kind}");
        let mut h3 = server();
        feed(&mut h3, 2, first, false).unwrap();
        let error = h3.handle_reset(2, code::NO_ERROR).unwrap_err();
        assert_eq!(error.code, code::CLOSED_CRITICAL_STREAM, "{kind}");
    }
}

#[test]
fn nobody_may_push() {
    assert_eq!(feed(&mut server(), CLIENT_UNI, &[1], false), Err(code::STREAM_CREATION_ERROR));
    assert_eq!(feed(&mut client(), SERVER_UNI, &[1, 0], false), Err(code::ID_ERROR));
}

#[test]
fn servers_open_no_bidirectional_streams() {
    assert_eq!(feed(&mut client(), 1, &[], false), Err(code::STREAM_CREATION_ERROR));
}

#[test]
fn unknown_unidirectional_streams_are_skipped_and_may_end_early() {
    let mut h3 = server();
    let grease = [number(0x21), vec![0; 1000]].concat();
    assert_eq!(feed(&mut h3, 2, &grease, false), Ok(vec![]));
    assert_eq!(feed(&mut h3, 6, &[0x40], true), Ok(vec![]), "ends inside its type");
    assert_eq!(h3.handle_reset(2, 0), Ok(()));
    assert_eq!((h3.open_streams(), h3.poll()), (0, None));
}

#[test]
fn qpack_streams_may_say_nothing_about_a_dynamic_table() {
    assert_eq!(feed(&mut server(), 2, &[2, 0x20], false), Ok(vec![]));
    assert_eq!(feed(&mut server(), 2, &[2, 0x3f, 0x01], false), Err(code::QPACK_ENCODER_STREAM_ERROR));
    assert_eq!(feed(&mut server(), 2, &[3, 0x44], false), Ok(vec![]));
    assert_eq!(feed(&mut server(), 2, &[3, 0x80], false), Err(code::QPACK_DECODER_STREAM_ERROR));
}

#[test]
fn a_reset_is_told_once() {
    let mut h3 = server();
    feed(&mut h3, REQUEST, &[1, 50, 0], false).unwrap();
    h3.handle_reset(REQUEST, 7).unwrap();
    assert_eq!(h3.poll(), Some(Event::Reset { stream: 0, code: 7 }));
    assert_eq!((h3.poll(), h3.open_streams(), h3.buffered()), (None, 0, 0));
}

#[test]
fn a_connection_error_stays() {
    let mut h3 = server();
    assert_eq!(feed(&mut h3, REQUEST, &frame(0, b"x"), false), Err(code::FRAME_UNEXPECTED));
    assert_eq!(feed(&mut h3, 4, &encoded(&get()), false), Err(code::FRAME_UNEXPECTED));
    assert_eq!(h3.handle_reset(8, 0).map_err(|error| error.code), Err(code::FRAME_UNEXPECTED));
}

#[test]
fn streams_and_incomplete_sections_are_bounded() {
    let settings = Settings { max_streams: 10, max_buffered: 20_000, ..Settings::default() };
    let mut h3 = H3::new(Side::Server, settings.clone());
    for at in 0..10 {
        feed(&mut h3, at * 4, &[1], false).unwrap();
    }
    assert_eq!(feed(&mut h3, 40, &[1], false), Err(code::EXCESSIVE_LOAD));

    let mut h3 = H3::new(Side::Server, settings);
    let almost = [number(1), number(16_000), vec![0; 15_000]].concat();
    feed(&mut h3, 0, &almost, false).unwrap();
    assert_eq!(h3.buffered(), 15_000);
    assert_eq!(feed(&mut h3, 4, &almost, false), Err(code::EXCESSIVE_LOAD));
    assert_eq!(h3.buffered(), 0);
}

#[test]
fn megabytes_of_unknown_frames_are_not_kept() {
    let mut h3 = ready(Side::Server);
    let junk = vec![0xaa; 64 * 1024];
    let header = [number(0x21), number(100 * junk.len() as u64)].concat();
    for id in [CLIENT_UNI, REQUEST] {
        feed(&mut h3, id, &header, false).unwrap();
        for _ in 0..100 {
            assert_eq!(feed(&mut h3, id, &junk, false), Ok(vec![]));
            assert_eq!(h3.buffered(), 0);
        }
    }
    assert_eq!(feed(&mut h3, REQUEST, &encoded(&get()), true).unwrap().len(), 2);
}

/// Events with adjacent data joined: how data is cut means nothing.
fn joined(events: Vec<Event>) -> Vec<Event> {
    let mut out: Vec<Event> = Vec::new();
    for event in events {
        if let (Some(Event::Data { stream: a, data: before }), Event::Data { stream: b, data }) =
            (out.last_mut(), &event)
            && a == b
        {
            *before = [&before[..], data].concat().into();
            continue;
        }
        out.push(event);
    }
    out
}

fn run(side: Side, stream: u64, bytes: &[u8], chunk: usize) -> (Vec<Event>, Option<u64>) {
    let mut h3 = H3::new(side, Settings::default());
    let mut events = Vec::new();
    for piece in bytes.chunks(chunk) {
        let result = feed(&mut h3, stream, piece, false);
        assert!(h3.buffered() <= 16 * 1024);
        match result {
            Ok(more) => events.extend(more),
            Err(code) => {
                events.extend(std::iter::from_fn(|| h3.poll()));
                return (joined(events), Some(code));
            }
        }
    }
    let end = feed(&mut h3, stream, &[], true);
    let code = end.map(|more| events.extend(more)).err();
    events.extend(std::iter::from_fn(|| h3.poll()));
    (joined(events), code)
}

fn any_frames() -> impl Strategy<Value = Vec<u8>> {
    let headers =
        prop_oneof![Just(connect()), Just(get()), Just(Headers::response(200)), Just(Headers::new())];
    let any_frame = prop_oneof![
        3 => headers.prop_map(|headers| encoded(&headers)),
        2 => prop::collection::vec(any::<u8>(), 0..40).prop_map(|data| frame(0, &data)),
        2 => (0u64..0x40, prop::collection::vec(any::<u8>(), 0..12))
            .prop_map(|(kind, payload)| frame(kind, &payload)),
        1 => prop::collection::vec(any::<u8>(), 0..12),
    ];
    prop::collection::vec(any_frame, 0..8).prop_map(|frames| frames.concat())
}

proptest! {
    #[test]
    fn chunking_never_changes_what_happens(frames in any_frames(), kind in 0u8..5, chunk in 1usize..40,
                                           is_server in any::<bool>()) {
        let side = if is_server { Side::Server } else { Side::Client };
        let uni = [&[kind][..], &[4, 0], &frames].concat();
        for (stream, bytes) in [(REQUEST, &frames), (peer_uni(side), &uni)] {
            prop_assert_eq!(run(side, stream, bytes, chunk), run(side, stream, bytes, bytes.len().max(1)));
        }
    }

    #[test]
    fn random_streams_never_make_it_panic_and_state_stays_bounded(
        pieces in prop::collection::vec(
            (0u64..24, prop::collection::vec(any::<u8>(), 0..50), 0u8..10), 0..40,
        ),
        is_server in any::<bool>(),
    ) {
        let side = if is_server { Side::Server } else { Side::Client };
        let settings = Settings { max_streams: 12, max_buffered: 100, ..Settings::default() };
        let mut h3 = H3::new(side, settings);
        for (id, data, how) in pieces {
            let result = match how {
                0 => h3.handle_reset(id, 1),
                how => h3.handle_stream(id, data.into(), how == 1),
            };
            while h3.poll().is_some() {}
            prop_assert!(h3.open_streams() <= 12 && h3.buffered() <= 100 + 4096);
            prop_assert!(result.is_ok() || h3.handle_stream(0, Bytes::new(), false).is_err());
        }
    }
}
