"""What recorded games are worth to changed reward code: each is played again from its record alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from openenv_client import EnvironmentFailedError, ResetResult, StepResult
from schedulers.lockstep import rollout_fn_of, run_multi_turn
from schedulers.multi_turn import RolloutError, RolloutScheduler
from schedulers.openenv import OpenEnvScheduler
from schedulers.types import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)

__all__ = ["RescoreError", "rescore"]

# What was measured while the game was played, or follows from its tokens, a second game from the record cannot tell.
_KEPT = ("stop_reason", "segments", "recoveries", "sampling_seconds", "environment_seconds", "waiting_seconds")


class RescoreError(ValueError):
    """A game cannot be played again from its record."""


def rescore(record: Mapping[str, Any], make_scheduler: Callable[..., RolloutScheduler]) -> dict[str, Any]:
    """Play a recorded game again: the model says what it said, and the server answers what it answered.

    Everything that the scheduler makes of that is made anew: rewards, infos, the game's own state. An environment that
    lives in this process is really played, and has to show what it showed; that needs the record's ``row``.

    Args:
        record: As ``read_trajectories`` gives it.
        make_scheduler: Makes the scheduler of an engine.

    Returns:
        The record with its new rewards. One of an unscored game is returned as it is.

    Raises:
        RescoreError: The record lacks what is needed, or the scheduler no longer plays the game that was recorded.
        TypeError: The scheduler is none that plays turn by turn and makes one output of a trajectory.
    """
    recorded = record["rollout_infos"]
    if recorded.get("total_reward") is None:
        return dict(record)
    if record.get("turns") is None:
        raise RescoreError("it was recorded by a version that did not keep the environment's answers; play it again")
    replay = _Replay(record)
    output = _play(record, make_scheduler, replay)
    if output.total_reward is None:
        raise RescoreError(f"the scheduler failed: {output.error}") from output.exception
    replay.check_complete()
    # The conversation of a game that had no room for another turn goes on to what that would have read.
    if record.get("start") is None and output.messages != record["messages"][: len(output.messages)]:
        raise RescoreError(
            "its environment showed something else this time; one that runs in this process can be played again only "
            "if the row determines all that happens"
        )
    kept = {name: recorded[name] for name in _KEPT if name in recorded}
    turns = [{**turn, "reward": new.reward} for turn, new in zip(record["turns"], output.turns, strict=True)]
    return {**record, "rollout_infos": {**recorded, **output.rollout_infos, **kept}, "turns": turns}


def _play(record: Mapping[str, Any], make_scheduler: Callable[..., RolloutScheduler], replay: _Replay) -> RolloutOutput:
    scheduler = make_scheduler(replay)
    name = type(scheduler).__name__
    if type(scheduler).outputs_of is not RolloutScheduler.outputs_of:
        raise TypeError(f"{name} makes several outputs of a trajectory, which cannot be rescored")
    if isinstance(scheduler, OpenEnvScheduler):
        if record.get("start") is None:
            raise RescoreError(f"{name} plays on a server, but the record has no answers of one")
        # The only place where it gets an environment from.
        scheduler._make_wrapper = lambda env_config: replay  # type: ignore[method-assign, assignment, return-value]
    elif record.get("start") is not None:
        raise RescoreError(f"it was played on a server, and {name} does not play on one")
    request = RolloutInferRequest.from_row(record.get("row") or {})
    try:
        [output] = run_multi_turn(
            [request], None, scheduler, rollout_fn_of(replay), RequestConfig(), max_turns=len(record["turns"]) or None
        )
    except RolloutError as error:
        if isinstance(error.__cause__, RescoreError):
            raise error.__cause__ from None
        raise RescoreError(f"the scheduler failed: {error.__cause__!r}") from error
    return output


class _Replay:
    """The engine and the environment of a game that was recorded.

    Args:
        record: The game.
    """

    tokenizer = None
    recoveries: tuple[()] = ()

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._start = record.get("start")
        self._turns: list[dict[str, Any]] = record["turns"]
        ids, logprobs = record.get("response_token_ids") or [], record.get("rollout_logprobs") or []
        # Only where each turn has an entry of its own.
        self._ids = ids if len(ids) == len(self._turns) else [None] * len(self._turns)
        self._logprobs = logprobs if len(logprobs) == len(self._turns) else [None] * len(self._turns)
        self._taken = 0
        self._played: set[int] = set()

    async def infer_async(self, request: RolloutInferRequest, request_config: RequestConfig) -> ChatCompletionResponse:
        """Say what the model said in the next turn."""
        if self._taken == len(self._turns):
            raise RescoreError(f"the scheduler goes on after turn {self._taken}, the last one of the recorded game")
        turn, ids, logprobs = self._turns[self._taken], self._ids[self._taken], self._logprobs[self._taken]
        self._taken += 1
        choice = ChatCompletionResponseChoice(
            ChatMessage(turn["text"]),
            finish_reason=turn["finish_reason"],
            token_ids=ids,
            logprobs=None if logprobs is None else {"content": [{"logprob": value} for value in logprobs]},
        )
        return ChatCompletionResponse([choice])

    def reset(self) -> ResetResult:
        """Answer as the server did."""
        start = self._start or {}
        return ResetResult(start["observation"], start["metadata"])

    def step(self, action: dict[str, Any]) -> StepResult:
        """Answer as the server did to this very action."""
        exchange = self._turns[self._taken - 1]["exchange"] or {}
        sent = exchange.get("action")
        if action != sent:
            raise RescoreError(f"in turn {self._taken} the scheduler now plays {action}; the recorded game had {sent}")
        self._played.add(self._taken)
        if exchange["observation"] is None:
            raise EnvironmentFailedError("refused, as it was when the game was recorded", code="VALIDATION_ERROR")
        return StepResult(exchange["observation"], exchange["reward"], exchange["done"], exchange["metadata"])

    def close(self) -> None:
        """There is nothing to close."""

    def abort(self) -> None:
        """There is nothing to end."""

    def check_complete(self) -> None:
        """Refuse a game that went otherwise than the recorded one without that ``step`` could see it."""
        for number, turn in enumerate(self._turns, 1):
            sent = (turn["exchange"] or {}).get("action")
            if number > self._taken:
                raise RescoreError(f"the scheduler now ends the game after turn {self._taken} of {len(self._turns)}")
            if sent is not None and number not in self._played:
                raise RescoreError(f"in turn {number} the scheduler now plays nothing; the recorded game had {sent}")
