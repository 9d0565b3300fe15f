"""Everything that one trajectory knows: its turns, rewards, environment and how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from schedulers.types import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    Exchange,
    Messages,
    RolloutInferRequest,
    RolloutOutput,
    StopReason,
    TurnRecord,
)

__all__ = ["Episode", "Turn"]

UNSCORED = frozenset({StopReason.ENV_LOST, StopReason.ERROR, StopReason.CANCELLED})
"""Endings that say nothing about what the model did."""


@dataclass(frozen=True)
class Turn:
    """One completion, exactly as it was sampled.

    Args:
        text: What the model said.
        finish_reason: ``"stop"`` or ``"length"``.
        prompt_ids: What was sampled from, shape ``(prompt_length,)``; None when unknown.
        token_ids: What was sampled (and what a scheduler put after it, mask 0), shape ``(length,)``; None when unknown.
        loss_mask: 1 on sampled tokens, shape ``(length,)``.
        logprobs: One for each token with mask 1, shape ``(sum(loss_mask),)``; None when unknown.
        continues: This completion goes on in the previous turn's assistant message.
    """

    text: str
    finish_reason: str
    prompt_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    loss_mask: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    continues: bool = False

    @classmethod
    def from_choice(
        cls, choice: ChatCompletionResponseChoice, prompt_ids: Sequence[int] | None, *, continues: bool = False
    ) -> Turn:
        """Take a completion as the engine reports it; log-probabilities that do not match its tokens are left out."""
        token_ids = None if choice.token_ids is None else tuple(choice.token_ids)
        logprobs = choice_logprobs(choice)
        if logprobs is not None and (token_ids is None or len(logprobs) != len(token_ids)):
            logprobs = None
        return cls(
            text=choice.message.content,
            finish_reason=choice.finish_reason,
            prompt_ids=None if prompt_ids is None else tuple(prompt_ids),
            token_ids=token_ids,
            loss_mask=(1,) * len(token_ids or ()),
            logprobs=logprobs,
            continues=continues,
        )

    def with_tokens(
        self, token_ids: Sequence[int], loss_mask: Sequence[int] | None = None, logprobs: Sequence[float] | None = None
    ) -> Turn:
        """The same turn with the tokens that a scheduler's ``step`` gave for it.

        Raises:
            ValueError: The lengths do not fit each other.
        """
        mask = tuple(loss_mask) if loss_mask is not None else (1,) * len(token_ids)
        if len(mask) != len(token_ids):
            raise ValueError(
                f"response_loss_mask has {len(mask)} entries and response_token_ids {len(token_ids)}; "
                "step must return as many of one as of the other"
            )
        kept = self.logprobs if logprobs is None else tuple(logprobs)
        if not any(mask):
            kept = ()  # nothing that was sampled is left, so nothing of it is unknown
        if kept is not None and len(kept) == len(token_ids):  # also one for each token that was not sampled
            kept = tuple(value for value, sampled in zip(kept, mask, strict=True) if sampled)
        if kept is not None and len(kept) != sum(mask):
            if logprobs is not None:
                raise ValueError(
                    f"rollout_logprobs has {len(kept)} entries for {sum(mask)} tokens with loss mask 1; "
                    "step must return one for each"
                )
            kept = None
        return replace(self, token_ids=tuple(token_ids), loss_mask=mask, logprobs=kept)


@dataclass
class Episode:
    """One trajectory from its request to its output.

    Subclasses of the schedulers keep what they must remember in ``state``; nothing else holds anything of a trajectory.

    Args:
        request: The request as it stands; its ``messages`` grow from turn to turn.
        max_turns: The turn limit of this trajectory; None is none.
        history: The conversation as the last completion left it; shows whether a hook has rewritten it since.
        exchanges: What passed between the trajectory and its server: the start, then one for each turn.
        uuid: The request's when the trajectory began. It is known by this name, whatever hooks do to the request.
    """

    request: RolloutInferRequest
    max_turns: int | None = None
    turns: list[Turn] = field(default_factory=list)
    response: ChatCompletionResponse | None = None
    stop_reason: StopReason | None = None
    exception: BaseException | None = None
    infos: dict[str, Any] = field(default_factory=dict)
    history: Messages = field(default_factory=list)
    env: Any = None
    state: Any = None
    pending_observation: str | None = None
    step_rewards: list[float] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    parse_failures: int = 0
    sampling_seconds: float = 0.0
    environment_seconds: float = 0.0
    waiting_seconds: float = 0.0
    exchanges: list[Exchange] = field(default_factory=list)
    closing: bool = False
    uuid: str = field(init=False)
    _clock: list[tuple[float, float, float]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.uuid = self.request.uuid

    def add_turn(self, turn: Turn) -> None:
        """Take in a completion, before anything is done with it."""
        self.turns.append(turn)
        self._clock.append((self.sampling_seconds, self.environment_seconds, self.waiting_seconds))

    def stop(self, reason: StopReason) -> None:
        """End the trajectory; the first reason stays."""
        if self.stop_reason is None:
            self.stop_reason = reason

    def fail(self, reason: StopReason, exception: BaseException) -> None:
        """End the trajectory as unscored, whatever had ended it before."""
        self.stop_reason = reason
        self.exception = exception

    @property
    def scored(self) -> bool:
        """Whether its rewards say something about the model."""
        return self.stop_reason not in UNSCORED

    @property
    def total_reward(self) -> float | None:
        """The sum of the step rewards; None when unscored."""
        return sum(self.step_rewards) if self.scored else None

    @property
    def segments(self) -> list[list[Turn]]:
        """The turns, cut wherever a prompt does not extend the turn before it."""
        segments: list[list[Turn]] = []
        for turn in self.turns:
            if segments and _extends(turn, segments[-1][-1]):
                segments[-1].append(turn)
            else:
                segments.append([turn])
        return segments

    def tokens_before(self, prompt_ids: Sequence[int]) -> int:
        """How many tokens of its segment stand before a turn with this prompt; 0 where it begins a segment."""
        if not self.turns or not _extends(Turn("", "stop", tuple(prompt_ids)), self.turns[-1]):
            return 0
        return len(prompt_ids) - len(self.segments[-1][0].prompt_ids or ())

    def to_output(self) -> RolloutOutput:
        """The trajectory as trainers take it."""
        output = RolloutOutput(
            response=self.response,
            messages=self.request.messages,
            uuid=self.uuid,
            exception=self.exception,
            rollout_infos={**self.infos, **self._own_infos()},
            start=self.exchanges[0] if self.exchanges else None,
            turns=[self._record_of(number) for number in range(len(self.turns))],
        )
        if any(turn.token_ids is None for turn in self.turns):
            return output  # partly unknown is unknown: an empty list would read as "no tokens"
        has_logprobs = all(turn.logprobs is not None for turn in self.turns)
        ids: list[list[int]] = []
        masks: list[list[int]] = []
        logprobs: list[list[float]] = []
        for turn in self.turns:
            if not turn.continues:
                ids.append([])
                masks.append([])
                logprobs.append([])
            ids[-1] += turn.token_ids or ()
            masks[-1] += self._mask(turn)
            logprobs[-1] += turn.logprobs or ()
        output.response_token_ids, output.response_loss_mask = ids, masks
        output.rollout_logprobs = logprobs if has_logprobs else None
        self._flatten_into(output, has_logprobs=has_logprobs)
        return output

    def _flatten_into(self, output: RolloutOutput, *, has_logprobs: bool) -> None:
        if not self.turns or any(turn.prompt_ids is None for turn in self.turns):
            return
        segment = self.segments[-1]
        start = len(segment[0].prompt_ids or ())
        ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        for turn in segment:
            between = (turn.prompt_ids or ())[start + len(ids) :]
            ids += [*between, *(turn.token_ids or ())]
            mask += [0] * len(between) + self._mask(turn)
            logprobs += [0.0] * len(between) + list(_spread(turn))
        output.prompt_token_ids = list(segment[0].prompt_ids or ())
        output.completion_token_ids = ids
        output.completion_mask = mask
        output.completion_logprobs = logprobs if has_logprobs else None

    def _record_of(self, number: int) -> TurnRecord:
        turn = self.turns[number]
        return TurnRecord(
            text=turn.text,
            finish_reason=turn.finish_reason,
            reward=self.step_rewards[number] if number < len(self.step_rewards) else None,
            exchange=self.exchanges[number + 1] if number + 1 < len(self.exchanges) else None,
            seconds=self._seconds_of(number) if len(self._clock) == len(self.turns) else None,
        )

    def _seconds_of(self, number: int) -> dict[str, float]:
        """A completion is taken in between its sampling and what the environment makes of it."""
        sampled = self._clock[number][0] - (self._clock[number - 1][0] if number else 0.0)
        last = number == len(self._clock) - 1
        end = (0.0, self.environment_seconds, self.waiting_seconds) if last else self._clock[number + 1]
        spent = (sampled, end[1] - self._clock[number][1], end[2] - self._clock[number][2])
        return dict(zip(("sampling", "environment", "waiting"), (round(value, 6) for value in spent), strict=True))

    def _mask(self, turn: Turn) -> list[int]:
        return list(turn.loss_mask) if self.scored else [0] * len(turn.loss_mask)

    def _own_infos(self) -> dict[str, Any]:
        return {
            "num_turns": len(self.turns),
            "stop_reason": None if self.stop_reason is None else self.stop_reason.value,
            "total_reward": self.total_reward,
            "step_rewards": list(self.step_rewards),
            "error": None if self.exception is None else f"{type(self.exception).__name__}: {self.exception}",
            "rewards": dict(self.rewards) if self.scored else {},
            "segments": len(self.segments),
            "sampling_seconds": round(self.sampling_seconds, 6),
            "environment_seconds": round(self.environment_seconds, 6),
            "waiting_seconds": round(self.waiting_seconds, 6),
        }


def choice_logprobs(choice: ChatCompletionResponseChoice) -> tuple[float, ...] | None:
    """The log-probabilities of a completion, one for each sampled token, or None when the engine gave none."""
    content: Iterable[dict[str, Any]] | None = (choice.logprobs or {}).get("content")
    return None if content is None else tuple(float(item["logprob"]) for item in content)


def _extends(turn: Turn, previous: Turn) -> bool:
    if turn.prompt_ids is None or previous.prompt_ids is None or previous.token_ids is None:
        return True  # nothing is known to the contrary, and nothing is made of it either
    known = previous.prompt_ids + previous.token_ids
    return turn.prompt_ids[: len(known)] == known


def _spread(turn: Turn) -> Iterable[float]:
    """The turn's log-probabilities at the places of its sampled tokens, 0.0 elsewhere."""
    values = iter(turn.logprobs or (0.0,) * sum(turn.loss_mask))
    return [next(values) if sampled else 0.0 for sampled in turn.loss_mask]
