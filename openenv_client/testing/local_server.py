"""LocalServer: what the mock server and the fault proxy share, which is a WebSocket server in a thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

    from .mock_server import Fault

__all__ = ["LocalServer"]

_logger = logging.getLogger(__name__)


class LocalServer(ABC):
    """A WebSocket server on a free port of the loopback interface, with an event loop and a thread of its own.

    Args:
        faults: What goes wrong.
        max_message_size: Bytes that a message to it may have.
    """

    def __init__(self, *, faults: Iterable[Fault], max_message_size: int) -> None:
        self._faults = list(faults)
        self._max_message_size = max_message_size
        self._port = 0
        self._counts: Counter[str] = Counter()
        # Guards what both threads use; notified whenever something arrives or ends.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Listen, on the port of the last time if there was one.

        Raises:
            OSError: The port has been taken.
        """
        if self._thread is not None:
            raise RuntimeError(f"the {type(self).__name__} is running already; stop() it first")
        failure: list[OSError] = []
        ready = threading.Event()

        def run() -> None:
            try:
                asyncio.run(self._main(ready))
            except OSError as exc:
                failure.append(exc)
            finally:
                ready.set()

        thread = threading.Thread(target=run, name=type(self).__name__, daemon=True)
        thread.start()
        ready.wait()
        if failure:
            thread.join()
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
        """Stop and start again on the same port."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def inject(self, fault: Fault) -> None:
        """Add a fault; its ``nth`` is counted from now on."""
        with self._changed:
            self._faults.append(replace(fault, nth=fault.nth + self._counts[fault.on]))

    def wait_until(self, condition: Callable[[], object], *, timeout: float = 10.0) -> None:
        """Wait until something about this server is true.

        Raises:
            AssertionError: It did not become true in ``timeout`` seconds.
        """
        with self._changed:
            # The condition may take the lock again: that of a Condition is reentrant.
            if not self._changed.wait_for(condition, timeout):
                raise AssertionError(f"still not true after {timeout:g} s")

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
            return next((f for f in self._faults if f.on == on and f.strikes(self._counts[on])), None)

    async def _main(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        tasks: set[asyncio.Task[Any]] = set()

        async def process_request(connection: ServerConnection, request: Request) -> Response | None:
            task = cast("asyncio.Task[Any]", asyncio.current_task())  # the one that will serve the connection
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            return await self._process_request(connection, request)

        server = await serve(
            self._handle,
            "127.0.0.1",
            self._port,
            process_request=process_request,
            compression=None,
            open_timeout=None,  # a fault may make the handshake take long
            ping_interval=None,
            close_timeout=1.0,
            max_size=self._max_message_size,
            max_queue=1,  # whoever sends faster than this reads is held back
            logger=_logger,
        )
        self._port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._stopping.wait()
        for connection in server.connections:
            connection.transport.abort()
        for task in tasks:
            task.cancel()
        server.close()
        await server.wait_closed()
