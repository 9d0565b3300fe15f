"""Batch by batch, every trajectory is the one that async_infer plays."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from examples.sudoku.board import random_puzzle
from examples.sudoku.scheduler import SudokuScheduler
from openenv_client.testing import Fault, MockEnvServer
from schedulers import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    Env,
    GYMScheduler,
    MathTipsScheduler,
    Messages,
    MultiTurnScheduler,
    OpenEnvScheduler,
    RequestConfig,
    RolloutError,
    RolloutInferRequest,
    RolloutOutput,
    RolloutScheduler,
    StopReason,
    ThinkingModelTipsScheduler,
    envs,
    rollout_fn_of,
    run_multi_turn,
    start_multi_turn,
)
from schedulers.engines import ScriptedEngine
from tests.examples.sudoku.games import right_moves, seeded, wrong_move
from tests.schedulers.chat_tokenizer import ChatTokenizer, chatml

GREEDY = RequestConfig(max_tokens=40)
_PUZZLES = [random_puzzle(random.Random(seed), empty=4) for seed in range(8)]


class Talk(MultiTurnScheduler):
    """Says what the row tells it to, turn by turn, and lets the row make trouble."""

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        for request in requests:
            self._trouble(request, "start", 0)

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        self._trouble(infer_request, "turn_end", current_turn)
        done = {"done": True} if response_choice.message.content == "bye" else {}
        return {"rollout_infos": {"said": response_choice.message.content, f"turn {current_turn}": True}, **done}

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        self._trouble(infer_request, "step", current_turn)
        infer_request.messages.append({"role": "user", "content": f"turn {current_turn + 1}"})
        return {"infer_request": infer_request, "rollout_infos": {"stepped": current_turn}}

    async def on_trajectory_end(self, episode: Any) -> None:
        self._trouble(episode.request, "end", 0)

    def _trouble(self, request: RolloutInferRequest, place: str, turn: int) -> None:
        if request.data_dict.get("raises") in (place, f"{place} {turn}"):
            raise LookupError(f"trouble in {place}")


class Masked(Talk):
    """Goes on in the same message after words of its own, and gives ids, mask and log-probs for them."""

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        assert self.tokenizer is not None
        ids = list(response_choice.token_ids or [])[:-1]
        more = self.tokenizer.encode(" and", add_special_tokens=False)
        infer_request.messages[-1]["content"] += " and"
        return {
            "infer_request": infer_request,
            "response_token_ids": ids + more,
            "response_loss_mask": [1] * len(ids) + [0] * len(more),
            "rollout_logprobs": [-0.5] * len(ids),
        }


class Countdown(Env):
    """Over after so many steps; pays for every one."""

    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        # Bound to the event loop of the reset, as the client of a database would be.
        self.lock = asyncio.Lock()
        await self.lock.acquire()
        self.left = int(self.env_config["steps"])
        return f"{self.left} left", {"steps": self.left}, "Count down."

    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        waiter = asyncio.ensure_future(self.lock.acquire())
        await asyncio.sleep(0)
        self.lock.release()
        await waiter
        if self.env_config.get("raises") == self.left:
            raise LookupError("no step today")
        self.left -= 1
        return f"{self.left} left", 0.5, self.left == 0, {"left": self.left}

    async def close(self) -> None:
        closed.append(self)


closed: list[Countdown] = []


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    closed.clear()
    monkeypatch.setitem(envs, "countdown", Countdown)


@pytest.fixture
def server() -> Iterator[MockEnvServer]:
    with MockEnvServer(seeded(4)) as mock:
        yield mock
        mock.wait_until(lambda: mock.sessions == 0)


def sudoku_answers(seed: int) -> list[str]:
    """Perfect, losing, and talkative players."""
    puzzle, solution = _PUZZLES[seed]
    right, wrong = [str(move) for move in right_moves(puzzle, solution)], str(wrong_move(puzzle, solution))
    return {0: right, 1: [wrong, wrong], 2: [right[0], wrong, *right[1:]], 3: ["hm", right[0], "hm", "hm"]}[seed % 4]


def sudoku_rows(server: MockEnvServer) -> list[dict[str, Any]]:
    config = {"name": "openenv", "base_url": server.base_url}
    return [
        {"answers": sudoku_answers(seed), "env_config": {**config, "reset_kwargs": {"seed": seed}}} for seed in range(8)
    ]


def said(*rows: list[str], **extra: Any) -> list[dict[str, Any]]:
    return [{"answers": list(row), "messages": [{"role": "user", "content": "turn 1"}], **extra} for row in rows]


def accuracy(answers: Sequence[str], solutions: Sequence[str]) -> list[float]:
    return [float(answer.endswith(solution)) for answer, solution in zip(answers, solutions, strict=True)]


Case = tuple[Callable[..., RolloutScheduler], list[dict[str, Any]]]

CASES: dict[str, Case] = {
    "single turn": (RolloutScheduler, said(["a"], ["b"], ["long answer " * 9])),
    "several turns": (Talk, said(["a", "b", "bye"], ["bye"], ["a", "long answer " * 9], ["a"] * 9)),
    "same message": (Masked, said(["a", "b", "bye"], ["bye"], ["a"] * 5)),
    "failures": (
        Talk,
        [
            *said(["a", "bye"]),
            *said(["a"], raises="start"),
            *said(["a"] * 3, raises="turn_end 2"),
            *said(["a"] * 3, raises="step 1"),
            *said(["bye"], raises="end"),
            *said(["a"]),  # the script has no second answer
        ],
    ),
    "maths tips": (
        lambda engine, max_turns, **o: MathTipsScheduler(engine, max_turns, acc_function=accuracy, **o),
        said(["It is <answer>8", "so 7"], ["It is 7"], ["8", "9"], solution="7"),
    ),
    "thinking tips": (
        lambda engine, max_turns, **o: ThinkingModelTipsScheduler(engine, max_turns, acc_function=accuracy, **o),
        said(["<think>hm</think>8", "<think>oh</think>7"], ["7"], ["8", "9"], solution="7"),
    ),
    "environment in this process": (
        GYMScheduler,
        [
            {"answers": ["a"] * 9, "env_config": {"name": "countdown", "steps": steps, "raises": fails}}
            for steps, fails in ((1, None), (3, None), (9, None), (3, 2))
        ],
    ),
    "environment server": (SudokuScheduler, []),
    "plain environment server": (OpenEnvScheduler, []),
}


def answer(request: RolloutInferRequest, turn: int) -> str:
    more = str(request.messages[-1]["content"]).count(" and") if turn else 0  # turns in the same message
    return str(request.data_dict["answers"][more or turn])


def comparable(outputs: list[RolloutOutput]) -> list[dict[str, Any]]:
    """Everything but times, names of trajectories, and tracebacks."""
    plain = []
    for output in outputs:
        infos = {key: value for key, value in output.rollout_infos.items() if not key.endswith("_seconds")}
        infos["error"] = infos["error"] and infos["error"].replace(output.uuid, "uuid")
        known = asdict(replace(output, turns=[replace(turn, seconds=None) for turn in output.turns]))
        plain.append({**known, "rollout_infos": infos, "uuid": None, "exception": type(output.exception)})
    return plain


def requests_of(rows: list[dict[str, Any]]) -> list[RolloutInferRequest]:
    return [RolloutInferRequest.from_row(row) for row in rows]


@pytest.mark.parametrize("tokenizer", [None, ChatTokenizer(chatml)], ids=["text", "tokens"])
@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("name", CASES)
def test_both_modes_play_the_same(name: str, limit: int | None, tokenizer: Any, server: MockEnvServer) -> None:
    """L09: messages, ids, masks, log-probs, infos and stop reasons, for every scheduler and script, in order."""
    make, rows = CASES[name]
    if tokenizer is None and name == "same message":
        return  # it is about ids
    rows = rows or sudoku_rows(server)
    engine = ScriptedEngine(answer, tokenizer)

    free = asyncio.run(make(engine, limit).async_infer(requests_of(rows), GREEDY))
    lockstep = run_multi_turn(requests_of(rows), None, make(engine, limit), rollout_fn_of(engine), GREEDY)
    scheduler = make(engine, None)
    requests = requests_of(rows)
    start_multi_turn(requests, scheduler, GREEDY)
    first = rollout_fn_of(engine)(requests, GREEDY)
    if name != "environment in this process":  # this one cannot change its event loop
        by_hand = run_multi_turn(requests, first, scheduler, rollout_fn_of(engine), GREEDY, max_turns=limit)
        assert comparable(by_hand) == comparable(free)
    else:
        asyncio.run(scheduler.aclose())

    assert comparable(lockstep) == comparable(free)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_stay_together_until_the_last_is_done(ranks: int) -> None:
    """Each takes part in every gather and every rollout, also when it has nothing to do or never had."""
    rows = [said(["a", "bye"], ["bye"]), [], said(["a", "a", "a", "bye"], ["a", "bye"])][:ranks]
    barrier = threading.Barrier(ranks)
    flags: list[list[bool]] = [[] for _ in range(ranks)]
    asked: list[list[int]] = [[] for _ in range(ranks)]
    outputs: list[list[RolloutOutput]] = [[] for _ in range(ranks)]

    def play(rank: int) -> None:
        engine = ScriptedEngine(answer, ChatTokenizer(chatml))

        def gather(values: list[bool]) -> list[bool]:
            flags[rank] = values
            barrier.wait()
            everyone = [value for each in flags for value in each]
            barrier.wait()
            return everyone

        def rollout(requests: list[RolloutInferRequest], config: RequestConfig) -> Sequence[Any]:
            asked[rank].append(len(requests))
            barrier.wait()  # a collective call
            return rollout_fn_of(engine)(requests, config)

        outputs[rank] = run_multi_turn(requests_of(rows[rank]), None, Talk(engine), rollout, GREEDY, gather_fn=gather)

    threads = [threading.Thread(target=play, args=[rank]) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    turns = 4 if ranks == 3 else 2
    assert [len(each) for each in asked] == [turns] * ranks
    assert asked[0] == [2, 1, 0, 0][:turns]
    for mine, got in zip(rows, outputs, strict=True):
        assert [output.rollout_infos["num_turns"] for output in got] == [len(row["answers"]) for row in mine]


def test_ranks_that_share_a_small_server_do_not_wait_for_each_other() -> None:
    """S01: the games of one wait for the sessions of the other, whose turns must go on meanwhile."""
    ranks = 2
    barrier = threading.Barrier(ranks)
    flags: list[list[bool]] = [[] for _ in range(ranks)]
    outputs: list[list[RolloutOutput]] = [[] for _ in range(ranks)]

    with MockEnvServer(seeded(4), capacity=2) as server:
        rows = sudoku_rows(server)[:2]

        def play(rank: int) -> None:
            def gather(values: list[bool]) -> list[bool]:
                flags[rank] = values
                barrier.wait()
                everyone = [value for each in flags for value in each]
                barrier.wait()
                return everyone

            if rank == 1:
                server.wait_until(lambda: server.sessions == 2)  # the other has them all
            engine = ScriptedEngine(answer)
            scheduler = SudokuScheduler(engine)
            outputs[rank] = run_multi_turn(
                requests_of(rows), None, scheduler, rollout_fn_of(engine), GREEDY, gather_fn=gather
            )

        threads = [threading.Thread(target=play, args=[rank]) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.wait_until(lambda: server.sessions == 0)
    assert [output.error for each in outputs for output in each] == [None] * 4


def test_the_rooms_of_a_batch_differ() -> None:
    """One has less room left than the configuration allows; the others are not cut with it."""
    engine = ScriptedEngine(answer, ChatTokenizer(chatml), max_model_len=75)
    rows = [*said(["x" * 30]), {"answers": ["y" * 30], "messages": [{"role": "user", "content": "long " * 6}]}]
    free = asyncio.run(RolloutScheduler(engine).async_infer(requests_of(rows), GREEDY))
    lockstep = run_multi_turn(requests_of(rows), None, RolloutScheduler(engine), rollout_fn_of(engine), GREEDY)
    assert comparable(lockstep) == comparable(free)
    assert [output.stop_reason for output in lockstep] == [StopReason.FINISHED, StopReason.LENGTH]


@pytest.mark.parametrize("limit", [1, 16])
def test_a_small_server_is_waited_for_and_nobody_with_it(limit: int) -> None:
    """S01, A12: eight games on two sessions, some of which are lost and rebuilt."""
    with MockEnvServer(seeded(4), capacity=2, faults=[Fault("drop_after", "step", nth=3, times=2)]) as server:
        engine = ScriptedEngine(answer)
        scheduler = SudokuScheduler(engine, max_concurrent_envs=limit, env_settings={"max_recoveries": 9})
        outputs = run_multi_turn(requests_of(sudoku_rows(server)), None, scheduler, rollout_fn_of(engine), GREEDY)
        free = asyncio.run(SudokuScheduler(engine).async_infer(requests_of(sudoku_rows(server)), GREEDY))
        assert [output.total_reward for output in outputs] == [output.total_reward for output in free]
        assert server.peak_sessions == 2
        server.wait_until(lambda: server.sessions == 0)


def test_answers_may_come_as_outputs() -> None:
    """As the engines of ms-swift give them."""

    def rollout(requests: list[RolloutInferRequest], config: RequestConfig) -> list[RolloutOutput]:
        choice = ChatCompletionResponseChoice(ChatMessage("bye"))
        return [RolloutOutput(ChatCompletionResponse(choices=[choice]), []) for _ in requests]

    [output] = run_multi_turn(requests_of(said(["bye"])), None, Talk(), rollout, GREEDY)
    assert output.stop_reason is StopReason.FINISHED


def test_sessions_are_closed_when_the_engine_fails(server: MockEnvServer) -> None:
    """S03: an exception of the whole batch is the caller's, and leaves nothing open."""

    def broken(requests: list[RolloutInferRequest], config: RequestConfig) -> Sequence[Any]:
        raise MemoryError("no room on the device")

    scheduler = SudokuScheduler(ScriptedEngine(answer))
    with pytest.raises(MemoryError):
        run_multi_turn(requests_of(sudoku_rows(server)[:3]), None, scheduler, broken, GREEDY)
    server.wait_until(lambda: server.sessions == 0)


def test_lost_sessions_are_unscored(server: MockEnvServer) -> None:
    """A09: the others play on."""
    server.inject(Fault("drop", "step", nth=4, times=1))
    engine = ScriptedEngine(answer)
    scheduler = SudokuScheduler(engine, env_settings={"recover": "never"})
    outputs = run_multi_turn(requests_of(sudoku_rows(server)[:3]), None, scheduler, rollout_fn_of(engine), GREEDY)
    assert sorted(output.total_reward is None for output in outputs) == [False, False, True]
    server.wait_until(lambda: server.sessions == 0)


def test_all_failed_is_an_error() -> None:
    with pytest.raises(RolloutError, match="all 2 trajectories"):
        run_multi_turn(
            requests_of(said(["a"], ["a"], raises="start")), None, Talk(), rollout_fn_of(ScriptedEngine([])), GREEDY
        )


def test_a_hook_that_fails_at_the_end_leaves_no_other_open() -> None:
    rows = [{"answers": ["a"] * 9, "env_config": {"name": "countdown", "steps": 3}} for _ in range(3)]
    engine = ScriptedEngine(answer)

    class Careless(GYMScheduler):
        async def on_trajectory_end(self, episode: Any) -> None:
            raise LookupError("no end")

    with pytest.raises(RolloutError, match="LookupError: no end"):
        run_multi_turn(requests_of(rows), None, Careless(engine), rollout_fn_of(engine), GREEDY)
    assert len(closed) == 3


def test_a_wrong_number_of_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="1 answers came for 2 requests"):
        run_multi_turn(requests_of(said(["a"], ["b"])), None, Talk(), lambda requests, config: [LookupError()], GREEDY)


def test_a_scheduler_with_a_loop_of_its_own_is_refused() -> None:
    """L09: it would be ignored in silence otherwise."""

    class Own(MultiTurnScheduler):
        async def run(self, infer_request: RolloutInferRequest, request_config: RequestConfig) -> RolloutOutput:
            return RolloutOutput(None, [])

    with pytest.raises(TypeError, match=r"Own overrides run\(\).*call async_infer"):
        run_multi_turn([], None, Own(), rollout_fn_of(ScriptedEngine([])), GREEDY)


async def test_a_running_event_loop_is_not_blocked() -> None:
    with pytest.raises(RuntimeError, match=r"await scheduler\.async_infer"):
        run_multi_turn([], None, Talk(), rollout_fn_of(ScriptedEngine([])), GREEDY)


def test_first_answers_need_a_start() -> None:
    with pytest.raises(KeyError, match="no trajectory with uuid"):
        run_multi_turn(requests_of(said(["a"])), [LookupError()], Talk(), rollout_fn_of(ScriptedEngine([])), GREEDY)


def test_what_was_only_started_is_ended_by_closing(server: MockEnvServer) -> None:
    scheduler = SudokuScheduler(ScriptedEngine([]))
    start_multi_turn(requests_of(sudoku_rows(server)[:2]), scheduler, GREEDY)
    assert server.sessions == 2
    asyncio.run(scheduler.aclose())
    server.wait_until(lambda: server.sessions == 0)


def test_an_interrupt_closes_what_is_open(server: MockEnvServer) -> None:
    """Ctrl-C while the engine works."""

    def interrupted(requests: list[RolloutInferRequest], config: RequestConfig) -> Sequence[Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_multi_turn(
            requests_of(sudoku_rows(server)[:3]), None, SudokuScheduler(ScriptedEngine([])), interrupted, GREEDY
        )
    server.wait_until(lambda: server.sessions == 0)
