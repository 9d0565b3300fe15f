"""The values that travel between trainers, schedulers and engines.

Names and fields follow what users of ms-swift's rollout schedulers know, so that a scheduler written for it reads the
same here. Everything is a plain dataclass; nothing in this module does I/O.
"""

from __future__ import annotations

import enum
import uuid as _uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from schedulers.checks import check_number, check_whole

__all__ = [
    "ChatCompletionResponse",
    "ChatCompletionResponseChoice",
    "ChatMessage",
    "Exchange",
    "Message",
    "Messages",
    "RequestConfig",
    "RolloutInferRequest",
    "RolloutOutput",
    "StopReason",
    "TurnRecord",
]

Message: TypeAlias = dict[str, Any]
"""One chat message: ``{"role": "system" | "user" | "assistant", "content": str}`` plus extras that engines ignore."""

Messages: TypeAlias = list[Message]


class StopReason(str, enum.Enum):
    """Why a trajectory ended. Set once, by whatever ended it first."""

    ENV_DONE = "env_done"
    """The environment said that the episode is over."""
    FINISHED = "finished"
    """``check_finished`` or a hook ended it; also the only ending of a single-turn rollout that was not cut."""
    MAX_TURNS = "max_turns"
    """The turn limit was reached."""
    LENGTH = "length"
    """The engine cut a completion at its token limit."""
    CONTEXT = "context"
    """The next prompt would not have left room for a completion, or the trajectory reached its own token limit."""
    PARSE_ERROR = "parse_error"
    """Too many completions in a row held no action."""
    ENV_LOST = "env_lost"
    """The environment failed or its session was lost. The trajectory is unscored."""
    ERROR = "error"
    """A hook or the engine raised. The trajectory is unscored."""
    CANCELLED = "cancelled"
    """The task that ran it was cancelled. The trajectory is unscored."""

    def __str__(self) -> str:
        return self.value


@dataclass
class RolloutInferRequest:
    """One trajectory to roll out.

    Args:
        messages: The conversation so far. Schedulers that play an environment replace it by the first observation and
            append to it turn by turn.
        data_dict: Further columns of the dataset's row; ``env_config`` is the one that environments read.
        uuid: Names the trajectory; unique among those that run at the same time.
        prompt_token_ids: The exact prompt to sample from, shape ``(prompt_length,)``. Set by the scheduler, which
            extends it from turn to turn. When it is not None an engine samples from it and does not render
            ``messages``.
        max_tokens: The most tokens of the next completion. Set by ``run_multi_turn``, where a whole batch has one
            ``RequestConfig`` and some trajectories have less room left than it says.
    """

    messages: Messages = field(default_factory=list)
    data_dict: dict[str, Any] = field(default_factory=dict)
    uuid: str = field(default_factory=lambda: _uuid.uuid4().hex)
    prompt_token_ids: list[int] | None = None
    max_tokens: int | None = None

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> RolloutInferRequest:
        """Make a request of a dataset row: known keys become fields, all others go to ``data_dict``.

        Raises:
            TypeError: The row is no mapping, ``messages`` is not a list of messages, or ``env_config`` is no mapping.
        """
        if not isinstance(row, Mapping):
            raise TypeError(f"a request must be a RolloutInferRequest or a row with 'messages', not {row!r}")
        known = {"messages", "data_dict", "uuid"}
        messages = row.get("messages") or []
        if not isinstance(messages, (list, tuple)) or not all(isinstance(message, Mapping) for message in messages):
            raise TypeError(f"'messages' of a row must be a list of {{'role': …, 'content': …}}, not {messages!r}")
        if not isinstance(row.get("env_config") or {}, Mapping):
            raise TypeError(f"'env_config' of a row must be a mapping, not a {type(row['env_config']).__name__}")
        extras = {key: value for key, value in row.items() if key not in known}
        kwargs: dict[str, Any] = {"messages": [dict(message) for message in messages]}
        if row.get("uuid") is not None:
            kwargs["uuid"] = str(row["uuid"])
        return cls(data_dict={**(row.get("data_dict") or {}), **extras}, **kwargs)


@dataclass(frozen=True)
class RequestConfig:
    """How to sample. Limits are per turn: ``max_tokens`` bounds one completion, not a trajectory.

    Args:
        max_tokens: The most tokens one completion may have; None leaves it to the engine (the room in the context).
        temperature: 0 is greedy.
        top_p: Nucleus sampling; 1 is off.
        top_k: Sample among the k likeliest tokens; 0 is off.
        n: Completions per request. Schedulers take 1 only.
        seed: Makes sampling repeatable where the engine can do so.
        stop: Texts that end a completion.
        logprobs: Return the log-probability of each sampled token.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = True

    def __post_init__(self) -> None:
        check_whole("max_tokens", self.max_tokens, least=1, none="the room in the context")
        check_number("temperature", self.temperature)
        check_number("top_p", self.top_p)
        check_whole("top_k", self.top_k)
        check_whole("n", self.n)
        check_whole("seed", self.seed, none="no seed")
        if isinstance(self.stop, str):  # each of its characters would end a completion
            raise TypeError(f"stop must be a tuple of texts, not a text; write ({self.stop!r},)")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, not {self.top_k}")


@dataclass
class ChatMessage:
    """What the model said."""

    content: str = ""
    role: str = "assistant"


@dataclass
class ChatCompletionResponseChoice:
    """One completion.

    Args:
        message: The text.
        finish_reason: ``"stop"`` or ``"length"``.
        token_ids: The sampled ids, the end token included, shape ``(completion_length,)``. None when the engine cannot
            tell them; never an empty stand-in.
        logprobs: ``{"content": [{"logprob": float}, …]}``, one entry for each sampled id, or None.
    """

    message: ChatMessage
    index: int = 0
    finish_reason: str = "stop"
    token_ids: list[int] | None = None
    logprobs: dict[str, Any] | None = None


@dataclass
class ChatCompletionResponse:
    """An engine's answer.

    Args:
        choices: One completion for each that was asked for.
        prompt_token_ids: The ids that were sampled from, or None when the engine cannot tell.
    """

    choices: list[ChatCompletionResponseChoice]
    model: str = ""
    prompt_token_ids: list[int] | None = None
    usage: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Exchange:
    """What passed between a trajectory and its server: the start, or one turn.

    Args:
        action: What was sent; None at the start, and when the completion held no action.
        observation: What came back; None when nothing was sent, or when the server refused it unseen.
        reward: The environment's own reward of this step.
        done: The environment said that the episode is over.
        metadata: What the server added.
    """

    action: dict[str, Any] | None = None
    observation: dict[str, Any] | None = None
    reward: float = 0.0
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TurnRecord:
    """One turn, for the record.

    Args:
        text: What the model said.
        finish_reason: ``"stop"`` or ``"length"``.
        reward: What the turn added to ``total_reward``; None when it was not judged.
        exchange: What the server was asked and answered; None without a server, and when its answer never came.
        seconds: How long ``sampling`` and ``environment`` took; ``waiting`` is the part of the latter in which the
            trajectory waited for its turn. None when unknown.
    """

    text: str
    finish_reason: str = "stop"
    reward: float | None = None
    exchange: Exchange | None = None
    seconds: dict[str, float] | None = None


@dataclass
class RolloutOutput:
    """A finished trajectory.

    Args:
        response: The last answer of the engine; None when there was none.
        messages: The whole conversation.
        uuid: The request's.
        response_token_ids: Ids by turn, shape ``(turns, tokens of that turn)``; None when any turn's ids are unknown.
        response_loss_mask: 1 on sampled tokens, 0 on everything else; the same shape. All 0 when unscored.
        rollout_logprobs: Log-probabilities by turn; one for each token with mask 1. None when any is unknown.
        rollout_infos: What the hooks reported; always ``num_turns``, ``stop_reason``, ``total_reward`` and ``error``.
        prompt_token_ids: The prompt of the first turn, or None when unknown. Of a trajectory that was split (a chat
            template rewrote its history, ``rollout_infos["segments"] > 1``) this and the three fields below show the
            last segment.
        completion_token_ids: Everything after that prompt, environment text included, in one row; None when unknown.
        completion_mask: 1 on sampled tokens of ``completion_token_ids``, else 0.
        completion_logprobs: The log-probability of each token of ``completion_token_ids``; 0.0 where the mask is 0.
        start: The server's first answer; None without a server.
        turns: The turns one by one.
        exception: What was raised inside the trajectory, for callers in the same process; never recorded.
    """

    response: ChatCompletionResponse | None
    messages: Messages
    uuid: str = ""
    response_token_ids: list[list[int]] | None = None
    response_loss_mask: list[list[int]] | None = None
    rollout_logprobs: list[list[float]] | None = None
    rollout_infos: dict[str, Any] = field(default_factory=dict)
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    completion_mask: list[int] | None = None
    completion_logprobs: list[float] | None = None
    start: Exchange | None = None
    turns: list[TurnRecord] = field(default_factory=list)
    exception: BaseException | None = field(default=None, repr=False, compare=False)

    @property
    def stop_reason(self) -> StopReason:
        """Why it ended."""
        return StopReason(self.rollout_infos["stop_reason"])

    @property
    def total_reward(self) -> float | None:
        """The sum of the step rewards, or None when the trajectory is unscored."""
        reward: float | None = self.rollout_infos.get("total_reward")
        return reward

    @property
    def error(self) -> str | None:
        """What went wrong, or None."""
        error: str | None = self.rollout_infos.get("error")
        return error
