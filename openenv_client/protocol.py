"""OpenEnv on the wire, without I/O: addresses, requests as text, text as results or errors."""

from __future__ import annotations

import ipaddress
import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote, urlsplit, urlunsplit

from .errors import (
    ConfigurationError,
    EnvironmentFailedError,
    OpenEnvError,
    ProtocolError,
    RequestError,
    ServerFullError,
    SessionFailedError,
)

__all__ = [
    "CLOSE",
    "STATE",
    "Observation",
    "encode_reset",
    "encode_step",
    "is_loopback",
    "parse_observation",
    "parse_state",
    "parse_unasked",
    "public_url",
    "websocket_url",
    "without_secrets",
]

CLOSE = '{"type":"close"}'
STATE = '{"type":"state"}'  # the server refuses a `data` key here

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_MAX_DEPTH = 100  # deeper than any observation, and shallow enough for whoever walks through one by recursion
_URL_REMEDY = "Give the address of the server, for example http://127.0.0.1:8000."


class Observation(NamedTuple):
    """The reply to reset and step."""

    observation: dict[str, Any]
    reward: float | None  # None: the server gave none
    done: bool
    metadata: dict[str, Any]


# Addresses


def websocket_url(base_url: str) -> str:
    """The address of the WebSocket endpoint of a server.

    Args:
        base_url: Address of the server: http, https, ws or wss (in any case; http if there is none), with or without a
            path prefix, trailing slashes and the final ``/ws``. Blanks around it are dropped.

    Raises:
        ConfigurationError: It is not such an address.
    """
    if not isinstance(base_url, str):
        raise ConfigurationError(f"base_url is a {type(base_url).__name__}, not a string", remedy=_URL_REMEDY)
    text = base_url.strip()
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port  # the port is checked when it is read
        (host or "").encode("idna")
        name = unquote(parts.username or "", errors="strict")
        unquote(parts.password or "", errors="strict")
    except ValueError:  # whose text may show a part of a password; UnicodeError is one
        raise _bad_url(text, "is not an address") from None
    scheme = _SCHEMES.get(parts.scheme)
    if scheme is None:
        raise _bad_url(text, f"has a scheme other than {', '.join(_SCHEMES)}")
    if "://" not in text and host in _SCHEMES and parts.path.startswith("//"):  # http//h is no machine named http
        raise _bad_url(text, "lacks a colon after the scheme")
    if not host or port == 0 or parts.netloc.endswith(":") or " " in text or not text.isprintable():
        raise _bad_url(text, "is not an address")
    if (parts.username is None) != (parts.password is None) or ":" in name:
        raise _bad_url(text, "has a user name without a password, or with a colon")
    if parts.fragment or "@" in parts.path:
        raise _bad_url(text, "has a # or, after the host, an @; in a password /, ? and # are written %2F, %3F and %23")
    segments = [segment for segment in parts.path.split("/") if segment]
    if segments[-1:] != ["ws"]:
        segments.append("ws")
    return urlunsplit((scheme, parts.netloc, "/" + "/".join(segments), parts.query, ""))


def _bad_url(text: str, fault: str) -> ConfigurationError:
    return ConfigurationError(f"base_url {without_secrets(text)!r:.200} {fault}", remedy=_URL_REMEDY)


def without_secrets(text: str) -> str:
    """What may be shown of something that should be an address and perhaps is none."""
    # Which part of a malformed address is the password is anyone's guess.
    return "…@…" if "@" in text else re.split(r"[?#]", text)[0]


def public_url(url: str) -> str:
    """The address without what may be secret: user name, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def is_loopback(url: str) -> bool:
    """Whether the address is on this machine, where no proxy can help."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


# Requests


def encode_reset(kwargs: Mapping[str, Any]) -> str:
    """The text of a reset request.

    Raises:
        RequestError: The arguments are not a mapping of JSON values.
    """
    return _encode("reset", kwargs)


def encode_step(action: Mapping[str, Any]) -> str:
    """The text of a step request.

    Raises:
        RequestError: The action is not a mapping of JSON values.
    """
    return _encode("step", action)


def _encode(kind: str, data: Mapping[str, Any]) -> str:
    what = "the action" if kind == "step" else "the reset arguments"
    if not isinstance(data, Mapping):
        raise RequestError(
            f"{what} must be a dict, not {type(data).__name__}", remedy='A text goes as {"message": text}.'
        )
    try:
        text = json.dumps({"type": kind, "data": dict(data)}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise RequestError(f"{what} cannot be sent as JSON: {exc}", remedy="Use JSON values only.") from None
    return _without_lone_surrogates(text)


def _without_lone_surrogates(text: str) -> str:
    # Model text may hold half a character. It has no UTF-8 form: sent raw it would break the socket, and
    # escaped the server's reply. Proper pairs become their character, single halves U+FFFD.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# Replies


def parse_observation(frame: str | bytes) -> Observation:
    """The reply to a reset or step.

    Args:
        frame: The message as it arrived: str for a text frame, bytes for a binary one.

    Raises:
        EnvironmentFailedError: The server answered with an error that the session survives.
        ServerFullError: The server has no session left.
        SessionFailedError: The server answered with an error and ends the session.
        ProtocolError: It is none of these replies.
    """
    data = _data(frame, "observation")
    observation = data.get("observation")
    if not isinstance(observation, dict):
        raise _malformed(frame, f"has the observation {reprlib.repr(observation)}, not an object")
    done = data.get("done", False)
    if not isinstance(done, bool):
        raise _malformed(frame, f"has done {reprlib.repr(done)}, not true or false")
    metadata = data.get("metadata")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise _malformed(frame, f"has the metadata {reprlib.repr(metadata)}, not an object")
    return Observation(observation, _reward(frame, data.get("reward")), done, metadata)


def _reward(frame: str | bytes, reward: object) -> float | None:
    if reward is None:
        return None
    if isinstance(reward, (int, float)) and not isinstance(reward, bool):
        try:
            number = float(reward)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise _malformed(frame, f"has the reward {reprlib.repr(reward)}, not a finite number or null")


def parse_state(frame: str | bytes) -> dict[str, Any]:
    """The reply to a state request. Raises as `parse_observation` does."""
    return _data(frame, "state")


def parse_unasked(frame: str | bytes) -> OpenEnvError:
    """The error for a message without a request: a full server's refusal, or a reply that belongs to nobody."""
    try:
        _data(frame, "error")
    except (ServerFullError, SessionFailedError) as error:
        return error
    except OpenEnvError:
        pass  # whatever it says, it answers no request of ours
    return _malformed(frame, "came without a request")


def _data(frame: str | bytes, expected: str) -> dict[str, Any]:
    """The ``data`` of a reply of the expected type."""
    if not isinstance(frame, str):
        raise _malformed(frame, "is a binary frame, not text")
    reply = _load(frame)
    if not isinstance(reply, dict):
        raise _malformed(frame, "is not a JSON object")
    kind, data = reply.get("type"), reply.get("data")
    if not isinstance(data, dict):
        raise _malformed(frame, f"has the data {reprlib.repr(data)}, not an object")
    if kind == "error":
        _raise_error_reply(data)
    if kind != expected:
        raise _malformed(frame, f"is of type {reprlib.repr(kind)}, not {expected!r}")
    return data


def _load(frame: str) -> Any:
    try:
        reply = _decoder.decode(frame)
        # An escape may stand for half a character, which could never be sent back.
        if "\\ud" in frame or "\\uD" in frame:
            reply = _decoder.decode(_without_lone_surrogates(json.dumps(reply, ensure_ascii=False)))
    except RecursionError:
        raise _malformed(frame, "is nested too deeply") from None
    except ValueError as exc:  # bad JSON, what the decoder's hooks refuse, and integers too long to convert
        raise _malformed(frame, f"is not JSON: {exc}") from None
    if _depth(reply) > _MAX_DEPTH:
        raise _malformed(frame, f"is nested more than {_MAX_DEPTH} levels deep")
    return reply


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number:.20} is no finite number")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice in an object")
    return result


# Python's own reading is too lenient: it makes NaN of NaN, infinity of 1e999, and takes the last of two rewards.
_decoder = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_finite, parse_float=_finite)


def _depth(value: object) -> int:
    """How deep lists and dicts are nested, without recursion."""
    depth, level = 0, [value]
    while level := [inner for outer in level if isinstance(outer, (dict, list)) for inner in _members(outer)]:
        depth += 1
    return depth


def _members(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _raise_error_reply(data: dict[str, Any]) -> NoReturn:
    code = data.get("code")
    code = code if isinstance(code, str) else None
    text = str(data.get("message") or "no message")[:2000]
    if code == "CAPACITY_REACHED":
        active, maximum = _count(data.get("active_sessions")), _count(data.get("max_sessions"))
        used = "" if active is None or maximum is None else f": {active} of {maximum} sessions are in use"
        raise ServerFullError(f"the server is full{used}", active=active, maximum=maximum)
    if code in ("FACTORY_ERROR", "SESSION_ERROR"):
        raise SessionFailedError(f"the server ended the session with {code}: {text}", code=code)
    listed = data.get("errors")
    errors = [error for error in listed if isinstance(error, dict)] if isinstance(listed, list) else []
    details = "; ".join(f"{_path(error.get('loc')):.100}: {error.get('msg')!s:.200}" for error in errors[:5])
    # These are given before the environment is called.
    harmless = code in ("INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR")
    raise EnvironmentFailedError(
        f"the server answered {code or 'an error':.100}: {text}{f' ({details})' if details else ''}",
        code=code,
        errors=errors,
        maybe_applied=not harmless,
        remedy="Correct the request; the session is still open." if harmless else None,
    )


def _path(location: object) -> str:
    return ".".join(map(str, location)) if isinstance(location, list) else str(location)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _malformed(frame: str | bytes, fault: str) -> ProtocolError:
    return ProtocolError(f"the server's message {fault}", reply=repr(frame[:200]))
