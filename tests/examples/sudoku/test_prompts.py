"""The words of a turn stay in the format that players and tokenizers know."""

import random
import re

import pytest

from examples.sudoku.board import Move, parse_board, random_puzzle
from examples.sudoku.hints import DIFFICULTIES, Difficulty, TriedMove, build_hints
from examples.sudoku.prompts import FORMAT_REMINDER, SYSTEM_PROMPT, refusal, render_turn

BRACKETED = re.compile(r"\[[^\]]*\]")


@pytest.mark.parametrize("text", [SYSTEM_PROMPT, FORMAT_REMINDER])
def test_every_bracketed_example_is_the_format_or_a_valid_move(text: str) -> None:
    examples = BRACKETED.findall(text)
    assert "[row column number]" in examples
    moves = [example for example in examples if example != "[row column number]"]
    assert moves
    assert all(re.fullmatch(r"\[[1-9] [1-9] [1-9]\]", move) for move in moves)


def test_the_system_prompt_tells_goal_format_and_how_a_game_is_lost() -> None:
    for words in ("each row, each column and each 3x3 box", "[row column number]", "Two refused moves in a row lose"):
        assert words in SYSTEM_PROMPT


def test_a_turn_is_feedback_board_and_hints() -> None:
    board, _ = random_puzzle(random.Random(0), empty=6)
    move = Move(*board.empty_cells[0], 1)
    tried = [TriedMove(move, accepted=False)]
    hints = build_hints(board, tried).render()
    assert render_turn(board, tried) == f"{board}\n\n{hints}"
    assert render_turn(board, tried, "easy", refusal(board, move)) == f"{refusal(board, move)}\n{board}\n\n{hints}"
    assert render_turn(board, tried, "hard", FORMAT_REMINDER) == f"{FORMAT_REMINDER}\n{board}"


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_the_board_can_be_read_back_from_a_turn(difficulty: Difficulty) -> None:
    board, _ = random_puzzle(random.Random(0), empty=30)
    assert parse_board(render_turn(board, [], difficulty, FORMAT_REMINDER)) == board


def test_a_refusal_is_one_line_that_says_why() -> None:
    board, solution = random_puzzle(random.Random(0), empty=6)
    cell = board.empty_cells[0]
    wrong = Move(*cell, solution.number(cell) % 9 + 1)
    assert refusal(board, wrong) == f"{wrong} refused: not part of the solution."
    filled = Move(*(9, 9, 1))
    assert refusal(solution, filled) == "[9 9 1] refused: the cell is filled."
    assert refusal(board, Move(10, 1, 1)) == "[10 1 1] refused: row, column and number go from 1 to 9."
