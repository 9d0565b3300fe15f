"""Start an OpenEnv server that plays a TextArena game of one player: ``start_sudoku_server.py``, for any other game.

python server_scripts/start_textarena_server.py --list
python server_scripts/start_textarena_server.py --env-id Mastermind-v0
"""

from __future__ import annotations

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).resolve().with_name("start_sudoku_server.py")), run_name="__main__")
