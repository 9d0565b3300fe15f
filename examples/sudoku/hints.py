"""Hints for a Sudoku board: the moves already tried, the moves that must be right, and the cells with few choices.

A hint is never wrong for the board it was made of, as long as the board can be solved and every refused move was
refused because it is not part of the solution. Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

from examples.sudoku.board import Board, Cell, Move

__all__ = ["DIFFICULTIES", "Difficulty", "Hints", "Options", "TriedMove", "build_hints"]

Difficulty: TypeAlias = Literal["easy", "medium", "hard"]
"""``easy`` gives all hints, ``medium`` the candidates of cells that have few, ``hard`` none."""

DIFFICULTIES: tuple[Difficulty, ...] = get_args(Difficulty)

MAX_FAILURES = 10
MAX_SUCCESSES = 5
MAX_CANDIDATES = 3

TRIED_HEADER = "MOVES ALREADY TRIED:"
GUARANTEED_HEADER = "GUARANTEED MOVES:"
OPTIONS_HEADER = "Other options:"


class TriedMove(NamedTuple):
    """A move that was sent to the environment, and whether it was accepted."""

    move: Move
    accepted: bool

    def __str__(self) -> str:
        return f"{self.move} {'accepted' if self.accepted else 'refused'}"


class Options(NamedTuple):
    """The numbers that an empty cell may still take, in order."""

    cell: Cell
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"R{self.cell.row} C{self.cell.col}: {' '.join(map(str, self.numbers))}"


@dataclass(frozen=True)
class Hints:
    """What a player is told beside the board; any part may be empty.

    Args:
        tried: Failures first, then the latest successes; each in the order of play.
        guaranteed: The only possible move of each cell that has one candidate, in reading order.
        options: Cells with few candidates, in reading order.
    """

    tried: tuple[TriedMove, ...] = ()
    guaranteed: tuple[Move, ...] = ()
    options: tuple[Options, ...] = ()

    def render(self) -> str:
        """The sections that are not empty, a blank line between them; ``""`` when all are."""
        sections: tuple[tuple[str, Sequence[object]], ...] = (
            (TRIED_HEADER, self.tried),
            (GUARANTEED_HEADER, self.guaranteed),
            (OPTIONS_HEADER, self.options),
        )
        return "\n\n".join("\n".join([header, *map(str, lines)]) for header, lines in sections if lines)


def build_hints(board: Board, tried: Sequence[TriedMove] = (), *, difficulty: Difficulty = "easy") -> Hints:
    """Make the hints for a board.

    A number that was refused in a cell which is still empty is no candidate there any more, so no hint repeats a
    refused move.

    Args:
        board: The board that the player sees now.
        tried: All moves of the game so far, in the order of play.
        difficulty: How much to tell.

    Raises:
        ValueError: No such difficulty.
    """
    if difficulty not in DIFFICULTIES:
        raise ValueError(f"difficulty must be one of {', '.join(DIFFICULTIES)}, not {difficulty!r}")
    if difficulty == "hard":
        return Hints()
    refused = {attempt.move for attempt in tried if not attempt.accepted}
    choices = [
        Options(cell, tuple(n for n in board.candidates(cell) if Move(*cell, n) not in refused))
        for cell in board.empty_cells
    ]
    if difficulty == "medium":
        return Hints(options=tuple(option for option in choices if 1 <= len(option.numbers) <= MAX_CANDIDATES))
    failures = _latest((attempt for attempt in tried if not attempt.accepted), MAX_FAILURES)
    successes = _latest((attempt for attempt in tried if attempt.accepted), MAX_SUCCESSES)
    return Hints(
        tried=failures + successes,
        guaranteed=tuple(Move(*option.cell, *option.numbers) for option in choices if len(option.numbers) == 1),
        options=tuple(option for option in choices if 2 <= len(option.numbers) <= MAX_CANDIDATES),
    )


def _latest(attempts: Iterable[TriedMove], limit: int) -> tuple[TriedMove, ...]:
    """The last ``limit`` different attempts; one that was repeated stands where it was first."""
    return tuple(dict.fromkeys(attempts))[-limit:]
