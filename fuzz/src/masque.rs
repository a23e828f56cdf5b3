//! The wire formats of MASQUE: capsules, HTTP/3 frames, QPACK, heads of requests.

use bytes::{Bytes, BytesMut};
use mpvpn_masque::{
    capsule::{
        Capsule, CapsuleDemux, CapsuleError, CapsulePart, CapsuleReader, MAX_CAPSULE_LEN, MAX_DATAGRAM_LEN,
        routes_sorted,
    },
    connect, connect_ip, connect_mpvpn, connect_udp, datagram,
    extensions::{self, Extensions},
    h3::{Event, H3, H3Error, Settings, Side, encode_data, encode_headers},
    headers::{Headers, Section},
    qpack, request,
    structured::{self, Typed},
    template::Template,
};

use crate::input::Input;

/// A stream of capsules: `kind of reader, size of the first pieces, stream`.
pub fn capsules(data: &[u8]) {
    let mut input = Input(data);
    let (reader, piece) = (input.below(3), usize::from(input.byte()) + 1);
    let new = || match reader {
        0 => CapsuleReader::new(),
        1 => CapsuleReader::lenient(),
        _ => CapsuleReader::datagrams(1500),
    };
    let whole = read_capsules(new(), input.0, usize::MAX);
    assert_eq!(
        whole,
        read_capsules(new(), input.0, piece),
        "pieces of {piece} bytes are read like the whole"
    );
    for capsule in &whole.0 {
        written_capsule_is_read_back(capsule);
    }
    demultiplexed_equals_read(input.0, piece);
}

/// All capsules of a stream, and how it ends.
fn read_capsules(
    mut reader: CapsuleReader,
    stream: &[u8],
    piece: usize,
) -> (Vec<Capsule>, Result<(), CapsuleError>) {
    let mut capsules = Vec::new();
    for bytes in stream.chunks(piece) {
        reader.push(bytes);
        loop {
            match reader.next() {
                Ok(Some(capsule)) => capsules.push(capsule),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(reader.finish(), Err(error.clone()));
                    return (capsules, Err(error));
                }
            }
        }
    }
    (capsules, reader.finish())
}

fn written_capsule_is_read_back(capsule: &Capsule) {
    match capsule {
        Capsule::Unknown { .. } => return,
        Capsule::Datagram(value) => assert!(value.len() <= MAX_DATAGRAM_LEN),
        Capsule::RouteAdvertisement(routes) => {
            assert!(routes_sorted(routes.clone()).len() <= routes.len(), "received routes do not overlap");
            for route in routes.iter().take(32) {
                let nets = route.to_nets();
                assert!(nets.len() <= 254 && nets.iter().all(|net| route.contains(net.network())));
            }
        }
        _ => {}
    }
    let bytes = capsule.to_bytes();
    assert!(bytes.len() <= MAX_CAPSULE_LEN + MAX_DATAGRAM_LEN);
    let (read, end) = read_capsules(CapsuleReader::new(), &bytes, usize::MAX);
    assert_eq!((read.as_slice(), end), (std::slice::from_ref(capsule), Ok(())));
}

/// An intermediary passes everything on: what it takes apart and puts together again is the stream.
fn demultiplexed_equals_read(stream: &[u8], piece: usize) {
    let (mut demux, mut parts) = (CapsuleDemux::new(), Vec::new());
    'pieces: for bytes in stream.chunks(piece) {
        demux.push(Bytes::copy_from_slice(bytes));
        loop {
            match demux.next() {
                Ok(Some(part)) => parts.push(part),
                Ok(None) => break,
                Err(_) => break 'pieces,
            }
        }
    }
    let others: usize =
        parts.iter().map(|part| if let CapsulePart::Other(bytes) = part { bytes.len() } else { 0 }).sum();
    let datagrams = parts.iter().filter_map(|part| match part {
        CapsulePart::Datagram(value) => Some(value.clone()),
        CapsulePart::Other(_) => None,
    });
    let datagrams: Vec<Bytes> = datagrams.collect();
    assert!(others + datagrams.iter().map(|value| value.len() + 2).sum::<usize>() <= stream.len());
    // A reader that knows no other type finds the same datagrams, as far as it reads.
    let (read, end) = read_capsules(CapsuleReader::datagrams(MAX_DATAGRAM_LEN), stream, usize::MAX);
    if demux.finish().is_ok() && end.is_ok() {
        let read = read.into_iter().filter_map(|capsule| match capsule {
            Capsule::Datagram(value) => Some(value),
            _ => None,
        });
        assert_eq!(read.collect::<Vec<_>>(), datagrams);
    }
}

/// The streams of an HTTP/3 connection: `side, (stream, flags, bytes)…`.
pub fn h3_frames(data: &[u8]) {
    let mut input = Input(data);
    let side = if input.bool() { Side::Server } else { Side::Client };
    let settings = Settings { max_streams: 8, ..Settings::default() };
    let mut steps = Vec::new();
    while !input.is_empty() && steps.len() < 200 {
        let (stream, flags) = (u64::from(input.byte() % 32), input.byte());
        steps.push((stream, flags, if flags & 4 == 0 { input.short() } else { input.long() }));
    }
    let whole = hear(side, &settings, &steps, usize::MAX);
    // Boundaries of pieces and of DATA frames have no meaning.
    assert_eq!(joined(whole), joined(hear(side, &settings, &steps, 1)));
}

type Heard = (Vec<Event>, Option<H3Error>);

fn hear(side: Side, settings: &Settings, steps: &[(u64, u8, &[u8])], piece: usize) -> Heard {
    let mut h3 = H3::new(side, settings.clone());
    let mut events = Vec::new();
    for (stream, flags, bytes) in steps {
        let is_reset = flags & 2 != 0;
        let pieces = bytes.chunks(piece).map(Bytes::copy_from_slice).collect::<Vec<_>>();
        let end = match (is_reset, flags & 1 != 0) {
            (true, _) => h3.handle_reset(*stream, (*flags).into()),
            (false, ends) => {
                let mut result = Ok(());
                for bytes in pieces {
                    result = result.and_then(|()| h3.handle_stream(*stream, bytes, false));
                    events.extend(std::iter::from_fn(|| h3.poll()));
                }
                if ends {
                    result.and_then(|()| h3.handle_stream(*stream, Bytes::new(), true))
                } else {
                    result
                }
            }
        };
        events.extend(std::iter::from_fn(|| h3.poll()));
        if let Err(error) = end {
            assert_eq!(h3.handle_stream(0, Bytes::new(), false), Err(error.clone()), "it stays failed");
            return (events, Some(error));
        }
        assert!(h3.open_streams() <= settings.max_streams);
        if flags & 8 != 0 {
            h3.forget(*stream);
        }
    }
    for event in &events {
        if let Event::Headers { headers, .. } = event {
            assert!(headers.section_size() <= settings.max_field_section_size);
            let section = if side == Side::Server { Section::Request } else { Section::Response };
            assert_eq!(headers.validate(section), Ok(()));
        }
    }
    (events, None)
}

/// The same with adjacent data joined.
fn joined((events, error): Heard) -> (Vec<Event>, Option<H3Error>) {
    let mut all: Vec<Event> = Vec::new();
    for event in events {
        match (all.last_mut(), event) {
            (Some(Event::Data { stream, data: before }), Event::Data { stream: same, data })
                if *stream == same =>
            {
                *before = [before.as_ref(), data.as_ref()].concat().into();
            }
            (_, event) => all.push(event),
        }
    }
    (all, error)
}

/// A field section: what is decoded is encoded and decoded again; and the two streams of QPACK.
pub fn qpack(data: &[u8]) {
    let mut input = Input(data);
    let max = 32 << (input.below(10));
    let Ok(headers) = qpack::decode(input.0, max) else {
        let (mut encoder, mut decoder) = (qpack::EncoderStream, qpack::DecoderStream::default());
        let whole = (encoder.push(input.0).is_ok(), decoder.push(input.0).is_ok());
        let (mut encoder, mut decoder) = (qpack::EncoderStream, qpack::DecoderStream::default());
        let pieces = (
            input.0.chunks(1).all(|byte| encoder.push(byte).is_ok()),
            input.0.chunks(1).all(|byte| decoder.push(byte).is_ok()),
        );
        return assert_eq!(whole, pieces);
    };
    assert!(headers.section_size() <= max);
    let again = qpack::encode(&headers);
    // A field line has at most 8 bytes beside its strings, and no string gets longer.
    assert!(again.len() <= headers.section_size() + 2);
    assert_eq!(qpack::decode(&again, max).as_ref(), Ok(&headers));
}

/// Heads of requests and responses, structured fields, paths of URI templates: `path, (name, value)…`.
pub fn requests(data: &[u8]) {
    let mut input = Input(data);
    let path = String::from_utf8_lossy(input.short()).into_owned();
    let mut headers = Headers::new();
    while !input.is_empty() && headers.iter().count() < 64 {
        let name = match NAMES.get(usize::from(input.byte())) {
            Some(name) => Bytes::from_static(name.as_bytes()),
            None => Bytes::copy_from_slice(input.short()),
        };
        let is_long = name == extensions::FIELD.as_bytes();
        let value = Bytes::copy_from_slice(if is_long { input.long() } else { input.short() });
        structured_fields(&value);
        extension_field(&value);
        headers.push(name, value);
    }
    template(&path);
    template(headers.path().unwrap_or("/"));
    for section in [Section::Request, Section::Response, Section::Trailers] {
        let is_valid = headers.validate(section).is_ok();
        let coded = qpack::decode(&qpack::encode(&headers), usize::MAX).expect("it was encoded here");
        assert_eq!((coded.validate(section).is_ok(), &coded), (is_valid, &headers));
    }
    if headers.validate(Section::Request).is_ok() {
        request_kinds(&headers);
    }
    if headers.validate(Section::Response).is_ok() {
        let _ = (connect_ip::check_response(&headers), connect_udp::check_response(&headers));
        let _ = connect::check_response(&headers);
    }
}

/// Names of fields that mean something, so that a fuzzer need not find them.
pub(crate) const NAMES: &[&str] = &[
    ":method",
    ":protocol",
    ":scheme",
    ":authority",
    ":path",
    ":status",
    "host",
    "authorization",
    "proxy-authorization",
    "capsule-protocol",
    extensions::FIELD,
    "proxy-status",
    "content-length",
    "content-type",
    "transfer-encoding",
    "connection",
    "te",
    "cookie",
];

fn structured_fields(value: &[u8]) {
    let _ = structured::last_token(value, "error");
    let text = String::from_utf8_lossy(value);
    assert!(structured::encode_string(&text).len() <= 2 * value.len() + 2, "each character has an escape");
}

/// A value of the field `mpvpn`: what was parsed is bounded and can be sent.
fn extension_field(value: &[u8]) {
    let Some(extensions) = Extensions::parse([value].into_iter()) else { return };
    assert!(value.len() <= extensions::MAX_BYTES && extensions.keys().count() <= extensions::MAX_KEYS);
    assert_eq!(extensions.version(), extensions::VERSION);
    for member in extensions.keys().filter_map(|key| extensions.get(key)) {
        let _ = (member.token(), member.string(), member.bytes(), member.is_true(), member.integer_in(1, 63));
        assert!(member.integer().is_none_or(|number| number < 1_000_000_000_000_000), "RFC 9651 §3.3.1");
        assert!(structured::strings(member).count() <= value.len() / 2);
        assert!(structured::parameters(member).len() <= value.len() / 2);
    }
    let again = extensions.value();
    if again.len() <= extensions::MAX_BYTES {
        assert_eq!(Extensions::parse([again.as_bytes()].into_iter()), Some(extensions));
    }
}

fn template(path: &str) {
    for template in [Template::CONNECT_IP, Template::CONNECT_UDP] {
        let Some(values) = template.matches(path) else { continue };
        // A path matches in one way only, so the same values give a path with the same values.
        let again = template.expand(values.each_ref().map(String::as_str));
        assert_eq!(template.matches(&again).as_ref(), Some(&values), "{path:?} and {again:?}");
    }
}

fn request_kinds(headers: &Headers) {
    let _ = (request::classify(headers), connect_ip::parse_request(headers));
    if let Ok(request) = connect_udp::parse_request(headers) {
        let path = connect_udp::path(&request.target);
        let again = connect_udp::request("mpvpn", &path, request.credentials.as_deref());
        let again = connect_udp::parse_request(&again);
        assert_eq!(again.expect("what was parsed can be sent"), request);
    }
    if let Ok(request) = connect::parse_request(headers) {
        let again =
            connect::parse_request(&connect::request(&request.target, request.credentials.as_deref()));
        assert_eq!(again.expect("what was parsed can be sent"), request);
    }
    let _ = connect_mpvpn::parse_request(headers);
}

/// A stream with a request head and content, for seeds.
pub(crate) fn message(headers: &Headers, content: &[u8]) -> Vec<u8> {
    let mut bytes = BytesMut::from(&encode_headers(headers)[..]);
    if !content.is_empty() {
        bytes.extend_from_slice(&encode_data(content));
    }
    bytes.to_vec()
}

/// A datagram with its prefix.
pub(crate) fn http_datagram(stream: u64, context: u64, payload: &[u8]) -> Vec<u8> {
    [datagram::prefix(stream / 4 * 4, context).as_ref(), payload].concat()
}
