"""Our schedulers in ms-swift's own loops: the transcript is ours, and every end closes the environment."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from swift.infer_engine.protocol import ChatCompletionResponseChoice, ChatMessage
from swift.rewards import orms
from swift.rl_core.data import OnPolicySample
from swift.rlhf_trainers.utils import encode_sample
from swift.rollout import MultiTurnScheduler as SwiftMultiTurnScheduler
from swift.rollout import envs as swift_envs
from swift.rollout import invoke_async_hook, multi_turns

from examples.sudoku.example import perfect
from examples.sudoku.scheduler import SudokuScheduler
from openenv_client import OpenEnvWrapper
from openenv_client.testing import Fault, MockEnvServer
from schedulers import (
    Env,
    Episode,
    GYMScheduler,
    MultiTurnScheduler,
    RequestConfig,
    RolloutError,
    RolloutInferRequest,
    RolloutScheduler,
    StopReason,
)
from schedulers import RolloutOutput as OurOutput
from schedulers.engines import ScriptedEngine
from schedulers.tips import MathTipsScheduler, ThinkingModelTipsScheduler
from schedulers.trainers.swift import register
from tests.examples.sudoku.games import seeded
from tests.swift.native import NativeEngine, colocate, requests_of, row, serve, server

MODES = ["colocate", "server"]


def play(
    make_scheduler: Any,
    mode: str,
    engine: NativeEngine,
    rows: Sequence[dict[str, Any]],
    scheduler_class: type[RolloutScheduler] = SudokuScheduler,
    **arguments: Any,
) -> list[Any]:
    """Play a batch as ms-swift does in that mode."""
    requests = requests_of(rows)
    if mode == "colocate":
        scheduler = make_scheduler(scheduler_class, **arguments)
        return colocate(scheduler, requests, engine, arguments.get("max_turns"))
    return server(make_scheduler(scheduler_class, engine, **arguments), requests)


def wrong(request: Any, turn: int) -> str:
    """A wrong digit in the cell that the perfect player would fill, another one each turn."""
    right = perfect(request, turn)
    return f"{right[:-2]}{(int(right[-2]) + turn) % 9 + 1}]"


def stumbling(request: Any, turn: int) -> str:
    """Right, unreadable, wrong, right, …"""
    return [perfect(request, turn), "R1", wrong(request, turn)][turn % 3]


def cut_short(template: Any, text: str = "R1") -> ChatCompletionResponseChoice:
    ids = template.tokenizer.encode(text, add_special_tokens=False)
    logprobs = {"content": [{"logprob": -0.5} for _ in ids]}
    return ChatCompletionResponseChoice(0, ChatMessage("assistant", text), "length", logprobs, ids)


def comparable(infos: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in infos.items() if not key.endswith("_seconds") and key != "scored"}


# -- the same game ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("player", [perfect, wrong, stumbling, lambda request, turn: "R1"])
def test_a_game_is_what_it_is_without_swift(mode: str, player: Any, template: Any, make_scheduler: Any) -> None:
    """Messages, token ids, masks, log-probabilities, infos and rewards; a move that loses is worth what it is here."""
    with MockEnvServer(seeded(empty=4)) as env_server:
        rows = [row(env_server.base_url, seed) for seed in range(3)]
        theirs = play(make_scheduler, mode, NativeEngine(template, player), rows)
        ours = asyncio.run(play_without_swift(player, template.tokenizer, rows))
        env_server.wait_until(lambda: env_server.sessions == 0)
    for output, expected in zip(theirs, ours, strict=True):
        assert output.response_token_ids == expected.response_token_ids
        assert output.response_loss_mask == expected.response_loss_mask
        assert output.rollout_logprobs == expected.rollout_logprobs
        assert comparable(output.rollout_infos) == comparable(expected.rollout_infos)
        assert as_text(output.messages, template) == expected.messages
        assert output.messages[-1]["role"] == "assistant"


async def play_without_swift(player: Any, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[OurOutput]:
    engine = ScriptedEngine(player, tokenizer)
    async with SudokuScheduler(engine) as scheduler:
        return await scheduler.async_infer(rows, RequestConfig(), use_tqdm=False)


def as_text(messages: list[dict[str, Any]], template: Any) -> list[dict[str, Any]]:
    """ms-swift keeps earlier answers as token ids."""
    decode = template.tokenizer.decode
    return [
        {**message, "content": decode(content, skip_special_tokens=True) if isinstance(content, list) else content}
        for message, content in ((message, message["content"]) for message in messages)
    ]


@pytest.mark.parametrize("mode", MODES)
def test_every_prompt_extends_the_one_before_by_what_was_sampled(mode: str, template: Any, make_scheduler: Any) -> None:
    """T01: earlier answers reach the engine as the ids that it sampled, although the text spells otherwise."""
    spelled = template.tokenizer.encode("R1 R2", add_special_tokens=False)

    def odd(request: Any, turn: int) -> ChatCompletionResponseChoice:
        ids = [*spelled, template.tokenizer.eos_token_id]
        return ChatCompletionResponseChoice(0, ChatMessage("assistant", perfect(request, turn)), "stop", None, ids)

    with MockEnvServer(seeded(empty=3)) as env_server:
        engine = NativeEngine(template, odd)
        [output] = play(make_scheduler, mode, engine, [row(env_server.base_url)])
    assert len(engine.prompts) == 3
    for before, after in zip(engine.prompts, engine.prompts[1:], strict=False):
        known = [*before, *spelled, template.tokenizer.eos_token_id]
        assert after[: len(known)] == known
    assert output.rollout_infos["solved"] is True
    assert output.rollout_logprobs == []  # the engine gave none


@pytest.mark.parametrize("mode", MODES)
def test_a_tip_goes_on_in_the_same_message_with_mask_0(mode: str, template: Any, make_scheduler: Any) -> None:
    answers = ["R1 R2", "R3"]
    options: dict[str, Any] = {"acc_function": lambda texts, solutions: [0.0 for _ in texts]}
    rows = [{"solution": "4"}]
    engine = NativeEngine(template, lambda request, turn: answers[turn])
    [output] = play(make_scheduler, mode, engine, rows, MathTipsScheduler, options=options)

    async def without_swift() -> OurOutput:
        engine = ScriptedEngine(lambda request, turn: answers[turn], template.tokenizer)
        async with MathTipsScheduler(engine, **options) as scheduler:
            request = {**rows[0], "messages": [{"role": "user", "content": "Play"}]}
            [expected] = await scheduler.async_infer([request], RequestConfig())
            return expected

    expected = asyncio.run(without_swift())
    assert expected.response_loss_mask is not None
    assert 0 in expected.response_loss_mask[0]
    assert output.response_token_ids == expected.response_token_ids
    assert output.response_loss_mask == expected.response_loss_mask
    assert output.rollout_logprobs == expected.rollout_logprobs
    assert output.messages == expected.messages


class Forgetful(MultiTurnScheduler):
    """Shows the model its latest answer only."""

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages[:-1] = [{"role": "user", "content": f"R{current_turn}"}]
        infer_request.messages.append({"role": "user", "content": "C1"})
        return {"infer_request": infer_request}


@pytest.mark.parametrize("mode", MODES)
def test_a_scheduler_that_rewrites_history_is_warned_once(
    mode: str, template: Any, make_scheduler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = NativeEngine(template, lambda request, turn: "R9")
    outputs = play(make_scheduler, mode, engine, [{}, {}], Forgetful, max_turns=3, options={})
    assert caplog.text.count("Forgetful rewrites earlier messages") == 1
    assert [m["content"] for m in as_text(outputs[0].messages, template)] == ["R2", "R9", "C1", "R9"]


@pytest.mark.parametrize("mode", MODES)
def test_what_the_template_says_before_an_answer_is_masked(
    mode: str, template: Any, make_scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "_get_response_prefix", lambda inputs: "R9")
    [prefix] = template.tokenizer.encode("R9", add_special_tokens=False)
    with MockEnvServer(seeded(empty=2)) as env_server:
        [output] = play(make_scheduler, mode, NativeEngine(template, perfect), [row(env_server.base_url)])
    for ids, mask in zip(output.response_token_ids, output.response_loss_mask, strict=True):
        assert (ids[0], mask) == (prefix, [0, 1, 1, 1, 1])


@pytest.mark.parametrize("mode", MODES)
def test_a_reference_answer_of_the_dataset_is_not_shown(mode: str, template: Any, make_scheduler: Any) -> None:
    request = requests_of([{}])[0]
    request.messages.append({"role": "assistant", "content": "R9"})
    engine = NativeEngine(template, ["R1"])
    if mode == "server":
        [output] = server(make_scheduler(RolloutScheduler, engine, options={}), [request])
    else:
        [output] = colocate(make_scheduler(RolloutScheduler, options={}), [request], engine)
    assert [message["content"] for message in output.messages] == ["Play", "R1"]


@pytest.mark.parametrize("mode", MODES)
def test_the_trainer_learns_from_what_was_sampled_and_nothing_else(
    mode: str, template: Any, make_scheduler: Any
) -> None:
    """ms-swift's own encoding: a label for each sampled token, but one alone, the last, in a game that was lost."""
    faults = [Fault("error", on="step", nth=3)]
    with MockEnvServer(seeded(empty=4)) as good, MockEnvServer(seeded(empty=4), faults=faults) as bad:
        rows = [row(good.base_url), row(bad.base_url)]
        outputs = play(make_scheduler, mode, NativeEngine(template, perfect), rows)
    template.set_mode("train")
    learned = []
    for output in outputs:
        sample = OnPolicySample(messages=[])
        sample.apply_rollout_output(rollout_output=output)
        labels = encode_sample(sample, template)["labels"]
        learned.append([label for label in labels if label != -100])
    sampled = [token_id for ids in outputs[0].response_token_ids for token_id in ids]
    assert learned == [sampled, [template.tokenizer.eos_token_id]]


# -- how games end ----------------------------------------------------------------------------------


class Faulty(SudokuScheduler):
    """Its parser raises in turn 2."""

    def parse_action(self, text: str) -> dict[str, Any] | None:
        if text == "R2":
            raise ZeroDivisionError("a fault of the subclass")
        return super().parse_action(text)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("script", "arguments", "reason"),
    [
        (perfect, {}, StopReason.ENV_DONE),
        (perfect, {"max_turns": 2}, StopReason.MAX_TURNS),
        (perfect, {"options": {"max_turns": 2}}, StopReason.MAX_TURNS),
        (lambda request, turn: "R1", {}, StopReason.PARSE_ERROR),
        ("cut", {}, StopReason.LENGTH),
        (perfect, {"options": {"max_trajectory_tokens": 100}}, StopReason.CONTEXT),
        (perfect, {"options": {"max_model_len": 400}}, StopReason.CONTEXT),
    ],
)
def test_every_end_closes_the_environment_and_has_a_reward(
    mode: str, script: Any, arguments: dict[str, Any], reason: StopReason, template: Any, make_scheduler: Any
) -> None:
    """A cut answer ends a game although the environment is not done: ``done: False`` overrides nothing."""
    if script == "cut":
        script = [cut_short(template)]
    with MockEnvServer(seeded(empty=4)) as env_server:
        [output] = play(make_scheduler, mode, NativeEngine(template, script), [row(env_server.base_url)], **arguments)
        assert env_server.sessions == 0
    assert output.rollout_infos["stop_reason"] == reason
    assert isinstance(output.rollout_infos["total_reward"], float)
    assert output.rollout_infos["total_reward"] == sum(output.rollout_infos["step_rewards"])
    assert output.rollout_infos["scored"] is True


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("scheduler_class", "faults", "script", "reason"),
    [
        (SudokuScheduler, [Fault("error", on="step", nth=2)], perfect, StopReason.ENV_LOST),
        (SudokuScheduler, [Fault("error", on="reset")], perfect, StopReason.ENV_LOST),
        (Faulty, [], [perfect, "R2"], StopReason.ERROR),
    ],
)
def test_an_unscored_game_teaches_nothing_and_leaves_its_siblings_alone(
    mode: str,
    scheduler_class: type[RolloutScheduler],
    faults: list[Fault],
    script: Any,
    reason: StopReason,
    template: Any,
    make_scheduler: Any,
) -> None:
    """Its masks are 0 but for the last token, also those handed over before; no game is played again."""
    with MockEnvServer(seeded(empty=3)) as good, MockEnvServer(seeded(empty=3), faults=faults) as bad:

        def player(request: Any, turn: int) -> str:
            plays_badly = request.data_dict["env_config"]["base_url"] == bad.base_url and isinstance(script, list)
            move = script[turn] if plays_badly else perfect
            return move if isinstance(move, str) else move(request, turn)

        def careful(request: Any, turn: int) -> str:
            try:
                return player(request, turn)
            except ValueError:  # the game was never started, and this answer is not looked at
                return "R1"

        rows = [row(good.base_url, 0), row(bad.base_url, 1), row(good.base_url, 2)]
        outputs = play(make_scheduler, mode, NativeEngine(template, careful), rows, scheduler_class)
        assert good.sessions == bad.sessions == 0
        assert bad.kinds.count("reset") == 1
    lost = outputs[1]
    assert [output.rollout_infos["scored"] for output in outputs] == [True, False, True]
    assert [output.rollout_infos["solved"] for output in outputs[::2]] == [True, True]
    assert lost.rollout_infos["stop_reason"] == reason
    assert lost.rollout_infos["error"]
    assert isinstance(lost.rollout_infos["total_reward"], float)
    assert lost.response_token_ids
    assert [len(ids) for ids in lost.response_token_ids] == [len(mask) for mask in lost.response_loss_mask]
    assert not any(map(any, lost.response_loss_mask[:-1]))
    assert (lost.response_loss_mask[-1].pop(), any(lost.response_loss_mask[-1])) == (1, False)
    assert sum(map(len, lost.rollout_logprobs)) == 1
    assert orms["environment_reward"]()([], rollout_infos=[o.rollout_infos for o in outputs]) == [
        outputs[0].rollout_infos["total_reward"],
        None,
        outputs[2].rollout_infos["total_reward"],
    ]


@pytest.mark.parametrize("mode", MODES)
def test_a_game_that_becomes_unscored_in_its_end_teaches_nothing(mode: str, template: Any, make_scheduler: Any) -> None:
    """All of its masks are taken back, though it was scored until a reward function raised."""

    def fragile(episode: Episode) -> float:
        if episode.infos["seed"] == 1:
            raise LookupError("a bug")
        return 1.0

    options = {"max_concurrent_envs": 4, "extra_rewards": {"mine": fragile}}
    with MockEnvServer(seeded(empty=3)) as env_server:
        rows = [row(env_server.base_url, seed) for seed in range(3)]
        outputs = play(make_scheduler, mode, NativeEngine(template, perfect), rows, options=options)
        assert env_server.sessions == 0
    assert [output.rollout_infos["scored"] for output in outputs] == [True, False, True]
    lost = outputs[1]
    assert lost.rollout_infos["error"] == "LookupError: a bug"
    assert not any(map(any, lost.response_loss_mask[:-1]))
    assert sum(lost.response_loss_mask[-1]) == sum(map(len, lost.rollout_logprobs)) == 1


def test_the_substitute_for_a_missing_reward_is_the_mean_of_the_latest_scored_games(
    template: Any, make_scheduler: Any
) -> None:
    with MockEnvServer(seeded(empty=2)) as env_server:
        scheduler = make_scheduler()
        engine = NativeEngine(template, lambda request, turn: "R1" if turn else perfect(request, turn))
        scored = colocate(scheduler, requests_of([row(env_server.base_url, seed) for seed in range(2)]), engine)
        lost = colocate(scheduler, requests_of([{}]), NativeEngine(template, ["R1"]))
    mean = sum(output.rollout_infos["total_reward"] for output in scored) / 2
    assert lost[0].rollout_infos["total_reward"] == pytest.approx(mean)
    assert "base_url" in lost[0].rollout_infos["error"]


def test_an_engine_that_fails_ends_one_trajectory(template: Any, make_scheduler: Any) -> None:
    """Server mode; what was sampled before is not trained on, nor is what stands in its place."""

    def player(request: Any, turn: int) -> str | BaseException:
        failing = request.data_dict["env_config"]["reset_kwargs"]["seed"] == 1
        return RuntimeError("out of memory") if failing and turn == 1 else perfect(request, turn)

    with MockEnvServer(seeded(empty=2)) as env_server:
        rows = [row(env_server.base_url, seed) for seed in range(3)]
        outputs = play(make_scheduler, "server", NativeEngine(template, player), rows)
        env_server.wait_until(lambda: env_server.sessions == 0)
    assert [output.rollout_infos["scored"] for output in outputs] == [True, False, True]
    assert outputs[1].rollout_infos["error"] == "RuntimeError: out of memory"
    assert (outputs[1].response_token_ids, outputs[1].response_loss_mask) == ([[4]], [[1]])
    assert [message["role"] for message in outputs[1].messages] == ["system", "user", "assistant"]


def test_a_batch_of_nothing_but_exceptions_is_one(template: Any, make_scheduler: Any) -> None:
    engine = NativeEngine(template, [RuntimeError("out of memory")])
    with MockEnvServer(seeded(empty=2)) as env_server:
        with pytest.raises(RolloutError, match=r"all 2 trajectories .* out of memory"):
            play(make_scheduler, "server", engine, [row(env_server.base_url, seed) for seed in range(2)])
        env_server.wait_until(lambda: env_server.sessions == 0)


@pytest.mark.parametrize("mode", MODES)
def test_training_stops_when_no_game_is_scored_any_more(mode: str, template: Any, make_scheduler: Any) -> None:
    with MockEnvServer(seeded(empty=2), faults=[Fault("error", on="reset", times=None)]) as env_server:
        engine = NativeEngine(template, ["R1"])
        requests = requests_of([row(env_server.base_url)] * 32)
        scheduler = make_scheduler(SudokuScheduler, engine if mode == "server" else None)
        run: Callable[..., Any] = server if mode == "server" else lambda s, r: colocate(s, r, engine)
        run(scheduler, requests)
        with pytest.raises(RolloutError, match="last 32 trajectories"):
            run(scheduler, requests_of([row(env_server.base_url)]))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("turn", [0, 1])
def test_a_batch_that_swift_drops_is_closed(
    error: type[BaseException], turn: int, template: Any, make_scheduler: Any
) -> None:
    """Colocate mode: the engine raises, in the first turn or later, and no hook is called any more."""
    with MockEnvServer(seeded(empty=4)) as env_server:
        scheduler = make_scheduler()
        requests = requests_of([row(env_server.base_url, seed) for seed in range(2)])
        engine = NativeEngine(template, lambda r, t: error() if t == turn else perfect(r, t))
        with pytest.raises(error):
            colocate(scheduler, requests, engine)
        assert env_server.sessions == 2
        del requests, engine
        gc.collect()
        env_server.wait_until(lambda: env_server.sessions == 0)


async def test_a_cancelled_batch_is_closed(template: Any, make_scheduler: Any) -> None:
    """Server mode."""
    sampling = asyncio.Event()

    class Stuck(NativeEngine):
        async def infer_async(self, request: Any, config: Any, **_: Any) -> Any:
            sampling.set()
            await asyncio.Event().wait()

    with MockEnvServer(seeded(empty=4)) as env_server:
        scheduler = make_scheduler(SudokuScheduler, Stuck(template, []))
        requests = requests_of([row(env_server.base_url, seed) for seed in range(2)])
        batch = asyncio.create_task(serve(scheduler, requests))
        await sampling.wait()
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        await asyncio.to_thread(env_server.wait_until, lambda: env_server.sessions == 0)


# -- servers and loops ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_full_server_is_waited_for(mode: str, template: Any, make_scheduler: Any) -> None:
    with MockEnvServer(seeded(empty=2), faults=[Fault("full", on="connect", times=3)]) as env_server:
        rows = [row(env_server.base_url, seed) for seed in range(2)]
        outputs = play(make_scheduler, mode, NativeEngine(template, perfect), rows)
    assert [output.rollout_infos["solved"] for output in outputs] == [True, True]


def test_more_games_than_sessions(template: Any, make_scheduler: Any) -> None:
    """Server mode plays each game at its own pace, so a later one takes the session of an earlier one."""
    with MockEnvServer(seeded(empty=2), capacity=2) as env_server:
        rows = [row(env_server.base_url, seed) for seed in range(6)]
        outputs = play(make_scheduler, "server", NativeEngine(template, perfect), rows)
        assert env_server.peak_sessions == 2
    assert all(output.rollout_infos["solved"] for output in outputs)


class Counting(Env):
    """Says numbers; remembers the event loops that it was called in."""

    loops: list[asyncio.AbstractEventLoop]
    open = 0

    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        self.loops = [asyncio.get_running_loop()]
        self.lock = asyncio.Lock()
        type(self).open += 1
        return "R1", {"loops": 1}, ""

    async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        async with self.lock:
            self.loops.append(asyncio.get_running_loop())
        return "R2", 1.0, len(self.loops) == 3, {"loops": len(set(self.loops))}

    async def close(self) -> None:
        self.loops.append(asyncio.get_running_loop())
        assert len(set(self.loops)) == 1
        type(self).open -= 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rows", "gym_env"), [([{}], "counting"), ([{"env_config": {"name": "counting"}}], None)])
def test_an_environment_lives_in_one_event_loop(
    mode: str, rows: list[dict[str, Any]], gym_env: str | None, template: Any, make_scheduler: Any
) -> None:
    """ms-swift calls the first hook in another loop than the later ones; an environment never sees that."""
    register("counting", Counting)
    assert swift_envs["counting"] is Counting
    engine = NativeEngine(template, ["R3", "R4"])
    arguments: dict[str, Any] = {"options": {}} | ({"gym_env": gym_env} if gym_env else {})
    [output] = play(make_scheduler, mode, engine, rows, GYMScheduler, **arguments)
    assert (output.rollout_infos["loops"], output.rollout_infos["total_reward"]) == (1, 2.0)
    assert Counting.open == 0


async def test_a_blocking_environment_does_not_block_the_rollout_server(template: Any, make_scheduler: Any) -> None:
    entered, released = threading.Event(), threading.Event()

    class Blocking(Counting):
        async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
            entered.set()
            return "R2", 1.0, released.wait(timeout=30), {}

    register("blocking", Blocking)
    scheduler = make_scheduler(GYMScheduler, NativeEngine(template, ["R3", "R3"]), options={}, gym_env="blocking")
    batch = asyncio.create_task(serve(scheduler, requests_of([{}])))
    assert await asyncio.to_thread(entered.wait, 30)
    released.set()  # by this loop, which would hang with it
    [output] = await batch
    assert output.rollout_infos["num_turns"] == 1


def test_requests_may_come_as_the_trainer_sends_them(template: Any, make_scheduler: Any) -> None:
    """Server mode: as dictionaries, and without a uuid where somebody else sends them."""
    with MockEnvServer(seeded(empty=2)) as env_server:
        requests = [asdict(replace(r, uuid=None)) for r in requests_of([row(env_server.base_url)] * 2)]
        outputs = server(make_scheduler(SudokuScheduler, NativeEngine(template, perfect)), requests)
    assert [output.rollout_infos["solved"] for output in outputs] == [True, True]


@pytest.mark.parametrize("mode", MODES)
def test_two_trajectories_of_one_name_are_refused(mode: str, template: Any, make_scheduler: Any) -> None:
    with MockEnvServer(seeded(empty=2)) as env_server:
        request = requests_of([row(env_server.base_url)])[0]
        engine = NativeEngine(template, perfect)
        scheduler = make_scheduler(SudokuScheduler, engine if mode == "server" else None)
        batch = [request, replace(request)]
        with pytest.raises(ValueError, match="two trajectories with the uuid"):
            server(scheduler, batch) if mode == "server" else colocate(scheduler, batch, engine)
        del request, batch
        gc.collect()
        env_server.wait_until(lambda: env_server.sessions == 0)


def test_a_hook_for_a_request_that_was_not_started_says_so(make_scheduler: Any) -> None:
    with pytest.raises(KeyError, match="on_trajectory_start was not called"):
        invoke_async_hook(make_scheduler().on_turn_end(requests_of([{}])[0], None, 1))


# -- registering ------------------------------------------------------------------------------------


def test_a_scheduler_becomes_a_class_of_swift_with_its_options(template: Any) -> None:
    register("hard_sudoku", SudokuScheduler, options={"difficulty": "hard"})
    scheduler = multi_turns["hard_sudoku"](max_turns=3, tokenizer=template.tokenizer, template=template)
    assert isinstance(scheduler, SwiftMultiTurnScheduler)
    assert (scheduler.scheduler.difficulty, scheduler.scheduler.max_turns, scheduler.max_turns) == ("hard", 3, 3)
    assert scheduler.scheduler.tokenizer is template.tokenizer
    scheduler.close()


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (SudokuScheduler(), "takes the class of a scheduler or of an environment"),
        (OpenEnvWrapper, "takes the class of a scheduler or of an environment"),
        (ThinkingModelTipsScheduler, "overrides outputs_of"),
    ],
)
def test_what_cannot_be_registered_is_refused(thing: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        register("anything", thing)


def test_gym_env_is_refused_by_schedulers_whose_environments_have_no_names(make_scheduler: Any) -> None:
    with pytest.raises(ValueError, match="--gym_env frozen_lake means nothing to SudokuScheduler"):
        make_scheduler(gym_env="frozen_lake")
