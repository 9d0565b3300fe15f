"""Start an OpenEnv server that plays TextArena games, Sudoku unless told otherwise.

    python server_scripts/start_sudoku_server.py --port 8000

Every setting can be given by a variable too; the option wins. ``--help`` explains them. No option takes the token
itself, since everyone on the machine can read a command line.
"""

# ruff: noqa: E402 - the imports come after the handlers

from __future__ import annotations

import os
import signal
from types import FrameType


def _exit(signum: int, frame: FrameType | None) -> None:
    os._exit(128 + signum)


if __name__ == "__main__":
    # Before the imports, in which an exception could get lost. While it serves, uvicorn has handlers of its own; it
    # closes the sessions and then raises the signal again.
    signal.signal(signal.SIGINT, _exit)
    signal.signal(signal.SIGTERM, _exit)

import enum
import errno
import ipaddress
import logging
import math
import socket
import sys
import threading
from pathlib import Path
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
    "token_file": "OPENENV_TOKEN",
    "session_timeout": "SESSION_TIMEOUT",
    "ws_ping_interval": "UVICORN_WS_PING_INTERVAL",
    "ws_ping_timeout": "UVICORN_WS_PING_TIMEOUT",
    "ws_max_size": "UVICORN_WS_MAX_SIZE",
    "log_level": "UVICORN_LOG_LEVEL",
}
"""The environment variable of each option, which beats it. OPENENV_TOKEN holds not the file but the token itself. Those
that begin with UVICORN are those of uvicorn's own command line."""

_SPARE_CONNECTIONS = 512  # beside those of the sessions: clients that are told that the server is full, probes


class LogLevel(str, enum.Enum):
    """What uvicorn and OpenEnv log, from least to most; `debug` includes every HTTP request."""

    CRITICAL = "critical"
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    DEBUG = "debug"


def _list_games(wanted: bool) -> None:
    if wanted:
        signal.signal(signal.SIGINT, _exit)
        from server_scripts.catalogue import describe, try_games

        typer.echo(describe(try_games()))
        raise typer.Exit


# Without rich, whose table leaves a narrow terminal no room for the texts.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def start(
    *,
    host: Annotated[
        str,
        typer.Option(envvar=VARIABLES["host"], metavar="ADDRESS", help="Where to listen; 0.0.0.0 is every interface."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar=VARIABLES["port"], metavar="PORT", min=0, max=65535, help="0 takes a free one.")
    ] = 8000,
    env_id: Annotated[
        str,
        typer.Option(
            envvar=VARIABLES["env_id"],
            metavar="ID",
            help="TextArena's id of a game of one player. Empty cells: Sudoku-v0-very-easy 6, -easy 11, Sudoku-v0 21, "
            "-medium about 40, -hard more than 50.",
        ),
    ] = "Sudoku-v0",
    list_games: Annotated[
        bool,
        typer.Option(
            "--list",
            is_eager=True,
            callback=_list_games,
            help="Try all games, say which run on this machine and why the others do not, and stop.",
        ),
    ] = False,
    max_concurrent_envs: Annotated[
        int,
        typer.Option(
            envvar=VARIABLES["max_concurrent_envs"],
            metavar="NUMBER",
            min=1,
            help="Sessions at a time; for training, at least as many as games.",
        ),
    ] = 64,
    clues: Annotated[
        int | None,
        typer.Option(
            envvar=VARIABLES["clues"],
            metavar="NUMBER",
            min=17,
            max=80,
            show_default="that of the id",
            help="Sudoku: filled cells at the start. Below 25 a puzzle can take seconds, and keeps more clues where it "
            "must to have one solution.",
        ),
    ] = None,
    max_turns: Annotated[
        int | None,
        typer.Option(
            envvar=VARIABLES["max_turns"],
            metavar="NUMBER",
            min=1,
            show_default="that of the id",
            help="A game ends with the first move after so many accepted ones.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            show_default="OPENENV_TOKEN, else none",
            help="The file that holds the token that clients must send.",
        ),
    ] = None,
    session_timeout: Annotated[
        str,
        typer.Option(
            envvar=VARIABLES["session_timeout"],
            metavar="SECONDS",
            help="A session without a request for so long is closed. 0 or none: never.",
        ),
    ] = "3600",
    ws_ping_interval: Annotated[
        str,
        typer.Option(
            envvar=VARIABLES["ws_ping_interval"],
            metavar="SECONDS",
            help="How often a client is asked whether it is there. 0 or none: never.",
        ),
    ] = "30",
    ws_ping_timeout: Annotated[
        str,
        typer.Option(
            envvar=VARIABLES["ws_ping_timeout"],
            metavar="SECONDS",
            help="How long to wait for its answer. 0 or none: for ever.",
        ),
    ] = "120",
    ws_max_size: Annotated[
        int,
        typer.Option(
            envvar=VARIABLES["ws_max_size"],
            metavar="BYTES",
            min=1024,
            max=2**30,
            help="The longest message of a client; a longer one ends its session.",
        ),
    ] = 2**22,
    log_level: Annotated[
        LogLevel,
        typer.Option(envvar=VARIABLES["log_level"], case_sensitive=False, help="debug shows every HTTP request."),
    ] = LogLevel.WARNING,
    exit_with_stdin: Annotated[
        bool,
        typer.Option("--exit-with-stdin", help="Stop when standard input ends, as it does when a parent dies."),
    ] = False,
) -> None:
    """Serve a TextArena game to OpenEnv clients.

    Prints the address when it is ready. Ctrl-C and SIGTERM close all sessions and stop it.
    """
    if exit_with_stdin:
        threading.Thread(target=_stop_when_stdin_ends, daemon=True).start()
    idle = _seconds("session_timeout", session_timeout)
    ping_interval = _seconds("ws_ping_interval", ws_ping_interval)
    ping_timeout = _seconds("ws_ping_timeout", ws_ping_timeout)
    token = _token(token_file)
    source = _source(env_id, clues=clues, max_turns=max_turns)
    listener = _listen(host, port)
    loopback = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
    if not loopback:
        _warn(host, token)

    # OpenEnv goes on without its web page when that cannot be imported. The page is not served here, and the library
    # that it is made with takes three quarters of the time to start.
    sys.modules["openenv.core.env_server.web_interface"] = None  # type: ignore[assignment]

    import uvicorn

    from server_scripts.connections import HTTPConnection, WebSocketConnection
    from server_scripts.guard import Guard
    from server_scripts.textarena_app import Server, create_app

    logging.basicConfig(level=log_level.value.upper())
    application = create_app(source, max_concurrent_envs=max_concurrent_envs)
    config = uvicorn.Config(
        Guard(application, token=token, loopback=loopback, session_timeout=idle),
        http=HTTPConnection,
        ws=WebSocketConnection,
        log_level=log_level.value,
        access_log=log_level is LogLevel.DEBUG,
        limit_concurrency=max_concurrent_envs + _SPARE_CONNECTIONS,
        ws_ping_interval=ping_interval,
        ws_ping_timeout=ping_timeout,
        ws_max_size=ws_max_size,
        ws_per_message_deflate=False,  # a few bytes could unfold to the longest message, and games send little
    )
    _announce(listener, env_id, max_concurrent_envs, token)
    Server(config).run(sockets=[listener])


def _token(path: Path | None) -> str | None:
    """Read the token from the file, else from the variable. One that is set to nothing is refused, not left out."""
    from server_scripts.guard import TokenError, checked_token

    text = os.environ.pop(VARIABLES["token_file"], None)  # no process that is started from here needs it
    try:
        if path is not None:
            text = path.read_text("latin-1").rstrip("\r\n")
        return None if text is None else checked_token(text)
    except OSError as error:
        _refuse("token_file", f"{path} cannot be read: {error.strerror}.")
    except TokenError as error:
        _refuse("token_file", str(error))


def _warn(host: str, token: str | None) -> None:
    """Say what is open to other machines, and what to do about it."""
    tls = "The server speaks no TLS: put a proxy that does in front of it"
    if token is None:
        danger = f"anyone there can play. Set {VARIABLES['token_file']} to a token that clients must send. {tls}."
    else:
        danger = f"the token can be read on the way. {tls}."
    typer.echo(f"Warning: other machines can reach {host}, and {danger}", err=True)


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
        # Connections inherit it. asyncio would not set it on those of a listener made like this one, and a reply behind
        # another small frame would wait up to 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                _refuse("port", f"port {port} of {host} is in use. Choose another; 0 takes a free one.")
            case errno.EACCES:
                _refuse("port", f"this user may not listen on port {port}. Those from 1024 are free to all.")
            case _:
                _refuse("host", f"cannot listen on {host!r}: {os.strerror(error.errno or 0)}.")
    return listener


def _refuse(name: str, message: str) -> NoReturn:
    """End the program with a usage error that names the option and the variable."""
    option = f"'--{name.replace('_', '-')}' (env var: '{VARIABLES[name]}')"
    raise typer.BadParameter(message, param_hint=option)


def _announce(listener: socket.socket, env_id: str, max_concurrent_envs: int, token: str | None) -> None:
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    reachable = ("::1" if address.version == 6 else "127.0.0.1") if address.is_unspecified else host
    bound, reachable = (
        f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}" for name in (host, reachable)
    )
    arguments = f'base_url="{reachable}"' + (", token=…" if token is not None else "")
    typer.echo(f"""\
{env_id} is ready at {bound} for up to {max_concurrent_envs} sessions at a time. Ctrl-C stops it. To play:

    from openenv_client import OpenEnvWrapper
    with OpenEnvWrapper({arguments}) as env: print(env.reset(seed=0).observation["prompt"])
""")


def _stop_when_stdin_ends() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    try:
        app()
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}. {INSTALL}") from None
