"""Recorded episodes: played by a mock server, and written by one that stands before a real server."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openenv_client.checks import positive
from openenv_client.protocol import websocket_url
from openenv_client.session import Deadline, Session, SessionSettings

__all__ = ["record", "transcript"]

_Play = Callable[[dict[str, Any]], Generator[str | dict[str, Any], dict[str, Any], None]]


@dataclass
class _Turn:
    """A reset or step, its answer, and what the state was after it if the recording tells."""

    line: int
    asked: dict[str, Any]
    recv: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)

    def reply(self) -> str | dict[str, Any]:
        if self.recv.get("type") != "observation":
            return json.dumps(self.recv)
        return {**self.recv["data"], "state": self.state}


def transcript(path: str | os.PathLike[str], *, strict: bool = True) -> _Play:
    """A script that plays recorded episodes.

    The recording is a file of JSON lines ``{"send": request, "recv": answer}``, as `record` writes them. A reset plays
    the episode that was recorded with the same reset arguments, the first of them if there are several. `state` is
    answered as it was recorded last; whether it is asked for does not matter.

    Args:
        path: The file.
        strict: Raise an AssertionError for a reset or step other than the recorded one: the client gets an
            EXECUTION_ERROR with its text, and leaving the ``with`` block of the server raises it. If False, requests
            are answered in order, whatever they are, and an unknown reset plays the first episode.

    Raises:
        ValueError: The file holds no such recording.
        OSError: It cannot be read.
    """
    path = Path(path)
    episodes = _read(path)

    def play(reset_kwargs: dict[str, Any]) -> Generator[str | dict[str, Any], dict[str, Any], None]:
        episode = next((episode for episode in episodes if episode[0].asked == reset_kwargs), None)
        if episode is None:
            if strict:
                known = "; ".join(f"line {episode[0].line}: {episode[0].asked}" for episode in episodes)
                raise AssertionError(f"{path.name}: no episode was recorded for the reset {reset_kwargs}, only {known}")
            episode = episodes[0]
        action = yield episode[0].reply()
        for turn in episode[1:]:
            if strict and action != turn.asked:
                raise AssertionError(f"{path.name}, line {turn.line}: recorded step {turn.asked}, received {action}")
            action = yield turn.reply()
        if strict:
            raise AssertionError(
                f"{path.name}: the episode ends after line {episode[-1].line}, but received step {action}"
            )

    return play


def _read(path: Path) -> list[list[_Turn]]:
    """The episodes, each with its reset as the first turn."""
    episodes: list[list[_Turn]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        kind, asked, recv = _frames(f"{path}, line {number}", line)
        if kind == "reset":
            episodes.append([_Turn(number, asked, recv)])
        elif kind != "close" and not episodes:
            raise ValueError(f"{path}, line {number}: a {kind} comes before the first reset; record whole episodes")
        elif kind == "step":
            episodes[-1].append(_Turn(number, asked, recv, episodes[-1][-1].state))
        elif kind == "state" and recv.get("type") == "state":
            episodes[-1][-1].state = recv["data"]
    if not episodes:
        raise ValueError(f'{path} holds no episode; a line is {{"send": {{"type": "reset", …}}, "recv": {{…}}}}')
    return episodes


def _frames(where: str, line: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Type and data of what was sent, and what was received."""
    try:
        frames = json.loads(line)
        send, recv = frames["send"], frames.get("recv")
        kind, asked = send["type"], send.get("data", {})
        answered = kind == "close" or isinstance(recv["data"], dict)
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise ValueError(f'{where}: not {{"send": request, "recv": answer}}: {exc}') from None
    if kind not in ("reset", "step", "state", "close") or not isinstance(asked, dict) or not answered:
        raise ValueError(f"{where}: {line:.100} is no request of an OpenEnv client with its answer")
    return kind, asked, recv


def record(
    base_url: str,
    path: str | os.PathLike[str],
    *,
    headers: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> _Play:
    """A script that passes resets and steps on to a real server and writes a `transcript` of each episode.

    ::

        with MockEnvServer(record("http://127.0.0.1:8000", "game.jsonl")) as server:
            ...  # play against server.base_url

    An episode is appended to the file when it ends: with the next reset, or with its session.

    Args:
        base_url: Address of the real server. Each episode has a session of its own there.
        path: The file.
        headers: HTTP headers of the handshake.
        timeout: Seconds for each answer.

    Raises:
        ConfigurationError: The address is none, or ``timeout`` is not above 0.
    """
    positive("timeout", timeout)
    url, settings = websocket_url(base_url), SessionSettings(headers=dict(headers or {}))
    writing = threading.Lock()
    Path(path).write_text("", encoding="utf-8")  # of two recordings of an episode the older one would be played

    def play(reset_kwargs: dict[str, Any]) -> Generator[str | dict[str, Any], dict[str, Any], None]:
        session, lines = Session(url, settings), []
        request: dict[str, Any] = {"type": "reset", "data": reset_kwargs}
        try:
            session.connect(Deadline(timeout))
            while True:
                frame = session.exchange(request["type"], json.dumps(request), _text, Deadline(timeout))
                lines.append(json.dumps({"send": request, "recv": json.loads(frame)}) + "\n")
                request = {"type": "step", "data": (yield frame)}
        finally:
            with writing, Path(path).open("a", encoding="utf-8") as file:
                file.writelines(lines)
            session.close()

    return play


def _text(frame: str | bytes) -> str:
    return frame if isinstance(frame, str) else frame.decode()
