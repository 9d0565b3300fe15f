"""Env, the registry of environments, and GYMScheduler, which plays them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from schedulers.engines.base import InferEngine
from schedulers.engines.policies import Policy
from schedulers.episode import Episode
from schedulers.multi_turn import EnvError, MultiTurnScheduler, SchedulerOptions
from schedulers.names import did_you_mean
from schedulers.types import ChatCompletionResponseChoice, Messages, RolloutInferRequest, StopReason

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Env", "GYMScheduler", "Start", "Transition", "envs"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class Env(ABC):
    """An environment that lives in this process.

    Args:
        env_config: The ``env_config`` column of the dataset's row.

    Attributes:
        policies: Players of it without a model by name, as a scheduler may have them.
    """

    policies: ClassVar[Mapping[str, Policy]] = {}

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.env_config = env_config

    @abstractmethod
    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """Start an episode.

        Returns:
            The observation (the first user message), info for the record, and the system message (empty for none).
        """

    @abstractmethod
    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        """Act.

        Args:
            action: The conversation so far; the last message is the model's newest answer.

        Returns:
            The next observation, this step's reward, whether the episode is over, and info for the record.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release what the environment holds."""


envs: dict[str, type[Env]] = {}
"""Environments by name, for ``GYMScheduler(gym_env=…)`` and a row's ``env_config["name"]``."""


@dataclass(frozen=True)
class Start:
    """The first observation of an episode.

    Args:
        observation: What the model reads.
        system_message: Goes before it; empty for none.
        info: For the record.
    """

    observation: str
    system_message: str = ""
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Transition:
    """What a turn did to the environment.

    Args:
        observation: What the model reads next.
        reward: What this turn added.
        done: The episode is over.
        info: For the record.
    """

    observation: str
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class GYMScheduler(MultiTurnScheduler):
    """Plays an ``Env``: reset before the first turn, one step a turn, closed however the trajectory ends.

    A subclass for another sort of environment implements ``start_env``, ``step_env`` and ``close_env``; observations,
    rewards, infos and endings are kept here.

    Args:
        infer_engine: Samples the completions.
        max_turns: The most turns of a trajectory; None is no limit.
        gym_env: The name in ``envs`` of the environment for rows whose ``env_config`` names none.
        options: Keywords of ``RolloutScheduler``.
    """

    def __init__(
        self,
        infer_engine: InferEngine | None = None,
        max_turns: int | None = None,
        *,
        gym_env: str | None = None,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(infer_engine, max_turns, **options)
        self.gym_env_name = gym_env

    # -- the environment; what a subclass for another sort replaces ---------------------------------

    async def start_env(self, episode: Episode, env_config: dict[str, Any]) -> Start:
        """Make the trajectory's environment, keep it in ``episode.env`` and reset it."""
        env = self._create_env(env_config)
        episode.env = env
        observation, info, system_message = await _guard(env.reset(episode.request), f"{type(env).__name__}.reset")
        return Start(observation, system_message, info)

    async def step_env(self, episode: Episode, choice: ChatCompletionResponseChoice) -> Transition:
        """Let the newest completion act."""
        messages = deepcopy(episode.request.messages)
        observation, reward, done, info = await _guard(episode.env.step(messages), f"{type(episode.env).__name__}.step")
        return Transition(observation, float(reward), bool(done), info)

    async def close_env(self, episode: Episode) -> None:
        """Release ``episode.env``."""
        await episode.env.close()

    def _create_env(self, env_config: dict[str, Any]) -> Env:
        name = env_config.get("name") or self.gym_env_name
        if name not in envs:
            hint = did_you_mean(str(name), envs) or f"registered are {sorted(envs)}."
            raise ValueError(
                f"no environment is registered as {name!r}; {hint} Register yours: envs[{name!r}] = YourEnv"
            )
        return envs[name](env_config)

    # -- hooks --------------------------------------------------------------------------------------

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Reset an environment for each request and make its first observation the conversation."""
        # One that is cancelled by what it waits for ends like one that fails. When this call is cancelled, all are.
        await asyncio.gather(*(self._start(self.episode(request)) for request in requests), return_exceptions=True)

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Step the environment; its reward and observation are kept in the episode.

        Raises:
            ValueError: The reward is NaN or infinite, which would spoil those of the whole batch.
        """
        episode = self.episode(infer_request)
        started = time.perf_counter()
        transition = await self.step_env(episode, response_choice)
        episode.environment_seconds += time.perf_counter() - started
        if not math.isfinite(transition.reward):
            raise ValueError(f"the reward of turn {current_turn} is {transition.reward}; it must be a finite number")
        episode.step_rewards.append(transition.reward)
        episode.pending_observation = transition.observation
        infos = {"gym_done": transition.done, **transition.info}
        if transition.done:
            episode.stop(StopReason.ENV_DONE)
            infos["final_observation"] = transition.observation  # information only: no turn follows that could read it
        return {"done": transition.done, "rollout_infos": infos}

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Put the next observation into the conversation."""
        episode = self.episode(infer_request)
        if episode.pending_observation is not None:
            infer_request.messages.append({"role": "user", "content": episode.pending_observation})
            episode.pending_observation = None
        return {"infer_request": infer_request}

    async def on_trajectory_end(self, episode: Episode) -> None:
        """Close the environment. A fault in closing does not spoil what was played."""
        if episode.env is None or episode.closing:
            return
        episode.closing = True
        try:
            await self.close_env(episode)
        except Exception as error:  # noqa: BLE001 - the episode is over and its rewards stand
            # As text: a log record that is kept would keep the exception's frames, and the environment in them.
            text = f"{type(error).__name__}: {error}"
            logger.warning("closing the environment of trajectory %s failed: %s", episode.uuid, text)
        finally:
            episode.env = None
            episode.closing = False

    async def _finish(self, episode: Episode) -> None:
        try:
            await super()._finish(episode)
        finally:
            # A subclass's hook may have failed before it called ours, or have opened something after aclose.
            await GYMScheduler.on_trajectory_end(self, episode)

    async def _start(self, episode: Episode) -> None:
        with self.failures_end(episode):
            env_config = dict((episode.request.data_dict or {}).get("env_config") or {})
            started = time.perf_counter()
            start = await self.start_env(episode, env_config)
            episode.environment_seconds += time.perf_counter() - started
            system = env_config.get("system_message")
            if system is None:
                system = start.system_message
            messages = [{"role": "system", "content": system}] if system else []
            episode.request.messages = [*messages, {"role": "user", "content": start.observation}]
            over = episode.stop_reason is StopReason.ENV_DONE
            episode.infos.update({"gym_done": over, "fingerprint": fingerprint(start.observation), **start.info})


def fingerprint(text: str) -> str:
    """A short hash that tells whether two trajectories began in the same state."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


async def _guard(call: Awaitable[_T], name: str) -> _T:
    """Tell a fault of the environment from one of the scheduler."""
    try:
        return await call
    except Exception as error:
        raise EnvError(f"{name} raised {type(error).__name__}: {error}") from error
