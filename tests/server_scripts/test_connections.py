"""Connections of a real server in this process: they end, they do not fill up, and their number is limited."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import uvicorn
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from server_scripts import connections
from server_scripts.connections import HTTPConnection, WebSocketConnection

HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
PING = struct.pack("!BB4x", 0x89, 0x80 | 125) + b"x" * 125  # masked with zeros

Application = Callable[[Any, Any, Any], Any]


class Listening:
    """A uvicorn server with our connections, in a thread."""

    def __init__(self, application: Application, **settings: Any) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        settings = {"log_config": None, "log_level": "warning", "lifespan": "off", **settings}
        config = uvicorn.Config(application, http=HTTPConnection, ws=WebSocketConnection, **settings)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self.thread.start()

    @property
    def url(self) -> str:
        """The address for a WebSocket."""
        return "ws://{}:{}/ws".format(*self.address)

    def send(self, data: bytes = b"", *, receive_buffer: int | None = None) -> socket.socket:
        """Connect and send bytes."""
        client = socket.socket()
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect(self.address)
        client.sendall(data)
        return client

    def shake_hands(self, *, receive_buffer: int | None = None) -> socket.socket:
        """Connect and open a WebSocket."""
        client = self.send(HANDSHAKE + b"\r\n", receive_buffer=receive_buffer)
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += client.recv(1)
        assert answer.startswith(b"HTTP/1.1 101 ")
        return client

    def stop(self) -> None:
        """End the server, whatever is connected."""
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[..., Listening]]:
    """Start servers that end with the test."""
    started: list[Listening] = []

    def serve(application: Application, **settings: Any) -> Listening:
        started.append(Listening(application, **settings))
        return started[-1]

    yield serve
    for server in started:
        server.stop()


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """Answer an HTTP request once it is whole; accept a WebSocket and send back what comes."""
    if scope["type"] == "http":
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})
        return
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})


def received(client: socket.socket) -> bytes:
    """All that comes until the server ends the connection."""
    data = b""
    with closing(client):
        try:
            while chunk := client.recv(2**16):
                data += chunk
        except ConnectionResetError:
            pass  # an end, too: something that we sent was not read
    return data


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged as an error."""
    return [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET / HT",
        b"GET / HTTP/1.1\r\nHost: here\r\n",
        b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 9\r\n\r\n1",
    ],
    ids=["nothing", "a line", "headers", "a body"],
)
def test_a_request_that_does_not_arrive_is_not_waited_for(
    begun: bytes, serve: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that connects and says nothing, or goes on for ever, loses its connection, without an answer."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.05)
    assert received(serve(hello).send(begun)) == b""


def test_an_answer_may_take_longer(serve: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has arrived is answered after its time, and its connection then closed."""
    late = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await late.wait()
        await hello(scope, receive, send)

    expire = HTTPConnection._expire

    def expire_and_go_on(connection: HTTPConnection) -> None:
        expire(connection)
        late.set()

    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.05)
    monkeypatch.setattr(HTTPConnection, "_expire", expire_and_go_on)
    assert received(serve(application).send(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")).endswith(b"hello")


def test_an_answer_has_its_time_too(serve: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.05)
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 0.05)
    assert received(serve(application).send(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")) == b""


def test_a_websocket_is_no_request(serve: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays open when the time for a request is over, which a second connection shows by its end."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.05)
    server = serve(hello)
    with connect(server.url, proxy=None) as client:
        assert received(server.send()) == b""
        client.send("still here")
        assert client.recv() == "still here"


def test_one_connection_too_many_is_closed_at_once(serve: Callable[..., Listening]) -> None:
    """Those that are there are served; a place that becomes free is given to the next."""
    server = serve(hello, limit_concurrency=2)
    with connect(server.url, proxy=None) as client, server.send() as waiting:
        assert received(server.send()) == b""
        client.send("first")
        assert client.recv() == "first"
        waiting.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        assert b" 503 " in received(waiting)
    with connect(server.url, proxy=None) as client:
        client.send("next")
        assert client.recv() == "next"


@pytest.mark.parametrize(
    ("headers", "answer"),
    [
        (b"x: y\r\n" * 150, b" 431 "),
        (b"x: " + b"y" * 9000 + b"\r\n", b" 431 "),
        (b"Content-Length: 4\r\n", b""),
        (b"Transfer-Encoding: chunked\r\n", b""),
    ],
    ids=["many headers", "a long header", "a body", "chunks"],
)
def test_a_broken_handshake_ends_the_connection(headers: bytes, answer: bytes, serve: Callable[..., Listening]) -> None:
    """The client is not left waiting for an answer that never comes."""
    assert answer in received(serve(hello).send(HANDSHAKE + headers + b"\r\n"))


@pytest.mark.parametrize("method", [b"POST", b"HEAD"])
def test_a_request_that_goes_wrong_half_way_is_refused_only(
    method: bytes, serve: Callable[..., Listening], caplog: pytest.LogCaptureFixture
) -> None:
    """It gets no answer besides the refusal, and no error is logged."""
    begun = method + b" / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"
    answer = received(serve(hello).send(begun + b"no chunk\r\n"))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"hello" not in answer
    assert errors(caplog) == []


def test_frames_that_come_too_early_and_are_wrong_end_the_connection(
    serve: Callable[..., Listening], caplog: pytest.LogCaptureFixture
) -> None:
    """The handshake is not answered yet when the second piece of what the client sends arrives."""
    asked = threading.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        asked.set()
        assert (await receive())["type"] == "websocket.disconnect"
        await send({"type": "websocket.accept"})

    client = serve(application).send(HANDSHAKE + b"\r\n")
    assert asked.wait(60)
    client.sendall(b"\xff\xff")
    assert received(client) == b""
    assert errors(caplog) == []


def test_what_is_sent_to_a_client_that_is_gone_is_dropped(
    serve: Callable[..., Listening], caplog: pytest.LogCaptureFixture
) -> None:
    """The application goes on, and learns of it when it next listens."""
    received_types: list[str] = []
    ended = threading.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        for _ in range(2):
            received_types.append((await receive())["type"])
            await send({"type": "websocket.send", "text": "Are you there?"})
        ended.set()

    with serve(application).shake_hands() as client:
        client.sendall(struct.pack("!BB4xH", 0x88, 0x82, 1000))
    assert ended.wait(60)
    assert received_types == ["websocket.disconnect"] * 2
    assert errors(caplog) == []


def test_a_refused_handshake_is_not_logged_as_an_error(
    serve: Callable[..., Listening], caplog: pytest.LogCaptureFixture
) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.http.response.start", "status": 401, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b"no"})

    assert b" 401 " in received(serve(application).send(HANDSHAKE + b"\r\n"))
    assert errors(caplog) == []


@pytest.mark.parametrize("text", [b"\xff", b"caf\xc3", b"\xed\xa0\x80"])
def test_text_that_is_no_utf_8_ends_its_session_and_logs_nothing(
    text: bytes, serve: Callable[..., Listening], caplog: pytest.LogCaptureFixture
) -> None:
    with connect(serve(hello).url, proxy=None) as client:
        client.send(text, text=True)
        with pytest.raises(ConnectionClosed) as closed:
            client.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1007
    assert caplog.records == []


def test_pings_of_a_client_that_reads_no_answers_do_not_pile_up(
    serve: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stops reading, and drops a client that goes on not to read: 64 MiB of pings are never taken."""
    unread = []
    handle_ping = WebSocketConnection.handle_ping

    def measure(connection: WebSocketConnection) -> None:
        handle_ping(connection)
        unread.append(connection.transport.get_write_buffer_size())

    monkeypatch.setattr(WebSocketConnection, "handle_ping", measure)
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.2)
    with serve(hello).shake_hands() as client, pytest.raises(ConnectionError):
        client.sendall(PING * (2**26 // len(PING)))
    assert max(unread) < 2**20


def test_a_client_that_reads_again_is_heard_again(serve: Callable[..., Listening]) -> None:
    """8 MiB of pings that are answered while the client reads slowly are all answered."""
    number = 2**23 // len(PING)
    with serve(hello).shake_hands(receive_buffer=2**14) as client:
        writer = threading.Thread(target=client.sendall, args=(PING * number,))
        writer.start()
        for _ in range(number):
            assert client.recv(127, socket.MSG_WAITALL) == b"\x8a\x7d" + b"x" * 125
        writer.join()


def test_a_client_that_is_gone_is_dropped_though_it_has_not_read_all(
    serve: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a ping without an answer the session ends also when a little is left that cannot be sent."""
    ended = threading.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        (connection,) = server.server.server_state.connections
        while not connection.transport.get_write_buffer_size():
            await send({"type": "websocket.send", "bytes": b"x" * 1024})
        assert (await receive())["type"] == "websocket.disconnect"
        ended.set()

    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.05)
    server = serve(application, ws_ping_interval=0.05, ws_ping_timeout=0.05)
    with server.shake_hands(receive_buffer=2**12):
        assert ended.wait(60)


def test_headers_are_not_logged(serve: Callable[..., Listening], caplog: pytest.LogCaptureFixture) -> None:
    """At no level: the token is one of them."""
    server = serve(hello, log_level="debug")
    with connect(server.url, proxy=None, additional_headers={"Authorization": "Bearer secret-of-this-test"}) as client:
        client.send("hello")
        client.recv()
    assert caplog.records
    assert "secret-of-this-test" not in caplog.text
