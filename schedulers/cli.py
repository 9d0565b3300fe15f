"""The entry point of ``openenv-rollout``."""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. The process ends with 0, 1 (see the command), 2 (wrong use) or 130 (interrupted)."""
    # The imports take a second or two, and in them an exception could get lost. There is nothing to clean up yet.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        from schedulers.commands.app import app
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        print(f'openenv-rollout needs {error.name}: pip install "openenv-client[cli]"', file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from None
    # Where the user is counts, as with python -m: a game of one's own, or a checkout of this project.
    sys.path.insert(0, os.getcwd())
    app(prog_name="openenv-rollout")


if __name__ == "__main__":
    main()
