//! Extended CONNECT with `:protocol` mpvpn: a control stream on which both ends of a connection without
//! CONNECT-IP negotiate the use of its paths (docs/protocol.md, "Paths without packets").
//!
//! In: on the client, the extensions it offers; on the server, a valid request header section. Out: header
//! sections, or the credentials of the request. Always holds: a server that does not know the protocol
//! refuses the request (RFC 9220 §3), and the connection works without it.

use crate::{
    connect, extensions,
    headers::Headers,
    request::{self, Rejection, RequestKind},
};

/// The path of the request.
pub const PATH: &str = "/.well-known/mpvpn/";

/// A request to the server at `authority`; `credentials` is the value of `authorization`, and `offered` that
/// of the field `mpvpn` (see [`extensions`]).
pub fn request(authority: &str, credentials: Option<&str>, offered: Option<String>) -> Headers {
    let mut headers = request::extended_connect("mpvpn", "https", authority, PATH);
    if let Some(credentials) = credentials {
        headers.push("authorization", credentials.to_owned());
    }
    if let Some(offered) = offered {
        headers.push(extensions::FIELD, offered);
    }
    headers
}

/// Parses a request whose header section is valid ([`Headers::validate`]), and returns its credentials.
///
/// # Errors
/// 501 for another kind of request, 404 for another path, 400 for header fields that are forbidden with
/// capsules.
pub fn parse_request(headers: &Headers) -> Result<Option<String>, Rejection> {
    if request::classify(headers)? != RequestKind::ConnectMpvpn {
        return Err(Rejection::new(501, "expected CONNECT with :protocol mpvpn"));
    }
    if headers.path() != Some(PATH) {
        return Err(Rejection::new(404, format!("no such path; expected {PATH}")));
    }
    request::check_no_content_fields(headers)?;
    Ok(connect::credentials(headers))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::headers::Section;

    #[test]
    fn requests_are_read_as_they_were_written() {
        let offered = Some("v=1, reinjection=6".to_owned());
        let headers = request("vpn.example:4433", Some("Bearer x"), offered);
        assert_eq!(headers.validate(Section::Request), Ok(()));
        assert_eq!(headers.text("mpvpn"), Some("v=1, reinjection=6"));
        assert_eq!(parse_request(&headers), Ok(Some("Bearer x".to_owned())));
        assert_eq!(parse_request(&request("vpn.example", None, None)), Ok(None));
    }

    #[test]
    fn other_requests_are_refused() {
        let status = |headers: &Headers| parse_request(headers).map_err(|refusal| refusal.status);
        let mut content = request("vpn.example", None, None);
        content.push("content-length", "0");
        assert_eq!(status(&content), Err(400));
        let connect_ip = crate::connect_ip::ConnectIpRequest::new("vpn.example", PATH).headers();
        assert_eq!(status(&connect_ip), Err(501));
        let mut elsewhere = Headers::new();
        elsewhere.push(":method", "CONNECT");
        elsewhere.push(":protocol", "mpvpn");
        elsewhere.push(":path", "/");
        assert_eq!(status(&elsewhere), Err(404));
    }
}
