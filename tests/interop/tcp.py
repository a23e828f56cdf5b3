"""TCP connections over CONNECT of HTTP/3, by an unmodified aioquic.

    tcp.py HOST PORT STORY WORDS...

The stories are the functions below; the last line printed is "done".
"""

import asyncio
import hashlib
import os
import sys

from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import H3Connection, Setting
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic.events import ConnectionTerminated, StopSendingReceived, StreamReset

from wire import client_configuration

CONNECT_ERROR, REQUEST_CANCELLED = 0x10F, 0x10C
PATIENCE = 10


class WithDatagrams(H3Connection):
    def _get_local_settings(self):
        return super()._get_local_settings() | {Setting.H3_DATAGRAM: 1}


class Tcp(asyncio.Queue):
    """One connection: what comes is in the queue; bytes, b"" for the end, or an exception."""

    def __init__(self, client, authority, fields):
        super().__init__()
        self.client = client
        self.number = client._quic.get_next_available_stream_id()
        self.answer = asyncio.get_running_loop().create_future()
        client.connections[self.number] = self
        client.http.send_headers(
            self.number,
            [(b":method", b"CONNECT"), (b":authority", authority.encode())]
            + [(name.encode(), value.encode()) for name, value in fields.items()],
        )
        client.transmit()

    async def status(self):
        fields = await asyncio.wait_for(asyncio.shield(self.answer), PATIENCE)
        return fields[":status"], fields

    def send(self, data, end=False):
        self.client.http.send_data(self.number, data, end)
        self.client.transmit()

    async def receive(self):
        data = await asyncio.wait_for(self.get(), PATIENCE)
        if isinstance(data, Exception):
            raise data
        return data

    async def read(self, length):
        """Reads exactly this many bytes."""
        data = b""
        while len(data) < length:
            more = await self.receive()
            assert more, f"ended after {len(data)} of {length} bytes"
            data += more
        return data

    async def delivered(self):
        """Waits until the server has all that was sent, and knows how it ended: a connection that is closed waits for
        nothing."""
        async with asyncio.timeout(PATIENCE):
            while (stream := self.client._quic._streams.get(self.number)) and not stream.sender.is_finished:
                await asyncio.sleep(0.02)

    async def read_to_end(self):
        data = b""
        while more := await self.receive():
            data += more
        return data


class Reset(Exception):
    """The stream was reset; has its error code."""


class Client(QuicConnectionProtocol):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.http = WithDatagrams(self._quic)
        self.connections = {}

    def tcp(self, authority, **fields):
        return Tcp(self, authority, {name.replace("_", "-"): value for name, value in fields.items()})

    def quic_event_received(self, event):
        if isinstance(event, ConnectionTerminated):
            for tcp in self.connections.values():
                tcp.put_nowait(ConnectionError(f"closed with {event.error_code:#x} {event.reason_phrase}"))
        if isinstance(event, StreamReset):
            self.connections[event.stream_id].put_nowait(Reset(event.error_code))
        for event in self.http.handle_event(event):
            tcp = self.connections.get(getattr(event, "stream_id", None))
            match event:
                case HeadersReceived() if tcp and not tcp.answer.done():
                    tcp.answer.set_result({name.decode(): value.decode() for name, value in event.headers})
                case DataReceived() if tcp and event.data:
                    tcp.put_nowait(event.data)
            if tcp and event.stream_ended:
                tcp.put_nowait(b"")


async def opened(client, authority, **fields):
    tcp = client.tcp(authority, **fields)
    status, fields = await tcp.status()
    assert status == "200", fields
    # "A server MUST NOT send any Transfer-Encoding or Content-Length header fields in a 2xx" (RFC 9110 §9.3.6).
    assert not {"transfer-encoding", "content-length"} & set(fields), fields
    return tcp


async def both_ways(client, echo):
    """Echo: data sent in turns comes back, and the rest after this side has ended."""
    tcp = await opened(client, echo)
    for size in (1, 100, 10_000, 100_000):
        data = os.urandom(size)
        tcp.send(data)
        assert await tcp.read(size) == data, size
    last = os.urandom(300_000)
    tcp.send(last, end=True)
    assert await tcp.read_to_end() == last


async def far_end_first(client, greeter):
    """The far end sends data and ends its direction, and still receives; the Rust test checks what it received."""
    tcp = await opened(client, greeter)
    assert await tcp.read_to_end() == b"greeting"
    tcp.send(b"late ")
    await asyncio.sleep(0.3)
    tcp.send(b"answer", end=True)
    await tcp.delivered()


async def far_end_breaks(client, breaker):
    """The far end resets the TCP connection: the stream must be reset."""
    tcp = await opened(client, breaker)
    tcp.send(b"break it")
    try:
        await tcp.read_to_end()
        raise AssertionError("the end looked clean")
    except Reset as reset:
        assert reset.args[0] == CONNECT_ERROR, reset


async def breaks(client, far):
    """This end resets the stream: the TCP connection must be reset, which the Rust test checks."""
    tcp = await opened(client, far)
    tcp.send(b"before")
    assert await tcp.read(6) == b"before"
    client._quic.reset_stream(tcp.number, REQUEST_CANCELLED)
    client._quic.stop_stream(tcp.number, REQUEST_CANCELLED)
    client.transmit()
    await tcp.delivered()


async def refusals(client, *pairs):
    """Checks refusals: pairs of authority and expected answer (status, or status/error)."""
    for authority, wanted in zip(pairs[::2], pairs[1::2]):
        status, fields = await client.tcp(authority).status()
        code, _, error = wanted.partition("/")
        said = fields.get("proxy-status", "")
        assert status == code, f"{authority}: {fields}"
        assert not error or f"error={error}" in said, f"{authority}: {fields}"
        print(authority, status, said)


async def credentials(client, echo, token):
    """Wrong credentials are refused, right ones accepted, in both fields (RFC 9110 §11.7); without any there is a web site."""
    status, answer = await client.tcp(echo).status()
    assert status == "405" and "proxy-authenticate" not in answer, answer
    wrong = "Bearer 0123456789abcdef0123456789abcdef"
    for fields in ({"proxy_authorization": wrong}, {"authorization": wrong}, {"proxy_authorization": "Basic eDp5"}):
        status, answer = await client.tcp(echo, **fields).status()
        assert status in ("401", "407"), answer
        # Each response must have a challenge (RFC 9110 §15.5.2, §15.5.8).
        challenge = {"401": "www-authenticate", "407": "proxy-authenticate"}[status]
        assert answer.get(challenge, "").startswith("Bearer"), answer
    for field in ("proxy_authorization", "authorization"):
        tcp = await opened(client, echo, **{field: f"Bearer {token}"})
        tcp.send(b"hello", end=True)
        assert await tcp.read_to_end() == b"hello"


async def much(client, echo, mebibytes):
    """This many MiB are echoed unchanged, with at most 2 MiB in flight."""
    total, window, piece = int(mebibytes) << 20, 2 << 20, 1 << 16
    block = os.urandom(piece)
    tcp = await opened(client, echo)
    sent, received = hashlib.sha256(), hashlib.sha256()
    out = back = 0
    while back < total:
        while out < total and out - back < window:
            # Each piece starts with its number, so that swapped pieces are detected.
            data = out.to_bytes(8, "big") + block[8:]
            sent.update(data)
            out += piece
            tcp.send(data, end=out == total)
        data = await tcp.receive()
        assert data, f"ended after {back} of {total} bytes"
        received.update(data)
        back += len(data)
    assert back == total and sent.digest() == received.digest(), back


async def main(host, port, story, *words):
    configuration = client_configuration()
    # The default of 1 MiB per stream would limit the rate of the echo.
    configuration.max_data = configuration.max_stream_data = 8 << 20
    async with connect(host, int(port), configuration=configuration, create_protocol=Client) as client:
        await STORIES[story](client, *words)
    print("done")


STORIES = {
    story.__name__: story
    for story in (both_ways, far_end_first, far_end_breaks, breaks, refusals, credentials, much)
}

if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
