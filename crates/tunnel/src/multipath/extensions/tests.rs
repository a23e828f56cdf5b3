use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::*;
use crate::vectors::{bytes, check_one, hex, number, vectors};

/// The member `key` of a field with the version and `members`.
pub(crate) fn only_member(key: &str, members: &[u8]) -> Option<Member> {
    Extensions::parse([&b"v=1"[..], members].into_iter())?.get(key).cloned()
}

/// The text of a member.
pub(crate) fn field_of(key: &str, member: Member) -> String {
    let mut extensions = Extensions::default();
    extensions.set(key, member);
    extensions.value().strip_prefix("v=1, ").unwrap().to_owned()
}

fn member(text: &str) -> Member {
    only_member("x", format!("x={text}").as_bytes()).unwrap()
}

#[test]
fn each_extension_has_a_key_and_a_context_of_its_own() {
    let keys: Vec<_> = all(TunnelMode::Packets, &[]).map(|extension| extension.key).collect();
    assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), keys.len(), "{keys:?}");
    let contexts = all(TunnelMode::Packets, &[]).filter_map(|extension| match extension.negotiation {
        Negotiation::Context { id, .. } => Some(id),
        Negotiation::Value { .. } => None,
    });
    let contexts: BTreeSet<_> = contexts.collect();
    assert_eq!(Vec::from_iter(contexts), [2, 4, 6, 8, 10, 12], "clients allocate even ones, and 0 is taken");
}

#[test]
fn a_server_takes_only_contexts_that_clients_allocate() {
    for (value, context) in
        [("2", Some(2)), ("6;a", Some(6)), ("0", None), ("3", None), ("-2", None), ("x", None), ("(2)", None)]
    {
        assert_eq!(client_context_id(&member(value)), context, "{value}");
    }
}

#[test]
fn members_are_those_of_the_vectors() {
    for vector in vectors(include_str!("../../../../../docs/vectors/fields.json")) {
        let key = vector["key"].as_str().unwrap();
        let parse = |value: &[u8]| parse(key, only_member(key, value).as_ref());
        check_one(&vector, parse, |fields| encode(key, fields).into_bytes());
    }
}

fn parse(key: &str, member: Option<&Member>) -> Result<Value, Value> {
    let absent = json!("absent");
    let member = member.ok_or(absent.clone())?;
    let texts = |list: Vec<String>| Some(json!(list));
    let (name, value) = match key {
        SESSION => ("secret", secret_in(member).map(|secret| json!(hex(secret)))),
        INSTANCE => {
            let mut offered = Extensions::default();
            offered.set(INSTANCE, member.clone());
            ("instance", instance_of(Some(&offered)).map(|instance| json!(hex(&instance))))
        }
        "shared" => ("shared", sharing_name(sharing_in(member)).map(|name| json!(name))),
        "cc" => ("controller", cc_in(member).map(|cc| json!(cc.to_string()))),
        "scheduler" => ("scheduler", Some(json!(scheduler_in(Some(member)).to_string()))),
        "links" | SITES | STREAMS | UDP => ("value", member.is_true().then_some(json!(true))),
        "networks" => ("networks", texts(networks_in(member).iter().map(ToString::to_string).collect())),
        "dns" => ("resolvers", texts(plausible_resolvers(member).iter().map(ToString::to_string).collect())),
        "dns-domain" => ("domain", domain_in(member).map(|domain| json!(domain.as_str()))),
        CONNECTION => {
            let mut offered = Extensions::default();
            offered.set(CONNECTION, member.clone());
            let found = number_of(Some(&offered)).ok_or(json!({ "status": 400 }))?;
            let (number, class, thread) = (found.number(), found.class().0, found.shard());
            return Ok(json!({ "number": number, "class": class, "thread": thread }));
        }
        _ => {
            let context = client_context_id(member).ok_or(absent.clone())?;
            return match key {
                "order" => copies_of(member).map(|copies| json!({ "context_id": context, "copies": copies })),
                "fec" => fec_of(member).map(|fec| {
                    let (source, repair) = match fec {
                        Fec::Fixed { data, repair } => (Some(data), Some(repair)),
                        Fec::Auto | Fec::Off => (None, None),
                    };
                    json!({ "context_id": context, "source": source, "repair": repair })
                }),
                _ => Some(json!({ "context_id": context })),
            }
            .ok_or(absent);
        }
    };
    value.map(|value| json!({ name: value })).ok_or(absent)
}

fn encode(key: &str, fields: &Value) -> String {
    let text = |name: &str| fields[name].as_str().unwrap().to_owned();
    let list = |name: &str| {
        let list = fields[name].as_array().unwrap();
        strings_member(list.iter().map(|value| value.as_str().unwrap()))
    };
    let member = match key {
        SESSION => bytes(&fields["secret"]).into(),
        INSTANCE => bytes(&fields["instance"]).into(),
        "shared" => token_member(&text("shared")).unwrap(),
        "cc" => token_member(&text("controller").parse::<CongestionControl>().unwrap().to_string()).unwrap(),
        "scheduler" => token_member(&text("scheduler").parse::<Scheduler>().unwrap().to_string()).unwrap(),
        "links" | SITES | STREAMS | UDP => true.into(),
        "networks" => list("networks"),
        "dns" => list("resolvers"),
        "dns-domain" => string_member(&text("domain")).unwrap(),
        CONNECTION => {
            let (shard, class) = (number(&fields["thread"]) as u8, ClassId(number(&fields["class"]) as u8));
            integer(ConnectionNumber::of(shard, class).unwrap().number().into()).into()
        }
        context => {
            let mut found = all(TunnelMode::Packets, &[]).filter(|extension| extension.key == context);
            let Some(Negotiation::Context { id, .. }) = found.next().map(|found| &found.negotiation) else {
                panic!("{context} has no context")
            };
            let mut member: Member = integer(*id).into();
            for parameter in ["copies", "source", "repair"] {
                if let Some(number) = fields[parameter].as_u64().filter(|n| parameter != "copies" || *n > 1) {
                    set_parameter(&mut member, parameter, integer(number));
                }
            }
            member
        }
    };
    field_of(key, member)
}

#[test]
fn each_extension_has_a_vector_of_its_member() {
    let fields = vectors(include_str!("../../../../../docs/vectors/fields.json"));
    let has = |key: &str| key == "class" || fields.iter().any(|vector| vector["key"] == key);
    let missing: Vec<_> =
        all(TunnelMode::Packets, &[]).map(|extension| extension.key).filter(|key| !has(key)).collect();
    assert_eq!(missing, [""; 0], "docs/vectors/fields.json; that of classes are in class.json");
}

#[test]
fn a_malformed_connection_number_does_not_count_as_absent() {
    let number =
        |members: &str| number_of(Extensions::parse([&b"v=1"[..], members.as_bytes()].into_iter()).as_ref());
    assert_eq!(number_of(None), Some(ConnectionNumber::INITIAL));
    assert_eq!(number("links"), Some(ConnectionNumber::INITIAL));
    assert_eq!(number("connection=17").map(ConnectionNumber::number), Some(17));
    for members in ["connection=x", "connection=128", "connection=-1", "connection", "connection=(1)"] {
        assert_eq!(number(members), None, "{members}");
    }
}

#[test]
fn a_resolver_that_cannot_be_behind_the_server_is_not_believed() {
    let list = [
        "10.0.0.1",
        "fd00::1",
        "127.0.0.53",
        "::1",
        "::ffff:127.0.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "fe80::1",
        "169.254.1.1",
        "x",
        "9.9.9.9",
    ];
    let expected: Vec<IpAddr> = ["10.0.0.1", "fd00::1", "9.9.9.9"].map(|ip| ip.parse().unwrap()).into();
    assert_eq!(plausible_resolvers(&strings_member(list)), expected);
    assert_eq!(plausible_resolvers(&strings_member([""; 0])), Vec::<IpAddr>::new());
    assert_eq!(plausible_resolvers(&strings_member(["9.9.9.9"; 1000])).len(), MAX_RESOLVERS);
}

#[test]
fn extensions_about_paths_and_unknown_ones_do_not_pass_gateways() {
    for key in ["heartbeats", "reinjection", "data-ack", "links", "cc", "scheduler", "warp"] {
        assert!(!passes_gateways(key), "{key}");
    }
    for key in [SESSION, "order", "networks", STREAMS, UDP, "dns"] {
        assert!(passes_gateways(key), "{key}");
    }
}
