"""The engine itself is tested where vLLM is, in tests/vllm."""

from __future__ import annotations

import subprocess
import sys


def test_without_the_extra_the_import_says_which_one_is_missing() -> None:
    code = "import sys; sys.modules['vllm'] = None; import schedulers.engines.vllm"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'pip install "openenv-client[vllm]"' in result.stderr
