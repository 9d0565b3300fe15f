"""SudokuScheduler for ms-swift: ``--external_plugins examples/sudoku/swift_plugin.py``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)

from examples.sudoku.scheduler import SudokuScheduler  # noqa: E402
from schedulers.trainers.swift import register  # noqa: E402

register("sudoku_scheduler", SudokuScheduler)
