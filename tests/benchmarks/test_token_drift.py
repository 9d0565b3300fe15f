"""The comparison finds what tokenising again loses, and nothing where nothing is lost."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks import token_drift
from benchmarks.token_drift import Drift, Recorder, Subject, measure, play, sampled_logprobs
from openenv_client.testing import MockEnvServer
from schedulers import RequestConfig, RolloutInferRequest, RolloutOutput
from schedulers.engines import ScriptedEngine
from tests.examples.sudoku.games import seeded
from tests.schedulers.engines.tiny_model import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def subject() -> Subject:
    """A tokenizer of single characters, which spells each text in one way."""
    return Subject("tiny", make_model().eval(), make_tokenizer(), games=1)


def output_of(subject: Subject, answers: list[list[int]]) -> tuple[Recorder, RolloutOutput]:
    """A trajectory with these answers, as it would have been recorded."""
    between = [7, 8, 9]
    recorder = Recorder(ScriptedEngine([]))
    completion: list[int] = []
    mask: list[int] = []
    for number, answer in enumerate(answers):
        completion += [*(between if number else []), *answer]
        mask += [0] * (3 if number else 0) + [1] * len(answer)
        recorder.turns.setdefault("one", []).append(([], answer))
    whole = between + completion
    places = [3 + place for place, sampled in enumerate(mask) if sampled]
    values = iter(sampled_logprobs(subject.model, whole, places))
    logprobs = [[next(values) for _ in answer] for answer in answers]
    output = RolloutOutput(
        None, [], uuid="one", response_token_ids=answers, rollout_logprobs=logprobs, prompt_token_ids=between,
        completion_token_ids=completion, completion_mask=mask,
    )  # fmt: skip
    return recorder, output


def test_an_answer_that_is_spelled_as_the_tokenizer_does_loses_nothing(subject: Subject) -> None:
    ids = subject.tokenizer.encode("[1 2 3]")
    recorder, output = output_of(subject, [[*ids, subject.tokenizer.eos_token_id], ids])
    drift = measure(subject, recorder, [output])
    assert drift == Drift("tiny", games=1, turns=2, tokens=2 * len(ids) + 1)


def test_tokens_that_the_text_does_not_show_are_lost(subject: Subject) -> None:
    """A special token in the middle of an answer is in no text, so one of its four tokens is lost."""
    user = subject.tokenizer.convert_tokens_to_ids("<user>")
    ids = subject.tokenizer.encode("abc")
    recorder, output = output_of(subject, [[*ids[:2], user, ids[2]], ids])
    drift = measure(subject, recorder, [output])
    assert (drift.drifted_games, drift.drifted_turns, drift.drifted_tokens, drift.tokens) == (1, 1, 1, 7)
    assert drift.recorded_lost == 0
    with_user, without = [7, 8, 9, *ids[:2], user, ids[2]], [7, 8, 9, *ids]
    error = sum(sampled_logprobs(subject.model, with_user, range(3, 7)))
    error -= sum(sampled_logprobs(subject.model, without, range(3, 6)))
    assert drift.errors == [pytest.approx(abs(error), abs=1e-5)]
    assert drift.mean_error == drift.largest_error == drift.errors[0]


def test_a_record_that_is_not_what_was_sampled_is_counted(subject: Subject) -> None:
    ids = subject.tokenizer.encode("abc")
    recorder, output = output_of(subject, [ids])
    recorder.turns["one"] = [([], [*ids[:2], 11])]
    assert output.rollout_logprobs is not None
    output.rollout_logprobs[0][1] += 0.5
    drift = measure(subject, recorder, [output])
    assert drift.recorded_lost == 1
    assert drift.recorded_error == pytest.approx(0.5, abs=1e-5)


def test_a_game_that_was_not_played_is_no_game_without_drift(subject: Subject) -> None:
    recorder, output = output_of(subject, [[7]])
    with pytest.raises(ValueError, match="was not played: the server is gone"):
        measure(subject, recorder, [replace(output, rollout_infos={"error": "the server is gone"})])


def test_an_engine_that_tells_no_ids_is_refused() -> None:
    async def ask() -> Any:
        return await Recorder(ScriptedEngine(["[1 2 3]"])).infer_async(RolloutInferRequest(), RequestConfig())

    with pytest.raises(ValueError, match="ScriptedEngine tells no ids"):
        asyncio.run(ask())


def test_games_of_a_tokenizer_with_merges_drift_and_their_record_does_not() -> None:
    _, merges = token_drift.subjects(0, games=8, smollm2=None, smollm2_games=1)
    with MockEnvServer(seeded(4), capacity=16) as server:
        drift = measure(merges, *play(merges, server.base_url, seed=0))
    assert (drift.games, drift.recorded_lost) == (8, 0)
    assert drift.recorded_error < 1e-4
    assert drift.drifted_games > 2
    assert drift.largest_error > 0.1


def test_a_file_that_cannot_be_written_is_refused_before_a_game_is_played(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match=f"{tmp_path}: .*; name another file"):
        token_drift.main(output=tmp_path)


def test_the_command_prints_a_table_and_writes_its_figures(tmp_path: Path) -> None:
    options = ["--games", "2", "--smollm2", "not-there", "--output", "figures/drift.json"]
    script = ROOT / "benchmarks" / "token_drift.py"
    done = subprocess.run([sys.executable, script, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "not-there is not there (make smollm2 fetches it)" in done.stdout
    assert "turns that drift" in done.stdout
    figures = json.loads((tmp_path / "figures" / "drift.json").read_text())
    assert [drift["games"] for drift in figures["drifts"]] == [2, 2]
