"""Rows of a dataset."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedulers.rows import read_rows, without_address


def test_rows_are_the_lines_that_are_not_empty(tmp_path: Path) -> None:
    """A line ends where JSON lines end, not wherever Unicode has a line end."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": [], "note": "a\u2028b"}\n\n{"env_config": {"seed": 1}}', encoding="utf-8")
    assert read_rows(path) == [{"messages": [], "note": "a\u2028b"}, {"env_config": {"seed": 1}}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}\nx\n", r"rows.jsonl, line 2: Expecting value.*; each line must be a row as JSON"),
        (b"[]\n", "line 1: a request must be a RolloutInferRequest or a row"),
        (b'\n{"messages": "Play"}\n', "line 2: 'messages' of a row must be a list"),
        (b'{"env_config": 3}\n', "line 1: 'env_config' of a row must be a mapping, not a int"),
        (b"{}\n\xff\n", "line 2: .*can't decode"),
        (b"\n", "rows.jsonl has no rows"),
    ],
)
def test_what_is_no_row_is_named_by_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_rows(path)


def test_address_is_left_out() -> None:
    row = {"env_config": {"base_url": "http://127.0.0.1:1", "reset_kwargs": {"seed": 1}}, "level": 3}
    assert without_address(row) == {"env_config": {"reset_kwargs": {"seed": 1}}, "level": 3}
    assert without_address({"env_config": None}) == {"env_config": {}}
    assert "base_url" in row["env_config"]  # type: ignore[operator]
