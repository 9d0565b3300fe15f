"""Train a language model on a game of this folder with GRPO: the command line of ``training.py``."""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    # The imports take seconds, and in them an exception could get lost. There is nothing to clean up yet.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

if not __package__:  # run as a script: make the checkout importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.registry import EXAMPLES
from examples.training import RUNS, Settings, choose_folder, run
from schedulers.commands.ending import ending_well
from schedulers.commands.names import pairs
from schedulers.commands.servers import TOKEN_VARIABLE
from schedulers.evaluation import HELD_OUT_SEED

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"max_content_width": 120})
def main(
    *,
    game: Annotated[str, typer.Option(help=f"One of {', '.join(EXAMPLES)}.", rich_help_panel="Environment")] = "sudoku",
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub name of a causal language model.",
            show_default="the game's small policy; only Sudoku has one",
            rich_help_panel="Model",
        ),
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="Train a LoRA adapter, not all weights.", rich_help_panel="Model")
    ] = False,
    lora_rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter.", rich_help_panel="Model")] = 16,
    use_vllm: Annotated[
        bool,
        typer.Option(
            "--use-vllm", help="Sample the games of training with vLLM, in this process.", rich_help_panel="Model"
        ),
    ] = False,
    vllm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="With --use-vllm: a field of its EngineArgs; repeatable.",
            rich_help_panel="Model",
        ),
    ] = None,
    vllm_server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Sample them from this vLLM server instead, started for this run, with the same model and "
            "VLLM_SERVER_DEV_MODE=1.",
            rich_help_panel="Model",
        ),
    ] = None,
    vllm_weights_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder through which the server gets new weights, such as /dev/shm; a shared one if it is on another "
            "machine.",
            show_default="the one for temporary files",
            rich_help_panel="Model",
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            help=f"A server that is already running, with the token in {TOKEN_VARIABLE} if it wants one; otherwise one "
            "is started.",
            rich_help_panel="Environment",
        ),
    ] = None,
    env_id: Annotated[
        str | None,
        typer.Option(
            help="Which variant the server plays, when it is started here.",
            show_default="Sudoku-v0-very-easy for Sudoku",
            rich_help_panel="Environment",
        ),
    ] = None,
    difficulty: Annotated[
        str | None,
        typer.Option(
            help="Sudoku's hints: easy (all), medium (candidates), hard (none). The small policy knows easy.",
            show_default="easy",
            rich_help_panel="Environment",
        ),
    ] = None,
    max_turns: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Turns a game.",
            show_default="the game's own; Sudoku's is 1.5 for each empty cell",
            rich_help_panel="Environment",
        ),
    ] = None,
    max_concurrent_envs: Annotated[
        int, typer.Option(min=1, help="Environment calls in flight at a time.", rich_help_panel="Environment")
    ] = 16,
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="Training games; see make_dataset.py.", show_default="the game's", rich_help_panel="Environment"
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.", rich_help_panel="Training")] = 32,
    prompts_per_step: Annotated[int, typer.Option(min=1, help="Seeds a step.", rich_help_panel="Training")] = 4,
    num_generations: Annotated[
        int, typer.Option(min=2, help="Games of each seed: the group.", rich_help_panel="Training")
    ] = 8,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Games a forward pass; by default at most 8 (2 for other models).", rich_help_panel="Training"
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="By default 5e-4; 1e-6 for other models, 1e-5 with --lora.", rich_help_panel="Training"),
    ] = None,
    beta: Annotated[float, typer.Option(min=0, help="Weight of the KL term.", rich_help_panel="Training")] = 0.0,
    temperature: Annotated[
        float, typer.Option(min=0.01, metavar="X", help="Of sampling.", rich_help_panel="Training")
    ] = 1.0,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens a turn; by default 16 (128).", rich_help_panel="Training")
    ] = None,
    max_completion_length: Annotated[
        int,
        typer.Option(min=1, help="Tokens of a whole game after its first prompt.", rich_help_panel="Training"),
    ] = 8192,
    seed: Annotated[int, typer.Option(help="Of training.", rich_help_panel="Training")] = 0,
    reward_weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Weight of a reward component, 1 by default; repeatable.",
            rich_help_panel="Training",
        ),
    ] = None,
    grpo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Any other field of trl.GRPOConfig; repeatable.", rich_help_panel="Training"
        ),
    ] = None,
    eval_games: Annotated[
        int, typer.Option(min=0, help="Held-out games before and after; 0 for none.", rich_help_panel="Results")
    ] = 128,
    eval_seed: Annotated[
        int, typer.Option(min=0, help="The first held-out seed.", rich_help_panel="Results")
    ] = HELD_OUT_SEED,
    output_dir: Annotated[
        Path | None,
        typer.Option(help=f"Where results go; by default a new folder in {RUNS}/GAME.", rich_help_panel="Results"),
    ] = None,
    save_steps: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.", rich_help_panel="Results")] = 4,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from that run's last checkpoint; give its options again, --steps may be larger.",
            rich_help_panel="Results",
        ),
    ] = False,
) -> None:
    """Train a language model on a game with GRPO, and measure it on held-out games before and after.

    Without options: the small policy of the Sudoku example, very easy puzzles, a server of its own.
    The results folder holds trajectories.jsonl, metrics.json, rewards.png and the trained model.
    """
    example = EXAMPLES.get(game)
    if example is None:
        raise typer.BadParameter(f"{game!r} is none of {', '.join(EXAMPLES)}", param_hint="'--game'")
    if model is None and example.model is None:
        raise typer.BadParameter(
            f"{game} has no policy of its own. Name a model, for example models/SmolLM2-135M-Instruct, which "
            "make smollm2 fetches",
            param_hint="'--model'",
        )
    model = model or str(example.model)
    embedded = example.model is not None and Path(model).resolve() == example.model
    default_rate = 5e-4 if embedded else 1e-5 if lora else 1e-6
    with ending_well():
        settings = Settings(
            game=game,
            model=model,
            base_url=base_url,
            env_id=env_id,
            difficulty=difficulty,
            dataset=str(dataset or example.dataset),
            max_turns=max_turns,
            max_concurrent_envs=max_concurrent_envs,
            steps=steps,
            prompts_per_step=prompts_per_step,
            num_generations=num_generations,
            micro_batch_size=micro_batch_size or math.gcd(8 if embedded else 2, prompts_per_step * num_generations),
            learning_rate=default_rate if learning_rate is None else learning_rate,
            beta=beta,
            temperature=temperature,
            max_new_tokens=max_new_tokens or (16 if embedded else 128),
            max_completion_length=max_completion_length,
            lora_rank=lora_rank if lora else None,
            use_vllm=use_vllm or vllm_server is not None,
            vllm=pairs("--vllm", vllm or ()),
            vllm_server=vllm_server,
            vllm_weights_dir=None if vllm_weights_dir is None else str(vllm_weights_dir),
            reward_weights=pairs("--reward-weight", reward_weight or ()),
            seed=seed,
            save_steps=save_steps,
            eval_games=eval_games,
            eval_seed=eval_seed,
            grpo=pairs("--grpo", grpo or ()),
        )
        run(settings, choose_folder(game, output_dir, resume=resume), resume=resume)


if __name__ == "__main__":
    app()
