"""Frames as an OpenEnv server reads and writes them, and what is kept of those that arrived."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

__all__ = ["Received", "error_frame", "read_request"]

_KEYS = {"reset": {"type", "data"}, "step": {"type", "data"}, "state": {"type"}, "close": {"type"}}


@dataclass(frozen=True)
class Received:
    """Something that arrived.

    Attributes:
        session: Number of the connection, counted from 1.
        kind: "connect", "reset", "step", "state" or "close"; of a message that is no request its type, or "garbage".
        data: The request's data; of a connect, its ``path`` and ``headers``; of what is no request, its ``text``.
    """

    session: int
    kind: str
    data: dict[str, Any]


def read_request(text: str | bytes) -> tuple[str, dict[str, Any], str | None]:
    """Type and data of a request, and what a server answers to it if it is none."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as exc:
        return "garbage", {"text": text}, error_frame("INVALID_JSON", f"Invalid JSON: {exc}")
    kind = message.get("type") if isinstance(message, dict) else None
    if not isinstance(kind, str) or kind not in _KEYS:
        return str(kind), {"text": text}, error_frame("UNKNOWN_TYPE", f"Unknown message type: {kind}")
    data = message.get("data", {})
    if not message.keys() <= _KEYS[kind] or not isinstance(data, dict):
        return kind, {"text": text}, error_frame("VALIDATION_ERROR", "Invalid message", errors=[])
    return kind, data, None


def error_frame(code: str, message: str, **data: Any) -> str:
    """An error reply."""
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **data}})
