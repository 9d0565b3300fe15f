"""Who may talk to the server, how much, and for how long. An ASGI middleware that needs the standard library only."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

__all__ = ["MOST_BODY_BYTES", "Guard", "TokenError", "checked_token"]

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]

MOST_BODY_BYTES = 2**16
"""The longest body of an HTTP request. Games are played over the WebSocket, which has a limit of its own."""

_AT_A_TIME = 4  # POST requests that are worked on: each may make a game, which takes time from all sessions

_OPEN_PATH = "/health"  # probes have no token, and it tells nothing
_TIMEOUT = 3008  # the close code registered for it


class TokenError(ValueError):
    """A text cannot serve as token. The message does not show it."""


def checked_token(text: str) -> str:
    """Give the token back if it can be sent in a header and is too long to be guessed.

    Raises:
        TokenError: It cannot, or is not.
    """
    if re.fullmatch("[!-~]{16,4096}", text) is None:
        raise TokenError(
            "the token must be 16 to 4096 visible ASCII characters without blanks. Make one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    return text


class Guard:
    """Passes on to the application only what may reach it.

    With a token, every request must bear it. Without one, what a web page in somebody's browser could send is refused:
    a request whose ``Origin`` is another site and, on a loopback address, one for another host name than a loopback one
    (a name that was made to point here). ``/health`` is always open.

    Args:
        app: The ASGI application.
        token: What clients must send as ``Authorization: Bearer …``; None asks for nothing.
        loopback: Whether the server listens on a loopback address.
        session_timeout: Seconds after which a WebSocket that sends no message is closed; None is never.
    """

    def __init__(
        self, app: _App, *, token: str | None = None, loopback: bool = True, session_timeout: float | None = None
    ) -> None:
        self._app = app
        self._expected = None if token is None else token.encode()
        self._loopback = loopback
        self._session_timeout = session_timeout
        self._posting = asyncio.Semaphore(_AT_A_TIME)

    async def __call__(self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send) -> None:
        """Serve one connection as ASGI says."""
        if scope["type"] == "lifespan" or scope["path"] == _OPEN_PATH:
            await self._app(scope, receive, send)
        elif refusal := self._refusal(scope["headers"]):
            await _refuse(scope, send, *refusal)
        elif scope["type"] == "websocket":
            await self._app(scope, self._until_idle(receive, send), send)
        elif scope["method"] == "POST":
            await self._post(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> tuple[int, str] | None:
        """The HTTP status and the reason why a request may not pass, or None if it may."""
        given: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            given.setdefault(name.lower(), []).append(value)
        if self._expected is not None:
            scheme, _, token = b",".join(given.get(b"authorization", [])).partition(b" ")
            if scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._expected):
                return None
            return 401, "This server wants its token: Authorization: Bearer …"
        host = b",".join(given.get(b"host", []))
        if any(origin.partition(b"://")[2] != host for origin in given.get(b"origin", [])):
            return 403, "This server takes no requests from pages of other sites (the Origin header)."
        if self._loopback and not _is_loopback(host.decode("latin-1")):
            return 403, "This server answers to loopback names only (the Host header). Give it a token: OPENENV_TOKEN."
        return None

    def _until_idle(self, receive: _Receive, send: _Send) -> _Receive:
        """The same messages, and the end of the connection when none has come for too long."""

        async def receive_in_time() -> _Message:
            try:
                return await asyncio.wait_for(receive(), self._session_timeout)
            except asyncio.TimeoutError:
                reason = f"no message for {self._session_timeout:g} s"
                await send({"type": "websocket.close", "code": _TIMEOUT, "reason": reason})
                return {"type": "websocket.disconnect", "code": _TIMEOUT, "reason": reason}

        return receive_in_time

    async def _post(self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send) -> None:
        """Read the body, no further than to the limit, before the application would read on and on."""
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client has gone
            body += message.get("body", b"")
            if len(body) > MOST_BODY_BYTES:
                await _refuse(scope, send, 413, f"A body has at most {MOST_BODY_BYTES} bytes.")
                return
            more = message.get("more_body", False)
        whole: list[_Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def receive_whole() -> _Message:
            return whole.pop() if whole else await receive()

        async with self._posting:
            await self._app(scope, receive_whole, send)


def _is_loopback(host: str) -> bool:
    """Whether the value of a Host header names this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or name.endswith(".localhost") or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _refuse(scope: MutableMapping[str, Any], send: _Send, status: int, detail: str) -> None:
    """Answer and close; to a WebSocket, in place of the handshake."""
    body = json.dumps({"detail": detail}, ensure_ascii=False).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    response = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    await send({"type": f"{response}.start", "status": status, "headers": headers})
    await send({"type": f"{response}.body", "body": body})
