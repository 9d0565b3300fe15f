"""The guard before the application: tokens, other sites, long bodies, and sessions that nobody uses."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from server_scripts.guard import MOST_BODY_BYTES, Guard, TokenError, checked_token

TOKEN = "a-token-of-the-tests"
HERE = "127.0.0.1:8000"


class Application:
    """Answers everything, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.messages: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        self.messages.append(await receive())
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"yes"})
        else:
            await send({"type": "websocket.accept"})


class Client:
    """One request to a guard, and what came back."""

    def __init__(self, **settings: Any) -> None:
        self.application = Application()
        self.guard = Guard(self.application, **settings)
        self.sent: list[Any] = []

    async def ask(
        self,
        kind: str = "http",
        headers: Mapping[str, str] | None = None,
        *,
        path: str = "/ws",
        method: str = "GET",
        body: Iterable[bytes] = (b"",),
    ) -> int:
        """Send a request with the given headers and give the status of the answer, 101 for an accepted WebSocket."""
        chunks = list(body)
        messages = [
            {"type": "http.request", "body": chunk, "more_body": number < len(chunks)}
            for number, chunk in enumerate(chunks, start=1)
        ]
        messages.append({"type": "http.disconnect"})
        if kind == "websocket":
            messages = [{"type": "websocket.connect"}]

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            self.sent.append(message)

        pairs = [(name.encode(), value.encode("latin-1")) for name, value in {"host": HERE, **(headers or {})}.items()]
        self.sent = []
        await self.guard({"type": kind, "path": path, "method": method, "headers": pairs}, receive, send)
        return int(self.sent[0].get("status", 101)) if self.sent else 0

    @property
    def detail(self) -> str:
        """The reason of a refusal."""
        return str(json.loads(self.sent[1]["body"])["detail"])


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": TOKEN},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": f"Bearer {TOKEN[:-1]}"},
        {"authorization": f"Bearer {TOKEN},{TOKEN}"},
        {"authorization": "Bearer tökenö-tökenö-tökenö"},
        {"cookie": TOKEN},
    ],
    ids=str,
)
async def test_without_the_right_token_nothing_reaches_the_application(kind: str, given: dict[str, str]) -> None:
    """The answer is 401 with the scheme that is wanted, for a WebSocket in place of the handshake."""
    client = Client(token=TOKEN)
    assert await client.ask(kind, given) == 401
    assert client.application.asked == []
    assert (b"www-authenticate", b"Bearer") in client.sent[0]["headers"]
    assert client.sent[0]["type"].startswith("websocket.http." if kind == "websocket" else "http.")
    assert TOKEN not in str(client.sent)


async def test_two_authorizations_are_none() -> None:
    """Which of them another server on the way has looked at is not known."""
    client = Client(token=TOKEN)
    scope = {"type": "http", "path": "/ws", "headers": [(b"authorization", f"Bearer {TOKEN}".encode())] * 2}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await client.guard(scope, lambda: asyncio.sleep(0, {}), send)
    assert sent[0]["status"] == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_the_token_opens(scheme: str) -> None:
    """The scheme may be written in any case; whose page or which host name it is does not matter with a token."""
    client = Client(token=TOKEN)
    headers = {"authorization": f"{scheme} {TOKEN}", "origin": "https://other.example", "host": "play.example"}
    assert await client.ask("http", headers) == 200
    assert await client.ask("websocket", headers) == 101


async def test_health_is_open_to_all() -> None:
    """A probe has no token and asks an address."""
    client = Client(token=TOKEN)
    assert await client.ask(path="/health", headers={"host": "10.0.0.7"}) == 200
    assert await client.ask(path="/health/") == 401


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (f"http://{HERE}", 200),
        ("http://127.0.0.1:8001", 403),
        ("http://127.0.0.1", 403),
        ("https://other.example", 403),
        (f"https://other.example/?{HERE}", 403),
        ("null", 403),
        ("", 403),
    ],
)
async def test_a_page_of_another_site_is_refused(kind: str, origin: str, status: int) -> None:
    """A browser tells whose page sends a request; it lets every page open a WebSocket to this machine."""
    client = Client()
    assert await client.ask(kind, {"origin": origin}) == (101 if (kind, status) == ("websocket", 200) else status)
    assert len(client.application.asked) == (status == 200)
    if status == 403:
        assert "Origin" in client.detail


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("127.0.1.1", 200),
        ("localhost:9000", 200),
        ("LOCALHOST", 200),
        ("games.localhost:8000", 200),
        ("[::1]:8000", 200),
        ("rebound.example:8000", 403),
        ("127.0.0.1.example", 403),
        ("localhost.example", 403),
        ("user@127.0.0.1.example", 403),
        ("10.0.0.7", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
async def test_a_loopback_address_answers_to_loopback_names_only(host: str, status: int) -> None:
    """A page may have a name of its own made to point here; what it asks for then is of its own site."""
    client = Client(loopback=True)
    assert await client.ask(headers={"host": host, "origin": f"http://{host}"}) == status
    if status == 403:
        assert "OPENENV_TOKEN" in client.detail
    assert await Client(loopback=False).ask(headers={"host": host}) == 200


@pytest.mark.parametrize(
    "body", [[b"x" * (MOST_BODY_BYTES + 1)], [b"x" * 1000] * 100, [b"x" * MOST_BODY_BYTES, b"", b"x"]], ids=len
)
async def test_a_body_that_is_too_long_is_refused_unseen(body: list[bytes]) -> None:
    client = Client()
    assert await client.ask(method="POST", body=body) == 413
    assert client.application.asked == []
    assert str(MOST_BODY_BYTES) in client.detail


async def test_a_body_is_passed_on_whole() -> None:
    client = Client()
    half = b"x" * (MOST_BODY_BYTES // 2)
    assert await client.ask(method="POST", body=[half, half]) == 200
    assert client.application.messages == [{"type": "http.request", "body": half + half, "more_body": False}]


async def test_a_client_that_leaves_within_its_body_is_forgotten() -> None:
    client = Client()
    assert await client.ask(method="POST", body=()) == 0
    assert client.application.asked == []


async def test_four_posts_are_worked_on_at_a_time() -> None:
    """The fifth waits; a request that makes nothing does not."""
    working: list[str] = []
    go_on = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        working.append(scope["path"])
        if scope["method"] == "POST":
            await go_on.wait()

    async def nothing(*_: Any) -> Any:
        return {"type": "http.request"}

    async def request(path: str, method: str) -> None:
        scope = {"type": "http", "path": path, "method": method, "headers": [(b"host", HERE.encode())]}
        await guard(scope, nothing, nothing)

    guard = Guard(application)
    posts = [asyncio.ensure_future(request(str(number), "POST")) for number in range(5)]
    await asyncio.sleep(0)
    await request("sessions", "GET")
    assert working == ["0", "1", "2", "3", "sessions"]
    go_on.set()
    await asyncio.gather(*posts)
    assert working[-1] == "4"


async def test_a_session_that_nobody_uses_is_closed() -> None:
    """The client is told why, and the application that it has gone."""
    sent: list[Any] = []
    received: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        received.extend([await receive(), await receive()])

    async def receive() -> Any:
        if not received and not first:
            first.append(True)
            return {"type": "websocket.receive", "text": "hello"}
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    first: list[bool] = []
    scope = {"type": "websocket", "path": "/ws", "headers": [(b"host", HERE.encode())]}
    await Guard(application, session_timeout=0.01)(scope, receive, send)
    assert received[0]["text"] == "hello"
    assert (received[1]["type"], received[1]["code"]) == ("websocket.disconnect", 3008)
    assert sent == [{"type": "websocket.close", "code": 3008, "reason": "no message for 0.01 s"}]


async def test_the_lifespan_is_the_applications() -> None:
    client = Client(token=TOKEN)
    with pytest.raises(KeyError, match="path"):  # it was called, and looks for a path
        await client.guard({"type": "lifespan"}, lambda: asyncio.sleep(0, {}), lambda message: asyncio.sleep(0))


@pytest.mark.parametrize("text", ["a" * 16, "AZaz09-._~+/=!#$", "x" * 4096])
def test_a_good_token(text: str) -> None:
    assert checked_token(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "short-secret-15",
        "with a blank in it",
        "line-break-at-end\n",
        " blank-at-the-start",
        "tab\tin-the-middle-of-it",
        "höhöhöhöhöhöhöhö",
        "x" * 4097,
    ],
    ids=repr,
)
def test_a_bad_token_is_not_shown(text: str) -> None:
    """What is wrong is said, and how to make a good one; a part of the text itself is in no message."""
    with pytest.raises(TokenError, match=r"16 to 4096 visible ASCII .*token_urlsafe") as caught:
        checked_token(text)
    assert not text or text not in repr(caught.value)
    assert not re.search("secret-15|with a|line-break|blank-at|höh|in-the-middle|xxx", repr(caught.value))
