"""The server that an evaluation plays on: one that runs already, or one that is started for as long as it takes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from openenv_client import OpenEnvError, OpenEnvWrapper, ServerFullError
from schedulers import OpenEnvScheduler, RolloutScheduler
from schedulers.commands.console import say
from schedulers.commands.names import WrongUse, construct, server_process

__all__ = ["TOKEN_VARIABLE", "environment_server"]

TOKEN_VARIABLE = "OPENENV_TOKEN"  # noqa: S105 - the name of the variable. An option would show it to every user.


@contextlib.contextmanager
def environment_server(
    scheduler: type[RolloutScheduler],
    *,
    serve: str | None,
    base_url: str | None,
    sessions: int,
    reset_kwargs: Mapping[str, Any],
) -> Iterator[str | None]:
    """Have a server for the length of the block.

    Args:
        scheduler: What is to play on it.
        serve: The game of a server that is to be started.
        base_url: A server that runs.
        sessions: How many games at a time it has to play, when it is started.
        reset_kwargs: How the first game starts: a running server is asked to, so that one which is not there shows now,
            and not in every game.

    Yields:
        Its address; None for a scheduler that needs none.

    Raises:
        WrongUse: It cannot be started or reached, or is not what the scheduler needs.
    """
    if not issubclass(scheduler, OpenEnvScheduler):
        if serve is not None or base_url is not None:
            raise WrongUse(f"{scheduler.__name__} plays without a server: leave --serve and --base-url out")
        yield None
    elif base_url is not None:
        _check(base_url, reset_kwargs)
        yield base_url
    elif serve is not None:
        with _started(serve, sessions) as address:
            yield address
    else:
        raise WrongUse(
            f"{scheduler.__name__} plays on a server: give the address of one (--base-url), or a game (--serve ENV_ID)"
        )


def _check(base_url: str, reset_kwargs: Mapping[str, Any]) -> None:
    what = "--base-url"
    wrapper = construct(
        OpenEnvWrapper,
        what,
        base_url=base_url,
        token=os.environ.get(TOKEN_VARIABLE),
        open_deadline=2,
        capacity_timeout=0,
    )
    try:
        with wrapper as env:
            env.reset(**reset_kwargs)
    except ServerFullError as error:
        say(f"{' '.join(str(error).split())} Games will wait for free sessions.", error=True)
    except OpenEnvError as error:
        raise WrongUse(f"{what}: {' '.join(str(error).split())}") from error


@contextlib.contextmanager
def _started(env_id: str, sessions: int) -> Iterator[str]:
    what = f"--serve {env_id}"
    token = os.environ.get(TOKEN_VARIABLE)
    server = construct(server_process(), what, env_id=env_id, max_concurrent_envs=sessions, token=token)
    try:
        server.start()
    except RuntimeError as error:
        # The last line of what it printed says why.
        first, *others = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise WrongUse(f"{what}: {' '.join([first, *others[-1:]])}") from error
    try:
        yield server.base_url
    finally:
        server.stop()
