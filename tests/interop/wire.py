"""HTTP/3 on the byte level: QUIC and TLS of aioquic, with frames made by the caller."""

import asyncio
import socket
import ssl

import pylsqpack
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import (
    ConnectionTerminated,
    DatagramFrameReceived,
    StopSendingReceived,
    StreamDataReceived,
    StreamReset,
)

# RFC 9114 §11.2.1.
DATA, HEADERS, SETTINGS, GOAWAY, MAX_PUSH_ID = 0x00, 0x01, 0x04, 0x07, 0x0D
# RFC 9114 §6.2, RFC 9204 §4.2.
CONTROL, PUSH, QPACK_ENCODER, QPACK_DECODER = 0x00, 0x01, 0x02, 0x03
# RFC 9297 §3.5, RFC 9484 §4.7.
DATAGRAM, ADDRESS_ASSIGN, ADDRESS_REQUEST, ROUTE_ADVERTISEMENT = 0x00, 0x01, 0x02, 0x03

BIGGEST = (1 << 62) - 1


def varint(value):
    """RFC 9000 §16, shortest form."""
    for size, prefix in ((1, 0), (2, 1), (4, 2), (8, 3)):
        if value < 1 << (size * 8 - 2):
            return (value | prefix << (size * 8 - 2)).to_bytes(size, "big")
    raise ValueError(value)


def read_varint(data, at):
    """The value and the position after it; None if it is incomplete."""
    if at >= len(data):
        return None
    end = at + (1 << (data[at] >> 6))
    if end > len(data):
        return None
    return int.from_bytes(data[at:end], "big") & ~(3 << ((end - at) * 8 - 2)), end


def frame(kind, body=b"", length=None):
    """A frame (RFC 9114 §7.1) or a capsule (RFC 9297 §3.2), possibly with a wrong length."""
    return varint(kind) + varint(len(body) if length is None else length) + body


def settings(*pairs):
    return frame(SETTINGS, b"".join(varint(name) + varint(value) for name, value in pairs))


def section(fields):
    """A field section that uses only the static table and literals."""
    pairs = [(name.encode(), value.encode()) for name, value in fields]
    return pylsqpack.Encoder().encode(0, pairs)[1]


def headers(*fields):
    return frame(HEADERS, section(fields))


# Settings of an endpoint with HTTP datagrams.
USUAL_SETTINGS = settings((0x01, 0), (0x07, 0), (0x08, 1), (0x33, 1))


class Stream:
    """Data received on one stream."""

    def __init__(self):
        self.data = b""
        self.ended = False
        self.reset = None
        self.stopped = None

    def frames(self):
        """The complete frames received so far."""
        found, at = [], 0
        while (kind := read_varint(self.data, at)) and (length := read_varint(self.data, kind[1])):
            end = length[1] + length[0]
            if end > len(self.data):
                break
            found.append((kind[0], self.data[length[1] : end]))
            at = end
        return found

    def answer(self):
        """The fields of the first header section, once it is complete."""
        for kind, body in self.frames():
            if kind == HEADERS:
                fields = pylsqpack.Decoder(0, 0).feed_header(0, body)[1]
                return {name.decode(): value.decode() for name, value in fields}
        return None

    def content(self):
        return b"".join(body for kind, body in self.frames() if kind == DATA)

    def __str__(self):
        return f"answer {self.answer()}, ended {self.ended}, reset {self.reset}, stopped {self.stopped}"


# Not in the module socket.
SO_RCVBUFFORCE = 33


class Raw(QuicConnectionProtocol):
    """Records received events. Sends only what the caller asks for."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.streams = {}
        self.datagrams = []
        self.closed = None
        self.news = asyncio.Event()

    def connection_made(self, transport):
        # aioquic knows no stateless resets: a CONNECTION_CLOSE that finds the buffer full, because this program got no
        # processor, is never repeated after the server's closing period of three PTO.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 << 20)
        super().connection_made(transport)

    def quic_event_received(self, event):
        match event:
            case StreamDataReceived():
                stream = self.stream(event.stream_id)
                stream.data += event.data
                stream.ended |= event.end_stream
            case StreamReset():
                self.stream(event.stream_id).reset = event.error_code
            case StopSendingReceived():
                self.stream(event.stream_id).stopped = event.error_code
            case DatagramFrameReceived():
                self.datagrams.append(event.data)
            case ConnectionTerminated():
                self.closed = event.error_code
        self.news.set()
        self.heard(event)

    def heard(self, event):
        """Called for every event; for subclasses that react at once."""

    def stream(self, number):
        return self.streams.setdefault(number, Stream())

    def say(self, number, data, end=False):
        self._quic.send_stream_data(number, data, end)
        self.transmit()

    def open(self, data=b"", end=False, one_way=False):
        number = self._quic.get_next_available_stream_id(is_unidirectional=one_way)
        self.say(number, data, end)
        return number

    def reset(self, number, code):
        self._quic.reset_stream(number, code)
        self.transmit()

    def datagram(self, data):
        self._quic.send_datagram_frame(data)
        self.transmit()

    def preface(self, settings=USUAL_SETTINGS):
        """Opens the control stream."""
        return self.open(varint(CONTROL) + settings, one_way=True)

    async def until(self, wanted, limit=5.0):
        """Waits until the condition is true; False if the time has passed."""
        deadline = asyncio.get_running_loop().time() + limit
        while not wanted():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return False
            self.news.clear()
            try:
                # Some changes cause no event, so the condition is checked periodically.
                await asyncio.wait_for(self.news.wait(), min(left, 0.05))
            except TimeoutError:
                pass
        return True

    async def sent(self, number):
        """Waits until the peer has acknowledged all data of a stream."""
        if not await self.until(lambda: not self._quic._streams[number].sender._buffer, 15):
            raise TimeoutError(f"stream {number} is not taken")


def client_configuration():
    return QuicConfiguration(
        is_client=True, alpn_protocols=["h3"], max_datagram_frame_size=65536, verify_mode=ssl.CERT_NONE
    )
