"""The code in docs/how-to/use-vllm.md runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from server_scripts.launch import ServerProcess

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(
    r"^```python\n(.*?)^```$",
    (ROOT / "docs" / "how-to" / "use-vllm.md").read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs(number: int, environment_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    server = environment_server(env_id="Sudoku-v0-very-easy", max_concurrent_envs=16)
    script = tmp_path / "snippet.py"
    code = SNIPPETS[number].replace("http://127.0.0.1:8000", server.base_url).replace("outputs/trl", str(tmp_path))
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
