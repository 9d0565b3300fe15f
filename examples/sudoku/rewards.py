"""The five-part Sudoku reward, computed from what each turn did. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from examples.sudoku.board import Move

__all__ = ["REWARD_NAMES", "Verdict", "sudoku_rewards"]

REWARD_NAMES = ("empty_cell_reward", "valid_move_reward", "repetition_reward", "progress_reward", "correct_reward")

MAX_REPETITION_PENALTY = 10


@dataclass(frozen=True)
class Verdict:
    """What one turn did.

    Args:
        move: The move, or None when the answer held none that the environment could be asked to play.
        cell_was_empty: Its cell was empty.
        accepted: The board shows it.
        warned: The environment refused it and let the game go on.
    """

    move: Move | None = None
    cell_was_empty: bool = False
    accepted: bool = False
    warned: bool = False


def sudoku_rewards(verdicts: Sequence[Verdict], *, start: int, best: int, solved: bool) -> dict[str, float]:
    """The components for a game so far.

    Args:
        verdicts: One for each turn.
        start: Filled cells of the board at the start.
        best: The most filled cells that the board has had.
        solved: The puzzle is solved.

    Returns:
        ``empty_cell_reward``: mean over turns of +1 for naming an empty cell, else -1.
        ``valid_move_reward``: mean over turns of 1 (accepted), -0.5 (warned), 0 (any other; the move that loses the
            game).
        ``repetition_reward``: mean over turns of -min(2**n, 10), n times played before; 0 for the first time.
        ``progress_reward``: the share of the empty cells that was filled.
        ``correct_reward``: 1 if solved, else 0.
    """
    empty_cell = [1.0 if verdict.cell_was_empty else -1.0 for verdict in verdicts]
    valid = [1.0 if verdict.accepted else -0.5 if verdict.warned else 0.0 for verdict in verdicts]
    values = (
        _mean(empty_cell),
        _mean(valid),
        _mean(_repetitions([verdict.move for verdict in verdicts])),
        (best - start) / (81 - start) if start < 81 else 0.0,
        1.0 if solved else 0.0,
    )
    return dict(zip(REWARD_NAMES, values, strict=True))


def _repetitions(moves: Sequence[Move | None]) -> list[float]:
    played: dict[Move, int] = {}
    penalties: list[float] = []
    for move in moves:
        times = played.get(move, 0) if move is not None else 0
        # The exponent is bounded before the power is taken: a game of thousands of repeats must not compute 2**1000.
        penalties.append(-float(min(2 ** min(times, 4), MAX_REPETITION_PENALTY)) if times else 0.0)
        if move is not None:
            played[move] = times + 1
    return penalties


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
