"""From completions to moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.sudoku.board import Move
from examples.sudoku.moves import parse_move
from examples.sudoku.prompts import FORMAT_REMINDER, SYSTEM_PROMPT
from examples.sudoku.scheduler import SudokuScheduler

CASES = [json.loads(line) for line in (Path(__file__).parents[2] / "data" / "moves.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[repr(case["text"])[:40] for case in CASES])
def test_recorded_completions(case: dict[str, Any]) -> None:
    """P12: every recorded completion gets its recorded verdict, and only a move within the board is sent."""
    parsed = parse_move(case["text"], case["finish_reason"])
    assert parsed.status == case["status"]
    if case["status"] == "move":
        assert parsed.move == Move(case["row"], case["col"], case["number"])
    action = SudokuScheduler().parse_action(case["text"])
    assert action == ({"message": case["message"]} if case["status"] == "move" else None)


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("first [1 2 3], but that clashes, so [4 5 6]", Move(4, 5, 6)),
        ("<think>[1 2 3]</think>[5 3 7]", Move(5, 3, 7)),
        ("[1 2 3]</think>[5 3 7]", Move(5, 3, 7)),
        ("<think>[1 2 3]", None),
        ("<think></think>", None),
        ("[5 3 7]<think>or [1 2 3]?</think>", Move(5, 3, 7)),
        ("[\N{ARABIC-INDIC DIGIT FIVE} \N{ARABIC-INDIC DIGIT THREE} \N{ARABIC-INDIC DIGIT SEVEN}]", Move(5, 3, 7)),
        ("[5\n3 7]", None),
        ("[5 37]", None),
        ("[5.3.7]", None),
        ("r5c3=7", None),
        ("[5,,3 7]", None),
        ("[-5 3 7]", None),
    ],
)
def test_forms(text: str, move: Move | None) -> None:
    """P01, P06, P07, P13: the last triple outside thinking, digits of any script, no guessing of other forms."""
    parsed = parse_move(text)
    assert (parsed.status, parsed.move) == (("move", move) if move else ("none", None))


def test_an_answer_that_was_cut() -> None:
    """L14: a move that was complete when the answer was cut counts; one that another was about to replace does not."""
    assert parse_move("[5 3 7] because", "length").move == Move(5, 3, 7)
    assert parse_move("maybe [5 3 7], but that clashes, so [1 2", "length").status == "truncated"
    assert SudokuScheduler().parse_cut_action("[5 3 7] because") == {"message": "[5 3 7]"}
    assert SudokuScheduler().parse_cut_action("maybe [5 3 7], so [1 2") is None


def test_range_is_judged_after_parsing() -> None:
    """An out-of-range last triple does not fall back to an earlier one."""
    assert parse_move("[1 2 3] no, [0 0 7]") == parse_move("[0 0 7]")
    assert parse_move("[0 0 7]").status == "out_of_range"


def test_huge_numbers_are_out_of_range() -> None:
    """A number of thousands of digits is judged without being computed."""
    assert parse_move(f"[{'9' * 100_000} 3 7]").status == "out_of_range"
    assert parse_move(f"[{'0' * 100_000}5 3 7]").status == "out_of_range"


def test_examples_shown_to_the_model_parse() -> None:
    """P04: each bracketed digit triple of the system prompt and of the reminder is a move."""
    for text in (SYSTEM_PROMPT, FORMAT_REMINDER):
        assert parse_move(text).move == Move(5, 3, 7)


@given(st.text(), st.sampled_from(["stop", "length"]))
def test_no_text_raises(text: str, finish_reason: str) -> None:
    """Any text gets a verdict."""
    assert parse_move(text, finish_reason).status in {"move", "out_of_range", "none", "truncated"}


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.text(alphabet="[]0123456789 ,\n<think>/", max_size=40)
)
def test_the_last_triple_wins(row: int, col: int, number: int, before: str) -> None:
    """Whatever stands before it outside an open thought, a closing canonical move is what is played."""
    assert parse_move(f"{before}</think>[{row} {col} {number}]").move == Move(row, col, number)
