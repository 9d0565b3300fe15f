"""Which TextArena games of one player run on this machine without a network, found out by trying each."""

from __future__ import annotations

import contextlib
import functools
import io
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import nltk  # type: ignore[import-untyped]
from textarena.envs.registration import ENV_REGISTRY

from server_scripts.textarena_games import GameError, GameSource

__all__ = ["Trial", "describe", "try_games"]

VARIANTS = ("-raw", "-train")
"""Every id also exists with these endings. They change what becomes of the player's text, not whether a game runs."""

_NETWORK = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"}
_offline: ContextVar[bool] = ContextVar("offline", default=False)


@dataclass(frozen=True)
class Trial:
    """What came of trying a game.

    Args:
        env_id: TextArena's id.
        reason: Why it cannot be served here; None when it can.
    """

    env_id: str
    reason: str | None = None


def try_games(env_ids: Iterable[str] | None = None, *, seconds: float = 3.0) -> list[Trial]:
    """Make a game of each id, and play one move.

    Nothing is downloaded: the network is shut for the games, and what they print is dropped. Call it in the main
    thread, whose timer it uses.

    Args:
        env_ids: All of TextArena by default, without the variants.
        seconds: Of processor time for a game; one that takes longer to make is no use to a server.
    """
    if env_ids is None:
        env_ids = [env_id for env_id in ENV_REGISTRY if not env_id.endswith(VARIANTS)]
    with _shut_network(), _silence():
        return [Trial(env_id, _reason(env_id, seconds)) for env_id in env_ids]


def describe(trials: Iterable[Trial]) -> str:
    """The ids that run, one a line, and after them those that do not, by reason."""
    runs: list[str] = []
    others: dict[str, list[str]] = {}
    for trial in trials:
        (runs if trial.reason is None else others.setdefault(trial.reason, [])).append(trial.env_id)
    lines = [f"These {len(runs)} run here, each also with {' or '.join(VARIANTS)} behind its id:", *_indent(runs)]
    if others:
        lines += ["", "The others, by reason:"]
    for reason, env_ids in sorted(others.items(), key=lambda item: -len(item[1])):
        lines += [f"* {reason}", *_indent([", ".join(env_ids)])]
    return "\n".join(lines)


def _reason(env_id: str, seconds: float) -> str | None:
    try:
        with _time_limit(seconds):
            game = GameSource(env_id).new_game(seed=1)
            game.take_messages()
            game.step("[1]")
            game.take_messages()
    except GameError as error:
        return str(error).replace(f"{env_id} ", "", 1)
    except Exception as error:  # noqa: BLE001 - a game may raise anything; the others are to be tried all the same
        return f"fails in its first move: {type(error).__name__}: {error}"
    return None


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the block when it has used up its processor time."""

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"a game takes more than {seconds:g} s to make")

    before = signal.signal(signal.SIGVTALRM, stop)
    # Again and again: a game may catch the first one.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Drop what is printed, and what is warned of, inside the block."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _shut_network() -> Iterator[None]:
    """Refuse this thread every connection and every look-up of a name inside the block."""
    _hook_network()
    token = _offline.set(True)
    download, nltk.download = nltk.download, lambda *_, **__: False  # it would only complain
    try:
        yield
    finally:
        nltk.download = download
        _offline.reset(token)


@functools.cache  # a hook stays for the life of the process
def _hook_network() -> None:
    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event in _NETWORK and _offline.get():
            raise OSError("there is no network for games that are tried")

    sys.addaudithook(refuse)


def _indent(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
