"""Train a language model on Sudoku with GRPO: ``examples/train_grpo.py``, whose default game is Sudoku."""

from __future__ import annotations

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "train_grpo.py"), run_name="__main__")
