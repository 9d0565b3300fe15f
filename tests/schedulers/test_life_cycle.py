"""No session stays on the server, whatever ends a batch: a hook, the engine, a cancellation, a fork, the program."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import inspect
import multiprocessing
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from openenv_client import OpenEnvWrapper
from openenv_client.testing import Fault, MockEnvServer, reply
from schedulers import (
    Env,
    Episode,
    GYMScheduler,
    Messages,
    OpenEnvScheduler,
    RolloutError,
    RolloutInferRequest,
    RolloutOutput,
    Start,
    StopReason,
    envs,
)
from schedulers.engines import ScriptedEngine
from tests.programs import program
from tests.schedulers.chat_tokenizer import ChatTokenizer


def two_steps(kwargs: dict[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
    """The game of all tests: over in the second step."""
    yield reply({"step": 0, **kwargs})
    yield reply({"step": 1}, reward=1.0)
    yield reply({"step": 2}, reward=1.0, done=True)


@pytest.fixture
def server() -> Iterator[MockEnvServer]:
    with MockEnvServer(two_steps) as server:
        yield server


def rows(server: MockEnvServer, *uuids: str) -> list[dict[str, Any]]:
    return [{"uuid": uuid, "env_config": {"base_url": server.base_url, "reset_kwargs": {"seed": 1}}} for uuid in uuids]


def go(request: RolloutInferRequest, turn: int) -> str:
    return "go"


def idle(server: MockEnvServer) -> None:
    server.wait_until(lambda: server.sessions == 0)


async def seen(server: MockEnvServer, kind: str, count: int) -> None:
    """Until so many requests of a kind have arrived."""
    await asyncio.to_thread(server.wait_until, lambda: [r.kind for r in server.received].count(kind) >= count)


def scheduler_of(script: Any = go, **options: Any) -> OpenEnvScheduler:
    return OpenEnvScheduler(ScriptedEngine(script), **{"env_settings": {"step_timeout": 600}, **options})


# -- what users write raises ------------------------------------------------------------------------

HOOKS = [
    *["on_trajectory_start", "on_turn_end", "check_finished", "step", "on_trajectory_end"],
    *["start_env", "step_env", "close_env", "parse_action", "format_observation", "observe_reset", "observe_step"],
]


def broken(hook: str, error: BaseException, *, after: bool) -> type[OpenEnvScheduler]:
    """A scheduler of which one method raises, before or after it has done its work."""
    original = getattr(OpenEnvScheduler, hook)

    async def raise_in_coroutine(self: OpenEnvScheduler, *args: Any) -> Any:
        if after:
            await original(self, *args)
        raise error

    def raise_in_function(self: OpenEnvScheduler, *args: Any) -> Any:
        if after:
            original(self, *args)
        raise error

    method = raise_in_coroutine if inspect.iscoroutinefunction(original) else raise_in_function
    return type("Broken", (OpenEnvScheduler,), {hook: method})


@pytest.mark.parametrize("error", [LookupError("a bug"), asyncio.CancelledError(), StopIteration()], ids=repr)
@pytest.mark.parametrize(
    ("hook", "after"),
    [(hook, after) for hook in HOOKS for after in (False, True) if after or hook != "close_env"],  # it must close
)
async def test_hook_that_raises_leaves_no_session(
    server: MockEnvServer, hook: str, error: BaseException, after: bool
) -> None:
    """S03: also while the outputs, whose exceptions keep frames alive, are still there. Uuids are free again."""
    scheduler = broken(hook, error, after=after)(ScriptedEngine(go))
    [result] = await asyncio.gather(scheduler.async_infer(rows(server, "a", "b")), return_exceptions=True)
    idle(server)
    if isinstance(result, BaseException):
        assert isinstance(result, RolloutError)
    else:
        scored = hook == "close_env" and not isinstance(error, asyncio.CancelledError)
        assert [output.total_reward is not None for output in result] == [scored, scored]
    setattr(type(scheduler), hook, getattr(OpenEnvScheduler, hook))
    again = await scheduler.async_infer(rows(server, "a", "b"))
    assert [output.total_reward for output in again] == [2.0, 2.0]
    idle(server)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("hook", HOOKS)
def test_hook_that_ends_the_program_leaves_no_session(server: MockEnvServer, hook: str, error: BaseException) -> None:
    """S04: the exception reaches the top, and the siblings are cancelled and closed on its way."""
    scheduler = broken(hook, error, after=True)(ScriptedEngine(go))
    with pytest.raises(type(error)) as caught:
        asyncio.run(scheduler.async_infer(rows(server, "a", "b", "c")))
    assert caught.value is error
    idle(server)


async def test_hook_that_forgets_to_call_the_one_it_overrides_leaves_no_session(server: MockEnvServer) -> None:
    class Forgetful(OpenEnvScheduler):
        async def on_trajectory_end(self, episode: Episode) -> None:
            episode.infos["ended"] = True

    [output] = await Forgetful(ScriptedEngine(go)).async_infer(rows(server, "a"))
    assert output.rollout_infos["ended"] is True
    idle(server)


async def test_hook_that_renames_its_request_leaves_no_session(server: MockEnvServer) -> None:
    """The trajectory ends under the name under which it began, which is then free."""

    class Renaming(OpenEnvScheduler):
        def observe_step(self, episode: Episode, *args: Any) -> Any:
            episode.request.uuid += "!"
            return super().observe_step(episode, *args)

    scheduler = Renaming(ScriptedEngine(go), max_turns=1)
    for _ in range(2):
        await asyncio.gather(scheduler.async_infer(rows(server, "a")), return_exceptions=True)
        idle(server)
    assert [r.kind for r in server.received].count("close") == 2


class NoTemplate(ChatTokenizer):
    def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
        raise LookupError("no template")


class NotLoaded:
    """An engine that finds out late that its model is missing."""

    @property
    def tokenizer(self) -> Any:
        raise OSError("no such model")

    async def infer_async(self, request: Any, request_config: Any) -> Any:
        raise AssertionError("never asked")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (ScriptedEngine(go, NoTemplate()), "no template"),
        (ScriptedEngine(go, ChatTokenizer(), max_model_len=1), "leaves no room"),
        (NotLoaded(), "no such model"),
        (None, "has no engine"),
        (ScriptedEngine([OSError("no GPU")]), "no GPU"),
        (ScriptedEngine(["go", OSError("no GPU")]), "no GPU"),
    ],
)
async def test_engine_that_cannot_answer_leaves_no_session(server: MockEnvServer, engine: Any, message: str) -> None:
    """Also when it fails before the first answer, with the session already open."""
    with pytest.raises(RolloutError, match=message):
        await OpenEnvScheduler(engine).async_infer(rows(server, "a", "b"))
    idle(server)
    assert [r.kind for r in server.applied].count("reset") == 2


async def test_reset_that_is_refused_leaves_no_session(server: MockEnvServer) -> None:
    """The server keeps the session of a refused reset; it is closed all the same."""
    server.inject(Fault("error", "reset", "EXECUTION_ERROR", times=None))
    outputs = await scheduler_of().async_infer(rows(server, "a", "b"))
    assert [output.stop_reason for output in outputs] == [StopReason.ENV_LOST] * 2
    idle(server)
    assert [r.kind for r in server.received].count("close") == 2


async def test_batch_that_names_one_trajectory_twice_opens_nothing(server: MockEnvServer) -> None:
    with pytest.raises(ValueError, match="two trajectories with the uuid 'a'"):
        await scheduler_of().async_infer(rows(server, "b", "a", "a"))
    assert server.received == []


async def test_trajectory_that_is_cancelled_as_it_starts_leaves_the_others_of_its_batch(server: MockEnvServer) -> None:
    """A loop that hands a whole batch to the hook gets the others started."""

    class Fragile(OpenEnvScheduler):
        async def start_env(self, episode: Episode, env_config: dict[str, Any]) -> Start:
            if episode.uuid == "b":
                raise asyncio.CancelledError
            return await super().start_env(episode, env_config)

    scheduler = Fragile()
    requests = [RolloutInferRequest.from_row(row) for row in rows(server, "a", "b", "c")]
    episodes = scheduler.begin_trajectories(requests)
    await scheduler.on_trajectory_start(requests)
    assert [episode.stop_reason for episode in episodes] == [None, StopReason.CANCELLED, None]
    assert server.sessions == 2
    await scheduler.aclose()
    idle(server)


# -- cancellation -----------------------------------------------------------------------------------


class Phases:
    """Brings three trajectories to a certain point, where they stay."""

    def __init__(self, server: MockEnvServer) -> None:
        self.server = server
        self.asked = asyncio.Event()
        self.closing = asyncio.Event()
        self.ice = contextlib.ExitStack()

    def start(self, scheduler: OpenEnvScheduler) -> asyncio.Future[list[RolloutOutput]]:
        return asyncio.ensure_future(scheduler.async_infer(rows(self.server, "a", "b", "c")))

    async def slot(self) -> Any:
        """Two wait for the session that the third has."""
        self.server._capacity = 1
        running = self.start(scheduler := scheduler_of(self._never))
        await seen(self.server, "connect", 4)
        return scheduler, running

    async def permit(self) -> Any:
        """Two wait until the environment has answered the third."""
        self.server.inject(Fault("delay", "reset"))
        running = self.start(scheduler := scheduler_of(max_concurrent_envs=1))
        await seen(self.server, "reset", 1)
        return scheduler, running

    async def connect(self) -> Any:
        self.server.inject(Fault("delay", "connect", times=3))
        running = self.start(scheduler := scheduler_of())
        await seen(self.server, "connect", 3)
        return scheduler, running

    async def reset(self) -> Any:
        self.server.inject(Fault("delay", "reset", times=3))
        running = self.start(scheduler := scheduler_of())
        await seen(self.server, "reset", 3)
        return scheduler, running

    async def engine(self) -> Any:
        running = self.start(scheduler := scheduler_of(self._never))
        await seen(self.server, "reset", 3)
        await self.asked.wait()
        return scheduler, running

    async def step(self) -> Any:
        self.server.inject(Fault("delay", "step", times=3))
        running = self.start(scheduler := scheduler_of())
        await seen(self.server, "step", 3)
        return scheduler, running

    async def recovery(self) -> Any:
        """The sessions were lost, and the games are being played again."""
        self.server.inject(Fault("drop", "step", times=3))
        self.server.inject(Fault("delay", "reset", nth=4, times=3))
        running = self.start(scheduler := scheduler_of())
        await seen(self.server, "reset", 6)
        return scheduler, running

    async def close(self) -> Any:
        """The server does not answer to the goodbyes."""
        phases = self

        class Slow(OpenEnvScheduler):
            async def close_env(self, episode: Episode) -> None:
                if not phases.closing.is_set():
                    phases.ice.enter_context(phases.server.frozen())
                    phases.closing.set()
                await super().close_env(episode)

        scheduler = Slow(ScriptedEngine(go), env_settings={"close_timeout": 0.2})
        running = self.start(scheduler)
        await self.closing.wait()
        return scheduler, running

    async def _never(self, request: RolloutInferRequest, turn: int) -> str:
        self.asked.set()
        await asyncio.Event().wait()
        return "never"


PHASES = ["slot", "permit", "connect", "reset", "engine", "step", "recovery", "close"]


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("phase", PHASES)
async def test_cancelled_in_any_phase_leaves_no_session(server: MockEnvServer, phase: str, times: int) -> None:
    """S03, A04: once, or again and again while it is being cleaned up."""
    phases = Phases(server)
    scheduler, running = await getattr(phases, phase)()
    for _ in range(times):
        running.cancel()
        await asyncio.sleep(0)  # as far as the trajectories come in one turn of the event loop
    with pytest.raises(asyncio.CancelledError):
        await running
    phases.ice.close()
    server.release()
    await asyncio.to_thread(idle, server)
    assert scheduler._episodes == {}


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "close"])
async def test_closing_the_scheduler_in_any_phase_ends_all(
    server: MockEnvServer, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    """S04: three close it at once; trajectories are cancelled, not failed, and nothing is reported as an error."""
    scheduler, running = await getattr(Phases(server), phase)()
    await asyncio.gather(scheduler.aclose(), scheduler.aclose(), scheduler.aclose())
    if phase in ("slot", "engine"):
        running.cancel()  # closing does not end the wait for the engine
        with pytest.raises(asyncio.CancelledError):
            await running
    else:
        outputs = await running
        assert [output.stop_reason for output in outputs] == [StopReason.CANCELLED] * 3
        assert [output.total_reward for output in outputs] == [None] * 3
    server.release()
    await asyncio.to_thread(idle, server)
    assert "ended unscored" not in caplog.text


async def test_exception_that_leaves_the_scheduler_ends_what_runs(server: MockEnvServer) -> None:
    """S04: the exception arrives unchanged; sessions are closed before it does."""
    server.inject(Fault("delay", "step", times=2))
    running: list[asyncio.Future[list[RolloutOutput]]] = []

    async def train() -> None:
        async with scheduler_of() as scheduler:
            running.append(asyncio.ensure_future(scheduler.async_infer(rows(server, "a", "b"))))
            await seen(server, "step", 2)
            raise LookupError("in the training step")

    with pytest.raises(LookupError, match="in the training step"):
        await train()
    assert {output.stop_reason for output in await running[0]} == {StopReason.CANCELLED}
    server.release()
    await asyncio.to_thread(idle, server)


async def test_closing_goes_on_past_a_hook_that_raises(server: MockEnvServer) -> None:
    """S04: the fault of one trajectory's hook does not leave the others open, and is not kept secret."""
    phases, all_asked = Phases(server), asyncio.Event()

    async def never(request: RolloutInferRequest, turn: int) -> str:
        if len(engine.calls) == 3:
            all_asked.set()
        return await phases._never(request, turn)

    class Fragile(OpenEnvScheduler):
        async def on_trajectory_end(self, episode: Episode) -> None:
            if episode.request.uuid == "a":
                raise LookupError("a bug")
            await super().on_trajectory_end(episode)

    engine = ScriptedEngine(never)
    scheduler = Fragile(engine)
    running = phases.start(scheduler)
    await all_asked.wait()
    with pytest.raises(LookupError, match="a bug"):
        await scheduler.aclose()
    assert server.sessions == 0  # already
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_environment_is_closed_once_by_the_scheduler_and_by_its_trajectory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S04: its close ends the step that is under way, so that both come to it at the same time."""
    closed = 0
    stepping, step_ended, trajectory_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(Env):
        async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
            return "", {}, ""

        async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
            stepping.set()
            await step_ended.wait()
            raise LookupError("closed under it")

        async def close(self) -> None:
            nonlocal closed
            closed += 1
            step_ended.set()
            await trajectory_ended.wait()

    monkeypatch.setitem(envs, "slow", Slow)
    scheduler = GYMScheduler(ScriptedEngine(go), gym_env="slow")
    running = asyncio.ensure_future(scheduler.async_infer([{}]))
    running.add_done_callback(lambda _: trajectory_ended.set())
    await stepping.wait()
    await scheduler.aclose()
    [output] = await running
    assert (output.stop_reason, closed) == (StopReason.CANCELLED, 1)


@pytest.mark.parametrize("how", ["end", "aclose"])
async def test_sessions_are_closed_side_by_side(server: MockEnvServer, how: str) -> None:
    """W13: each of 32 closes waits until all have begun, although only one call of an environment may be under way."""
    barrier = threading.Barrier(32)
    everybody = asyncio.Event()
    waiting = 0

    class Slow(OpenEnvWrapper):
        def close(self) -> None:
            if how == "end" or self._session is not None:
                barrier.wait(30)
            super().close()

    class Scheduler(OpenEnvScheduler):
        def _make_wrapper(self, env_config: dict[str, Any]) -> OpenEnvWrapper:
            return Slow(env_config, capacity_timeout=0)

    async def script(request: RolloutInferRequest, turn: int) -> str:
        nonlocal waiting
        waiting += 1
        if waiting == 32:
            everybody.set()
        await everybody.wait()
        if how == "aclose":
            await asyncio.Event().wait()
        return "go"

    scheduler = Scheduler(ScriptedEngine(script), max_turns=1, max_concurrent_envs=1)
    running = asyncio.ensure_future(scheduler.async_infer(rows(server, *map(str, range(32)))))
    if how == "aclose":
        await everybody.wait()
        await scheduler.aclose()
        running.cancel()
    [result] = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(result, asyncio.CancelledError if how == "aclose" else list)
    assert not barrier.broken
    idle(server)


# -- event loops and threads ------------------------------------------------------------------------


def test_two_event_loops_in_two_threads_share_a_scheduler(server: MockEnvServer) -> None:
    """A06: side by side, and one that is done does not disturb the other by closing."""
    scheduler = scheduler_of(max_concurrent_envs=2)
    both = threading.Barrier(2)

    def play(name: str) -> list[float | None]:
        async def batches() -> list[float | None]:
            both.wait(10)
            rewards = []
            for number in range(4):
                outputs = await scheduler.async_infer(rows(server, *(f"{name}{number}{i}" for i in range(5))))
                rewards += [output.total_reward for output in outputs]
            return rewards

        return asyncio.run(batches())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(play, "ab")) == [[2.0] * 20] * 2
    asyncio.run(scheduler.aclose())
    idle(server)


def test_event_loop_that_ends_under_its_trajectories_leaves_no_session(server: MockEnvServer) -> None:
    """Closed without a cancellation, then collected: the wrappers warn, and the sessions end with them."""
    asked = asyncio.Semaphore(0)

    async def script(request: RolloutInferRequest, turn: int) -> str:
        asked.release()
        await asyncio.Event().wait()
        return "never"

    async def all_asked() -> None:
        for _ in range(3):
            await asked.acquire()

    scheduler = scheduler_of(script)
    loop = asyncio.new_event_loop()
    task = loop.create_task(scheduler.async_infer(rows(server, "a", "b", "c")))
    loop.run_until_complete(all_asked())
    loop.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of wrappers, and of tasks that never ended
        del task, loop, scheduler
        while gc.collect():  # what a coroutine that is closed leaves behind is for the next round
            pass
    idle(server)


async def test_program_that_ends_in_an_exception_beside_a_batch_leaves_no_session(server: MockEnvServer) -> None:
    """A06: ``asyncio.run`` cancels what is left; the sessions are closed before it returns."""

    async def main() -> None:
        server.inject(Fault("delay", "step", times=3))
        running = asyncio.ensure_future(scheduler_of().async_infer(rows(server, "a", "b", "c")))
        await seen(server, "step", 3)
        assert not running.done()
        raise LookupError("elsewhere")

    with pytest.raises(LookupError, match="elsewhere"):
        await asyncio.to_thread(asyncio.run, main())
    server.release()
    await asyncio.to_thread(idle, server)


async def test_closing_from_another_event_loop_ends_what_plays_in_this_one(server: MockEnvServer) -> None:
    scheduler, running = await Phases(server).step()
    await asyncio.to_thread(asyncio.run, scheduler.aclose())
    assert [output.stop_reason for output in await running] == [StopReason.CANCELLED] * 3
    server.release()
    await asyncio.to_thread(idle, server)


async def test_uuid_is_free_once_its_trajectory_was_closed(server: MockEnvServer) -> None:
    """Also while the old one still waits for its model; when that answers, it does not end the new one."""
    answer, asked = asyncio.Event(), asyncio.Event()

    async def script(request: RolloutInferRequest, turn: int) -> str:
        if not asked.is_set():
            asked.set()
            await answer.wait()
        elif not answer.is_set():
            answer.set()
            await old  # is over before the new one goes on
        return "go"

    scheduler = scheduler_of(script)
    old = asyncio.ensure_future(scheduler.async_infer(rows(server, "a")))
    await asked.wait()
    await scheduler.aclose()
    [output] = await scheduler.async_infer(rows(server, "a"))
    assert output.total_reward == 2.0
    assert (await old)[0].stop_reason is StopReason.CANCELLED
    idle(server)


# -- other processes --------------------------------------------------------------------------------


async def test_forked_process_plays_on_its_own_and_leaves_its_parents_sessions_alone(server: MockEnvServer) -> None:
    """The parent has played and is playing; the child plays with the same scheduler, closes it and ends."""
    phases = Phases(server)
    go_on = asyncio.Event()

    async def script(request: RolloutInferRequest, turn: int) -> str:
        if request.uuid.startswith("parent"):
            phases.asked.set()
            await go_on.wait()
        return "go"

    scheduler = scheduler_of(script)
    await scheduler.async_infer(rows(server, *"abcdef"))
    running = asyncio.ensure_future(scheduler.async_infer(rows(server, "parent1", "parent2")))
    await phases.asked.wait()
    await asyncio.to_thread(server.wait_until, lambda: [r.kind for r in server.applied].count("reset") == 8)

    def child() -> None:
        [output] = asyncio.run(scheduler.async_infer(rows(server, "child")))
        assert output.total_reward == 2.0
        asyncio.run(scheduler.aclose())

    process = multiprocessing.get_context("fork").Process(target=child)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks beside threads: that is the case
        process.start()
    await asyncio.to_thread(process.join, 60)
    process.kill()
    assert process.exitcode == 0
    go_on.set()
    assert [output.total_reward for output in await running] == [2.0, 2.0]
    idle(server)


def pickled(scheduler: OpenEnvScheduler) -> Any:
    return pickle.loads(pickle.dumps(scheduler))  # noqa: S301 - our own


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
async def test_copy_of_a_scheduler_plays(server: MockEnvServer, copied: Callable[[Any], OpenEnvScheduler]) -> None:
    """As long as the engine can be copied: a process that is spawned gets its scheduler that way."""
    scheduler = OpenEnvScheduler(ScriptedEngine(go, logprob=float), max_concurrent_envs=2)
    await scheduler.async_infer(rows(server, "a"))
    twin = copied(scheduler)
    assert twin.max_concurrent_envs == 2
    both = await asyncio.gather(*(one.async_infer(rows(server, *"abc")) for one in (scheduler, twin)))
    assert [output.total_reward for outputs in both for output in outputs] == [2.0] * 6
    idle(server)


async def test_scheduler_that_plays_refuses_to_be_copied(server: MockEnvServer) -> None:
    scheduler, running = await Phases(server).step()
    with pytest.raises(TypeError, match=r"OpenEnvWrapper .* cannot be copied"):
        copy.deepcopy(scheduler)
    server.release()
    assert len(await running) == 3


# -- the end of the program -------------------------------------------------------------------------

BEGINNING = """
import asyncio, os, sys, threading
from schedulers import OpenEnvScheduler
from schedulers.engines import ScriptedEngine

class Scheduler(OpenEnvScheduler):
    def observe_step(self, episode, action, result):
        on_step()
        return super().observe_step(episode, action, result)

def on_step():
    pass

settings = {{"step_timeout": 100_000, "close_timeout": 0.2}}
scheduler = Scheduler(ScriptedEngine(lambda request, turn: "go"), env_settings=settings)
playing = lambda: scheduler.async_infer([{{"env_config": {{"base_url": {base_url!r}}}}}] * 3)

async def play_beside(end):
    asyncio.ensure_future(playing())
    await asyncio.to_thread(input)
    end()
"""

IN_A_STEP = {
    "daemon thread": ("threading.Thread(target=lambda: asyncio.run(playing()), daemon=True).start()\ninput()", 0),
    "exit": ("asyncio.run(play_beside(lambda: sys.exit(3)))", 3),
    "exception": ("asyncio.run(play_beside(lambda: 1 / 0))", 1),
    "os._exit": ("asyncio.run(play_beside(lambda: os._exit(4)))", 4),
    "SIGTERM": ("asyncio.run(playing())", -signal.SIGTERM),
    "SIGINT": ("asyncio.run(playing())", -signal.SIGINT),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("ending", IN_A_STEP)
def test_program_that_ends_in_the_midst_of_a_batch(server: MockEnvServer, ending: str, frozen: bool) -> None:
    """W13, S04: at once, with its own exit code, with no noise, and without a session; also when no server answers."""
    server.inject(Fault("delay", "step", times=None))
    script, code = IN_A_STEP[ending]
    with program(BEGINNING.format(base_url=server.base_url) + script) as child:
        server.wait_until(lambda: [r.kind for r in server.received].count("step") == 3)
        with server.frozen() if frozen else contextlib.nullcontext():
            if code < 0:
                child.process.send_signal(-code)
            else:
                child.write()
            returned, stderr = child.end()
    assert returned == code
    last = {"exception": ["ZeroDivisionError: division by zero"], "SIGINT": ["KeyboardInterrupt"]}.get(ending, [])
    assert stderr.splitlines()[-1:] == last
    assert "Exception in" not in stderr
    assert "Exception ignored" not in stderr
    server.release()
    idle(server)


AFTER_A_STEP = {
    "exit in a hook": ("on_step = lambda: sys.exit(3)\nasyncio.run(playing())", 3),
    "os._exit in a hook": ("on_step = lambda: os._exit(4)\nasyncio.run(playing())", 4),
    "never closed": ("asyncio.run(playing())", 0),
}


@pytest.mark.parametrize("ending", AFTER_A_STEP)
def test_program_that_ends_after_a_step(server: MockEnvServer, ending: str) -> None:
    """S04: a hook that exits, and a scheduler that nobody closes."""
    script, code = AFTER_A_STEP[ending]
    with program(BEGINNING.format(base_url=server.base_url) + script) as child:
        assert child.end() == (code, "")
    idle(server)
