//! A page over HTTPS: rustls over a TCP connection of the stack.

use std::{
    error::Error,
    io::{self, ErrorKind, Read, Write},
    net::SocketAddr,
    sync::Arc,
};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use smoltcp::socket::tcp;

use crate::stack::Stack;

/// The page to fetch.
pub(crate) struct Page {
    pub(crate) host: String,
    pub(crate) port: u16,
    path: String,
}

impl Page {
    pub(crate) fn parse(url: &str) -> Result<Self, Box<dyn Error>> {
        let rest = url.strip_prefix("https://").ok_or("a page begins with https://")?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) => (host, port.parse()?),
            None => (authority, 443),
        };
        Ok(Self { host: host.to_owned(), port, path: format!("/{path}") })
    }
}

/// The body of a page, whose server has one of the certificates in a PEM file, or one that these signed.
pub(crate) fn fetch(
    stack: &mut Stack,
    address: SocketAddr,
    page: &Page,
    certificates: &str,
) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(certificates)? {
        roots.add(certificate?)?;
    }
    let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    let mut tls = ClientConnection::new(Arc::new(config), ServerName::try_from(page.host.clone())?)?;
    // Without an end of the connection that TLS protects, the length says whether all is there.
    write!(tls.writer(), "GET {} HTTP/1.0\r\nHost: {}\r\n\r\n", page.path, page.host)?;

    let handle = stack.connect(address)?;
    let mut answer = Vec::new();
    stack.until(|stack| {
        let socket = stack.socket::<tcp::Socket<'_>>(handle);
        let over = !socket.is_open() || socket.state() != tcp::State::SynSent && !socket.may_recv();
        let ended = pump(socket, &mut tls, &mut answer)?;
        Ok((over || ended).then_some(()))
    })?;
    stack.socket::<tcp::Socket<'_>>(handle).abort();
    body(answer)
}

/// Moves bytes between TLS and TCP; whether the server has said that this is all.
fn pump(socket: &mut tcp::Socket<'_>, tls: &mut ClientConnection, answer: &mut Vec<u8>) -> io::Result<bool> {
    while tls.wants_write() && socket.can_send() {
        tls.write_tls(&mut Bytes(socket))?;
    }
    while socket.can_recv() {
        tls.read_tls(&mut Bytes(socket))?;
        let state = tls.process_new_packets().map_err(io::Error::other)?;
        let before = answer.len();
        answer.resize(before + state.plaintext_bytes_to_read(), 0);
        tls.reader().read_exact(&mut answer[before..])?;
        if state.peer_has_closed() {
            return Ok(true);
        }
    }
    Ok(false)
}

fn body(answer: Vec<u8>) -> Result<Vec<u8>, Box<dyn Error>> {
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").ok_or("no HTTP came")?;
    let head = std::str::from_utf8(&answer[..end])?;
    let mut lines = head.lines();
    let status = lines.next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        return Err(format!("the server says: {status}").into());
    }
    let mut fields = lines.filter_map(|line| line.split_once(':'));
    let length = fields.find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let body = answer[end + 4..].to_vec();
    match length {
        Some((_, length)) if length.trim().parse() != Ok(body.len()) => {
            Err(format!("{} bytes of {} came", body.len(), length.trim()).into())
        }
        _ => Ok(body),
    }
}

/// The bytes of a TCP connection.
struct Bytes<'a, 'b>(&'a mut tcp::Socket<'b>);

impl Read for Bytes<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.recv_slice(buffer).map_err(|_| ErrorKind::ConnectionReset.into())
    }
}

impl Write for Bytes<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send_slice(bytes).map_err(|_| ErrorKind::ConnectionReset.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
