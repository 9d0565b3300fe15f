"""FaultProxy: stands between a client and an environment server and lets things go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.http11 import Request, Response

from openenv_client.checks import mapping, positive
from openenv_client.protocol import is_loopback, websocket_url

from .faults import FORGED, INSTEAD, Fault
from .frames import Received, error_frame, read_request
from .local_server import LocalServer, cut

__all__ = ["FaultProxy"]

_OF_ONE_HANDSHAKE = ("host", "connection", "upgrade", "sec-websocket-", "content-length", "transfer-encoding")
"""Beginnings of the names of headers that are not handed on."""

_ABNORMAL, _NO_CODE = 1006, 1005  # stand for a connection that was cut, and for a close frame without a code

_LAST_WORDS = 1.0  # seconds that a server has to take what a client sent before it left


class FaultProxy(LocalServer):
    """A proxy for the WebSocket of an OpenEnv server, in a thread of its own. Use it as a context manager.

    For each client it opens a connection to the server, with the client's path, query and headers, and hands on what
    either side sends, closing included. Faults come by count, as those of a `MockEnvServer` do, and by chance::

        rates = {Fault("drop_after", "step"): 0.01, Fault("http", "connect", 503): 0.02}
        with FaultProxy("http://127.0.0.1:8000", rates=rates, seed=7) as proxy:
            with OpenEnvWrapper(base_url=proxy.base_url) as env:
                ...

    A `Fault` means here what it means to the mock server: a request that is not acted on does not reach the server, and
    one that is acted on has been answered by it. The proxy answers pings itself, for the server as for the client.

    The chances of a connection depend on the seed, its path with its query, and how many connections to that path there
    were before. A caller who gives each episode a query of its own (``f"{proxy.base_url}?episode=3"``) gets the same
    faults again from the same seed, however its episodes overlap.

    Args:
        upstream_base_url: Address of the server: http, https, ws or wss, with or without a path prefix.
        faults: What goes wrong for certain; these come first.
        rates: What goes wrong by chance, and in which share of the connects or requests that a fault is for, 0 to 1.
            One fault at most happens to each; ``nth`` and ``times`` mean nothing.
        seed: Makes the chances.
        max_message_size: Bytes that a message may have, either way.

    Attributes:
        forwarded: What was handed on to the server, in order.
        struck: How often each fault has happened.

    Raises:
        TypeError: The faults are none, or rates are not for faults.
        ConfigurationError: The address or a number is none, or a number is out of range.
        ValueError: The address has a query, the rates for one thing sum to more than 1, or one is for ``refuse``, which
            cannot happen by chance.
    """

    def __init__(
        self,
        upstream_base_url: str,
        *,
        faults: Iterable[Fault] = (),
        rates: Mapping[Fault, float] | None = None,
        seed: int = 0,
        max_message_size: int = 64 * 2**20,
    ) -> None:
        super().__init__(faults=faults, max_message_size=max_message_size)
        self.forwarded: list[Received] = []
        self.struck: Counter[Fault] = Counter()
        url, _, query = websocket_url(upstream_base_url).partition("?")
        if query:
            raise ValueError(
                f"upstream_base_url has the query {query!r}; put it behind the address that the client gets"
            )
        self._upstream = url.removesuffix("/ws")
        self._rates = _checked(mapping("rates", rates))
        self._seed = seed
        self._numbers = itertools.count(1)
        self._visits: Counter[str] = Counter()
        self._links: dict[ServerConnection, _Link] = {}

    @property
    def base_url(self) -> str:
        """The address to give to a client."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def sessions(self) -> int:
        """How many clients are connected."""
        with self._changed:
            return len(self._links)

    def take(self, path: str) -> list[Received]:
        """What was forwarded for connections to a path; all about it is then forgotten, for runs that have no end.

        Args:
            path: With the query, such as ``"/ws?episode=3"``.
        """
        with self._changed:
            sessions = {r.session for r in self.forwarded if r.kind == "connect" and r.data["path"] == path}
            taken = [received for received in self.forwarded if received.session in sessions]
            self.forwarded = [received for received in self.forwarded if received.session not in sessions]
            del self._visits[path]
            return taken

    # The proxy's thread: a connect

    async def _process_request(self, client: ServerConnection, request: Request) -> Response | None:
        self._visits[request.path] += 1
        chance = random.Random(f"{self._seed} {request.path} {self._visits[request.path]}")
        link = _Link(next(self._numbers), client, chance)
        with self._changed:
            self._links[client] = link
        task = cast("asyncio.Task[Any]", asyncio.current_task())  # goes on to serve the connection
        task.add_done_callback(lambda _: self._forget(link))
        fault = self._choose("connect", link)
        if fault is not None:
            if fault.kind == "http":
                return client.respond(fault.value, "as the proxy was told\n")
            if fault.kind == "full":
                return None
            if fault.kind in INSTEAD:
                await self._fail_instead(client, fault)
                return None
            await self._hold(fault.value)
        return await self._open(link, request)

    async def _open(self, link: _Link, request: Request) -> Response | None:
        url = self._upstream + request.path
        headers = [(k, v) for k, v in request.headers.raw_items() if not k.lower().startswith(_OF_ONE_HANDSHAKE)]
        try:
            link.server = await connect(
                url,
                create_connection=_ToServer,
                additional_headers=Headers(headers),
                user_agent_header=None,
                proxy=None if is_loopback(url) else True,
                compression=None,
                ping_interval=None,
                close_timeout=1.0,
                max_size=self._max_message_size,
                max_queue=1,  # whoever sends faster than the other side reads is held back
            )
        except InvalidStatus as exc:
            return link.client.respond(exc.response.status_code, "the server has answered so\n")
        except (OSError, WebSocketException) as exc:
            return link.client.respond(502, f"the server cannot be reached: {exc}\n")
        self._record(link, "connect", {"path": request.path, "headers": dict(request.headers.raw_items())})
        return None

    # The proxy's thread: an open connection

    async def _handle(self, client: ServerConnection) -> None:
        link = self._links[client]
        server = link.server
        if server is None:
            with contextlib.suppress(ConnectionClosed):
                await client.send(error_frame("CAPACITY_REACHED", "as the proxy was told"))
            return
        pumps = [
            asyncio.create_task(
                _pump(client, server, lambda frame: self._take_request(link, server, frame), grace=_LAST_WORDS)
            ),
            asyncio.create_task(_pump(server, client, lambda frame: self._take_reply(link, frame), grace=None)),
        ]
        try:
            # When one ends, both connections are closed, and what the other still waits for will not come.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()

    async def _take_request(self, link: _Link, server: ClientConnection, frame: str | bytes) -> None:
        kind, data, _ = read_request(frame)
        fault = self._choose(kind, link)
        if fault is not None and fault.kind in INSTEAD:
            if not await self._fail_instead(link.client, fault):
                await link.client.close()
            return
        if kind != "close":
            link.unanswered.append((fault, self._gate))
        elif fault is not None:
            await self._hold(fault.value)
        self._record(link, kind, data)
        await server.send(frame)

    async def _take_reply(self, link: _Link, frame: str | bytes) -> None:
        # A full server speaks without being asked.
        fault, gate = link.unanswered.popleft() if link.unanswered else (None, None)
        if fault is not None and fault.kind == "drop_after":
            cut(link.client)
            return
        if fault is not None and fault.kind == "delay":
            await self._hold(fault.value, gate)
        await link.client.send(fault.forge() if fault is not None and fault.kind in FORGED else frame)
        if fault is not None and fault.kind == "extra":
            await link.client.send(fault.value)

    def _forget(self, link: _Link) -> None:
        if link.server is not None:
            cut(link.server)
        with self._changed:
            del self._links[link.client]
            self._changed.notify_all()

    # The proxy's thread: faults and the log

    def _choose(self, on: str, link: _Link) -> Fault | None:
        with self._changed:
            fault = self._strike(on) or self._draw(on, link.chance)
            if fault is not None:
                self.struck[fault] += 1
                self._changed.notify_all()
            return fault

    def _draw(self, on: str, chance: random.Random) -> Fault | None:
        point = chance.random()
        for fault, rate in self._rates.items():
            if fault.on == on:
                point -= rate
                if point < 0:
                    return fault
        return None

    def _record(self, link: _Link, kind: str, data: dict[str, Any]) -> None:
        with self._changed:
            self.forwarded.append(Received(link.number, kind, data))
            self._changed.notify_all()


class _ToServer(ClientConnection):
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Once the server has said goodbye nothing more can come. websockets waits until it hangs up as well.
        if self.protocol.close_rcvd is not None:
            self.transport.close()


@dataclass
class _Link:
    """A client's connection and the one to the server that belongs to it.

    Args:
        number: Of the client's connection.
        client: That connection.
        chance: What goes wrong with it by chance.
        server: The other; None if there is none.
        unanswered: For each request that the server has not answered, what is to happen to the answer, and the gate of
            the time when it was sent.
    """

    number: int
    client: ServerConnection
    chance: random.Random
    server: ClientConnection | None = None
    unanswered: deque[tuple[Fault | None, asyncio.Event]] = field(default_factory=deque)


async def _pump(
    source: Connection, target: Connection, forward: Callable[[str | bytes], Awaitable[None]], *, grace: float | None
) -> None:
    """Hand on what the source sends until it is closed; then close the target in the same way.

    Args:
        source: Where messages come from.
        target: Where they go, as a rule.
        forward: Takes a message.
        grace: Seconds that the target has to take what the source sent before it closed; None for no limit.
    """
    forwarding = asyncio.create_task(_forward(source, forward))
    try:
        await source.wait_closed()
        await asyncio.wait([forwarding], timeout=grace)
        code, reason = source.close_code or _ABNORMAL, source.close_reason or ""
        if forwarding.done() and code != _ABNORMAL:
            await target.close(1000 if code == _NO_CODE else code, reason)
    finally:
        forwarding.cancel()
        cut(target)


async def _forward(source: Connection, forward: Callable[[str | bytes], Awaitable[None]]) -> None:
    with contextlib.suppress(ConnectionClosed):  # either of them
        while True:
            await forward(await source.recv())


def _checked(rates: Mapping[Fault, float]) -> dict[Fault, float]:
    sums: dict[str, float] = {}
    for fault, rate in rates.items():
        if not isinstance(fault, Fault):
            raise TypeError(f"rates has {fault!r:.100}; give a rate by Fault, such as {{Fault('drop', 'step'): 0.01}}")
        positive(f"the rate of {fault}", rate, or_zero=True)
        if fault.kind == "refuse":
            raise ValueError("connections cannot be refused by chance; give the fault in faults or to inject()")
        sums[fault.on] = sums.get(fault.on, 0.0) + rate
        if sums[fault.on] > 1 + 1e-9:
            raise ValueError(f"the rates on {fault.on} must sum to 1 at most; {fault} has {rate}")
    return dict(rates)
