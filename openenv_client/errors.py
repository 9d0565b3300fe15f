"""Everything that can go wrong between a caller and an environment server.

::

    OpenEnvError
    ├── ConfigurationError          a URL or a setting makes no sense; nothing was tried
    ├── RequestError                an action or reset argument cannot be sent as JSON; nothing was sent
    ├── UsageError                  a call that makes no sense now; nothing was sent
    │   ├── NotResetError           step or state before the first reset
    │   ├── EpisodeOverError        step after the environment said done
    │   ├── WrapperClosedError      any call after close
    │   └── ForkError               any call in a process that did not make the wrapper
    ├── ConnectError                no connection: refused, DNS, TLS, HTTP status, silence
    │   └── ServerFullError         connected, but every session of the server is taken
    ├── EnvironmentFailedError      the server answered with an error; the session goes on
    └── SessionLost                 the session is gone, and the episode with it
        ├── StepTimeoutError        no reply in time
        ├── KeepaliveError          one side stopped answering pings
        ├── MessageTooBigError      a message over the limit of one side
        ├── ProtocolError           a reply that is not OpenEnv
        ├── RecoveryError           the game could not be rebuilt in a new session, or came out otherwise
        ├── SessionFailedError      the server ended the session with an error
        └── SessionAbortedError     abort or close was called while the request was under way

Each message says what happened and ends in what to do about it. Errors can be pickled: they cross processes whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "ConfigurationError",
    "ConnectError",
    "EnvironmentFailedError",
    "EpisodeOverError",
    "ForkError",
    "KeepaliveError",
    "MessageTooBigError",
    "NotResetError",
    "OpenEnvError",
    "ProtocolError",
    "RecoveryError",
    "RequestError",
    "ServerFullError",
    "SessionAbortedError",
    "SessionFailedError",
    "SessionLost",
    "StepTimeoutError",
    "UsageError",
    "WrapperClosedError",
]


class OpenEnvError(Exception):
    """Base of all errors of this package.

    Args:
        message: What happened, without a full stop.
        remedy: What to do about it; one or more sentences.
        transient: Whether opening a session anew may succeed. The wrapper retries connect and reset on these alone.
        code: Code of the server's error reply, such as ``VALIDATION_ERROR``.
        maybe_applied: Whether the environment may have acted on the request, though no result came back.

    Attributes:
        url: Where the request went, without user name and password; None where no server was involved.
        attempts: How often a session was tried, for errors of reset; else None.
        elapsed: Seconds spent on the call; None where no server was involved.
    """

    remedy: str = ""
    transient: bool = False

    def __init__(
        self,
        message: str,
        *,
        remedy: str | None = None,
        transient: bool | None = None,
        code: str | None = None,
        maybe_applied: bool = False,
    ) -> None:
        # Only the message is in `args`: unpickling calls the class with `args` and then restores the attributes.
        super().__init__(message)
        if remedy is not None:
            self.remedy = remedy
        if transient is not None:
            self.transient = transient
        self.code = code
        self.maybe_applied = maybe_applied
        self.url: str | None = None
        self.attempts: int | None = None
        self.elapsed: float | None = None

    @property
    def message(self) -> str:
        """What happened, without address, counts and remedy."""
        return str(self.args[0])

    def __str__(self) -> str:
        context = [self.url] if self.url else []
        if self.attempts is not None and self.elapsed is not None:
            context.append(f"{self.attempts} attempt{'s' * (self.attempts > 1)} in {self.elapsed:.1f} s")
        where = f" ({', '.join(context)})" if context else ""
        return f"{self.message}{where}. {self.remedy}"


class ConfigurationError(OpenEnvError, ValueError):
    """A URL or a setting makes no sense; nothing was tried."""


class RequestError(OpenEnvError, ValueError):
    """An action or a reset argument cannot be sent as JSON; nothing was sent and the episode goes on."""


class UsageError(OpenEnvError, RuntimeError):
    """A call that makes no sense in the present state; nothing was sent."""


class NotResetError(UsageError):
    """The wrapper has no episode yet."""

    remedy = "Call reset() first."


class EpisodeOverError(UsageError):
    """The environment has said that the episode is done."""

    remedy = "Call reset() to begin a new episode."


class WrapperClosedError(UsageError):
    """The wrapper was closed; closing is final."""

    remedy = "Make a new OpenEnvWrapper."


class ForkError(UsageError):
    """The wrapper belongs to another process: two processes on one socket would read each other's replies."""

    remedy = "Make a new OpenEnvWrapper in this process."


class ConnectError(OpenEnvError):
    """No session could be opened.

    Args:
        status: HTTP status with which the handshake was answered, if it was.
    """

    remedy = "Check that the server runs, that base_url is right and, if the way leads through a proxy, that one too."

    def __init__(
        self,
        message: str,
        *,
        remedy: str | None = None,
        transient: bool | None = None,
        code: str | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy, transient=transient, code=code)
        self.status = status


class ServerFullError(ConnectError):
    """The server runs and has no session left.

    Args:
        active: Sessions in use, as the server says; None if it does not.
        maximum: Sessions it allows.
    """

    remedy = (
        "Give the server more sessions (--max-concurrent-envs, MAX_CONCURRENT_ENVS), open fewer at a time, or raise "
        "capacity_timeout."
    )
    transient = True

    def __init__(self, message: str, *, active: int | None = None, maximum: int | None = None) -> None:
        super().__init__(message, code="CAPACITY_REACHED")
        self.active = active
        self.maximum = maximum


class EnvironmentFailedError(OpenEnvError):
    """The server answered the request with an error; the session goes on.

    ``maybe_applied`` is True when the environment itself raised: it may have acted before.

    Args:
        errors: The list of a ``VALIDATION_ERROR``, one mapping for each bad field; else empty.
    """

    remedy = "If it names something that you gave, correct that; else see the server's log. The session is still open."

    def __init__(
        self,
        message: str,
        *,
        remedy: str | None = None,
        code: str | None = None,
        errors: Sequence[Mapping[str, Any]] = (),
        maybe_applied: bool = False,
    ) -> None:
        super().__init__(message, remedy=remedy, code=code, maybe_applied=maybe_applied)
        self.errors = list(errors)


class SessionLost(OpenEnvError):  # noqa: N818 - it says what was lost
    """The session is gone and the episode with it; a later reply can no longer be mistaken for an answer.

    Args:
        close_code: WebSocket close code, if the connection ended with one.
    """

    remedy = "Count the episode as unscored; reset() begins a new one in a new session."
    transient = True

    def __init__(
        self,
        message: str,
        *,
        remedy: str | None = None,
        transient: bool | None = None,
        code: str | None = None,
        maybe_applied: bool = False,
        close_code: int | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy, transient=transient, code=code, maybe_applied=maybe_applied)
        self.close_code = close_code


class StepTimeoutError(SessionLost):
    """No reply in time. What was asked may still happen; its reply is never read.

    Args:
        timeout: Seconds that were allowed.
    """

    remedy = "Raise the timeout of this call or make the environment faster. reset() begins a new session."

    def __init__(self, message: str, *, timeout: float | None = None) -> None:
        super().__init__(message)
        self.timeout = timeout


class KeepaliveError(SessionLost):
    """One side gave up since the other did not answer pings: frozen, overloaded, or cut off."""

    remedy = "Raise the ping timeout on the side that closed. reset() begins a new session."


class MessageTooBigError(SessionLost):
    """A message was over the limit of the side that received it.

    Args:
        side: Who refused: "client" (a reply was too big) or "server" (a request was too big).
        limit: The limit in bytes where it is known.
    """

    transient = False

    def __init__(
        self,
        message: str,
        *,
        side: str | None = None,
        limit: int | None = None,
        remedy: str | None = None,
        close_code: int | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy, close_code=close_code)
        self.side = side
        self.limit = limit


class ProtocolError(SessionLost):
    """What arrived is not a reply that an OpenEnv server gives to this request.

    Args:
        reply: The beginning of what arrived.
    """

    remedy = "Check that base_url leads to an OpenEnv server of a version that this client knows."
    transient = False

    def __init__(self, message: str, *, reply: str | None = None, close_code: int | None = None) -> None:
        super().__init__(message, close_code=close_code)
        self.reply = reply


class RecoveryError(SessionLost):
    """A lost session was to be replaced by a new one, and the game could not be rebuilt there as it had been.

    Args:
        step: Number of the first step that came out otherwise when it was played again, 0 for reset; None if the game
            could not be played again at all.
    """

    remedy = (
        "Count the episode as unscored; reset() begins a new one. "
        'If the environment does not play the same game for the same seed, set recover="never".'
    )
    transient = False

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class SessionFailedError(SessionLost):
    """The server could not make or keep the environment and ended the session with an error."""

    remedy = "See the server's log."
    transient = False


class SessionAbortedError(SessionLost):
    """``abort()`` or ``close()`` was called, here or in another thread, while the request was under way."""

    transient = False
