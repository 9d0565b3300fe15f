"""run_multi_turn: the turn of ``run``, batch by batch, for engines that answer a whole batch in one blocking call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from schedulers.checks import check_whole
from schedulers.engines.base import InferEngine
from schedulers.episode import Episode
from schedulers.multi_turn import RolloutScheduler, raise_if_all_failed
from schedulers.types import ChatCompletionResponse, RequestConfig, RolloutInferRequest, RolloutOutput, StopReason

if TYPE_CHECKING:
    from typing_extensions import Self

_GLANCE = 0.02  # seconds between looks at whether a trajectory has begun to wait

__all__ = ["Answer", "GatherFn", "RolloutFn", "rollout_fn_of", "run_multi_turn", "start_multi_turn"]

Answer: TypeAlias = "ChatCompletionResponse | RolloutOutput | Exception"
"""What was sampled for a request. An exception ends that trajectory alone, as unscored."""

RolloutFn: TypeAlias = Callable[[list[RolloutInferRequest], RequestConfig], Sequence[Answer]]
"""Samples one completion for each request, in order: from its ``prompt_token_ids`` where they are set, and no more than
its ``max_tokens`` where that is set."""

GatherFn: TypeAlias = Callable[[list[bool]], Sequence[bool]]
"""Concatenates the lists of all ranks, which are of one length, as ``accelerate.utils.gather_object`` does."""


def start_multi_turn(
    requests: Sequence[RolloutInferRequest], scheduler: RolloutScheduler, request_config: RequestConfig
) -> None:
    """Prepare the first turn, for a caller that samples it itself and then calls `run_multi_turn`.

    Afterwards ``messages``, ``prompt_token_ids`` and ``max_tokens`` of each request say what to sample from. A
    trajectory that has failed by then needs an answer all the same, which is not looked at. The hooks of later turns
    run in another event loop than these. All requests play at once: on a server with fewer sessions, those that find
    none wait for ``slot_timeout`` seconds in vain.

    Args:
        requests: The trajectories; changed in place.
        scheduler: Plays them. Its ``aclose`` ends them if `run_multi_turn` is never called.
        request_config: How the first turn will be sampled.

    Raises:
        TypeError: The scheduler overrides ``run``, which only ``async_infer`` calls.
        ValueError: Two requests have the same uuid.
        RuntimeError: An event loop is running in this thread.
    """
    with _Batch(scheduler, request_config, finishes=False) as batch:
        batch.start(requests)
        batch.settle(all_of_them=True)
        batch.episodes = []  # they go on


def run_multi_turn(
    requests: Sequence[RolloutInferRequest],
    first_turn_outputs: Sequence[Answer] | None,
    scheduler: RolloutScheduler,
    rollout_fn: RolloutFn,
    request_config: RequestConfig,
    max_turns: int | None = None,
    gather_fn: GatherFn = list,
) -> list[RolloutOutput]:
    """Play all requests to their ends, one turn of all of them after the other.

    A trajectory that waits for a full server's slot leaves out turns; it does not hold up the others.

    Args:
        requests: The trajectories.
        first_turn_outputs: What was sampled for their first turn, in order, after `start_multi_turn`. With None that is
            done here, and the requests must not have been started.
        scheduler: Plays them.
        rollout_fn: Samples a turn. All ranks call it equally often, with an empty list where nothing is left to do.
        request_config: How to sample.
        max_turns: The most turns of a trajectory; None leaves it to the scheduler.
        gather_fn: Tells every rank which ranks have work left; the default is for a single one.

    Returns:
        The outputs in the order of the requests, as ``async_infer`` gives them.

    Raises:
        KeyError: ``first_turn_outputs`` are given for a request that was not started.
        TypeError: The scheduler overrides ``run``, which only ``async_infer`` calls.
        ValueError: The number of answers is not that of the requests, or ``max_turns`` is below 1.
        RolloutError: Every trajectory ended in an exception that is not the environment's.
        RuntimeError: An event loop is running in this thread; ``await scheduler.async_infer(…)`` there.
    """
    check_whole("max_turns", max_turns, least=1, none="the scheduler's")
    with _Batch(scheduler, request_config) as batch:
        if first_turn_outputs is None:
            batch.start(requests, max_turns)
            active = batch.settle()
        else:
            active = batch.take_over(requests, max_turns)
        answers = first_turn_outputs
        while True:
            # Two flags a rank. One whose trajectories all wait for sessions must not keep the others from the turns
            # that will free some.
            flags = list(gather_fn([bool(active), batch.waiting]))
            if any(flags[::2]):
                started = time.perf_counter()
                if answers is None:
                    answers = rollout_fn([episode.request for episode in active], request_config)
                batch.take_turns(active, answers, time.perf_counter() - started)
                answers = None
            elif not any(flags):
                break
            active = batch.settle()
    outputs = [output for episode in batch.episodes for output in scheduler.outputs_of(episode)]
    raise_if_all_failed(outputs)
    return outputs


def rollout_fn_of(engine: InferEngine) -> RolloutFn:
    """Make a ``rollout_fn`` of an engine that takes one request at a time: it is asked for all of them at once."""

    async def infer(request: RolloutInferRequest, config: RequestConfig) -> ChatCompletionResponse:
        return await engine.infer_async(request, replace(config, max_tokens=request.max_tokens or config.max_tokens))

    async def infer_all(requests: list[RolloutInferRequest], config: RequestConfig) -> Sequence[Any]:
        return await asyncio.gather(*(infer(request, config) for request in requests), return_exceptions=True)

    return lambda requests, config: asyncio.run(infer_all(requests, config))


class _Batch:
    """Trajectories that take their turns together, and the event loop that runs their hooks.

    Args:
        scheduler: Plays them.
        config: How they are sampled.
        finishes: Whether a trajectory that is over is finished here, or by whoever takes it over.
    """

    def __init__(self, scheduler: RolloutScheduler, config: RequestConfig, *, finishes: bool = True) -> None:
        if type(scheduler).run is not RolloutScheduler.run:
            raise TypeError(
                f"{type(scheduler).__name__} overrides run(), which has no part in run_multi_turn; call async_infer, "
                "or override the hooks in its place"
            )
        self.episodes: list[Episode] = []
        self._scheduler = scheduler
        self._config = config
        self._finishes = finishes
        self._busy: dict[asyncio.Task[None], Episode] = {}

    def __enter__(self) -> Self:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._loop = asyncio.new_event_loop()
            return self
        raise RuntimeError("run_multi_turn blocks, and an event loop is running here: await scheduler.async_infer(…)")

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            for task in self._busy:  # after Ctrl-C or an exception of the engine
                task.cancel()
            self._loop.run_until_complete(self._finish_all())
        finally:
            self._loop.close()

    def start(self, requests: Sequence[RolloutInferRequest], max_turns: int | None = None) -> None:
        """Begin the trajectories."""
        self.episodes = self._scheduler.begin_trajectories(requests)
        for episode in self.episodes:
            episode.max_turns = episode.max_turns if max_turns is None else max_turns
            self._advance(episode, self._scheduler.on_trajectory_start([episode.request]))

    def take_over(self, requests: Sequence[RolloutInferRequest], max_turns: int | None) -> list[Episode]:
        """Go on with trajectories that were begun."""
        self.episodes = [self._scheduler.episode(request) for request in requests]
        for episode in self.episodes:
            episode.max_turns = episode.max_turns if max_turns is None else max_turns
        return self.episodes

    def take_turns(self, episodes: Sequence[Episode], answers: Sequence[Answer], seconds: float) -> None:
        """Begin what lies between completions and next prompts."""
        if len(answers) != len(episodes):
            raise ValueError(f"{len(answers)} answers came for {len(episodes)} requests; rollout_fn must give one each")
        for episode, answer in zip(episodes, answers, strict=True):
            episode.sampling_seconds += seconds
            self._advance(episode, self._take_turn(episode, answer))

    @property
    def waiting(self) -> bool:
        """Whether there are trajectories that wait for the end of another one, perhaps of another rank."""
        return bool(self._busy)

    def settle(self, *, all_of_them: bool = False) -> list[Episode]:
        """Let all trajectories come to their next prompts, other than those that wait for the end of another one.

        Args:
            all_of_them: Wait for those, too.

        Returns:
            The trajectories whose next turn can be sampled.
        """
        self._loop.run_until_complete(self._settle(all_of_them=all_of_them))
        busy = [id(episode) for episode in self._busy.values()]
        return [episode for episode in self.episodes if episode.stop_reason is None and id(episode) not in busy]

    def _advance(self, episode: Episode, act: Coroutine[Any, Any, object]) -> None:
        self._busy[self._loop.create_task(self._bring_to_next_prompt(episode, act))] = episode

    async def _bring_to_next_prompt(self, episode: Episode, act: Coroutine[Any, Any, object]) -> None:
        try:
            with self._scheduler.failures_end(episode):
                await act
                config = None if episode.stop_reason else self._scheduler.prepare_turn(episode, self._config)
                if config is not None:
                    episode.request.max_tokens = config.max_tokens
        finally:
            if self._finishes and episode.stop_reason is not None:
                await self._scheduler.end_trajectory(episode)

    async def _take_turn(self, episode: Episode, answer: Answer) -> None:
        if episode.stop_reason is not None:  # it failed before the caller sampled its first turn
            return
        if isinstance(answer, BaseException):
            raise answer
        response = answer.response if isinstance(answer, RolloutOutput) else answer
        if response is None:
            raise ValueError("rollout_fn gave an output without a response")
        await self._scheduler.take_turn(episode, response)

    async def _settle(self, *, all_of_them: bool) -> None:
        done: set[asyncio.Task[None]] = set()
        glanced = False
        while self._busy:
            ready = any(episode.stop_reason is None for episode in self.episodes if episode not in self._busy.values())
            all_wait = all(map(self._scheduler.is_waiting, self._busy.values()))
            # With nothing to do meanwhile, one glance is waited for: the caller will ask again at once.
            if all_wait and not all_of_them and (ready or (glanced and not done)):
                return
            done, _ = await asyncio.wait(self._busy, timeout=_GLANCE, return_when=asyncio.FIRST_COMPLETED)
            glanced = True
            for task in done:
                del self._busy[task]
                if not task.cancelled():
                    task.result()

    async def _finish_all(self) -> None:
        await asyncio.gather(*self._busy, return_exceptions=True)
        for episode in self.episodes:
            if episode.stop_reason is None:
                episode.fail(StopReason.CANCELLED, asyncio.CancelledError("the batch was given up"))
        await asyncio.gather(*map(self._scheduler.end_trajectory, self.episodes))
