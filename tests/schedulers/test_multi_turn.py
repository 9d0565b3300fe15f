"""The hooks, the endings, and a batch of trajectories."""

from __future__ import annotations

import asyncio
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenv_client import ConfigurationError, SessionLost
from schedulers import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    EnvError,
    Episode,
    MultiTurnScheduler,
    RequestConfig,
    RolloutError,
    RolloutInferRequest,
    RolloutOutput,
    RolloutScheduler,
    StopReason,
)
from schedulers.engines import ScriptedEngine
from tests.schedulers.chat_tokenizer import END, PLAIN, ChatTokenizer, characters, chatml


class Talk(MultiTurnScheduler):
    """Answers every turn by its number, and notes which hooks were called."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.hooks: list[str] = []
        self.ended: list[Episode] = []

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        self.hooks.append("start " + " ".join(request.uuid for request in requests))

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        assert infer_request.messages[-1] == {"role": "assistant", "content": response_choice.message.content}
        self.hooks.append(f"turn_end {current_turn} {response_choice.message.content}")
        return {}

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        self.hooks.append(f"check_finished {current_turn}")
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        self.hooks.append(f"step {current_turn}")
        infer_request.messages.append({"role": "user", "content": f"turn {current_turn + 1}"})
        return {"infer_request": infer_request}

    async def on_trajectory_end(self, episode: Episode) -> None:
        self.hooks.append("end")
        self.ended.append(episode)


def play(text: str = "Play", **options: Any) -> RolloutInferRequest:
    return RolloutInferRequest([{"role": "user", "content": text}], **options)


def cut(text: str) -> ChatCompletionResponseChoice:
    return ChatCompletionResponseChoice(ChatMessage(text), finish_reason="length")


async def one(scheduler: RolloutScheduler, request: Any = None, config: RequestConfig | None = None) -> RolloutOutput:
    [output] = await scheduler.async_infer([request or play()], config)
    return output


async def test_hooks_are_called_in_order() -> None:
    scheduler = Talk(ScriptedEngine(["a", "b"]), 2)
    output = await one(scheduler, play(uuid="u"))
    assert scheduler.hooks == [
        "start u",
        "turn_end 1 a",
        "check_finished 1",
        "step 1",
        "turn_end 2 b",
        "check_finished 2",
        "end",
    ]
    assert [message["content"] for message in output.messages] == ["Play", "a", "turn 2", "b"]
    assert output.uuid == "u"
    assert output.rollout_infos["num_turns"] == 2


async def test_on_turn_end_ends_the_trajectory() -> None:
    class Done(Talk):
        async def on_turn_end(self, *args: Any) -> dict[str, Any]:
            return {"done": True, "rollout_infos": {"won": True}}

    scheduler = Done(ScriptedEngine(["a"]))
    output = await one(scheduler)
    assert output.stop_reason is StopReason.FINISHED
    assert output.rollout_infos["won"] is True
    assert scheduler.hooks == ["start " + output.uuid, "end"]


@pytest.mark.parametrize("done", [False, None])
async def test_on_turn_end_that_says_not_done_overrides_no_other_rule(done: bool | None) -> None:
    """A completion that was cut ends the trajectory whatever the environment says about being done."""

    class NotDone(Talk):
        async def on_turn_end(self, *args: Any) -> dict[str, Any]:
            return {"done": done}

    assert (await one(NotDone(ScriptedEngine(["a", cut("b")])))).stop_reason is StopReason.LENGTH
    assert (await one(NotDone(ScriptedEngine(["a", "b"]), 2))).stop_reason is StopReason.MAX_TURNS


async def test_check_finished_of_a_subclass_ends_the_trajectory() -> None:
    class Solved(Talk):
        def check_finished(self, request: Any, choice: ChatCompletionResponseChoice, current_turn: int) -> bool:
            return choice.message.content == "42"

    output = await one(Solved(ScriptedEngine(["a", "42"])))
    assert output.stop_reason is StopReason.FINISHED
    assert output.rollout_infos["num_turns"] == 2


async def test_max_turns_holds_whatever_check_finished_says() -> None:
    class Never(Talk):
        def check_finished(self, *args: Any) -> bool:
            return False

    output = await one(Never(ScriptedEngine(lambda request, turn: "a"), 3))
    assert output.stop_reason is StopReason.MAX_TURNS
    assert output.rollout_infos["num_turns"] == 3


async def test_cut_completion_ends_the_trajectory() -> None:
    output = await one(Talk(ScriptedEngine([cut("a")]), 1))
    assert output.stop_reason is StopReason.LENGTH


async def test_first_ending_stays_the_stop_reason() -> None:
    class Malformed(Talk):
        async def on_turn_end(self, infer_request: RolloutInferRequest, *args: Any) -> dict[str, Any]:
            self.episode(infer_request).stop(StopReason.PARSE_ERROR)
            return {"done": True}

    output = await one(Malformed(ScriptedEngine([cut("a")]), 1))
    assert output.stop_reason is StopReason.PARSE_ERROR


async def test_ending_before_the_first_turn_asks_the_model_nothing() -> None:
    """L04: a trajectory that is over is not sampled for."""

    class Over(Talk):
        async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
            self.episode(requests[0]).stop(StopReason.ENV_DONE)

    engine = ScriptedEngine([])
    output = await one(Over(engine))
    assert output.stop_reason is StopReason.ENV_DONE
    assert engine.calls == []


async def test_single_turn_scheduler_samples_once() -> None:
    engine = ScriptedEngine(["a"])
    output = await one(RolloutScheduler(engine))
    assert output.stop_reason is StopReason.FINISHED
    assert output.messages[-1] == {"role": "assistant", "content": "a"}
    assert (await one(RolloutScheduler(ScriptedEngine([cut("a")])))).stop_reason is StopReason.LENGTH


async def test_multi_turn_scheduler_without_step_says_what_to_implement() -> None:
    with pytest.raises(RolloutError, match=r"MultiTurnScheduler must implement step\(\)"):
        await one(MultiTurnScheduler(ScriptedEngine(["a"])))


async def test_scheduler_without_an_engine_says_so() -> None:
    with pytest.raises(RolloutError, match="Talk has no engine: pass infer_engine="):
        await one(Talk())


@pytest.mark.parametrize("options", [{"max_turns": 0}, {"max_turns": -1}, {"max_trajectory_tokens": 0}])
def test_limits_below_one_are_refused(options: dict[str, int]) -> None:
    [name] = options
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        Talk(**options)


async def test_reference_answer_of_the_dataset_is_not_in_the_prompt() -> None:
    engine = ScriptedEngine(["mine"])
    row = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    # The script counts the answers in a request: with the reference answer this would be its second turn.
    output = await one(RolloutScheduler(engine), row)
    assert [message["content"] for message in output.messages] == ["2 + 2?", "mine"]
    assert engine.calls[0].request.messages == [{"role": "user", "content": "2 + 2?"}]
    assert len(row["messages"]) == 2


async def test_rows_become_requests_with_their_other_columns() -> None:
    engine = ScriptedEngine(lambda request, turn: request.data_dict["solution"])
    output = await one(RolloutScheduler(engine), {"messages": [], "solution": "42"})
    assert output.messages == [{"role": "assistant", "content": "42"}]


async def cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# -- a batch ----------------------------------------------------------------------------------------


async def test_results_stand_in_the_order_of_the_requests() -> None:
    """Also when the last one is the first to finish; one output for each request."""
    finished = [asyncio.Event() for _ in range(4)]

    async def script(request: RolloutInferRequest, turn: int) -> str:
        number = int(request.uuid)
        if number < 3:
            await finished[number + 1].wait()
        finished[number].set()
        return request.uuid

    outputs = await RolloutScheduler(ScriptedEngine(script)).async_infer([play(uuid=str(i)) for i in range(4)])
    assert [output.uuid for output in outputs] == ["0", "1", "2", "3"]
    assert [output.messages[-1]["content"] for output in outputs] == ["0", "1", "2", "3"]


async def test_batches_of_any_size() -> None:
    """L07: a batch of eight, one of three, and an empty one, with one scheduler."""
    scheduler = Talk(ScriptedEngine(["a", "b"]), 2)
    for size in (8, 3, 0):
        assert len(await scheduler.async_infer([play() for _ in range(size)])) == size
    assert scheduler.hooks.count("end") == 11


@pytest.mark.parametrize("n", [0, 2])
async def test_several_completions_a_request_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"n must be 1, not {n}; for a group of n, pass each request n times"):
        await Talk(ScriptedEngine(["a"])).async_infer([play()], RequestConfig(n=n))


async def test_requests_with_the_same_uuid_are_refused() -> None:
    scheduler = Talk(ScriptedEngine(["a"]), 1)
    with pytest.raises(ValueError, match="two trajectories with the uuid 'twin'"):
        await scheduler.async_infer([play(uuid="twin"), play(uuid="twin")])
    assert scheduler.hooks == []


async def test_trajectories_are_taken_up_all_or_none() -> None:
    scheduler = Talk(ScriptedEngine(["a"]), 1)
    with pytest.raises(ValueError, match="two trajectories with the uuid 'twin'"):
        scheduler.begin_trajectories([play(uuid="only"), play(uuid="twin"), play(uuid="twin")])
    [episode] = scheduler.begin_trajectories([play(uuid="only")])
    await scheduler.aclose()
    assert (episode.stop_reason, scheduler.hooks) == (StopReason.CANCELLED, ["end"])


async def test_a_loop_of_ones_own_plays_as_run_does() -> None:
    """The one in docs/reference/schedulers.md."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "schedulers.md").read_text()
    [block] = [part for part in text.split("```python\n")[1:] if "begin_trajectories" in part]
    code = textwrap.indent(block.partition("```")[0] + "return outputs", "    ")
    scope: dict[str, Any] = {}
    exec(f"async def drive(scheduler, request, request_config, sample):\n{code}", scope)  # noqa: S102 - our own page

    engine = ScriptedEngine(["one", "two", cut("thr")])
    by_run, by_hand = Talk(engine, 5), Talk(engine, 5)
    expected = await by_run.rollout_one(play(uuid="same"), RequestConfig())
    got = await scope["drive"](by_hand, play(uuid="same"), RequestConfig(), engine.infer_async)
    assert by_hand.hooks == by_run.hooks
    assert [output.messages for output in got] == [output.messages for output in expected]
    assert got[0].rollout_infos["stop_reason"] == "length"


async def test_uuid_of_a_running_trajectory_is_refused_and_then_free_again() -> None:
    started, go = asyncio.Event(), asyncio.Event()

    async def script(request: RolloutInferRequest, turn: int) -> str:
        started.set()
        await go.wait()
        return "a"

    scheduler = Talk(ScriptedEngine(script), 1)
    running = asyncio.ensure_future(scheduler.async_infer([play(uuid="u")]))
    await started.wait()
    with pytest.raises(ValueError, match="uuid 'u'"):
        await scheduler.async_infer([play(uuid="u")])
    go.set()
    await running
    assert (await one(scheduler, play(uuid="u"))).uuid == "u"


async def test_run_of_a_subclass_may_return_several_outputs() -> None:
    """They stand in the place of their request, and need not carry the infos of the built-in loop."""

    class Twice(RolloutScheduler):
        async def run(self, infer_request: RolloutInferRequest, request_config: RequestConfig) -> Any:
            outputs = [
                RolloutOutput(None, infer_request.messages, uuid=f"{infer_request.uuid}.{i}", rollout_infos={"i": i})
                for i in range(2)
            ]
            return outputs if infer_request.uuid == "b" else outputs[0]

    outputs = await Twice().async_infer([play(uuid=name) for name in "abc"])
    assert [output.uuid for output in outputs] == ["a.0", "b.0", "b.1", "c.0"]


async def test_run_of_a_subclass_may_use_the_default_rules() -> None:
    class Own(MultiTurnScheduler):
        async def run(self, infer_request: RolloutInferRequest, request_config: RequestConfig) -> RolloutOutput:
            turn = 0
            while True:
                turn += 1
                assert self.infer_engine is not None
                response = await self.infer_engine.infer_async(infer_request, request_config)
                infer_request.messages.append({"role": "assistant", "content": response.choices[0].message.content})
                if self.check_finished(infer_request, response.choices[0], turn):
                    return RolloutOutput(response, infer_request.messages, rollout_infos={"num_turns": turn})

    output = await one(Own(ScriptedEngine(["a", "b"]), 2))
    assert output.rollout_infos["num_turns"] == 2


async def test_run_of_a_subclass_that_raises_leaves_the_siblings() -> None:
    class Fragile(RolloutScheduler):
        async def run(self, infer_request: RolloutInferRequest, request_config: RequestConfig) -> Any:
            if infer_request.uuid == "b":
                raise OSError("broken")
            return await super().run(infer_request, request_config)

    outputs = await Fragile(ScriptedEngine(["hi"])).async_infer([play(uuid=name) for name in "abc"])
    assert [output.error for output in outputs] == [None, "OSError: broken", None]
    assert outputs[1].total_reward is None


async def test_requests_run_side_by_side() -> None:
    """All are under way before the first is answered."""
    waiting = 0
    everybody = asyncio.Event()

    async def script(request: RolloutInferRequest, turn: int) -> str:
        nonlocal waiting
        waiting += 1
        if waiting == 16:
            everybody.set()
        await everybody.wait()
        return "a"

    outputs = await RolloutScheduler(ScriptedEngine(script)).async_infer([play() for _ in range(16)])
    assert len(outputs) == 16


def test_one_scheduler_in_one_event_loop_after_another() -> None:
    scheduler = Talk(ScriptedEngine(["a", "b"]), 2)
    for _ in range(2):
        outputs = asyncio.run(scheduler.async_infer([play() for _ in range(3)]))
        assert [output.stop_reason for output in outputs] == [StopReason.MAX_TURNS] * 3


# -- the progress bar -------------------------------------------------------------------------------


class Bar:
    made: list[Bar]

    def __init__(self, *, total: int, **options: Any) -> None:
        self.total, self.done, self.closed = total, 0, False
        Bar.made.append(self)

    def update(self) -> None:
        assert not self.closed
        self.done += 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    Bar.made = []
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    return Bar.made


@pytest.mark.parametrize(
    ("requests", "use_tqdm", "shown"),
    [(3, None, True), (3, True, True), (3, False, False), (1, None, False), (1, True, True), (0, True, False)],
)
async def test_progress_bar(bars: list[Bar], requests: int, use_tqdm: bool | None, shown: bool) -> None:
    """It is shown for several requests unless told otherwise, counts finished trajectories and is closed."""
    scheduler = RolloutScheduler(ScriptedEngine(["a"]))
    await scheduler.async_infer([play() for _ in range(requests)], use_tqdm=use_tqdm)
    assert [(bar.total, bar.done, bar.closed) for bar in bars] == [(requests, requests, True)] * shown


async def test_progress_bar_is_left_out_where_tqdm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    scheduler = RolloutScheduler(ScriptedEngine(["a"]))
    assert len(await scheduler.async_infer([play(), play()])) == 2
    with pytest.raises(ImportError, match="use_tqdm=True needs tqdm"):
        await scheduler.async_infer([play(), play()], use_tqdm=True)


# -- failures ---------------------------------------------------------------------------------------


def failing(uuid: str, error: BaseException, *, in_turn: int = 1) -> ScriptedEngine:
    return ScriptedEngine(lambda request, turn: error if (request.uuid, turn + 1) == (uuid, in_turn) else "a")


async def test_one_failing_among_eight_leaves_seven_scored(caplog: pytest.LogCaptureFixture) -> None:
    """A09: the failed one is masked and unscored, its traceback is logged, and all eight are cleaned up."""
    scheduler = Talk(failing("3", OSError("the GPU fell out"), in_turn=2), 3)
    outputs = await scheduler.async_infer([play(uuid=str(i)) for i in range(8)])
    assert [output.total_reward is None for output in outputs] == [i == 3 for i in range(8)]
    assert outputs[3].stop_reason is StopReason.ERROR
    assert outputs[3].error == "OSError: the GPU fell out"
    assert isinstance(outputs[3].exception, OSError)
    assert outputs[3].rollout_infos["num_turns"] == 1
    assert scheduler.hooks.count("end") == 8
    [record] = caplog.records
    assert "trajectory 3 ended unscored in turn 1 (error): the GPU fell out" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[1] is outputs[3].exception


@pytest.mark.parametrize("hook", ["on_trajectory_start", "on_turn_end", "check_finished", "step"])
async def test_hook_that_raises_ends_its_own_trajectory(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Talk(ScriptedEngine(lambda request, turn: "a"), 2)
    original: Callable[..., Any] = getattr(scheduler, hook)

    def fragile(request: Any, *args: Any) -> Any:
        first = request[0] if isinstance(request, list) else request
        if first.uuid == "bad":
            raise LookupError("a bug")
        return original(request, *args)

    monkeypatch.setattr(scheduler, hook, fragile)
    good, bad = await scheduler.async_infer([play(uuid="good"), play(uuid="bad")])
    assert good.stop_reason is StopReason.MAX_TURNS
    assert bad.stop_reason is StopReason.ERROR
    assert bad.error == "LookupError: a bug"
    assert scheduler.hooks.count("end") == 2


async def test_all_failing_raises_with_the_first_as_its_cause() -> None:
    error = OSError("no model")
    with pytest.raises(
        RolloutError, match="all 3 trajectories ended in an exception, the first: OSError: no model"
    ) as e:
        await Talk(ScriptedEngine([error])).async_infer([play() for _ in range(3)])
    assert e.value.__cause__ is error


@pytest.mark.parametrize("error", [SessionLost("the session is gone"), EnvError("the game crashed")])
async def test_environment_failing_for_all_is_no_bug_to_raise(error: Exception) -> None:
    """A10: environments may be lost together; the outputs say so, unscored, and nothing is raised."""
    outputs = await Talk(ScriptedEngine([error])).async_infer([play() for _ in range(3)])
    assert [output.stop_reason for output in outputs] == [StopReason.ENV_LOST] * 3
    assert [output.total_reward for output in outputs] == [None] * 3


async def test_wrong_use_of_the_client_is_a_bug_to_raise() -> None:
    error = ConfigurationError("no base_url is given", remedy="Pass base_url.")
    with pytest.raises(RolloutError, match="no base_url is given") as caught:
        await one(Talk(ScriptedEngine([error])))
    assert caught.value.__cause__ is error


async def test_answer_without_a_completion_is_an_error() -> None:
    """T12: an engine that answers with no choice at all is named."""

    class Silent:
        tokenizer = None

        async def infer_async(self, request: Any, config: Any) -> ChatCompletionResponse:
            return ChatCompletionResponse(choices=[])

    with pytest.raises(RolloutError, match=r"Silent answered without a completion \(no choices\)"):
        await one(Talk(Silent()))


async def test_engine_that_cancels_one_trajectory_leaves_the_siblings(caplog: pytest.LogCaptureFixture) -> None:
    """A09: an engine that aborts a request raises CancelledError; that ends this trajectory and no other."""
    scheduler = Talk(failing("b", asyncio.CancelledError("aborted")), 1)
    outputs = await scheduler.async_infer([play(uuid=name) for name in "abc"])
    assert [output.stop_reason for output in outputs] == [
        StopReason.MAX_TURNS,
        StopReason.CANCELLED,
        StopReason.MAX_TURNS,
    ]
    assert outputs[1].total_reward is None
    assert scheduler.hooks.count("end") == 3
    assert "trajectory b was cancelled" in caplog.text


async def test_cancellation_cleans_up_every_trajectory() -> None:
    """Each trajectory ends as CANCELLED, its hook has run, and only then the caller sees the cancellation."""
    waiting = 0
    everybody = asyncio.Event()

    async def script(request: RolloutInferRequest, turn: int) -> str:
        nonlocal waiting
        if turn == 1:
            waiting += 1
            if waiting == 4:
                everybody.set()
            await asyncio.Event().wait()
        return "a"

    scheduler = Talk(ScriptedEngine(script))
    requests = [play() for _ in range(4)]
    running = asyncio.ensure_future(scheduler.async_infer(requests))
    await everybody.wait()
    await cancelled(running)
    assert [episode.stop_reason for episode in scheduler.ended] == [StopReason.CANCELLED] * 4
    assert [episode.to_output().total_reward for episode in scheduler.ended] == [None] * 4
    assert [len(episode.turns) for episode in scheduler.ended] == [1] * 4


async def test_timeout_around_a_batch_cleans_up() -> None:
    started = asyncio.Event()

    async def script(request: RolloutInferRequest, turn: int) -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    scheduler = Talk(ScriptedEngine(script))
    running = asyncio.ensure_future(scheduler.async_infer([play(), play()]))
    await started.wait()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(running, timeout=0.01)
    assert [episode.stop_reason for episode in scheduler.ended] == [StopReason.CANCELLED] * 2


async def test_leaving_the_scheduler_ends_what_still_runs() -> None:
    """A trajectory that is closed while the model speaks takes no further turn and fails in no hook."""
    started, go = asyncio.Event(), asyncio.Event()

    async def script(request: RolloutInferRequest, turn: int) -> str:
        started.set()
        await go.wait()
        return "a"

    async with Talk(ScriptedEngine(script)) as scheduler:
        running = asyncio.ensure_future(scheduler.async_infer([play(uuid="u")]))
        await started.wait()
    go.set()
    [output] = await running
    assert output.stop_reason is StopReason.CANCELLED
    assert scheduler.hooks == ["start u", "end"]


async def test_episode_of_a_trajectory_that_does_not_run() -> None:
    with pytest.raises(KeyError, match="no trajectory with uuid 'u' is running"):
        Talk().episode(play(uuid="u"))


# -- rewards of one's own ---------------------------------------------------------------------------


def words(episode: Episode) -> float:
    return sum(len(turn.text.split()) for turn in episode.turns) / len(episode.turns)


async def test_extra_rewards_stand_beside_the_total() -> None:
    scheduler = Talk(ScriptedEngine(["a b", "c"]), 2, extra_rewards={"words": words, "turns": lambda e: len(e.turns)})
    output = await one(scheduler)
    assert output.rollout_infos["rewards"] == {"words": 1.5, "turns": 2.0}
    assert output.total_reward == 0.0


async def test_extra_reward_of_a_trajectory_without_a_turn_is_zero() -> None:
    class Over(Talk):
        async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
            self.episode(requests[0]).stop(StopReason.ENV_DONE)

    output = await one(Over(ScriptedEngine([]), extra_rewards={"words": words}))
    assert output.rollout_infos["rewards"] == {"words": 0.0}


async def test_extra_reward_that_raises_leaves_its_own_trajectory_unscored() -> None:
    def fragile(episode: Episode) -> float:
        if episode.uuid == "b":
            raise LookupError("a bug")
        return 1.0

    scheduler = Talk(failing("c", SessionLost("gone")), 1, extra_rewards={"mine": fragile})
    a, b, c = await scheduler.async_infer([play(uuid=name) for name in "abc"])
    assert a.rollout_infos["rewards"] == {"mine": 1.0}
    assert b.error == "LookupError: a bug"
    assert b.total_reward is None
    assert c.rollout_infos["rewards"] == {}
    assert scheduler.hooks.count("end") == 3


async def test_extra_reward_must_be_a_finite_number() -> None:
    scheduler = Talk(ScriptedEngine(["a"] * 2), 1, extra_rewards={"mine": lambda episode: float(episode.uuid)})
    a, b = await scheduler.async_infer([play(uuid="nan"), play(uuid="1")])
    assert a.error == "ValueError: extra_rewards: 'mine' is nan; it must be a finite number"
    assert b.rollout_infos["rewards"] == {"mine": 1.0}


async def test_extra_reward_must_not_take_a_name_that_is_taken() -> None:
    class Paid(Talk):
        async def on_turn_end(self, infer_request: RolloutInferRequest, *args: Any) -> dict[str, Any]:
            self.episode(infer_request).rewards["words"] = 5.0
            return {}

    with pytest.raises(RolloutError, match="the scheduler has a reward 'words' of its own; rename yours"):
        await one(Paid(ScriptedEngine(["a"]), 1, extra_rewards={"words": words}))


# -- tokens -----------------------------------------------------------------------------------------


async def test_prompts_extend_each_other_over_three_turns(tokenizer: ChatTokenizer) -> None:
    """The prompt of turn n + 1 starts with prompt and completion of turn n, token for token, and masks line up."""
    engine = ScriptedEngine(["one", "[5 3 7]", "three"], tokenizer)
    output = await one(Talk(engine, 3))
    prompts = [call.request.prompt_token_ids or [] for call in engine.calls]
    assert output.response_token_ids is not None
    for before, ids, after in zip(prompts, output.response_token_ids, prompts[1:], strict=False):
        assert after[: len(before) + len(ids)] == before + ids
    assert output.prompt_token_ids == prompts[0]
    assert output.completion_token_ids is not None
    assert output.completion_mask is not None
    assert prompts[0] + output.completion_token_ids == prompts[2] + output.response_token_ids[2]
    sampled = [i for i, m in zip(output.completion_token_ids, output.completion_mask, strict=True) if m]
    assert sampled == [i for ids in output.response_token_ids for i in ids]
    whole = tokenizer.decode(output.prompt_token_ids + output.completion_token_ids)
    assert whole == chatml(output.messages, False).removesuffix("\n")


async def test_logprobs_stay_with_their_tokens(tokenizer: ChatTokenizer) -> None:
    """T04: the engine gives -id / 1000 for each id; after assembling, every sampled position still has its own."""
    output = await one(Talk(ScriptedEngine(["one", "two", "three"], tokenizer), 3))
    assert output.completion_logprobs is not None
    assert output.completion_token_ids is not None
    assert output.completion_mask is not None
    assert output.completion_logprobs == [
        -i / 1000 if m else 0.0 for i, m in zip(output.completion_token_ids, output.completion_mask, strict=True)
    ]
    assert output.rollout_logprobs == [[-i / 1000 for i in turn] for turn in output.response_token_ids or []]


async def test_sampled_ids_are_never_tokenised_again(tokenizer: ChatTokenizer) -> None:
    """T01: an unusual spelling of the answer is what the next prompt and the output carry."""
    unusual = [*characters("[5 3 7]"), END]
    answer = ChatCompletionResponseChoice(ChatMessage("[5 3 7]"), token_ids=unusual)
    engine = ScriptedEngine([answer, "b"], tokenizer)
    output = await one(Talk(engine, 2))
    assert output.response_token_ids is not None
    assert output.response_token_ids[0] == unusual
    assert PLAIN not in (engine.calls[1].request.prompt_token_ids or [])


def with_logprobs(text: str, token_ids: list[int], logprobs: int | None) -> ChatCompletionResponseChoice:
    content = None if logprobs is None else {"content": [{"logprob": -1.0}] * logprobs}
    return ChatCompletionResponseChoice(ChatMessage(text), token_ids=token_ids, logprobs=content)


async def test_logprobs_that_do_not_match_are_dropped_with_one_warning(
    tokenizer: ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """T03: eight log-probabilities for seven ids: none is left for the whole trajectory, and it is said once."""
    odd = with_logprobs("[5 3 7]", characters("[5 3 7]"), 8)
    scheduler = Talk(ScriptedEngine(["a", odd, odd], tokenizer), 3)
    for output in await scheduler.async_infer([play(), play()]):
        assert output.rollout_logprobs is None
        assert output.completion_logprobs is None
        assert output.response_token_ids is not None
        assert [len(ids) for ids in output.response_token_ids] == [2, 7, 7]
    assert [record.getMessage() for record in caplog.records] == [
        "log-probabilities are dropped for the whole trajectory: "
        "ScriptedEngine gave some that do not match its tokens one to one"
    ]


async def test_one_turn_without_logprobs_leaves_none(
    tokenizer: ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """T03, T12: missing in one turn is missing for the trajectory, which is said once."""
    scheduler = Talk(ScriptedEngine(["a", with_logprobs("b", [5, END], None)], tokenizer), 2)
    for output in await scheduler.async_infer([play(), play()]):
        assert output.rollout_logprobs is None
        assert output.completion_mask is not None
    assert [record.getMessage() for record in caplog.records] == [
        "log-probabilities are dropped for the whole trajectory: "
        "some turns of a trajectory have none that match their tokens"
    ]


async def test_engine_without_logprobs_is_no_fault_to_warn_of(
    tokenizer: ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    await one(Talk(ScriptedEngine(["a", "b"], tokenizer), 2), config=RequestConfig(logprobs=False))
    assert caplog.records == []


async def test_step_that_cuts_ids_and_not_their_logprobs_is_warned_of(
    tokenizer: ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    class Cutting(Talk):
        def step(self, infer_request: RolloutInferRequest, *args: Any) -> dict[str, Any]:
            return {**super().step(infer_request, *args), "response_token_ids": characters("a")}

    output = await one(Cutting(ScriptedEngine(["abc", "b"], tokenizer), 2))
    assert output.response_token_ids == [characters("a"), [*characters("b"), END]]
    assert output.rollout_logprobs is None
    assert "some turns of a trajectory have none" in caplog.text


async def test_engine_without_ids_leaves_none(tokenizer: ChatTokenizer) -> None:
    """T12: ids that the engine does not tell are None, also where the scheduler knows the prompt."""
    output = await one(Talk(ScriptedEngine([ChatCompletionResponseChoice(ChatMessage("a")), "b"], tokenizer), 2))
    assert output.response_token_ids is None
    assert output.response_loss_mask is None
    assert output.prompt_token_ids is None


async def test_engine_without_a_tokenizer_works_on_text() -> None:
    engine = ScriptedEngine(["a", "b"])
    output = await one(Talk(engine, 2))
    assert output.response_token_ids is None
    assert [call.request.prompt_token_ids for call in engine.calls] == [None, None]


async def test_tokenizer_that_was_passed_comes_before_the_engines(tokenizer: ChatTokenizer) -> None:
    assert Talk(ScriptedEngine([], ChatTokenizer()), tokenizer=tokenizer).tokenizer is tokenizer
    assert Talk(ScriptedEngine([], tokenizer)).tokenizer is tokenizer
    assert Talk().tokenizer is None


def no_thinking(messages: list[dict[str, Any]], generation_prompt: bool) -> str:
    answers = [{**m, "content": m["content"].rpartition("</think>")[2]} for m in messages]
    return chatml(answers, generation_prompt)


async def test_template_that_removes_thinking_splits_the_trajectory(caplog: pytest.LogCaptureFixture) -> None:
    """T09: the model is shown what the template shows, the number of segments tells, and one warning says why."""
    tokenizer = ChatTokenizer(no_thinking)
    engine = ScriptedEngine(["<think>a</think>x", "<think>b</think>y", "<think>c</think>z"], tokenizer)
    output = await one(Talk(engine, 3))
    assert output.rollout_infos["segments"] == 3
    last = engine.calls[2].request.prompt_token_ids
    assert tokenizer.decode(last or []) == no_thinking(output.messages[:-1], True)
    assert output.prompt_token_ids == last
    assert output.response_token_ids is not None
    assert output.completion_token_ids == output.response_token_ids[-1]
    assert len(caplog.records) == 1
    assert "split into segments" in caplog.text


@pytest.mark.parametrize("keep", [1, 2, 3])
async def test_hook_that_rewrites_the_history_splits_the_trajectory(tokenizer: ChatTokenizer, keep: int) -> None:
    """A scheduler may shorten or reword what was said; the next prompt then shows just that."""

    class Forgetful(Talk):
        def step(self, infer_request: RolloutInferRequest, *args: Any) -> dict[str, Any]:
            summary = [{"role": role, "content": "summary"} for role in ("user", "assistant", "user")]
            infer_request.messages[:] = summary[-keep:]
            return {"infer_request": infer_request}

    engine = ScriptedEngine(lambda request, turn: "a", tokenizer)
    output = await one(Forgetful(engine, 2))
    assert output.error is None
    assert output.rollout_infos["segments"] == 2
    prompt = tokenizer.decode(engine.calls[1].request.prompt_token_ids or [])
    assert prompt == chatml(output.messages[:-1], True)
    assert "Play" not in prompt


async def test_hook_that_rewords_an_answer_splits_the_trajectory(tokenizer: ChatTokenizer) -> None:
    class Censor(Talk):
        async def on_turn_end(self, infer_request: RolloutInferRequest, *args: Any) -> dict[str, Any]:
            infer_request.messages[-1]["content"] = "***"
            return {}

    engine = ScriptedEngine(["damn", "b"], tokenizer)
    output = await one(Censor(engine, 2))
    assert output.rollout_infos["segments"] == 2
    assert "damn" not in tokenizer.decode(engine.calls[1].request.prompt_token_ids or [])


class Hint(MultiTurnScheduler):
    """Cuts the end token of the first answer and goes on in the same message with words of its own."""

    with_tokens = True

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        infer_request.messages[-1]["content"] += " wait,"
        if not self.with_tokens:
            return {"infer_request": infer_request}
        ids = (response_choice.token_ids or [])[:-1]
        words = characters(" wait,")
        logprobs = [item["logprob"] for item in (response_choice.logprobs or {})["content"]]
        return {
            "infer_request": infer_request,
            "response_token_ids": ids + words,
            "response_loss_mask": [1] * len(ids) + [0] * len(words),
            "rollout_logprobs": logprobs[:-1],
            "rollout_infos": {"hinted": True},
        }


async def test_answer_goes_on_in_the_same_message(tokenizer: ChatTokenizer) -> None:
    """``step`` says which tokens the answer has now; the model goes on from them, and its words are masked."""
    # The script counts answers in the request, and a message that goes on is one already.
    engine = ScriptedEngine(["4", " no, 5"], tokenizer)
    output = await one(Hint(engine, 2))
    first, second = (call.request.prompt_token_ids or [] for call in engine.calls)
    assert output.messages[-1] == {"role": "assistant", "content": "4 wait, no, 5"}
    assert second == [*first, *characters("4 wait,")]
    assert output.response_token_ids == [[*characters("4 wait, no, 5"), END]]
    assert output.response_loss_mask == [[1] + [0] * 6 + [1] * 7]
    assert output.rollout_logprobs == [[-i / 1000 for i in [*characters("4 no, 5"), END]]]
    assert output.rollout_infos["hinted"] is True
    assert output.rollout_infos["segments"] == 1
    assert output.rollout_infos["num_turns"] == 2
    assert output.completion_token_ids == output.response_token_ids[0]
    assert output.completion_mask == output.response_loss_mask[0]


async def test_answer_that_goes_on_without_its_tokens_is_refused(tokenizer: ChatTokenizer) -> None:
    """The model would not see the words that the messages show, so the hook is told what to return."""
    scheduler = Hint(ScriptedEngine(["4", "5"], tokenizer), 2)
    scheduler.with_tokens = False
    with pytest.raises(RolloutError, match="must return response_token_ids"):
        await one(scheduler)


async def test_mask_without_ids_is_refused(tokenizer: ChatTokenizer) -> None:
    class Wrong(Talk):
        def step(self, infer_request: RolloutInferRequest, *args: Any) -> dict[str, Any]:
            return {"infer_request": infer_request, "response_loss_mask": [1]}

    with pytest.raises(RolloutError, match="response_loss_mask without response_token_ids"):
        await one(Wrong(ScriptedEngine(["a"], tokenizer), 2))


async def test_step_may_hand_on_another_request(tokenizer: ChatTokenizer) -> None:
    """The trajectory stays the same one, under the same uuid."""

    class Copying(Talk):
        def step(self, infer_request: RolloutInferRequest, *args: Any) -> dict[str, Any]:
            messages = [*infer_request.messages, {"role": "user", "content": "again"}]
            return {"infer_request": RolloutInferRequest(messages, data_dict=infer_request.data_dict)}

    scheduler = Copying(ScriptedEngine(["a", "b"], tokenizer), 2)
    output = await one(scheduler, play(uuid="u"))
    assert output.uuid == "u"
    assert [message["content"] for message in output.messages] == ["Play", "a", "again", "b"]
    assert output.rollout_infos["segments"] == 1
    assert scheduler.hooks.count("end") == 1


async def test_empty_completions_are_turns_like_any_other(tokenizer: ChatTokenizer) -> None:
    """P09: an end token alone, no token at all, and white space: ids and masks stay aligned and nothing fails."""
    nothing = ChatCompletionResponseChoice(ChatMessage(""), token_ids=[], logprobs={"content": []})
    output = await one(Talk(ScriptedEngine(["", nothing, "   \n"], tokenizer), 3))
    assert output.error is None
    assert output.response_token_ids == [[END], [], [*characters("   \n"), END]]
    assert output.response_loss_mask == [[1], [], [1] * 5]
    assert output.completion_token_ids is not None
    assert len(output.completion_token_ids) == len(output.completion_mask or [])
    assert output.rollout_infos["segments"] == 1


# -- room -------------------------------------------------------------------------------------------


def length(tokenizer: ChatTokenizer, *contents: str) -> int:
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return len(tokenizer.encode(chatml(messages, True), add_special_tokens=False))


async def test_trajectory_that_would_overflow_the_context_ends_with_what_it_has(tokenizer: ChatTokenizer) -> None:
    """L13: no prompt passes the model's limit; the trajectory is truncated, scored and cleaned up."""
    limit = length(tokenizer, "Play", "a", "turn 2") + 2
    engine = ScriptedEngine(lambda request, turn: "a", tokenizer, max_model_len=limit)
    scheduler = Talk(engine)
    output = await one(scheduler)
    assert output.stop_reason is StopReason.CONTEXT
    assert output.total_reward is not None
    assert output.error is None
    assert output.rollout_infos["num_turns"] == len(engine.calls) == 2
    for call in engine.calls:
        assert call.request_config.max_tokens is not None
        assert len(call.request.prompt_token_ids or []) + call.request_config.max_tokens <= limit
    assert scheduler.hooks[-1] == "end"


async def test_later_turn_is_asked_for_only_when_all_of_it_fits(tokenizer: ChatTokenizer) -> None:
    """An answer cut for want of room would be judged as if the model had said no more."""
    limit = length(tokenizer, "Play", "a", "turn 2") + 9
    engine = ScriptedEngine(lambda request, turn: "a", tokenizer, max_model_len=limit)
    output = await one(Talk(engine), config=RequestConfig(max_tokens=10))
    assert output.stop_reason is StopReason.CONTEXT
    assert [call.request_config.max_tokens for call in engine.calls] == [10]


async def test_first_prompt_that_leaves_no_room_asks_the_model_nothing(tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine([], tokenizer, max_model_len=length(tokenizer, "Play"))
    with pytest.raises(RolloutError, match="leaves no room for an answer; take a model with a longer context"):
        await one(Talk(engine))
    assert engine.calls == []


async def test_trajectory_limit_bounds_all_turns_and_turn_limit_each(tokenizer: ChatTokenizer) -> None:
    """T11: max_tokens bounds a completion, max_trajectory_tokens all after the first prompt; neither is passed."""
    glue = length(tokenizer, "Play", "", "turn 2") - length(tokenizer, "Play")
    limit = 3 * 20 + 2 * glue
    engine = ScriptedEngine(lambda request, turn: "x" * 30, tokenizer)

    class Patient(Talk):
        def check_finished(self, *args: Any) -> bool:
            return False  # goes on after a cut answer

    for tokens, turns in ((limit, 3), (limit - 1, 2)):
        engine.calls.clear()
        scheduler = Patient(engine, max_trajectory_tokens=tokens)
        output = await one(scheduler, config=RequestConfig(max_tokens=20))
        assert output.stop_reason is StopReason.CONTEXT
        assert output.response_token_ids is not None
        assert [len(ids) for ids in output.response_token_ids] == [20] * turns
        assert output.completion_token_ids is not None
        assert len(output.completion_token_ids) <= tokens


async def test_trajectory_limit_is_that_of_a_segment(tokenizer: ChatTokenizer) -> None:
    """A row of a trainer begins anew where history is rewritten, and has all of its room."""

    class Forgetful(Talk):
        def step(self, infer_request: RolloutInferRequest, *args: Any) -> dict[str, Any]:
            infer_request.messages[:] = [{"role": "user", "content": "What now? " * 5}]
            return {"infer_request": infer_request}

    engine = ScriptedEngine(lambda request, turn: "a" * 9, tokenizer)
    output = await one(Forgetful(engine, 2, max_trajectory_tokens=10), config=RequestConfig(max_tokens=10))
    assert output.stop_reason is StopReason.MAX_TURNS
    assert output.rollout_infos["segments"] == 2
    assert output.completion_token_ids is not None
    assert len(output.completion_token_ids) == 10


async def test_trajectory_limit_below_the_turn_limit_cuts_the_first_turn(tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine(["x" * 30], tokenizer)
    output = await one(Talk(engine, max_trajectory_tokens=7), config=RequestConfig(max_tokens=20))
    assert output.stop_reason is StopReason.LENGTH
    assert output.completion_token_ids == characters("x" * 7)


async def test_request_config_is_handed_on(tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine(["a"], tokenizer)
    config = RequestConfig(max_tokens=5, temperature=0.3, top_p=0.9, top_k=4, seed=1, stop=("x",))
    await one(RolloutScheduler(engine), config=config)
    assert engine.calls[0].request_config == config
