//! The response of a server to the header fields of a request: docs/vectors/negotiation.json.

use mpvpn_masque::{connect_ip::ConnectIpRequest, connect_mpvpn};
use serde_json::Value;

use crate::{
    forward::{Inside, bearer},
    world::SERVER,
};

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

#[test]
fn a_server_answers_extensions_as_the_vectors_say() {
    let file: Value =
        serde_json::from_str(include_str!("../../../../docs/vectors/negotiation.json")).unwrap();
    for vector in file["vectors"].as_array().unwrap() {
        let name = &vector["name"];
        let field = |field: &Value| (text(&field[0]), text(&field[1]));
        let extra: Vec<_> = vector["request"].as_array().unwrap().iter().map(field).collect();
        let request = match &*text(&vector["protocol"]) {
            "connect-ip" => ConnectIpRequest {
                authorization: Some(bearer()),
                extra,
                ..ConnectIpRequest::new(SERVER, "/.well-known/masque/ip/*/*/")
            }
            .headers(),
            _ => connect_mpvpn::request(SERVER, Some(&bearer()), extra),
        };
        let mut inside = Inside::new();
        let request = inside.ask(&request);
        let answer = inside.answer(request);
        assert_eq!(answer.status().map(u64::from), vector["status"].as_u64(), "status of {name}");
        for (field, expected) in vector["response"].as_object().unwrap() {
            assert_eq!(answer.text(field), expected.as_str(), "{field} in the answer to {name}");
        }
    }
}
