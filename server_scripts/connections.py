"""Connections that no client can hold for ever or fill without end: uvicorn's own, with the limits that it lacks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

__all__ = ["HTTPConnection", "WebSocketConnection"]

REQUEST_SECONDS = 10.0
"""How long an HTTP connection takes requests. One that has not arrived whole by then is not answered."""

ANSWER_SECONDS = 120.0
"""How much longer an answer may take that is under way then."""

UNREAD_SECONDS = 60.0
"""How long a WebSocket client may leave unread what the buffers no longer hold."""


class HTTPConnection(H11Protocol):
    """An HTTP connection that ends, and that is refused when there are ``limit_concurrency`` others.

    Uvicorn waits for ever for the first request of a connection and for the rest of one that has begun, and its limit
    does not count those that wait.
    """

    _expiry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Start the clock."""
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            transport.abort()
        else:
            self._expiry = self.loop.call_later(REQUEST_SECONDS, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        super().connection_lost(exc)
        self._stop_clock()

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Stop the clock: from here on, the connection is a `WebSocketConnection`."""
        self._stop_clock()
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, and drop the answer to what came before it. Uvicorn would send both at once."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.close()  # an answer has begun, or has no body as that to HEAD

    def _stop_clock(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()

    def _expire(self) -> None:
        if self.cycle is None or self.cycle.more_body:
            self.transport.abort()
        else:
            self.shutdown()  # which lets an answer that is under way be finished
            self._expiry = self.loop.call_later(ANSWER_SECONDS, self.transport.abort)


class WebSocketConnection(WebSocketsSansIOProtocol):
    """A WebSocket whose client must read what it is sent, and whose handshake is answered even when it is broken."""

    _unread: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn.debug = False  # else it logs every header, the token's too

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        super().connection_lost(exc)
        self._stop_clock()

    def data_received(self, data: bytes) -> None:
        """Take bytes; close if they are no handshake. Uvicorn would leave the client waiting for an answer."""
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def handle_parser_exception(self) -> None:
        """Close because of what the client sent; at once if it did not wait for the handshake to be answered."""
        if self.conn.close_sent is None:
            self.transport.abort()
        else:
            super().handle_parser_exception()

    async def send(self, message: Any) -> None:
        """Send; to a client that is gone or told to go, nothing, which the application learns when it next listens."""
        await self.writable.wait()
        if self.transport.is_closing():
            self.handshake_complete = True  # nobody is left to answer; uvicorn would log that there was none, or worse
        elif not self.close_sent:
            with contextlib.suppress(ClientDisconnected):
                await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # by a refusal; uvicorn would log that there was no answer

    def send_receive_event_to_app(self) -> None:
        """Pass a message on; close if it is no text. Uvicorn would log a traceback."""
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError as error:
                self.conn.fail(1007, f"{error.reason} at position {error.start}")
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        """Answer; read on only when the client reads the answers, which would pile up here."""
        super().handle_ping()
        if not self.writable.is_set():
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        """Give a client that does not read some time to do so."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the client reads."""
        super().resume_writing()
        self._stop_clock()
        if not self.read_paused:
            self.transport.resume_reading()

    def keepalive_timeout(self) -> None:
        """Close, and do not wait until a client that is gone has read what it was sent."""
        super().keepalive_timeout()
        self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
