"""OpenEnvWrapper: an environment on an OpenEnv server, as a blocking object with reset, step, state and close."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import random
import threading
import warnings
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import (
    ConfigurationError,
    EpisodeOverError,
    ForkError,
    NotResetError,
    OpenEnvError,
    ServerFullError,
    SessionAbortedError,
    SessionLost,
    WrapperClosedError,
)
from .protocol import (
    STATE,
    Observation,
    encode_reset,
    encode_step,
    parse_observation,
    parse_state,
    public_url,
    websocket_url,
)
from .session import Deadline, Session, SessionSettings

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

__all__ = ["OpenEnvWrapper", "ResetResult", "StepResult"]

_logger = logging.getLogger(__name__)

_FIRST_DELAY = 0.1
_LONGEST_DELAY = 2.0


class ResetResult(NamedTuple):
    """What reset returns.

    Attributes:
        observation: The environment's first observation, a JSON object.
        metadata: What the server adds; ``done`` is in it, and True, if the episode is over before it began.
    """

    observation: dict[str, Any]
    metadata: dict[str, Any]


class StepResult(NamedTuple):
    """What step returns.

    Attributes:
        observation: The environment's observation, a JSON object.
        reward: The reward of this step; 0.0 if the server gave none, and ``metadata["reward_missing"]`` is then True.
        done: Whether the episode is over.
        metadata: What the server adds.
    """

    observation: dict[str, Any]
    reward: float
    done: bool
    metadata: dict[str, Any]


class OpenEnvWrapper:
    """One environment session on an OpenEnv server.

    The socket is opened by the first `reset`. Connecting and reset are retried; a step is sent at most once. After a
    timeout or a lost connection the session is dead, and `step` raises `SessionLost` until `reset` has begun a new
    episode: a step never lands in a game other than the one that its caller reset, and a late reply is never taken for
    an answer.

    Calls from several threads wait for each other. `close` and `abort` may be called at any time.

    Args:
        env_config: A dataset row's ``env_config``. ``base_url`` and ``reset_kwargs`` are read, other keys are not.
        base_url: Address of the server (http, https, ws or wss; a path prefix is kept); wins over ``env_config``.
        reset_kwargs: Arguments of every reset, such as ``{"seed": 7}``; win over those of ``env_config``.
        connect_timeout: Seconds for one attempt to connect, handshake included.
        reset_timeout: Seconds for one reply to reset.
        step_timeout: Seconds for a reply to step or state.
        close_timeout: Seconds that a polite close may take.
        open_deadline: Seconds for all attempts of one reset and the waits between them, other than for a full server.
        capacity_timeout: Seconds to wait for a session of a full server; 0 raises `ServerFullError` at once.
        max_message_size: Bytes that a reply may have.
        headers: HTTP headers of the handshake, for a proxy or a hosted server.
        ping_interval: Seconds between keepalive pings; None switches them off.
        ping_timeout: Seconds within which a ping must be answered; None waits for ever.

    Raises:
        ConfigurationError: No address, an address that is none, or a setting out of range.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        *,
        base_url: str | None = None,
        reset_kwargs: Mapping[str, Any] | None = None,
        connect_timeout: float = 10.0,
        reset_timeout: float = 60.0,
        step_timeout: float = 60.0,
        close_timeout: float = 1.0,
        open_deadline: float = 60.0,
        capacity_timeout: float = 300.0,
        max_message_size: int = 64 * 2**20,
        headers: Mapping[str, str] | None = None,
        ping_interval: float | None = 20.0,
        ping_timeout: float | None = 60.0,
    ) -> None:
        config = _mapping("env_config", env_config)
        address = config.get("base_url") if base_url is None else base_url
        if address is None:
            raise ConfigurationError("no base_url is given", remedy='Pass base_url= or {"base_url": …} in env_config.')
        self._url = websocket_url(address)
        self._reset_kwargs = {
            **_mapping("reset_kwargs", config.get("reset_kwargs")),
            **_mapping("reset_kwargs", reset_kwargs),
        }
        self._connect_timeout = _positive("connect_timeout", connect_timeout)
        self._reset_timeout = _positive("reset_timeout", reset_timeout)
        self._step_timeout = _positive("step_timeout", step_timeout)
        self._open_deadline = _positive("open_deadline", open_deadline)
        self._capacity_timeout = _positive("capacity_timeout", capacity_timeout, or_zero=True)
        self._settings = SessionSettings(
            close_timeout=_positive("close_timeout", close_timeout),
            max_message_size=int(_positive("max_message_size", max_message_size)),
            headers=_checked_headers(headers),
            ping_interval=None if ping_interval is None else _positive("ping_interval", ping_interval),
            ping_timeout=None if ping_timeout is None else _positive("ping_timeout", ping_timeout),
        )
        self._pid = os.getpid()
        self._lock = threading.Lock()  # held for the whole of a call
        self._aborted = threading.Event()  # ends the waits between the attempts of a reset
        self._closed = False
        self._playing = False
        self._done = False
        self._session: Session | None = None

    def reset(self, **kwargs: Any) -> ResetResult:
        """Begin a new episode, in a new session if there is none.

        Args:
            **kwargs: Arguments of this reset; they win over ``reset_kwargs``.

        Raises:
            ConnectError: No session could be opened in time.
            ServerFullError: The server had no free session for ``capacity_timeout`` seconds.
            EnvironmentFailedError: The environment refused the reset, for example an unknown argument.
            SessionLost: The session was lost in reset again and again, or in a way that trying again cannot help.
            OpenEnvError: Any other of the tree in `openenv_client.errors`.
        """
        request = encode_reset({**self._reset_kwargs, **kwargs})
        with self._exclusive():
            self._playing = self._done = False
            self._aborted.clear()
            reply = self._open(request)
            self._playing, self._done = True, reply.done
            return ResetResult(reply.observation, {**reply.metadata, "done": True} if reply.done else reply.metadata)

    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Act once. The action is sent at most once, whatever happens.

        Args:
            action: The environment's action, a dict of JSON values such as ``{"message": "[5 3 7]"}``.

        Raises:
            RequestError: The action cannot be sent; the episode goes on.
            EnvironmentFailedError: The server refused the action or the environment raised; the session goes on.
            SessionLost: The episode ends without a result. ``maybe_applied`` says whether the step may have happened.
            NotResetError: There is no episode yet.
            EpisodeOverError: The episode is done.
        """
        request = encode_step(action)
        with self._exclusive():
            session = self._require_session()
            if self._done:
                raise EpisodeOverError("the episode is over")
            reply = session.exchange("step", request, parse_observation, Deadline(self._step_timeout))
            self._done = reply.done
            if reply.reward is None:
                return StepResult(reply.observation, 0.0, reply.done, {**reply.metadata, "reward_missing": True})
            return StepResult(reply.observation, reply.reward, reply.done, reply.metadata)

    def state(self) -> dict[str, Any]:
        """Ask for the environment's state, such as ``episode_id`` and ``step_count``. Raises as `step` does."""
        with self._exclusive():
            return self._require_session().exchange("state", STATE, parse_state, Deadline(self._step_timeout))

    def close(self) -> None:
        """End the session. Final, never raises, takes at most about ``close_timeout`` seconds.

        A call that is under way in another thread fails with `SessionAbortedError`.
        """
        if self._closed:
            return
        self._closed = True
        if not self._lock.acquire(blocking=False):
            self.abort()
            return
        try:
            if self._session is not None:
                self._session.close()
        finally:
            self._lock.release()

    def abort(self) -> None:
        """End the session at once, without waiting; may be called from any thread.

        A call that is under way fails with `SessionAbortedError`; while TCP connects, this takes ``connect_timeout`` at
        most. `reset` may begin a new episode.
        """
        self._aborted.set()
        session = self._session
        if session is not None:
            session.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<OpenEnvWrapper {public_url(self._url)}{' closed' if self._closed else ''}>"

    def __del__(self) -> None:
        # Not close(): a collector must not wait. The session is missing if __init__ has failed.
        session: Session | None = getattr(self, "_session", None)
        if session is not None and session.alive and os.getpid() == self._pid:
            session.abort()
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)

    # Opening

    def _open(self, request: str) -> Observation:
        """Reset, in as many attempts as time allows."""
        spent = Deadline(math.inf)
        opening = Deadline(self._open_deadline)
        waiting: Deadline | None = None
        for attempt in itertools.count(1):
            try:
                return self._attempt(request, opening)
            except OpenEnvError as error:
                error.attempts, error.elapsed = attempt, spent.elapsed()
                if not error.transient:
                    raise
                if isinstance(error, ServerFullError):
                    budget = waiting = waiting or Deadline(self._capacity_timeout)
                else:
                    budget = opening
                delay = _delay(attempt)
                if delay >= budget.remaining():
                    raise
                # Aloud the first time: whoever waits for minutes should not have to guess for what.
                level = logging.WARNING if attempt == 1 else logging.INFO
                left = budget.remaining()
                _logger.log(
                    level, "attempt %d to open a session failed, trying for %.0f s more: %s", attempt, left, error
                )
            self._aborted.wait(delay)
            if budget is waiting:
                opening = Deadline(self._open_deadline)  # the server is there: opening begins anew
        raise AssertionError("unreachable")

    def _attempt(self, request: str, opening: Deadline) -> Observation:
        old = self._session
        if old is not None and old.alive:
            try:
                return old.exchange("reset", request, parse_observation, opening.at_most(self._reset_timeout))
            except SessionLost as error:
                if error.maybe_applied:
                    raise
            # It turned out to be gone before anything was sent.
        if old is not None:
            old.close()
        session = self._session = Session(self._url, self._settings)
        # Read after the session is in place: whoever sets these now either sees it or is seen.
        if self._closed or self._aborted.is_set():
            raise SessionAbortedError("the session was aborted")
        session.connect(opening.at_most(self._connect_timeout))
        return session.exchange("reset", request, parse_observation, opening.at_most(self._reset_timeout))

    # Order

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if os.getpid() != self._pid:  # before the lock, which another thread may have held when this process was forked
            raise ForkError(f"{self!r} was made in process {self._pid}, not in this one ({os.getpid()})")
        with self._lock:
            if self._closed:
                raise WrapperClosedError(f"{self!r} cannot be used any more")
            yield

    def _require_session(self) -> Session:
        if self._session is None or not self._playing:
            raise NotResetError(f"{self!r} has no episode")
        return self._session


def _mapping(name: str, value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} is {value!r:.200}", remedy="Give a dict.")
    return value


def _checked_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    checked = dict(_mapping("headers", headers))
    for name, value in checked.items():
        # A token that was read from a file often ends in a line break, which would corrupt the request.
        if not isinstance(value, str) or not value.isprintable():
            raise ConfigurationError(f"the value of the header {name!r} is no single line of text", remedy="Strip it.")
    return checked


def _positive(name: str, value: float, *, or_zero: bool = False) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not or_zero):
        raise ConfigurationError(
            f"{name} is {value!r}", remedy=f"Give a finite number {'of 0 or more' if or_zero else 'above 0'}."
        )
    return value


def _delay(attempt: int) -> float:
    """Seconds to wait after so many attempts: growing, and spread so that many clients do not come back together."""
    # Not the global generator: training code seeds it and counts on its sequence.
    return min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(attempt - 1, 10)) * random.SystemRandom().uniform(0.5, 1.0)
