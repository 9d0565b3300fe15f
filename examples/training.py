"""One GRPO training run: server, evaluation before, training, evaluation after, and what is left on disk."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.example import BASE_URL, Example
from examples.registry import EXAMPLES
from examples.report import plot_rewards
from examples.sampling import Sampler, sampler
from openenv_client import ConnectError, OpenEnvError, OpenEnvWrapper, ServerFullError
from schedulers import (
    EnvError,
    InferEngine,
    RequestConfig,
    RolloutError,
    RolloutOutput,
    RolloutScheduler,
    TextArenaScheduler,
    multi_turns,
)
from schedulers.commands.names import WrongUse, rows_named
from schedulers.commands.servers import TOKEN_VARIABLE
from schedulers.commands.tables import comparison_table
from schedulers.engines.addresses import http_address
from schedulers.evaluation import Game, compare, summarise
from schedulers.names import did_you_mean
from schedulers.recording import TrajectoryWriter, keep_trajectories, read_trajectories
from schedulers.rows import without_address
from server_scripts.guard import TokenError
from server_scripts.launch import ServerProcess, ServerStartError

__all__ = ["RUNS", "Settings", "choose_folder", "environment", "run"]

RUNS = Path("outputs")
"""Holds a folder for each game, and in it one for each run."""
_METRICS = "metrics.json"
_TRAJECTORIES = "trajectories.jsonl"
_FREE_ON_RESUME = {"steps", "save_steps", "base_url", "max_concurrent_envs", "vllm_server", "vllm_weights_dir"}
console = Console()


@dataclass(frozen=True)
class Settings:
    """The options of ``train_grpo.py``, complete; saved with the results."""

    game: str
    model: str
    base_url: str | None
    env_id: str | None
    difficulty: str | None
    dataset: str
    max_turns: int | None
    max_concurrent_envs: int
    steps: int
    prompts_per_step: int
    num_generations: int
    micro_batch_size: int
    learning_rate: float
    beta: float
    temperature: float
    max_new_tokens: int
    max_completion_length: int
    lora_rank: int | None
    use_vllm: bool
    vllm: dict[str, Any]
    vllm_server: str | None
    vllm_weights_dir: str | None
    reward_weights: dict[str, float]
    seed: int
    save_steps: int
    eval_games: int
    eval_seed: int
    grpo: dict[str, Any]

    @property
    def example(self) -> Example:
        """The game that is played."""
        return EXAMPLES[self.game]

    @property
    def games_per_step(self) -> int:
        """Trajectories of one training step."""
        return self.prompts_per_step * self.num_generations

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of the scheduler that have a part in how a game is played and scored."""
        options: dict[str, Any] = {"max_trajectory_tokens": self.max_completion_length}
        if self.example.env_id is not None:
            options["reward_weights"] = self.reward_weights
        if self.difficulty is not None:
            options["difficulty"] = self.difficulty
        return options

    def check(self) -> None:
        """Refuse what would only fail after minutes.

        Raises:
            WrongUse: Names the option and what it accepts.
        """
        example = self.example
        if self.difficulty is not None and self.difficulty not in example.difficulties:
            names = ", ".join(example.difficulties) or "none"
            raise WrongUse(f"--difficulty {self.difficulty}: those of {self.game} are {names}")
        if example.env_id is None and (self.base_url is not None or self.env_id is not None):
            raise WrongUse(f"{self.game} needs no server: leave --base-url and --env-id out")
        self._check_vllm()
        if not Path(self.dataset).is_file():
            raise WrongUse(
                f"--dataset {self.dataset}: no such file; make one with examples/make_dataset.py {self.game}"
            )
        if self.games_per_step % self.micro_batch_size:
            raise WrongUse(
                f"--micro-batch-size {self.micro_batch_size} must divide the {self.games_per_step} games of a step "
                "(--prompts-per-step times --num-generations)"
            )
        for name, weight in self.reward_weights.items():
            if name not in example.reward_names or not isinstance(weight, (int, float)):
                names = ", ".join(example.reward_names) or "none for this game"
                raise WrongUse(f"--reward-weight {name}={weight}: names are {names}; values, numbers")

    def _check_vllm(self) -> None:
        in_process = self.use_vllm and self.vllm_server is None
        if self.vllm and not in_process:
            raise WrongUse(
                f"--vllm {', '.join(self.vllm)}: it is for a vLLM in this process, which --use-vllm starts; a server "
                "(--vllm-server) takes its options when it is started"
            )
        if in_process and importlib.util.find_spec("vllm") is None:
            raise WrongUse('--use-vllm: vLLM is not installed; pip install -e ".[vllm]" (docs/how-to/use-vllm.md)')
        if self.vllm_server is not None:
            try:
                http_address(self.vllm_server)
            except ValueError as error:
                raise WrongUse(f"--vllm-server: {error}") from error
        if self.vllm_weights_dir is not None and self.vllm_server is None:
            raise WrongUse("--vllm-weights-dir: it is for --vllm-server; leave it out")
        if self.vllm_weights_dir is not None and not Path(self.vllm_weights_dir).is_dir():
            raise WrongUse(f"--vllm-weights-dir {self.vllm_weights_dir}: there is no such folder; make it")


def choose_folder(game: str, output_dir: Path | None, *, resume: bool) -> Path:
    """The folder of the run.

    Raises:
        WrongUse: It holds another run, or there is none to resume.
    """
    if output_dir is None:
        runs = RUNS / game
        if not resume:
            return runs / datetime.now().strftime("%Y%m%d-%H%M%S")
        output_dir = max(runs.glob(f"*/{_METRICS}"), default=runs / _METRICS).parent
    holds_run = (output_dir / _METRICS).exists()
    if resume and not holds_run:
        raise WrongUse(f"--resume: there is no run in {output_dir}")
    if holds_run and not resume:
        raise WrongUse(f"{output_dir} holds a run already; go on with it (--resume) or name another --output-dir")
    return output_dir


def run(settings: Settings, folder: Path, *, resume: bool = False) -> None:
    """Do everything and leave nothing running, whatever happens.

    Raises:
        WrongUse: Something that the user can put right.
    """
    settings.check()
    _quiet()
    started = time.monotonic()
    rows = load_rows(settings)
    model, tokenizer = load(settings.model)
    config = trainer_config(settings, folder, small=sum(weight.numel() for weight in model.parameters()) < 10_000_000)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongUse(f"--output-dir {folder}: {error}") from error
    with environment(settings) as base_url, sampler(settings, model, tokenizer) as vllm:
        results = Results(folder, settings, resume=resume)
        try:
            with contextlib.closing(results):
                _train_and_evaluate(config, base_url, rows, model, tokenizer, vllm, results)
        except BaseException:
            saved = " (--resume goes on from its last checkpoint)" if results.checkpoint else ""
            console.print(f"stopped; what there is so far is in {folder}{saved}", soft_wrap=True)
            raise
    results.show(seconds=time.monotonic() - started)


def _quiet() -> None:
    """Leave out what the libraries say of their own future, which no user of this command can act on."""
    warnings.filterwarnings("ignore", "You are using 'rollout_func'", UserWarning)
    warnings.filterwarnings("ignore", ".*gradient_checkpointing. is deprecated", FutureWarning)


def _train_and_evaluate(
    config: Any,
    base_url: str | None,
    rows: list[dict[str, Any]],
    model: Any,
    tokenizer: Any,
    vllm: Sampler | None,
    results: Results,
) -> None:
    from transformers import PrinterCallback
    from trl import GRPOTrainer

    from schedulers.engines.transformers import TransformersEngine
    from schedulers.trainers.trl import NoScoredRolloutError, TRLRollout, reward_functions, trl_dataset

    settings = results.settings
    with TRLRollout(
        lambda engine: make_scheduler(settings, engine),
        max_new_tokens=settings.max_new_tokens,
        make_engine=(lambda trainer: vllm.engine) if vllm else None,
        load_weights=vllm.load_weights if vllm else None,
        on_batch=results.add_batch,
    ) as rollout:
        trainer = GRPOTrainer(
            model=model,
            args=config,
            reward_funcs=reward_functions(*settings.example.reward_names),
            train_dataset=trl_dataset(rows, env_config={"base_url": base_url} if base_url else {}),
            processing_class=tokenizer,
            rollout_func=rollout,
            callbacks=[_reporter(results)],
            peft_config=_lora(settings),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.create_model_card = lambda *_, **__: None  # TRL's would say that it comes from the model "None"
        policy = trainer.accelerator.unwrap_model(trainer.model)
        engine = TransformersEngine(policy, tokenizer)
        try:
            _evaluate("before", settings, base_url, engine, results)
            console.print(
                f"training: {settings.steps} steps of {settings.prompts_per_step} seeds "
                f"x {settings.num_generations} games"
            )
            trainer.train(resume_from_checkpoint=True if results.resume and results.checkpoint else None)
            policy.save_pretrained(results.folder / "model")
            tokenizer.save_pretrained(results.folder / "model")
            _evaluate("after", settings, base_url, engine, results)
        except (NoScoredRolloutError, RolloutError) as error:
            raise WrongUse(str(error)) from error


def _evaluate(phase: str, settings: Settings, base_url: str | None, engine: InferEngine, results: Results) -> None:
    """Play the held-out games, unless an interrupted run has done so."""
    if not settings.eval_games or phase in results.summaries:
        return
    console.print(f"{phase} training: {settings.eval_games} held-out games")
    seeds = range(settings.eval_seed, settings.eval_seed + settings.eval_games)
    rows = [settings.example.row(seed, base_url=base_url or BASE_URL) for seed in seeds]
    outputs = asyncio.run(_play(settings, rows, engine))
    if all(output.total_reward is None for output in outputs):
        raise WrongUse(f"no held-out game could be played; the first failed with {outputs[0].error}")
    results.add_evaluation(phase, rows, outputs)


async def _play(settings: Settings, rows: list[dict[str, Any]], engine: InferEngine) -> list[RolloutOutput]:
    config = RequestConfig(max_tokens=settings.max_new_tokens, temperature=settings.temperature)
    async with make_scheduler(settings, engine) as scheduler:
        return await scheduler.async_infer(rows, config)


def make_scheduler(settings: Settings, engine: InferEngine) -> RolloutScheduler:
    """The scheduler for training and for evaluation."""
    options = settings.options
    if settings.example.env_id is not None:
        options["max_concurrent_envs"] = settings.max_concurrent_envs
        options["env_settings"] = {"open_deadline": 30, "token": os.environ.get(TOKEN_VARIABLE)}
    return settings.example.scheduler(engine, settings.max_turns, **options)


def load_rows(settings: Settings) -> list[dict[str, Any]]:
    """The training games.

    Raises:
        WrongUse: The file is no such dataset.
    """
    from schedulers.trainers.trl import trl_dataset

    rows = rows_named(settings.dataset)
    try:
        trl_dataset(rows)  # refuses what TRL cannot take, before anything is played
    except (TypeError, ValueError) as error:
        raise WrongUse(f"--dataset {settings.dataset}: {error}") from error
    return rows


def trainer_config(settings: Settings, folder: Path, *, small: bool) -> Any:
    """TRL's settings, for one update for each batch of games.

    Args:
        settings: The options.
        folder: The run's.
        small: The model is so small that time counts for more than memory.

    Raises:
        WrongUse: ``--grpo`` names no field of ``GRPOConfig`` or one that has its own option, or a value does not fit.
    """
    import torch
    from trl import GRPOConfig

    reward_names = settings.example.reward_names
    own = {
        "output_dir": str(folder),
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.micro_batch_size,
        "gradient_accumulation_steps": settings.games_per_step // settings.micro_batch_size,
        "num_generations": settings.num_generations,
        "learning_rate": settings.learning_rate,
        "beta": settings.beta,
        "temperature": settings.temperature,
        "max_completion_length": settings.max_completion_length,
        "reward_weights": [float(settings.reward_weights.get(name, 1.0)) for name in reward_names] or None,
        "seed": settings.seed,
        "save_steps": settings.save_steps,
        "logging_steps": 1,
        "disable_tqdm": True,  # the run reports in its own words
    }
    defaults = {
        # By its own spread, a group of which nearly all solve the puzzle would turn one miss into a huge advantage.
        "scale_rewards": "batch",
        "save_total_limit": 2,
        "report_to": "none",
        "bf16": torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": not small,
    }
    fields = GRPOConfig.__dataclass_fields__
    for name, value in settings.grpo.items():
        if name not in fields:
            raise WrongUse(
                f"--grpo {name}: GRPOConfig has no such field; {did_you_mean(name, fields) or 'see its docs'}"
            )
        if name in own:
            raise WrongUse(f"--grpo {name}: this field is set by the other options; see --help")
        if isinstance(fields[name].default, (bool, int, float)) and not isinstance(value, (bool, int, float)):
            raise WrongUse(f"--grpo {name}={value!r}: this field takes a {type(fields[name].default).__name__}")
    try:
        return GRPOConfig(**{**own, **defaults, **settings.grpo})
    except (ImportError, TypeError, ValueError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in settings.grpo.items())
        raise WrongUse(f"GRPOConfig does not take these options{given and f' (--grpo {given})'}: {error}") from error


def load(name: str) -> tuple[Any, Any]:
    """The model to train, in full precision on a CPU, and its tokenizer.

    Raises:
        WrongUse: There is no such model, or it has no chat template.
    """
    import torch
    import transformers

    from schedulers.engines.transformers import TransformersEngine

    transformers.utils.logging.disable_progress_bar()
    try:
        engine = TransformersEngine.from_pretrained(name, dtype="auto" if torch.cuda.is_available() else torch.float32)
    except OSError as error:
        raise WrongUse(f"--model: {error}") from error
    tokenizer = engine.tokenizer
    if not tokenizer.chat_template:
        raise WrongUse(f"--model {name}: its tokenizer has no chat template; take an instruction-tuned model")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return engine.model, tokenizer


@contextlib.contextmanager
def environment(settings: Settings) -> Iterator[str | None]:
    """A server for the length of the run: the one at ``--base-url``, else one of its own, if the game needs one.

    Yields:
        Its address; None for a game that lives in this process.

    Raises:
        WrongUse: It cannot be started or reached, or plays something else.
    """
    example = settings.example
    if example.env_id is None:
        yield None
        return
    if settings.base_url is not None:
        try:
            _check_server(example, settings.base_url)
        except ConnectError as error:
            start = "python server_scripts/start_textarena_server.py"
            raise WrongUse(
                f"--base-url: {error} Leave it out to have a server started, or start one: {start}"
            ) from error
        except (OpenEnvError, EnvError) as error:
            raise WrongUse(f"--base-url {settings.base_url}: {error}") from error
        yield settings.base_url
        return
    env_id = settings.env_id or example.env_id
    sessions = max(settings.games_per_step, settings.eval_games, 1)
    try:
        server = ServerProcess(env_id=env_id, max_concurrent_envs=sessions, token=os.environ.get(TOKEN_VARIABLE))
        server.start()
    except TokenError as error:
        raise WrongUse(f"{TOKEN_VARIABLE}: {error}") from error
    except ServerStartError as error:
        raise WrongUse(f"the environment server did not start. {error}") from error
    try:
        console.print(f"server: {env_id} at {server.base_url}")
        try:
            _check_server(example, server.base_url)
        except (OpenEnvError, EnvError) as error:
            raise WrongUse(f"--env-id {env_id}: {error}") from error
        yield server.base_url
    finally:
        server.stop()


def _check_server(example: Example, base_url: str) -> None:
    """Play the first frame of a game, so that a wrong server shows now and not as unscored games.

    Raises:
        OpenEnvError: It cannot be reached.
        EnvError: It plays something else.
    """
    scheduler = example.scheduler()
    token = os.environ.get(TOKEN_VARIABLE)
    try:
        with OpenEnvWrapper(base_url=base_url, token=token, open_deadline=5, capacity_timeout=0) as env:
            observation, _ = env.reset(seed=example.held_out_seed)
            if isinstance(scheduler, TextArenaScheduler):
                scheduler.new_game(observation)
    except ServerFullError as error:
        console.print(f"{error} Games will wait for free sessions.", style="yellow", markup=False, soft_wrap=True)


def _lora(settings: Settings) -> Any:
    if settings.lora_rank is None:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=settings.lora_rank, lora_alpha=2 * settings.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def _reporter(results: Results) -> Any:
    """The callback that passes what TRL logs after each step to the results."""
    from transformers import TrainerCallback

    class Reporter(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs is not None and "loss" in logs:
                results.finish_step(state.global_step, logs)

    return Reporter()


@dataclass
class Results:
    """What a run leaves in its folder; everything is on disk as soon as it is known.

    Args:
        folder: Where it goes.
        settings: Saved with the results.
        resume: Keep what an interrupted run left up to its last checkpoint.
    """

    folder: Path
    settings: Settings
    resume: bool = False
    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.resume:
            self._take_up()
        self._started = time.monotonic()
        self._trajectories = TrajectoryWriter(self.folder / _TRAJECTORIES)
        self._save()

    def _take_up(self) -> None:
        """Take over what was done up to the last checkpoint; what came after it will be done again."""
        saved = json.loads((self.folder / _METRICS).read_text(encoding="utf-8"))
        now = json.loads(json.dumps(asdict(self.settings)))
        for name in sorted(now.keys() - _FREE_ON_RESUME):
            if now[name] != saved["settings"].get(name):
                raise WrongUse(
                    f"--resume: the run in {self.folder} has {name} {saved['settings'].get(name)!r}, "
                    f"not {now[name]!r}; give the options that it was started with"
                )
        last = self.checkpoint
        self.summaries = {key: value for key, value in saved["evaluation"].items() if key == "before"}
        self.steps = [step for step in saved["steps"] if step["step"] <= last]
        keep_trajectories(
            self.folder / _TRAJECTORIES,
            lambda record: record["phase"] in self.summaries or record.get("step", math.inf) <= last,
        )

    def close(self) -> None:
        """Close the files."""
        self._trajectories.close()

    @property
    def checkpoint(self) -> int:
        """The step of the last checkpoint; 0 without one."""
        return max((int(path.name.rpartition("-")[2]) for path in self.folder.glob("checkpoint-*")), default=0)

    def add_evaluation(self, phase: str, rows: Sequence[dict[str, Any]], outputs: Sequence[RolloutOutput]) -> None:
        """Keep the held-out games of ``before`` or ``after``."""
        self.summaries[phase] = self._add(rows, outputs, phase=phase)
        self._save()
        self._started = time.monotonic()

    def add_batch(self, rows: Sequence[dict[str, Any]], outputs: Sequence[RolloutOutput], step: int) -> None:
        """Keep the games of a training step.

        Args:
            rows: The games.
            outputs: How they went.
            step: How many steps were finished before.
        """
        self.steps.append({"step": step + 1, **self._add(rows, outputs, phase="train", step=step + 1)})

    def _add(self, rows: Sequence[dict[str, Any]], outputs: Sequence[RolloutOutput], **labels: Any) -> dict[str, Any]:
        """Write games with all that it takes to rescore them, and sum them up."""
        scheduler = next(name for name, known in multi_turns.items() if known is self.settings.example.scheduler)
        labels["played_by"] = {"scheduler": scheduler, "options": self.settings.options}
        games: list[Game] = []
        for number, (row, output) in enumerate(zip(rows, outputs, strict=True)):
            records = self._trajectories.write([output], **labels, game=number, row=without_address(row))
            games += map(Game.of, records)
        return summarise(games).as_dict()

    def finish_step(self, step: int, logs: dict[str, Any]) -> None:
        """Add the trainer's numbers to a step, and say how it went."""
        if not self.steps or self.steps[-1]["step"] != step:
            return
        now = time.monotonic()
        numbers = {
            key: value for key, value in logs.items() if isinstance(value, (int, float)) and math.isfinite(value)
        }
        self.steps[-1].update(seconds=round(now - self._started, 1), trainer=numbers)
        self._started = now
        self._save()
        entry = self.steps[-1]
        if not entry["games"]:
            console.print(f"  step {step}/{self.settings.steps}  no game was scored; see the log above")
            return
        left = (self.settings.steps - step) * statistics.fmean(
            done["seconds"] for done in self.steps if "seconds" in done
        )
        measures = "".join(f"  {name} {_value(entry, name):.1f}" for name in self.settings.example.measures)
        console.print(
            f"  step {step}/{self.settings.steps}  reward {_value(entry, 'total_reward'):6.2f}"
            f"  solved {_value(entry, 'solved'):4.0%}{measures}  {entry['seconds']:.0f} s"
            + (f", about {left:.0f} s left" if left else ""),
            highlight=False,
            soft_wrap=True,
        )

    def show(self, *, seconds: float) -> None:
        """Print the table and where everything is."""
        plot = self.folder / "rewards.png"
        example = self.settings.example
        names = {name: name for name in example.reward_names} | {"total": "total_reward"}
        series = {title: [_value(step, name) for step in self.steps] for title, name in names.items()}
        plot_rewards([step["step"] for step in self.steps], series, plot)
        differences = compare(self._games("before"), self._games("after"))
        shown = ("solved", *example.measures, *names.values())
        if differences := {name: differences[name] for name in shown if name in differences}:
            console.print(comparison_table(differences, first="before", second="after"))
        for what, name in (("trajectories", _TRAJECTORIES), ("metrics", _METRICS), ("model", "model")):
            console.print(f"{what:13}{self.folder / name}", highlight=False, soft_wrap=True)
        console.print(f"{'plot':13}{plot}", highlight=False, soft_wrap=True)
        console.print(f"finished in {seconds:.0f} s", highlight=False)

    def _games(self, phase: str) -> Iterator[Game]:
        records = read_trajectories(self.folder / _TRAJECTORIES)
        return (Game.of(record) for record in records if record["phase"] == phase)

    def _save(self) -> None:
        content = {"settings": asdict(self.settings), "evaluation": self.summaries, "steps": self.steps}
        temporary = self.folder / f"{_METRICS}.part"
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.folder / _METRICS)


def _value(entry: dict[str, Any], name: str) -> float:
    """A share or a mean of a step; NaN where no game tells it."""
    return float({**entry["shares"], **entry["means"]}.get(name, {}).get("value", math.nan))
