"""The map of the faults: each way in which the wire can fail, the one error that it becomes, what is left of the game.

The page docs/explanation/what-the-client-promises.md shows the same rows.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import logging
import os
import re
import socket
import ssl
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import trustme

from openenv_client import (
    ConfigurationError,
    ConnectError,
    EnvironmentFailedError,
    KeepaliveError,
    MessageTooBigError,
    OpenEnvError,
    OpenEnvWrapper,
    ProtocolError,
    RequestError,
    ServerFullError,
    SessionAbortedError,
    SessionFailedError,
    SessionLost,
    StepTimeoutError,
)
from openenv_client.protocol import public_url, websocket_url
from openenv_client.testing import Fault, MockEnvServer
from tests.openenv_client import raw_server
from tests.openenv_client.raw_server import Peer, RawServer, closing, frame, observation

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "what-the-client-promises.md"
SECRET = "hunter2"  # looked for in everything that is said


# How to provoke a fault


@dataclass(frozen=True)
class Situation:
    """A server at which something goes wrong, and what goes on there while the client meets it."""

    base_url: str
    during: Callable[[OpenEnvWrapper], AbstractContextManager[object]] = contextlib.nullcontext
    server: MockEnvServer | None = None


@dataclass(frozen=True)
class Way:
    """A way to provoke a fault.

    Args:
        make: Starts the server.
        data: What the error must carry.
        settings: Of the wrapper.
        action: Of the step that meets the fault.
    """

    make: Callable[[pytest.MonkeyPatch], AbstractContextManager[Situation]]
    data: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    action: Any = field(default_factory=lambda: {"move": 2})


def mock(*faults: Fault, data: Mapping[str, Any] | None = None, action: Any = None, **settings: Any) -> Way:
    @contextlib.contextmanager
    def make(_: pytest.MonkeyPatch) -> Iterator[Situation]:
        with MockEnvServer(faults=faults, max_message_size=2000) as server:

            @contextlib.contextmanager
            def during(_: OpenEnvWrapper) -> Iterator[None]:
                yield
                server.release()

            yield Situation(server.base_url, during, server)

    return Way(make, data or {}, settings, {"move": 2} if action is None else action)


def raw(
    script: Callable[[Peer], object],
    *,
    tls: Callable[[pytest.MonkeyPatch], ssl.SSLContext] | None = None,
    plain: bool = False,
    data: Mapping[str, Any] | None = None,
    action: Any = None,
    **settings: Any,
) -> Way:
    @contextlib.contextmanager
    def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Situation]:
        with RawServer(script, tls=None if tls is None else tls(monkeypatch), plain=plain) as server:
            yield Situation(server.base_url)

    return Way(make, data or {}, settings, {"move": 2} if action is None else action)


def send(data: bytes) -> Callable[[Peer], None]:
    """Send it and then nothing more."""

    def act(peer: Peer) -> None:
        peer.send(data)
        peer.drain()

    return act


def answer(data: bytes, *, stay: bool = True) -> Callable[[Peer], None]:
    """Answer the handshake with something else."""

    def act(peer: Peer) -> None:
        peer.read_head()
        peer.send(data)
        if stay:
            peer.drain()

    return act


def http(status: int, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} As Said", "Content-Length: 0", *headers, "", ""]).encode()


def trickle(beginning: bytes, morsel: bytes) -> Callable[[Peer], None]:
    """Send something that never ends, a little at a time."""

    def act(peer: Peer) -> None:
        peer.send(beginning)
        while not peer.stopping.wait(0.01):
            peer.send(morsel)

    return act


def at_second_step(act: Callable[[Peer], object]) -> Callable[[Peer], None]:
    """A reset and a step are answered as they should be; this happens to the next step."""

    def script(peer: Peer) -> None:
        peer.play(steps=1)
        peer.read_request()
        act(peer)

    return script


def stop_reading(peer: Peer) -> None:
    peer.play(steps=1)
    peer.hold()


def stop_reading_later(peer: Peer) -> None:
    peer.play(steps=1)
    peer.answer_ping()
    peer.hold()


def reply_with(data: bytes | str) -> Way:
    """The second step is answered with these bytes, or with this text; then comes a reply as it should be."""
    data = frame(data) if isinstance(data, str) else data
    return raw(at_second_step(send(data + frame(observation(late=True)))))


def reply_data(**data: Any) -> Way:
    return reply_with(json.dumps({"type": "observation", "data": data}))


def error_reply(code: str | None, **data: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": "boom", "code": code, **data}})


def refused_session(code: str, **data: Any) -> Callable[[Peer], None]:
    """What an OpenEnv server does that cannot give a session: it says so unasked, and closes."""

    def act(peer: Peer) -> None:
        peer.shake_hands()
        send(frame(error_reply(code, **data)) + closing(1000))(peer)

    return act


def lookup(failure: Callable[[threading.Event], object]) -> Way:
    """The first look-up of the host's name fails; the failure is given an event of the end of the test."""

    @contextlib.contextmanager
    def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Situation]:
        real, failures, over = socket.getaddrinfo, iter([failure]), threading.Event()

        def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
            for fail in failures:
                fail(over)
            return real("127.0.0.1" if host == "env.localhost" else host, *args, **kwargs)

        with MockEnvServer() as server:
            monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
            yield Situation(server.base_url.replace("127.0.0.1", "env.localhost"))
            over.set()

    return Way(make, settings={"connect_timeout": 0.5})


def unresolved(code: int) -> Way:
    def fail(_: threading.Event) -> None:
        raise socket.gaierror(code, "as the test says")

    return lookup(fail)


def nothing_listens() -> Way:
    @contextlib.contextmanager
    def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Situation]:
        with MockEnvServer() as server:
            server.stop()

            def come_up(failures: int, **_: float) -> float:
                server.start()
                return 0.0

            monkeypatch.setattr("openenv_client.wrapper.retry_delay", come_up)
            yield Situation(server.base_url)

    return Way(make)


def tunnel(peer: Peer) -> None:
    """Be a proxy, with the environment server behind it."""
    peer.read_head()
    peer.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
    peer.play()


def through_proxy(script: Callable[[Peer], object] | str, **data: Any) -> Way:
    """A host that is reached through a proxy that does this, or whose address is this."""

    @contextlib.contextmanager
    def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Situation]:
        for name in ("no_proxy", "NO_PROXY", "ws_proxy", "socks_proxy", "all_proxy", "https_proxy", "HTTP_PROXY"):
            monkeypatch.delenv(name, raising=False)
        with RawServer(tunnel if isinstance(script, str) else script, then=tunnel) as server:
            port = server.base_url.rpartition(":")[2]
            address = script if isinstance(script, str) else f"http://user:{SECRET}@127.0.0.1:{port}"
            monkeypatch.setenv("http_proxy", address)
            yield Situation("http://env.example:8000")

    return Way(make, data)


def proxy_comes_late() -> Way:
    way = through_proxy(tunnel)

    @contextlib.contextmanager
    def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Situation]:
        with way.make(monkeypatch) as situation:
            address = os.environ["http_proxy"]
            monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

            def come_up(failures: int, **_: float) -> float:
                monkeypatch.setenv("http_proxy", address)
                return 0.0

            monkeypatch.setattr("openenv_client.wrapper.retry_delay", come_up)
            yield situation

    return Way(make)


def socks_without_its_package() -> Way:
    way = through_proxy("socks5h://127.0.0.1:9")

    @contextlib.contextmanager
    def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Situation]:
        def connect(*args: object, **kwargs: object) -> None:
            raise ImportError("connecting through a SOCKS proxy requires python-socks")

        monkeypatch.setattr("websockets.sync.client.connect_socks_proxy", connect)
        with way.make(monkeypatch) as situation:
            yield situation

    return Way(make)


@functools.cache
def authority() -> trustme.CA:
    return trustme.CA()


def certificate(
    name: str = "127.0.0.1", *, trusted: bool = True, expired: bool = False
) -> Callable[[pytest.MonkeyPatch], ssl.SSLContext]:
    """A server's TLS, with a certificate of an authority that the client trusts or not."""

    def context(monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
        end = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc) if expired else None
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority().issue_cert(name, not_after=end).configure_cert(server)
        if trusted:
            make_default = ssl.create_default_context

            def trusting() -> ssl.SSLContext:
                client = make_default()
                authority().configure_trust(client)
                return client

            monkeypatch.setattr(ssl, "create_default_context", trusting)
        return server

    return context


def frozen_server() -> Way:
    @contextlib.contextmanager
    def make(_: pytest.MonkeyPatch) -> Iterator[Situation]:
        with MockEnvServer() as server:
            yield Situation(server.base_url, lambda _: server.frozen(), server)

    return Way(make, settings={"ping_interval": 0.02, "ping_timeout": 0.05})


def unasked_message() -> Way:
    """A second answer to the first step, which has arrived when the second is to be sent."""
    return mock(Fault("extra", "step", observation(stale=True)))


def aborted() -> Way:
    way = mock(Fault("delay", "step", nth=2))

    @contextlib.contextmanager
    def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Situation]:
        with way.make(monkeypatch) as situation:
            server = situation.server
            assert server is not None

            @contextlib.contextmanager
            def during(env: OpenEnvWrapper) -> Iterator[None]:
                def abort() -> None:
                    server.wait_until(lambda: [event.kind for event in server.received].count("step") == 2)
                    env.abort()

                thread = threading.Thread(target=abort)
                thread.start()
                yield
                thread.join()
                server.release()

            yield Situation(situation.base_url, during, server)

    return Way(make)


def on_second_step(kind: str, value: Any = None, *, data: Mapping[str, Any] | None = None, **settings: Any) -> Way:
    return mock(Fault(kind, "step", value, nth=2), data=data, **settings)  # type: ignore[arg-type]


def closes(code: int, reason: str = "") -> Way:
    return on_second_step("close", (code, reason), data={"close_code": code})


# The map


@dataclass(frozen=True)
class Row:
    """A fault and what it becomes.

    Args:
        name: What goes wrong.
        error: The class of the error, and nothing else.
        outcome: Before an episode: "tried again" or "at once" (it fails). In an episode with a seed: "rebuilt" (the
            caller notices nothing), "lost", or "goes on" (in the same session).
        game: "none", "untouched", or "unknown" (it may have moved).
        ways: How to provoke it.
        says: What the message must say.
        data: What the error must carry, whichever way it was provoked.
    """

    name: str
    error: type[OpenEnvError]
    outcome: Literal["tried again", "at once", "rebuilt", "lost", "goes on"]
    game: Literal["none", "untouched", "unknown"]
    ways: Mapping[str, Way]
    says: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


BEFORE_AN_EPISODE = [
    Row(
        "nothing listens",
        ConnectError,
        "tried again",
        "none",
        {"server": nothing_listens(), "proxy": proxy_comes_late()},
        "refused",
    ),
    Row(
        "host name does not exist",
        ConnectError,
        "at once",
        "none",
        {"no name": unresolved(socket.EAI_NONAME), "failure": unresolved(socket.EAI_FAIL)},
        "cannot be resolved",
    ),
    Row("name server fails for now", ConnectError, "tried again", "none", {"": unresolved(socket.EAI_AGAIN)}, "resol"),
    Row(
        "no answer in time",
        ConnectError,
        "tried again",
        "none",
        {
            "name server": lookup(threading.Event.wait),
            "silence": raw(Peer.hold, connect_timeout=0.5),
            "silence of a proxy": replace(through_proxy(Peer.hold), settings={"connect_timeout": 0.5}),
            "silence over TLS": raw(Peer.hold, tls=certificate(), plain=True, connect_timeout=0.5),
            "trickle": raw(trickle(b"HTTP/1.1 101 Yes\r\nX: ", b"x"), connect_timeout=0.5),
            "slow": mock(Fault("delay", "connect"), connect_timeout=0.5),
        },
        r"no connection within 0\.\d+ s",
    ),
    Row(
        "connection is cut during the handshake",
        ConnectError,
        "tried again",
        "none",
        {
            "before it": raw(lambda _: None),
            "after the request": raw(Peer.read_head),
            "in the answer": raw(answer(b"HTTP/1.1 101 Swi", stay=False)),
            "reset": mock(Fault("drop", "connect")),
            "TLS": raw(lambda _: None, tls=certificate(), plain=True),
            "proxy": through_proxy(Peer.read_head),
        },
        "was cut during the (TLS )?handshake",
    ),
    Row(
        "server speaks no TLS",
        ConnectError,
        "at once",
        "none",
        {"": raw(send(http(400)), tls=certificate(), plain=True)},
        r"TLS failed.*http://\.$",
    ),
    Row(
        "certificate is refused",
        ConnectError,
        "at once",
        "none",
        {
            "not trusted": raw(Peer.play, tls=certificate(trusted=False)),
            "another host": raw(Peer.play, tls=certificate("other.example")),
            "expired": raw(Peer.play, tls=certificate(expired=True)),
        },
        "certificate is refused.*SSL_CERT_FILE",
    ),
    Row(
        "server is another program",
        ConnectError,
        "at once",
        "none",
        {
            "SSH": raw(send(b"SSH-2.0-OpenSSH_9.9\r\n")),
            "HTTP/2": raw(send(b"\0\0\x12\4\0\0\0\0\0\r\n")),
            "wrong key": raw(answer(raw_server.UPGRADE.format("x").encode() + b"\r\n")),
            "endless line": raw(answer(b"HTTP/1.1 101 " + b"x" * 100_000)),
            "unasked compression": raw(
                lambda peer: peer.shake_hands("Sec-WebSocket-Extensions: permessage-deflate\r\n")
            ),
            "proxy": through_proxy(answer(b"220 ftp.example FTP server ready\r\n")),
        },
        "handshake failed",
    ),
    Row(
        "HTTP redirect",
        ConnectError,
        "at once",
        "none",
        {
            str(status): raw(
                answer(http(status, f"Location: https://env.example/here?token={SECRET}")), data={"status": status}
            )
            for status in (301, 302, 303, 307, 308)
        },
        r"to 'https://env\.example/here'.*Give the address",
    ),
    Row(
        "HTTP 401",
        ConnectError,
        "at once",
        "none",
        {"": mock(Fault("http", "connect", 401), data={"status": 401})},
        "token=",
    ),
    Row(
        "HTTP 403",
        ConnectError,
        "at once",
        "none",
        {
            "server": mock(Fault("http", "connect", 403), data={"status": 403}),
            "proxy": through_proxy(answer(http(403)), status=403),
        },
        "host name",
    ),
    Row(
        "HTTP 407",
        ConnectError,
        "at once",
        "none",
        {"proxy": through_proxy(answer(http(407)))},
        "the proxy answered .* password",
        {"status": 407},
    ),
    Row(
        "another HTTP answer",
        ConnectError,
        "at once",
        "none",
        {
            str(status): mock(Fault("http", "connect", status), data={"status": status})
            for status in (200, 400, 404, 405, 410, 426)
        },
        "HTTP .*base_url",
    ),
    Row(
        "HTTP 408, 425, 429, 5xx",
        ConnectError,
        "tried again",
        "none",
        {
            str(status): mock(Fault("http", "connect", status), data={"status": status})
            for status in (408, 425, 429, 500, 502, 503, 504)
        }
        | {"proxy": through_proxy(answer(http(502)), status=502)},
        "HTTP",
    ),
    Row(
        "proxy's address is unusable",
        ConfigurationError,
        "at once",
        "none",
        {
            "scheme": through_proxy(f"ftp://user:{SECRET}@127.0.0.1:1"),
            "port": through_proxy(f"http://user:{SECRET}@127.0.0.1:{SECRET}"),
            "path": through_proxy(f"http://127.0.0.1:1/{SECRET}"),
            "SOCKS": socks_without_its_package(),
        },
        "proxy is unusable.*NO_PROXY",
    ),
    Row(
        "server is full",
        ServerFullError,
        "tried again",
        "none",
        {
            "with numbers": raw(
                refused_session("CAPACITY_REACHED", active_sessions=4, max_sessions=4), data={"active": 4, "maximum": 4}
            ),
            "without": raw(refused_session("CAPACITY_REACHED"), data={"active": None, "maximum": None}),
        },
        "is full.*MAX_CONCURRENT_ENVS",
        {"code": "CAPACITY_REACHED"},
    ),
    Row(
        "environment cannot be made",
        SessionFailedError,
        "at once",
        "none",
        {
            **{code: raw(refused_session(code), data={"code": code}) for code in ("FACTORY_ERROR", "SESSION_ERROR")},
            "in answer": mock(Fault("error", "reset", "FACTORY_ERROR"), data={"code": "FACTORY_ERROR"}),
        },
        "ended the session.*server's log",
    ),
    Row(
        "environment refuses the reset",
        EnvironmentFailedError,
        "at once",
        "none",
        {
            code: mock(Fault("error", "reset", code), data={"code": code})
            for code in ("EXECUTION_ERROR", "VALIDATION_ERROR")
        },
        "_ERROR",
    ),
    Row(
        "connection is lost during reset",
        SessionLost,
        "tried again",
        "none",
        {
            "before": mock(Fault("drop", "reset")),
            "after": mock(Fault("drop_after", "reset")),
            "closed": mock(Fault("close", "reset", 1012), data={"close_code": 1012}),
            "restart": mock(Fault("restart", "reset")),
        },
        "during reset",
    ),
    Row(
        "no reply to reset in time",
        StepTimeoutError,
        "tried again",
        "none",
        {"": mock(Fault("delay", "reset"), reset_timeout=0.5)},
        r"no reply to reset within 0\.5 s",
        {"timeout": 0.5},
    ),
]

VALIDATION = {"loc": ["data", "message"], "msg": "Field required", "type": "missing"}
DEEP = "[" * 200 + "]" * 200

IN_AN_EPISODE = [
    Row(
        "action is not JSON",
        RequestError,
        "goes on",
        "untouched",
        {
            "object": mock(action={"move": object()}),
            "NaN": mock(action={"move": float("nan")}),
            "text": mock(action="x"),
        },
        "action .*JSON|message",
    ),
    Row(
        "action is refused",
        EnvironmentFailedError,
        "goes on",
        "untouched",
        {"": raw(at_second_step(lambda peer: _fail_and_play_on(peer, "VALIDATION_ERROR", errors=[VALIDATION])))},
        r"VALIDATION_ERROR: boom \(data\.message: Field required\)",
        {"code": "VALIDATION_ERROR", "errors": [VALIDATION]},
    ),
    Row(
        "request is not understood",
        EnvironmentFailedError,
        "goes on",
        "untouched",
        {code: on_second_step("error", code, data={"code": code}) for code in ("INVALID_JSON", "UNKNOWN_TYPE")},
        "Correct the request",
    ),
    Row(
        "environment raises",
        EnvironmentFailedError,
        "goes on",
        "unknown",
        {code: on_second_step("error", code, data={"code": code}) for code in ("EXECUTION_ERROR", "SOMETHING_NEW")},
        "server's log",
    ),
    Row(
        "server ends the session with an error",
        SessionFailedError,
        "lost",
        "unknown",
        {
            code: on_second_step("error", code, data={"code": code})
            for code in ("SESSION_ERROR", "FACTORY_ERROR", "CAPACITY_REACHED")
        },
        "server ended .*log",
    ),
    Row(
        "connection is cut",
        SessionLost,
        "rebuilt",
        "unknown",
        {
            "before the step": on_second_step("drop"),
            "after the step": on_second_step("drop_after"),
            "in the reply": raw(at_second_step(lambda peer: peer.send(frame(observation(late=True))[:-1]))),
            "in a fragment": raw(at_second_step(lambda peer: peer.send(frame("{", fin=False)))),
            "restart": on_second_step("restart"),
        },
        "was cut during step",
        {"close_code": None},
    ),
    Row(
        "server closes the connection",
        SessionLost,
        "rebuilt",
        "unknown",
        {str(code): closes(code, "bye") for code in (1000, 1001, 1011, 1012, 1013, 4000, 4999)}
        | {
            "no code": raw(at_second_step(send(frame(b"", raw_server.CLOSE))), data={"close_code": 1005}),
            "and does not hang up": raw(at_second_step(send(closing(1001))), data={"close_code": 1001}),
        },
        r"closed the connection during step with code \d+",
    ),
    Row(
        "server closes with a refusal",
        SessionLost,
        "lost",
        "unknown",
        {str(code): closes(code, "no") for code in (1002, 1003, 1007, 1008)},
        r"with code 100\d \(no\).*refuses",
    ),
    Row(
        "no reply in time",
        StepTimeoutError,
        "rebuilt",
        "unknown",
        {
            "late": on_second_step("delay", step_timeout=0.5),
            "frozen": on_second_step("freeze", step_timeout=0.5),
            "one byte at a time": raw(at_second_step(trickle(frame("x" * 60_000)[:4], b"x")), step_timeout=0.5),
            "endless fragments": raw(
                at_second_step(trickle(frame("{", fin=False), frame(" ", raw_server.CONTINUATION, fin=False))),
                step_timeout=0.5,
            ),
            "nothing but pings": raw(at_second_step(trickle(b"", frame(b"", raw_server.PING))), step_timeout=0.5),
        },
        r"no reply to step within 0\.5 s",
        {"timeout": 0.5},
    ),
    Row(
        "server reads nothing any more",
        StepTimeoutError,
        "rebuilt",
        "untouched",
        {"": raw(stop_reading, step_timeout=0.5)},
        r"no reply to step within 0\.5 s",
        {"timeout": 0.5},
    ),
    Row(
        "request is not read",
        StepTimeoutError,
        "rebuilt",
        "unknown",
        {
            "in plain": raw(stop_reading_later, action={"move": "x" * 10_000_000}, step_timeout=2),
            "over TLS": raw(
                stop_reading_later,
                tls=certificate(),
                action={"move": "x" * 10_000_000},
                step_timeout=2,
            ),
        },
        r"no reply to step within 2 s",
        {"timeout": 2},
    ),
    Row(
        "server does not answer pings",
        KeepaliveError,
        "rebuilt",
        "unknown",
        {"": raw(at_second_step(Peer.drain), ping_interval=0.02, ping_timeout=0.1)},
        "keepalive during step: the client got no answer",
        {"close_code": 1011},
    ),
    Row(
        "server misses answers to its pings",
        KeepaliveError,
        "rebuilt",
        "unknown",
        {"": closes(1011, "keepalive ping timeout")},
        "keepalive during step: the server got no answer",
    ),
    Row(
        "reply is too big",
        MessageTooBigError,
        "lost",
        "unknown",
        {
            "frame": on_second_step("big", 3000, max_message_size=2000),
            "fragments": raw(
                at_second_step(send(frame("x" * 1500, fin=False) + frame("x" * 1500, raw_server.CONTINUATION))),
                max_message_size=2000,
            ),
            "announced only": raw(at_second_step(send(b"\x81\x7f" + b"\xff" * 8)), max_message_size=2000),
        },
        "max_message_size=2000 bytes.*Raise max_message_size",
        {"side": "client", "limit": 2000, "close_code": 1009},
    ),
    Row(
        "request is too big",
        MessageTooBigError,
        "lost",
        "unknown",
        {
            "limit named": mock(action={"move": "x" * 3000}, data={"limit": 2000}),
            "limit not named": closes(1009),
        },
        "the server refused step as too big.*--ws-max-size",
        {"side": "server", "close_code": 1009},
    ),
    Row(
        "reply is not JSON",
        ProtocolError,
        "lost",
        "unknown",
        {
            "text": reply_with("garbage"),
            "nothing": reply_with(""),
            "cut short": on_second_step("garbage"),
            "NaN": reply_with('{"type":"observation","data":{"observation":{"x":NaN},"reward":1}}'),
            "infinity": reply_with('{"type":"observation","data":{"observation":{"x":1e999},"reward":1}}'),
            "key twice": reply_with('{"type":"observation","data":{"observation":{},"reward":1,"reward":2}}'),
            "number of 5000 digits": reply_with(
                f'{{"type":"observation","data":{{"observation":{{"x":{"9" * 5000}}}}}}}'
            ),
            "nested 200 levels": reply_with(f'{{"type":"observation","data":{{"observation":{{"x":{DEEP}}}}}}}'),
            "nested 25000 levels": reply_with("[" * 25_000),
        },
        "not JSON|nested",
    ),
    Row(
        "reply is binary",
        ProtocolError,
        "lost",
        "unknown",
        {"": reply_with(frame(observation(step=2), raw_server.BINARY))},
        "binary",
    ),
    Row(
        "reply has the wrong shape",
        ProtocolError,
        "lost",
        "unknown",
        {
            "list": reply_with("[]"),
            "null": reply_with("null"),
            "no type": reply_with('{"data":{"observation":{}}}'),
            "another type": reply_with('{"type":"state","data":{"observation":{}}}'),
            "no data": reply_with('{"type":"observation"}'),
            "no observation": reply_data(reward=1.0, done=False),
            "type": on_second_step("wrong_type", "type"),
            "data": on_second_step("wrong_type", "data"),
            "observation": on_second_step("wrong_type", "observation"),
            "reward": on_second_step("wrong_type", "reward"),
            "reward as text": reply_data(observation={}, reward="1"),
            "reward true": reply_data(observation={}, reward=True),
            "reward too big": reply_data(observation={}, reward=10**400),
            "done": on_second_step("wrong_type", "done"),
            "done as number": reply_data(observation={}, done=1),
            "metadata": on_second_step("wrong_type", "metadata"),
        },
        "the server's message (is|has)",
    ),
    Row(
        "frame breaks the WebSocket protocol",
        ProtocolError,
        "lost",
        "unknown",
        {
            "compressed": reply_with(frame(observation(step=2), rsv1=True)),
            "masked": reply_with(b"\x81\x82\1\1\1\1||"),
            "reserved opcode": reply_with(frame("x", 3)),
            "continues nothing": reply_with(frame("x", raw_server.CONTINUATION)),
            "new message in a message": reply_with(frame("{", fin=False) + frame("}")),
            "fragmented ping": reply_with(frame("x", raw_server.PING, fin=False)),
            "close code that is none": reply_with(closing(999)),
            "invalid UTF-8": reply_with(frame(b'{"x":"\xff"}')),
        },
        r"broke the WebSocket protocol during step: closed with 100\d",
    ),
    Row(
        "message that nobody asked for",
        ProtocolError,
        "lost",
        "untouched",
        {"": unasked_message()},
        "came without a request",
    ),
    Row(
        "abort() or close() from another thread",
        SessionAbortedError,
        "lost",
        "unknown",
        {"": aborted()},
        "was aborted",
    ),
]


def _fail_and_play_on(peer: Peer, code: str, **data: Any) -> None:
    peer.send(frame(error_reply(code, **data)))
    request = peer.read_request()
    peer.send(frame(observation(step=2, action=request["data"])))
    peer.drain()


def cases(rows: list[Row]) -> list[Any]:
    return [pytest.param(row, way, id=f"{row.name}-{name}") for row in rows for name, way in row.ways.items()]


# The checks


def make_env(situation: Situation, way: Way) -> OpenEnvWrapper:
    """A wrapper whose address and headers are full of secrets."""
    scheme, _, host = situation.base_url.partition("://")
    address = f"{scheme}://user:{SECRET}@{host}?token={SECRET}"
    # Without keepalive, which would end in twenty seconds whatever else has not.
    settings = {"close_timeout": 0.2, "ping_interval": None, "headers": {"X-Key": SECRET}, **way.settings}
    return OpenEnvWrapper(base_url=address, **settings)


def failure_in(record: logging.LogRecord) -> OpenEnvError:
    """The error of an attempt that is to be followed by another."""
    assert isinstance(record.args, tuple)
    error = record.args[-1]
    assert isinstance(error, OpenEnvError)
    return error


def check(error: OpenEnvError, row: Row, way: Way, situation: Situation) -> None:
    """The error has the class, the data and the words that its row says, and shows no secret."""
    assert type(error) is row.error
    assert error.transient == (row.outcome in ("tried again", "rebuilt"))
    text = str(error)
    assert re.search(row.says, text, re.DOTALL)
    assert text.endswith(f" {error.remedy}")
    assert re.fullmatch(r"[A-Zr].*\.", error.remedy)
    if row.error is RequestError:
        assert (error.url, error.elapsed) == (None, None)  # no server was involved
    else:
        assert error.url == public_url(websocket_url(situation.base_url))
        assert error.url in text
        assert error.elapsed is not None
    for name, value in {**row.data, **way.data}.items():
        assert getattr(error, name) == value, name
    assert SECRET not in "".join(traceback.format_exception(error)) + repr(vars(error))


@pytest.mark.parametrize(("row", "way"), cases(BEFORE_AN_EPISODE))
def test_a_fault_before_an_episode(
    row: Row, way: Way, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """W03, W07, W10, S01: reset tries again where that may help, and fails at the first attempt where it cannot."""
    monkeypatch.setattr("openenv_client.wrapper.retry_delay", lambda failures, **_: 0.0)
    with way.make(monkeypatch) as situation, make_env(situation, way) as env, situation.during(env):
        if row.outcome == "at once":
            with pytest.raises(OpenEnvError) as caught:
                env.reset()
            error = caught.value
            assert error.attempts == 1
        else:
            assert env.reset().observation["step"] == 0
            (error,) = (failure_in(record) for record in caplog.records if record.name == "openenv_client.wrapper")
        check(error, row, way, situation)
        assert not isinstance(error, ConnectError) or not error.maybe_applied
    assert SECRET not in caplog.text


def play_until_the_fault(env: OpenEnvWrapper, situation: Situation, way: Way, **seed: Any) -> Any:
    """A reset and a step go well; the next step meets the fault."""
    env.reset(**seed)
    assert env.step({"move": 1}).observation["step"] == 1
    with situation.during(env):
        return env.step(way.action)


@pytest.mark.parametrize(("row", "way"), cases(IN_AN_EPISODE))
def test_a_fault_in_a_step(
    row: Row, way: Way, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """W01, W02, W05, W06, W07: one error, and no later step gets a reply that is not its own."""
    with way.make(monkeypatch) as situation, make_env(situation, way) as env:
        with pytest.raises(OpenEnvError) as caught:
            play_until_the_fault(env, situation, way)
        check(caught.value, row, way, situation)
        assert caught.value.maybe_applied == (row.game == "unknown")
        if row.outcome == "goes on":
            assert env.step({"move": 3}).observation["action"] == {"move": 3}
        else:
            with pytest.raises(SessionLost, match="the session is gone") as second:
                env.step({"move": 3})
            assert not second.value.maybe_applied
            assert env.reset().observation["step"] == 0
            assert env.step({"move": 4}).observation["action"] == {"move": 4}
    assert SECRET not in caplog.text


@pytest.mark.parametrize(("row", "way"), cases([row for row in IN_AN_EPISODE if row.outcome != "goes on"]))
def test_a_fault_in_a_game_with_a_seed(row: Row, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """W01, W02, W03: the game is rebuilt exactly where that may help, and goes on with the step that was under way."""
    with way.make(monkeypatch) as situation, make_env(situation, way) as env:
        if row.outcome == "rebuilt":
            result = play_until_the_fault(env, situation, way, seed=7)
            assert (result.observation["step"], result.observation["action"]) == (2, way.action)
            assert [recovery.replayed for recovery in env.recoveries] == [1]
            assert env.step({"move": 3}).observation["step"] == 3
        else:
            with pytest.raises(OpenEnvError) as caught:
                play_until_the_fault(env, situation, way, seed=7)
            check(caught.value, row, way, situation)
            assert env.recoveries == []


def test_a_server_that_freezes_with_the_whole_machine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """W05: by the client's own pings; when it is back, a seeded game is rebuilt there."""
    way = frozen_server()
    with way.make(monkeypatch) as situation, make_env(situation, way) as env, pytest.raises(KeepaliveError):
        play_until_the_fault(env, situation, way)


def test_the_page_lists_the_same_faults_and_says_the_same_of_them() -> None:
    lines = re.findall(r"^\| (.+?) \| .*?`(\w+)`.*? \| (.+?) \| (\w+)(.*?) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    listed = [(name, error, outcome, game) for name, error, outcome, game, _ in lines]
    assert listed == [
        (row.name, row.error.__name__, row.outcome, row.game) for row in BEFORE_AN_EPISODE + IN_AN_EPISODE
    ]
