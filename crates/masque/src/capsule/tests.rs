mod vectors;

use super::*;
use proptest::prelude::*;

fn wire(kind: u64, value: &[u8]) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    put_header(kind, value.len(), &mut bytes).extend_from_slice(value);
    bytes.to_vec()
}

fn one(reader: &mut CapsuleReader, kind: u64, value: &[u8]) -> Result<Capsule, CapsuleError> {
    reader.push(&wire(kind, value));
    reader.next().map(|capsule| capsule.expect("the capsule is complete"))
}

fn strict(kind: u64, value: &[u8]) -> Result<Capsule, CapsuleError> {
    one(&mut CapsuleReader::new(), kind, value)
}

/// All capsules of a stream that comes in pieces of `chunk` bytes.
fn read_in_chunks(bytes: &[u8], chunk: usize) -> Result<Vec<Capsule>, CapsuleError> {
    let mut reader = CapsuleReader::new();
    let mut capsules = Vec::new();
    for piece in bytes.chunks(chunk) {
        reader.push(piece);
        while let Some(capsule) = reader.next()? {
            capsules.push(capsule);
        }
        assert!(reader.buffered() <= MAX_DATAGRAM_LEN + 16);
    }
    reader.finish()?;
    Ok(capsules)
}

fn route(protocol: u8, start: u8, end: u8) -> Vec<u8> {
    vec![4, 10, 0, 0, start, 10, 0, 0, end, protocol]
}

#[test]
fn a_reader_of_datagrams_passes_over_the_rest() {
    let mut reader = CapsuleReader::datagrams(10);
    let whole = one(&mut reader, DATAGRAM, &[0, 1, 2]);
    assert_eq!(whole, Ok(Capsule::Datagram(Bytes::from_static(&[0, 1, 2]))));
    assert_eq!(one(&mut reader, ADDRESS_ASSIGN, &[9]), Ok(Capsule::Unknown { kind: ADDRESS_ASSIGN }));
    reader.push(&wire(DATAGRAM, &[7; 11])[..5]);
    assert_eq!(reader.next(), Ok(Some(Capsule::Unknown { kind: DATAGRAM })));
    assert_eq!(reader.buffered(), 0, "what is not wanted is not kept");
    reader.push(&[7; 8]);
    assert_eq!(one(&mut reader, DATAGRAM, &[0]), Ok(Capsule::Datagram(Bytes::from_static(&[0]))));
    let error = one(&mut reader, DATAGRAM, &[0; MAX_DATAGRAM_LEN + 1]).unwrap_err();
    assert!(matches!(error, CapsuleError::TooLarge { .. }));
}

#[test]
fn an_assignment_has_the_layout_of_the_rfc() {
    let assigned = AssignedAddress { request_id: 1, net: "192.0.2.11/32".parse().unwrap() };
    let bytes = Capsule::AddressAssign(vec![assigned]).to_bytes();
    assert_eq!(bytes[..], [0x01, 7, 1, 4, 192, 0, 2, 11, 32]);
    let range = IpRange::from_net("192.0.2.0/24".parse().unwrap(), 17);
    let bytes = Capsule::RouteAdvertisement(vec![range]).to_bytes();
    assert_eq!(bytes[..], [0x03, 10, 4, 192, 0, 2, 0, 192, 0, 2, 255, 17]);
    let bytes = Capsule::AddressRequest(vec![RequestedAddress::any(1, Family::V4)]).to_bytes();
    assert_eq!(bytes[..], [0x02, 7, 1, 4, 0, 0, 0, 0, 32]);
}

#[test]
fn an_empty_assignment_takes_all_addresses_back() {
    assert_eq!(strict(ADDRESS_ASSIGN, &[]), Ok(Capsule::AddressAssign(vec![])));
    assert_eq!(strict(ROUTE_ADVERTISEMENT, &[]), Ok(Capsule::RouteAdvertisement(vec![])));
}

#[test]
fn refusals_are_all_zero_at_full_length() {
    for family in [Family::V4, Family::V6] {
        let refusal = AssignedAddress::refusal(3, family);
        assert!(refusal.is_refusal());
        assert_eq!(Family::of(refusal.net.addr()), family);
    }
    let default = AssignedAddress { request_id: 3, net: "0.0.0.0/0".parse().unwrap() };
    assert!(!default.is_refusal());
}

/// RFC 9484 §4.7.2: "it MUST abort".
#[test]
fn a_request_for_nothing_aborts() {
    assert_eq!(strict(ADDRESS_REQUEST, &[]), Err(CapsuleError::EmptyRequest));
}

#[test]
fn request_ids_are_not_zero_and_not_repeated() {
    let entry = |id| [id, 4, 0, 0, 0, 0, 32];
    assert_eq!(strict(ADDRESS_REQUEST, &entry(0)), Err(CapsuleError::ZeroRequestId));
    let twice = [entry(5), entry(6), entry(5)].concat();
    assert_eq!(strict(ADDRESS_REQUEST, &twice), Err(CapsuleError::RepeatedRequestId { id: 5 }));
    assert!(strict(ADDRESS_REQUEST, &[entry(5), entry(6)].concat()).is_ok());
    assert!(strict(ADDRESS_ASSIGN, &entry(0)).is_ok(), "0 in an assignment means unsolicited");
}

#[test]
fn versions_and_prefix_lengths_are_checked() {
    for version in [0, 5, 7, 255] {
        let error = strict(ADDRESS_ASSIGN, &[0, version, 10, 0, 0, 1, 32]).unwrap_err();
        assert_eq!(error, CapsuleError::IpVersion { kind: ADDRESS_ASSIGN, version });
    }
    let error = strict(ADDRESS_ASSIGN, &[0, 4, 10, 0, 0, 1, 33]).unwrap_err();
    assert!(matches!(error, CapsuleError::PrefixLength { len: 33, .. }));
    let v6 = [&[0, 6][..], &[0; 16], &[129]].concat();
    assert!(matches!(strict(ADDRESS_ASSIGN, &v6), Err(CapsuleError::PrefixLength { len: 129, .. })));
}

#[test]
fn host_bits_are_refused_or_for_known_peers_cleared() {
    let value = [0, 4, 10, 1, 2, 3, 24];
    assert!(matches!(strict(ADDRESS_ASSIGN, &value), Err(CapsuleError::HostBits { .. })));
    let cleared = AssignedAddress { request_id: 0, net: "10.1.2.0/24".parse().unwrap() };
    let lenient = one(&mut CapsuleReader::lenient(), ADDRESS_ASSIGN, &value);
    assert_eq!(lenient, Ok(Capsule::AddressAssign(vec![cleared])));
    let request = one(&mut CapsuleReader::lenient(), ADDRESS_REQUEST, &[1, 4, 10, 1, 2, 3, 24]);
    assert!(matches!(request, Err(CapsuleError::HostBits { .. })), "only assignments are forgiven");
}

/// RFC 9484 §4.7.3: version, then protocol, then end(A) < start(B).
#[test]
fn routes_out_of_order_abort() {
    let bad: [Vec<u8>; 5] = [
        [route(0, 5, 9), route(0, 1, 3)].concat(),
        [route(0, 1, 5), route(0, 5, 9)].concat(),
        [route(0, 1, 5), route(0, 1, 5)].concat(),
        [route(17, 1, 2), route(6, 5, 9)].concat(),
        [[&[6][..], &[0; 32], &[0]].concat(), route(0, 1, 2)].concat(),
    ];
    for value in bad {
        let error = strict(ROUTE_ADVERTISEMENT, &value).unwrap_err();
        assert!(matches!(error, CapsuleError::RouteOrder { .. }), "{error}");
    }
    assert!(
        strict(ROUTE_ADVERTISEMENT, &[route(0, 1, 4), route(0, 5, 9), route(6, 20, 21)].concat()).is_ok()
    );
    assert!(strict(ROUTE_ADVERTISEMENT, &[route(6, 1, 4), route(17, 1, 4)].concat()).is_ok());
}

#[test]
fn all_protocols_must_not_overlap_one_protocol() {
    let error = strict(ROUTE_ADVERTISEMENT, &[route(0, 1, 9), route(17, 9, 12)].concat()).unwrap_err();
    assert!(matches!(error, CapsuleError::ProtocolOverlap { .. }), "{error}");
    assert!(strict(ROUTE_ADVERTISEMENT, &[route(0, 1, 9), route(17, 10, 12)].concat()).is_ok());
}

#[test]
fn a_route_that_ends_before_it_starts_aborts() {
    let error = strict(ROUTE_ADVERTISEMENT, &route(0, 2, 1)).unwrap_err();
    assert!(matches!(error, CapsuleError::Range(RangeError::Backwards { .. })));
}

#[test]
fn entries_that_end_early_are_malformed() {
    let values: [(u64, &[u8]); 4] = [
        (ADDRESS_ASSIGN, &[0, 4, 10, 0, 0, 1]),
        (ADDRESS_REQUEST, &[1]),
        (ADDRESS_REQUEST, &[0x40]),
        (ROUTE_ADVERTISEMENT, &[4, 10, 0, 0, 1, 10, 0, 0, 2]),
    ];
    for (kind, value) in values {
        assert_eq!(strict(kind, value), Err(CapsuleError::TruncatedEntry { kind }));
    }
}

/// RFC 9297 §3.3.
#[test]
fn a_stream_that_ends_inside_a_capsule_is_malformed() {
    let bytes = [wire(0x29, &[1, 2, 3]), wire(DATAGRAM, b"abc")].concat();
    for cut in 0..bytes.len() {
        let mut reader = CapsuleReader::new();
        reader.push(&bytes[..cut]);
        while reader.next().unwrap().is_some() {}
        let wanted = if [0, 5].contains(&cut) { Ok(()) } else { Err(CapsuleError::Truncated) };
        assert_eq!(reader.finish(), wanted, "cut at {cut}");
    }
}

#[test]
fn unknown_capsules_of_any_size_are_named_and_never_kept() {
    let mut reader = CapsuleReader::new();
    let mut header = BytesMut::new();
    varint::encode(0x1ace_79ec, &mut header);
    varint::encode(5_000_000, &mut header);
    reader.push(&header);
    assert_eq!(reader.next(), Ok(Some(Capsule::Unknown { kind: 0x1ace_79ec })));
    for _ in 0..5000 {
        reader.push(&[0xff; 1000]);
        assert_eq!(reader.next(), Ok(None));
        assert_eq!(reader.buffered(), 0);
    }
    assert_eq!(reader.finish(), Ok(()));
    assert!(one(&mut reader, DATAGRAM, b"next").is_ok());
}

#[test]
fn sizes_are_limited_as_soon_as_they_are_announced() {
    for (kind, max) in [(DATAGRAM, MAX_DATAGRAM_LEN), (ADDRESS_ASSIGN, MAX_CAPSULE_LEN)] {
        let mut reader = CapsuleReader::new();
        let mut header = BytesMut::new();
        put_header(kind, max + 1, &mut header);
        reader.push(&header);
        let error = reader.next().unwrap_err();
        assert_eq!(error, CapsuleError::TooLarge { kind, len: max as u64 + 1, max });
        assert_eq!(error.code(), 0x107);
    }
    let largest = vec![0; MAX_DATAGRAM_LEN];
    assert_eq!(strict(DATAGRAM, &largest), Ok(Capsule::Datagram(largest.into())));
}

#[test]
fn an_error_stays_and_takes_no_more_bytes() {
    let mut reader = CapsuleReader::new();
    assert_eq!(one(&mut reader, ADDRESS_REQUEST, &[]), Err(CapsuleError::EmptyRequest));
    reader.push(&wire(DATAGRAM, b"late"));
    assert_eq!(reader.next(), Err(CapsuleError::EmptyRequest));
    assert_eq!(reader.finish(), Err(CapsuleError::EmptyRequest));
    assert_eq!(reader.buffered(), 0);
}

fn any_net() -> impl Strategy<Value = IpNet> {
    prop_oneof![
        (any::<[u8; 4]>(), 0u8..=32).prop_map(|(addr, len)| IpNet::new(addr.into(), len).unwrap().trunc()),
        (any::<[u8; 16]>(), 0u8..=128).prop_map(|(addr, len)| IpNet::new(addr.into(), len).unwrap().trunc()),
    ]
}

fn any_capsule() -> impl Strategy<Value = Capsule> {
    let assigned =
        (0..=varint::MAX, any_net()).prop_map(|(request_id, net)| AssignedAddress { request_id, net });
    let requested = prop::collection::vec(any_net(), 1..8).prop_map(|nets| {
        let entry = |(at, net)| RequestedAddress { request_id: at as u64 + 1, net };
        Capsule::AddressRequest(nets.into_iter().enumerate().map(entry).collect())
    });
    let routes =
        prop::collection::vec((any_net(), prop_oneof![Just(0u8), any::<u8>()]), 0..8).prop_map(|list| {
            let ranges = list.into_iter().map(|(net, protocol)| IpRange::from_net(net, protocol));
            Capsule::RouteAdvertisement(routes_sorted(ranges.collect()))
        });
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..300).prop_map(|value| Capsule::Datagram(value.into())),
        prop::collection::vec(assigned, 0..8).prop_map(Capsule::AddressAssign),
        requested,
        routes,
    ]
}

proptest! {
    #[test]
    fn capsules_survive_any_chunking(
        capsules in prop::collection::vec(any_capsule(), 0..6), chunk in 1usize..64
    ) {
        let mut bytes = BytesMut::new();
        for capsule in &capsules {
            capsule.encode(&mut bytes);
        }
        prop_assert_eq!(read_in_chunks(&bytes, chunk), Ok(capsules));
    }

    #[test]
    fn chunking_never_changes_what_is_read(
        kinds in prop::collection::vec((0u64..6, prop::collection::vec(0u8..8, 0..24)), 0..6),
        chunk in 1usize..32,
    ) {
        let bytes: Vec<u8> = kinds.iter().flat_map(|(kind, value)| wire(*kind, value)).collect();
        prop_assert_eq!(read_in_chunks(&bytes, chunk), read_in_chunks(&bytes, bytes.len().max(1)));
    }

    #[test]
    fn random_and_mutated_bytes_never_make_it_panic(
        capsules in prop::collection::vec(any_capsule(), 0..4),
        noise in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        tail in prop::collection::vec(any::<u8>(), 0..64),
        chunk in 1usize..64,
    ) {
        let mut bytes = BytesMut::new();
        for capsule in &capsules {
            capsule.encode(&mut bytes);
        }
        bytes.extend_from_slice(&tail);
        for (at, byte) in noise {
            if !bytes.is_empty() {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
        }
        prop_assert_eq!(read_in_chunks(&bytes, chunk), read_in_chunks(&bytes, bytes.len().max(1)));
    }
}
