"""A hostile HTTP/3 client: violates one protocol rule per connection, and checks the error with which the server answers.

    hostile_client.py HOST PORT

Prints one line per case and "N cases, M wrong" at the end; the exit code is 1 if any is wrong.
"""

import asyncio
import sys

from aioquic.asyncio.client import connect
from wire import *

# RFC 9114 §8.1, RFC 9204 §6, RFC 9297 §5.2.
DATAGRAM_ERROR = 0x33
STREAM_CREATION_ERROR, CLOSED_CRITICAL_STREAM, FRAME_UNEXPECTED, FRAME_ERROR = 0x103, 0x104, 0x105, 0x106
EXCESSIVE_LOAD, ID_ERROR, SETTINGS_ERROR, MISSING_SETTINGS = 0x107, 0x108, 0x109, 0x10A
REQUEST_INCOMPLETE, MESSAGE_ERROR = 0x10D, 0x10E
DECOMPRESSION_FAILED, ENCODER_STREAM_ERROR, DECODER_STREAM_ERROR = 0x200, 0x201, 0x202

PATH = "/.well-known/masque/ip/*/*/"
MIB = 1 << 20


def connect_ip(path=PATH, *more, protocol="connect-ip"):
    return headers(
        (":method", "CONNECT"),
        (":protocol", protocol),
        (":scheme", "https"),
        (":authority", "mpvpn"),
        (":path", path),
        ("capsule-protocol", "?1"),
        *more,
    )


def capsule(kind, body=b"", length=None):
    """Wraps bytes in a DATA frame."""
    return frame(DATA, frame(kind, body, length))


ANY_ADDRESS = b"\x01\x04\x00\x00\x00\x00\x20"

CASES = []


def case(rule):
    """Registers a case; `rule` is the rule that the case violates."""

    def add(function):
        CASES.append((function.__name__.replace("_", " "), rule, function))
        return function

    return add


class Wrong(Exception):
    pass


async def closed(raw, code):
    await raw.until(lambda: raw.closed is not None, 15)
    if raw.closed != code:
        raise Wrong(f"closed with {hexed(raw.closed)} instead of {hexed(code)}")


async def aborted(raw, stream, code, ended=False):
    """Only that stream must be reset, in both directions unless this side has ended it."""
    seen = raw.stream(stream)
    stopped = None if ended else code
    await raw.until(lambda: raw.closed is not None or (seen.reset, seen.stopped) == (code, stopped))
    if raw.closed is not None or (seen.reset, seen.stopped) != (code, stopped):
        raise Wrong(f"closed {hexed(raw.closed)}, reset {hexed(seen.reset)}, stopped {hexed(seen.stopped)}, "
                    f"instead of {hexed(code)} on the stream")
    await lives(raw)


async def answered(raw, stream, status, **fields):
    seen = raw.stream(stream)
    await raw.until(lambda: seen.answer() is not None or raw.closed is not None)
    answer = seen.answer()
    if answer is None or answer[":status"] != str(status):
        raise Wrong(f"closed {hexed(raw.closed)}, {seen}, instead of {status}")
    for name, value in fields.items():
        name = name.replace("_", "-")
        if value not in answer.get(name, ""):
            raise Wrong(f"{name} is {answer.get(name)!r} instead of {value!r}")
    return seen


async def granted(raw, stream):
    return await answered(raw, stream, 200, capsule_protocol="?1")


async def lives(raw):
    """The connection must still accept requests."""
    await answered(raw, raw.open(connect_ip("/nothing-here/")), 404)


async def has_address(raw, stream):
    """The tunnel on that stream must work: it assigns an address."""
    raw.say(stream, capsule(ADDRESS_REQUEST, ANY_ADDRESS))
    seen = raw.stream(stream)
    if not await raw.until(lambda: bytes([ADDRESS_ASSIGN]) in seen.content()):
        raise Wrong(f"no address: {seen}")


def hexed(code):
    return "None" if code is None else hex(code)


# Settings and streams ----------------------------------------------------------------------------


@case("RFC 9114 §7.2.4: at most one SETTINGS frame")
async def settings_twice(raw):
    raw.preface(USUAL_SETTINGS + USUAL_SETTINGS)
    await closed(raw, FRAME_UNEXPECTED)


@case("RFC 9114 §7.2.4: the same identifier only once")
async def a_setting_twice(raw):
    raw.preface(settings((0x33, 1), (0x33, 1)))
    await closed(raw, SETTINGS_ERROR)


@case("RFC 9297 §2.1.1: H3_DATAGRAM is 0 or 1")
async def datagram_setting_2(raw):
    raw.preface(settings((0x33, 2)))
    await closed(raw, SETTINGS_ERROR)


@case("RFC 9114 §7.2.4.1: settings of HTTP/2 are errors")
async def setting_of_http2(raw):
    raw.preface(settings((0x02, 0)))
    await closed(raw, SETTINGS_ERROR)


@case("RFC 9114 §6.2.1: SETTINGS first")
async def control_stream_without_settings(raw):
    raw.preface(frame(GOAWAY, varint(0)))
    await closed(raw, MISSING_SETTINGS)


@case("RFC 9114 §6.2.1: the control stream stays open")
async def control_stream_ends(raw):
    raw.open(varint(CONTROL) + USUAL_SETTINGS, end=True, one_way=True)
    await closed(raw, CLOSED_CRITICAL_STREAM)


@case("RFC 9114 §6.2.1: one control stream")
async def two_control_streams(raw):
    raw.preface()
    raw.preface()
    await closed(raw, STREAM_CREATION_ERROR)


@case("RFC 9114 §6.2.2: clients do not push")
async def push_stream(raw):
    raw.preface()
    raw.open(varint(PUSH) + varint(0), one_way=True)
    await closed(raw, STREAM_CREATION_ERROR)


@case("RFC 9114 §7.2.7: MAX_PUSH_ID never falls")
async def max_push_id_falls(raw):
    raw.preface(USUAL_SETTINGS + frame(MAX_PUSH_ID, varint(5)) + frame(MAX_PUSH_ID, varint(4)))
    await closed(raw, ID_ERROR)


@case("SETTINGS of any length must not be kept")
async def endless_settings(raw):
    raw.preface(frame(SETTINGS, bytes(1000), length=BIGGEST))
    await closed(raw, EXCESSIVE_LOAD)


@case("RFC 9204 §3.2.2: no entries where the table has no room")
async def insert_into_the_dynamic_table(raw):
    raw.preface()
    raw.open(varint(QPACK_ENCODER) + b"\x41a\x01b", one_way=True)
    await closed(raw, ENCODER_STREAM_ERROR)


@case("RFC 9204 §4.4.1: acknowledgement of a section that was never sent")
async def acknowledge_nothing(raw):
    raw.preface()
    raw.open(varint(QPACK_DECODER) + b"\x84", one_way=True)
    await closed(raw, DECODER_STREAM_ERROR)


@case("RFC 9114 §9, §6.2.3, §7.2.8: what is unknown is skipped")
async def unknown_things_are_ignored(raw):
    raw.preface(settings((0x21, 7), (0x33, 1), (0x1F * 9 + 0x21, 0)) + frame(0x21, b"grease") + frame(0x4242, bytes(5000)))
    raw.open(varint(0x1F * 5 + 0x21) + bytes(3000), one_way=True)
    raw.open(varint(0x54), end=True, one_way=True)
    raw.reset(raw.open(varint(0x1F * 6 + 0x21) + b"x", one_way=True), 0x123)
    stream = raw.open(frame(0x21, b"before") + connect_ip() + frame(0x1F * 8 + 0x21, bytes(2000)))
    await granted(raw, stream)
    raw.say(stream, frame(0xF00, b"between") + capsule(0x1ACE79EC, b"a capsule of a draft"))
    await has_address(raw, stream)


# Requests ----------------------------------------------------------------------------------------


@case("RFC 9114 §4.1: HEADERS come first")
async def data_before_headers(raw):
    raw.preface()
    raw.open(frame(DATA, b"early"))
    await closed(raw, FRAME_UNEXPECTED)


@case("RFC 9114 §7.2.8: frames of HTTP/2 are errors")
async def frame_of_http2(raw):
    raw.preface()
    raw.open(frame(0x06, bytes(8)))
    await closed(raw, FRAME_UNEXPECTED)


@case("RFC 9114 §7.2.4: SETTINGS on the control stream only")
async def settings_on_a_request_stream(raw):
    raw.preface()
    raw.open(USUAL_SETTINGS)
    await closed(raw, FRAME_UNEXPECTED)


@case("RFC 9114 §4.4: only DATA in a tunnel")
async def headers_in_a_tunnel(raw):
    raw.preface()
    stream = raw.open(connect_ip())
    await granted(raw, stream)
    raw.say(stream, headers(("trailer", "1")))
    await closed(raw, FRAME_UNEXPECTED)


@case("RFC 9114 §7.1: a frame does not end with its stream")
async def truncated_frame(raw):
    raw.preface()
    raw.open(frame(HEADERS, b"\x00\x00", length=100), end=True)
    await closed(raw, FRAME_ERROR)


@case("RFC 9204 §2.2: no entries of a table that was never filled")
async def field_of_the_dynamic_table(raw):
    raw.preface()
    raw.open(frame(HEADERS, b"\x02\x00\x80"))
    await closed(raw, DECOMPRESSION_FAILED)


@case("RFC 9114 §4.4: CONNECT has neither :path nor :scheme")
async def connect_with_a_path(raw):
    raw.preface()
    stream = raw.open(headers((":method", "CONNECT"), (":authority", "198.51.100.2:80"), (":path", "/")))
    await aborted(raw, stream, MESSAGE_ERROR)


@case("RFC 9114 §4.4: CONNECT has :authority")
async def connect_without_authority(raw):
    raw.preface()
    await aborted(raw, raw.open(headers((":method", "CONNECT"))), MESSAGE_ERROR)


@case("RFC 9110 §9.3.6: an empty or invalid port is rejected")
async def connect_without_a_port(raw):
    raw.preface()
    for authority in ("198.51.100.2", "198.51.100.2:", "198.51.100.2:0", "198.51.100.2:65536"):
        stream = raw.open(headers((":method", "CONNECT"), (":authority", authority)))
        await answered(raw, stream, 400, proxy_status="proxy")
    await lives(raw)


@case("RFC 9114 §4.2: names in lower case, no fields about connections, pseudo-fields first and known")
async def malformed_requests(raw):
    raw.preface()
    for field in (("Upper", "case"), ("connection", "close"), ("te", "gzip"), ("a", "b\r\nc"), (":unknown", "x"), (":path", PATH)):
        await aborted(raw, raw.open(connect_ip(PATH, field)), MESSAGE_ERROR)


@case("RFC 9114 §4.1: a request has a header section")
async def end_without_a_request(raw):
    raw.preface()
    await aborted(raw, raw.open(b"", end=True), REQUEST_INCOMPLETE, ended=True)


@case("docs/protocol.md: a header section has at most 16384 bytes")
async def oversize_headers(raw):
    raw.preface()
    await aborted(raw, raw.open(connect_ip(PATH, ("x", "y" * 17000))), EXCESSIVE_LOAD)
    # Exceeded by the names alone: each field counts 32 bytes more than its length (RFC 9114 §4.2.2).
    await aborted(raw, raw.open(connect_ip(PATH, *[(f"n{number}", "") for number in range(500)])), EXCESSIVE_LOAD)


@case("a header section without end must not be kept")
async def endless_headers(raw):
    raw.preface()
    stream = raw.open(frame(HEADERS, bytes(1000), length=BIGGEST))
    await aborted(raw, stream, EXCESSIVE_LOAD)


@case("docs/protocol.md: 1 MiB of incomplete header sections a connection")
async def endless_headers_on_many_streams(raw):
    # A stranger may have few streams only.
    await tunnel(raw)
    for _ in range(80):
        raw.open(frame(HEADERS, b"\x00\x00" + bytes(15000), length=16000))
    await closed(raw, EXCESSIVE_LOAD)


@case("RFC 9114 §9: a frame of unknown type is skipped, however long")
async def endless_unknown_frame(raw):
    raw.preface()
    stream = raw.open(varint(0x21) + varint(BIGGEST) + bytes(4 * MIB))
    await raw.sent(stream)
    await lives(raw)


# CONNECT-IP --------------------------------------------------------------------------------------


@case("RFC 9484 §4.6: a bad target or protocol is refused")
async def bad_template_variables(raw):
    raw.preface()
    for variables in ("*/256", "*/-1", "*/tcp", "10.0.0.1%2F8/*", "10.0.0.0%2F33/*", "a%20b/*", "%00/*"):
        stream = raw.open(connect_ip(f"/.well-known/masque/ip/{variables}/"))
        await answered(raw, stream, 400, proxy_status="proxy")
    await lives(raw)


@case("RFC 9110 §15.5.5: no such resource")
async def other_paths(raw):
    raw.preface()
    for path in ("/", "/.well-known/masque/ip/", "/.well-known/masque/ip/*/*", "/.well-known/masque/ip/*/*/more"):
        await answered(raw, raw.open(connect_ip(path)), 404)
    await lives(raw)


@case("RFC 9220 §3: an unknown :protocol is 501")
async def unknown_protocol(raw):
    raw.preface()
    await answered(raw, raw.open(connect_ip(protocol="websocket")), 501)
    await lives(raw)


@case("docs/protocol.md: whoever wants no tunnel sees a site, which has nothing")
async def another_method(raw):
    raw.preface()
    fields = ((":method", "GET"), (":scheme", "https"), (":authority", "mpvpn"), (":path", PATH))
    await answered(raw, raw.open(headers(*fields), end=True), 404)
    await lives(raw)


@case("RFC 9297 §3.2: no content fields beside capsules")
async def content_fields(raw):
    raw.preface()
    for field in (("content-length", "0"), ("content-type", "text/plain")):
        await answered(raw, raw.open(connect_ip(PATH, field)), 400)
    await lives(raw)


@case("docs/protocol.md: a client without HTTP datagrams gets 400")
async def no_datagrams(raw):
    raw.preface(settings((0x08, 1)))
    await answered(raw, raw.open(connect_ip()), 400)


async def tunnel(raw):
    raw.preface()
    stream = raw.open(connect_ip())
    await granted(raw, stream)
    await has_address(raw, stream)
    return stream


@case("RFC 9297 §2: a datagram for an unknown stream or context is dropped")
async def unknown_datagrams(raw):
    stream = await tunnel(raw)
    quarter = varint(stream // 4)
    for number in (1, 1000, (1 << 60) - 1):
        raw.datagram(varint(number) + b"\x00E" + bytes(60))
    for context in (1, 2, 4, 1000, BIGGEST):
        raw.datagram(quarter + varint(context) + b"E" + bytes(60))
    # Bytes that are no IP packet, and a packet whose length field is too large.
    for packet in (b"", b"\x00", b"\xff" * 50, b"E\x00\x05\xdc" + bytes(16)):
        raw.datagram(quarter + b"\x00" + packet)
    await has_address(raw, stream)
    await lives(raw)


@case("RFC 9297 §2.1: a quarter stream ID is at most 2^60 - 1")
async def quarter_stream_id_too_large(raw):
    await tunnel(raw)
    raw.datagram(varint(1 << 60) + b"\x00")
    await closed(raw, DATAGRAM_ERROR)


@case("RFC 9297 §2.1: a datagram has a quarter stream ID")
async def empty_datagram(raw):
    await tunnel(raw)
    raw.datagram(b"\xc0")
    await closed(raw, DATAGRAM_ERROR)


@case("RFC 9297 §3.3: a capsule does not end with its stream")
async def truncated_capsule(raw):
    stream = await tunnel(raw)
    raw.say(stream, frame(DATA, frame(ADDRESS_REQUEST, ANY_ADDRESS)[:-2]), end=True)
    await aborted(raw, stream, MESSAGE_ERROR, ended=True)


@case("RFC 9297 §3.3: nor inside its type or length")
async def truncated_capsule_header(raw):
    stream = await tunnel(raw)
    raw.say(stream, frame(DATA, b"\x40"), end=True)
    await aborted(raw, stream, MESSAGE_ERROR, ended=True)


@case("RFC 9484 §4.7: malformed capsules abort the stream")
async def malformed_capsules(raw):
    raw.preface()
    lists = {
        "no request": capsule(ADDRESS_REQUEST),
        "request ID 0": capsule(ADDRESS_REQUEST, b"\x00" + ANY_ADDRESS[1:]),
        "the same ID twice": capsule(ADDRESS_REQUEST, ANY_ADDRESS * 2),
        "IP version 5": capsule(ADDRESS_REQUEST, b"\x01\x05" + ANY_ADDRESS[2:]),
        "prefix length 33": capsule(ADDRESS_REQUEST, ANY_ADDRESS[:-1] + b"\x21"),
        "bits after the prefix": capsule(ADDRESS_REQUEST, b"\x01\x04\x0a\x00\x00\x01\x08"),
        "cut short": capsule(ADDRESS_REQUEST, ANY_ADDRESS[:-1]),
        "range backwards": capsule(ROUTE_ADVERTISEMENT, b"\x04\x0a\x00\x00\x02\x0a\x00\x00\x01\x00"),
        "ranges out of order": capsule(
            ROUTE_ADVERTISEMENT, b"\x04\x0a\x00\x00\x02\x0a\x00\x00\x03\x00\x04\x0a\x00\x00\x01\x0a\x00\x00\x01\x00"
        ),
    }
    for what, bytes_ in lists.items():
        stream = raw.open(connect_ip())
        await granted(raw, stream)
        raw.say(stream, bytes_)
        try:
            await aborted(raw, stream, MESSAGE_ERROR)
        except Wrong as wrong:
            raise Wrong(f"{what}: {wrong}") from wrong


@case("RFC 9297 §3.3: a known capsule of 2^62 - 1 bytes is not waited for")
async def endless_capsule(raw):
    stream = await tunnel(raw)
    raw.say(stream, capsule(ADDRESS_REQUEST, bytes(1000), length=BIGGEST))
    await aborted(raw, stream, EXCESSIVE_LOAD)


@case("RFC 9297 §3.2: an unknown capsule is skipped, however long")
async def endless_unknown_capsule(raw):
    stream = await tunnel(raw)
    raw.say(stream, capsule(0x4242, b"", length=BIGGEST))
    for _ in range(64):
        raw.say(stream, frame(DATA, bytes(MIB // 16)))
    await raw.sent(stream)
    await lives(raw)


@case("docs/protocol.md: one tunnel a connection")
async def second_tunnel(raw):
    stream = await tunnel(raw)
    await answered(raw, raw.open(connect_ip()), 409)
    await has_address(raw, stream)


async def play(host, port, one, turn):
    name, rule, function = one
    async with turn:
        verdict = "right"
        try:
            async with asyncio.timeout(20), connect(
                host, port, configuration=client_configuration(), create_protocol=Raw
            ) as raw:
                await function(raw)
        except Wrong as wrong:
            verdict = f"WRONG: {wrong}  ({rule})"
        except (TimeoutError, ConnectionError) as error:
            verdict = f"WRONG: {error!r}  ({rule})"
        print(f"{name}: {verdict}")
        return verdict == "right"


async def main(host, port, wanted):
    turn = asyncio.Semaphore(6)
    chosen = [one for one in CASES if not wanted or one[0] in wanted]
    verdicts = await asyncio.gather(*(play(host, port, one, turn) for one in chosen))
    print(f"{len(verdicts)} cases, {verdicts.count(False)} wrong")
    return int(not all(verdicts))


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
