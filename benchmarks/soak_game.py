"""One game of the soak: how its player answers, and what must have come of it. Pure: no I/O."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.sudoku.board import Board, Move, parse_board, solve
from examples.sudoku.hints import Difficulty, TriedMove
from examples.sudoku.moves import ParsedMove, parse_move
from examples.sudoku.prompts import FORMAT_REMINDER, SYSTEM_PROMPT, refusal, render_turn
from examples.sudoku.rewards import Verdict, sudoku_rewards
from openenv_client.testing import Received
from schedulers import Message, Messages, RolloutOutput, StopReason

__all__ = ["CHECKS", "Difference", "PlayedGame", "answer", "check"]

_OBSERVATIONS = "observations belong to their moves"

_MAX_PARSE_FAILURES = 2

_HABITS = {
    "right": 70,
    "thought": 8,  # right, after a thought about another move
    "wrong": 7,
    "repeated": 5,
    "filled": 4,
    "unparsable": 4,
    "out_of_range": 2,
}
"""How a player answers, and how often."""


class Difference(Exception):  # noqa: N818 - it is a finding
    """Something came out otherwise than it must have.

    Args:
        check: What was being checked.
        text: The first difference.
    """

    def __init__(self, check: str, text: str) -> None:
        super().__init__(f"{check}: {text}")
        self.check, self.text = check, text

    def located(self, where: str) -> Difference:
        """The same, with the place where it was found."""
        return Difference(self.check, f"{where}: {self.text}")


def answer(conversation: Messages, rng: random.Random) -> str:
    """What the player says: mostly a right move for the board that it is shown, sometimes any kind of bad one.

    Args:
        conversation: Ends with a board.
        rng: Where chance comes from.

    Raises:
        Difference: There is no board, or one without a solution: it is not what the server has.
    """
    board = parse_board(conversation[-1]["content"])
    solution = None if board is None else solve(board)
    if board is None or solution is None:
        raise Difference(_OBSERVATIONS, f"no board that can be solved was shown: {conversation[-1]['content']!r}")
    cell = rng.choice(board.empty_cells)
    right = Move(*cell, solution.number(cell))
    wrong = Move(*cell, solution.number(cell) % 9 + 1)
    habit = rng.choices(list(_HABITS), list(_HABITS.values()))[0]
    if habit == "thought":
        return f"<think>{wrong} would not do.</think>So I play {right}."
    if habit == "wrong":
        return str(wrong)
    if habit == "repeated":
        said = [message["content"] for message in conversation if message["role"] == "assistant"]
        return str(rng.choice(said)) if said else str(right)
    if habit == "filled":
        filled = [(r, c) for r in range(1, 10) for c in range(1, 10) if board.rows[r - 1][c - 1]]
        return str(Move(*rng.choice(filled), right.number))
    if habit == "unparsable":
        return rng.choice(["", "I pass.", "[5 3]", "[a b c]", "half a character: \ud83d"])
    if habit == "out_of_range":
        return str(right._replace(**{rng.choice(right._fields): rng.choice([0, 10])}))
    return str(right)


@dataclass
class Referee:
    """Plays a game again from its puzzle and the player's answers, without a server or a client.

    Args:
        puzzle: The board at the start.
        difficulty: How many hints the player gets.

    Attributes:
        messages: The conversation as it must have been.
        actions: What must have been sent, in order.
        step_rewards: What each turn added.
        rewards: The components at the end.
        ending: Why the game is over; None if it is not.
        last_prompt: What is shown after the last answer, though nobody may read it.
    """

    puzzle: Board
    difficulty: Difficulty
    messages: Messages = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)
    step_rewards: list[float] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    ending: StopReason | None = None
    last_prompt: str = ""

    def __post_init__(self) -> None:
        solution = solve(self.puzzle)
        if solution is None:
            raise ValueError(f"this puzzle has no solution:\n{self.puzzle}")
        self.board, self._solution = self.puzzle, solution
        self._tried: list[TriedMove] = []
        self._verdicts: list[Verdict] = []
        self._unparsed = 0
        self._refused = False
        self.messages = [_message("system", SYSTEM_PROMPT), _message("user", self._prompt(None))]

    def take(self, text: str) -> None:
        """Take the player's next answer."""
        if self.ending is not None:
            raise Difference(_OBSERVATIONS, f"the game went on after its end ({self.ending}) with {text!r}")
        if self.step_rewards:
            self.messages.append(_message("user", self.last_prompt))
        self.messages.append(_message("assistant", text))
        parsed = parse_move(text)
        feedback = self._play(parsed.move) if parsed.status == "move" and parsed.move else self._refuse(parsed)
        self.last_prompt = self._prompt(feedback)
        empty = len(self.puzzle.empty_cells)
        if self.ending is None and len(self._verdicts) >= empty + (empty + 1) // 2:
            self.ending = StopReason.MAX_TURNS
        before = sum(self.rewards.values())
        self.rewards = sudoku_rewards(
            self._verdicts, start=self.puzzle.filled, best=self.board.filled, solved=self.board.is_solved
        )
        self.step_rewards.append(sum(self.rewards.values()) - before)

    def _play(self, move: Move) -> str | None:
        self._unparsed = 0
        self.actions.append({"message": str(move)})
        board, empty = self.board, not self.board.number(move.cell)
        right = empty and self._solution.number(move.cell) == move.number
        lost = not right and self._refused  # the second in a row
        self._refused = not right
        self._verdicts.append(Verdict(move, empty, accepted=right, warned=not right and not lost))
        self._tried.append(TriedMove(move, right))
        if right:
            self.board = board.place(move)
        if lost or self.board.is_solved:
            self.ending = StopReason.ENV_DONE
        return None if right else refusal(board, move)

    def _refuse(self, parsed: ParsedMove) -> str:
        self._verdicts.append(Verdict())
        self._unparsed += 1
        if self._unparsed == _MAX_PARSE_FAILURES:
            self.ending = StopReason.PARSE_ERROR
        return FORMAT_REMINDER if parsed.move is None else refusal(self.board, parsed.move)

    def _prompt(self, feedback: str | None) -> str:
        return render_turn(self.board, self._tried, self.difficulty, feedback)


@dataclass(frozen=True)
class PlayedGame:
    """A game as it was played, and what is known of it from elsewhere.

    Args:
        puzzle: Its first board, taken from the server without anything in between.
        difficulty: How many hints the player got.
        reset: The arguments of its reset, ``seed`` and ``episode_id``.
        output: What the scheduler made of it; ``rollout_infos["server_state"]`` is what the server said at the end.
        forwarded: What the server was sent for it, in any number of sessions.
    """

    puzzle: Board
    difficulty: Difficulty
    reset: Mapping[str, Any]
    output: RolloutOutput
    forwarded: Sequence[Received]

    @property
    def scored(self) -> bool:
        """Whether it counts."""
        return self.output.stop_reason not in (StopReason.ENV_LOST, StopReason.ERROR, StopReason.CANCELLED)


def check(game: PlayedGame) -> list[str]:
    """Compare a game with the one that its answers must have led to.

    Returns:
        The names of the checks that there was something to check for.

    Raises:
        Difference: The first that was found.
    """
    referee = Referee(game.puzzle, game.difficulty)
    for message in game.output.messages:
        if message["role"] == "assistant":
            referee.take(message["content"])
    return [name for name, compare in CHECKS.items() if compare(name, game, referee)]


def _check_observations(name: str, game: PlayedGame, referee: Referee) -> bool:
    """Every board, hint and refusal belongs to the answers so far, and the game ended when it had to."""
    shown = game.output.messages
    for number, (is_so, must_be) in enumerate(zip(shown, referee.messages, strict=False)):
        _same(name, f"message {number}", is_so, must_be)
    infos = game.output.rollout_infos
    if game.scored:
        _same(name, "the number of messages", len(shown), len(referee.messages))
        _same(name, "the end", game.output.stop_reason, referee.ending)
        if referee.ending is StopReason.ENV_DONE:
            _same(name, "the last observation", infos["final_observation"], referee.last_prompt)
        _same(name, "solved", infos["solved"], referee.board.is_solved)
    return bool(shown)


def _check_rewards(name: str, game: PlayedGame, referee: Referee) -> bool:
    """Every reward is the one of its move, to the last bit."""
    infos = game.output.rollout_infos
    _same(name, "step_rewards", infos["step_rewards"], referee.step_rewards[: len(infos["step_rewards"])])
    if game.scored:
        _same(name, "the number of step_rewards", len(infos["step_rewards"]), len(referee.step_rewards))
        _same(name, "the components", infos["rewards"], referee.rewards)
        _same(name, "total_reward", game.output.total_reward, sum(referee.step_rewards))
    return game.scored


def _check_unscored(name: str, game: PlayedGame, referee: Referee) -> bool:
    """A game whose environment was lost has no reward and says why."""
    if game.scored:
        return False
    _same(name, "total_reward", game.output.total_reward, None)
    _same(name, "the components", game.output.rollout_infos["rewards"], {})
    _same(name, "the reason", game.output.stop_reason, StopReason.ENV_LOST)
    if not game.output.error:
        raise Difference(name, "no error is given")
    return True


def _check_steps(name: str, game: PlayedGame, referee: Referee) -> bool:
    """Every session got this game's reset and then its moves in order, each once; the last one got all of them."""
    sessions: dict[int, list[Received]] = {}
    for received in game.forwarded:
        if received.kind in ("reset", "step"):
            sessions.setdefault(received.session, []).append(received)
    for number, (reset, *steps) in sessions.items():
        _same(name, f"the first request of session {number}", (reset.kind, reset.data), ("reset", game.reset))
        kinds = {step.kind for step in steps}
        _same(name, f"the requests after the reset of session {number}", kinds or {"step"}, {"step"})
        sent = [step.data for step in steps]
        _same(name, f"the steps of session {number}", sent, referee.actions[: len(sent)])
    if game.scored:
        # The last one, unless that was opened in vain, to ask for the state of a game that was over.
        asked = "server_state" in game.output.rollout_infos
        whole = list(sessions)[-1] if asked else max(sessions, key=lambda number: len(sessions[number]))
        _same(name, f"the steps of session {whole}", [step.data for step in sessions[whole][1:]], referee.actions)
    return bool(sessions)


def _check_server(name: str, game: PlayedGame, referee: Referee) -> bool:
    """The server says of its own accord that it played this game and took so many steps."""
    state = game.output.rollout_infos.get("server_state")
    if state is None:
        return False
    must_be = {
        **game.reset,
        "step_count": len(referee.actions),
        "done": referee.ending is StopReason.ENV_DONE,
        "solved": referee.board.is_solved,
    }
    _same(name, "its state", {key: state.get(key) for key in must_be}, must_be)
    return True


CHECKS: dict[str, Callable[[str, PlayedGame, Referee], bool]] = {
    _OBSERVATIONS: _check_observations,
    "rewards belong to their moves": _check_rewards,
    "lost games are unscored": _check_unscored,
    "each step was sent once": _check_steps,
    "the server counts the same steps": _check_server,
}


def _same(check: str, what: str, is_so: object, must_be: object) -> None:
    if is_so != must_be:
        raise Difference(check, f"{what}\n{_shown(is_so)}\ninstead of\n{_shown(must_be)}")


def _shown(value: object) -> str:
    # Text with its lines, since most of it is boards.
    return re.sub(r"\\n", "\n", repr(value))


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
