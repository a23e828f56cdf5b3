//! Responses, each with the fields that keep the page to itself.

use hyper::{
    StatusCode,
    body::Bytes,
    header::{self, HeaderName, HeaderValue},
};
use mpvpn_http::{HttpResponse, ResponseBody, complete};
use serde::Serialize;

/// No code but the page's own, no requests to others, no frame around it.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
     img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const FIELDS: [(HeaderName, &str); 5] = [
    (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// A response with all fields.
fn response(
    code: StatusCode,
    media_type: &'static str,
    caching: &'static str,
    body: ResponseBody,
) -> HttpResponse {
    let mut response = HttpResponse::new(body);
    *response.status_mut() = code;
    let headers = response.headers_mut();
    for (name, value) in FIELDS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(caching));
    response
}

/// A file of the page. Browsers ask again after an update of mpvpn.
pub(crate) fn file(content: Bytes, media_type: &'static str) -> HttpResponse {
    response(StatusCode::OK, media_type, "no-cache", complete(content).into_body())
}

/// An answer as JSON.
pub(crate) fn json(value: &impl Serialize) -> HttpResponse {
    match serde_json::to_vec(value) {
        Ok(body) => response(StatusCode::OK, "application/json", "no-store", complete(body).into_body()),
        Err(why) => error(StatusCode::INTERNAL_SERVER_ERROR, &why.to_string()),
    }
}

/// A refusal: a sentence with the cause and the next step.
pub(crate) fn error(code: StatusCode, why: &str) -> HttpResponse {
    let body = serde_json::json!({ "error": why }).to_string();
    response(code, "application/json", "no-store", complete(body).into_body())
}

/// Server-sent events.
pub(crate) fn events(body: ResponseBody) -> HttpResponse {
    response(StatusCode::OK, "text/event-stream", "no-store", body)
}
