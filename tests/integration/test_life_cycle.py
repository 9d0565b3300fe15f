"""Clients that fail, freeze or die, and an environment that leaves its server no time to answer."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from examples.sudoku.example import perfect
from examples.sudoku.scheduler import SudokuScheduler
from openenv_client import KeepaliveError, OpenEnvWrapper
from schedulers import Episode, RolloutInferRequest
from schedulers.engines import ScriptedEngine
from server_scripts.launch import ServerProcess
from tests.programs import Program, program

Servers = Callable[..., ServerProcess]


@pytest.fixture
def server(environment_server: Servers) -> ServerProcess:
    """Six empty cells, four sessions."""
    return environment_server(env_id="Sudoku-v0-very-easy", max_concurrent_envs=4)


def rows(base_url: str, number: int) -> list[dict[str, Any]]:
    return [{"env_config": {"base_url": base_url, "reset_kwargs": {"seed": seed}}} for seed in range(number)]


# -- nothing grows ----------------------------------------------------------------------------------


def seed_of(request: RolloutInferRequest) -> int:
    return int(request.data_dict["env_config"]["reset_kwargs"]["seed"])


class Fragile(SudokuScheduler):
    """Plays well, or fails in one of many ways, by the seed of the row."""

    def __init__(self) -> None:
        super().__init__(ScriptedEngine(self._answer))
        self.asked = asyncio.Event()

    def _answer(self, request: RolloutInferRequest, turn: int) -> Any:
        self.asked.set()
        if seed_of(request) == 3:
            return OSError("no GPU")
        if seed_of(request) == 4:
            return asyncio.CancelledError()
        if seed_of(request) == 5 and turn == 1:
            self.episode(request).env.abort()
        return perfect(request, turn)

    def observe_step(self, episode: Episode, *args: Any) -> Any:
        if seed_of(episode.request) == 1:
            raise LookupError("a bug in a hook")
        return super().observe_step(episode, *args)

    async def on_trajectory_end(self, episode: Episode) -> None:
        if seed_of(episode.request) == 2:
            raise LookupError("a bug at the end")
        await super().on_trajectory_end(episode)


def open_things(before: set[threading.Thread]) -> tuple[int, set[threading.Thread]]:
    """How many descriptors are open, and which threads run, once those of closed connections have ended."""
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    gc.collect()
    return len(os.listdir("/proc/self/fd")), set(threading.enumerate())


async def test_many_batches_leave_threads_and_descriptors_as_they_were(server: ServerProcess) -> None:
    """S03: eighteen batches of eight on four slots, with bugs in hooks and engine, lost sessions, and cancellations."""
    scheduler = Fragile()
    descriptors, threads = 0, set(threading.enumerate())
    for number in range(18):
        scheduler.asked.clear()
        running = asyncio.ensure_future(scheduler.async_infer(rows(server.base_url, 8), use_tqdm=False))
        if number % 3 == 2:
            await scheduler.asked.wait()
            running.cancel()
        [result] = await asyncio.gather(running, return_exceptions=True)
        if isinstance(result, list):
            assert [output.total_reward is not None for output in result] == [True, *[False] * 5, True, True]
        await asyncio.to_thread(server.wait_until_idle)
        if number == 0:  # all that is made once is there now: the default pool's threads, the engine's
            descriptors, threads = open_things(threads)
    assert open_things(threads) == (descriptors, threads)


async def test_many_sessions_are_closed_side_by_side_although_the_server_is_frozen(environment_server: Servers) -> None:
    """W13: one close after the other would take as many times the close timeout."""
    server = environment_server(env_id="Sudoku-v0-very-easy", max_concurrent_envs=32)
    everybody = asyncio.Event()
    waiting = 0

    async def script(request: RolloutInferRequest, turn: int) -> str:
        nonlocal waiting
        waiting += 1
        if waiting == 32:
            everybody.set()
        await asyncio.Event().wait()
        return "never"

    scheduler = SudokuScheduler(ScriptedEngine(script), max_concurrent_envs=1, env_settings={"close_timeout": 2})
    running = asyncio.ensure_future(scheduler.async_infer(rows(server.base_url, 32), use_tqdm=False))
    await everybody.wait()
    server.process.send_signal(signal.SIGSTOP)
    try:
        await scheduler.aclose()
    finally:
        server.process.send_signal(signal.SIGCONT)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.to_thread(server.wait_until_idle)


# -- clients that freeze or die ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def impatient_server() -> Iterator[ServerProcess]:
    """Asks every second whether its clients are there, and gives them a second to answer."""
    options = ["--ws-ping-interval", "1", "--ws-ping-timeout", "1"]
    with ServerProcess(env_id="Sudoku-v0-very-easy", max_concurrent_envs=4, options=options) as server:
        yield server


def freeze_until_dropped(child: Program, server: ServerProcess) -> None:
    """Stop a process until the server has given it up."""
    child.process.send_signal(signal.SIGSTOP)
    server.wait_until_idle(timeout=60)
    child.process.send_signal(signal.SIGCONT)


STEP = """
    from openenv_client import OpenEnvWrapper, SessionLost
    with OpenEnvWrapper(base_url={base_url!r}) as env:
        env.reset(seed={seed})
        print("ready", flush=True)
        input()
        try:
            result = env.step({{"message": "no move"}})
            print(len(result.metadata["recoveries"]), env.state()["step_count"])
        except SessionLost as error:
            print(type(error).__name__, error.maybe_applied, error.message)
"""


@pytest.mark.parametrize(
    ("seed", "came_of_it"),
    [(None, "KeepaliveError (True|False) connection closed by keepalive"), (1, "1 1$")],
    ids=["without a seed", "with a seed"],
)
def test_client_that_was_frozen_learns_that_its_session_was_dropped(
    impatient_server: ServerProcess, seed: int | None, came_of_it: str
) -> None:
    """W05: the slot is free; the step says why the session is gone, or is played in a game that was rebuilt."""
    with program(STEP.format(base_url=impatient_server.base_url, seed=seed)) as child:
        assert child.read() == "ready"
        assert impatient_server.count_sessions().active == 1
        freeze_until_dropped(child, impatient_server)
        child.write()
        assert re.match(came_of_it, child.read())
        assert child.end()[0] == 0
    impatient_server.wait_until_idle()


BATCH = """
    import asyncio, logging
    from examples.sudoku.example import perfect
    from examples.sudoku.scheduler import SudokuScheduler
    from schedulers.engines import ScriptedEngine
    logging.disable()

    def answer(request, turn):
        if request.uuid == "slow" and turn == 1:  # the model takes its time
            print("ready", flush=True)
            input()
        return perfect(request, turn)

    async def main():
        settings = {{"recover": {recover!r}}}
        async with SudokuScheduler(ScriptedEngine(answer), env_settings=settings) as scheduler:
            for batch in {batches!r}:
                for output in await scheduler.async_infer(batch, use_tqdm=False):
                    print(output.stop_reason, output.total_reward, len(output.rollout_infos["recoveries"]))

    asyncio.run(main())
"""


@pytest.mark.parametrize(("recover", "came_of_it"), [("never", "env_lost None 0"), ("seeded", "env_done 4.0 1")])
def test_training_goes_on_after_a_freeze(impatient_server: ServerProcess, recover: str, came_of_it: str) -> None:
    """W05: a trajectory whose session was dropped is unscored, or rebuilt; those of the next batch are neither."""
    frozen, later = rows(impatient_server.base_url, 1), rows(impatient_server.base_url, 2)
    frozen[0]["uuid"] = "slow"
    with program(BATCH.format(recover=recover, batches=[frozen, later])) as child:
        assert child.read() == "ready"
        freeze_until_dropped(child, impatient_server)
        child.write()
        assert [child.read() for _ in range(3)] == [came_of_it, "env_done 4.0 0", "env_done 4.0 0"]
        assert child.end() == (0, "")
    impatient_server.wait_until_idle()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_client_that_is_killed_frees_its_session(server: ServerProcess, number: signal.Signals) -> None:
    with program(STEP.format(base_url=server.base_url, seed=1)) as child:
        assert child.read() == "ready"
        child.process.send_signal(number)
        assert child.end()[0] == -number
    server.wait_until_idle()


# -- an environment that keeps its server busy ------------------------------------------------------

BUSY = """
    import ctypes, socket, sys, time
    sys.modules["openenv.core.env_server.web_interface"] = None
    import uvicorn
    from fastapi import FastAPI
    from openenv.core.env_server.http_server import HTTPEnvServer
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Busy(Action):
        seconds: float
        alone: bool

    class BusyEnvironment(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, **kwargs):
            return Observation()

        def step(self, action, **kwargs):
            until = time.monotonic() + action.seconds
            if action.alone:  # a call into C that lets no other thread run
                ctypes.PyDLL(None).sleep(int(action.seconds))
            while time.monotonic() < until:
                pass
            return Observation(reward=1.0)

        @property
        def state(self):
            return State()

    server = HTTPEnvServer(BusyEnvironment, Busy, Observation, max_concurrent_envs=2)
    app = FastAPI()
    server.register_routes(app)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(app, log_level="error", ws_ping_interval=0.2, ws_ping_timeout=0.5)
    uvicorn.Server(config).run(sockets=[listener])
"""


@pytest.fixture(scope="module")
def busy_server() -> Iterator[str]:
    with program(BUSY) as child:
        yield f"http://127.0.0.1:{child.read()}"


def test_environment_that_spins_does_not_cost_its_session(busy_server: str) -> None:
    """W06: Python lets the server's thread answer pings while others spin."""
    pings: dict[str, Any] = {"ping_interval": 0.2, "ping_timeout": 0.5}
    with OpenEnvWrapper(base_url=busy_server, **pings) as env, OpenEnvWrapper(base_url=busy_server, **pings) as other:
        env.reset()
        other.reset()
        assert env.step({"seconds": 2, "alone": False}).reward == 1.0
        assert other.step({"seconds": 0, "alone": False}).reward == 1.0


def test_environment_that_lets_nothing_else_run_is_noticed(busy_server: str) -> None:
    """W06: the step fails within the ping window, long before the environment is through; then the slot is free."""
    with OpenEnvWrapper(base_url=busy_server, ping_interval=0.2, ping_timeout=0.5) as env:
        env.reset()
        with pytest.raises(KeepaliveError, match="closed by keepalive during step") as caught:
            env.step({"seconds": 4, "alone": True})
        assert caught.value.maybe_applied
    with OpenEnvWrapper(base_url=busy_server) as first, OpenEnvWrapper(base_url=busy_server) as second:
        first.reset()
        second.reset()
