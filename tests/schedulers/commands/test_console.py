"""What is printed is what was given."""

from __future__ import annotations

import pytest

from schedulers.commands.console import say, warn


def test_lines_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    say("guess.py:x: [red] :bug:")
    say("gone", error=True)
    warn("warning", "a:fire:b", style="yellow")
    assert capsys.readouterr() == ("guess.py:x: [red] :bug:\n", "gone\nwarning: a:fire:b\n")
