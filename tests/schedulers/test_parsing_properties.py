"""Models write anything, and servers show anything: no text makes a parser raise."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.sudoku.board import Board, parse_board, random_puzzle
from examples.sudoku.moves import parse_move
from examples.sudoku.scheduler import SudokuScheduler
from openenv_client.protocol import encode_step
from schedulers.openenv import OpenEnvScheduler
from schedulers.textarena import TextArenaScheduler
from schedulers.thinking import visible_text

any_text = st.text(st.characters())  # half characters as well
json_texts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=5,
).map(json.dumps)
fenced = st.builds("{}```json\n{}\n```{}".format, any_text, json_texts, any_text)
movelike = st.text(
    st.sampled_from("[]0159\N{ARABIC-INDIC DIGIT THREE}\N{FULLWIDTH DIGIT FIVE}, \t\n<think>/|.-R"), max_size=60
)
completions = any_text | json_texts | fenced | movelike

SCHEDULERS: list[OpenEnvScheduler] = [OpenEnvScheduler(), TextArenaScheduler(), SudokuScheduler()]
BOARD = random_puzzle(random.Random(7), empty=30)[0].render()
boardlike = st.tuples(st.integers(0, len(BOARD)), st.integers(0, 9), any_text | movelike).map(
    lambda cut: BOARD[: cut[0]] + cut[2] + BOARD[cut[0] + cut[1] :]
)


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda scheduler: type(scheduler).__name__)
@given(text=completions)
def test_whatever_a_model_writes_is_no_action_or_one_that_can_be_sent(scheduler: OpenEnvScheduler, text: str) -> None:
    for parse in (scheduler.parse_action, scheduler.parse_cut_action):
        action = parse(text)
        assert action is None or json.loads(encode_step(action))["type"] == "step"


@pytest.mark.parametrize("depth", [900, 100_000])
@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda scheduler: type(scheduler).__name__)
def test_an_answer_that_is_nested_without_end_is_a_text_like_any_other(scheduler: OpenEnvScheduler, depth: int) -> None:
    action: Any = scheduler.parse_action('{"a":' * depth + "1" + "}" * depth)
    assert action is None or encode_step(action)


@given(completions, st.sampled_from(["stop", "length", "", "other"]))
def test_whatever_a_model_writes_gets_a_verdict(text: str, finish_reason: str) -> None:
    """A move within the board has its canonical form, and any other status none that could be sent."""
    parsed = parse_move(text, finish_reason)
    assert (parsed.status == "move") == (parsed.move is not None and parsed.move.in_range)
    assert len(visible_text(text)) <= len(text)


@given(any_text | movelike | boardlike)
def test_whatever_a_server_shows_is_a_board_or_none(text: str) -> None:
    board = parse_board(text)
    if board is not None:
        assert Board.from_rows(board.rows) == board
        assert parse_board(board.render()) == board
