"""MASQUE over HTTP/2 and HTTP/1.1, with the TLS of Python and the HTTP/2 of h2; capsules are encoded here.

    http2.py HOST PORT TOKEN STORY WORDS...

The stories are the functions below; the last line printed is "done". TOKEN may be empty.
"""

import hashlib
import os
import socket
import ssl
import struct
import sys
import time

import h2.config
import h2.connection
import h2.events
import h2.settings
from h2.errors import ErrorCodes

from wire import ADDRESS_ASSIGN, BIGGEST, DATAGRAM, ROUTE_ADVERTISEMENT, frame, read_varint, varint

PATIENCE = 10


def secured(host, port, *protocols):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(protocols)
    connection = socket.create_connection((host, port), PATIENCE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A TCP end without a TLS close_notify is an error.
    return context.wrap_socket(connection, server_hostname="mpvpn", suppress_ragged_eofs=False)


class Reset(Exception):
    """The stream was reset; has its error code."""


class Stream:
    """One request: its received data, and how it ended."""

    def __init__(self, client, number):
        self.client, self.number = client, number
        self.answer, self.data, self.ended, self.code = None, b"", False, None

    def status(self):
        self.client.until(lambda: self.answer or self.code is not None)
        if self.answer is None:
            raise Reset(self.code)
        return self.answer[":status"]

    def send(self, data, end=False):
        self.client.send(self.number, data, end)

    def reset(self, code=ErrorCodes.CANCEL):
        self.client.http.reset_stream(self.number, code)
        self.client.flush()

    def read(self, length):
        """Reads exactly this many bytes."""
        self.client.until(lambda: len(self.data) >= length or self.ended or self.code is not None)
        if self.code is not None:
            raise Reset(self.code)
        assert len(self.data) >= length, f"ended after {len(self.data)} of {length} bytes"
        data, self.data = self.data[:length], self.data[length:]
        return data

    def read_to_end(self):
        self.client.until(lambda: self.ended or self.code is not None)
        if self.code is not None:
            raise Reset(self.code)
        data, self.data = self.data, b""
        return data

    def capsule(self, limit=PATIENCE):
        """Reads the next capsule: type and value."""
        while True:
            if (kind := read_varint(self.data, 0)) and (length := read_varint(self.data, kind[1])):
                end = length[1] + length[0]
                if end <= len(self.data):
                    value, self.data = self.data[length[1] : end], self.data[end:]
                    return kind[0], value
            have = len(self.data)
            self.client.until(lambda: len(self.data) > have or self.ended or self.code is not None, limit)
            if self.code is not None:
                raise Reset(self.code)
            assert len(self.data) > have, "the end instead of a capsule"

    def datagram(self, limit=PATIENCE):
        """Reads the payload of the next DATAGRAM capsule."""
        while True:
            kind, value = self.capsule(limit)
            if kind == DATAGRAM:
                context, at = read_varint(value, 0)
                assert context == 0, context
                return value[at:]

    def say(self, payload):
        self.send(frame(DATAGRAM, b"\0" + payload))


class Client:
    """One HTTP/2 connection."""

    def __init__(self, host, port, token, *protocols):
        self.authority, self.token = f"{host}:{port}", token
        self.socket = secured(host, port, *protocols)
        assert self.socket.selected_alpn_protocol() == (protocols[0] if protocols else None)
        self.http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.http.initiate_connection()
        self.http.increment_flow_control_window(64 << 20)
        self.streams, self.blocked = {}, False
        self.flush()
        self.until(lambda: self.http.remote_settings.enable_connect_protocol == 1)

    def flush(self):
        self.socket.sendall(self.http.data_to_send())

    def turn(self, timeout):
        """Handles received bytes; returns whether there were any."""
        self.socket.settimeout(timeout)
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return False
        if not data:
            raise ConnectionError("the server has closed the connection")
        for event in self.http.receive_data(data):
            stream = self.streams.get(getattr(event, "stream_id", None))
            match event:
                case h2.events.ResponseReceived() if stream:
                    stream.answer = dict(event.headers)
                case h2.events.DataReceived():
                    self.http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    if stream:
                        stream.data += event.data
                case h2.events.StreamEnded() if stream:
                    stream.ended = True
                case h2.events.StreamReset() if stream:
                    stream.code = event.error_code
                case h2.events.ConnectionTerminated():
                    raise ConnectionError(f"GOAWAY with {event.error_code}")
        self.flush()
        return True

    def until(self, wanted, limit=PATIENCE):
        deadline = time.monotonic() + limit
        while not wanted():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("nothing came")
            self.turn(left)

    def ask(self, fields):
        number = self.http.get_next_available_stream_id()
        self.streams[number] = stream = Stream(self, number)
        self.http.send_headers(number, fields)
        self.flush()
        return stream

    def credentials(self, name="proxy-authorization"):
        return [(name, f"Bearer {self.token}")] if self.token else []

    def tcp(self, authority, fields=None):
        fields = self.credentials() if fields is None else fields
        return self.ask([(":method", "CONNECT"), (":authority", authority)] + fields)

    def extended(self, protocol, path):
        fields = [
            (":method", "CONNECT"),
            (":protocol", protocol),
            (":scheme", "https"),
            (":authority", self.authority),
            (":path", path),
            ("capsule-protocol", "?1"),
        ]
        return self.ask(fields + self.credentials("authorization"))

    def udp(self, host, port):
        return self.extended("connect-udp", udp_path(host, port))

    def ip(self):
        return self.extended("connect-ip", "/.well-known/masque/ip/*/*/")

    def send(self, number, data, end=False):
        """Sends data; waits while the flow control window is empty."""
        while data:
            room = min(self.http.local_flow_control_window(number), self.http.max_outbound_frame_size)
            stream = self.streams[number]
            if stream.code is not None:
                raise Reset(stream.code)
            if room == 0:
                assert self.turn(PATIENCE), "no room for what is sent"
                continue
            self.http.send_data(number, data[:room])
            data = data[room:]
            self.flush()
        if end:
            self.http.end_stream(number)
        self.flush()


def udp_path(host, port):
    return f"/.well-known/masque/udp/{host.replace(':', '%3A')}/{port}/"


def split(authority):
    host, port = authority.rsplit(":", 1)
    return host.strip("[]"), port


def opened(stream):
    assert stream.status() == "200", stream.answer
    # "A server MUST NOT send any Transfer-Encoding or Content-Length header fields in a 2xx" (RFC 9110 §9.3.6).
    assert not {"transfer-encoding", "content-length"} & set(stream.answer), stream.answer
    return stream


def both_ways(client, echo):
    """Echo: data sent in turns comes back, and the rest after this side has ended."""
    tcp = opened(client.tcp(echo))
    for size in (1, 100, 10_000, 100_000):
        data = os.urandom(size)
        tcp.send(data)
        assert tcp.read(size) == data, size
    last = os.urandom(60_000)
    tcp.send(last, end=True)
    assert tcp.read_to_end() == last


def far_end_first(client, greeter):
    """The far end sends data and ends its direction, and still receives; the Rust test checks what it received."""
    tcp = opened(client.tcp(greeter))
    assert tcp.read_to_end() == b"greeting"
    tcp.send(b"late ")
    time.sleep(0.3)
    tcp.send(b"answer", end=True)
    time.sleep(0.5)


def far_end_breaks(client, breaker):
    """The far end resets the TCP connection: the stream must be reset."""
    tcp = opened(client.tcp(breaker))
    tcp.send(b"break it")
    try:
        tcp.read_to_end()
        raise AssertionError("the end looked clean")
    except Reset as reset:
        assert reset.args[0] == ErrorCodes.CONNECT_ERROR, reset


def breaks(client, far):
    """This end resets the stream: the TCP connection must be reset, which the Rust test checks."""
    tcp = opened(client.tcp(far))
    tcp.send(b"before")
    assert tcp.read(6) == b"before"
    tcp.reset()
    time.sleep(0.5)


def refusals(client, *pairs):
    """Checks refusals: pairs of authority and expected answer (status, or status/error)."""
    for authority, wanted in zip(pairs[::2], pairs[1::2]):
        tcp = client.tcp(authority)
        code, _, error = wanted.partition("/")
        assert tcp.status() == code, f"{authority}: {tcp.answer}"
        said = tcp.answer.get("proxy-status", "")
        assert not error or f"error={error}" in said, f"{authority}: {tcp.answer}"
        print(authority, code, said)


def much(client, echo, mebibytes):
    """This many MiB are echoed unchanged, beside a stream that is not read."""
    total, piece = int(mebibytes) << 20, 1 << 14
    ignored, tcp = opened(client.tcp(echo)), opened(client.tcp(echo))
    ignored.send(os.urandom(1 << 15))
    block = os.urandom(piece)
    sent, received = hashlib.sha256(), hashlib.sha256()
    out = back = 0
    while back < total:
        while out < total and out - back < 1 << 20:
            # Each piece starts with its number, so that swapped pieces are detected.
            data = out.to_bytes(8, "big") + block[8:]
            sent.update(data)
            out += piece
            tcp.send(data, end=out == total)
        data = tcp.read(min(max(len(tcp.data), 1), total - back))
        received.update(data)
        back += len(data)
    assert back == total and sent.digest() == received.digest(), back


def echoed(udp, sizes):
    """Payloads of these sizes are echoed."""
    for size in sizes:
        payload = os.urandom(size)
        for _ in range(5):
            udp.say(payload)
            try:
                assert udp.datagram(limit=2) == payload, size
                break
            except TimeoutError:
                continue
        else:
            raise AssertionError(f"{size} bytes did not come back")


def payloads(client, *echoes):
    """Datagrams are echoed: two requests on one connection, and one more after an end."""
    udps = [client.udp(*split(echo)) for echo in echoes]
    for udp in udps:
        assert udp.status() == "200" and udp.answer.get("capsule-protocol") == "?1", udp.answer
    for udp in udps:
        # Unknown capsules and contexts must be ignored (RFC 9297 §3.2, RFC 9298 §4).
        udp.send(frame(0x2F3A, b"nobody knows this") + frame(DATAGRAM, b"\x17elsewhere"))
        echoed(udp, (1, 100, 1200, 1452))
    first, second = udps
    for number in range(50):
        [first, second][number % 2].say(b"%d" % number)
    for number in range(50):
        assert [first, second][number % 2].datagram() == b"%d" % number
    first.send(b"", end=True)
    client.until(lambda: first.ended)
    echoed(second, (10,))


def hostile(client, echo):
    """An invalid capsule ends its request and no other."""
    good = opened(client.udp(*split(echo)))
    lies = {
        "a datagram of 2^62 bytes": frame(DATAGRAM, b"\0" * 100, length=BIGGEST),
        "a datagram without a context": frame(DATAGRAM, b""),
        "a context cut short": frame(DATAGRAM, b"\x40"),
    }
    for name, data in lies.items():
        bad = opened(client.udp(*split(echo)))
        bad.send(data)
        client.until(lambda: bad.code is not None)
        assert bad.code in (ErrorCodes.PROTOCOL_ERROR, ErrorCodes.ENHANCE_YOUR_CALM), (name, bad.code)
        print(name, bad.code)
    for name, data in {
        "a capsule that ends too early": frame(DATAGRAM, b"\0abc", length=1000),
        "an unknown one": frame(0x1234, b"abc", length=1000),
        "half a header": b"\x80\x00",
    }.items():
        bad = opened(client.udp(*split(echo)))
        bad.send(data, end=True)
        client.until(lambda: bad.code is not None)
        assert bad.code == ErrorCodes.PROTOCOL_ERROR, (name, bad.code)
        print(name, bad.code)
    # An unknown capsule of any length must be ignored without buffering it.
    endless = opened(client.udp(*split(echo)))
    endless.send(frame(0x1234, b"", length=BIGGEST))
    for _ in range(64):
        endless.send(bytes(1 << 14))
    echoed(good, (10, 1000))


def checksum(data):
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def echo_request(source, destination, number, size):
    """An IPv4 packet with an ICMP echo request (RFC 792)."""
    body = struct.pack("!BBHHH", 8, 0, 0, 0x6D70, number) + bytes(size)
    body = body[:2] + struct.pack("!H", checksum(body)) + body[4:]
    addresses = socket.inet_aton(source) + socket.inet_aton(destination)
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), number, 0x4000, 64, 1, 0) + addresses
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + body


def packets(client, tunnel, beyond):
    """An address is assigned, routes are advertised, and pings to the server and to a host behind it are answered."""
    ip = client.ip()
    assert ip.status() == "200" and ip.answer.get("capsule-protocol") == "?1", ip.answer
    seen, address = set(), None
    while not {ADDRESS_ASSIGN, ROUTE_ADVERTISEMENT} <= seen:
        kind, value = ip.capsule()
        seen.add(kind)
        while kind == ADDRESS_ASSIGN and value:
            at = read_varint(value, 0)[1]
            length = {4: 4, 6: 16}[value[at]]
            if length == 4:
                address = socket.inet_ntoa(value[at + 1 : at + 5])
            value = value[at + 2 + length :]
    print("address", address)
    for number, (host, size) in enumerate([(tunnel, 56), (tunnel, 1400), (beyond, 56), (beyond, 1300)]):
        deadline = time.monotonic() + 2 * PATIENCE
        whole = False
        # At first the MTU of the server's device may be smaller, and an answer is fragmented.
        while not whole:
            assert time.monotonic() < deadline, f"no answer from {host} to {size} bytes"
            ip.say(echo_request(address, host, number, size))
            try:
                answer = ip.datagram(limit=0.5)
            except TimeoutError:
                continue
            is_echo = answer[9] == 1 and answer[20] == 0 and answer[12:16] == socket.inet_aton(host)
            whole = is_echo and answer[26:28] == number.to_bytes(2, "big") and len(answer) == 28 + size
    print("answered")
    # The Rust test reads the server's status meanwhile.
    time.sleep(1)


class Upgraded(Stream):
    """An HTTP/1.1 upgrade that uses the whole connection (RFC 9298 §3.2)."""

    def __init__(self, host, port, token, request, protocols=("http/1.1",)):
        self.socket = secured(host, port, *protocols)
        self.client = self
        self.data, self.ended, self.code = b"", False, None
        credentials = f"Authorization: Bearer {token}\r\n" if token else ""
        self.socket.sendall(f"{request}\r\n{credentials}\r\n".encode())
        self.until(lambda: b"\r\n\r\n" in self.data or self.ended)
        head, self.data = self.data.split(b"\r\n\r\n", 1)
        first, *lines = head.decode().split("\r\n")
        self.answer = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        self.answer[":status"] = first.split()[1]

    def until(self, wanted, limit=PATIENCE):
        deadline = time.monotonic() + limit
        while not wanted():
            self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self.socket.recv(1 << 16)
            except (ConnectionError, ssl.SSLError) as error:
                # The connection is closed without an end of the request.
                self.code = repr(error)
                continue
            self.data += data
            self.ended = not data

    def send(self, data, end=False):
        self.socket.sendall(data)
        if end:
            self.socket.unwrap()


def upgrade(protocol, authority, path):
    return (
        f"GET {path} HTTP/1.1\r\nHost: {authority}\r\nConnection: Upgrade\r\n"
        f"Upgrade: {protocol}\r\nCapsule-Protocol: ?1"
    )


def upgrades(host, port, token, echo, tunnel):
    """CONNECT-UDP and CONNECT-IP over HTTP/1.1."""
    authority = f"{host}:{port}"
    udp = Upgraded(host, port, token, upgrade("connect-udp", authority, udp_path(*split(echo))))
    assert udp.answer[":status"] == "101", udp.answer
    assert udp.answer["upgrade"] == "connect-udp" and udp.answer["capsule-protocol"] == "?1", udp.answer
    echoed(udp, (1, 1200))
    udp.say(b"\0" * 10)
    udp.send(frame(DATAGRAM, b""))
    udp.until(lambda: udp.code is not None or udp.ended)
    assert udp.code is not None, "what was cut off looked like an end"
    ip = Upgraded(host, port, token, upgrade("connect-ip", authority, "/.well-known/masque/ip/*/*/"))
    assert ip.answer[":status"] == "101" and ip.answer["upgrade"] == "connect-ip", ip.answer
    kinds = {ip.capsule()[0] for _ in range(2)}
    assert kinds == {ADDRESS_ASSIGN, ROUTE_ADVERTISEMENT}, kinds
    refused = Upgraded(host, port, token, upgrade("connect-udp", authority, udp_path("127.0.0.1", 53)))
    assert refused.answer[":status"] == "403", refused.answer
    assert "destination_ip_prohibited" in refused.answer["proxy-status"], refused.answer


def old(host, port, token, echo, udp):
    """The wire format of early drafts: TLS without ALPN; in it CONNECT of HTTP/2, or CONNECT-UDP of HTTP/1.1 with chunks of
    type 0 without a context (draft-ietf-masque-connect-udp-03)."""
    credentials = f"PrivacyToken token={token}"
    client = Client(host, port, token)
    tcp = opened(client.tcp(echo, [("proxy-authorization", credentials)]))
    data = os.urandom(50_000)
    tcp.send(data, end=True)
    assert tcp.read_to_end() == data
    refused = client.tcp(echo, [("proxy-authorization", "PrivacyToken token=0123456789abcdef")])
    assert refused.status() in ("401", "407"), refused.answer
    asks = f"CONNECT-UDP masque://{udp}/ HTTP/1.1\r\nHost: {udp}"
    chunks = Upgraded(host, port, "", f"{asks}\r\nProxy-Authorization: {credentials}", ())
    assert chunks.answer[":status"] == "200", chunks.answer
    for size in (1, 100, 1400):
        payload = os.urandom(size)
        # A chunk of an unknown type must be ignored.
        chunks.send(frame(0x17, b"what is this?") + frame(0x00, payload))
        assert chunks.capsule() == (0x00, payload), size
    for fields, status in ((f"\r\nProxy-Authorization: {credentials}0", "401"), ("", "405")):
        refused = Upgraded(host, port, "", asks + fields, ())
        assert refused.answer[":status"] == status, refused.answer
    forbidden = "CONNECT-UDP masque://127.0.0.1:53/ HTTP/1.1\r\nHost: x\r\n"
    refused = Upgraded(host, port, "", f"{forbidden}Proxy-Authorization: {credentials}", ())
    assert refused.answer[":status"] == "403", refused.answer


def not_old(host, port, token, echo, udp):
    """A server without support of early drafts: TLS without ALPN is HTTP/1.1, and CONNECT-UDP is an unknown method."""
    connection = secured(host, port)
    http = h2.connection.H2Connection()
    http.initiate_connection()
    connection.sendall(http.data_to_send())
    try:
        answer = connection.recv(1 << 16)
    except (ConnectionError, ssl.SSLError):
        answer = b""
    assert not answer or answer.startswith(b"HTTP/1.1 4"), answer
    asks = f"CONNECT-UDP masque://{udp}/ HTTP/1.1\r\nHost: {udp}\r\nProxy-Authorization: PrivacyToken token={token}"
    refused = Upgraded(host, port, "", asks, ())
    assert refused.answer[":status"] == "405", refused.answer


OVER_HTTP2 = (both_ways, far_end_first, far_end_breaks, breaks, refusals, much, payloads, hostile, packets)

if __name__ == "__main__":
    host, port, token, story, *words = sys.argv[1:]
    own = {tale.__name__: tale for tale in (upgrades, old, not_old)}
    if story in own:
        own[story](host, int(port), token, *words)
    else:
        {tale.__name__: tale for tale in OVER_HTTP2}[story](Client(host, int(port), token, "h2"), *words)
    print("done")
