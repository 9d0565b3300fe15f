"""Sudoku as the model meets it, and what its moves are worth."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from examples.sudoku.board import Board, Move, random_puzzle, solve
from examples.sudoku.hints import DIFFICULTIES
from examples.sudoku.policies import perfect
from examples.sudoku.prompts import FORMAT_REMINDER, SYSTEM_PROMPT
from examples.sudoku.rewards import REWARD_NAMES
from examples.sudoku.scheduler import SudokuGame, SudokuScheduler, read_board
from openenv_client import StepResult
from openenv_client.testing import MockEnvServer, reply
from schedulers import EnvError, RolloutOutput, StopReason, multi_turns
from schedulers.engines import ScriptedEngine
from tests.examples.sudoku.games import frame, right_moves, seeded, sudoku, wrong_move

_TRANSCRIPTS = Path(__file__).parents[2] / "data" / "transcripts"

PUZZLE, SOLUTION = random_puzzle(random.Random(3), empty=6)
RIGHT = right_moves(PUZZLE, SOLUTION)
WRONG = wrong_move(PUZZLE, SOLUTION)


def transcript(name: str) -> list[dict[str, Any]]:
    lines = (_TRANSCRIPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [recorded for recorded in map(json.loads, lines) if recorded["send"]["type"] != "state"]


async def play(answers: Any, script: Any = None, max_turns: int | None = None, **options: Any) -> RolloutOutput:
    """One game of the puzzle above, and no session left."""
    with MockEnvServer(script or sudoku(PUZZLE, SOLUTION)) as server:
        engine = ScriptedEngine([str(a) for a in answers] if isinstance(answers, list) else answers)
        async with SudokuScheduler(engine, max_turns, base_url=server.base_url, **options) as scheduler:
            [output] = await scheduler.async_infer([{}])
        server.wait_until(lambda: server.sessions == 0)
        return output


def rewards(output: RolloutOutput) -> tuple[float, ...]:
    assert tuple(output.rollout_infos["rewards"]) == REWARD_NAMES
    return tuple(output.rollout_infos["rewards"].values())


def reads(output: RolloutOutput) -> list[str]:
    """What the model was told, turn by turn."""
    return [message["content"] for message in output.messages if message["role"] == "user"]


# -- games ------------------------------------------------------------------------------------------


async def test_perfect_game() -> None:
    output = await play(RIGHT)
    assert output.stop_reason is StopReason.ENV_DONE
    assert rewards(output) == (1.0, 1.0, 0.0, 1.0, 1.0)
    assert output.total_reward == pytest.approx(4.0)
    assert output.rollout_infos["solved"] is True
    assert output.rollout_infos["accepted_moves"] == 6
    assert output.rollout_infos["fingerprint"] == PUZZLE.fingerprint
    assert output.messages[0] == {"role": "system", "content": SYSTEM_PROMPT}
    assert reads(output)[0].startswith(PUZZLE.render())


async def test_two_wrong_moves_lose() -> None:
    """The environment warns of the first; the second, which loses, it does not even call invalid, and is worth 0."""
    output = await play([WRONG, wrong_move(PUZZLE, SOLUTION, 1)])
    assert output.stop_reason is StopReason.ENV_DONE
    assert rewards(output) == (1.0, -0.25, 0.0, 0.0, 0.0)
    assert output.rollout_infos["step_rewards"] == [0.5, 0.25]
    assert output.rollout_infos["solved"] is False


async def test_same_wrong_move_twice_loses_and_is_a_repetition() -> None:
    output = await play([WRONG, WRONG])
    assert rewards(output) == (1.0, -0.25, -1.0, 0.0, 0.0)
    assert output.total_reward == pytest.approx(-0.25)


async def test_partial_credit_is_no_win() -> None:
    """P05: the environment pays 1/6 for the right move at the end of the lost game; that is information."""
    output = await play([RIGHT[0], wrong_move(PUZZLE, SOLUTION, 1), wrong_move(PUZZLE, SOLUTION, 2)])
    assert output.rollout_infos["gym_done"] is True
    assert output.rollout_infos["environment_reward"] == pytest.approx(1 / 6)
    assert rewards(output) == pytest.approx((1.0, (1.0 - 0.5 + 0.0) / 3, 0.0, 1 / 6, 0.0))


async def test_filled_cell_is_no_empty_cell() -> None:
    own = RIGHT[0]
    output = await play([own, own, RIGHT[1]], max_turns=3)
    assert rewards(output) == pytest.approx(((1 - 1 + 1) / 3, (1 - 0.5 + 1) / 3, -2 / 3, 2 / 6, 0.0))
    assert reads(output)[2].startswith(f"{own} refused: the cell is filled.\n")


async def test_bad_and_good_moves_in_turn_never_lose() -> None:
    """P11: any right move clears the warning; the penalty for playing the same wrong one doubles up to ten."""
    puzzle, solution = random_puzzle(random.Random(1), empty=21)
    right, wrong = right_moves(puzzle, solution), wrong_move(puzzle, solution, 20)
    answers = [move for pair in zip([wrong] * 20, right[:20], strict=True) for move in pair] + [right[20]]
    output = await play(answers, sudoku(puzzle, solution), max_turns=41)
    assert output.rollout_infos["solved"] is True
    penalties = [0, 2, 4, 8] + [10] * 16
    assert rewards(output) == pytest.approx((1.0, (21 - 0.5 * 20) / 41, -sum(penalties) / 41, 1.0, 1.0))


async def test_refused_number_is_told_listed_and_no_longer_proposed() -> None:
    output = await play([WRONG, *RIGHT])
    before, after, right = reads(output)[:3]
    assert "MOVES ALREADY TRIED" not in before
    assert str(RIGHT[0]) in before.partition("GUARANTEED MOVES:\n")[2]
    assert after.startswith(f"{WRONG} refused: not part of the solution.\n{PUZZLE.render()}\n\nMOVES ALREADY TRIED:\n")
    assert f"{WRONG} refused\n" in after
    assert str(WRONG) not in after.partition("GUARANTEED MOVES:")[2]
    assert right.startswith(PUZZLE.place(RIGHT[0]).render())
    assert f"{RIGHT[0]} accepted\n" in right


async def test_hints_are_answers_that_can_be_copied() -> None:
    """P04: a player that copies the first guaranteed move solves the puzzle."""
    copy = "GUARANTEED MOVES:\n"
    output = await play(lambda request, turn: request.messages[-1]["content"].partition(copy)[2].split("\n")[0])
    assert output.rollout_infos["solved"] is True


@pytest.mark.parametrize(
    ("difficulty", "sections"),
    [
        ("easy", {"MOVES ALREADY TRIED:", "GUARANTEED MOVES:", "Other options:"}),
        ("medium", {"Other options:"}),
        ("hard", set()),
    ],
)
async def test_difficulty_is_how_much_is_told(difficulty: Any, sections: set[str]) -> None:
    puzzle, solution = random_puzzle(random.Random(1), empty=41)
    moves = [wrong_move(puzzle, solution), *right_moves(puzzle, solution)[:1]]
    output = await play(moves, sudoku(puzzle, solution), max_turns=2, difficulty=difficulty)
    shown = {line for text in reads(output) for line in text.splitlines() if line.endswith(":")}
    assert shown == sections
    assert " refused: " in reads(output)[1]


def test_unknown_difficulty_is_refused() -> None:
    with pytest.raises(ValueError, match="difficulty must be one of easy, medium, hard, not 'nightmare'"):
        SudokuScheduler(difficulty="nightmare")  # type: ignore[arg-type]


# -- answers without a move -------------------------------------------------------------------------


async def test_answer_without_a_move_is_told_the_format_once_more() -> None:
    """The environment is not stepped, so no warning of its own is spent on it."""
    output = await play(["hmm", WRONG, *RIGHT])
    assert output.rollout_infos["solved"] is True
    assert reads(output)[1].startswith(f"{FORMAT_REMINDER}\n{PUZZLE.render()}")
    assert rewards(output) == pytest.approx(((-1 + 7) / 8, (0 - 0.5 + 6) / 8, 0.0, 1.0, 1.0))


@pytest.mark.parametrize("answer", ["", "   \n", "no move", "<think>[1 2 3]", "[537]"])
async def test_two_in_a_row_end_the_game(answer: str) -> None:
    """P09, L01: the good turn before them counts, both are turns of their own, and the session is closed."""
    output = await play([RIGHT[0], answer, answer])
    assert output.stop_reason is StopReason.PARSE_ERROR
    assert output.rollout_infos["num_turns"] == 3
    assert output.rollout_infos["accepted_moves"] == 1
    assert rewards(output) == pytest.approx((-1 / 3, 1 / 3, 0.0, 1 / 6, 0.0))
    assert len(output.rollout_infos["step_rewards"]) == 3


async def test_move_between_them_starts_the_count_anew() -> None:
    output = await play(["hmm", RIGHT[0], "hmm", RIGHT[1], "hmm", "hmm"])
    assert output.stop_reason is StopReason.PARSE_ERROR
    assert output.rollout_infos["num_turns"] == 6


async def test_move_off_the_board_is_not_sent() -> None:
    output = await play(["[10 3 7]", *RIGHT])
    assert reads(output)[1].startswith("[10 3 7] refused: row, column and number go from 1 to 9.\n")
    assert rewards(output)[:2] == pytest.approx(((-1 + 6) / 7, 6 / 7))


async def test_only_the_canonical_move_is_sent() -> None:
    """P01: the environment takes the first triple of a text, so it must not see the others."""
    with MockEnvServer(sudoku(PUZZLE, SOLUTION)) as server:
        engine = ScriptedEngine(
            [f"<think>{WRONG}?</think>Not {WRONG}, so [{RIGHT[0].row},{RIGHT[0].col}, {RIGHT[0].number}]"]
        )
        async with SudokuScheduler(engine, 1, base_url=server.base_url) as scheduler:
            [output] = await scheduler.async_infer([{}])
        assert server.applied[1].data == {"message": str(RIGHT[0])}
    assert output.rollout_infos["accepted_moves"] == 1


async def test_subclass_may_read_moves_in_its_own_way() -> None:
    """What was sent is judged, not what this game would have read in the text."""

    class Json(SudokuScheduler):
        def parse_action(self, text: str) -> dict[str, Any] | None:
            return {"message": str(Move(**json.loads(text)))}

    answers = [json.dumps(move._asdict()) for move in RIGHT]
    with MockEnvServer(sudoku(PUZZLE, SOLUTION)) as server:
        async with Json(ScriptedEngine(answers), base_url=server.base_url) as scheduler:
            [output] = await scheduler.async_infer([{}])
    assert rewards(output) == (1.0, 1.0, 0.0, 1.0, 1.0)


# -- limits and sums --------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [6, 11, 21, 41, 55])
async def test_default_limit_lets_a_perfect_player_finish(empty: int) -> None:
    """For as many empty cells as each difficulty of the environment has."""
    puzzle, solution = random_puzzle(random.Random(empty), empty=empty)
    output = await play(right_moves(puzzle, solution), sudoku(puzzle, solution))
    assert output.stop_reason is StopReason.ENV_DONE
    assert output.rollout_infos["rewards"]["correct_reward"] == 1.0


async def test_default_limit_ends_a_game_that_gets_nowhere() -> None:
    puzzle, solution = random_puzzle(random.Random(0), empty=2)
    wrong, right = wrong_move(puzzle, solution), right_moves(puzzle, solution)[1]
    output = await play([wrong, right, wrong], sudoku(puzzle, solution))
    assert output.stop_reason is StopReason.MAX_TURNS
    assert output.rollout_infos["num_turns"] == 3


async def test_limit_of_the_scheduler_comes_first() -> None:
    assert (await play(RIGHT, max_turns=4)).stop_reason is StopReason.MAX_TURNS


@pytest.mark.parametrize(
    "weights", [None, {"correct_reward": 10.0, "repetition_reward": 0.0, "valid_move_reward": 0.3}]
)
async def test_steps_sum_to_the_total(weights: dict[str, float] | None) -> None:
    """Each step is what its turn added to the weighted sum of the components, which stay unweighted themselves."""
    output = await play([RIGHT[0], WRONG, "hmm", *RIGHT[1:3], RIGHT[1], *RIGHT[3:]], reward_weights=weights)
    infos = output.rollout_infos
    assert infos["solved"] is True
    assert len(infos["step_rewards"]) == infos["num_turns"] == 9
    assert sum(infos["step_rewards"]) == infos["total_reward"]
    weighted = sum((weights or {}).get(name, 1.0) * value for name, value in infos["rewards"].items())
    assert infos["total_reward"] == pytest.approx(weighted)
    assert infos["rewards"]["correct_reward"] == 1.0


def test_weight_of_an_unknown_component_is_refused() -> None:
    with pytest.raises(ValueError, match="'correct_rewards'; did you mean 'correct_reward'"):
        SudokuScheduler(reward_weights={"correct_rewards": 1.0})


async def test_shorter_game_scores_no_less() -> None:
    """R03: the same board reached in six turns and in twelve with six repeats."""
    detour = [answer for move in RIGHT for answer in (move, move)][:-1]
    short, long = await play(RIGHT), await play(detour, max_turns=12)
    assert short.rollout_infos["solved"] is True
    assert long.rollout_infos["solved"] is True
    assert all(a >= b for a, b in zip(rewards(short), rewards(long), strict=True))


async def test_group_plays_one_puzzle() -> None:
    """S14: the same seed gives the same fingerprint, and another seed another."""
    with MockEnvServer(seeded(6)) as server:
        rows = [{"env_config": {"base_url": server.base_url, "reset_kwargs": {"seed": s}}} for s in (1, 1, 1, 1, 2)]
        async with SudokuScheduler(ScriptedEngine(lambda request, turn: "hmm")) as scheduler:
            infos = [output.rollout_infos for output in await scheduler.async_infer(rows)]
    assert len({info["fingerprint"] for info in infos[:4]}) == 1
    assert infos[4]["fingerprint"] != infos[0]["fingerprint"]
    assert [info["seed"] for info in infos] == [1, 1, 1, 1, 2]


# -- recorded games ---------------------------------------------------------------------------------


def own_frames(start: Board, moves: list[Move]) -> list[dict[str, Any]]:
    """What our own server would have answered to the same moves."""
    solution = solve(start)
    assert solution is not None
    game = sudoku(start, solution)({})
    return [next(game)["observation"]] + [game.send({"message": str(move)})["observation"] for move in moves]


@pytest.mark.parametrize("name", ["sudoku_very_easy_win", "sudoku_mixed"])
def test_recorded_frames_read_as_our_own(name: str) -> None:
    """Another server repeats the whole history as one text without a board; prompts and rewards are the same."""
    frames = transcript(name)
    observations = [recorded["recv"]["data"]["observation"] for recorded in frames]
    start = read_board(observations[0])
    assert start is not None
    moves = [move for recorded in frames[1:] if (move := recorded_move(recorded)) is not None]
    theirs, ours = SudokuGame(observations[0]), SudokuGame(frame_of(start))
    for move, their, our in zip(moves, observations[1:], own_frames(start, moves)[1:], strict=False):
        assert "board" not in their
        theirs.record(str(move), {"message": str(move)}, StepResult(their, 0.0, False, {}))
        ours.record(str(move), {"message": str(move)}, StepResult(our, 0.0, False, {}))
        assert theirs.prompt() == ours.prompt()
        assert theirs.rewards() == ours.rewards()
        assert theirs.infos() == ours.infos()
    assert theirs.fingerprint == ours.fingerprint
    assert theirs.max_turns == ours.max_turns


def recorded_move(recorded: dict[str, Any]) -> Move | None:
    numbers = recorded["send"]["data"]["message"].strip("[]").split()
    return Move(*map(int, numbers)) if len(numbers) == 3 and numbers[0].isdecimal() else None


def frame_of(board: Board) -> dict[str, Any]:
    return frame(board, "Rules", "Game Board:\n" + board.render())


async def test_recorded_win_over_a_socket() -> None:
    frames = transcript("sudoku_very_easy_win")
    output = await play([f["send"]["data"]["message"] for f in frames[1:]], [f["recv"]["data"] for f in frames])
    assert output.stop_reason is StopReason.ENV_DONE
    assert rewards(output) == (1.0, 1.0, 0.0, 1.0, 1.0)
    assert output.rollout_infos["environment_reward"] == 1.0
    assert all(len(text) < 1000 for text in reads(output))  # L13: the history is not repeated to the model


async def test_recorded_loss_over_a_socket() -> None:
    """P05: the frame of the losing move shows no fault of the move and pays 0.095."""
    frames = transcript("sudoku_mixed")
    moves = [f["send"]["data"]["message"] for f in frames[1:-1]]
    output = await play([*moves, "[1 6 8]"], [f["recv"]["data"] for f in frames])
    assert output.stop_reason is StopReason.ENV_DONE
    assert rewards(output) == pytest.approx((3 / 5, (1 - 0.5 + 1 - 0.5 + 0) / 5, 0.0, 2 / 21, 0.0))
    assert output.rollout_infos["environment_reward"] == pytest.approx(2 / 21)


# -- servers that play something else ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        ({"messages": [{"sender_id": -1, "content": "Guess a number."}]}, "shows no Sudoku board"),
        ({"board": None, "prompt": ""}, "shows no Sudoku board"),
        ({"board": [[0] * 9] * 8}, "sent a broken board: a board needs 9 rows"),
        ({"board": [[10] * 9] * 9}, "sent a broken board: row 1, column 1"),
        ({"board": "board"}, "sent a broken board"),
        ({"board": 3}, "sent a broken board"),
    ],
)
async def test_observation_without_a_board_is_unscored(observation: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        SudokuGame(observation)
    output = await play([], [reply(observation)])
    assert output.stop_reason is StopReason.ENV_LOST
    assert output.error is not None
    assert message in output.error


async def test_board_that_breaks_during_the_game_is_unscored() -> None:
    frames = [reply(frame_of(PUZZLE)), reply({**frame_of(PUZZLE), "board": [[0]]})]
    output = await play(RIGHT[:1], frames)
    assert output.total_reward is None
    assert output.error is not None
    assert "broken board" in output.error


async def test_observation_without_news_leaves_the_board_as_it_was() -> None:
    """Some end a game without showing it again."""
    output = await play(RIGHT[:1], [reply(frame_of(PUZZLE)), reply({"messages": []}, reward=0.0, done=True)])
    assert rewards(output) == (1.0, 0.0, 0.0, 0.0, 0.0)


def test_scheduler_is_registered_by_its_known_name() -> None:
    assert multi_turns["sudoku_scheduler"] is SudokuScheduler


async def test_perfect_player_of_the_tests_solves_what_it_is_shown() -> None:
    """It plays the real server in the integration tests; here for all difficulties."""
    for difficulty in DIFFICULTIES:
        output = await play(perfect, seeded(11), difficulty=difficulty)
        assert output.rollout_infos["solved"] is True
