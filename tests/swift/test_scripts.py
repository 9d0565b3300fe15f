"""The plugin and the shell scripts, by ms-swift's own parser, and a training step by its own command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from swift.arguments import RLHFArguments, RolloutArguments
from swift.rollout import multi_turns
from swift.utils import utils as swift_utils
from transformers import HfArgumentParser

from examples.sudoku.scheduler import SudokuScheduler
from openenv_client.testing import Fault, MockEnvServer
from tests.examples.sudoku.games import seeded
from tests.swift.native import PLUGIN, POLICY, ROOT, TEMPLATE_PLUGIN, row

SCRIPTS = sorted((ROOT / "examples" / "sudoku" / "swift").glob("*.sh"))
COMMANDS = {"rlhf": RLHFArguments, "rollout": RolloutArguments}
SWIFT = Path(sys.executable).with_name("swift")
BASH = shutil.which("bash") or "bash"


def parse(arguments_class: type, arguments: list[str]) -> tuple[Any, list[str]]:
    """The parser of ``swift rlhf`` and ``swift rollout``; what it makes of a model, which is not here, is left out."""
    with swift_utils._patch_get_type_hints():
        parser = HfArgumentParser([arguments_class])
    parsed, unknown = parser.parse_known_args(arguments)
    return parsed, unknown


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_flag_of_a_script_is_known_to_swift(script: Path, tmp_path: Path) -> None:
    subprocess.run([BASH, "-n", script], check=True)
    recorder = tmp_path / "swift"
    recorder.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n", encoding="utf-8")
    recorder.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shown = subprocess.run(
        [BASH, script, "--seed", "7"], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    command, *arguments = shown.stdout.splitlines()
    parsed, unknown = parse(COMMANDS[command], arguments)
    assert unknown == []
    assert parsed.seed == 7
    assert parsed.use_gym_env is True
    for path in (*parsed.external_plugins, *parsed.dataset):
        assert (ROOT / path).is_file()
    assert (parsed.multi_turn_scheduler == "sudoku_scheduler") is (script.name != "server.sh")


def test_there_are_scripts_for_both_modes() -> None:
    assert [script.name for script in SCRIPTS] == ["colocate.sh", "rollout_server.sh", "server.sh"]


def test_swift_itself_loads_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the method that both of its commands call."""
    monkeypatch.delitem(multi_turns, "sudoku_scheduler", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    parsed, _ = parse(RolloutArguments, ["--external_plugins", str(PLUGIN)])
    RolloutArguments._import_external_plugins(parsed)
    assert multi_turns["sudoku_scheduler"].scheduler_class is SudokuScheduler


def train(tmp_path: Path, base_url: str, *options: str) -> str:
    """One step of GRPO on the embedded policy, as a user would start it; ms-swift's own engine samples."""
    dataset = tmp_path / "sudoku.jsonl"
    rows = [{"messages": [{"role": "user", "content": "Play"}], **row(base_url, seed)} for seed in range(4)]
    dataset.write_text("".join(f"{json.dumps(each)}\n" for each in rows), encoding="utf-8")
    command = [SWIFT, "rlhf", "--rlhf_type", "grpo", "--model", POLICY, "--model_type", "llama"]
    command += ["--template", "sudoku_policy", "--external_plugins", PLUGIN, TEMPLATE_PLUGIN]
    command += ["--multi_turn_scheduler", "sudoku_scheduler", "--use_vllm", "false"]
    command += ["--reward_funcs", "environment_reward", "--dataset", dataset, "--load_from_cache_file", "false"]
    command += ["--max_completion_length", "16", "--num_generations", "4", "--per_device_train_batch_size", "4"]
    command += ["--tuner_type", "full", "--torch_dtype", "float32", "--learning_rate", "1e-4", "--max_steps", "1"]
    command += ["--output_dir", tmp_path / "out", "--save_strategy", "no", "--report_to", "none"]
    command += ["--check_model", "false", "--dataloader_num_workers", "0", "--logging_steps", "1", *options]
    environment = {**os.environ, "USE_HF": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(
        [str(part) for part in command], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def test_a_training_step(tmp_path: Path) -> None:
    """Four games of several turns, one of them lost on the way; gradients come of them, and no session is left."""
    with MockEnvServer(seeded(empty=3), faults=[Fault("error", on="step", nth=3)]) as env_server:
        shown = train(tmp_path, env_server.base_url)
        env_server.wait_until(lambda: env_server.sessions == 0)
        assert env_server.kinds.count("reset") == 4
    assert shown.count("ended unscored") == 1
    logged = dict(re.findall(r"'([a-z_/A-Z]+)': '([-\de.]+)'", shown))
    assert float(logged["num_turns"]) > 1
    assert float(logged["grad_norm"]) > 0
    assert "rewards/EnvironmentReward/mean" in logged
