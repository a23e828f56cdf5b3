//! The capsules against docs/vectors.

use mpvpn_types::{BitRate, PathId, Tier, Weight};
use serde_json::{Value, json};

use super::super::*;
use crate::vectors::{bytes, check, hex, number};

/// The capsule that a stream holds, and nothing else.
fn parse(stream: &[u8]) -> Result<Capsule, CapsuleError> {
    let mut reader = CapsuleReader::new();
    reader.push(stream);
    let capsule = reader.next()?;
    reader.finish()?;
    Ok(capsule.expect("the capsule is complete"))
}

fn error(error: &CapsuleError) -> Value {
    json!({ "code": error.code() })
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

#[test]
fn capsules_are_those_of_the_vectors() {
    let file = include_str!("../../../../../docs/vectors/capsules.json");
    check(file, |stream| parse(stream).map(|capsule| fields_of(&capsule)).map_err(|e| error(&e)), encode);
}

fn fields_of(capsule: &Capsule) -> Value {
    let address =
        |(request_id, net): (u64, IpNet)| json!({ "request_id": request_id, "prefix": net.to_string() });
    match capsule {
        Capsule::Datagram(payload) => json!({ "type": "DATAGRAM", "payload": hex(payload) }),
        Capsule::AddressAssign(list) => {
            let list: Vec<_> = list.iter().map(|entry| address((entry.request_id, entry.net))).collect();
            json!({ "type": "ADDRESS_ASSIGN", "addresses": list })
        }
        Capsule::AddressRequest(list) => {
            let list: Vec<_> = list.iter().map(|entry| address((entry.request_id, entry.net))).collect();
            json!({ "type": "ADDRESS_REQUEST", "addresses": list })
        }
        Capsule::RouteAdvertisement(list) => {
            let range = |range: &IpRange| json!({ "start": range.start(), "end": range.end(), "protocol": range.protocol() });
            json!({ "type": "ROUTE_ADVERTISEMENT", "ranges": list.iter().map(range).collect::<Vec<_>>() })
        }
        Capsule::Sites(list) => {
            let site = |site: &Site| json!({ "state": site.state.number(), "prefix": site.net.to_string() });
            json!({ "type": "SITES", "sites": list.iter().map(site).collect::<Vec<_>>() })
        }
        Capsule::Link(_) => json!({ "type": "LINK" }),
        Capsule::Unknown { kind } => json!({ "type": "unknown", "kind": kind }),
    }
}

fn encode(fields: &Value) -> Vec<u8> {
    let addresses = || {
        let entry = |entry: &Value| (number(&entry["request_id"]), text(&entry["prefix"]).parse().unwrap());
        fields["addresses"].as_array().unwrap().iter().map(entry)
    };
    let range = |range: &Value| {
        let ip = |name| text(&range[name]).parse().unwrap();
        IpRange::new(ip("start"), ip("end"), number(&range["protocol"]) as u8).unwrap()
    };
    let capsule = match text(&fields["type"]) {
        "DATAGRAM" => Capsule::Datagram(bytes(&fields["payload"]).into()),
        "ADDRESS_ASSIGN" => Capsule::AddressAssign(
            addresses().map(|(request_id, net)| AssignedAddress { request_id, net }).collect(),
        ),
        "ADDRESS_REQUEST" => Capsule::AddressRequest(
            addresses().map(|(request_id, net)| RequestedAddress { request_id, net }).collect(),
        ),
        "ROUTE_ADVERTISEMENT" => {
            Capsule::RouteAdvertisement(fields["ranges"].as_array().unwrap().iter().map(range).collect())
        }
        "SITES" => {
            let site = |site: &Value| Site {
                state: SiteState::from_number(number(&site["state"]) as u8),
                net: text(&site["prefix"]).parse().unwrap(),
            };
            Capsule::Sites(fields["sites"].as_array().unwrap().iter().map(site).collect())
        }
        other => panic!("{other} has no encoder"),
    };
    capsule.to_bytes().to_vec()
}

#[test]
fn link_capsules_are_those_of_the_vectors() {
    let parse_link = |stream: &[u8]| match parse(stream) {
        Ok(Capsule::Link(notice)) => Ok(fields_of_link(&notice)),
        Ok(other) => panic!("{other:?}"),
        Err(e) => Err(error(&e)),
    };
    check(include_str!("../../../../../docs/vectors/link.json"), parse_link, encode_link);
}

fn fields_of_link(notice: &LinkNotice) -> Value {
    let LinkPolicy { tier, metered, up, weight, dscp, .. } = notice.policy;
    json!({
        "path_id": notice.path.0,
        "tier": tier.to_string(),
        "metered": metered,
        "cap_kbps": up.map_or(0, |cap| cap.bps() / 1000),
        "weight": weight.get(),
        "first_path_id": notice.first_path.map(|path| path.0),
        "link": notice.link,
        "dscp": dscp,
    })
}

fn encode_link(fields: &Value) -> Vec<u8> {
    let path = |id: u64| PathId(id as u32);
    let cap = number(&fields["cap_kbps"]);
    let policy = LinkPolicy {
        tier: text(&fields["tier"]).parse::<Tier>().unwrap(),
        metered: fields["metered"].as_bool().unwrap(),
        up: (cap > 0).then(|| BitRate::from_bps(cap * 1000)),
        down: None,
        weight: Weight::new(number(&fields["weight"])).unwrap(),
        dscp: number(&fields["dscp"]) as u8,
    };
    let notice = LinkNotice {
        path: path(number(&fields["path_id"])),
        policy,
        first_path: fields["first_path_id"].as_u64().map(path),
        link: fields["link"].as_u64().map(|link| link as u16),
    };
    Capsule::Link(notice).to_bytes().to_vec()
}
