"""What somebody without a token sees of a web server, over HTTP/1.1, HTTP/2, HTTP/3, TLS and QUIC.

    visitor.py HOST PORT

Prints a JSON object: what was looked at, and what was seen. The port, dates and other values that two equal servers
may have different ones of are replaced by words in capital letters.
"""

import asyncio
import hashlib
import json
import os
import re
import socket
import ssl
import sys
import time

import h2.config
import h2.connection
import h2.events
import h2.settings
from aioquic.asyncio import QuicConnectionProtocol, connect
from aioquic.h3 import connection as h3_connection
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic import connection as quic_connection
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import ConnectionTerminated, ProtocolNegotiated, StreamReset
from cryptography.hazmat.primitives.serialization import Encoding

HOST, PORT = sys.argv[1], int(sys.argv[2])
TIMEOUT = 5
NAME = "localhost"
WRONG_TOKENS = ("Bearer wrong", "Basic dXNlcjp3cm9uZw==")
seen = {}

# Method, path and further fields.
REQUESTS = [
    ("GET", "/", {}),
    ("HEAD", "/", {}),
    ("GET", "/index.html", {}),
    ("GET", "/page.txt", {}),
    ("GET", "/page.txt?query=1", {}),
    ("GET", "/large.bin", {}),
    ("GET", "/large.bin", {"range": "bytes=5-9"}),
    ("GET", "/large.bin", {"range": "bytes=900000-"}),
    ("GET", "/page.txt", {"if-modified-since": "Fri, 01 Jan 2100 00:00:00 GMT"}),
    ("GET", "/page.txt", {"if-none-match": "*"}),
    ("GET", "/page.txt", {"accept-encoding": "gzip, br"}),
    ("GET", "/folder/", {}),
    ("GET", "/folder", {}),
    ("GET", "/folder?query=1", {}),
    ("GET", "/empty/", {}),
    ("GET", "/nothing", {}),
    ("HEAD", "/nothing", {}),
    ("GET", "/page.txt/", {}),
    ("GET", "/.hidden", {}),
    ("GET", "/../page.txt", {}),
    ("GET", "/%00", {}),
    ("GET", "/page.txt", {"authorization": WRONG_TOKENS[0]}),
    ("GET", "/page.txt", {"proxy-authorization": WRONG_TOKENS[1]}),
    ("GET", "/.well-known/masque/udp/192.0.2.7/53/", {}),
    ("POST", "/", {}),
    ("POST", "/nothing", {}),
    ("PUT", "/page.txt", {}),
    ("DELETE", "/page.txt", {}),
    ("OPTIONS", "/", {}),
    ("TRACE", "/", {}),
    ("NONSENSE", "/", {}),
]


def masked(name, value):
    value = value.replace(str(PORT), "PORT")
    if name.lower() == "date":
        assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", value), value
        return "DATE"
    return value


def content(data):
    text = data if len(data) < 2000 else hashlib.sha256(data).hexdigest().encode()
    return text.decode("latin-1")


def note(version, what, status, fields, data, end=""):
    """Notes a response, with its parts apart."""
    place = f"{version} {what}"
    if version == "HTTP/3":
        # Caddy sends them in another order each time.
        fields = sorted(fields)
    seen[f"{place}: status"] = str(status)
    seen[f"{place}: fields"] = [f"{name}: {masked(name, value)}" for name, value in fields]
    seen[f"{place}: content"] = content(data)
    if end:
        seen[f"{place}: end"] = end


def label(method, path, fields):
    return " ".join([method, path, *(f"({name}: {value})" for name, value in fields.items())])


# TLS


def secured(*protocols, version=None, name=NAME):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if version:
        context.minimum_version = context.maximum_version = version
    if protocols:
        context.set_alpn_protocols(protocols)
    connection = socket.create_connection((HOST, PORT), TIMEOUT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return context.wrap_socket(connection, server_hostname=name)


def tls():
    for protocols in [("h2", "http/1.1"), ("http/1.1", "h2"), ("h2",), ("http/1.1",), (), ("h3",), ("foo",), ("foo", "h2")]:
        try:
            connection = secured(*protocols)
            answer = str(connection.selected_alpn_protocol())
            certificate = connection.getpeercert(True)
            seen["TLS certificate"] = hashlib.sha256(certificate).hexdigest()
        except OSError as error:
            answer = type(error).__name__ + " " + str(getattr(error, "reason", error))
        seen[f"TLS protocol of {', '.join(protocols) or 'none'}"] = answer
    for name in [None, "other.example"]:
        try:
            certificate = secured("h2", name=name).getpeercert(True)
            answer = hashlib.sha256(certificate).hexdigest()
        except OSError as error:
            answer = type(error).__name__ + " " + str(getattr(error, "reason", error))
        seen[f"TLS certificate for {name or 'no name'}"] = answer
    for version in [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]:
        try:
            connection = secured("h2", version=version)
            answer = f"{connection.version()} {connection.cipher()[0]}"
        except OSError as error:
            answer = type(error).__name__ + " " + str(getattr(error, "reason", error))
        seen[f"TLS version {version.name}"] = answer


# HTTP/1.1


def http1_answer(text, more=b""):
    """The answer to one request: status line, fields, content, and whether the connection stays open."""
    connection = secured("http/1.1")
    connection.sendall(text + more)
    data, is_open = b"", None
    try:
        while b"\r\n\r\n" not in data:
            piece = connection.recv(65536)
            if not piece:
                is_open = False
                break
            data += piece
        head, _, data = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        fields = [tuple(line.split(": ", 1)) for line in lines[1:]]
        length = {name.lower(): value for name, value in fields}.get("content-length")
        if is_open is None:
            connection.settimeout(1 if length is None or text.startswith(b"HEAD") else TIMEOUT)
            while length is None or len(data) < int(length):
                piece = connection.recv(65536)
                if not piece:
                    is_open = False
                    break
                data += piece
    except TimeoutError:
        pass
    except OSError as error:
        return f"{type(error).__name__}", [], data, "reset"
    if is_open is None:
        connection.settimeout(0.5)
        try:
            is_open = bool(connection.recv(65536))
        except TimeoutError:
            is_open = True
        except OSError:
            is_open = False
    return lines[0], fields, data, "stays open" if is_open else "is closed"


def http1():
    for method, path, fields in REQUESTS:
        text = f"{method} {path} HTTP/1.1\r\nHost: {NAME}\r\n"
        text += "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        body = b"some content" if method in ("POST", "PUT") else b""
        if body:
            text += f"Content-Length: {len(body)}\r\n"
        note("HTTP/1.1", label(method, path, fields), *http1_answer(text.encode() + b"\r\n", body))
    odd = {
        "GET of HTTP/1.0": b"GET /page.txt HTTP/1.0\r\n\r\n",
        "GET of HTTP/1.0 with keep-alive": b"GET /page.txt HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        "GET that closes": b"GET /page.txt HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        "GET without Host": b"GET /page.txt HTTP/1.1\r\n\r\n",
        "GET with two Hosts": b"GET /page.txt HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        "GET with another Host": b"GET /page.txt HTTP/1.1\r\nHost: other.example\r\n\r\n",
        "GET with an absolute URI": b"GET https://localhost/page.txt HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "OPTIONS *": b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "HTTP/2.0": b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n",
        "nonsense": b"nonsense\r\n\r\n",
        "a field without a colon": b"GET / HTTP/1.1\r\nHost: localhost\r\nnonsense\r\n\r\n",
        "a field name with a space": b"GET / HTTP/1.1\r\nHost: localhost\r\na b: c\r\n\r\n",
        "a wrong Content-Length": b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        "an unknown Transfer-Encoding": b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: x\r\n\r\n",
        "a long field": b"GET /page.txt HTTP/1.1\r\nHost: localhost\r\na: " + b"x" * 12_000 + b"\r\n\r\n",
        "Expect: 100-continue": b"GET /page.txt HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n\r\n",
        "an unknown expectation": b"GET /page.txt HTTP/1.1\r\nHost: localhost\r\nExpect: x\r\n\r\n",
        "CONNECT": b"CONNECT 192.0.2.7:80 HTTP/1.1\r\nHost: 192.0.2.7:80\r\n\r\n",
        "upgrade to websocket": b"GET /page.txt HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        "upgrade to connect-udp": b"GET /.well-known/masque/udp/192.0.2.7/53/ HTTP/1.1\r\nHost: localhost\r\n"
        b"Connection: upgrade\r\nUpgrade: connect-udp\r\n\r\n",
        "upgrade to connect-ip": b"GET /.well-known/masque/ip/*/*/ HTTP/1.1\r\nHost: localhost\r\n"
        b"Connection: upgrade\r\nUpgrade: connect-ip\r\n\r\n",
    }
    for number, token in enumerate(WRONG_TOKENS):
        field = f"Proxy-Authorization: {token}\r\n\r\n".encode()
        odd[f"CONNECT with wrong credentials {number + 1}"] = odd["CONNECT"][:-2] + field
    for what, text in odd.items():
        note("HTTP/1.1", what, *http1_answer(text))


def timing():
    """Whether a refusal of wrong credentials takes as long as one of none, to a fifth of it."""
    connection, times = secured("http/1.1"), {"none": [], "wrong": []}
    for _ in range(60):
        for kind in times:
            token = "" if kind == "none" else f"Proxy-Authorization: {WRONG_TOKENS[0]}\r\n"
            began = time.monotonic()
            connection.sendall(f"CONNECT 192.0.2.7:80 HTTP/1.1\r\nHost: 192.0.2.7:80\r\n{token}\r\n".encode())
            data = b""
            while b"\r\n\r\n" not in data:
                data += connection.recv(65536)
            times[kind].append(time.monotonic() - began)
    none, wrong = (sorted(times[kind])[30] for kind in ("none", "wrong"))
    seen["HTTP/1.1 time of refusals"] = "equal" if abs(none - wrong) < none / 5 else f"{none} s, {wrong} s"


# HTTP/2


class Http2:
    def __init__(self):
        self.socket = secured("h2")
        config = h2.config.H2Configuration(header_encoding="utf-8", validate_outbound_headers=False)
        self.http = h2.connection.H2Connection(config)
        self.http.initiate_connection()
        self.flush()
        self.settings, self.ended = None, None

    def flush(self):
        self.socket.sendall(self.http.data_to_send())

    def ask(self, fields, body=b""):
        stream = self.http.get_next_available_stream_id()
        self.http.send_headers(stream, fields, end_stream=not body)
        if body:
            self.http.send_data(stream, body, end_stream=True)
        self.flush()
        status, answer, data = "no answer", [], b""
        until = time.monotonic() + TIMEOUT
        while time.monotonic() < until:
            try:
                received = self.socket.recv(65536)
            except OSError as error:
                return type(error).__name__, answer, data
            if not received:
                return "is closed", answer, data
            for event in self.http.receive_data(received):
                match event:
                    case h2.events.RemoteSettingsChanged():
                        self.settings = {str(code): change.new_value for code, change in event.changed_settings.items()}
                    case h2.events.ResponseReceived() if event.stream_id == stream:
                        fields = [tuple(map(str, field)) for field in event.headers]
                        status, answer = fields[0][1], fields[1:]
                    case h2.events.DataReceived() if event.stream_id == stream:
                        data += event.data
                        self.http.acknowledge_received_data(event.flow_controlled_length, stream)
                    case h2.events.StreamEnded() if event.stream_id == stream:
                        self.flush()
                        return status, answer, data
                    case h2.events.StreamReset() if event.stream_id == stream:
                        return f"{status}, reset {event.error_code}", answer, data
                    case h2.events.ConnectionTerminated():
                        return f"{status}, goaway {event.error_code}", answer, data
            self.flush()
        return "no end", answer, data


def head(method, path, fields):
    return [(":method", method), (":scheme", "https"), (":authority", NAME), (":path", path), *fields.items()]


def odd_requests():
    """CONNECT requests of all kinds without or with wrong credentials, and malformed requests."""
    udp = [(":method", "CONNECT"), (":protocol", "connect-udp"), (":scheme", "https"), (":authority", NAME),
           (":path", "/.well-known/masque/udp/192.0.2.7/53/"), ("capsule-protocol", "?1")]
    ip = [*udp[:1], (":protocol", "connect-ip"), *udp[2:4], (":path", "/.well-known/masque/ip/*/*/"), *udp[5:]]
    tcp = [(":method", "CONNECT"), (":authority", "192.0.2.7:80")]
    for what, fields in [("CONNECT", tcp), ("connect-udp", udp), ("connect-ip", ip)]:
        yield what, fields
        for number, token in enumerate(WRONG_TOKENS):
            yield f"{what} with wrong credentials {number + 1}", [*fields, ("proxy-authorization", token)]
    yield "a long field", [*head("GET", "/page.txt", {}), ("a", "x" * 12_000)]
    yield "another authority", [(":method", "GET"), (":scheme", "https"), (":authority", "other.example"), (":path", "/page.txt")]
    yield "no path", head("GET", "/", {})[:3]
    yield "an upper-case name", [*head("GET", "/page.txt", {}), ("A", "b")]
    yield "a connection field", [*head("GET", "/page.txt", {}), ("connection", "close")]


def http2():
    for method, path, fields in REQUESTS:
        client = Http2()
        body = b"some content" if method in ("POST", "PUT") else b""
        more = {"content-length": str(len(body))} if body else {}
        note("HTTP/2", label(method, path, fields), *client.ask(head(method, path, fields | more), body))
        seen["HTTP/2 settings"] = client.settings
    for what, fields in odd_requests():
        note("HTTP/2", what, *Http2().ask(fields))


# HTTP/3

# It takes the content-length of a response to HEAD for that of its content; whether that is complete is compared here.
h3_connection.H3Connection._check_content_length = lambda *_: None


class Http3(QuicConnectionProtocol):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.http, self.answers, self.closed, self.stops = None, {}, None, {}

    def quic_event_received(self, event):
        if isinstance(event, ProtocolNegotiated):
            self.http = H3Connection(self._quic)
        if isinstance(event, ConnectionTerminated):
            self.closed = f"{event.error_code:#x} {event.reason_phrase}"
            for _, _, done in self.answers.values():
                done.done() or done.set_result(f"closed {self.closed}")
        if isinstance(event, StreamReset) and event.stream_id in self.answers:
            done = self.answers[event.stream_id][2]
            done.done() or done.set_result(f"reset {event.error_code:#x}")
        for event in self.http.handle_event(event) if self.http else ():
            if not isinstance(event, (HeadersReceived, DataReceived)):
                continue
            fields, data, done = self.answers[event.stream_id]
            if isinstance(event, HeadersReceived):
                fields.extend((name.decode(), value.decode()) for name, value in event.headers)
            else:
                data.extend(event.data)
            if event.stream_ended and not done.done():
                done.set_result("")

    async def ask(self, fields, body=b""):
        stream = self._quic.get_next_available_stream_id()
        answer = self.answers[stream] = ([], bytearray(), asyncio.get_running_loop().create_future())
        self.http.send_headers(stream, [(a.encode(), b.encode()) for a, b in fields], end_stream=not body)
        if body:
            self.http.send_data(stream, body, end_stream=True)
        self.transmit()
        try:
            error = await asyncio.wait_for(answer[2], TIMEOUT)
        except TimeoutError:
            error = "no end"
        fields = answer[0]
        status = fields[0][1] if fields else "no answer"
        return ", ".join(filter(None, [status, error])), fields[1:], bytes(answer[1])


def http3_client(protocols=H3_ALPN):
    configuration = QuicConfiguration(is_client=True, alpn_protocols=protocols, server_name=NAME, verify_mode=ssl.CERT_NONE)
    return connect(HOST, PORT, configuration=configuration, create_protocol=Http3)


async def http3():
    parameters = []
    pull = quic_connection.pull_quic_transport_parameters
    def recorded(buffer):
        raw = buffer.data
        pulled = pull(buffer)
        parameters.append((pulled, raw))
        return pulled
    quic_connection.pull_quic_transport_parameters = recorded
    for method, path, fields in REQUESTS:
        async with http3_client() as client:
            body = b"some content" if method in ("POST", "PUT") else b""
            more = {"content-length": str(len(body))} if body else {}
            note("HTTP/3", label(method, path, fields), *await client.ask(head(method, path, fields | more), body))
            settings = client.http.received_settings
            seen["HTTP/3 settings"] = {f"{name:#x}": value for name, value in settings.items() if (name - 0x21) % 0x1f}
            certificate = client._quic.tls._peer_certificate.public_bytes(Encoding.DER)
            seen["HTTP/3 certificate"] = hashlib.sha256(certificate).hexdigest()
    orders = set()
    for _ in range(8):
        async with http3_client() as client:
            _, fields, _ = await client.ask(head("GET", "/page.txt", {}))
            orders.add(tuple(name for name, _ in fields))
    seen["HTTP/3 order of fields"] = "changes" if len(orders) > 1 else "stays"
    for what, fields in odd_requests():
        async with http3_client() as client:
            note("HTTP/3", what, *await client.ask(fields))
    try:
        async with http3_client(["foo"]) as client:
            answer = "accepted"
    except ConnectionError as error:
        answer = f"{error!r}"
    seen["HTTP/3 with another protocol"] = answer
    known = {name: value for name, value in vars(parameters[0][0]).items() if value is not None}
    for secret in ("original_destination_connection_id", "initial_source_connection_id", "stateless_reset_token", "retry_source_connection_id"):
        if secret in known:
            known[secret] = f"{len(known[secret])} bytes"
    seen["QUIC transport parameters"] = {name: str(value) for name, value in sorted(known.items())}


def quic():
    """Version negotiation, and packets that are too short for it."""
    for size in (1200, 600):
        probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        probe.settimeout(1)
        header = b"\xc0" + bytes.fromhex("1a2a3a4a") + b"\x08" + os.urandom(8) + b"\x08" + os.urandom(8)
        probe.sendto(header + bytes(size - len(header)), (HOST, PORT))
        try:
            answer = probe.recv(2000)
            versions = answer[5 + 9 + 9:]
            found = sorted({versions[at:at + 4].hex() for at in range(0, len(versions), 4)})
            answer = ["GREASE" if re.fullmatch("(.a){4}", version) else version for version in found]
        except TimeoutError:
            answer = "nothing"
        seen[f"QUIC version negotiation for {size} bytes"] = answer


tls()
http1()
timing()
http2()
asyncio.run(http3())
quic()
print(json.dumps(seen, indent=1, sort_keys=True))
