"""Scripts: what a mock server plays instead of an environment."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

__all__ = ["Player", "Reply", "Script", "check_script", "echo", "reply"]

Reply = Mapping[str, Any] | str | bytes
"""One answer of a script: the data of an observation, see `reply`; or a whole frame, sent as it is."""

Script = Sequence[Reply] | Callable[[dict[str, Any]], Iterable[Reply]]
"""What the server plays: replies in order, the first of them to reset; or a function of the reset arguments that gives
such replies, usually a generator function, to which ``yield`` returns the next action."""

_logger = logging.getLogger(__name__)

_FIELDS = {"observation", "reward", "done", "metadata", "state"}
_REMEDY = "reply({…}) for an observation, or a whole frame as str or bytes"


def reply(
    observation: Mapping[str, Any],
    *,
    reward: float | None = None,
    done: bool = False,
    metadata: Mapping[str, Any] | None = None,
    state: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One reply of a script. A script may also hold any dict with one of these fields: it is sent, however wrong.

    Args:
        observation: The observation.
        reward: The reward.
        done: Whether the episode is over.
        metadata: What the server adds.
        state: What `state` tells from now on, besides ``episode_id`` and ``step_count``. It is not part of the reply.
    """
    data: dict[str, Any] = {"observation": dict(observation), "reward": reward, "done": done}
    if metadata is not None:
        data["metadata"] = dict(metadata)
    if state is not None:
        data["state"] = dict(state)
    return data


def echo(reset_kwargs: dict[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
    """The default script: observations tell the number of the step and the action; the reward is the number."""
    action = yield reply({"step": 0, "reset": reset_kwargs})
    for step in itertools.count(1):
        action = yield reply({"step": step, "action": action}, reward=float(step))


def check_script(script: Script) -> Script:
    """Refuse what is no script, such as a generator, which could be played only once, or a list of bare observations.

    Raises:
        TypeError: It is none, or one of its replies is none.
    """
    if callable(script):
        return script
    if not isinstance(script, Sequence) or isinstance(script, (str, bytes)):
        raise TypeError(f"the script is {script!r:.100}; give a list of replies or a function that gives them")
    for answer in script:
        _check_reply(answer)
        if isinstance(answer, str) and not answer.lstrip().startswith("{"):
            raise TypeError(f"{answer!r:.100} is no frame; give {_REMEDY}, and broken frames by Fault('send', …)")
    return script


def _check_reply(answer: object) -> None:
    if not isinstance(answer, (str, bytes)) and not (isinstance(answer, Mapping) and answer.keys() & _FIELDS):
        raise TypeError(f"the script gave {answer!r:.100}; give {_REMEDY}")


class Player:
    """Plays one session's script in a thread of its own, so that a script that waits does not stop the server.

    Args:
        number: Number of the session.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._episodes = self._steps = 0
        self._state: Mapping[str, Any] = {}
        self._replies: Iterator[Reply] = iter(())
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], str | bytes]] | None] = SimpleQueue()
        # A daemon, unlike the threads of an executor: a script that waits for ever must not hold the program's exit.
        self._thread = threading.Thread(target=self._work, name=f"MockEnvServer-session-{number}", daemon=True)

    async def reset(self, script: Script, kwargs: dict[str, Any]) -> str | bytes | BaseException:
        """Begin an episode. Gives the frame that answers, or what the script raised."""
        return await self._call(lambda: self._reset(script, kwargs))

    async def step(self, action: dict[str, Any]) -> str | bytes | BaseException:
        """Take an action. Gives the frame that answers, or what the script raised."""
        return await self._call(lambda: self._step(action))

    def state(self) -> dict[str, Any]:
        """The state of the episode."""
        return {"episode_id": f"{self.number}-{self._episodes}", "step_count": self._steps, **self._state}

    def end(self) -> None:
        """Close the script and end the thread, once the script lets go of it."""
        self._calls.put(None)

    def join(self, timeout: float) -> None:
        """Wait at most so many seconds until the script has let go."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(max(timeout, 0.0))

    # The session's thread

    async def _call(self, function: Callable[[], str | bytes]) -> str | bytes | BaseException:
        if self._thread.ident is None:
            self._thread.start()
        future: Future[str | bytes | BaseException] = Future()
        self._calls.put((future, function))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as exc:  # noqa: BLE001 - the server survives it; pytest.fail() raises no Exception
                future.set_result(exc)
        try:
            self._close_script()
        except BaseException:
            _logger.exception("the script of session %d failed when it was closed", self.number)

    def _reset(self, script: Script, kwargs: dict[str, Any]) -> str | bytes:
        self._close_script()
        self._episodes += 1
        self._steps, self._state = 0, {}
        self._replies = iter(script(kwargs) if callable(script) else script)
        return self._next(None)

    def _step(self, action: dict[str, Any]) -> str | bytes:
        self._steps += 1
        return self._next(action)

    def _close_script(self) -> None:
        replies, self._replies = self._replies, iter(())
        if isinstance(replies, Generator):
            replies.close()

    def _next(self, action: dict[str, Any] | None) -> str | bytes:
        replies = self._replies
        try:
            answer = replies.send(action) if isinstance(replies, Generator) else next(replies)
        except StopIteration:
            raise LookupError(f"the script has no reply number {self._steps + 1}") from None
        _check_reply(answer)
        if isinstance(answer, (str, bytes)):
            return answer
        data = dict(answer)
        self._state = data.pop("state", self._state)
        return json.dumps({"type": "observation", "data": data})
