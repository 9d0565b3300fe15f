"""RolloutScheduler and MultiTurnScheduler: the hooks, and the one loop that plays a trajectory."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from openenv_client import ConfigurationError, OpenEnvError, RequestError, UsageError
from schedulers.checks import as_dict, check_whole
from schedulers.engines.base import ContextOverflowError, InferEngine, Tokenizer
from schedulers.engines.policies import Policy
from schedulers.episode import Episode, Turn
from schedulers.tokens import ChatPrompts
from schedulers.types import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    StopReason,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "EnvError",
    "MultiTurnScheduler",
    "RolloutError",
    "RolloutScheduler",
    "SchedulerOptions",
    "raise_if_all_failed",
]

logger = logging.getLogger(__name__)


class EnvError(RuntimeError):
    """An environment in this process raised; what it raised is the cause."""


class RolloutError(RuntimeError):
    """Every trajectory of a batch ended in an exception of a hook or of the engine; the first one is the cause."""


class SchedulerOptions(TypedDict, total=False):
    """The keywords of ``RolloutScheduler``, for the signatures of its subclasses."""

    tokenizer: Tokenizer | None
    template_kwargs: Mapping[str, Any] | None
    max_trajectory_tokens: int | None
    extra_rewards: Mapping[str, Callable[[Episode], float]] | None


class RolloutScheduler:
    """Samples one completion for each request, between the hooks that all schedulers share.

    Whatever goes wrong inside a trajectory ends that trajectory only: it is logged with its traceback, and the output
    says so in ``rollout_infos["error"]``, with ``total_reward`` None and a loss mask of zeros.

    Args:
        infer_engine: Samples the completions.
        max_turns: The most turns of a trajectory; None is no limit.
        tokenizer: Used instead of the engine's.
        template_kwargs: Further variables of the chat template, such as ``{"enable_thinking": False}``.
        max_trajectory_tokens: The most tokens after the first prompt, environment text included (a trainer's completion
            length); None is no limit. ``RequestConfig.max_tokens`` is the limit of one turn.
        extra_rewards: Further reward components by name, each a function of a trajectory that is over and scored (0.0
            when it had no turn). They stand in ``rollout_infos["rewards"]`` and leave ``total_reward`` as it is; what
            they weigh beside it is the trainer's to say.

    Attributes:
        policies: Players without a model by name, for ``openenv-rollout eval --policy``. Each is the script of a
            ``ScriptedEngine``: a function of a request and the turn, from 0, that returns the answer.

    Raises:
        ValueError: A limit is below 1.
    """

    policies: ClassVar[Mapping[str, Policy]] = {}
    _keeps_segments: ClassVar[bool] = False

    def __init__(
        self,
        infer_engine: InferEngine | None = None,
        max_turns: int | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        max_trajectory_tokens: int | None = None,
        extra_rewards: Mapping[str, Callable[[Episode], float]] | None = None,
    ) -> None:
        check_whole("max_turns", max_turns, least=1, none="no limit")
        check_whole("max_trajectory_tokens", max_trajectory_tokens, least=1, none="no limit")
        self.infer_engine = infer_engine
        self.max_turns = max_turns
        self.max_trajectory_tokens = max_trajectory_tokens
        self.extra_rewards = as_dict("extra_rewards", extra_rewards)
        if "total_reward" in self.extra_rewards:
            raise ValueError("extra_rewards: 'total_reward' is the environment's; give yours another name")
        self._tokenizer = tokenizer
        self._template_kwargs = as_dict("template_kwargs", template_kwargs)
        self._prompts: ChatPrompts | None = None
        self._episodes: dict[str, Episode] = {}
        self._warned: set[str] = set()

    # -- hooks --------------------------------------------------------------------------------------

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Prepare each trajectory before its first turn, for instance by putting an observation into its messages.

        Args:
            requests: The trajectories that start; changed in place. One at a time in ``run``, a batch in lockstep.
        """

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Act on a completion, which already stands in the messages.

        Args:
            infer_request: The trajectory.
            response_choice: The completion.
            current_turn: Its number, from 1.

        Returns:
            Optional keys: ``"done"`` (True ends the trajectory; False leaves it to the other rules) and
            ``"rollout_infos"`` (merged into the trajectory's).
        """
        return {}

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Whether the trajectory ends with this turn. A single-turn rollout always does."""
        return True

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Prepare the next turn, as a rule by appending a user message.

        Returns:
            ``"infer_request"`` (the trajectory, the same object or another) and, all optional,
            ``"response_token_ids"``, ``"response_loss_mask"`` and ``"rollout_logprobs"``, which replace the engine's
            for this turn, and ``"rollout_infos"``.
        """
        return {"infer_request": infer_request}

    async def on_trajectory_end(self, episode: Episode) -> None:
        """Release what the trajectory holds, however it ended; called exactly once."""

    # -- running ------------------------------------------------------------------------------------

    async def async_infer(
        self,
        infer_requests: Sequence[RolloutInferRequest | Mapping[str, Any]],
        request_config: RequestConfig | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RolloutOutput]:
        """Roll out all requests concurrently.

        Args:
            infer_requests: Requests, or dataset rows that become requests (``RolloutInferRequest.from_row``).
            request_config: How to sample; ``n`` must be 1.
            use_tqdm: Show a progress bar; None shows one for more than one request where tqdm is installed.

        Returns:
            The outputs in the order of the requests; where ``run`` returns several, they stand in its request's place.

        Raises:
            TypeError: A request is neither a ``RolloutInferRequest`` nor a row.
            ValueError: ``n`` is not 1, or two requests have the same uuid.
            RolloutError: Every trajectory ended in an exception that is not the environment's.
        """
        if isinstance(infer_requests, (Mapping, RolloutInferRequest)):
            raise TypeError(f"async_infer takes a list of requests, not one {type(infer_requests).__name__}")
        config = request_config or RequestConfig()
        if config.n != 1:
            raise ValueError(f"request_config.n must be 1, not {config.n}; for a group of n, pass each request n times")
        requests = [
            r if isinstance(r, RolloutInferRequest) else RolloutInferRequest.from_row(r) for r in infer_requests
        ]
        self._refuse_equal_uuids(requests)
        show = len(requests) > 1 if use_tqdm is None else use_tqdm
        progress = _progress_bar(len(requests), required=use_tqdm is True) if show and requests else None
        try:
            tasks = [asyncio.ensure_future(self.rollout_one(request, config)) for request in requests]
            if progress is not None:
                for task in tasks:
                    task.add_done_callback(lambda _: progress.update())
            # With return_exceptions a cancelled gather waits until every trajectory has cleaned up behind itself.
            results = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            if progress is not None:
                progress.close()
        outputs: list[RolloutOutput] = []
        for request, result in zip(requests, results, strict=True):
            if isinstance(result, asyncio.CancelledError):  # this trajectory alone, by something that it waited for
                logger.error("trajectory %s was cancelled", request.uuid, exc_info=result)
                outputs.append(_failed_output(request, StopReason.CANCELLED, result))
            elif isinstance(result, BaseException):
                raise result
            else:
                outputs += result
        raise_if_all_failed(outputs)
        return outputs

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig
    ) -> RolloutOutput | list[RolloutOutput]:
        """Play one trajectory from start to end."""
        [episode] = self.begin_trajectories([infer_request])
        try:
            await self._play(episode, request_config)
        finally:
            await self.end_trajectory(episode)
        outputs = self.outputs_of(episode)
        return outputs[0] if len(outputs) == 1 else outputs

    async def rollout_one(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig
    ) -> list[RolloutOutput]:
        """``run``, with an unscored output in place of what it raises; for callers that make their own batches."""
        try:
            result = await self.run(infer_request, request_config)
        except Exception as error:
            logger.exception("trajectory %s ended in an exception of run()", infer_request.uuid)
            result = _failed_output(infer_request, StopReason.ERROR, error)
        return result if isinstance(result, list) else [result]

    def outputs_of(self, episode: Episode) -> list[RolloutOutput]:
        """What a trajectory that is over comes to: one output, unless a subclass makes several of it."""
        return [episode.to_output()]

    def is_waiting(self, episode: Episode) -> bool:
        """Whether a trajectory waits for what only the end of another may give it, such as a server's session."""
        return False

    def episode(self, infer_request: RolloutInferRequest) -> Episode:
        """What is known of a running trajectory, for hooks.

        Raises:
            KeyError: No trajectory with this uuid is running.
        """
        try:
            return self._episodes[infer_request.uuid]
        except KeyError:
            raise KeyError(f"no trajectory with uuid {infer_request.uuid!r} is running in this scheduler") from None

    @property
    def engine(self) -> InferEngine | None:
        """The engine, under the name that plugins use."""
        return self.infer_engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that was passed, else the engine's, else None."""
        return self._tokenizer if self._tokenizer is not None else getattr(self.infer_engine, "tokenizer", None)

    async def aclose(self) -> None:
        """End every trajectory that is still open, all of them side by side. The scheduler can be used again."""
        episodes = list(self._episodes.values())
        for episode in episodes:
            episode.fail(StopReason.CANCELLED, asyncio.CancelledError("the scheduler was closed"))
        # A hook that raises does not leave the others open.
        results = await asyncio.gather(*map(self._finish, episodes), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    # -- the parts of a trajectory, for whoever drives one in a loop of its own ----------------------
    #
    # begin_trajectories; on_trajectory_start inside failures_end; then, until there is a stop_reason, prepare_turn, a
    # completion, and take_turn, inside failures_end; end_trajectory in any case. _play below is the shortest example.

    def begin_trajectories(self, requests: Sequence[RolloutInferRequest]) -> list[Episode]:
        """Take up trajectories, all or none of them. Each has to come to ``end_trajectory`` or ``aclose``.

        Raises:
            ValueError: Two trajectories have the same uuid.
        """
        self._refuse_equal_uuids(requests)
        episodes = [Episode(request, max_turns=self.max_turns) for request in requests]
        self._episodes.update((episode.uuid, episode) for episode in episodes)
        return episodes

    async def _play(self, episode: Episode, config: RequestConfig) -> None:
        """Play until something ends it; only a cancellation leaves this function as an exception."""
        with self.failures_end(episode):
            await self.on_trajectory_start([episode.request])
            while episode.stop_reason is None:
                turn_config = self.prepare_turn(episode, config)
                if turn_config is None:
                    break
                response = await self._sample(episode, turn_config)
                if episode.stop_reason is None:  # aclose may have ended it meanwhile
                    await self.take_turn(episode, response)

    @contextmanager
    def failures_end(self, episode: Episode) -> Iterator[None]:
        """What is raised inside ends this trajectory as unscored; the one place where failures are classified."""
        try:
            yield
        except (ConfigurationError, RequestError, UsageError) as error:
            # Wrong use of the client, not a fault of its server.
            self._fail(episode, StopReason.ERROR, error)
        except (OpenEnvError, EnvError) as error:
            self._fail(episode, StopReason.ENV_LOST, error)
        except ContextOverflowError as error:
            if episode.turns:
                episode.stop(StopReason.CONTEXT)
            else:
                self._fail(episode, StopReason.ERROR, error)
        except Exception as error:  # noqa: BLE001 - a hook may raise anything; it must not take the siblings with it
            self._fail(episode, StopReason.ERROR, error)
        except BaseException as error:  # a cancellation, or the end of the program
            episode.fail(StopReason.CANCELLED, error)
            raise

    def prepare_turn(self, episode: Episode, config: RequestConfig) -> RequestConfig | None:
        """Set the prompt's ids and how much may be sampled; None, and the trajectory ended, when there is no room."""
        request = episode.request
        if not episode.turns and request.messages and request.messages[-1]["role"] == "assistant":
            request.messages.pop()  # a dataset's reference answer is not part of the prompt
        tokenizer = self.tokenizer
        if tokenizer is None:
            request.prompt_token_ids = None
            return config
        if self._prompts is None:
            self._prompts = ChatPrompts(tokenizer, template_kwargs=self._template_kwargs)
        request.prompt_token_ids = self._next_prompt(episode, self._prompts)
        room = self._room(episode, request.prompt_token_ids)
        # A later turn is only asked for when all of it fits: an answer cut for want of room would be judged as the
        # model's.
        needed = config.max_tokens or 1 if episode.turns else 1
        if room is not None and room < needed:
            if not episode.turns:
                raise ValueError(
                    f"the first prompt has {len(request.prompt_token_ids)} tokens and leaves no room for an answer; "
                    "take a model with a longer context or make the first observation shorter"
                )
            episode.stop(StopReason.CONTEXT)
            return None
        if room is None or (config.max_tokens is not None and config.max_tokens <= room):
            return config
        return replace(config, max_tokens=room)

    def _next_prompt(self, episode: Episode, prompts: ChatPrompts) -> list[int]:
        messages = episode.request.messages
        previous = episode.turns[-1] if episode.turns else None
        if previous is None or previous.prompt_ids is None or previous.token_ids is None:
            return prompts.first(messages)
        answered = len(episode.history)
        if messages[:answered] == episode.history:
            extended = prompts.extend(messages, answered - 1, previous.prompt_ids, previous.token_ids)
            if extended is not None:
                return extended
        elif messages and messages[-1]["role"] == "assistant":
            raise ValueError(
                "step changed the assistant's message, which goes on, without saying what that is in tokens; "
                "it must return response_token_ids"
            )
        if not self._keeps_segments:
            self.warn_once(
                "split",
                "earlier turns were rewritten (by the chat template or by a hook), so prompts do not extend each "
                "other; such trajectories are split into segments, and trainers that take one row get the last one",
            )
        return prompts.first(messages)

    def _room(self, episode: Episode, prompt_ids: list[int]) -> int | None:
        """How many tokens may still be sampled, or None for no limit."""
        rooms: list[int] = []
        context: int | None = getattr(self.infer_engine, "max_model_len", None)
        if context is not None:
            rooms.append(context - len(prompt_ids))
        if self.max_trajectory_tokens is not None:
            rooms.append(self.max_trajectory_tokens - episode.tokens_before(prompt_ids))
        return min(rooms) if rooms else None

    async def _sample(self, episode: Episode, config: RequestConfig) -> ChatCompletionResponse:
        if self.infer_engine is None:
            raise TypeError(f"{type(self).__name__} has no engine: pass infer_engine=…")
        started = time.perf_counter()
        response = await self.infer_engine.infer_async(episode.request, config)
        episode.sampling_seconds += time.perf_counter() - started
        return response

    async def take_turn(self, episode: Episode, response: ChatCompletionResponse) -> None:
        """Do everything between a completion and the next prompt."""
        choice = self._record_turn(episode, response)
        turn = len(episode.turns)
        result = await self.on_turn_end(episode.request, choice, turn)
        if not isinstance(result, Mapping):
            raise TypeError(
                f"{type(self).__name__}.on_turn_end returned {result!r:.100}; it must return a dict, {{}} at least"
            )
        episode.infos.update(result.get("rollout_infos") or {})
        if result.get("done"):
            episode.stop(StopReason.FINISHED)
        elif self.check_finished(episode.request, choice, turn):
            episode.stop(_reason_of_finish(choice, turn, episode.max_turns))
        elif episode.max_turns is not None and turn >= episode.max_turns:
            episode.stop(StopReason.MAX_TURNS)
        if episode.stop_reason is None:
            self._apply_step(episode, self.step(episode.request, choice, turn))

    def _record_turn(self, episode: Episode, response: ChatCompletionResponse) -> ChatCompletionResponseChoice:
        if not response.choices:
            raise ValueError(f"{type(self.infer_engine).__name__} answered without a completion (no choices)")
        choice = response.choices[0]
        request = episode.request
        prompt_ids = response.prompt_token_ids if request.prompt_token_ids is None else request.prompt_token_ids
        continues = bool(episode.turns) and request.messages[-1]["role"] == "assistant"
        turn = Turn.from_choice(choice, prompt_ids, continues=continues)
        if choice.logprobs is not None and turn.logprobs is None:
            engine = type(self.infer_engine).__name__
            self._warn_of_logprobs(f"{engine} gave some that do not match its tokens one to one")
        episode.response = response
        episode.add_turn(turn)
        if continues:
            request.messages[-1]["content"] += turn.text
        else:
            request.messages.append({"role": "assistant", "content": turn.text})
        episode.history = [dict(message) for message in request.messages]
        return choice

    def _apply_step(self, episode: Episode, result: dict[str, Any]) -> None:
        if not isinstance(result, Mapping) or not isinstance(result.get("infer_request"), RolloutInferRequest):
            raise TypeError(
                f"{type(self).__name__}.step returned {result!r:.100}; it must return a dict with the trajectory: "
                '{"infer_request": infer_request}'
            )
        request = episode.request = result["infer_request"]
        request.uuid = episode.uuid
        episode.infos.update(result.get("rollout_infos") or {})
        if "response_token_ids" in result:
            episode.turns[-1] = episode.turns[-1].with_tokens(
                result["response_token_ids"], result.get("response_loss_mask"), result.get("rollout_logprobs") or None
            )
            answered = len(episode.history)
            if len(request.messages) >= answered:
                episode.history[-1] = dict(request.messages[answered - 1])
        elif "response_loss_mask" in result:
            raise ValueError("step returned response_loss_mask without response_token_ids; it must return both")

    async def end_trajectory(self, episode: Episode) -> None:
        """Finish a trajectory, once however often it is called; what its hooks raise ends it alone."""
        with self.failures_end(episode):
            await self._finish(episode)

    async def _finish(self, episode: Episode) -> None:
        """Say that a trajectory is over, the first time that this is called for it."""
        if self._episodes.get(episode.uuid) is episode:  # after aclose its uuid may already name another one
            del self._episodes[episode.uuid]
            with self.failures_end(episode):
                self._add_rewards(episode)
            if len({turn.logprobs is None for turn in episode.turns}) > 1:
                self._warn_of_logprobs("some turns of a trajectory have none that match their tokens")
            await self.on_trajectory_end(episode)

    def _add_rewards(self, episode: Episode) -> None:
        for name, reward in self.extra_rewards.items():
            if name in episode.rewards:
                raise ValueError(f"extra_rewards: the scheduler has a reward {name!r} of its own; rename yours")
            if episode.scored:
                value = float(reward(episode)) if episode.turns else 0.0
                if not math.isfinite(value):
                    raise ValueError(f"extra_rewards: {name!r} is {value}; it must be a finite number")
                episode.rewards[name] = value

    # -- small things -------------------------------------------------------------------------------

    def _fail(self, episode: Episode, reason: StopReason, error: Exception) -> None:
        """End a trajectory as unscored and say so in the log."""
        if episode.stop_reason is StopReason.CANCELLED:
            return  # the scheduler was closed, and this is what came of it
        episode.fail(reason, error)
        # A server that is gone fails every trajectory alike: the first traceback says where, the others are one line.
        kind = type(error).__name__
        known = isinstance(error, OpenEnvError) and kind in self._warned
        self._warned.add(kind)
        logger.error(
            "trajectory %s ended unscored in turn %d (%s): %s",
            episode.uuid,
            len(episode.turns),
            reason,
            error,
            exc_info=None if known else error,
        )

    def _refuse_equal_uuids(self, requests: Sequence[RolloutInferRequest]) -> None:
        seen = set(self._episodes)
        for request in requests:
            if request.uuid in seen:
                raise ValueError(f"two trajectories with the uuid {request.uuid!r}; give each request one of its own")
            seen.add(request.uuid)

    def _warn_of_logprobs(self, reason: str) -> None:
        self.warn_once("logprobs", f"log-probabilities are dropped for the whole trajectory: {reason}")

    def warn_once(self, key: str, text: str) -> None:
        """Log a warning, the first time that this scheduler has one of this key."""
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(text)


class MultiTurnScheduler(RolloutScheduler):
    """Several turns, in one of two ways.

    * Partly your own: implement ``step`` (what the model reads next) and, if the default rules do not do,
      ``check_finished``.
    * Fully your own: override ``run``.
    """

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Whether the trajectory ends with this turn: its completion was cut, or it was the last one allowed."""
        episode = self._episodes.get(infer_request.uuid)  # there is none when an overridden run() asks
        max_turns = self.max_turns if episode is None else episode.max_turns
        return response_choice.finish_reason == "length" or (max_turns is not None and current_turn >= max_turns)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Prepare the next turn; see ``RolloutScheduler.step``.

        Raises:
            TypeError: A subclass implements neither ``step`` nor ``run``.
        """
        raise TypeError(f"{type(self).__name__} must implement step() (what the model reads next) or override run()")


def raise_if_all_failed(outputs: Sequence[RolloutOutput]) -> None:
    """Tell a batch in which nothing went right from one with failures.

    Raises:
        RolloutError: Every trajectory ended in an exception that is not the environment's.
    """
    if outputs and all(output.rollout_infos.get("stop_reason") == StopReason.ERROR.value for output in outputs):
        raise RolloutError(
            f"all {len(outputs)} trajectories ended in an exception, the first: {outputs[0].error}"
        ) from outputs[0].exception


def _failed_output(request: RolloutInferRequest, reason: StopReason, error: BaseException) -> RolloutOutput:
    episode = Episode(request)
    episode.fail(reason, error)
    return episode.to_output()


def _reason_of_finish(choice: ChatCompletionResponseChoice, turn: int, max_turns: int | None) -> StopReason:
    if choice.finish_reason == "length":
        return StopReason.LENGTH
    if max_turns is not None and turn >= max_turns:
        return StopReason.MAX_TURNS
    return StopReason.FINISHED


def _progress_bar(total: int, *, required: bool) -> Any:
    try:
        from tqdm import tqdm
    except ImportError as error:
        if required:
            raise ImportError('use_tqdm=True needs tqdm: pip install "openenv-client[cli]"') from error
        return None
    # None: where nobody watches, in a log file, there is no bar.
    return tqdm(total=total, desc="rollouts", unit="trajectory", leave=False, disable=False if required else None)
