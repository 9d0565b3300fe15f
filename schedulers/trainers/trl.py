"""GRPO with TRL: a ``rollout_func``, reward functions, and datasets that carry an ``env_config``.

::

    with TRLRollout(SudokuScheduler, max_new_tokens=16) as rollout:
        trainer = GRPOTrainer(
            model,
            reward_funcs=reward_functions("progress_reward", "correct_reward"),
            args=GRPOConfig(max_completion_length=4096, reward_weights=[1.0, 2.0], ...),
            train_dataset=trl_dataset("sudoku.jsonl"),
            processing_class=tokenizer,
            rollout_func=rollout,
        )
        trainer.train()

Two limits have similar names. ``max_new_tokens`` bounds what the model says in one turn. What TRL calls a completion
is the whole trajectory after its first prompt, environment text included; ``GRPOConfig.max_completion_length`` bounds
that.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from schedulers.checks import check_whole
from schedulers.engines.base import InferEngine
from schedulers.extras import missing_extra
from schedulers.loop_thread import LoopThread
from schedulers.rows import read_rows
from schedulers.types import RequestConfig, RolloutInferRequest, RolloutOutput, StopReason

try:
    import datasets
    from accelerate.utils import is_peft_model
    from trl.models import unwrap_model_for_generation

    from schedulers.engines.transformers import TransformersEngine
except ImportError as error:
    raise missing_extra("TRLRollout needs TRL", "train", "trl", "datasets", "accelerate", "transformers") from error

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

__all__ = [
    "NoScoredRolloutError",
    "RewardFunction",
    "Scheduler",
    "TRLRollout",
    "reward_functions",
    "trl_dataset",
]

logger = logging.getLogger(__name__)


class NoScoredRolloutError(RuntimeError):
    """Several batches in a row had no trajectory with a reward, so training would learn nothing."""


class Scheduler(Protocol):
    """What is needed of a scheduler; all of this package have it."""

    async def async_infer(
        self,
        infer_requests: Sequence[RolloutInferRequest],
        request_config: RequestConfig | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RolloutOutput]:
        """Roll out all requests."""

    async def aclose(self) -> None:
        """Free what it holds."""


class TRLRollout:
    """A ``rollout_func`` for ``GRPOTrainer`` that plays trajectories through a scheduler.

    Every prompt gives one trajectory, in order; TRL has already repeated them for the members of a group. The prompt
    itself is a placeholder that carries the row's ``env_config`` (see ``trl_dataset``). Temperature, ``top_p`` and
    ``top_k`` are the trainer's.

    A trajectory whose environment was lost is unscored: nothing of it is trained on, the reward functions return None
    for it, and TRL leaves it out of its group's baseline. Of a trajectory that was split into segments because the
    chat template rewrites history (``rollout_infos["segments"] > 1``) the last segment is trained on.

    Rollouts run in an event loop and a thread of their own, so training works in a notebook. An interrupt ends them and
    closes their environments before it goes on.

    Args:
        make_scheduler: Called once with the engine; a scheduler class, or ``lambda engine: MyScheduler(engine, …)``.
        max_new_tokens: The most tokens of one turn.
        stop: Texts that end a turn.
        make_engine: Called once with the trainer. By default a ``TransformersEngine`` samples from the very model that
            is being trained, so its weights are always in step.
        load_weights: Puts weights (a state dict, adapters merged into it) to where the engine samples from. It is
            called before every batch for which the trainer has changed them, unless TRL does so itself
            (``GRPOConfig.use_vllm``). By default the engine's own ``load_weights``, if it has one.
        max_attempts: A batch without one scored trajectory is played again, so often in all, before training stops: it
            could teach nothing, and yet an optimizer with momentum would move the weights.
        on_batch: Called for each batch with its rows, the output of each and the trainer's step, for instance to record
            them.

    Raises:
        ValueError: A number is below 1.
    """

    def __init__(
        self,
        make_scheduler: Callable[[InferEngine], Scheduler],
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        make_engine: Callable[[Any], InferEngine] | None = None,
        load_weights: Callable[[Mapping[str, Any]], None] | None = None,
        max_attempts: int = 3,
        on_batch: Callable[[list[dict[str, Any]], list[RolloutOutput], int], None] | None = None,
    ) -> None:
        check_whole("max_new_tokens", max_new_tokens, least=1)
        check_whole("max_attempts", max_attempts, least=1)
        self.max_new_tokens = max_new_tokens
        self.stop = tuple(stop)
        self.max_attempts = max_attempts
        self._make_scheduler = make_scheduler
        self._make_engine = make_engine
        self._load_weights = load_weights
        self._on_batch = on_batch
        self._trainer: Any = None
        self._update: Callable[[Mapping[str, Any]], None] | None = None
        self._updated_step: int | None = None
        self._scheduler: Scheduler | None = None
        self._loop: LoopThread | None = None
        self._warned: set[str] = set()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Play one trajectory for each prompt.

        Args:
            prompts: The prompts of the batch as TRL hands them over.
            trainer: The ``GRPOTrainer``.

        Returns:
            ``prompt_ids``, ``completion_ids``, ``env_mask`` (1 on sampled tokens) and ``logprobs``, each with one list
            for each prompt (``logprobs`` is None when the engine gives none), and ``rollout_infos`` for the reward
            functions.

        Raises:
            NoScoredRolloutError: See ``max_attempts``.
            ValueError: The trainer samples in a way that ``RequestConfig`` has no word for, or the scheduler gives
                other than one trajectory, with its token ids, for each prompt.
        """
        config = self._request_config(trainer.args)
        scheduler, loop = self._start(trainer)
        with self._weights(trainer):
            self._update_engine(trainer)
            outputs = self._play(prompts, config, scheduler, loop)
        if self._on_batch is not None:
            self._on_batch([_row(prompt) for prompt in prompts], outputs, trainer.state.global_step)
        if not _any_scored(outputs):
            raise NoScoredRolloutError(
                f"a batch had no trajectory with a reward in {self.max_attempts} attempts. Check that the environment "
                f"server is up. The first trajectory failed with {outputs[0].error}"
            ) from outputs[0].exception
        self._warn_of_mixed_groups(prompts, outputs)
        return self._columns(outputs, trainer)

    def _play(
        self, prompts: list[Any], config: RequestConfig, scheduler: Scheduler, loop: LoopThread
    ) -> list[RolloutOutput]:
        """Play a batch, again if nothing of it was scored."""
        for attempt in range(1, self.max_attempts + 1):
            requests = [_request(prompt) for prompt in prompts]
            outputs = loop.run(scheduler.async_infer(requests, config, use_tqdm=False))
            _check(outputs, prompts, scheduler)
            if _any_scored(outputs):
                break
            logger.warning("attempt %d of %d gave no scored trajectory", attempt, self.max_attempts)
        return outputs

    def close(self) -> None:
        """Close the scheduler and end the thread. A later call starts both again."""
        loop, scheduler = self._loop, self._scheduler
        self._trainer = self._scheduler = self._loop = None
        if loop is not None:
            try:
                if scheduler is not None:
                    loop.run(scheduler.aclose())
            finally:
                loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, trainer: Any) -> tuple[Scheduler, LoopThread]:
        if self._scheduler is None or self._loop is None or self._trainer is not trainer:
            self.close()
            self._trainer = trainer
            engine = (self._make_engine or _engine_of)(trainer)
            self._update = self._load_weights or getattr(engine, "load_weights", None)
            self._updated_step = None
            self._scheduler = self._make_scheduler(engine)
            self._loop = LoopThread("trl-rollout")
        return self._scheduler, self._loop

    def _weights(self, trainer: Any) -> AbstractContextManager[Any]:
        """While this lasts, weights that DeepSpeed spreads over several devices are here in whole."""
        read = self._make_engine is None or self._update is not None
        if not read or trainer.accelerator.distributed_type != "DEEPSPEED":
            return nullcontext()
        weights: AbstractContextManager[Any] = unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        )
        return weights

    def _update_engine(self, trainer: Any) -> None:
        """Bring an engine that has a copy of the weights into step with the trainer."""
        step: int = trainer.state.global_step
        if self._update is None or trainer.args.use_vllm or step == self._updated_step:
            return
        with _whole_weights(trainer) as weights:
            self._update(weights)
        self._updated_step = step

    def _request_config(self, args: Any) -> RequestConfig:
        # The loss divides logits by GRPOConfig's temperature, so there must not be a second one to set.
        for name, neutral in (("min_p", 0.0), ("repetition_penalty", 1.0), ("generation_kwargs", {})):
            value = getattr(args, name)
            if value is not None and value != neutral:
                raise ValueError(f"GRPOConfig.{name}={value!r} cannot be applied to rollouts; leave it out")
        return RequestConfig(
            max_tokens=self.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=max(args.top_k or 0, 0),
            stop=self.stop,
        )

    def _warn_of_mixed_groups(self, prompts: list[Any], outputs: list[RolloutOutput]) -> None:
        """GRPO compares the members of a group, which makes sense only if all played the same puzzle."""
        groups: dict[str, set[str]] = {}
        for prompt, output in zip(prompts, outputs, strict=True):
            fingerprint = output.rollout_infos.get("fingerprint")
            if fingerprint is not None:
                groups.setdefault(json.dumps(prompt, sort_keys=True, default=str), set()).add(fingerprint)
        for prompt_json, fingerprints in groups.items():
            if len(fingerprints) > 1:
                self._warn_once(
                    prompt_json,
                    f"the members of one group began {len(fingerprints)} different games, so comparing them means "
                    f"little: {_name_of(json.loads(prompt_json))}. Give the row a seed (env_config.reset_kwargs.seed), "
                    "and check that the environment honours it",
                )

    def _columns(self, outputs: list[RolloutOutput], trainer: Any) -> dict[str, Any]:
        pad_id = _tokenizer_of(trainer).pad_token_id
        rows = [_Row.of(output, pad_id) for output in outputs]
        limit = trainer.max_completion_length
        if limit is not None and any(len(row.completion_ids) > limit for row in rows):
            longest = max(len(row.completion_ids) for row in rows)
            self._warn_once(
                "limit",
                f"a trajectory has {longest} tokens, more than GRPOConfig.max_completion_length={limit}, which bounds "
                "the whole of it, environment text included; it is trained on up to there. Raise the limit, or give "
                "the scheduler max_trajectory_tokens to end such trajectories in time",
            )
            rows = [row.cut(limit) for row in rows]
        has_logprobs = all(row.logprobs is not None for row in rows)
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.completion_ids for row in rows],
            "env_mask": [row.mask for row in rows],
            "logprobs": [row.logprobs for row in rows] if has_logprobs else None,
            "rollout_infos": [output.rollout_infos for output in outputs],
        }

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(text)


@contextmanager
def _whole_weights(trainer: Any) -> Iterator[dict[str, Any]]:
    """The state dict of the trained model, under the names of its checkpoint, with adapters merged into it.

    Raises:
        ValueError: FSDP spreads it over several devices.
    """
    if trainer.accelerator.distributed_type == "FSDP":
        raise ValueError(
            "the weights of a model under FSDP cannot be handed to an engine here; let TRL do it: "
            "GRPOConfig(use_vllm=True), and make_engine=lambda trainer: VLLMEngine(trainer.vllm_generation.llm)"
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_peft_model(model):
        yield model.state_dict()
        return
    model.merge_adapter()
    try:
        state = model.get_base_model().state_dict()
        yield {
            name.replace(".base_layer", "").replace("modules_to_save.default.", ""): weight
            for name, weight in state.items()
            if model.base_model.prefix not in name and ".original_module." not in name
        }
    finally:
        model.unmerge_adapter()


def _any_scored(outputs: list[RolloutOutput]) -> bool:
    return not outputs or any(output.total_reward is not None for output in outputs)


def _check(outputs: list[RolloutOutput], prompts: list[Any], scheduler: Scheduler) -> None:
    """Refuse what a ``run`` of the user's own may have left out."""
    name = type(scheduler).__name__
    if len(outputs) != len(prompts):
        raise ValueError(
            f"{name} gave {len(outputs)} trajectories for {len(prompts)} prompts; TRL takes exactly one for each"
        )
    for output in outputs:
        if missing := sorted({"num_turns", "stop_reason", "total_reward"} - output.rollout_infos.keys()):
            raise ValueError(
                f"the rollout_infos of an output of {name} lack {', '.join(missing)}; a run() of your own must report "
                "them, and the output's prompt_token_ids, completion_token_ids, completion_mask and completion_logprobs"
            )


@dataclass(frozen=True)
class _Row:
    """A trajectory in the form TRL takes: never empty, so that there is a last token to look at."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    logprobs: list[float] | None

    @classmethod
    def of(cls, output: RolloutOutput, pad_id: int) -> _Row:
        scored = output.total_reward is not None
        played = output.rollout_infos["num_turns"] > 0  # an environment may be done before the first turn
        if scored and played and (output.prompt_token_ids is None or output.completion_token_ids is None):
            raise ValueError(
                "a trajectory came without token ids, and they cannot be invented from its text: "
                "train with an engine that reports the ids it sampled"
            )
        prompt_ids = output.prompt_token_ids or [pad_id]
        if not output.completion_token_ids:
            return cls(prompt_ids, [pad_id], [0], [0.0])
        ids = output.completion_token_ids
        if scored:
            return cls(prompt_ids, ids, list(output.completion_mask or ()), output.completion_logprobs)
        return cls(prompt_ids, ids, [0] * len(ids), output.completion_logprobs or [0.0] * len(ids))

    def cut(self, limit: int) -> _Row:
        logprobs = None if self.logprobs is None else self.logprobs[:limit]
        return _Row(self.prompt_ids, self.completion_ids[:limit], self.mask[:limit], logprobs)


class RewardFunction:
    """A reward function for ``GRPOTrainer`` that reads what the scheduler reported.

    Args:
        component: Which entry of ``rollout_infos["rewards"]``; None or ``"total_reward"`` for the total.
        log_rollouts: Also log, through TRL, the means over the batch of ``rollout/turns``, ``rollout/unscored``,
            ``rollout/solved`` (if the scheduler says ``solved``) and, for each reason to stop,
            ``rollout/stop/<reason>``.
    """

    def __init__(self, component: str | None = None, *, log_rollouts: bool = False) -> None:
        self.component = component
        self.log_rollouts = log_rollouts
        self.__name__ = component or "total_reward"  # TRL logs it as rewards/<name>/mean

    def __call__(
        self,
        *,
        rollout_infos: Sequence[Mapping[str, Any]],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """The reward of each trajectory; None where it is unscored.

        Args:
            rollout_infos: What ``TRLRollout`` reported.
            log_metric: TRL's way to log a number.
            **columns: Whatever else TRL passes to every reward function.

        Raises:
            ValueError: The scheduler has no reward of that name.
        """
        if self.log_rollouts and log_metric is not None:
            for infos in rollout_infos:
                _log_rollout(infos, log_metric)
        return [self._reward(infos) for infos in rollout_infos]

    def _reward(self, infos: Mapping[str, Any]) -> float | None:
        total: float | None = infos["total_reward"]
        rewards: Mapping[str, float] = infos.get("rewards") or {}
        if total is None or self.component in (None, "total_reward"):
            return total
        if rewards and self.component not in rewards:
            raise ValueError(f"the scheduler reports no reward {self.component!r}, only {', '.join(sorted(rewards))}")
        return rewards.get(self.component)


def reward_functions(*components: str) -> list[Callable[..., Any]]:
    """Reward functions for ``GRPOTrainer``, one for each component, or a single one for the total reward.

    TRL logs each as ``rewards/<component>/mean`` and trains on their sum, weighted by ``GRPOConfig.reward_weights``
    (in the same order, 1 by default); your own reward functions can stand beside them. The first one also logs the
    ``rollout/`` metrics of ``RewardFunction``.

    Args:
        *components: Keys of ``rollout_infos["rewards"]``, or ``"total_reward"``, which none at all means as well.
    """
    names: Sequence[str | None] = components or (None,)
    return [RewardFunction(name, log_rollouts=index == 0) for index, name in enumerate(names)]


def trl_dataset(
    source: str | Path | Iterable[Mapping[str, Any]], *, env_config: Mapping[str, Any] | None = None
) -> Any:
    """Make TRL's dataset of rows ``{"messages": […], "env_config": {…}, …}``.

    TRL hands rollouts nothing but prompts, so each row's data rides, as JSON, on the last message of its prompt. JSON
    because a column of nested values would give every row the keys of all others.

    Args:
        source: A JSONL file, or the rows.
        env_config: Settings that replace those of every row, such as ``{"base_url": …}``.

    Returns:
        A ``datasets.Dataset`` with the column ``prompt`` and the rows' further columns, which TRL passes to reward
        functions.

    Raises:
        OSError: The file cannot be read.
        ValueError: There are no rows, or a line of the file is none; the message names it.
        TypeError: A row is not as described; the message names it.
    """
    rows = read_rows(source) if isinstance(source, (str, Path)) else list(source)
    if not rows:
        raise ValueError("the dataset has no rows")
    extra_columns = dict.fromkeys(key for row in rows for key in row if key not in _CONSUMED)
    columns: dict[str, list[Any]] = {key: [row.get(key) for row in rows] for key in extra_columns}
    columns["prompt"] = [_prompt(number, row, env_config or {}) for number, row in enumerate(rows)]
    return datasets.Dataset.from_dict(columns)


_CONSUMED = frozenset({"messages", "env_config", "prompt"})


def _prompt(number: int, row: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = row.get("messages") or [{"role": "user", "content": ""}]  # TRL needs something to see that it is a chat
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise TypeError(f"row {number}: 'messages' must be a list of {{'role': …, 'content': …}}, not {messages!r}")
    own = row.get("env_config") or {}
    if not isinstance(own, Mapping):
        raise TypeError(f"row {number}: 'env_config' must be a mapping, not a {type(own).__name__}")
    data = {key: value for key, value in row.items() if key != "messages"}
    if own or overrides:
        data["env_config"] = {**own, **overrides}
    plain = [{"role": m["role"], "content": m["content"]} for m in messages]
    return [*plain[:-1], {**plain[-1], "row": number, "data_dict": json.dumps(data)}]


def _request(prompt: Any) -> RolloutInferRequest:
    """The request of a prompt: the plain messages, and the data that rides on the last one."""
    if isinstance(prompt, str):
        return RolloutInferRequest(messages=[{"role": "user", "content": prompt}])
    last = prompt[-1]
    data = dict(_decoded(last.get("data_dict")))
    if last.get("env_config") is not None:
        data["env_config"] = dict(_decoded(last["env_config"]))
    return RolloutInferRequest(messages=[{"role": m["role"], "content": m["content"]} for m in prompt], data_dict=data)


def _row(prompt: Any) -> dict[str, Any]:
    """The dataset's row of a prompt."""
    request = _request(prompt)
    return {"messages": request.messages, **request.data_dict}


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()


def _decoded(value: Any) -> Mapping[str, Any]:
    decoded: Mapping[str, Any] = json.loads(value) if isinstance(value, str) else value or {}
    return decoded


def _name_of(prompt: Any) -> str:
    last = prompt[-1] if isinstance(prompt, list) else {}
    config = _request(prompt).data_dict.get("env_config")
    return f"row {last['row']}, env_config {config}" if "row" in last else f"the row with env_config {config}"


def _log_rollout(infos: Mapping[str, Any], log_metric: Callable[[str, float], None]) -> None:
    """TRL averages what is logged under one name, so every trajectory must log under all of them."""
    log_metric("rollout/turns", infos["num_turns"])
    log_metric("rollout/unscored", float(infos["total_reward"] is None))
    if "solved" in infos:
        log_metric("rollout/solved", float(infos["solved"] or 0))
    for reason in StopReason:
        log_metric(f"rollout/stop/{reason}", float(infos["stop_reason"] == reason))


def _engine_of(trainer: Any) -> TransformersEngine:
    if trainer.accelerator.distributed_type == "FSDP":
        raise ValueError("a model that FSDP has split cannot be sampled from in place; pass make_engine=…")
    model = trainer.accelerator.unwrap_model(trainer.model)
    # The importance ratio of the loss compares log-probabilities after the temperature.
    return TransformersEngine(model, _tokenizer_of(trainer), logprobs_mode="processed")


def _tokenizer_of(trainer: Any) -> Any:
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
