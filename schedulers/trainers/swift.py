"""ms-swift 4.6: schedulers and environments of this package in its registries, for both of its modes.

A plugin for ``--external_plugins`` is three lines::

    from my_game import MyScheduler
    from schedulers.trainers.swift import register

    register("my_scheduler", MyScheduler)

``--multi_turn_scheduler my_scheduler`` then plays it, in colocate and in server mode. ms-swift's own loops drive the
turns; everything that is known of a trajectory is in our ``Episode``.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import uuid
import weakref
from collections import deque
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from schedulers.episode import Episode
from schedulers.extras import missing_extra
from schedulers.gym import Env, GYMScheduler, envs
from schedulers.loop_thread import LoopThread
from schedulers.multi_turn import RolloutError, RolloutScheduler
from schedulers.openenv import OpenEnvScheduler
from schedulers.types import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    Messages,
    RolloutInferRequest,
    StopReason,
)

try:
    from swift.infer_engine import protocol
    from swift.rewards import ORM, orms
    from swift.rollout.gym_env import Env as SwiftEnv
    from swift.rollout.gym_env import envs as swift_envs
    from swift.rollout.multi_turn import MultiTurnScheduler as SwiftMultiTurnScheduler
    from swift.rollout.multi_turn import multi_turns as swift_multi_turns
except ImportError as error:
    raise missing_extra("this adapter needs ms-swift", "swift", "swift") from error

__all__ = ["EnvironmentReward", "SwiftScheduler", "register"]

_MAX_UNSCORED = 32  # in a row; they teach nothing, and yet an optimizer with momentum would move the weights
_RECENT = 64  # scored trajectories, whose mean stands for the reward of one that has none


def register(
    name: str, thing: type[RolloutScheduler | Env | SwiftEnv], *, options: Mapping[str, Any] | None = None
) -> None:
    """Make a scheduler or an environment known to ms-swift. The last one of a name counts.

    Args:
        name: For ``--multi_turn_scheduler``; of an environment, for ``--gym_env`` and ``env_config["name"]``.
        thing: The class. An environment may be one of ms-swift's, which has the same methods.
        options: Keywords for the scheduler. ``max_turns`` counts where ``--max_turns`` is not given, and
            ``max_model_len`` is for this adapter: the context length, where ``--vllm_max_model_len`` makes it shorter
            than the model's.

    Raises:
        TypeError: The class is neither, or is a scheduler that overrides ``run`` or makes several outputs of a
            trajectory, which ms-swift's loops leave no room for.
    """
    if isinstance(thing, type) and issubclass(thing, (Env, SwiftEnv)):
        envs[name] = swift_envs[name] = thing
    elif isinstance(thing, type) and issubclass(thing, RolloutScheduler):
        for method in ("run", "outputs_of"):
            if getattr(thing, method) is not getattr(RolloutScheduler, method):
                raise TypeError(f"{thing.__name__} overrides {method}(), which ms-swift's loops do not call")
        members = {"scheduler_class": thing, "options": dict(options or {}), "__doc__": thing.__doc__}
        swift_multi_turns[name] = type(thing.__name__, (SwiftScheduler,), members)
    else:
        raise TypeError(f"register takes the class of a scheduler or of an environment, not {thing!r}")


class EnvironmentReward(ORM):  # type: ignore[misc]  # ms-swift is untyped
    """``--reward_funcs environment_reward``: the trajectory's total reward, None where it is unscored.

    For ``--use_vllm false``, where ms-swift 4.6 does not read ``--use_gym_env``.
    """

    def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        """The rewards of a batch; ``rollout_infos`` is the column that is read."""
        infos = columns["rollout_infos"]
        return [info["total_reward"] if info.get("scored", True) else None for info in infos]


orms["environment_reward"] = EnvironmentReward


@dataclass
class _Trajectory:
    """A trajectory as both sides know it.

    Args:
        episode: What we know of it.
        prompt_tokens: The length of its first prompt, where there is a limit to what comes after.
        masks: Loss masks that ms-swift keeps; the very lists, so that they can still be set to 0.
        logprobs: The same for log-probabilities.
        ended: It is closed and counted.
    """

    episode: Episode
    prompt_tokens: int = 0
    masks: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    ended: bool = False

    @property
    def over(self) -> bool:
        return self.episode.stop_reason is not None

    @property
    def void(self) -> bool:
        """Nothing of it is to be trained on: it is unscored, or was over before its first turn."""
        return self.over and not (self.episode.scored and self.episode.turns)

    def blank(self) -> None:
        """Take back what ms-swift was given to train on."""
        for mask in self.masks:
            mask[:] = [0] * len(mask)
        for values in self.logprobs:
            values.clear()


class SwiftScheduler(SwiftMultiTurnScheduler):  # type: ignore[misc]
    """Plays a scheduler of this package in ms-swift's loops; ``register`` makes a subclass for each.

    A whole turn (environment, rewards, limits, and the end with all that it closes) happens in ``on_turn_end``, which
    both loops call; the other hooks tell what came of it. The work is done in an event loop of the scheduler's own:
    ms-swift calls the hooks from short-lived ones, and what an environment opens in one is dead in the next.

    ``rollout_infos["total_reward"]`` is always a number, since ms-swift takes nothing else. For an unscored trajectory
    it is the mean of the latest scored ones, which moves the baseline of its group least; its loss mask is 0 but for
    the last token, since the trainer takes no sample without any; ``scored`` is False and ``error`` says why.

    Args:
        infer_engine: ms-swift's engine; None in colocate mode.
        max_turns: The most turns of a trajectory; None or 0 is no limit.
        tokenizer: The model's, where there is no engine.
        template: ms-swift's, where there is no engine.
        gym_env: The environment for rows that name none.
        use_gym_env: Passed by ``swift rollout``; it is the trainer's business.

    Raises:
        ValueError: ``gym_env`` was given to a scheduler whose environments have no names.
    """

    scheduler_class: ClassVar[type[RolloutScheduler]]
    options: ClassVar[Mapping[str, Any]]

    def __init__(
        self,
        infer_engine: Any = None,
        max_turns: int | None = None,
        *,
        tokenizer: Any = None,
        template: Any = None,
        gym_env: str | None = None,
        use_gym_env: bool | None = None,
    ) -> None:
        options = dict(self.options)
        self._max_model_len = options.pop("max_model_len", None)
        max_turns = max_turns or options.pop("max_turns", None)
        super().__init__(infer_engine, max_turns, tokenizer=tokenizer, template=template)
        if gym_env is not None:
            if not issubclass(self.scheduler_class, GYMScheduler) or issubclass(self.scheduler_class, OpenEnvScheduler):
                raise ValueError(
                    f"--gym_env {gym_env} means nothing to {self.scheduler_class.__name__}; leave it out "
                    "(what makes the trainer take the environment's reward is --use_gym_env true)"
                )
            options["gym_env"] = gym_env
        self.scheduler = self.scheduler_class(None, **{"max_turns": max_turns, "tokenizer": self.tokenizer, **options})
        self._loop = LoopThread("swift-rollout")
        self._trajectories: dict[str, _Trajectory] = {}
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._unscored = 0

    # -- what ms-swift calls ------------------------------------------------------------------------

    async def on_trajectory_start(self, requests: list[Any]) -> None:
        """Start a trajectory for each request; one that cannot be started is over, and its siblings go on.

        Raises:
            RolloutError: The last 32 trajectories were all unscored.
        """
        if self._unscored >= _MAX_UNSCORED:
            raise RolloutError(f"the last {self._unscored} trajectories are all unscored; see the errors logged above")
        trajectories = [self._register(request) for request in requests]
        await asyncio.gather(*(self._loop.call(self._start(trajectory)) for trajectory in trajectories))
        for request, trajectory in zip(requests, trajectories, strict=True):
            request.messages = [dict(message) for message in trajectory.episode.request.messages]
            if self.scheduler.max_trajectory_tokens is not None:
                trajectory.prompt_tokens = self._count_tokens(request, request.messages) or 0

    async def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        """Play the turn to its end. Whether it was the last one, ``check_finished`` tells."""
        trajectory = self._trajectory(infer_request)
        if not trajectory.over:
            await self._loop.call(self._take_turn(trajectory, infer_request, _response(response_choice)))
        if trajectory.void and response_choice.logprobs is not None:
            response_choice.logprobs = {"content": response_choice.logprobs["content"][-1:]}  # as the mask will be
        return {"rollout_infos": self._infos(trajectory.episode)}

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        """Whether the trajectory is over, for whatever reason."""
        return self._trajectory(infer_request).over

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        """Hand over what the model reads next, and the turn's tokens where the scheduler changed them."""
        trajectory = self._trajectory(infer_request)
        episode, messages = trajectory.episode, infer_request.messages
        # Earlier answers stand there as token ids; they stay, unless the scheduler has rewritten what was before.
        known = len(messages) - 1
        if episode.request.messages[: len(episode.history)] != episode.history:
            self.scheduler.warn_once(
                "rewritten",
                f"{self.scheduler_class.__name__} rewrites earlier messages, but ms-swift shows the model its answers "
                "as they were sampled, and trains on them so",
            )
            known = 0
        messages[known:] = [dict(message) for message in episode.request.messages[known:]]
        turn = episode.turns[-1]
        result: dict[str, Any] = {"infer_request": infer_request}
        if turn.token_ids is not None:
            ids, mask = self.get_response_token_data(
                infer_request, response_choice, turn.continues, list(turn.token_ids), list(turn.loss_mask)
            )
            result.update(response_token_ids=ids, response_loss_mask=mask)
        if turn.logprobs is not None:
            result["rollout_logprobs"] = list(turn.logprobs)
            trajectory.logprobs.append(result["rollout_logprobs"])
        return result

    def get_response_token_data(
        self,
        infer_request: Any,
        response_choice: Any,
        is_continuation: bool = False,
        response_token_ids: list[int] | None = None,
        response_loss_mask: list[int] | None = None,
    ) -> tuple[list[int], list[int]]:
        """The ids and the loss mask of a turn, as ms-swift wants them.

        Of a trajectory from which there is nothing to learn the last token is left: the trainer fails on a sample
        without any.
        """
        ids, mask = super().get_response_token_data(
            infer_request, response_choice, is_continuation, response_token_ids, response_loss_mask
        )
        trajectory = self._trajectory(infer_request)
        if trajectory.void:
            mask = [0] * (len(mask) - 1) + [1] * bool(mask)
        trajectory.masks.append(mask)
        return ids, mask

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
        """Play one trajectory in server mode; whatever the engine raises ends this one only.

        Raises:
            ValueError: A trajectory with this uuid is being played.
        """
        if infer_request.uuid in self._trajectories:
            raise ValueError(f"two trajectories with the uuid {infer_request.uuid!r}; give each request one of its own")
        try:
            return await super().run(infer_request, request_config, **kwargs)
        except RolloutError:
            raise
        except Exception as error:
            if infer_request.uuid not in self._trajectories:
                raise  # ms-swift itself, before there was anything to fail
            trajectory = self._trajectory(infer_request)
            await self._loop.call(self._fail(trajectory, error))
            return self._empty_output(trajectory.episode)
        finally:
            if infer_request.uuid in self._trajectories:
                self._forget(self._trajectories[infer_request.uuid])

    async def async_infer(self, infer_requests: list[Any], request_config: Any, **kwargs: Any) -> list[Any]:
        """Play a batch in server mode.

        Raises:
            RolloutError: Every trajectory ended in an exception that is not the environment's.
        """
        outputs: list[Any] = await super().async_infer(infer_requests, request_config, **kwargs)
        infos = [output.rollout_infos for output in outputs]
        if infos and all(info["stop_reason"] == StopReason.ERROR.value for info in infos):
            raise RolloutError(f"all {len(infos)} trajectories ended in an exception, the first: {infos[0]['error']}")
        return outputs

    def close(self) -> None:
        """End what is open and the thread; for tests, since ms-swift has no such call."""
        self._loop.run(self.scheduler.aclose())
        self._loop.close()

    # -- in the event loop of its own ---------------------------------------------------------------

    async def _start(self, trajectory: _Trajectory) -> None:
        episode = trajectory.episode
        try:
            with self.scheduler.failures_end(episode):
                await self.scheduler.on_trajectory_start([episode.request])
        finally:
            await self._end_if_over(trajectory)

    async def _take_turn(self, trajectory: _Trajectory, native: Any, response: ChatCompletionResponse) -> None:
        episode = trajectory.episode
        try:
            with self.scheduler.failures_end(episode):
                await self.scheduler.take_turn(episode, response)
                if not trajectory.over and not self._has_room(trajectory, native):
                    episode.stop(StopReason.CONTEXT)
        finally:
            await self._end_if_over(trajectory)

    async def _fail(self, trajectory: _Trajectory, error: Exception) -> None:
        with self.scheduler.failures_end(trajectory.episode):
            raise error
        await self._end_if_over(trajectory)

    async def _end_if_over(self, trajectory: _Trajectory) -> None:
        episode = trajectory.episode
        if not trajectory.over or trajectory.ended:
            return
        trajectory.ended = True
        try:
            await self.scheduler.end_trajectory(episode)  # in which it may still come to be unscored
        finally:
            if episode.total_reward is not None:
                self._recent.append(episode.total_reward)
                self._unscored = 0
            elif episode.stop_reason is not StopReason.CANCELLED:
                self._unscored += 1
            if trajectory.void:
                trajectory.blank()

    # -- small things -------------------------------------------------------------------------------

    def _register(self, native: Any) -> _Trajectory:
        native.uuid = native.uuid or uuid.uuid4().hex
        messages = [dict(message) for message in native.messages]
        if messages and messages[-1]["role"] == "assistant":
            messages.pop()  # a dataset's reference answer is not part of the prompt
        request = RolloutInferRequest(messages, native.data_dict or {}, native.uuid)
        [episode] = self.scheduler.begin_trajectories([request])
        trajectory = self._trajectories[native.uuid] = _Trajectory(episode)
        # ms-swift drops a batch without a word when its engine raises: then its requests go, and this is told.
        weakref.finalize(native, self._forget, trajectory).atexit = False
        return trajectory

    def _trajectory(self, native: Any) -> _Trajectory:
        try:
            return self._trajectories[native.uuid]
        except KeyError:
            raise KeyError(f"no trajectory with uuid {native.uuid!r}: on_trajectory_start was not called") from None

    def _forget(self, trajectory: _Trajectory) -> None:
        """Drop a trajectory, and end it if nothing has. Called by the garbage collector too: it must not wait."""
        episode = trajectory.episode
        if self._trajectories.get(episode.uuid) is trajectory:
            del self._trajectories[episode.uuid]
        if not trajectory.over:
            episode.fail(StopReason.CANCELLED, asyncio.CancelledError("ms-swift dropped the trajectory"))
            self._loop.submit(self._end_if_over(trajectory))

    def _infos(self, episode: Episode) -> dict[str, Any]:
        infos = episode.to_output().rollout_infos
        if infos["total_reward"] is None:
            infos["total_reward"] = statistics.fmean(self._recent) if self._recent else 0.0
        return {**infos, "scored": episode.scored}

    def _has_room(self, trajectory: _Trajectory, native: Any) -> bool:
        """Whether the next prompt leaves room for an answer as long as the longest so far.

        ms-swift has no such check: one prompt that is too long ends the whole batch in an exception.
        """
        episode = trajectory.episode
        tokens = self._count_tokens(native, episode.request.messages)
        if tokens is None:
            return True
        tokens += max(1, *(len(turn.token_ids or ()) for turn in episode.turns))
        context = (
            self._max_model_len
            or getattr(self.infer_engine, "max_model_len", None)
            or self._swift_template.model_info.max_model_len
        )
        trajectory_limit = self.scheduler.max_trajectory_tokens
        fits = trajectory_limit is None or tokens - trajectory.prompt_tokens <= trajectory_limit
        return fits and (context is None or tokens <= context)

    def _count_tokens(self, native: Any, messages: Messages) -> int | None:
        """The length of a prompt; None when it is unknown."""
        if self._swift_template is None:
            return None
        template = copy(self._swift_template)  # the trainer's has a mode of its own
        template.max_length = None
        template.set_mode("vllm")
        return len(template.encode(replace(native, messages=messages))["input_ids"])

    @property
    def _swift_template(self) -> Any:
        return self._template if self._template is not None else getattr(self.infer_engine, "template", None)

    def _empty_output(self, episode: Episode) -> Any:
        """What stands for a trajectory that ms-swift's loop has let fall: its prompt and one token."""
        prompt = list(itertools.takewhile(lambda message: message["role"] != "assistant", episode.request.messages))
        answer = protocol.ChatMessage(role="assistant", content="")
        token_ids = [getattr(self.tokenizer, "eos_token_id", None) or 0]
        choice = protocol.ChatCompletionResponseChoice(0, answer, "stop", token_ids=token_ids)
        usage = protocol.UsageInfo(0, 0, 0)
        return protocol.RolloutOutput(
            response=protocol.ChatCompletionResponse("", [choice], usage, id=episode.uuid),
            messages=[*prompt, {"role": "assistant", "content": ""}],
            response_token_ids=[token_ids],
            response_loss_mask=[[1]],
            rollout_infos=self._infos(episode),
        )


def _response(native: Any) -> ChatCompletionResponse:
    """A completion of ms-swift's engine as ours take it."""
    ids = None if native.token_ids is None else list(native.token_ids)
    choice = ChatCompletionResponseChoice(
        ChatMessage(native.message.content or ""),
        finish_reason=native.finish_reason or "stop",
        token_ids=ids,
        logprobs=native.logprobs,
    )
    return ChatCompletionResponse([choice])
