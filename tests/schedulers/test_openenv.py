"""The bridge from asyncio to environment servers, against a mock server with a real socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from openenv_client.testing import Fault, MockEnvServer, reply
from schedulers import (
    ChatCompletionResponseChoice,
    ChatMessage,
    Episode,
    OpenEnvScheduler,
    RolloutError,
    RolloutInferRequest,
    RolloutOutput,
    StopReason,
    Transition,
    multi_turns,
)
from schedulers.engines import ScriptedEngine

Game = Callable[[dict[str, Any]], Generator[dict[str, Any], dict[str, Any], None]]


def game_of(steps: int) -> Game:
    """Over after so many steps, with a reward of 1 for each."""

    def game(kwargs: dict[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
        yield reply({"step": 0, **kwargs})
        for step in range(1, steps + 1):
            yield reply({"step": step}, reward=1.0, done=step == steps)

    return game


@pytest.fixture
def server() -> Iterator[MockEnvServer]:
    with MockEnvServer(game_of(3)) as server:
        yield server
        server.wait_until(lambda: server.sessions == 0)


def row(server: MockEnvServer, **env_config: Any) -> dict[str, Any]:
    return {"messages": [], "env_config": {"name": "openenv", "base_url": server.base_url, **env_config}}


def talker(answer: Any = "go", max_turns: int | None = None, **options: Any) -> OpenEnvScheduler:
    return OpenEnvScheduler(ScriptedEngine(lambda request, turn: answer), max_turns, **options)


async def play(scheduler: OpenEnvScheduler, server: MockEnvServer, trajectories: int = 1) -> list[RolloutOutput]:
    async with scheduler:
        return await scheduler.async_infer([row(server, reset_kwargs={"seed": i}) for i in range(trajectories)])


# -- actions and observations -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"move": [1, 2]}', {"move": [1, 2]}),
        ('  {"move": 1}\n', {"move": 1}),
        ('```json\n{"move": 1}\n```', {"move": 1}),
        ('```\n{"move": 1}\n```', {"move": 1}),
        ('I play this:\n```json\n{"move": 1}\n```\nDone.', {"move": 1}),
        ("[5 3 7]", {"message": "[5 3 7]"}),
        ("  go left \n", {"message": "go left"}),
        ("[1, 2]", {"message": "[1, 2]"}),
        ("7", {"message": "7"}),
        ('{"move": 1', {"message": '{"move": 1'}),
        ("```json\nno\n```", {"message": "```json\nno\n```"}),
    ],
)
def test_action_is_a_json_object_or_else_a_message(text: str, action: dict[str, Any]) -> None:
    assert talker().parse_action(text) == action


def test_last_code_fence_is_the_action() -> None:
    """P01: what the model only considered is not what it decided."""
    text = 'First\n```json\n{"move": 1}\n```\nbut that clashes, so\n```json\n{"move": 2}\n```'
    assert talker().parse_action(text) == {"move": 2}


@pytest.mark.parametrize("text", ["", "   \n"])
def test_empty_completion_is_no_action(text: str) -> None:
    """P09: the environment is not asked to act on nothing."""
    assert talker().parse_action(text) is None


@pytest.mark.parametrize("text", ['{"move": NaN}', '{"move": 1e999}', "[" * 100_000, '{"a":' * 100_000, "9" * 5000])
def test_text_that_could_not_be_sent_as_an_object_is_a_message(text: str) -> None:
    """No completion can break its trajectory: what is no proper JSON is text."""
    assert talker().parse_action(text) == {"message": text}


async def test_action_that_the_server_does_not_take_is_none(server: MockEnvServer) -> None:
    """A model's own JSON with the wrong fields is an answer without an action, not a fault of the environment."""
    server.inject(Fault("error", "step", "VALIDATION_ERROR", nth=1, times=None))
    [output] = await play(talker('{"mesage": "go"}'), server)
    assert (output.stop_reason, output.error) == (StopReason.PARSE_ERROR, None)
    assert "No action was found" in output.messages[2]["content"]


async def test_environment_that_raises_is_a_lost_one(server: MockEnvServer) -> None:
    """Any other error reply leaves the trajectory unscored."""
    server.inject(Fault("error", "step", "EXECUTION_ERROR"))
    [output] = await play(talker(), server)
    assert (output.stop_reason, output.total_reward) == (StopReason.ENV_LOST, None)


async def test_answer_that_was_cut_is_not_acted_on(server: MockEnvServer) -> None:
    """L14: half a text is no action; the trajectory ends as cut, with its rewards."""
    cut = ChatCompletionResponseChoice(ChatMessage("I will go"), finish_reason="length")
    scheduler = OpenEnvScheduler(ScriptedEngine(["go", cut]))
    [output] = await play(scheduler, server)
    assert (output.stop_reason, output.total_reward) == (StopReason.LENGTH, 1.0)
    assert [received.kind for received in server.applied] == ["reset", "step"]


@pytest.mark.parametrize(("settings", "error"), [({"step_timeout": -1}, ValueError), ({"step_time_out": 1}, TypeError)])
def test_bad_client_setting_is_refused_at_once(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="step_time"):
        talker(env_settings=settings)


@pytest.mark.parametrize("name", ["base_url", "reset_kwargs", "capacity_timeout"])
def test_client_setting_that_has_a_place_of_its_own_is_refused(name: str) -> None:
    """It would overrule every row, or nothing."""
    with pytest.raises(ValueError, match=f"{name} is no part of env_settings; set "):
        talker(env_settings={name: None})


async def test_conversation_and_infos(server: MockEnvServer) -> None:
    [output] = await play(talker(), server)
    assert [message["role"] for message in output.messages] == ["user", "assistant"] * 3
    assert [json.loads(message["content"]) for message in output.messages[::2]] == [
        {"step": 0, "seed": 0},
        {"step": 1},
        {"step": 2},
    ]
    infos = output.rollout_infos
    assert infos["step_rewards"] == [1.0, 1.0, 1.0]
    assert infos["total_reward"] == 3.0
    assert infos["stop_reason"] == "env_done"
    assert infos["gym_done"] is True
    assert infos["seed"] == 0
    assert infos["num_turns"] == 3
    assert json.loads(infos["final_observation"]) == {"step": 3}
    assert [(r.kind, r.data) for r in server.applied] == [
        ("reset", {"seed": 0}),
        *[("step", {"message": "go"})] * 3,
    ]


async def test_fingerprint_tells_games_apart(server: MockEnvServer) -> None:
    """S14: members of a group that met the same first observation have the same one."""
    async with talker() as scheduler:
        rows = [row(server, reset_kwargs={"seed": seed}) for seed in (1, 1, 2)]
        first, second, third = [o.rollout_infos["fingerprint"] for o in await scheduler.async_infer(rows)]
    assert first == second != third


async def test_reward_that_the_server_does_not_give_counts_nothing() -> None:
    """R01: null is 0.0 in the sum."""
    with MockEnvServer([reply({}), reply({}), reply({}, reward=1.0, done=True)]) as server:
        [output] = await play(talker(), server)
        assert output.rollout_infos["step_rewards"] == [0.0, 1.0]


async def test_observation_that_is_text_in_other_scripts_stays_readable(server: MockEnvServer) -> None:
    assert talker().format_observation({"text": "数独"}) == '{"text": "数独"}'


async def test_hooks_of_a_subclass_shape_what_is_sent_and_read(server: MockEnvServer) -> None:
    class Mine(OpenEnvScheduler):
        def parse_action(self, text: str) -> dict[str, Any]:
            return {"mine": text}

        def format_observation(self, observation: dict[str, Any]) -> str:
            return f"step {observation['step']}"

        def observe_step(self, *args: Any) -> Transition:
            transition = super().observe_step(*args)
            return Transition(transition.observation, transition.reward * 10, transition.done, {"tenfold": True})

    [output] = await play(Mine(ScriptedEngine(["a", "b", "c"])), server)
    assert [message["content"] for message in output.messages] == ["step 0", "a", "step 1", "b", "step 2", "c"]
    assert server.applied[1].data == {"mine": "a"}
    assert output.total_reward == 30.0
    assert output.rollout_infos["tenfold"] is True


async def test_address_and_system_message_of_the_scheduler_serve_rows_without(server: MockEnvServer) -> None:
    """Also where a table has put None for a missing value."""
    async with talker(base_url=server.base_url, system_message="Play well.") as scheduler:
        rows: list[dict[str, Any]] = [
            {},
            {"env_config": None},
            {"env_config": {"base_url": None, "system_message": None, "reset_kwargs": None}},
            {"env_config": {"system_message": "Quick!"}},
        ]
        outputs = await scheduler.async_infer(rows)
    assert [o.messages[0]["content"] for o in outputs] == ["Play well."] * 3 + ["Quick!"]
    assert [o.stop_reason for o in outputs] == [StopReason.ENV_DONE] * 4


async def test_row_without_an_address_is_a_bug_to_raise() -> None:
    with pytest.raises(RolloutError, match="no base_url is given"):
        await talker().async_infer([{"messages": []}])


@pytest.mark.parametrize("options", [{"max_concurrent_envs": 0}, {"max_parse_failures": 0}, {"slot_timeout": -1.0}])
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(ValueError, match=rf"{name} must be .*, not {value}"):
        talker(**options)


def test_scheduler_is_registered_by_its_known_name() -> None:
    assert multi_turns["openenv_scheduler"] is OpenEnvScheduler


# -- completions without an action ------------------------------------------------------------------


class Strict(OpenEnvScheduler):
    """Only numbers are actions."""

    def parse_action(self, text: str) -> dict[str, Any] | None:
        return {"number": int(text)} if text.isdecimal() else None


async def test_completion_without_an_action_does_not_step_the_environment(server: MockEnvServer) -> None:
    [output] = await play(Strict(ScriptedEngine(["1", "what?", "2", "3"])), server)
    assert "No action was found" in output.messages[4]["content"]
    assert [r.data for r in server.applied if r.kind == "step"] == [{"number": 1}, {"number": 2}, {"number": 3}]
    assert output.rollout_infos["step_rewards"] == [1.0, 0.0, 1.0, 1.0]
    assert output.stop_reason is StopReason.ENV_DONE


async def test_two_in_a_row_end_the_trajectory_with_all_that_it_has(server: MockEnvServer) -> None:
    """L01: the infos of the good turns and of the bad ones are all there."""
    [output] = await play(Strict(ScriptedEngine(["1", "what?", "2", "what?", "so what?"])), server)
    assert output.stop_reason is StopReason.PARSE_ERROR
    assert output.rollout_infos["num_turns"] == 5
    assert output.rollout_infos["step_rewards"] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert output.total_reward == 2.0
    assert output.rollout_infos["gym_done"] is False
    assert [r.kind for r in server.received].count("close") == 1


async def test_more_failures_can_be_allowed(server: MockEnvServer) -> None:
    [output] = await play(Strict(ScriptedEngine(["x", "y", "z"]), max_parse_failures=3), server)
    assert output.stop_reason is StopReason.PARSE_ERROR
    assert output.rollout_infos["num_turns"] == 3


async def test_completion_cut_before_its_action_is_truncated_not_malformed(server: MockEnvServer) -> None:
    """L14: the stop reason is the length, also where it is the last failure that would have been allowed."""
    cut = ChatCompletionResponseChoice(ChatMessage("I think"), finish_reason="length")
    [output] = await play(Strict(ScriptedEngine(["x", cut])), server)
    assert output.stop_reason is StopReason.LENGTH
    assert [r.kind for r in server.applied] == ["reset"]


async def test_empty_completions_end_the_trajectory(server: MockEnvServer) -> None:
    """P09: no crash, both turns recorded, the environment closed."""
    [output] = await play(talker(""), server)
    assert output.stop_reason is StopReason.PARSE_ERROR
    assert output.rollout_infos["num_turns"] == 2


# -- endings ----------------------------------------------------------------------------------------


async def test_three_batches_at_max_turns_on_a_server_with_just_enough_slots() -> None:
    """S03: sessions are closed although no game is ever done."""
    with MockEnvServer(game_of(21), capacity=8) as server:
        async with talker(max_turns=2) as scheduler:
            for _ in range(3):
                outputs = await scheduler.async_infer([row(server) for _ in range(8)])
                assert [output.stop_reason for output in outputs] == [StopReason.MAX_TURNS] * 8
                server.wait_until(lambda: server.sessions == 0)


async def test_episode_that_is_over_before_it_began_asks_the_model_nothing() -> None:
    """L04: a reset that is done at once ends the trajectory, scored."""
    engine = ScriptedEngine([])
    with MockEnvServer([reply({"step": 0}, done=True)]) as server:
        [output] = await play(OpenEnvScheduler(engine), server)
        assert output.stop_reason is StopReason.ENV_DONE
        assert output.rollout_infos["gym_done"] is True
        assert output.total_reward == 0.0
        assert engine.calls == []
        server.wait_until(lambda: server.sessions == 0)


CUT = ChatCompletionResponseChoice(ChatMessage("go"), finish_reason="length")


def broken(request: RolloutInferRequest, turn: int) -> Any:
    return OSError("no GPU") if turn == 1 and request.data_dict["env_config"]["reset_kwargs"]["seed"] else "go"


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"script": lambda request, turn: "go"}, {StopReason.ENV_DONE}),
        ({"script": lambda request, turn: "go", "max_turns": 2}, {StopReason.MAX_TURNS}),
        ({"script": [CUT]}, {StopReason.LENGTH}),
        ({"script": lambda request, turn: ""}, {StopReason.PARSE_ERROR}),
        ({"script": broken}, {StopReason.ENV_DONE, StopReason.ERROR}),
        ({"script": lambda request, turn: "go", "fault": Fault("drop", "step", nth=2, times=3)}, {StopReason.ENV_LOST}),
        (
            {"script": lambda request, turn: "go", "fault": Fault("error", "step", "EXECUTION_ERROR", times=None)},
            {StopReason.ENV_LOST},
        ),
    ],
    ids=["done", "max_turns", "length", "parse_error", "exception", "lost_connection", "environment_failed"],
)
async def test_sixteen_trajectories_on_a_server_of_four_leave_no_session(
    options: Any, reasons: set[StopReason]
) -> None:
    """S01, S03: all finish, never more than four at a time, and whatever ends them frees their slots."""
    script, max_turns, fault = options["script"], options.get("max_turns"), options.get("fault")
    with MockEnvServer(game_of(3), capacity=4, faults=[fault] if fault else []) as server:
        scheduler = OpenEnvScheduler(ScriptedEngine(script), max_turns, env_settings={"recover": "never"})
        outputs = await play(scheduler, server, 16)
        assert reasons <= {output.stop_reason for output in outputs} <= reasons | {StopReason.ENV_DONE}
        for output in outputs:
            unscored = output.stop_reason in {StopReason.ENV_LOST, StopReason.ERROR}
            assert (output.total_reward is None) == unscored
        assert server.peak_sessions <= 4
        server.wait_until(lambda: server.sessions == 0)


@pytest.mark.parametrize("trajectories", [1, 7])
@pytest.mark.parametrize("capacity", [1, 2, None])
@pytest.mark.parametrize("limit", [1, 2, 16])
async def test_no_combination_of_limits_deadlocks(limit: int, capacity: int | None, trajectories: int) -> None:
    """A12: a permit guards one call, so trajectories that wait for a slot never keep those with one from playing."""
    with MockEnvServer(game_of(2), capacity=capacity) as server:
        outputs = await play(talker(max_concurrent_envs=limit), server, trajectories)
        assert [output.total_reward for output in outputs] == [2.0] * trajectories
        assert [output.rollout_infos["seed"] for output in outputs] == list(range(trajectories))
        server.wait_until(lambda: server.sessions == 0)


async def test_full_server_is_waited_for_until_the_slot_timeout(caplog: pytest.LogCaptureFixture) -> None:
    """S01: a refusal is no observation; who does not get a slot in time is unscored and says how full it was."""
    with MockEnvServer(capacity=0) as server:
        [output] = await play(talker(slot_timeout=0.0), server)
        assert output.stop_reason is StopReason.ENV_LOST
        assert output.error is not None
        assert "ServerFullError: the server is full: 0 of 0 sessions are in use" in output.error
        assert output.rollout_infos["seed"] == 0


async def test_slot_that_another_client_frees_is_found() -> None:
    """A server is shared: nobody tells this scheduler when another one's session ends."""
    with MockEnvServer(game_of(1), faults=[Fault("full", "connect", times=2)]) as server:
        [output] = await play(talker(), server)
        assert output.stop_reason is StopReason.ENV_DONE
        assert [r.kind for r in server.received].count("connect") == 3


async def test_one_lost_connection_among_eight_leaves_seven_scored(
    server: MockEnvServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A09: the eighth is unscored and masked, its traceback is logged."""
    server.inject(Fault("drop_after", "step", nth=9))
    outputs = await play(talker(env_settings={"recover": "never"}), server, 8)
    lost = [output for output in outputs if output.total_reward is None]
    assert len(lost) == 1
    assert lost[0].stop_reason is StopReason.ENV_LOST
    assert lost[0].error is not None
    assert lost[0].error.startswith("SessionLost: ")
    assert [output.total_reward for output in outputs if output is not lost[0]] == [3.0] * 7
    [record] = caplog.records
    assert record.exc_info is not None
    steps = [r.session for r in server.received if r.kind == "step"]
    assert all(steps.count(session) <= 3 for session in steps)  # W02: none was sent again


async def test_game_with_a_seed_is_rebuilt_and_the_output_says_so(server: MockEnvServer) -> None:
    """Eight games score as if nothing had been, though some were cut off in the midst of a step."""
    server.inject(Fault("drop_after", "step", nth=10, times=3))
    outputs = await play(talker(env_settings={"max_recoveries": 9}), server, 8)
    assert [output.total_reward for output in outputs] == [3.0] * 8
    recoveries = [recovery for output in outputs for recovery in output.rollout_infos["recoveries"]]
    assert recoveries
    assert all(recovery["error"].startswith("the connection was cut during step") for recovery in recoveries)


async def test_game_without_a_seed_is_not_rebuilt(server: MockEnvServer) -> None:
    """Another game would be played in its place."""
    server.inject(Fault("drop_after", "step"))
    async with talker() as scheduler:
        [output] = await scheduler.async_infer([row(server)])
    assert output.stop_reason is StopReason.ENV_LOST
    assert output.rollout_infos["recoveries"] == []


async def test_rebuilding_waits_for_a_slot_without_a_permit() -> None:
    """With one permit and two slots, games that lost their sessions and games that wait for one all play to the end."""
    with MockEnvServer(game_of(3), capacity=2, faults=[Fault("drop_after", "step", times=4)]) as server:
        outputs = await play(talker(max_concurrent_envs=1, env_settings={"max_recoveries": 9}), server, 7)
        assert [output.total_reward for output in outputs] == [3.0] * 7
        server.wait_until(lambda: server.sessions == 0)


async def test_environment_that_does_not_answer_in_time_is_unscored(server: MockEnvServer) -> None:
    """W01: the late answer is nobody's."""
    server.inject(Fault("delay", "step"))
    [output] = await play(talker(env_settings={"step_timeout": 0.05, "recover": "never"}), server)
    assert output.stop_reason is StopReason.ENV_LOST
    assert output.error is not None
    assert output.error.startswith("StepTimeoutError: no reply to step within 0.05 s")
    server.release()


async def test_server_that_stalls_on_close_does_not_spoil_the_episode(server: MockEnvServer) -> None:
    """S07: reward and messages of the finished episode are kept."""

    class Unlucky(OpenEnvScheduler):
        async def close_env(self, episode: Episode) -> None:
            with server.frozen():
                await super().close_env(episode)

    scheduler = Unlucky(ScriptedEngine(lambda request, turn: "go"), env_settings={"close_timeout": 0.05})
    [output] = await play(scheduler, server)
    assert output.total_reward == 3.0
    assert output.error is None


async def test_server_that_is_not_there_is_unscored() -> None:
    with MockEnvServer() as server:
        pass
    [output] = await play(talker(env_settings={"open_deadline": 0.05}), server)
    assert output.stop_reason is StopReason.ENV_LOST
    assert output.error is not None
    assert "connection refused" in output.error


# -- threads and the event loop ---------------------------------------------------------------------


class Gate:
    """Lets a script, in a thread of the server, wait for a coroutine, and a coroutine for scripts."""

    def __init__(self, expected: int = 1) -> None:
        self._loop = asyncio.get_running_loop()
        self._semaphore = asyncio.Semaphore(0)
        self._expected = expected
        self._open = threading.Event()

    def wait(self) -> None:
        self._loop.call_soon_threadsafe(self._semaphore.release)
        assert self._open.wait(10), "nobody opened the gate"

    async def crowd(self) -> None:
        """Until as many as expected wait."""
        for _ in range(self._expected):
            await asyncio.wait_for(self._semaphore.acquire(), 10)

    def open(self) -> None:
        self._open.set()


def waits_in(method: str, gate: Gate) -> Game:
    def game(kwargs: dict[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
        if method == "reset":
            gate.wait()
        yield reply({"step": 0})
        if method == "step":
            gate.wait()
        yield reply({"step": 1}, reward=1.0, done=True)

    return game


@pytest.mark.parametrize("method", ["reset", "step"])
async def test_environment_never_blocks_the_event_loop(server: MockEnvServer, method: str) -> None:
    """A01: all sixteen wait for something that only another coroutine of the same loop does, once all have begun."""
    gate = Gate(16)
    server.script = waits_in(method, gate)
    playing = asyncio.ensure_future(play(talker(max_concurrent_envs=16), server, 16))
    await gate.crowd()
    gate.open()
    assert [output.total_reward for output in await playing] == [1.0] * 16


async def test_calls_in_flight_are_limited(server: MockEnvServer) -> None:
    """The limit is one of calls: a third reset is sent only after one of the first two has come back."""
    gate = Gate(2)
    server.script = waits_in("reset", gate)
    playing = asyncio.ensure_future(play(talker(max_concurrent_envs=2), server, 6))
    await gate.crowd()
    assert [r.kind for r in server.received].count("reset") == 2
    gate.open()
    await playing
    assert [r.kind for r in server.applied].count("reset") == 6


async def test_unrelated_threads_are_not_kept_waiting(server: MockEnvServer) -> None:
    """A02: forty environments that do not answer leave the default thread pool free."""
    gate = Gate(40)
    server.script = waits_in("reset", gate)
    playing = asyncio.ensure_future(play(talker(max_concurrent_envs=40), server, 40))
    await gate.crowd()
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10) == "free"
    gate.open()
    assert len(await playing) == 40


async def test_trajectory_that_waits_for_its_model_holds_no_permit(server: MockEnvServer) -> None:
    """A12: with one permit and four trajectories whose model is slow, a fifth plays to its end."""
    go = asyncio.Event()

    async def script(request: RolloutInferRequest, turn: int) -> str:
        if request.uuid != "quick":
            await go.wait()
        return "go"

    async with OpenEnvScheduler(ScriptedEngine(script), max_concurrent_envs=1) as scheduler:
        rows = [row(server)] * 4
        slow = asyncio.ensure_future(scheduler.async_infer(rows))
        [quick] = await scheduler.async_infer([{**row(server), "uuid": "quick"}])
        assert quick.total_reward == 3.0
        go.set()
        assert [output.total_reward for output in await slow] == [3.0] * 4


@pytest.mark.parametrize("method", ["reset", "step"])
async def test_cancelled_call_is_thrown_away(server: MockEnvServer, method: str) -> None:
    """A04: the session ends although its call has not come back; the next episode runs on one of its own."""
    gate = Gate()
    server.script = waits_in(method, gate)
    async with talker(max_concurrent_envs=1, env_settings={"step_timeout": 600}) as scheduler:
        running = asyncio.ensure_future(scheduler.async_infer([row(server)]))
        await gate.crowd()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        server.script = game_of(3)
        [output] = await scheduler.async_infer([row(server)])
        assert output.total_reward == 3.0
        gate.open()
    assert {r.session for r in server.received} == {1, 2}


async def test_cancelled_batch_leaves_no_session(server: MockEnvServer) -> None:
    """S03: eight trajectories that are cancelled in the midst of a step all free their slots."""
    gate = Gate(8)
    server.script = waits_in("step", gate)
    running = asyncio.ensure_future(play(talker(), server, 8))
    await gate.crowd()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(running, 0.01)
    gate.open()
    server.wait_until(lambda: server.sessions == 0)


async def test_cancelled_while_waiting_for_a_slot() -> None:
    with MockEnvServer(game_of(3), capacity=1) as server:
        go = asyncio.Event()
        started = asyncio.Event()

        async def script(request: RolloutInferRequest, turn: int) -> str:
            started.set()
            await go.wait()
            return "go"

        async with OpenEnvScheduler(ScriptedEngine(script)) as scheduler:
            first = asyncio.ensure_future(scheduler.async_infer([row(server)]))
            await started.wait()
            refused = asyncio.ensure_future(scheduler.async_infer([row(server)]))
            await asyncio.to_thread(server.wait_until, lambda: len(server.received) >= 3)
            refused.cancel()
            with pytest.raises(asyncio.CancelledError):
                await refused
            go.set()
            [output] = await first
            assert output.total_reward == 3.0
        server.wait_until(lambda: server.sessions == 0)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("openenv")]


async def test_scheduler_leaves_no_thread(server: MockEnvServer) -> None:
    """S04: closing is idempotent, safe before the first trajectory, and the scheduler can be used again."""
    scheduler = talker()
    await scheduler.aclose()
    for _ in range(2):
        await scheduler.async_infer([row(server)])
        await scheduler.aclose()
        await scheduler.aclose()
        for thread in threads():
            thread.join(10)
        assert threads() == []


async def test_closing_the_scheduler_ends_trajectories_under_way(server: MockEnvServer) -> None:
    """A step that is under way is ended, unscored, and its session with it."""
    gate = Gate()
    server.script = waits_in("step", gate)
    async with talker() as scheduler:
        running = asyncio.ensure_future(scheduler.async_infer([row(server)]))
        await gate.crowd()
    [output] = await running
    assert output.total_reward is None
    gate.open()


def test_one_scheduler_in_one_event_loop_after_another(server: MockEnvServer) -> None:
    """A06: locks and sockets belong to no loop that has ended."""
    scheduler = talker(max_concurrent_envs=1)
    for _ in range(2):
        outputs = asyncio.run(play(scheduler, server, 3))
        assert [output.total_reward for output in outputs] == [3.0] * 3


def test_event_loops_that_have_ended_are_let_go() -> None:
    """A limit that was waited for in one holds it, and a trainer makes one for every batch."""
    with MockEnvServer([reply({"n": 0}), reply({"n": 1}, reward=1.0, done=True)]) as server:
        engine = ScriptedEngine(lambda request, turn: "go")
        scheduler = OpenEnvScheduler(engine, base_url=server.base_url, max_concurrent_envs=1)
        for _ in range(3):
            asyncio.run(scheduler.async_infer([{}, {}], use_tqdm=False))
        assert len(scheduler._bridge._permits) == 1
