"""Recorded games under changed reward code."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.frozen_lake.env import FrozenLakeEnv
from examples.sudoku.board import Board
from examples.sudoku.scheduler import SudokuGame, SudokuScheduler
from openenv_client.testing import Fault, MockEnvServer, reply
from schedulers import (
    GYMScheduler,
    MathTipsScheduler,
    OpenEnvScheduler,
    RolloutInferRequest,
    RolloutScheduler,
    StopReason,
    ThinkingModelTipsScheduler,
    envs,
)
from schedulers.engines import ScriptedEngine
from schedulers.recording import TrajectoryWriter, read_trajectories
from schedulers.rescoring import RescoreError, rescore
from tests.examples.sudoku.games import seeded
from tests.schedulers.chat_tokenizer import ChatTokenizer


def recorded(
    path: Path, make: Callable[..., RolloutScheduler], script: Any, rows: list[dict[str, Any]], tokenizer: Any = None
) -> list[dict[str, Any]]:
    """Play, write, and read again."""

    async def play() -> Any:
        async with make(ScriptedEngine(script, tokenizer)) as scheduler:
            return await scheduler.async_infer(rows)

    with TrajectoryWriter(path / "t.jsonl") as writer:
        for row, output in zip(rows, asyncio.run(play()), strict=True):
            writer.write([output], row=row)
    return list(read_trajectories(path / "t.jsonl"))


def careless(request: RolloutInferRequest, turn: int) -> str:
    """Sometimes right, sometimes wrong, repeated, out of range, or without a move."""
    rng = random.Random(f"{request.data_dict['env_config']['reset_kwargs']['seed']} {turn}")
    board = SudokuGame({"prompt": request.messages[-1]["content"]}).board
    cell = rng.choice(board.empty_cells)
    number = rng.choice([*board.candidates(cell), 5])
    return rng.choice([f"[{cell.row} {cell.col} {number}]"] * 6 + ["[1 1 1]", "[0 1 1]", "hmm"])


@pytest.fixture(scope="module")
def sudokus(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Forty careless games."""
    with MockEnvServer(seeded(6)) as server:
        rows = [{"env_config": {"reset_kwargs": {"seed": seed}}} for seed in range(40)]
        make = lambda engine: SudokuScheduler(engine, base_url=server.base_url)  # noqa: E731
        return recorded(tmp_path_factory.mktemp("sudokus"), make, careless, rows, ChatTokenizer())


def test_unchanged_code_reproduces_every_record(sudokus: list[dict[str, Any]]) -> None:
    """Rewards, infos, turns: the whole record is the same, to the last bit."""
    assert len({record["rollout_infos"]["stop_reason"] for record in sudokus}) > 1
    assert len({record["rollout_infos"]["total_reward"] for record in sudokus}) > 10
    for record in sudokus:
        assert rescore(record, SudokuScheduler) == record


def test_other_weights_change_the_total_and_nothing_else(sudokus: list[dict[str, Any]]) -> None:
    for record in sudokus:
        before = record["rollout_infos"]
        after = rescore(record, lambda e: SudokuScheduler(e, reward_weights={"progress_reward": 3.0}))["rollout_infos"]
        assert after["rewards"] == before["rewards"]
        assert after["total_reward"] == pytest.approx(before["total_reward"] + 2 * before["rewards"]["progress_reward"])
        assert sum(after["step_rewards"]) == pytest.approx(after["total_reward"])
        assert {k: v for k, v in after.items() if k not in {"total_reward", "step_rewards"}} == {
            k: v for k, v in before.items() if k not in {"total_reward", "step_rewards"}
        }


def test_code_of_the_documentation_runs(sudokus: list[dict[str, Any]]) -> None:
    """docs/reference/recording.md."""
    text = (Path(__file__).parents[2] / "docs/reference/recording.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[1]
    known: dict[str, Any] = {"record": sudokus[0], "MyScheduler": SudokuScheduler}
    exec(code, known)  # noqa: S102
    assert known["better"]["rollout_infos"]["rewards"] == sudokus[0]["rollout_infos"]["rewards"]


class Haste(SudokuGame):
    """Changed reward code: two components, and an info more."""

    reward_names = ("solved_reward", "haste_reward")

    def rewards(self) -> dict[str, float]:
        return {"solved_reward": float(self.board.is_solved), "haste_reward": -0.1 * len(self.verdicts)}

    def infos(self) -> dict[str, Any]:
        return {**super().infos(), "answers": len(self.verdicts)}


class HasteScheduler(SudokuScheduler):
    game_class = Haste

    def new_game(self, observation: dict[str, Any]) -> Haste:
        return Haste(observation)


def test_changed_reward_code_is_applied(sudokus: list[dict[str, Any]]) -> None:
    for record in sudokus:
        infos = rescore(record, HasteScheduler)["rollout_infos"]
        turns = record["rollout_infos"]["num_turns"]
        assert infos["rewards"] == {
            "solved_reward": float(record["rollout_infos"]["solved"]),
            "haste_reward": pytest.approx(-0.1 * turns),
        }
        assert infos["answers"] == turns
        assert infos["total_reward"] == pytest.approx(sum(infos["rewards"].values()))


def test_extra_rewards_see_the_recorded_ids(sudokus: list[dict[str, Any]]) -> None:
    def tokens(episode: Any) -> float:
        return float(sum(len(turn.token_ids) for turn in episode.turns))

    for record in sudokus:
        infos = rescore(record, lambda e: SudokuScheduler(e, extra_rewards={"tokens": tokens}))["rollout_infos"]
        assert infos["rewards"]["tokens"] == sum(map(len, record["response_token_ids"]))


class OtherMoves(SudokuScheduler):
    """Changed code that plays otherwise."""

    def parse_action(self, text: str) -> dict[str, Any] | None:
        return {"message": "[9 9 9]"}


class NoMoves(SudokuScheduler):
    def parse_action(self, text: str) -> dict[str, Any] | None:
        return None


class Impatient(SudokuScheduler):
    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        return current_turn == 2


class Broken(SudokuScheduler):
    def new_game(self, observation: dict[str, Any]) -> SudokuGame:
        raise LookupError("no such weight")


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (OtherMoves, r"in turn 1 the scheduler now plays {'message': '\[9 9 9\]'}; the recorded game had {'message': "),
        (NoMoves, "in turn 1 the scheduler now plays nothing; the recorded game had"),
        (Impatient, r"the scheduler now ends the game after turn 2 of \d"),
        (Broken, "the scheduler failed: LookupError.*no such weight"),
        (GYMScheduler, "it was played on a server, and GYMScheduler does not play on one"),
    ],
)
def test_code_that_plays_another_game_is_refused(
    sudokus: list[dict[str, Any]], scheduler: type[RolloutScheduler], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rewards would be of moves that nobody made."""
    record = next(r for r in sudokus if r["rollout_infos"]["num_turns"] > 3 and r["turns"][0]["exchange"]["action"])
    with caplog.at_level(logging.CRITICAL), pytest.raises(RescoreError, match=message):
        rescore(record, scheduler)


def test_unscored_games_stay_as_they_are(tmp_path: Path) -> None:
    with MockEnvServer(seeded(6), faults=[Fault("drop", "step", nth=2)]) as server:
        options: Any = {"base_url": server.base_url, "env_settings": {"recover": "never"}}
        rows = [{"env_config": {"reset_kwargs": {"seed": 1}}}]
        [record] = recorded(tmp_path, lambda e: SudokuScheduler(e, **options), careless, rows)
    assert record["rollout_infos"]["stop_reason"] == "env_lost"
    assert rescore(record, SudokuScheduler) == record


def test_record_of_version_1_cannot_be_rescored(sudokus: list[dict[str, Any]]) -> None:
    with pytest.raises(RescoreError, match="recorded by a version that did not keep the environment's answers"):
        rescore({**sudokus[0], "turns": None, "start": None}, SudokuScheduler)


def test_game_that_the_server_refused_parts_of_is_rescored(tmp_path: Path) -> None:
    """A move that the server refuses unseen is no move; so it is again."""

    def game(reset_kwargs: dict[str, Any]) -> Any:
        yield reply({"n": 0}, reward=0.0)
        yield reply({"n": 1}, reward=0.25, done=True)

    refusal = Fault("error", "step", "VALIDATION_ERROR", nth=1)
    with MockEnvServer(game, faults=[refusal]) as server:
        rows = [{"env_config": {"reset_kwargs": {"seed": 1}}}]
        [record] = recorded(tmp_path, lambda e: OpenEnvScheduler(e, base_url=server.base_url), ["a", "b"], rows)
    assert [turn["exchange"]["observation"] for turn in record["turns"]] == [None, {"n": 1}]
    assert record["turns"][0]["exchange"]["action"] == {"message": "a"}
    assert rescore(record, OpenEnvScheduler) == record


def test_game_that_the_engine_cut_is_rescored(tmp_path: Path, sudokus: list[dict[str, Any]]) -> None:
    """Why a completion ended is part of the record, since a cut one is read in another way."""
    record = json.loads(json.dumps(sudokus[0]))
    record["turns"][-1].update(text="I think [1 1", finish_reason="length", exchange={"action": None})
    record["rollout_infos"]["stop_reason"] = "length"
    assert rescore(record, SudokuScheduler)["rollout_infos"]["stop_reason"] == "length"


def test_environment_in_this_process_is_played_again(tmp_path: Path) -> None:
    """Its row says all that happens; a changed reward in it counts, a changed world does not."""
    rows = [{"env_config": {"name": "frozen_lake", "seed": seed}} for seed in range(8)]
    walk = ["<action>right</action>", "<action>down</action>"] * 4
    records = recorded(tmp_path, GYMScheduler, walk, rows)
    assert all(rescore(record, GYMScheduler) == record for record in records)
    envs["generous_lake"] = Generous
    envs["other_lake"] = Other
    try:
        record = records[0]
        generous = {**record, "row": {"env_config": {"name": "generous_lake", "seed": 0}}}
        turns = record["rollout_infos"]["num_turns"]
        assert rescore(generous, GYMScheduler)["rollout_infos"]["total_reward"] == pytest.approx(
            record["rollout_infos"]["total_reward"] + 0.5 * turns
        )
        other = {**record, "row": {"env_config": {"name": "other_lake", "seed": 0}}}
        with pytest.raises(RescoreError, match="showed something else this time"):
            rescore(other, GYMScheduler)
    finally:
        del envs["generous_lake"], envs["other_lake"]


class Generous(FrozenLakeEnv):
    async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        observation, reward, done, info = await super().step(action)
        return observation, reward + 0.5, done, info


class Other(FrozenLakeEnv):
    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        observation, info, system = await super().reset(config)
        return f"Look!\n{observation}", info, system


def test_game_that_ran_out_of_room_is_played_again(tmp_path: Path) -> None:
    """Its record ends with an observation that no turn has read."""
    rows = [{"env_config": {"name": "frozen_lake", "seed": 1}}]
    walk = ["<action>up</action>"] * 20
    make = lambda engine: GYMScheduler(engine, max_trajectory_tokens=400)  # noqa: E731
    [record] = recorded(tmp_path, make, walk, rows, ChatTokenizer())
    assert record["rollout_infos"]["stop_reason"] == "context"
    assert record["messages"][-1]["role"] == "user"
    assert rescore(record, make) == record


def test_server_game_needs_the_servers_answers(tmp_path: Path) -> None:
    rows = [{"env_config": {"name": "frozen_lake", "seed": 1}}]
    [record] = recorded(tmp_path, GYMScheduler, ["<action>up</action>"] * 20, rows)
    with pytest.raises(RescoreError, match="SudokuScheduler plays on a server, but the record has no answers of one"):
        rescore(record, SudokuScheduler)


def test_tips_are_graded_again(tmp_path: Path) -> None:
    """A scheduler without an environment: another grader, another reward."""
    rows = [{"messages": [{"role": "user", "content": "1 + 1?"}], "solution": "2"}]

    def grader(value: float) -> Callable[..., RolloutScheduler]:
        return lambda e: MathTipsScheduler(e, 2, acc_function=lambda answers, solutions: [value] * len(answers))

    [record] = recorded(tmp_path, grader(0.0), ["<answer>3</answer>", "<answer>2</answer>"], rows)
    assert record["rollout_infos"]["total_reward"] == 0.0
    assert rescore(record, grader(0.0)) == record


def test_scheduler_with_several_outputs_is_refused(sudokus: list[dict[str, Any]]) -> None:
    with pytest.raises(TypeError, match="makes several outputs of a trajectory, which cannot be rescored"):
        rescore(sudokus[0], lambda e: ThinkingModelTipsScheduler(e, acc_function=lambda *_: [1.0]))


def test_board_of_a_record_is_that_of_its_fingerprint(sudokus: list[dict[str, Any]]) -> None:
    for record in sudokus:
        board = Board.from_rows(record["start"]["observation"]["board"])
        assert record["rollout_infos"]["fingerprint"] == board.fingerprint


def test_stop_reasons_cover_more_than_wins(sudokus: list[dict[str, Any]]) -> None:
    """The games above are worth testing with."""
    reasons = {record["rollout_infos"]["stop_reason"] for record in sudokus}
    assert {str(StopReason.ENV_DONE), str(StopReason.PARSE_ERROR)} <= reasons
