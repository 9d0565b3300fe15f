"""Mastermind for the scripts that serve all games."""

from __future__ import annotations

from examples.example import Example
from examples.guessing import GUESSING_REWARDS
from examples.mastermind.codes import parse_board, render_code
from examples.mastermind.game import MastermindScheduler
from schedulers import RolloutInferRequest

__all__ = ["EXAMPLE", "first_candidate"]


def first_candidate(request: RolloutInferRequest, turn: int) -> str:
    """Guess the first code that agrees with the board that is shown.

    Raises:
        ValueError: No board is shown, or one that no code agrees with.
    """
    board = parse_board(request.messages[-1]["content"])
    code = None if board is None else next(board.candidates(), None)
    if code is None:
        raise ValueError(f"there is no code to be found in {request.messages[-1]['content']!r}")
    return render_code(code)


EXAMPLE = Example(
    name="mastermind",
    scheduler=MastermindScheduler,
    policy=first_candidate,
    env_id="Mastermind-v0",
    reward_names=GUESSING_REWARDS,
)
