"""What tokenising a model's text again would lose, beside what is recorded: ids, and their log-probabilities.

    python benchmarks/token_drift.py

Games of Sudoku are played with policies whose tokenizers are of different kinds. Their trajectories hold the ids that
were sampled. Beside them, this puts the ids that a trainer would see which gets text and tokenises it.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

if not __package__:  # run as a script: make the checkout importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is on a hub

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.spellings import make_policy
from examples.sudoku.scheduler import SudokuScheduler
from schedulers import ChatCompletionResponse, RequestConfig, RolloutInferRequest, RolloutOutput
from schedulers.engines import InferEngine
from schedulers.engines.transformers import TransformersEngine
from server_scripts.launch import ServerProcess

__all__ = ["Drift", "Recorder", "Subject", "measure", "play", "sampled_logprobs", "subjects"]

ROOT = Path(__file__).resolve().parents[1]
POLICY = ROOT / "examples" / "sudoku" / "policy"
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"
ENV_ID = "Sudoku-v0-very-easy"
CONCURRENCY = 16

console = Console()


@dataclass(frozen=True)
class Subject:
    """A policy to play with.

    Args:
        name: For the table.
        model: Its model, in float32.
        tokenizer: Its tokenizer.
        games: How many to play.
        max_tokens: The most tokens of an answer.
    """

    name: str
    model: Any
    tokenizer: Any
    games: int
    max_tokens: int = 16


class Recorder:
    """An engine that notes, for each trajectory, the prompts and completions as they passed by.

    Args:
        engine: Samples.

    Attributes:
        turns: Prompts and what was sampled from them, by the trajectory's uuid.
    """

    def __init__(self, engine: Any) -> None:
        self.engine: InferEngine = engine
        self.tokenizer = engine.tokenizer
        self.max_model_len = engine.max_model_len
        self.turns: dict[str, list[tuple[list[int], list[int]]]] = {}

    async def infer_async(self, request: RolloutInferRequest, request_config: RequestConfig) -> ChatCompletionResponse:
        """Sample and note.

        Raises:
            ValueError: The engine cannot tell ids.
        """
        response = await self.engine.infer_async(request, request_config)
        prompt, ids = response.prompt_token_ids, response.choices[0].token_ids
        if prompt is None or ids is None:
            raise ValueError(f"{type(self.engine).__name__} tells no ids")
        self.turns.setdefault(request.uuid, []).append((list(prompt), list(ids)))
        return response


@dataclass
class Drift:
    """What came of a subject's games. A turn drifts when its text, tokenised again, is other tokens than were sampled.

    Attributes:
        name: The subject's.
        games: How many were played.
        turns: Answers in them.
        tokens: Sampled tokens.
        recorded_lost: Sampled tokens that the record does not have.
        recorded_error: The largest difference of a recorded log-probability from one forward pass over the trajectory.
        drifted_games: Games with a turn that drifts.
        drifted_turns: Turns that drift.
        drifted_tokens: Sampled tokens that do not come back.
        errors: Of each turn that drifts, how far the log-probability of the whole answer is off, in nats.
    """

    name: str
    games: int = 0
    turns: int = 0
    tokens: int = 0
    recorded_lost: int = 0
    recorded_error: float = 0.0
    drifted_games: int = 0
    drifted_turns: int = 0
    drifted_tokens: int = 0
    errors: list[float] = field(default_factory=list)

    @property
    def mean_error(self) -> float:
        """The mean of ``errors``."""
        return sum(self.errors) / len(self.errors) if self.errors else 0.0

    @property
    def largest_error(self) -> float:
        """The largest of ``errors``."""
        return max(self.errors, default=0.0)


def subjects(seed: int, *, games: int, smollm2: Path | None, smollm2_games: int) -> Iterator[Subject]:
    """The policy of the examples, one whose tokenizer has merges across moves, and a real language model."""
    yield Subject("embedded policy", *_load(POLICY), games=games)
    yield Subject("BPE with merges", *make_policy(seed), games=games)
    if smollm2 is not None:
        yield Subject("SmolLM2-135M", *_load(smollm2), games=smollm2_games, max_tokens=64)


def _load(folder: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def play(subject: Subject, base_url: str, *, seed: int) -> tuple[Recorder, list[RolloutOutput]]:
    """Play a game for each seed from 0, of five turns at most."""
    rows = [{"env_config": {"base_url": base_url, "reset_kwargs": {"seed": number}}} for number in range(subject.games)]
    recorder = Recorder(TransformersEngine(subject.model, subject.tokenizer))

    async def run() -> list[RolloutOutput]:
        async with SudokuScheduler(recorder, 5, max_concurrent_envs=CONCURRENCY) as scheduler:
            return await scheduler.async_infer(rows, RequestConfig(max_tokens=subject.max_tokens, seed=seed))

    return recorder, asyncio.run(run())


def measure(subject: Subject, recorder: Recorder, outputs: Sequence[RolloutOutput]) -> Drift:
    """Compare what was sampled with what was recorded, and with what the text would have given.

    Raises:
        ValueError: A game was not played.
    """
    drift = Drift(subject.name)
    for output in outputs:
        if output.completion_token_ids is None or output.rollout_logprobs is None or output.error is not None:
            raise ValueError(f"a game was not played: {output.error}")
        sampled = [ids for _, ids in recorder.turns[output.uuid]]
        drift.recorded_lost += sum(map(_lost, sampled, output.response_token_ids or ()))
        _measure_game(drift, subject, _pieces(output), output.rollout_logprobs)
    return drift


@dataclass(frozen=True)
class _Piece:
    """Neighbouring tokens of a trajectory that were all sampled in one turn, or none of them."""

    ids: list[int]
    sampled: bool


def _pieces(output: RolloutOutput) -> list[_Piece]:
    """The whole trajectory: a prompt, an answer, and so on."""
    left = [*(output.prompt_token_ids or ()), *(output.completion_token_ids or ())]
    masks = [0] * len(output.prompt_token_ids or ()) + (output.completion_mask or [])
    pieces: list[_Piece] = []
    for answer in output.response_token_ids or ():
        start = masks.index(1)
        pieces += [_Piece(left[:start], sampled=False), _Piece(left[start : start + len(answer)], sampled=True)]
        left, masks = left[start + len(answer) :], masks[start + len(answer) :]
    return pieces


def _measure_game(
    drift: Drift, subject: Subject, pieces: Sequence[_Piece], recorded: Sequence[Sequence[float]]
) -> None:
    again = [_Piece(_tokenised_again(subject.tokenizer, p.ids), sampled=True) if p.sampled else p for p in pieces]
    of_sampled, of_again = (_logprobs_by_answer(subject.model, row) for row in (pieces, again))
    answers = [(a.ids, b.ids) for a, b in zip(pieces, again, strict=True) if a.sampled]
    drifted = 0
    for (sampled, tokenised), noted, computed, other in zip(answers, recorded, of_sampled, of_again, strict=True):
        drift.turns += 1
        drift.tokens += len(sampled)
        drift.recorded_error = max([drift.recorded_error, *(abs(a - b) for a, b in zip(noted, computed, strict=True))])
        if sampled != tokenised:
            drifted += 1
            drift.drifted_tokens += _lost(sampled, tokenised)
            drift.errors.append(abs(sum(other) - sum(noted)))
    drift.games += 1
    drift.drifted_turns += drifted
    drift.drifted_games += drifted > 0


def _tokenised_again(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """The ids of an answer's text, with the end behind it if the answer had one."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    end = [tokenizer.eos_token_id] if ids[-1] == tokenizer.eos_token_id else []
    return [*tokenizer.encode(text, add_special_tokens=False), *end]


def _lost(sampled: Sequence[int], others: Sequence[int]) -> int:
    """How many of the sampled tokens the others have not, or not in that order."""
    matcher = difflib.SequenceMatcher(None, sampled, others, autojunk=False)
    return len(sampled) - sum(block.size for block in matcher.get_matching_blocks())


def _logprobs_by_answer(model: Any, pieces: Sequence[_Piece]) -> list[list[float]]:
    whole: list[int] = []
    places: list[int] = []
    for piece in pieces:
        if piece.sampled:
            places += range(len(whole), len(whole) + len(piece.ids))
        whole += piece.ids
    values = iter(sampled_logprobs(model, whole, places))
    return [[next(values) for _ in piece.ids] for piece in pieces if piece.sampled]


def sampled_logprobs(model: Any, ids: Sequence[int], places: Sequence[int]) -> list[float]:
    """The log-probabilities of the tokens at some places of a row.

    They come from one forward pass over all of it, without a cache and without a batch.

    Args:
        model: A causal language model.
        ids: The row.
        places: Indices of ``ids``, from 1.
    """
    before = torch.tensor(places, dtype=torch.long) - 1
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)]), logits_to_keep=before).logits[0]
    chosen = torch.tensor([ids[place] for place in places], dtype=torch.long)
    values: list[float] = logits.float().log_softmax(-1).gather(1, chosen[:, None])[:, 0].tolist()
    return values


def _table(drifts: Sequence[Drift], *, seed: int) -> Table:
    caption = "log-prob errors: of a token as recorded, of a whole drifted answer when tokenised again; in nats"
    table = Table(title=f"what tokenising text again would lose (seed {seed})", caption=caption)
    for column in ("", *(drift.name for drift in drifts)):
        table.add_column(column, justify="right" if column else "left")

    def add(name: str, value: Callable[[Drift], str]) -> None:
        table.add_row(name, *map(value, drifts))

    add("games", lambda d: str(d.games))
    add("turns", lambda d: str(d.turns))
    add("sampled tokens", lambda d: str(d.tokens))
    table.add_section()
    table.add_row("as recorded here")
    add("  tokens lost", lambda d: _share(d.recorded_lost, d.tokens))
    add("  log-prob error, largest", lambda d: f"{d.recorded_error:.1e}")
    table.add_section()
    table.add_row("text tokenised again")
    add("  games that drift", lambda d: _share(d.drifted_games, d.games))
    add("  turns that drift", lambda d: _share(d.drifted_turns, d.turns))
    add("  tokens lost", lambda d: _share(d.drifted_tokens, d.tokens))
    add("  log-prob error, mean", lambda d: f"{d.mean_error:.2f}")
    add("  log-prob error, largest", lambda d: f"{d.largest_error:.2f}")
    return table


def _share(count: int, of: int) -> str:
    return f"{count} ({count / of:.1%})" if of else "0"


def main(
    games: Annotated[int, typer.Option(min=1, help="Games with each of the small policies.")] = 200,
    smollm2_games: Annotated[int, typer.Option(min=1, help="Games with SmolLM2, which take longer.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Where all chance comes from.")] = 0,
    smollm2: Annotated[Path, typer.Option(help="Its folder, as make smollm2 fetches it.")] = SMOLLM2,
    output: Annotated[Path, typer.Option(help="The JSON file to write.")] = Path("outputs/token_drift.json"),
) -> None:
    """Play games of Sudoku and show what tokenising the answers again would have lost."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.open("a").close()
    except OSError as error:
        raise typer.BadParameter(f"{output}: {error.strerror}; name another file", param_hint="'--output'") from None
    transformers.utils.logging.disable_progress_bar()
    there = smollm2 if (smollm2 / "config.json").exists() else None
    if there is None:
        console.print(f"{smollm2} is not there (make smollm2 fetches it), so SmolLM2 is left out", highlight=False)
    drifts: list[Drift] = []
    with ServerProcess(env_id=ENV_ID, max_concurrent_envs=CONCURRENCY) as server:
        for subject in subjects(seed, games=games, smollm2=there, smollm2_games=smollm2_games):
            console.print(f"{subject.name}: {subject.games} games", highlight=False)
            drifts.append(measure(subject, *play(subject, server.base_url, seed=seed)))
    console.print(_table(drifts, seed=seed))
    result = {"seed": seed, "torch": torch.__version__, "transformers": transformers.__version__}
    output.write_text(json.dumps({**result, "drifts": [asdict(drift) for drift in drifts]}, indent=1) + "\n")
    console.print(f"{output}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
