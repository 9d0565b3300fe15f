"""Start an OpenEnv server that plays a TextArena game of one player, or list the games that run on this machine.

    python server_scripts/start_textarena_server.py --list
    python server_scripts/start_textarena_server.py --env-id Mastermind-v0

``--list`` tries every game, which takes some ten seconds. All other options are those of ``start_sudoku_server.py``.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from server_scripts.start_sudoku_server import INSTALL, _exit, app


def main() -> None:
    """List, or start."""
    if "--list" not in sys.argv[1:]:
        signal.signal(signal.SIGINT, _exit)
        signal.signal(signal.SIGTERM, _exit)
        app()

    from server_scripts.catalogue import describe, try_games

    print(describe(try_games()))  # noqa: T201 - it is what was asked for


if __name__ == "__main__":
    try:
        main()
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}. {INSTALL}") from None
