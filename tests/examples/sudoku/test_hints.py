"""Hints are never wrong, never repeat a refused move, and are bounded."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.sudoku.board import Board, Cell, Move, random_puzzle
from examples.sudoku.hints import DIFFICULTIES, Difficulty, Options, TriedMove, build_hints


def play_some(rng: random.Random, *, empty: int, moves: int) -> tuple[Board, Board, list[TriedMove]]:
    """A game after random moves, many of them wrong, under an environment that knows the solution."""
    board, solution = random_puzzle(rng, empty=empty)
    tried: list[TriedMove] = []
    for _ in range(moves):
        move = Move(rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 9))
        if board.empty_cells and rng.random() < 0.8:
            cell = rng.choice(board.empty_cells)
            move = Move(*cell, rng.choice([*board.candidates(cell), rng.randint(1, 9)]))
        accepted = not board.number(move.cell) and solution.number(move.cell) == move.number
        tried.append(TriedMove(move, accepted))
        board = board.place(move) if accepted else board
    return board, solution, tried


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
@given(st.integers(0), st.integers(0, 60), st.integers(0, 40))
@settings(deadline=None)
def test_no_hint_is_ever_wrong(difficulty: Difficulty, seed: int, empty: int, moves: int) -> None:
    board, solution, tried = play_some(random.Random(seed), empty=empty, moves=moves)
    hints = build_hints(board, tried, difficulty=difficulty)
    refused = {attempt.move for attempt in tried if not attempt.accepted}
    for move in hints.guaranteed:
        assert not board.number(move.cell)
        assert solution.number(move.cell) == move.number
    for option in hints.options:
        assert not board.number(option.cell)
        assert solution.number(option.cell) in option.numbers
        assert refused.isdisjoint(Move(*option.cell, number) for number in option.numbers)
    assert set(hints.tried) <= set(tried)


@given(st.integers(0), st.integers(1, 60), st.integers(0, 40))
@settings(deadline=None)
def test_every_cell_with_few_candidates_is_told(seed: int, empty: int, moves: int) -> None:
    board, _, tried = play_some(random.Random(seed), empty=empty, moves=moves)
    easy, medium = build_hints(board, tried), build_hints(board, tried, difficulty="medium")
    told = {move.cell for move in easy.guaranteed} | {option.cell for option in easy.options}
    assert told == {option.cell for option in medium.options}
    assert told >= {cell for cell in board.empty_cells if len(board.candidates(cell)) <= 3}


def test_difficulty_decides_what_is_told() -> None:
    board, _, tried = play_some(random.Random(3), empty=20, moves=10)
    easy, medium, hard = (build_hints(board, tried, difficulty=difficulty) for difficulty in DIFFICULTIES)
    assert easy.tried
    assert easy.guaranteed
    assert all(2 <= len(option.numbers) <= 3 for option in easy.options)
    assert not medium.tried
    assert not medium.guaranteed
    assert any(len(option.numbers) == 1 for option in medium.options)
    assert hard.render() == ""


def test_an_unknown_difficulty_is_refused_with_the_known_ones() -> None:
    board, _ = random_puzzle(random.Random(0), empty=5)
    with pytest.raises(ValueError, match="easy, medium, hard, not 'brutal'"):
        build_hints(board, difficulty="brutal")  # type: ignore[arg-type]


def test_a_refused_number_is_no_candidate_of_its_cell_any_more() -> None:
    """With one of two candidates refused, the other one is guaranteed."""
    board, solution, cell = next(
        (board, solution, option.cell)
        for board, solution in (random_puzzle(random.Random(seed), empty=20) for seed in range(100))
        for option in build_hints(board).options
        if len(option.numbers) == 2
    )
    right = solution.number(cell)
    wrong = next(number for number in board.candidates(cell) if number != right)
    hints = build_hints(board, [TriedMove(Move(*cell, wrong), accepted=False)])
    assert Move(*cell, right) in hints.guaranteed
    assert cell not in {option.cell for option in hints.options}


def test_failures_come_first_and_both_kinds_are_bounded_to_the_latest() -> None:
    board, _ = random_puzzle(random.Random(0), empty=5)
    failures = [TriedMove(Move(1, 1, n), accepted=False) for n in range(1, 10)] * 2
    failures += [TriedMove(Move(1, 2, n), accepted=False) for n in range(1, 4)]
    successes = [TriedMove(Move(2, n, n), accepted=True) for n in range(1, 10)]
    mixed = [attempt for pair in zip(successes, failures, strict=False) for attempt in pair] + failures[9:]
    assert build_hints(board, mixed).tried == (*failures[2:9], *failures[18:], *successes[-5:])


def test_a_section_is_a_header_and_its_lines_and_empty_ones_are_left_out() -> None:
    board = Board.from_rows([[0, 2, 3, 4, 5, 6, 7, 8, 9], *[[0] * 9] * 8])
    assert build_hints(board).render() == "GUARANTEED MOVES:\n[1 1 1]"
    tried = [TriedMove(Move(1, 9, 9), accepted=True), TriedMove(Move(1, 1, 2), accepted=False)]
    assert build_hints(board, tried).render() == (
        "MOVES ALREADY TRIED:\n[1 1 2] refused\n[1 9 9] accepted\n\nGUARANTEED MOVES:\n[1 1 1]"
    )
    assert str(Options(Cell(1, 2), (3, 5))) == "R1 C2: 3 5"


@given(st.integers(0), st.integers(0, 60))
@settings(deadline=None)
def test_guaranteed_moves_are_playable_as_they_stand(seed: int, empty: int) -> None:
    board, _ = random_puzzle(random.Random(seed), empty=empty)
    hints = build_hints(board)
    lines = hints.render().partition("Other options:")[0].split("\n")
    written = [
        Move(*map(int, match.groups())) for line in lines if (match := re.fullmatch(r"\[(\d) (\d) (\d)\]", line))
    ]
    assert tuple(written) == hints.guaranteed
