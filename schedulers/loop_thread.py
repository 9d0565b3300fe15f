"""An event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["LoopThread"]

_T = TypeVar("_T")


class LoopThread:
    """An event loop in a thread of its own: it can be used where another loop already runs, and outlives one batch.

    Args:
        name: The thread's.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Wait for a coroutine. An interrupt of the waiting cancels it and lets it clean up first."""
        tasks: list[asyncio.Task[_T]] = []
        done = threading.Event()

        def start() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda _: done.set())

        def cancel() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # interrupted before it was started
                coroutine.close()
                done.set()

        try:
            self._loop.call_soon_threadsafe(start)
            done.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(cancel)
            done.wait()
            raise
        return tasks[0].result()

    async def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Await a coroutine from another loop. When the caller is cancelled, so is the coroutine."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def submit(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Have a coroutine run, and do not wait for it."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
