"""A hostile HTTP/3 server: each behaviour has its own port.

    hostile_server.py HOST CERTIFICATE KEY

Prints "PORT BEHAVIOUR" for each, then "up"; later "BEHAVIOUR connected" and "BEHAVIOUR closed CODE" (None: not by the client).
"""

import asyncio
import sys

from aioquic.asyncio.server import serve
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import ConnectionTerminated, HandshakeCompleted, StreamDataReceived
from wire import *

FIRST_PORT = 5000
REQUEST_REJECTED, INTERNAL_ERROR = 0x10B, 0x102
GRANTED = headers((":status", "200"), ("capsule-protocol", "?1"))
# 10.9.0.2/32 for request 1, all IPv4 addresses behind.
ADDRESS = b"\x01\x04\x0a\x09\x00\x02\x20"
ASSIGNED = frame(DATA, frame(ADDRESS_ASSIGN, ADDRESS))
ROUTES = frame(DATA, frame(ROUTE_ADVERTISEMENT, b"\x04" + bytes(4) + b"\xff" * 4 + b"\x00"))

WAYS = {}


def way(function):
    WAYS[function.__name__] = function
    return function


def capsule(kind, body, length=None):
    return GRANTED + frame(DATA, frame(kind, body, length))


@way
def cut_capsule(raw, stream):
    raw.say(stream, capsule(ADDRESS_ASSIGN, ADDRESS[:-1]))


@way
def host_bits(raw, stream):
    raw.say(stream, capsule(ADDRESS_ASSIGN, ADDRESS[:-1] + b"\x18") + ROUTES)


@way
def prefix_of_33_bits(raw, stream):
    raw.say(stream, capsule(ADDRESS_ASSIGN, ADDRESS[:-1] + b"\x21"))


@way
def routes_out_of_order(raw, stream):
    one = b"\x04\x0a\x00\x00\x01\x0a\x00\x00\x01\x00"
    raw.say(stream, capsule(ROUTE_ADVERTISEMENT, one + one))


@way
def endless_capsule(raw, stream):
    raw.say(stream, capsule(ADDRESS_ASSIGN, bytes(1000), length=BIGGEST))


@way
def malformed_once_it_is_up(raw, stream):
    raw.say(stream, GRANTED + ASSIGNED + ROUTES)
    asyncio.get_running_loop().call_later(0.5, raw.say, stream, frame(DATA, frame(ADDRESS_ASSIGN, b"\x00\x05")))


@way
def ended_inside_a_capsule(raw, stream):
    raw.say(stream, GRANTED + ASSIGNED + frame(DATA, b"\x01\x20\x00"), end=True)


@way
def reset(raw, stream):
    raw.say(stream, GRANTED + ASSIGNED)
    raw.reset(stream, INTERNAL_ERROR)


@way
def rejected(raw, stream):
    raw.reset(stream, REQUEST_REJECTED)


@way
def goaway(raw, stream):
    raw.say(stream, GRANTED + ASSIGNED + ROUTES)
    raw.say(raw.control, frame(GOAWAY, varint(0)))
    asyncio.get_running_loop().call_later(0.5, raw.close, 0x100, "bye")


@way
def goaway_for_no_request(raw, stream):
    raw.say(raw.control, frame(GOAWAY, varint(1)))


@way
def unknown_frames_and_noise(raw, stream):
    raw.say(stream, frame(0x21, bytes(2000)) + b"\x3f" * 500)


@way
def malformed_answer(raw, stream):
    raw.say(stream, headers((":status", "200"), ("Upper", "case")))


@way
def answer_without_status(raw, stream):
    raw.say(stream, headers(("a", "b")))


@way
def oversize_answer(raw, stream):
    raw.say(stream, headers((":status", "200"), ("x", "y" * 17000)))


@way
def endless_answer(raw, stream):
    raw.say(stream, frame(HEADERS, bytes(1000), length=BIGGEST))


@way
def endless_interim_answers(raw, stream):
    for _ in range(50):
        raw.say(stream, headers((":status", "103")))


@way
def no_answer_but_data(raw, stream):
    raw.say(stream, frame(DATA, b"early"))


@way
def push(raw, stream):
    raw.open(varint(PUSH) + varint(0), one_way=True)


@way
def stream_of_the_server(raw, stream):
    raw.open(b"hello")


@way
def settings_twice(raw, stream):
    raw.say(raw.control, USUAL_SETTINGS)


@way
def status_500(raw, stream):
    raw.say(stream, headers((":status", "500"), ("proxy-status", 'x; error=proxy_internal_error; details="on fire"')), end=True)


@way
def status_503(raw, stream):
    raw.say(stream, headers((":status", "503")), end=True)


@way
def datagrams_before_the_answer(raw, stream):
    for data in (b"", b"\xc0", b"\x00", b"\x00\x00E" + bytes(19)):
        raw.datagram(data)


class Server(Raw):
    way = None

    def heard(self, event):
        match event:
            case HandshakeCompleted():
                print(self.way.__name__, "connected")
                self.control = self.preface()
                self.request = None
            case StreamDataReceived(stream_id=number) if number % 4 == 0 and self.request is None:
                self.request = number
                self.way(self, number)
            case ConnectionTerminated():
                print(self.way.__name__, "closed", event.error_code)


async def main(host, certificate, key):
    for port, (name, function) in enumerate(WAYS.items(), FIRST_PORT):
        configuration = QuicConfiguration(is_client=False, alpn_protocols=["h3"], max_datagram_frame_size=65536)
        configuration.load_cert_chain(certificate, key)
        protocol = type(name, (Server,), {"way": staticmethod(function)})
        await serve(host, port, configuration=configuration, create_protocol=protocol)
        print(port, name)
    print("up")
    await asyncio.Future()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
