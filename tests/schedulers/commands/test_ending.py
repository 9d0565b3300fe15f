"""How commands end; tests/integration and tests/examples interrupt real ones."""

from __future__ import annotations

import signal

import pytest
import typer

from schedulers.commands.ending import ending_well
from schedulers.commands.names import WrongUse

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def test_wrong_use_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    """However long, and whatever markup it may look like."""
    with pytest.raises(typer.Exit) as caught, ending_well():
        raise WrongUse(f"--option [bold]{'x' * 200}: no")
    assert caught.value.exit_code == 2
    assert capsys.readouterr().err == f"error: --option [bold]{'x' * 200}: no\n"


def test_handlers_of_signals_are_given_back() -> None:
    """Until then, both interrupt."""
    before = [signal.getsignal(number) for number in NUMBERS]
    with ending_well():
        for number in NUMBERS:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
    assert [signal.getsignal(number) for number in NUMBERS] == before
