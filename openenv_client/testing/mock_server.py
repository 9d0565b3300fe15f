"""MockEnvServer: an OpenEnv server for tests, with a real socket, a script instead of an environment, and faults."""

from __future__ import annotations

import hmac
import itertools
import json
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from openenv_client.checks import whole

from .faults import FORGED, INSTEAD, Fault
from .frames import Received, error_frame, read_request
from .local_server import LocalServer, cut
from .scripts import Player, Script, check_script, echo

__all__ = ["MockEnvServer"]

_LAST_WORDS = 1.0  # seconds that scripts have to end when the server stops


class MockEnvServer(LocalServer):
    """An OpenEnv server on a free port of the loopback interface, in a thread of its own. Use it as a context manager.

    ::

        with MockEnvServer([reply({"n": 0}), reply({"n": 1}, reward=1.0, done=True)]) as server:
            with OpenEnvWrapper(base_url=server.base_url) as env:
                env.reset()
                env.step({"message": "go"})
            assert server.actions == [{"message": "go"}]
            assert server.sessions == 0

    Args:
        script: What every episode plays. A list starts anew with each reset. A request that finds no reply left is
            answered with EXECUTION_ERROR, and so is one for which a function raises. An ``assert`` that fails in a
            function, and pytest.fail(), are moreover raised when the ``with`` block of the server ends.
        faults: What goes wrong.
        capacity: Sessions at a time; None for no limit.
        token: A handshake without the header ``Authorization: Bearer <token>`` is answered with HTTP 401.
        path: Path of the endpoint; others are answered with HTTP 403, as a real server does.
        max_message_size: Bytes that a request may have.

    Attributes:
        received: All that arrived, in order.
        applied: Those requests that the script has acted on.
        failures: What scripts have asserted in vain; raised when the ``with`` block ends, unless that ends by an error.
        peak_sessions: The most sessions that there were at a time.

    Raises:
        TypeError: The script or the faults are none.
        ConfigurationError: A number is none, or out of range.
    """

    def __init__(
        self,
        script: Script = echo,
        *,
        faults: Iterable[Fault] = (),
        capacity: int | None = None,
        token: str | None = None,
        path: str = "/ws",
        max_message_size: int = 16 * 2**20,
    ) -> None:
        super().__init__(faults=faults, max_message_size=max_message_size)
        self.script = script
        self.received: list[Received] = []
        self.applied: list[Received] = []
        self.failures: list[BaseException] = []
        self.peak_sessions = 0
        self._capacity = None if capacity is None else whole("capacity", capacity, least=0)
        self._token = token
        self._path = path
        self._numbers = itertools.count(1)
        self._opening: WeakKeyDictionary[ServerConnection, tuple[int, Fault | None]] = WeakKeyDictionary()
        self._sessions: set[int] = set()
        self._players: WeakSet[Player] = WeakSet()  # a running thread keeps its player

    def stop(self) -> None:
        """Cut all connections and stop listening, as a killed process does. A script that waits is left behind."""
        super().stop()
        end = time.monotonic() + _LAST_WORDS
        for player in list(self._players):
            player.join(end - time.monotonic())

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc, traceback)
        if exc is None and self.failures:
            raise self.failures[0]

    # What tests use

    @property
    def script(self) -> Script:
        """What episodes play. Assign another: episodes that begin later play it."""
        return self._script

    @script.setter
    def script(self, script: Script) -> None:
        self._script = check_script(script)

    @property
    def base_url(self) -> str:
        """The address to give to a client."""
        return f"http://127.0.0.1:{self._port}{self._path.removesuffix('/ws')}"

    @property
    def sessions(self) -> int:
        """How many sessions are live."""
        with self._changed:
            return len(self._sessions)

    @property
    def kinds(self) -> list[str]:
        """The kinds of all that arrived, in order: ``["connect", "reset", "step", "close"]``."""
        return [event.kind for event in self.received]

    @property
    def actions(self) -> list[dict[str, Any]]:
        """The actions of the steps that the script has acted on, in order."""
        return [event.data for event in self.applied if event.kind == "step"]

    def wait_until(self, condition: Callable[[], object], *, timeout: float = 10.0) -> None:
        """Wait until something about this server is true, for example ``lambda: server.sessions == 0``.

        Raises:
            AssertionError: It did not become true in ``timeout`` seconds.
        """
        try:
            super().wait_until(condition, timeout=timeout)
        except AssertionError as exc:
            raise AssertionError(f"{exc}; received: {self.received}") from None

    # The server's thread: a connect

    async def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        number, fault = next(self._numbers), self._strike("connect")
        headers = dict(request.headers.raw_items())
        self._record(number, "connect", {"path": request.path, "headers": headers})
        self._opening[connection] = number, fault
        if request.path.partition("?")[0] != self._path:
            return connection.respond(403, "no such endpoint\n")
        if fault is not None:
            if fault.kind == "http":
                return connection.respond(fault.value, "as the script says\n")
            if fault.kind in INSTEAD:
                await self._fail_instead(connection, fault)
            if fault.kind == "delay":
                await self._hold(fault.value)
        if self._token is not None:
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), f"Bearer {self._token}".encode()):
                response = connection.respond(401, "no token, or a wrong one\n")
                response.headers["WWW-Authenticate"] = "Bearer"
                return response
        return None

    async def _handle(self, connection: ServerConnection) -> None:
        number, fault = self._opening[connection]
        if not self._enter(number, forced_out=fault is not None and fault.kind == "full"):
            await connection.send(self._full())
            return
        player = Player(number)
        self._players.add(player)
        try:
            async for text in connection:
                if not await self._answer(connection, player, text):
                    break
        except ConnectionClosed:
            pass  # it went without a goodbye, or a fault cut it
        finally:
            player.end()
            self._leave(number)

    def _record(self, session: int, kind: str, data: dict[str, Any]) -> Received:
        event = Received(session, kind, data)
        with self._changed:
            self.received.append(event)
            self._changed.notify_all()
        return event

    def _enter(self, session: int, *, forced_out: bool) -> bool:
        with self._changed:
            if forced_out or (self._capacity is not None and len(self._sessions) >= self._capacity):
                return False
            self._sessions.add(session)
            self.peak_sessions = max(self.peak_sessions, len(self._sessions))
            self._changed.notify_all()
            return True

    def _leave(self, session: int) -> None:
        with self._changed:
            self._sessions.discard(session)
            self._changed.notify_all()

    def _full(self) -> str:
        active = self.sessions
        maximum = active if self._capacity is None else self._capacity
        counts = {"active_sessions": active, "max_sessions": maximum}
        return error_frame("CAPACITY_REACHED", f"{active} of {maximum} sessions are in use", **counts)

    # The server's thread: a request

    async def _answer(self, connection: ServerConnection, player: Player, text: str | bytes) -> bool:
        """Act on a request and answer it; False ends the session."""
        kind, data, complaint = read_request(text)
        request = self._record(player.number, kind, data)
        if complaint is not None:
            await connection.send(complaint)
            return True
        fault = self._strike(kind)
        if fault is not None and fault.kind in INSTEAD:
            return await self._fail_instead(connection, fault)
        gate = self._gate  # of this moment: what is released while the script acts is released
        answer = None if kind == "close" else await self._act(player, request)
        if fault is not None and fault.kind == "delay":
            await self._hold(fault.value, gate)
            fault = None
        if answer is None:
            return False
        if fault is None:
            await connection.send(answer)
            return True
        return await self._fail_after(connection, fault, answer)

    async def _act(self, player: Player, request: Received) -> str | bytes:
        if request.kind == "state":
            return json.dumps({"type": "state", "data": player.state()})
        if request.kind == "reset":
            answer = await player.reset(self.script, request.data)
        else:
            answer = await player.step(request.data)
        if isinstance(answer, BaseException):
            # A script stands for an environment: the server survives what it raises. What it asserts is for the test.
            if isinstance(answer, AssertionError) or not isinstance(answer, Exception):
                self.failures.append(answer)
            return error_frame("EXECUTION_ERROR", str(answer))
        with self._changed:
            self.applied.append(request)
            self._changed.notify_all()
        return answer

    async def _fail_after(self, connection: ServerConnection, fault: Fault, answer: str | bytes) -> bool:
        if fault.kind == "drop_after":
            cut(connection)
            return False
        await connection.send(fault.forge() if fault.kind in FORGED else answer)
        if fault.kind == "extra":
            await connection.send(fault.value)
        return True
