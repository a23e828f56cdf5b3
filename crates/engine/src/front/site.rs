//! What anybody gets who asks as a browser does.

use http::{
    HeaderValue, Method, Response, StatusCode,
    header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE},
};

use super::{Body, plain};

/// The answer of a site that has nothing.
pub(super) fn answer(method: &Method) -> Response<Body> {
    match *method {
        Method::GET | Method::HEAD => page(method, StatusCode::NOT_FOUND),
        _ => {
            let mut response = page(method, StatusCode::METHOD_NOT_ALLOWED);
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            response
        }
    }
}

/// A page that says no more than the status.
fn page(method: &Method, status: StatusCode) -> Response<Body> {
    let said = format!("{} {}", status.as_str(), status.canonical_reason().unwrap_or("Error"));
    let text = format!(
        "<html>\r\n<head><title>{said}</title></head>\r\n<body>\r\n<center><h1>{said}</h1></center>\r\n</body>\r\n</html>\r\n"
    );
    let length = HeaderValue::from(text.len());
    let mut response = Response::new(if method == Method::HEAD { plain("") } else { plain(text) });
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/html"));
    response.headers_mut().insert(CONTENT_LENGTH, length);
    response
}
