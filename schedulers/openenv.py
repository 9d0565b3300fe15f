"""OpenEnvScheduler: the bridge from the blocking OpenEnvWrapper to asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from openenv_client import EnvironmentFailedError, OpenEnvWrapper, ServerFullError, StepResult
from openenv_client.backoff import retry_delay
from schedulers.checks import as_dict, check_seconds, check_whole
from schedulers.engines.base import InferEngine
from schedulers.episode import Episode
from schedulers.gym import GYMScheduler, Start, Transition
from schedulers.multi_turn import SchedulerOptions
from schedulers.types import ChatCompletionResponseChoice, Exchange, StopReason

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["OpenEnvOptions", "OpenEnvScheduler"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_SET_ELSEWHERE = {"base_url": "base_url", "reset_kwargs": "a row's env_config", "capacity_timeout": "slot_timeout"}

_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


class OpenEnvOptions(SchedulerOptions, total=False):
    """The keywords of ``OpenEnvScheduler``, for the signatures of its subclasses."""

    max_concurrent_envs: int
    base_url: str | None
    system_message: str
    max_parse_failures: int
    slot_timeout: float
    env_settings: Mapping[str, Any] | None


class OpenEnvScheduler(GYMScheduler):
    """Plays environments that run as OpenEnv servers.

    Where the server is and how an episode starts comes from each row's ``env_config``: ``base_url``, ``reset_kwargs``
    (``seed`` first of all), ``system_message``. Blocking calls run on threads of the scheduler's own, so neither the
    event loop nor the default pool ever waits for an environment. A trajectory for which the server has no room waits
    for a slot without holding a thread. A game with a seed whose session is lost is rebuilt in another one, as
    ``OpenEnvWrapper`` explains; ``rollout_infos["recoveries"]`` lists how often.

    For an environment of your own override ``parse_action`` and ``format_observation``; ``observe_step`` to shape
    rewards.

    Args:
        infer_engine: Samples the completions.
        max_turns: The most turns of a trajectory; None is no limit.
        max_concurrent_envs: The most environment calls in flight at a time (not the most sessions).
        base_url: The server, for rows whose ``env_config`` names none.
        system_message: For rows whose ``env_config`` has none.
        max_parse_failures: So many completions in a row without an action end the trajectory
            (``StopReason.PARSE_ERROR``).
        slot_timeout: How long a trajectory waits for a full server, in seconds.
        env_settings: Keyword settings of ``OpenEnvWrapper``, such as ``{"step_timeout": 30}``.
        options: Keywords of ``RolloutScheduler``.

    Raises:
        ValueError: A limit or a setting is out of range.
        TypeError: There is no such setting.
    """

    def __init__(
        self,
        infer_engine: InferEngine | None = None,
        max_turns: int | None = None,
        *,
        max_concurrent_envs: int = 16,
        base_url: str | None = None,
        system_message: str = "",
        max_parse_failures: int = 2,
        slot_timeout: float = 600.0,
        env_settings: Mapping[str, Any] | None = None,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        check_whole("max_concurrent_envs", max_concurrent_envs, least=1)
        check_whole("max_parse_failures", max_parse_failures, least=1)
        check_seconds("slot_timeout", slot_timeout, or_zero=True)
        settings = as_dict("env_settings", env_settings)
        for name in _SET_ELSEWHERE.keys() & settings.keys():
            raise ValueError(f"{name} is no part of env_settings; set {_SET_ELSEWHERE[name]}")
        super().__init__(infer_engine, max_turns, **options)
        self.max_concurrent_envs = max_concurrent_envs
        self.base_url = base_url
        self.system_message = system_message
        self.max_parse_failures = max_parse_failures
        self.slot_timeout = slot_timeout
        self.env_settings = settings
        self._bridge = _Bridge(max_concurrent_envs)
        self._make_wrapper({"base_url": base_url or "http://127.0.0.1"})  # bad settings are refused here, not later

    # -- what a subclass for an environment overrides -----------------------------------------------

    def parse_action(self, text: str) -> dict[str, Any] | None:
        """The action that a completion stands for.

        Args:
            text: The completion.

        Returns:
            The fields of the environment's action, or None when the text holds no action. By default a JSON object,
            plain or in the last code fence, is the action; any other text is ``{"message": text}``, and white space is
            none.
        """
        message = text.strip()
        fenced = _FENCED.findall(text)
        try:
            action = json.loads(fenced[-1] if fenced else text)
            json.dumps(action, allow_nan=False)  # NaN and infinity could not be sent
        except (ValueError, RecursionError):
            action = None
        if isinstance(action, dict):
            return action
        return {"message": message} if message else None

    def parse_cut_action(self, text: str) -> dict[str, Any] | None:
        """The action of a completion that the engine cut (``finish_reason`` "length"); by default there is none.

        Half an answer is not what the model meant to do. Override this for an environment whose actions show that they
        are complete.
        """
        return None

    def format_observation(self, observation: dict[str, Any]) -> str:
        """What the model reads of an observation; by default its JSON."""
        return json.dumps(observation, ensure_ascii=False, default=str)

    def format_reminder(self, episode: Episode) -> str:
        """What the model reads after a completion without an action."""
        return "No action was found in that answer. Answer with one action in the required format."

    def observe_reset(self, episode: Episode, observation: dict[str, Any]) -> Start:
        """Take the first observation; keep what must be remembered in ``episode.state``."""
        return Start(self.format_observation(observation), self.system_message)

    def observe_step(self, episode: Episode, action: dict[str, Any] | None, result: StepResult | None) -> Transition:
        """Take what a turn did.

        Args:
            episode: The trajectory.
            action: What was sent, or None when the completion held no action; the environment was then not stepped.
            result: The environment's answer; None in the same case.
        """
        if result is None:
            return Transition(self.format_reminder(episode))
        return Transition(self.format_observation(result.observation), result.reward, result.done)

    # -- the environment ----------------------------------------------------------------------------

    async def start_env(self, episode: Episode, env_config: dict[str, Any]) -> Start:
        """Open a session, wait for a slot if need be, and reset."""
        given = {key: value for key, value in env_config.items() if value is not None}  # a table has None for no value
        if "seed" in given and "seed" not in (given.get("reset_kwargs") or {}):
            self.warn_once("seed", "env_config has a seed that no environment gets; put it into reset_kwargs")
        wrapper = self._make_wrapper({"base_url": self.base_url, **given})
        episode.env = wrapper
        episode.infos["recoveries"] = []
        episode.infos["seed"] = (env_config.get("reset_kwargs") or {}).get("seed")
        observation, metadata = await self._call(episode, wrapper.reset)
        episode.exchanges = [Exchange(None, observation, 0.0, bool(metadata.get("done")), metadata)]
        if metadata.get("done"):
            episode.stop(StopReason.ENV_DONE)
        return self.observe_reset(episode, observation)

    async def step_env(self, episode: Episode, choice: ChatCompletionResponseChoice) -> Transition:
        """Parse the completion and step the environment, unless it holds no action that the environment takes."""
        parse = self.parse_cut_action if choice.finish_reason == "length" else self.parse_action
        action = parse(choice.message.content)
        if action is not None:
            try:
                result = await self._call(episode, episode.env.step, action)
            except EnvironmentFailedError as error:
                if error.code != "VALIDATION_ERROR":
                    raise
                # The model's own fields were refused unseen by the environment: its answer held no action.
                logger.debug("trajectory %s: %s", episode.request.uuid, error)
            else:
                episode.parse_failures = 0
                episode.exchanges.append(Exchange(action, *result))
                return self.observe_step(episode, action, result)
        episode.exchanges.append(Exchange(action))
        transition = self.observe_step(episode, None, None)
        episode.parse_failures += 1
        # A completion that was cut before its action is not malformed; it ends the trajectory as LENGTH.
        if episode.parse_failures >= self.max_parse_failures and choice.finish_reason != "length":
            episode.stop(StopReason.PARSE_ERROR)
        return transition

    def is_waiting(self, episode: Episode) -> bool:
        """Whether it waits for a session of a full server."""
        return episode.env in self._bridge.waiting

    async def close_env(self, episode: Episode) -> None:
        """Close the session, also when the task that played it is being cancelled."""
        episode.infos["recoveries"] = [recovery._asdict() for recovery in episode.env.recoveries]
        await self._bridge.close(episode.env)

    async def _call(self, episode: Episode, function: Callable[..., _T], *args: Any) -> _T:
        """Call the trajectory's environment, and note how much of the time it was not at work on that."""
        busy = 0.0

        def timed() -> _T:
            nonlocal busy
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                busy += time.perf_counter() - started

        started = time.perf_counter()
        try:
            return await self._bridge.call_in_slot(episode.env, timed, timeout=self.slot_timeout)
        finally:
            episode.waiting_seconds += time.perf_counter() - started - busy

    def _make_wrapper(self, env_config: dict[str, Any]) -> OpenEnvWrapper:
        return OpenEnvWrapper(env_config, **{**self.env_settings, "capacity_timeout": 0})


class _Bridge:
    """Runs blocking calls in threads, a bounded number at a time, and queues for a full server's slots.

    Each call gets a thread of its own: beside a round trip over a socket that costs little, there is no pool that could
    be exhausted by others, has to be closed, or would be empty in a forked process, and sessions are closed side by
    side however many calls wait for their server. Locks belong to the event loop that uses them, so that a scheduler
    works in one ``asyncio.run`` after another, and in several threads.
    """

    def __init__(self, limit: int) -> None:
        self.waiting: set[OpenEnvWrapper] = set()  # for a slot
        self._limit = limit
        self._permits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._waiters: WeakKeyDictionary[asyncio.AbstractEventLoop, deque[asyncio.Future[None]]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[_Bridge], tuple[int]]:
        return _Bridge, (self._limit,)  # a copy, or the scheduler's in another process, shares no lock with this one

    async def call(self, wrapper: OpenEnvWrapper, function: Callable[..., _T], *args: Any) -> _T:
        """Run ``function(*args)`` on a thread. When the caller is cancelled, the wait in the thread ends as well."""
        async with self._permit():
            call = _in_thread(function, *args)
            try:
                return await call
            except asyncio.CancelledError:
                wrapper.abort()
                if not call.cancelled():  # it came back in the same moment; asyncio must not report it as unheard
                    call.exception()
                raise

    async def call_in_slot(
        self, wrapper: OpenEnvWrapper, function: Callable[..., _T], *args: Any, timeout: float
    ) -> _T:
        """Run what may need a new session, waiting up to ``timeout`` seconds for a slot of the server.

        The thread and the permit are free while it waits.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        for failures in itertools.count(1):
            try:
                return await self.call(wrapper, function, *args)
            except ServerFullError as error:
                if loop.time() >= deadline:
                    error.remedy = "Start the server with more sessions (--max-concurrent-envs), or raise slot_timeout."
                    raise
            delay = retry_delay(failures, first=0.05, longest=2.0)
            self.waiting.add(wrapper)
            try:
                await self._slot_freed(min(delay, max(deadline - loop.time(), 0.0)))
            finally:
                self.waiting.discard(wrapper)
        raise AssertionError("unreachable")

    async def close(self, wrapper: OpenEnvWrapper) -> None:
        """Close on a thread, and tell the next in the queue. A cancellation of the caller does not undo it."""
        try:
            await asyncio.shield(_in_thread(wrapper.close))
        finally:
            waiters = self._waiters.get(asyncio.get_running_loop())
            while waiters:
                waiter = waiters.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    break

    def _permit(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if loop not in self._permits:
            # A semaphore that was waited for holds its loop, so weak keys alone would never let go of the two.
            for old in [reference() for reference in self._permits.keyrefs()]:
                if old is not None and old.is_closed():
                    self._permits.pop(old, None)
        return self._permits.setdefault(loop, asyncio.Semaphore(self._limit))

    async def _slot_freed(self, timeout: float) -> None:
        """Wait until a session of this scheduler was closed, at most ``timeout`` seconds; others may free slots too."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        waiters = self._waiters.setdefault(loop, deque())
        waiters.append(waiter)
        try:
            await asyncio.wait({waiter}, timeout=timeout)
        finally:
            if waiter in waiters:
                waiters.remove(waiter)


def _in_thread(function: Callable[..., _T], *args: Any) -> asyncio.Future[_T]:
    """Call a function in a new thread, as ``asyncio.to_thread`` does in one of its pool.

    A daemon: a server that does not answer must not hold the end of the program.
    """
    loop = asyncio.get_running_loop()
    call: asyncio.Future[_T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(settle_call: Callable[[Any], None], outcome: object) -> None:
        if not call.done():  # not cancelled meanwhile
            settle_call(outcome)

    def run() -> None:
        try:
            answer: tuple[Callable[[Any], None], object] = (call.set_result, context.run(function, *args))
        except BaseException as error:  # noqa: BLE001 - it is raised where the call is awaited
            answer = (call.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the event loop was closed: nobody waits
            loop.call_soon_threadsafe(settle, *answer)

    threading.Thread(target=run, name="openenv", daemon=True).start()
    return call
