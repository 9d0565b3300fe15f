"""SudokuScheduler: TextArena Sudoku with hints and a five-part reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from examples.sudoku.board import Board, parse_board
from examples.sudoku.hints import DIFFICULTIES, Difficulty, TriedMove
from examples.sudoku.moves import ParsedMove, parse_move
from examples.sudoku.policies import POLICIES
from examples.sudoku.prompts import FORMAT_REMINDER, SYSTEM_PROMPT, refusal, render_turn
from examples.sudoku.rewards import REWARD_NAMES, Verdict, sudoku_rewards
from openenv_client import StepResult
from schedulers import EnvError, multi_turns
from schedulers.engines.base import InferEngine
from schedulers.textarena import TextArenaGame, TextArenaScheduler, observation_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from schedulers.openenv import OpenEnvOptions

__all__ = ["SudokuGame", "SudokuScheduler"]


class SudokuGame(TextArenaGame):
    """One puzzle: the board, the moves that were tried, and what they were worth.

    Args:
        observation: The environment's first observation, with a ``board`` or with a board in its text.
        difficulty: How many hints the model gets.

    Raises:
        EnvError: The observation shows no board.
    """

    system_prompt = SYSTEM_PROMPT
    reward_names: ClassVar[tuple[str, ...]] = REWARD_NAMES

    def __init__(self, observation: dict[str, Any], *, difficulty: Difficulty = "easy") -> None:
        super().__init__(observation)
        board = read_board(observation)
        if board is None:
            raise EnvError(
                "the observation shows no Sudoku board; is the server running Sudoku (TEXTARENA_ENV_ID=Sudoku-v0)?"
            )
        self.start = self.board = board
        self.difficulty = difficulty
        self.best_filled = board.filled
        self.tried: list[TriedMove] = []
        self.verdicts: list[Verdict] = []
        self.feedback: str | None = None

    @property
    def fingerprint(self) -> str:
        """Of the board at the start."""
        return self.start.fingerprint

    @property
    def max_turns(self) -> int:
        """Half as many turns again as there are cells to fill: a perfect player finishes, a good one recovers."""
        empty = len(self.start.empty_cells)
        return max(1, empty + (empty + 1) // 2)

    def prompt(self) -> str:
        """The board as it stands, with hints, after a line about the last answer if something was wrong with it."""
        return render_turn(self.board, self.tried, self.difficulty, self.feedback)

    def record(self, text: str, action: dict[str, Any] | None, result: StepResult | None) -> None:
        """Judge a turn by the board before and after it."""
        super().record(text, action, result)
        # What was sent counts, not what this game would have read: a subclass may parse moves in a way of its own.
        move = parse_move(text if action is None else str(action.get("message", ""))).move
        before = self.board
        if result is not None:
            self.board = read_board(result.observation) or before
            self.best_filled = max(self.best_filled, self.board.filled)
        if result is None or move is None or not move.in_range:
            self.verdicts.append(Verdict())
            self.feedback = FORMAT_REMINDER if move is None or move.in_range else refusal(before, move)
            return
        empty = before.number(move.cell) == 0
        accepted = empty and self.board.number(move.cell) == move.number
        self.verdicts.append(Verdict(move, empty, accepted, warned=not accepted and not result.done))
        self.tried.append(TriedMove(move, accepted))
        self.feedback = None if accepted else refusal(before, move)

    def rewards(self) -> dict[str, float]:
        """The five components."""
        return sudoku_rewards(
            self.verdicts, start=self.start.filled, best=self.best_filled, solved=self.board.is_solved
        )

    def infos(self) -> dict[str, Any]:
        """Whether it is solved, and how many moves were accepted."""
        accepted = sum(verdict.accepted for verdict in self.verdicts)
        return {"solved": self.board.is_solved, "accepted_moves": accepted, "empty_cells": len(self.start.empty_cells)}


class SudokuScheduler(TextArenaScheduler):
    """Plays TextArena Sudoku.

    Args:
        infer_engine: Samples the completions.
        max_turns: The most turns of a game; None is half as many again as there are cells to fill.
        difficulty: ``easy`` gives all hints, ``medium`` candidates only, ``hard`` none.
        reward_weights: A weight for each of the five components; 1.0 for those that are not named.
        options: Keywords of ``OpenEnvScheduler``.

    Raises:
        ValueError: No such difficulty, or a weight for no component.
    """

    game_class: ClassVar[type[SudokuGame]] = SudokuGame
    policies = POLICIES

    def __init__(
        self,
        infer_engine: InferEngine | None = None,
        max_turns: int | None = None,
        *,
        difficulty: Difficulty = "easy",
        reward_weights: Mapping[str, float] | None = None,
        **options: Unpack[OpenEnvOptions],
    ) -> None:
        if difficulty not in DIFFICULTIES:
            raise ValueError(f"difficulty must be one of {', '.join(DIFFICULTIES)}, not {difficulty!r}")
        super().__init__(infer_engine, max_turns, reward_weights=reward_weights, **options)
        self.difficulty = difficulty

    def new_game(self, observation: dict[str, Any]) -> SudokuGame:
        """Make the game of a trajectory."""
        return self.game_class(observation, difficulty=self.difficulty)

    def parse_action(self, text: str) -> dict[str, Any] | None:
        """The canonical form of the move, which is all that is sent; None when there is none within the board."""
        return _action(parse_move(text))

    def parse_cut_action(self, text: str) -> dict[str, Any] | None:
        """The move of an answer that was cut after it; None when it was cut before or within its last move."""
        return _action(parse_move(text, "length"))


def _action(parsed: ParsedMove) -> dict[str, Any] | None:
    return {"message": str(parsed.move)} if parsed.status == "move" else None


def read_board(observation: Mapping[str, Any]) -> Board | None:
    """The board of an observation: its ``board`` where the server gives one, else the last one in its text.

    Raises:
        EnvError: ``board`` is there and is no board.
    """
    rows = observation.get("board")
    if rows is None:
        return parse_board(observation_text(observation))
    try:
        return Board.from_rows(rows)
    except (TypeError, ValueError) as error:
        raise EnvError(f"the environment sent a broken board: {error}") from error


multi_turns["sudoku_scheduler"] = SudokuScheduler
