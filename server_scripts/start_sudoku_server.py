"""Start an OpenEnv server that plays TextArena games, Sudoku unless told otherwise.

    python server_scripts/start_sudoku_server.py --port 8000

Every setting can be given by a variable too; the option wins. ``--help`` explains them.
"""

from __future__ import annotations

import enum
import errno
import ipaddress
import logging
import math
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

INSTALL = 'The server needs more packages. From the checkout: pip install -e ".[server]"'

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit(INSTALL) from None

if TYPE_CHECKING:
    from server_scripts.textarena_games import GameSource

VARIABLES = {
    "host": "HOST",
    "port": "PORT",
    "env_id": "TEXTARENA_ENV_ID",
    "max_concurrent_envs": "MAX_CONCURRENT_ENVS",
    "clues": "TEXTARENA_CLUES",
    "max_turns": "TEXTARENA_MAX_TURNS",
    "ws_ping_interval": "UVICORN_WS_PING_INTERVAL",
    "ws_ping_timeout": "UVICORN_WS_PING_TIMEOUT",
    "ws_max_size": "UVICORN_WS_MAX_SIZE",
    "log_level": "UVICORN_LOG_LEVEL",
}
"""The environment variable of each option, which beats it. The last four are those of uvicorn's own command line."""


class LogLevel(str, enum.Enum):
    """What uvicorn and OpenEnv log, from least to most; `debug` includes every HTTP request."""

    CRITICAL = "critical"
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    DEBUG = "debug"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def start(
    *,
    host: Annotated[
        str,
        typer.Option(
            envvar=VARIABLES["host"], help="Address to listen on. 0.0.0.0 is every interface of this machine."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar=VARIABLES["port"], min=0, max=65535, help="Port to listen on. 0 takes a free one.")
    ] = 8000,
    env_id: Annotated[
        str,
        typer.Option(
            envvar=VARIABLES["env_id"],
            help="TextArena's id of a game of one player. Sudoku-v0-very-easy has 6 empty cells, -easy 11, "
            "Sudoku-v0 21, -medium about 40, -hard more than 50.",
        ),
    ] = "Sudoku-v0",
    max_concurrent_envs: Annotated[
        int,
        typer.Option(
            envvar=VARIABLES["max_concurrent_envs"],
            min=1,
            help="How many sessions may be open at a time. For training, at least as many as games are played at once.",
        ),
    ] = 64,
    clues: Annotated[
        int | None,
        typer.Option(
            envvar=VARIABLES["clues"],
            min=17,
            max=80,
            show_default="that of the id",
            help="Sudoku: how many cells are filled at the start. Below 25 a puzzle can take seconds to make, and "
            "keeps more clues where it must to have one solution.",
        ),
    ] = None,
    max_turns: Annotated[
        int | None,
        typer.Option(
            envvar=VARIABLES["max_turns"],
            min=1,
            show_default="that of the id",
            help="TextArena's limit: a game ends with the first move after this many accepted ones.",
        ),
    ] = None,
    ws_ping_interval: Annotated[
        str,
        typer.Option(
            envvar=VARIABLES["ws_ping_interval"],
            metavar="SECONDS",
            help="How often a client is asked whether it is still there. 0 or none: never.",
        ),
    ] = "30",
    ws_ping_timeout: Annotated[
        str,
        typer.Option(
            envvar=VARIABLES["ws_ping_timeout"],
            metavar="SECONDS",
            help="How long its answer is waited for before the session is closed. 0 or none: for ever.",
        ),
    ] = "120",
    ws_max_size: Annotated[
        int,
        typer.Option(
            envvar=VARIABLES["ws_max_size"],
            metavar="BYTES",
            min=1024,
            max=2**30,
            help="The longest message that a client may send. A longer one ends its session with close code 1009.",
        ),
    ] = 2**24,
    log_level: Annotated[
        LogLevel,
        typer.Option(envvar=VARIABLES["log_level"], case_sensitive=False, help="debug includes every HTTP request."),
    ] = LogLevel.WARNING,
    exit_with_stdin: Annotated[
        bool,
        typer.Option(
            "--exit-with-stdin",
            help="Stop when standard input ends. A program that starts the server with a pipe to it takes the server "
            "down with it, however it dies.",
        ),
    ] = False,
) -> None:
    """Serve a TextArena game to OpenEnv clients.

    Prints the address when it is ready. Ctrl-C and SIGTERM close all sessions and stop it.
    """
    # While it serves, uvicorn has handlers of its own; it closes the sessions and then raises the signal again.
    signal.signal(signal.SIGINT, _exit)
    signal.signal(signal.SIGTERM, _exit)
    if exit_with_stdin:
        threading.Thread(target=_stop_when_stdin_ends, daemon=True).start()
    ping_interval = _seconds("ws_ping_interval", ws_ping_interval)
    ping_timeout = _seconds("ws_ping_timeout", ws_ping_timeout)
    source = _source(env_id, clues=clues, max_turns=max_turns)
    listener = _listen(host, port)

    # OpenEnv goes on without its web page when that cannot be imported. The page is not served here, and the library
    # that it is made with takes three quarters of the time to start.
    sys.modules["openenv.core.env_server.web_interface"] = None  # type: ignore[assignment]

    import uvicorn

    from server_scripts.textarena_app import Server, create_app

    logging.basicConfig(level=log_level.value.upper())
    config = uvicorn.Config(
        create_app(source, max_concurrent_envs=max_concurrent_envs),
        log_level=log_level.value,
        access_log=log_level is LogLevel.DEBUG,
        ws_ping_interval=ping_interval,
        ws_ping_timeout=ping_timeout,
        ws_max_size=ws_max_size,
    )
    _announce(listener, env_id, max_concurrent_envs)
    Server(config).run(sockets=[listener])


def _source(env_id: str, **settings: int | None) -> GameSource:
    from server_scripts.textarena_games import GameError, GameSource

    try:
        return GameSource(env_id, settings={name: value for name, value in settings.items() if value is not None})
    except GameError as error:
        _refuse(error.setting, str(error))


def _seconds(name: str, text: str) -> float | None:
    """Read a number of seconds; None stands for never."""
    try:
        seconds = 0.0 if text.strip().lower() == "none" else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        _refuse(name, f"{text!r} is not a number of seconds. It takes 0, none (both: never) or a positive number.")
    return seconds or None


def _listen(host: str, port: int) -> socket.socket:
    """Open the listening socket. A client that comes before the server is ready waits in its queue."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        _refuse("host", f"{host!r} is neither an address nor a known name of this machine ({error}).")
    try:
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                _refuse("port", f"port {port} of {host} is in use. Choose another; 0 takes a free one.")
            case errno.EACCES:
                _refuse("port", f"this user may not listen on port {port}. Those from 1024 are free to all.")
            case _:
                _refuse("host", f"cannot listen on {host!r}: {os.strerror(error.errno or 0)}.")
    if not ipaddress.ip_address(address[0]).is_loopback:
        typer.echo(f"Warning: other machines can reach {host}, and the server asks nobody for a password.", err=True)
    return listener


def _refuse(name: str, message: str) -> NoReturn:
    """End the program with a usage error that names the option and the variable."""
    option = f"'--{name.replace('_', '-')}' (env var: '{VARIABLES[name]}')"
    raise typer.BadParameter(message, param_hint=option)


def _announce(listener: socket.socket, env_id: str, max_concurrent_envs: int) -> None:
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    reachable = ("::1" if address.version == 6 else "127.0.0.1") if address.is_unspecified else host
    bound, reachable = (
        f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}" for name in (host, reachable)
    )
    typer.echo(f"""\
{env_id} is ready at {bound} for up to {max_concurrent_envs} sessions at a time. Ctrl-C stops it. To play:

    from openenv_client import OpenEnvWrapper
    with OpenEnvWrapper(base_url="{reachable}") as env: print(env.reset(seed=0).observation["prompt"])
""")


def _exit(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def _stop_when_stdin_ends() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    try:
        app()
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}. {INSTALL}") from None
