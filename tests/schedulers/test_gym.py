"""Environments that live in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from schedulers import (
    ChatCompletionResponseChoice,
    ChatMessage,
    Env,
    GYMScheduler,
    Messages,
    RequestConfig,
    RolloutError,
    RolloutInferRequest,
    RolloutOutput,
    StopReason,
    envs,
    multi_turns,
)
from schedulers.engines import ScriptedEngine


class Counter(Env):
    """Adds up what the model says; over at the target. ``env_config`` says which method fails or waits."""

    made: list[Counter]

    def __init__(self, env_config: dict[str, Any]) -> None:
        super().__init__(env_config)
        self.sum = 0
        self.closed = 0
        self.actions: list[Messages] = []
        Counter.made.append(self)

    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        await self._trouble("reset")
        return f"Count to {self.target}", {"target": self.target}, "You count."

    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        self.actions.append(action)
        await self._trouble("step")
        number = int(action[-1]["content"])
        self.sum += number
        return f"{self.sum} so far", number / 2, self.sum >= self.target, {"sum": self.sum}

    async def close(self) -> None:
        self.closed += 1
        await self._trouble("close")

    @property
    def target(self) -> int:
        return int(self.env_config.get("target", 3))

    async def _trouble(self, method: str) -> None:
        if self.env_config.get("raises") == method:
            raise LookupError(f"no {method} today")
        if self.env_config.get("waits") == method:
            self.env_config["waiting"].set()
            await asyncio.Event().wait()


class Other(Counter):
    pass


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    Counter.made = []
    for name in list(envs):  # those of other tests' imports
        monkeypatch.delitem(envs, name)
    monkeypatch.setitem(envs, "counter", Counter)
    monkeypatch.setitem(envs, "other", Other)


def row(**env_config: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "<placeholder>"}], "env_config": env_config}


async def play(answers: list[Any], *, max_turns: int | None = None, **env_config: Any) -> RolloutOutput:
    scheduler = GYMScheduler(ScriptedEngine(answers), max_turns, gym_env="counter")
    [output] = await scheduler.async_infer([row(**env_config)])
    return output


async def test_conversation_is_what_the_environment_says() -> None:
    """L06: the first prompt holds the observation and the system message, not the dataset's placeholder."""
    output = await play(["1", "2"])
    assert output.messages == [
        {"role": "system", "content": "You count."},
        {"role": "user", "content": "Count to 3"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "1 so far"},
        {"role": "assistant", "content": "2"},
    ]
    [env] = Counter.made
    assert [actions[-1]["content"] for actions in env.actions] == ["1", "2"]


async def test_rewards_and_infos() -> None:
    """Step rewards are what each turn added; the last observation is information, not a message."""
    infos = (await play(["1", "2"])).rollout_infos
    assert infos["step_rewards"] == [0.5, 1.0]
    assert infos["total_reward"] == 1.5
    assert infos["gym_done"] is True
    assert infos["stop_reason"] == "env_done"
    assert infos["num_turns"] == 2
    assert infos["error"] is None
    assert infos["target"] == 3
    assert infos["sum"] == 3
    assert infos["final_observation"] == "3 so far"
    assert isinstance(infos["fingerprint"], str)


async def test_model_is_not_asked_again_after_the_end() -> None:
    """L04: the game is won in turn 2 of 20, so there are exactly two calls."""
    engine = ScriptedEngine(lambda request, turn: "2")
    await GYMScheduler(engine, 20, gym_env="counter").async_infer([row()])
    assert len(engine.calls) == 2


async def test_environment_gets_a_copy_of_the_conversation() -> None:
    class Vandal(Counter):
        async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
            result = await super().step(action)
            action.clear()
            return result

    envs["counter"] = Vandal
    output = await play(["3"])
    assert output.messages[-1] == {"role": "assistant", "content": "3"}


async def test_row_chooses_its_environment_before_the_scheduler_does() -> None:
    scheduler = GYMScheduler(ScriptedEngine(["3"]), gym_env="counter")
    await scheduler.async_infer([row(name="other"), row(), row(name=None)])
    assert [type(env) for env in Counter.made] == [Other, Counter, Counter]


@pytest.mark.parametrize(("given", "said"), [(None, "You count."), ("Quick!", "Quick!")])
async def test_system_message_of_the_row_comes_first(given: str | None, said: str) -> None:
    output = await play(["3"], system_message=given)
    assert output.messages[0] == {"role": "system", "content": said}


async def test_empty_system_message_is_none() -> None:
    output = await play(["3"], system_message="")
    assert output.messages[0]["role"] == "user"


async def test_unknown_environment_is_answered_with_the_nearest() -> None:
    with pytest.raises(RolloutError, match=r"no environment is registered as 'countr'; did you mean 'counter'\?"):
        await play(["3"], name="countr")


async def test_no_environment_named_at_all_lists_those_there_are() -> None:
    scheduler = GYMScheduler(ScriptedEngine(["3"]))
    with pytest.raises(RolloutError, match=r"registered as None; registered are \[.*'counter', 'other'\]"):
        await scheduler.async_infer([row()])


async def test_scheduler_is_registered_by_its_known_name() -> None:
    assert multi_turns["gym_scheduler"] is GYMScheduler


CUT = ChatCompletionResponseChoice(ChatMessage("1"), finish_reason="length")


@pytest.mark.parametrize(
    ("answers", "options", "reason"),
    [
        (["3"], {}, StopReason.ENV_DONE),
        (["1", "1"], {"max_turns": 2}, StopReason.MAX_TURNS),
        ([CUT], {}, StopReason.LENGTH),
        (["1"], {"raises": "reset"}, StopReason.ENV_LOST),
        (["1"], {"raises": "step"}, StopReason.ENV_LOST),
        (["not a number"], {}, StopReason.ENV_LOST),
    ],
)
async def test_environment_is_closed_exactly_once(answers: list[Any], options: Any, reason: StopReason) -> None:
    """S03: whatever ends the trajectory."""
    output = await play(answers, **options)
    assert output.stop_reason is reason
    assert [env.closed for env in Counter.made] == [1]


async def test_environment_is_closed_when_the_engine_fails() -> None:
    with pytest.raises(RolloutError):
        await play([OSError("no GPU")])
    assert [env.closed for env in Counter.made] == [1]


@pytest.mark.parametrize("method", ["reset", "step", "close"])
async def test_environment_is_closed_when_the_batch_is_cancelled(method: str) -> None:
    waiting = asyncio.Event()
    scheduler = GYMScheduler(ScriptedEngine(lambda request, turn: "3"), gym_env="counter")
    running = asyncio.ensure_future(scheduler.async_infer([row(), row(waits=method, waiting=waiting)]))
    await waiting.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [env.closed for env in Counter.made] == [1, 1]


async def test_environment_is_closed_when_the_scheduler_is() -> None:
    """S04: also one that no task is playing, as in a loop that calls the hooks by itself; closing twice is harmless."""
    async with GYMScheduler(gym_env="counter") as scheduler:
        await scheduler.aclose()
        request = RolloutInferRequest.from_row(row())
        scheduler.begin_trajectories([request])
        await scheduler.on_trajectory_start([request])
        [env] = Counter.made
        assert env.closed == 0
    await scheduler.aclose()
    assert env.closed == 1


@pytest.mark.parametrize("method", ["reset", "step"])
async def test_fault_of_an_environment_is_unscored(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """A10: the output names what was raised, and its sibling goes on."""
    scheduler = GYMScheduler(ScriptedEngine(["3"]), gym_env="counter")
    good, bad = await scheduler.async_infer([row(), row(raises=method)])
    assert good.total_reward == 1.5
    assert bad.total_reward is None
    assert bad.error == f"EnvError: Counter.{method} raised LookupError: no {method} today"
    assert bad.exception is not None
    assert isinstance(bad.exception.__cause__, LookupError)
    assert "ended unscored" in caplog.text


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_reward_that_is_no_finite_number_is_unscored(reward: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One NaN would make that of a whole group, and of all weights, NaN."""

    class Broken(Counter):
        async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
            return "", reward, True, {}

    monkeypatch.setitem(envs, "broken", Broken)
    rows = [{"env_config": {"name": name, "target": 1}} for name in ("broken", "counter")]
    broken, other = await GYMScheduler(ScriptedEngine(lambda request, turn: "1")).async_infer(rows)
    assert broken.total_reward is None
    assert broken.error == f"ValueError: the reward of turn 1 is {reward}; it must be a finite number"
    assert other.total_reward == 0.5


async def test_fault_in_close_does_not_spoil_the_episode(caplog: pytest.LogCaptureFixture) -> None:
    """S07: reward and messages are kept; the fault is logged."""
    output = await play(["3"], raises="close")
    assert output.total_reward == 1.5
    assert output.error is None
    assert "closing the environment of trajectory" in caplog.text
    assert "no close today" in caplog.text


async def test_resets_of_a_batch_run_side_by_side() -> None:
    """A01: each reset waits until all have begun, so one after another they would never end."""
    begun = 0
    everybody = asyncio.Event()

    class Meeting(Counter):
        async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
            nonlocal begun
            begun += 1
            if begun == 8:
                everybody.set()
            await everybody.wait()
            return await super().reset(config)

    envs["counter"] = Meeting
    scheduler = GYMScheduler(ScriptedEngine(["3"]), gym_env="counter")
    assert len(await scheduler.async_infer([row() for _ in range(8)], RequestConfig())) == 8


async def test_hook_starts_a_whole_batch_and_one_that_fails_leaves_the_others() -> None:
    """A loop that plays in lockstep hands the whole batch to the hook."""
    scheduler = GYMScheduler(gym_env="counter")
    requests = [RolloutInferRequest.from_row(row(raises="reset" if i == 1 else None)) for i in range(3)]
    episodes = scheduler.begin_trajectories(requests)
    await scheduler.on_trajectory_start(requests)
    assert [episode.stop_reason for episode in episodes] == [None, StopReason.ENV_LOST, None]
    assert requests[2].messages[-1]["content"] == "Count to 3"
    await scheduler.aclose()
    assert [env.closed for env in Counter.made] == [1, 1, 1]


async def test_env_must_implement_its_methods() -> None:
    class Half(Env):
        async def close(self) -> None:
            pass

    with pytest.raises(TypeError, match="abstract"):
        Half({})  # type: ignore[abstract]
