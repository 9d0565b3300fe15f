"""How a command ends that does not simply end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import typer

from schedulers.commands.console import warn
from schedulers.commands.names import WrongUse

__all__ = ["ending_well"]


@contextlib.contextmanager
def ending_well() -> Iterator[None]:
    """Wrong use is one line and exit code 2; an interruption, of any kind, is 130 after all is cleaned up."""
    # asyncio turns these into a cancellation while it runs.
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT)),
    }
    try:
        yield
    except WrongUse as error:
        warn("error", str(error), style="bold red")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        # An interrupt that hit the start of a thread leaves one that Python does not know how to end, and a normal exit
        # would wait for it for ever.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
