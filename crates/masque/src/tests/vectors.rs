//! Reads the test vectors of docs/vectors (see the README there), and checks an encoder and a parser against
//! them.
//!
//! In: the text of a file. Out: its vectors, or a failed test that names the vector.

use serde_json::Value;

/// The vectors of a file.
pub(crate) fn vectors(file: &str) -> Vec<Value> {
    let mut file: Value = serde_json::from_str(file).unwrap();
    let Value::Array(vectors) = file["vectors"].take() else { panic!("no list of vectors") };
    assert!(!vectors.is_empty());
    vectors
}

/// The bytes that a string of hexadecimal digits stands for.
pub(crate) fn bytes(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    assert!(hex.len().is_multiple_of(2), "{hex}");
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// The digits for some bytes.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A number of a vector.
pub(crate) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Checks one vector: `parse` gives its fields, or its error, and `encode` its bytes, unless it is for
/// parsers only.
pub(crate) fn check_one(
    vector: &Value,
    parse: impl FnOnce(&[u8]) -> Result<Value, Value>,
    encode: impl FnOnce(&Value) -> Vec<u8>,
) {
    let wire = match vector.get("value") {
        Some(text) => text.as_str().unwrap().as_bytes().to_vec(),
        None => bytes(&vector["hex"]),
    };
    let expected = match vector.get("error") {
        Some(error) => Err(error.clone()),
        None => Ok(vector["fields"].clone()),
    };
    let name = &vector["name"];
    assert_eq!(parse(&wire), expected, "parsing of {name}");
    if let Ok(fields) = &expected
        && vector.get("decode_only").is_none()
    {
        let encoded = encode(fields);
        assert_eq!(hex(&encoded), hex(&wire), "encoding of {name}: {:?}", String::from_utf8_lossy(&encoded));
    }
}

/// Checks all vectors of a file.
pub(crate) fn check(
    file: &str,
    parse: impl Fn(&[u8]) -> Result<Value, Value>,
    encode: impl Fn(&Value) -> Vec<u8>,
) {
    vectors(file).iter().for_each(|vector| check_one(vector, &parse, &encode));
}
