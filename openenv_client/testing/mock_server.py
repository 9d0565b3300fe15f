"""MockEnvServer: an OpenEnv server for tests, with a real socket, a script instead of an environment, and faults."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast
from uuid import UUID

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

__all__ = ["Fault", "MockEnvServer", "Received", "Script", "echo", "reply"]

Script = Sequence[Mapping[str, Any]] | Callable[[dict[str, Any]], Iterable[Mapping[str, Any]]]
"""What the server plays: replies in order, the first of them to reset; or a function of the reset arguments that gives
such replies, usually a generator function, to which ``yield`` returns the next action."""

_logger = logging.getLogger(__name__)


def reply(
    observation: Mapping[str, Any],
    *,
    reward: float | None = None,
    done: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One reply of a script. A script may also hold any other dict: it is sent as it is, however wrong."""
    data: dict[str, Any] = {"observation": dict(observation), "reward": reward, "done": done}
    return data if metadata is None else {**data, "metadata": dict(metadata)}


def echo(reset_kwargs: dict[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
    """The default script: observations tell the number of the step and the action; the reward is the number."""
    action = yield reply({"step": 0, "reset": reset_kwargs})
    for step in itertools.count(1):
        action = yield reply({"step": step, "action": action}, reward=float(step))


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    On a connect:

    ``http``: it is answered with HTTP status ``value``.
    ``full``: the session is refused with CAPACITY_REACHED.

    On a connect or a request:

    ``drop``: the TCP connection is cut; the request is not acted on.
    ``delay``: the answer waits ``value`` seconds or, with None, until `MockEnvServer.release`; the request is acted on.

    On a request that is not acted on:

    ``close``: the socket is closed with code ``value``, or with a tuple of code and reason.
    ``error``: the answer is an error of code ``value``.

    On a request that is acted on:

    ``drop_after``: the TCP connection is cut instead of the answer.
    ``send``: ``value``, a str or bytes, is sent instead of the answer.
    ``extra``: ``value`` is sent after the answer.
    ``big``: the answer's observation has ``value`` bytes.

    Args:
        kind: What happens, see above.
        on: To what: a connect or a request of this type.
        value: See above.
        nth: To which of them, counted from 1 when the fault is given to the server.
        times: To how many in a row; None for all from then on.
    """

    kind: Literal["http", "full", "drop", "drop_after", "delay", "close", "error", "send", "extra", "big"]
    on: Literal["connect", "reset", "step", "state"]
    value: Any = None
    nth: int = 1
    times: int | None = 1

    def strikes(self, count: int) -> bool:
        """Whether it happens to the event of this number."""
        return self.nth <= count and (self.times is None or count < self.nth + self.times)


@dataclass(frozen=True)
class Received:
    """Something that arrived.

    Attributes:
        session: Number of the connection, counted from 1.
        kind: "connect", "reset", "step", "state" or "close".
        data: The request's data; of a connect, its ``path`` and ``headers``.
    """

    session: int
    kind: str
    data: dict[str, Any]


class MockEnvServer:
    """An OpenEnv server on a free port of the loopback interface, in a thread of its own. Use it as a context manager.

    ::

        with MockEnvServer([reply({"n": 0}), reply({"n": 1}, reward=1.0, done=True)]) as server:
            with OpenEnvWrapper(base_url=server.base_url) as env:
                env.reset()
                env.step({"message": "go"})
            assert server.sessions == 0

    Args:
        script: What every episode plays. A list starts anew with each reset. A request that finds no reply left is
            answered with EXECUTION_ERROR, and so is one for which a function raises.
        faults: What goes wrong.
        capacity: Sessions at a time; None for no limit.
        path: Path of the endpoint; others are answered with HTTP 403, as a real server does.
        max_message_size: Bytes that a request may have.

    Attributes:
        script: May be replaced; episodes that begin later play the new one.
        received: All that arrived, in order.
        applied: Those requests that the script has acted on.
        peak_sessions: The most sessions that there were at a time.
    """

    def __init__(
        self,
        script: Script = echo,
        *,
        faults: Iterable[Fault] = (),
        capacity: int | None = None,
        path: str = "/ws",
        max_message_size: int = 16 * 2**20,
    ) -> None:
        self.script = script
        self.received: list[Received] = []
        self.applied: list[Received] = []
        self.peak_sessions = 0
        self._faults = list(faults)
        self._capacity = capacity
        self._path = path
        self._max_message_size = max_message_size
        self._port = 0
        self._numbers = itertools.count(1)
        self._counts: Counter[str] = Counter()
        self._sessions: set[int] = set()
        # Guards all of the above; notified whenever something arrives or ends.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    # Life

    def start(self) -> Self:
        """Listen, on the port of the last time if there was one.

        Raises:
            OSError: The port has been taken.
        """
        if self._thread is not None:
            raise RuntimeError("the server is running already; stop() it first")
        failure: list[OSError] = []
        ready = threading.Event()

        def run() -> None:
            try:
                asyncio.run(self._main(ready))
            except OSError as exc:
                failure.append(exc)
            finally:
                ready.set()

        thread = threading.Thread(target=run, name="MockEnvServer", daemon=True)
        thread.start()
        ready.wait()
        if failure:
            raise failure[0]
        self._thread = thread
        return self

    def stop(self) -> None:
        """Cut all connections and stop listening, as a killed process does."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
            self._thread = None

    def restart(self) -> None:
        """Stop and start again on the same port. Running episodes are lost."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # What tests use

    @property
    def base_url(self) -> str:
        """The address to give to a client."""
        return f"http://127.0.0.1:{self._port}{self._path.removesuffix('/ws')}"

    @property
    def sessions(self) -> int:
        """How many sessions are live."""
        with self._changed:
            return len(self._sessions)

    def inject(self, fault: Fault) -> None:
        """Add a fault; its ``nth`` is counted from now on."""
        with self._changed:
            self._faults.append(replace(fault, nth=fault.nth + self._counts[fault.on]))

    def release(self) -> None:
        """Let the answers go that a ``delay`` without a time holds back."""
        self._loop.call_soon_threadsafe(self._release)

    def wait_until(self, condition: Callable[[], object], *, timeout: float = 10.0) -> None:
        """Wait until something about this server is true, for example ``lambda: server.sessions == 0``.

        Raises:
            AssertionError: It did not become true in ``timeout`` seconds.
        """
        with self._changed:
            # The condition may read `sessions`: the lock of a Condition may be taken again by its owner.
            if not self._changed.wait_for(condition, timeout):
                raise AssertionError(f"still not true after {timeout:g} s; received: {self.received}")

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the whole server, as SIGSTOP does: the kernel takes connections and bytes, but nothing answers."""
        frozen, thaw = threading.Event(), threading.Event()

        def freeze() -> None:
            frozen.set()
            thaw.wait()

        self._loop.call_soon_threadsafe(freeze)
        frozen.wait()
        try:
            yield
        finally:
            thaw.set()

    # The server's thread

    async def _main(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._gate = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._opening: dict[UUID, tuple[int, Fault | None]] = {}
        # Scripts run in threads, so that one that waits for another session does not stop the server.
        self._pool = ThreadPoolExecutor(max_workers=256, thread_name_prefix="MockEnvServer-script")
        server = await serve(
            self._handle,
            "127.0.0.1",
            self._port,
            process_request=self._process_request,
            compression=None,
            ping_interval=None,
            max_size=self._max_message_size,
            logger=_logger,
        )
        self._port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._stopping.wait()
        for connection in server.connections:
            connection.transport.abort()
        for task in self._tasks:
            task.cancel()
        server.close()
        await server.wait_closed()
        self._pool.shutdown(wait=False)

    def _release(self) -> None:
        self._gate.set()
        self._gate = asyncio.Event()

    def _remember_task(self) -> None:
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _record(self, session: int, kind: str, data: dict[str, Any]) -> Received:
        event = Received(session, kind, data)
        with self._changed:
            self.received.append(event)
            self._changed.notify_all()
        return event

    def _strike(self, on: str) -> Fault | None:
        """Count an event and choose the fault that happens to it."""
        with self._changed:
            self._counts[on] += 1
            return next((f for f in self._faults if f.on == on and f.strikes(self._counts[on])), None)

    async def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        session, fault = next(self._numbers), self._strike("connect")
        self._record(session, "connect", {"path": request.path, "headers": dict(request.headers.raw_items())})
        self._opening[connection.id] = session, fault
        self._remember_task()
        if request.path.partition("?")[0] != self._path:
            return connection.respond(403, "no such endpoint\n")
        if fault is None:
            return None
        if fault.kind == "http":
            return connection.respond(fault.value, "as the script says\n")
        if fault.kind == "drop":
            connection.transport.abort()
        if fault.kind == "delay":
            await _hold(self._gate, fault.value)
        return None

    async def _handle(self, connection: ServerConnection) -> None:
        number, fault = self._opening.pop(connection.id)
        session = _Session(number)
        if not self._enter(number, forced_out=fault is not None and fault.kind == "full"):
            await connection.send(self._full())
            return
        try:
            async for text in connection:
                if not await self._answer(connection, session, text):
                    break
        except ConnectionClosed:
            pass  # it went without a goodbye, or a fault cut it
        finally:
            self._leave(number)

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
        return _error("CAPACITY_REACHED", f"{active} of {maximum} sessions are in use", **counts)

    async def _answer(self, connection: ServerConnection, session: _Session, text: str | bytes) -> bool:
        """Act on a request and answer it; False ends the session."""
        kind, data, complaint = _read(text)
        request = self._record(session.number, kind, data)
        if kind == "close":
            return False
        if complaint is not None:
            await connection.send(complaint)
            return True
        fault = self._strike(kind)
        if fault is not None and fault.kind in _INSTEAD:
            return await self._fail_instead(connection, fault)
        gate = self._gate  # of this moment: what is released while the script acts is released
        answer = await self._act(session, request)
        if fault is None:
            await connection.send(answer)
            return True
        if fault.kind == "delay":
            await _hold(gate, fault.value)
        return await self._fail_after(connection, fault, answer)

    async def _act(self, session: _Session, request: Received) -> str:
        if request.kind == "state":
            return json.dumps({"type": "state", "data": session.state()})
        act = session.reset if request.kind == "reset" else session.step
        try:
            data = await self._loop.run_in_executor(self._pool, act, self.script, request.data)
        except Exception as exc:  # noqa: BLE001 - a script stands for an environment: the server survives what it raises
            return _error("EXECUTION_ERROR", str(exc))
        with self._changed:
            self.applied.append(request)
            self._changed.notify_all()
        return json.dumps({"type": "observation", "data": data})

    async def _fail_instead(self, connection: ServerConnection, fault: Fault) -> bool:
        if fault.kind == "drop":
            connection.transport.abort()
            return False
        if fault.kind == "close":
            code, reason = fault.value if isinstance(fault.value, tuple) else (fault.value, "")
            await connection.close(code, reason)
            return False
        await connection.send(_error(fault.value, "as the script says"))
        return fault.value not in ("FACTORY_ERROR", "SESSION_ERROR")

    async def _fail_after(self, connection: ServerConnection, fault: Fault, answer: str) -> bool:
        if fault.kind == "drop_after":
            connection.transport.abort()
            return False
        if fault.kind == "big":
            answer = json.dumps({"type": "observation", "data": reply({"padding": "x" * fault.value})})
        await connection.send(fault.value if fault.kind == "send" else answer)
        if fault.kind == "extra":
            await connection.send(fault.value)
        return True


class _Session:
    """One connection's episode."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._episodes = 0
        self._steps = 0
        self._replies: Iterator[Mapping[str, Any]] = iter(())

    def reset(self, script: Script, kwargs: dict[str, Any]) -> Mapping[str, Any]:
        self._replies = iter(script(kwargs) if callable(script) else script)
        self._episodes += 1
        self._steps = 0
        return self._next(None)

    def step(self, script: Script, action: dict[str, Any]) -> Mapping[str, Any]:
        self._steps += 1
        return self._next(action)

    def state(self) -> dict[str, Any]:
        return {"episode_id": f"{self.number}-{self._episodes}", "step_count": self._steps}

    def _next(self, action: dict[str, Any] | None) -> Mapping[str, Any]:
        try:
            if isinstance(self._replies, Generator):
                generator: Generator[Mapping[str, Any], Any, None] = self._replies
                return generator.send(action)
            return next(self._replies)
        except StopIteration:
            raise LookupError(f"the script has no reply number {self._steps + 1}") from None


_INSTEAD = ("drop", "close", "error")

_KEYS = {"reset": {"type", "data"}, "step": {"type", "data"}, "state": {"type"}, "close": {"type"}}


def _read(text: str | bytes) -> tuple[str, dict[str, Any], str | None]:
    """Type and data of a request, and what a server answers to it if it is none."""
    try:
        message = json.loads(text)
    except ValueError as exc:
        return "garbage", {"text": text}, _error("INVALID_JSON", f"Invalid JSON: {exc}")
    kind = message.get("type") if isinstance(message, dict) else None
    if kind not in _KEYS:
        return str(kind), {"text": text}, _error("UNKNOWN_TYPE", f"Unknown message type: {kind}")
    data = message.get("data", {})
    if not message.keys() <= _KEYS[kind] or not isinstance(data, dict):
        return kind, {"text": text}, _error("VALIDATION_ERROR", "Invalid message", errors=[])
    return kind, data, None


async def _hold(gate: asyncio.Event, seconds: float | None) -> None:
    if seconds is None:
        await gate.wait()
    else:
        await asyncio.sleep(seconds)


def _error(code: str, message: str, **data: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **data}})
