"""What was probably meant."""

from __future__ import annotations

from schedulers.names import did_you_mean


def test_the_nearest_names_are_offered() -> None:
    assert did_you_mean("countr", ["counter", "other"]) == "did you mean 'counter'?"
    assert did_you_mean("abcd", ["abcx", "abcde", "zz"]) == "did you mean 'abcde' or 'abcx'?"


def test_nothing_is_offered_when_nothing_is_near() -> None:
    assert did_you_mean("xyz", ["a", "b"]) == ""
    assert did_you_mean("xyz", []) == ""
