//! The page: its files, as `build.rs` has found them.

use hyper::body::Bytes;

include!(concat!(env!("OUT_DIR"), "/page.rs"));

/// The page of a binary that was built without the dashboard.
const MISSING: &str = "<!doctype html>
<html lang=\"en\">
<meta charset=\"utf-8\">
<title>mpvpn dashboard</title>
<h1>The page is not in this binary</h1>
<p>mpvpn was built without Node. Install Node and npm, and build it with <code>./dev build</code>.</p>
<p>Until then <code>mpvpn top</code> shows the same in a terminal.</p>
</html>
";

/// The content of a path of the page, and its media type.
pub(crate) fn file(path: &str) -> Option<(Bytes, &'static str)> {
    let (content, media_type) = match path {
        "/" | "/index.html" => (INDEX.or(Some(MISSING.as_bytes())), "text/html; charset=utf-8"),
        "/app.js" => (SCRIPT, "text/javascript; charset=utf-8"),
        "/app.css" => (STYLE, "text/css; charset=utf-8"),
        _ => return None,
    };
    content.map(|content| (Bytes::from_static(content), media_type))
}
