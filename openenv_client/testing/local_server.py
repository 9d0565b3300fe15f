"""LocalServer: what the mock server and the fault proxy share, which is a WebSocket server in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from websockets.asyncio.connection import Connection
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from openenv_client.checks import whole

from .faults import Fault
from .frames import error_frame

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

__all__ = ["LocalServer", "cut"]

_logger = logging.getLogger(__name__)


class LocalServer(ABC):
    """A WebSocket server on a free port of the loopback interface, with an event loop and a thread of its own.

    Its methods may be called from any thread.

    Args:
        faults: What goes wrong.
        max_message_size: Bytes that a message to it may have.
    """

    def __init__(self, *, faults: Iterable[Fault], max_message_size: int) -> None:
        self._faults = [] if isinstance(faults, Fault) else list(faults)
        if isinstance(faults, Fault) or not all(isinstance(fault, Fault) for fault in self._faults):
            raise TypeError(f"faults is {faults!r:.100}; give a list such as [Fault('drop', 'step')]")
        self._max_message_size = whole("max_message_size", max_message_size, least=1)
        self._port = 0
        self._counts: Counter[str] = Counter()
        # Guards what several threads use; notified whenever something arrives or ends.
        self._changed = threading.Condition()
        self._starting = threading.RLock()  # held while it starts and stops
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._thaws: set[threading.Event] = set()
        self._gate: asyncio.Event

    # Life

    def start(self) -> Self:
        """Listen, on the port of the last time if there was one.

        Raises:
            OSError: The port has been taken.
        """
        with self._starting:
            if self._thread is not None:
                raise RuntimeError(f"the {type(self).__name__} is running already; stop() it first")
            ready: Future[None] = Future()
            thread = threading.Thread(target=self._run, args=(ready,), name=type(self).__name__, daemon=True)
            thread.start()
            failure = ready.exception()
            if failure is not None:
                thread.join()
                raise failure
            self._thread, self._pid = thread, os.getpid()
            return self

    def stop(self) -> None:
        """Cut all connections and stop listening, as a killed process does. In a forked process this does nothing."""
        with self._starting:
            thread, self._thread = self._thread, None
            if thread is None or self._pid != os.getpid():
                return
            for thaw in list(self._thaws):
                thaw.set()
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself, in an error
                self._loop.call_soon_threadsafe(self._stopping.set)
            thread.join()

    def restart(self) -> None:
        """Stop and start again on the same port. Running episodes are lost."""
        with self._starting:
            self.stop()
            self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # What tests use

    def inject(self, fault: Fault) -> None:
        """Add a fault; its ``nth`` is counted from now on."""
        with self._changed:
            self._faults.append(replace(fault, nth=fault.nth + self._counts[fault.on]))
        if fault.kind == "refuse" and self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._refuse_if_due(), self._running_loop()).result()

    def release(self) -> None:
        """End what a fault without a time holds back."""
        self._running_loop().call_soon_threadsafe(self._release)

    def wait_until(self, condition: Callable[[], object], *, timeout: float = 10.0) -> None:
        """Wait until something about this server is true, for example ``lambda: server.sessions == 0``.

        Raises:
            AssertionError: It did not become true in ``timeout`` seconds.
        """
        with self._changed:
            # The condition may take the lock again: that of a Condition is reentrant.
            if not self._changed.wait_for(condition, timeout):
                raise AssertionError(f"still not true after {timeout:g} s")

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the whole server, as SIGSTOP does: the kernel takes connections and bytes, but nothing answers."""
        frozen, thaw = threading.Event(), threading.Event()

        def freeze() -> None:
            frozen.set()
            thaw.wait()

        self._thaws.add(thaw)
        try:
            self._running_loop().call_soon_threadsafe(freeze)
            frozen.wait()
            yield
        finally:
            self._thaws.discard(thaw)
            thaw.set()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._thread is None or self._pid != os.getpid():
            raise RuntimeError(f"the {type(self).__name__} does not run in this process; start() it first")
        return self._loop

    # The thread

    @abstractmethod
    async def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        """Take a handshake; a response refuses it."""

    @abstractmethod
    async def _handle(self, connection: ServerConnection) -> None:
        """Serve a connection until it ends."""

    def _strike(self, on: str) -> Fault | None:
        """Count an event and choose the fault that happens to it."""
        with self._changed:
            self._counts[on] += 1
            count = self._counts[on]
            # One that refuses connections is over when the next of them arrives.
            return next((f for f in self._faults if f.on == on and f.kind != "refuse" and f.strikes(count)), None)

    async def _fail_instead(self, connection: ServerConnection, fault: Fault) -> bool:
        """Let a request or a connect fail that is not acted on; False ends the session."""
        if fault.kind == "close":
            code, reason = fault.value if isinstance(fault.value, tuple) else (fault.value, "")
            await connection.close(code, reason)
            return False
        if fault.kind == "error":
            await connection.send(error_frame(fault.value, "as the fault says"))
            return fault.value not in ("FACTORY_ERROR", "SESSION_ERROR", "CAPACITY_REACHED")
        if fault.kind == "freeze":
            connection.transport.pause_reading()
            await self._hold(fault.value)
        elif fault.kind == "restart":
            await self._go_down(fault)
        cut(connection)
        return False

    async def _hold(self, seconds: float | None, gate: asyncio.Event | None = None) -> None:
        """Wait so long or, with None, until the gate is opened, by default the next that `release` opens."""
        if seconds is None:
            await (gate or self._gate).wait()
        else:
            await asyncio.sleep(seconds)

    def _release(self) -> None:
        self._gate.set()
        self._gate = asyncio.Event()

    def _run(self, ready: Future[None]) -> None:
        try:
            asyncio.run(self._main(ready))
        except BaseException as exc:
            if ready.done():
                raise
            ready.set_exception(exc)

    async def _main(self, ready: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        main = cast("asyncio.Task[Any]", asyncio.current_task())
        self._tasks_of_the_server = {main}
        self._stopping, self._gate = asyncio.Event(), asyncio.Event()
        self._connections: set[ServerConnection] = set()
        self._changing_listener = asyncio.Lock()
        self._server: Server | None = None
        self._bound: socket.socket | None = None
        self._bind()
        try:
            refusal = self._due_refusal()
            if refusal is None:
                await self._listen()
            else:
                self._come_back_after(refusal)
            ready.set_result(None)
            await self._stopping.wait()
        finally:
            for coming_back in self._tasks_of_the_server - {main}:
                coming_back.cancel()
            self._tasks_of_the_server = {main}
            async with self._changing_listener:
                await self._close_listener()
            await self._end_connections()

    # The thread: the listening socket

    def _bind(self) -> None:
        """Take the port. Until somebody listens there, connections to it are refused, and nobody else can take it."""
        bound = socket.socket()
        try:
            if os.name == "posix":  # elsewhere this means that others may take the port
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(("127.0.0.1", self._port))
        except OSError as exc:
            bound.close()
            raise OSError(exc.errno, f"port {self._port} cannot be had again: {exc.strerror}") from None
        self._bound, self._port = bound, bound.getsockname()[1]

    async def _listen(self) -> None:
        known = self._connections

        class KnownConnection(ServerConnection):
            # websockets keeps no list of those that are in the handshake. One that nobody closes outlives its loop.
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                known.add(self)
                super().connection_made(transport)

            def connection_lost(self, exc: Exception | None) -> None:
                known.discard(self)
                super().connection_lost(exc)

        async def process_request(connection: ServerConnection, request: Request) -> Response | None:
            response = await self._process_request(connection, request)
            if response is not None or connection.transport.is_closing():
                await self._refuse_if_due()
            return response

        async def handle(connection: ServerConnection) -> None:
            await self._refuse_if_due()  # not during the handshake: websockets would then refuse this connection too
            await self._handle(connection)

        bound, self._bound = self._bound, None
        self._server = await serve(
            handle,
            sock=bound,
            start_serving=False,  # it is known before it takes connections: stopping it may come between
            process_request=process_request,
            create_connection=KnownConnection,
            compression=None,
            open_timeout=None,  # a fault may make the handshake slow
            ping_interval=None,
            close_timeout=1.0,
            max_size=self._max_message_size,
            max_queue=1,  # whoever sends faster than this side reads is held back
            logger=_logger,
        )
        await self._server.start_serving()

    async def _close_listener(self) -> None:
        server, self._server = self._server, None
        bound, self._bound = self._bound, None
        if bound is not None:
            bound.close()
        if server is None:
            return
        copies = [listener.dup() for listener in server.sockets]
        try:
            for listener in server.sockets:
                # asyncio loses, open, what it accepts in the last moment before the server closes: accept no more now.
                with contextlib.suppress(NotImplementedError):  # on Windows
                    self._loop.remove_reader(listener)
            server.close(close_connections=False)
            while server.is_serving():  # noqa: ASYNC110 - websockets tells of this in no other way
                await asyncio.sleep(0)
        finally:
            for copy in copies:
                with copy, contextlib.suppress(OSError):
                    copy.shutdown(socket.SHUT_RDWR)  # else the copies in forked processes go on listening

    async def _end_connections(self) -> None:
        """Cut all connections, and wait until nothing is left of them."""
        await asyncio.sleep(0)  # a connection that was accepted just now becomes known
        # The loop is ours, so all other tasks are those of connections. Some take more than one step to end.
        while self._connections or self._tasks_of_connections():
            for connection in list(self._connections):
                cut(connection)
            for task in self._tasks_of_connections():
                task.cancel()
            await asyncio.sleep(0)

    def _tasks_of_connections(self) -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks() - self._tasks_of_the_server

    # The thread: times without a listener

    def _due_refusal(self) -> Fault | None:
        """The fault that refuses the next connection, if there is one. It is spent by that."""
        with self._changed:
            due = (f for f in self._faults if f.kind == "refuse" and f.nth <= self._counts["connect"] + 1)
            fault = next(due, None)
            if fault is not None:
                self._faults.remove(fault)
            return fault

    async def _refuse_if_due(self) -> None:
        refusal = self._due_refusal()
        if refusal is not None:
            await self._go_down(refusal)

    async def _go_down(self, fault: Fault) -> None:
        """Listen no more until the time of a ``refuse`` or ``restart`` is over."""
        async with self._changing_listener:
            if self._server is None:
                return  # it is down already
            await self._close_listener()
            if not self._stopping.is_set():
                self._bind()
                self._come_back_after(fault)

    def _come_back_after(self, fault: Fault) -> None:
        gate = self._gate  # of this moment

        async def come_back() -> None:
            if fault.kind == "restart":
                await self._end_connections()
            await self._hold(fault.value, gate)
            async with self._changing_listener:
                await self._listen()

        self._tasks_of_the_server.add(asyncio.create_task(come_back()))


def cut(connection: Connection) -> None:
    """Cut a TCP connection."""
    transport: Any = connection.transport
    # Closing is not enough where a forked process has a copy of the socket.
    with contextlib.suppress(OSError):
        transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    transport.abort()
