"""Fault: something that goes wrong, as data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, NamedTuple

from websockets.exceptions import ProtocolError
from websockets.frames import Close

__all__ = ["FORGED", "INSTEAD", "Fault"]

INSTEAD = ("drop", "close", "error", "freeze", "restart")
"""Kinds that happen to a request that is not acted on."""

FORGED = ("send", "garbage", "wrong_type", "big")
"""Kinds that put a frame of their own in the place of the answer."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong: what happens, and to what.

    To a connect:

    ``refuse``: TCP connections are refused for ``value`` seconds or, with None, until `MockEnvServer.release`; live
    sessions go on. It begins when the connect before it has arrived; for the first, at once.
    ``http``: the handshake is answered with HTTP status ``value`` (503).
    ``full``: the session is refused with CAPACITY_REACHED.

    To a connect or a request:

    ``drop``: the TCP connection is cut; the request is not acted on.
    ``delay``: the answer is late: it waits ``value`` seconds or, with None, until `MockEnvServer.release`. The request
    is acted on at once. On a connect the handshake is slow; on a close, the closing.
    ``restart``: the server dies with all its sessions, and listens again on its port after ``value`` seconds (0). The
    request is not acted on. Not on a close.

    To a reset, step or state that is not acted on:

    ``freeze``: for ``value`` seconds or, with None, until `MockEnvServer.release` nothing of this connection is read or
    answered, pings included; then it is cut.
    ``close``: the socket is closed with code ``value`` (1011), or with a tuple of code and reason.
    ``error``: the answer is an error of code ``value`` (EXECUTION_ERROR).

    To a reset, step or state that is acted on:

    ``drop_after``: the TCP connection is cut instead of the answer.
    ``garbage``: ``value``, a str or bytes (a JSON text that breaks off), is sent instead of the answer.
    ``wrong_type``: the field ``value`` of the answer ("data") holds a list, which is right for none. Fields are "type"
    and "data" and, but for a state, "observation", "reward", "done" and "metadata".
    ``big``: the answer has more than ``value`` bytes (64 MiB, which is what a client takes by default).
    ``send``: ``value``, a str or bytes, is sent instead of the answer.
    ``extra``: ``value``, a str or bytes, is sent after the answer.

    Args:
        kind: What happens, see above.
        on: To what: a connect, or a request of this type.
        value: See above; the default of a kind stands there in brackets.
        nth: To which of them, counted from 1 when the fault is given to the server.
        times: To how many in a row; None for all from then on.

    Raises:
        ValueError: There is no such fault.
    """

    kind: Literal[
        "refuse",
        "http",
        "full",
        "drop",
        "delay",
        "restart",
        "freeze",
        "close",
        "error",
        "drop_after",
        "garbage",
        "wrong_type",
        "big",
        "send",
        "extra",
    ]
    on: Literal["connect", "reset", "step", "state", "close"]
    value: Any = None
    nth: int = 1
    times: int | None = 1

    def __post_init__(self) -> None:
        kind = _KINDS.get(self.kind)
        if kind is None:
            raise ValueError(f"there is no fault {self.kind!r}; use one of {', '.join(_KINDS)}")
        if self.on not in kind.on:
            raise ValueError(f"{self.kind!r} cannot happen on {self.on!r}, only on {', '.join(kind.on)}")
        if self.value is None:
            object.__setattr__(self, "value", kind.default)
        if not kind.takes(self.value):
            raise ValueError(f"the value of {self.kind!r} is {self.value!r:.100}; give {kind.wanted}")
        if self.kind == "wrong_type" and self.on == "state" and self.value not in ("type", "data"):
            raise ValueError(f"an answer to 'state' has no field {self.value!r}; give 'type' or 'data'")
        if not _is_count(self.nth):
            raise ValueError(f"nth is {self.nth!r}; give a whole number, 1 for the first {self.on}")
        if self.times is not None and not _is_count(self.times):
            raise ValueError(f"times is {self.times!r}; give a whole number from 1, or None for all from then on")
        if self.kind == "refuse" and self.times != 1:
            raise ValueError(
                f"times is {self.times!r}, but a refused connection cannot be counted: it never arrives; "
                "say in value for how many seconds they are refused"
            )

    def strikes(self, count: int) -> bool:
        """Whether it happens to the event of this number."""
        return self.nth <= count and (self.times is None or count < self.nth + self.times)

    def forge(self) -> str | bytes:
        """The frame that is sent instead of the answer, of a fault of one of the kinds `FORGED`."""
        if self.kind not in ("wrong_type", "big"):
            frame: str | bytes = self.value
            return frame
        data: dict[str, Any] = {} if self.on == "state" else {"observation": {}, "reward": 0.0, "done": False}
        answer: dict[str, Any] = {"type": "state" if self.on == "state" else "observation", "data": data}
        if self.kind == "big":
            data.setdefault("observation", {})["padding"] = "x" * self.value
        else:
            (answer if self.value in answer else data)[self.value] = ["wrong"]
        return json.dumps(answer)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_status(value: object) -> bool:
    return value in list(HTTPStatus) and value not in (100, 101, 102, 103)


def _is_close(value: Any) -> bool:
    code, reason = value if isinstance(value, tuple) and len(value) == 2 else (value, "")
    if not _is_count(code) or not isinstance(reason, str) or len(reason.encode()) > 123:
        return False
    try:
        Close(code, reason).check()
    except ProtocolError:
        return False
    return True


class _Kind(NamedTuple):
    on: tuple[str, ...]
    takes: Callable[[Any], bool] = lambda value: value is None
    wanted: str = "none"
    default: Any = None


_REQUESTS = ("reset", "step", "state")
_FIELDS = ("type", "data", "observation", "reward", "done", "metadata")


def _pause(*on: str) -> _Kind:
    return _Kind(on, lambda value: value is None or _is_seconds(value), "seconds from 0, or None until release()")


def _frame(default: str | None) -> _Kind:
    return _Kind(_REQUESTS, lambda value: isinstance(value, (str, bytes)), "a str or bytes", default)


_KINDS = {
    "refuse": _pause("connect"),
    "http": _Kind(("connect",), _is_status, "an HTTP status that ends a handshake, such as 503", 503),
    "full": _Kind(("connect",)),
    "drop": _Kind(("connect", *_REQUESTS, "close")),
    "delay": _pause("connect", *_REQUESTS, "close"),
    "restart": _Kind(("connect", *_REQUESTS), _is_seconds, "seconds from 0", 0),
    "freeze": _pause(*_REQUESTS),
    "close": _Kind(_REQUESTS, _is_close, "a close code such as 1011, or a tuple of it and a reason", 1011),
    "error": _Kind(
        _REQUESTS, lambda value: isinstance(value, str), "a code such as 'SESSION_ERROR'", "EXECUTION_ERROR"
    ),
    "drop_after": _Kind(_REQUESTS),
    "garbage": _frame('{"type": "observ'),
    "wrong_type": _Kind(_REQUESTS, lambda value: value in _FIELDS, f"one of {', '.join(_FIELDS)}", "data"),
    "big": _Kind(_REQUESTS, _is_count, "a number of bytes", 64 * 2**20),
    "send": _frame(None),
    "extra": _frame(None),
}
