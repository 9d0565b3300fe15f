from __future__ import annotations

import pytest

from benchmarks import overlap


def test_both_ways_play_all_games_and_their_ratio_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    overlap.main(engine="transformers", games=3, turns=2, delay=0.0, max_tokens=4)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in lines[:2]] == ["batch by batch", "each at its own pace"]
    assert all("3 games" in line for line in lines[:2])
    assert lines[2].startswith("ratio ")
