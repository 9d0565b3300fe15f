"""OpenEnvWrapper: an environment on an OpenEnv server, as a blocking object with reset, step, state and close."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeVar, get_args
from urllib.parse import urlsplit

from .backoff import retry_delay
from .checks import mapping, positive, whole
from .errors import (
    ConfigurationError,
    EnvironmentFailedError,
    EpisodeOverError,
    ForkError,
    NotResetError,
    OpenEnvError,
    RecoveryError,
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
from .replay import Outcome, Played, Recovery
from .session import Deadline, Session, SessionSettings

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

__all__ = ["OpenEnvWrapper", "ResetResult", "StepResult"]

_logger = logging.getLogger(__name__)

Recover = Literal["seeded", "always", "never"]

_T = TypeVar("_T", Observation, dict[str, Any])

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
        metadata: What the server adds. If sessions were lost in this step and replaced, ``metadata["recoveries"]`` is a
            list of `Recovery`.
    """

    observation: dict[str, Any]
    reward: float
    done: bool
    metadata: dict[str, Any]


@dataclass
class _Episode:
    """What is known of the running episode.

    Args:
        played: The reset and all steps so far, from which the game can be rebuilt; None if it is not to be.
        done: The environment has said so.
        losses: How many sessions were lost.
        lost: How the session was lost, until the game is rebuilt in another.
        maybe_applied: Whether a session that was lost may have acted on the request that is still pending.
        recoveries: Sessions that were replaced.
    """

    played: list[Played] | None
    done: bool
    losses: int = 0
    lost: SessionLost | None = None
    maybe_applied: bool = False
    recoveries: list[Recovery] = field(default_factory=list)

    def note(self, request: str, answer: Observation | EnvironmentFailedError) -> None:
        if self.played is not None:
            self.played.append(Played(request, Outcome.of(answer)))


class OpenEnvWrapper:
    """One environment session on an OpenEnv server.

    The socket is opened by the first `reset`. Connecting and reset are retried; a step is sent at most once in a
    session. After a timeout or a lost connection the session is dead: a late reply is never taken for an answer.

    If the episode was reset with a ``seed``, its game is then rebuilt: the same reset in a new session, the same steps
    again, each observation, reward and done compared with what it was the first time, and only then the step that was
    under way. Anything that comes out otherwise raises `RecoveryError`. Without a seed the episode is lost, and `step`
    raises `SessionLost` until `reset` has begun a new one. So a step never lands in a game other than the one that its
    caller reset.

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
        token: Sent as ``Authorization: Bearer …`` in the handshake.
        ping_interval: Seconds between keepalive pings; None switches them off.
        ping_timeout: Seconds within which a ping must be answered; None waits for ever.
        recover: Which games are rebuilt after a loss: "seeded" (those that were reset with a ``seed`` other than None),
            "always" (the environment plays the same game after every reset with the same arguments), "never".
        max_recoveries: How many times in an episode; the next loss raises `SessionLost`.
        recovery_timeout: Seconds that a call may take longer because a game is rebuilt.

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
        token: str | None = None,
        recover: Recover = "seeded",
        max_recoveries: int = 3,
        recovery_timeout: float = 120.0,
    ) -> None:
        config = mapping("env_config", env_config)
        address = config.get("base_url") if base_url is None else base_url
        if address is None:
            raise ConfigurationError("no base_url is given", remedy='Pass base_url= or {"base_url": …} in env_config.')
        self._url = websocket_url(address)
        self._reset_kwargs = {
            **mapping("reset_kwargs", config.get("reset_kwargs")),
            **mapping("reset_kwargs", reset_kwargs),
        }
        self._connect_timeout = positive("connect_timeout", connect_timeout)
        self._reset_timeout = positive("reset_timeout", reset_timeout)
        self._step_timeout = positive("step_timeout", step_timeout)
        self._open_deadline = positive("open_deadline", open_deadline)
        self._capacity_timeout = positive("capacity_timeout", capacity_timeout, or_zero=True)
        self._settings = SessionSettings(
            close_timeout=positive("close_timeout", close_timeout),
            max_message_size=whole("max_message_size", max_message_size, least=1),
            headers=_checked_headers(headers, token, self._url),
            ping_interval=None if ping_interval is None else positive("ping_interval", ping_interval),
            ping_timeout=None if ping_timeout is None else positive("ping_timeout", ping_timeout),
        )
        if recover not in get_args(Recover):
            raise ConfigurationError(f"recover is {recover!r}", remedy=f"Give one of {', '.join(get_args(Recover))}.")
        self._recover = recover
        self._max_recoveries = whole("max_recoveries", max_recoveries, least=0)
        self._recovery_timeout = positive("recovery_timeout", recovery_timeout)
        self._pid = os.getpid()
        self._lock = threading.Lock()  # held for the whole of a call
        self._aborted = threading.Event()  # ends the waits between the attempts of a reset
        self._closed = False
        self._episode: _Episode | None = None
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
        arguments = {**self._reset_kwargs, **kwargs}
        request = encode_reset(arguments)
        recoverable = self._recover == "always" or (self._recover == "seeded" and arguments.get("seed") is not None)
        with self._exclusive():
            self._episode = None
            self._aborted.clear()
            reply = self._open(request, Deadline(math.inf))
            self._episode = _Episode([] if recoverable else None, reply.done)
            self._episode.note(request, reply)
            return ResetResult(reply.observation, {**reply.metadata, "done": True} if reply.done else reply.metadata)

    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Act once. The action is sent at most once in a session, whatever happens.

        Args:
            action: The environment's action, a dict of JSON values such as ``{"message": "[5 3 7]"}``.

        Raises:
            RequestError: The action cannot be sent; the episode goes on.
            EnvironmentFailedError: The server refused the action or the environment raised; the session goes on.
            SessionLost: The episode ends without a result. ``maybe_applied`` says whether the step may have happened.
            ServerFullError: The session was lost, and for ``capacity_timeout`` seconds the server had no other. The
                episode waits: calling `step` again goes on with it.
            NotResetError: There is no episode yet.
            EpisodeOverError: The episode is done.
        """
        request = encode_step(action)
        with self._exclusive():
            episode = self._require_episode()
            if episode.done:
                raise EpisodeOverError("the episode is over")
            recovered_before = len(episode.recoveries)
            try:
                reply = self._play(episode, "step", request, parse_observation)
            except EnvironmentFailedError as error:
                if error.maybe_applied:
                    episode.note(request, error)
                raise
            episode.note(request, reply)
            episode.done = reply.done
            metadata = dict(reply.metadata)
            if reply.reward is None:
                metadata["reward_missing"] = True
            if recoveries := episode.recoveries[recovered_before:]:
                metadata["recoveries"] = recoveries
            return StepResult(reply.observation, reply.reward or 0.0, reply.done, metadata)

    def state(self) -> dict[str, Any]:
        """Ask for the environment's state, such as ``episode_id`` and ``step_count``. Raises as `step` does."""
        with self._exclusive():
            return self._play(self._require_episode(), "state", STATE, parse_state)

    @property
    def recoveries(self) -> list[Recovery]:
        """The sessions that were lost and replaced in this episode."""
        episode = self._episode
        return [] if episode is None else list(episode.recoveries)

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

        A call that is under way fails with `SessionAbortedError`. `reset` may begin a new episode.
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

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} is a connection: it cannot be copied or sent to another process. Make one there.")

    def __del__(self) -> None:
        # Not close(): a collector must not wait. The session is missing if __init__ has failed.
        session: Session | None = getattr(self, "_session", None)
        if session is not None and session.alive and os.getpid() == self._pid:
            session.abort()
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)

    # Opening

    def _open(self, request: str, within: Deadline) -> Observation:
        """Reset, in as many attempts as time allows."""
        spent = Deadline(math.inf)
        opening = within.at_most(self._open_deadline)
        waiting: Deadline | None = None
        for attempt in itertools.count(1):
            try:
                return self._attempt(request, opening)
            except OpenEnvError as error:
                error.url, error.attempts, error.elapsed = public_url(self._url), attempt, spent.elapsed()
                if not error.transient:
                    raise
                full = isinstance(error, ServerFullError)
                if full:
                    waiting = waiting or within.at_most(self._capacity_timeout)
                budget = waiting if full and waiting is not None else opening
                left = budget.remaining()
                delay = retry_delay(attempt, first=_FIRST_DELAY, longest=_LONGEST_DELAY)
                if full:
                    delay = min(delay, left)  # with a last attempt when the time is over
                if not left or delay > left:
                    raise
                # Aloud the first time: whoever waits for minutes should not have to guess for what.
                level = logging.WARNING if attempt == 1 else logging.INFO
                _logger.log(
                    level, "attempt %d to open a session failed, trying for %.0f s more: %s", attempt, left, error
                )
            self._aborted.wait(delay)
            if budget is waiting:
                opening = within.at_most(self._open_deadline)  # the server is there: opening begins anew
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

    # Playing

    def _play(self, episode: _Episode, operation: str, request: str, parse: Callable[[str | bytes], _T]) -> _T:
        """Ask the environment, in a rebuilt game if need be."""
        budget = Deadline(math.inf if episode.lost is None else self._recovery_timeout)
        while True:
            lost = episode.lost
            try:
                if lost is not None:
                    self._rebuild(episode, lost, budget)
                reply = self._live_session().exchange(operation, request, parse, budget.at_most(self._step_timeout))
            except SessionLost as error:
                episode.maybe_applied = error.maybe_applied = error.maybe_applied or episode.maybe_applied
                self._lose(episode, error)
            except ServerFullError as error:  # the episode waits, and so does what is known of the request
                error.maybe_applied = episode.maybe_applied
                raise
            else:
                episode.maybe_applied = False
                return reply
            if lost is None:
                budget = Deadline(self._recovery_timeout)

    def _lose(self, episode: _Episode, error: SessionLost) -> None:
        """Note that a session is lost; raise if that is the end of the episode."""
        episode.losses += 1
        if episode.played is None or not error.transient or episode.losses > self._max_recoveries:
            episode.lost, episode.played, episode.maybe_applied = None, None, False
            raise error
        episode.lost = error
        _logger.warning("a game is rebuilt in a new session of %s: %s", public_url(self._url), error.message)

    def _rebuild(self, episode: _Episode, lost: SessionLost, within: Deadline) -> None:
        """Play the episode again in a new session, up to where it was."""
        started = within.elapsed()
        for number, (request, outcome) in enumerate(episode.played or ()):
            answer = self._replay(request, lost, within, first=number == 0)
            if differing := outcome.differences(Outcome.of(answer)):
                self._live_session().abort()
                what = f"step {number}" if number else "reset"
                parts = ", ".join(differing)
                why = f"in the replay of its game {what} has another {parts}"
                raise self._not_rebuilt(lost, why, within, step=number)
        episode.lost = None
        steps, seconds = len(episode.played or ()) - 1, within.elapsed() - started
        episode.recoveries.append(Recovery(lost.message, steps, seconds))
        _logger.info("rebuilt in %.1f s: a game of %d steps", seconds, steps)

    def _replay(
        self, request: str, lost: SessionLost, within: Deadline, *, first: bool
    ) -> Observation | EnvironmentFailedError:
        try:
            if first:
                return self._open(request, within)
            return self._live_session().exchange("step", request, parse_observation, within.at_most(self._step_timeout))
        except EnvironmentFailedError as error:
            return error
        except (ServerFullError, SessionLost):
            raise
        except OpenEnvError as error:
            raise self._not_rebuilt(lost, f"no other could be opened: {error.message}", within) from error

    def _not_rebuilt(self, lost: SessionLost, why: str, within: Deadline, *, step: int | None = None) -> RecoveryError:
        error = RecoveryError(f"the session was lost ({lost.message}), and {why}", step=step)
        error.url, error.elapsed = public_url(self._url), within.elapsed()
        return error

    # Order

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if os.getpid() != self._pid:  # before the lock, which another thread may have held when this process was forked
            raise ForkError(f"{self!r} was made in process {self._pid}, not in this one ({os.getpid()})")
        with self._lock:
            if self._closed:
                raise WrapperClosedError(f"{self!r} cannot be used any more")
            yield

    def _require_episode(self) -> _Episode:
        if self._episode is None:
            raise NotResetError(f"{self!r} has no episode")
        return self._episode

    def _live_session(self) -> Session:
        assert self._session is not None  # noqa: S101 - an episode begins in a session
        return self._session


def _checked_headers(headers: Mapping[str, str] | None, token: str | None, url: str) -> dict[str, str]:
    checked = dict(mapping("headers", headers))
    for name, value in checked.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII):
            shown = str(name).partition(":")[0]  # what follows may be the value
            raise ConfigurationError(f"{shown!r:.100} is no name of a header", remedy='Give {"Name": "value"}.')
        # A token that was read from a file often ends in a line break, which would corrupt the request.
        if not isinstance(value, str) or not value.isprintable() or not value.isascii():
            raise ConfigurationError(f"the value of the header {name!r} is no line of ASCII text", remedy="Strip it.")
    if token is not None:
        # The value is a secret: no message shows it.
        if not isinstance(token, str) or not re.fullmatch(r"[!-~]+", token):
            raise ConfigurationError("token is no text of visible ASCII characters", remedy="Strip it.")
        if "authorization" in map(str.lower, checked) or "@" in urlsplit(url).netloc:
            raise ConfigurationError(
                "token is not the only authorization", remedy="Leave it out of the headers and of base_url."
            )
        checked["Authorization"] = f"Bearer {token}"
    return checked
