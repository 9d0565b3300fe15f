"""The five-part reward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.sudoku.board import Move
from examples.sudoku.rewards import REWARD_NAMES, Verdict, sudoku_rewards

GOOD = Verdict(Move(1, 1, 1), cell_was_empty=True, accepted=True)
WARNED = Verdict(Move(1, 1, 2), cell_was_empty=True, warned=True)
LOSING = Verdict(Move(1, 1, 3), cell_was_empty=True)
UNPARSED = Verdict()


def rewards(*verdicts: Verdict, start: int = 75, best: int = 75, solved: bool = False) -> dict[str, float]:
    return sudoku_rewards(verdicts, start=start, best=best, solved=solved)


def test_names_and_order() -> None:
    """A game without a turn has all five components at zero, in their order."""
    assert list(rewards().items()) == [(name, 0.0) for name in REWARD_NAMES]


def test_two_wrong_moves() -> None:
    """The losing move earns nothing for validity: -0.5 and 0.0, never +1."""
    assert rewards(WARNED, LOSING) == {
        "empty_cell_reward": 1.0,
        "valid_move_reward": -0.25,
        "repetition_reward": 0.0,
        "progress_reward": 0.0,
        "correct_reward": 0.0,
    }


def test_perfect_game() -> None:
    """Six right moves of six earn every component in full."""
    moves = [Verdict(Move(1, col, 1), cell_was_empty=True, accepted=True) for col in range(1, 7)]
    values = rewards(*moves, best=81, solved=True)
    assert values == dict(zip(REWARD_NAMES, (1.0, 1.0, 0.0, 1.0, 1.0), strict=True))


def test_answer_without_a_move() -> None:
    """An answer that names no cell counts as a turn, with -1 for its cell."""
    values = rewards(GOOD, UNPARSED)
    assert (values["empty_cell_reward"], values["valid_move_reward"]) == (0.0, 0.5)


def test_repetition() -> None:
    """P11: the penalty doubles with each repeat and is bounded at ten."""

    totals = [rewards(*[WARNED] * n)["repetition_reward"] * n for n in range(1, 8)]

    assert totals == pytest.approx([0, -2, -6, -14, -24, -34, -44])


def test_many_repeats_are_cheap() -> None:
    """A thousand repeats of one move stay within the bound."""
    assert rewards(*[WARNED] * 1000)["repetition_reward"] >= -10


def test_progress_is_the_best_board() -> None:
    """Half of the empty cells filled is one half; a board without empty cells at the start has no progress to make."""
    assert rewards(GOOD, best=78)["progress_reward"] == 0.5
    assert rewards(start=81, best=81)["progress_reward"] == 0.0


verdict = st.builds(
    Verdict,
    move=st.one_of(st.none(), st.builds(Move, st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))),
    cell_was_empty=st.booleans(),
    accepted=st.booleans(),
    warned=st.booleans(),
)


@given(st.lists(verdict, max_size=30))
def test_components_are_bounded(verdicts: list[Verdict]) -> None:
    """R03: the components are means, so no game grows them by lasting longer."""
    values = rewards(*verdicts)
    assert -1 <= values["empty_cell_reward"] <= 1
    assert -0.5 <= values["valid_move_reward"] <= 1
    assert -10 <= values["repetition_reward"] <= 0


def test_the_shorter_game_scores_at_least_as_high() -> None:
    """R03: six moves to a board beat the same board after six repeats."""
    moves = [Verdict(Move(1, col, 1), cell_was_empty=True, accepted=True) for col in range(1, 7)]
    repeats = [Verdict(verdict.move) for verdict in moves]
    assert sum(rewards(*moves, best=81, solved=True).values()) >= sum(
        rewards(*moves, *repeats, best=81, solved=True).values()
    )
