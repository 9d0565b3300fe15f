"""Players of Sudoku without a model."""

from __future__ import annotations

import random

import pytest

from examples.sudoku.board import Board, Move, random_puzzle
from examples.sudoku.hints import DIFFICULTIES, Difficulty, TriedMove, build_hints
from examples.sudoku.moves import parse_move
from examples.sudoku.policies import POLICIES, follow_hints, random_legal
from examples.sudoku.prompts import render_turn
from examples.sudoku.scheduler import SudokuScheduler
from openenv_client.testing import MockEnvServer
from schedulers import Messages, RolloutOutput
from schedulers.engines import ScriptedEngine
from schedulers.engines.policies import Player
from tests.examples.sudoku.games import seeded

EMPTY = 26
PUZZLES = [random_puzzle(random.Random(seed), empty=30)[0] for seed in range(20)]


def shown(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def move_of(text: str) -> Move:
    move = parse_move(text).move
    assert move is not None
    assert str(move) == text
    return move


@pytest.mark.parametrize("player", [random_legal, follow_hints])
@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_all_moves_are_legal(player: Player, difficulty: Difficulty) -> None:
    rng = random.Random(0)
    for puzzle in PUZZLES:
        move = move_of(player(shown(render_turn(puzzle, difficulty=difficulty)), rng))
        assert move.number in puzzle.candidates(move.cell)


def test_a_random_player_plays_every_legal_move() -> None:
    puzzle, _ = random_puzzle(random.Random(0), empty=8)
    legal = {Move(*cell, number) for cell in puzzle.empty_cells for number in puzzle.candidates(cell)}
    rng = random.Random(0)
    assert {move_of(random_legal(shown(render_turn(puzzle)), rng)) for _ in range(300)} == legal


def test_the_first_guaranteed_move_is_followed() -> None:
    for puzzle in PUZZLES:
        guaranteed = build_hints(puzzle).guaranteed
        assert guaranteed
        assert move_of(follow_hints(shown(render_turn(puzzle)), random.Random(0))) == guaranteed[0]


def test_moves_already_tried_are_not_taken_for_guaranteed_ones() -> None:
    puzzle = PUZZLES[0]
    wrong = Move(*puzzle.empty_cells[0], 1)
    text = render_turn(puzzle, [TriedMove(wrong, accepted=False)], feedback=f"{wrong} refused")
    assert move_of(follow_hints(shown(text), random.Random(0))) != wrong


def test_without_a_guaranteed_move_the_cell_with_the_fewest_options_is_taken() -> None:
    text = f"{PUZZLES[0]}\n\nOther options:\nR1 C1: 4 5 6\nR2 C3: 7 9\nR4 C4: 1 2"
    assert {follow_hints(shown(text), random.Random(seed)) for seed in range(20)} == {"[2 3 7]", "[2 3 9]"}


@pytest.mark.parametrize("player", [random_legal, follow_hints])
def test_a_board_without_a_legal_move_is_named(player: Player) -> None:
    stuck = Board.from_rows([[1, 2, 3, 4, 5, 6, 7, 8, 0], [1] * 8 + [9], *[[1] * 9] * 7])
    with pytest.raises(ValueError, match=r"no legal move on this board:\n"):
        player(shown(render_turn(stuck, difficulty="hard")), random.Random(0))


async def played(policy: str, difficulty: Difficulty = "easy") -> list[RolloutOutput]:
    with MockEnvServer(seeded(EMPTY), capacity=24) as server:
        scheduler = SudokuScheduler(
            ScriptedEngine(SudokuScheduler.policies[policy]), difficulty=difficulty, max_concurrent_envs=24
        )
        rows = [{"env_config": {"base_url": server.base_url, "reset_kwargs": {"seed": seed}}} for seed in range(24)]
        async with scheduler:
            return await scheduler.async_infer(rows, use_tqdm=False)


async def test_players_differ_in_strength() -> None:
    """The solver wins, chance does not, and hints are worth something where they are given."""
    solved = {
        (policy, difficulty): sum(output.rollout_infos["solved"] for output in await played(policy, difficulty))
        for policy in POLICIES
        for difficulty in ("easy", "hard")
    }
    assert solved["solver", "easy"] == solved["solver", "hard"] == solved["hints", "easy"] == 24
    assert max(solved["random", "easy"], solved["random", "hard"], solved["hints", "hard"]) < 20
