"""An event loop in a thread, used from code that blocks and from other loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from schedulers.loop_thread import LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("under-test")
    yield thread
    thread.close()
    assert "under-test" not in [other.name for other in threading.enumerate()]


async def name_of_thread() -> str:
    return threading.current_thread().name


async def fail() -> None:
    raise LookupError("a bug")


async def test_coroutines_run_in_the_thread(loop: LoopThread) -> None:
    """Also for callers that have an event loop of their own, blocking or not."""
    assert loop.run(name_of_thread()) == "under-test"
    assert await loop.call(name_of_thread()) == "under-test"


async def test_exceptions_reach_the_caller(loop: LoopThread) -> None:
    with pytest.raises(LookupError, match="a bug"):
        loop.run(fail())
    with pytest.raises(LookupError, match="a bug"):
        await loop.call(fail())


async def test_cancelled_caller_cancels_the_coroutine(loop: LoopThread) -> None:
    started, cleaned_up = threading.Event(), threading.Event()

    async def wait() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up.set()

    call = asyncio.ensure_future(loop.call(wait()))
    await asyncio.to_thread(started.wait)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.to_thread(cleaned_up.wait)


def test_submitted_coroutine_is_not_waited_for(loop: LoopThread) -> None:
    go, done = threading.Event(), threading.Event()

    async def work() -> None:
        await asyncio.to_thread(go.wait)
        done.set()

    loop.submit(work())
    assert not done.is_set()
    go.set()
    done.wait()
