from __future__ import annotations

import asyncio
import functools
import json
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from trl import GRPOConfig, GRPOTrainer

from openenv_client.testing import Fault, MockEnvServer, reply
from schedulers import Env, GYMScheduler, OpenEnvScheduler, envs
from schedulers.engines import ScriptedEngine
from schedulers.trainers.trl import NoScoredRolloutError, TRLRollout, reward_functions, trl_dataset
from schedulers.types import RequestConfig, RolloutInferRequest, RolloutOutput, StopReason
from tests.schedulers.engines.tiny_model import make_model, make_tokenizer

pytestmark = [
    # transformers' own names inside TRL and peft
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func may change, says TRL


# -- parts -----------------------------------------------------------------------------------------------


def played(
    reward: float | None = 1.0,
    *,
    prompt: Sequence[int] = (5, 6),
    ids: Sequence[int] | None = (7, 8, 9, 1),
    mask: Sequence[int] = (1, 0, 1, 1),
    logprobs: Sequence[float] | None = (-0.5, 0.0, -0.25, -1.0),
    fingerprint: str | None = "same",
    rewards: dict[str, float] | None = None,
    reason: StopReason | None = None,
    **infos: Any,
) -> RolloutOutput:
    """A trajectory as schedulers give it; ``reward`` None is one whose environment was lost."""
    scored = reward is not None
    return RolloutOutput(
        response=None,
        messages=[],
        rollout_infos={
            "num_turns": 2,
            "stop_reason": str(reason or (StopReason.ENV_DONE if scored else StopReason.ENV_LOST)),
            "total_reward": reward,
            "step_rewards": [],
            "error": None if scored else "SessionLost: gone",
            "fingerprint": fingerprint,
            "rewards": rewards or {},
            **infos,
        },
        prompt_token_ids=list(prompt),
        completion_token_ids=None if ids is None else list(ids),
        completion_mask=None if ids is None else [m * scored for m in mask],
        completion_logprobs=None if logprobs is None else list(logprobs),
    )


def lost_at_once() -> RolloutOutput:
    """The environment failed before anything was sampled."""
    output = played(None, ids=None, logprobs=None, fingerprint=None)
    output.prompt_token_ids = None
    return output


class FakeScheduler:
    """Gives prepared outputs, batch after batch, or what a function makes of the requests."""

    def __init__(self, *batches: list[RolloutOutput] | Exception) -> None:
        self.batches = list(batches)
        self.requests: list[list[RolloutInferRequest]] = []
        self.configs: list[RequestConfig | None] = []
        self.engine: Any = None
        self.closed = 0

    def __call__(self, engine: Any) -> FakeScheduler:
        self.engine = engine
        return self

    async def async_infer(
        self,
        infer_requests: Sequence[RolloutInferRequest],
        request_config: RequestConfig | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RolloutOutput]:
        self.requests.append(list(infer_requests))
        self.configs.append(request_config)
        batch = self.batches.pop(0) if len(self.batches) > 1 else self.batches[0]
        if isinstance(batch, Exception):
            raise batch
        return batch

    async def aclose(self) -> None:
        self.closed += 1


class FakeTrainer:
    """As much of a trainer as a rollout reads."""

    def __init__(self, max_completion_length: int | None = 100, **args: Any) -> None:
        self.args = GRPOConfig("unused", use_cpu=True, bf16=False, report_to="none", **args)
        self.max_completion_length = max_completion_length
        self.processing_class = make_tokenizer()
        self.state = type("State", (), {"global_step": 7})
        self.accelerator = SimpleNamespace(distributed_type="NO")


def no_engine(trainer: Any) -> Any:
    return ScriptedEngine([])


def rollout_of(*batches: list[RolloutOutput] | Exception, **options: Any) -> tuple[TRLRollout, FakeScheduler]:
    scheduler = FakeScheduler(*batches)
    return TRLRollout(scheduler, max_new_tokens=4, make_engine=no_engine, **options), scheduler


def play(*batches: list[RolloutOutput] | Exception, trainer: Any = None, **options: Any) -> dict[str, Any]:
    """One batch through a fake scheduler."""
    rollout, _ = rollout_of(*batches, **options)
    with rollout:
        size = len(batches[0]) if isinstance(batches[0], list) else 1
        return rollout([[{"role": "user", "content": "Play", "row": 0}]] * size, trainer or FakeTrainer())


ROWS: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": "Play"}],
        "env_config": {"name": "counting", "reset_kwargs": {"seed": seed}},
    }
    for seed in range(4)
]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., GRPOTrainer]]:
    """Train a tiny model through a rollout; the trainer notes in ``seen`` what TRL made of each batch."""
    rollouts: list[TRLRollout] = []

    def run(
        rollout: TRLRollout, *components: str, rows: Any = ROWS, steps: int = 1, model: Any = None, **args: Any
    ) -> GRPOTrainer:
        rollouts.append(rollout)
        options = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 100, **args}
        trainer = GRPOTrainer(
            model or make_model(),
            reward_funcs=reward_functions(*components),
            args=GRPOConfig(
                str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=steps, logging_steps=1,
                save_strategy="no", disable_tqdm=True, learning_rate=0.1, **options,
            ),
            train_dataset=trl_dataset(rows),
            processing_class=make_tokenizer(),
            rollout_func=rollout,
        )  # fmt: skip
        trainer.seen = []
        score = trainer._generate_and_score_completions

        def note(inputs: Any) -> Any:
            trainer.seen.append(score(inputs))
            return trainer.seen[-1]

        trainer._generate_and_score_completions = note
        trainer.train()
        return trainer

    yield run
    for rollout in rollouts:
        rollout.close()


def first_log(trainer: GRPOTrainer) -> dict[str, Any]:
    log: dict[str, Any] = trainer.state.log_history[0]
    return log


def weights(model: Any) -> Any:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# -- what TRL gets ---------------------------------------------------------------------------------------


def test_a_trajectory_is_handed_over_exactly() -> None:
    columns = play([played()])
    assert columns["prompt_ids"] == [[5, 6]]
    assert columns["completion_ids"] == [[7, 8, 9, 1]]
    assert columns["env_mask"] == [[1, 0, 1, 1]]
    assert columns["logprobs"] == [[-0.5, 0.0, -0.25, -1.0]]
    assert columns["rollout_infos"][0]["num_turns"] == 2


@pytest.mark.parametrize("size", [8, 3, 0])
def test_any_number_of_prompts_gives_as_many_trajectories(size: int) -> None:
    """L07, L08: prompts are neither paired with a fixed list of environments nor repeated."""
    rollout, scheduler = rollout_of([played(ids=[10 + i], mask=[1], logprobs=[-1.0]) for i in range(size)])
    with rollout:
        columns = rollout([[{"role": "user", "content": "Play"}]] * size, FakeTrainer())
    assert len(scheduler.requests[0]) == size
    assert len({request.uuid for request in scheduler.requests[0]}) == size
    assert columns["completion_ids"] == [[10 + i] for i in range(size)]


def test_a_scheduler_that_gives_more_than_one_trajectory_for_a_prompt_is_an_error() -> None:
    rollout, _ = rollout_of([played(), played()])
    with rollout, pytest.raises(ValueError, match="gave 2 trajectories for 1 prompts"):
        rollout(["Play"], FakeTrainer())


def test_an_unscored_trajectory_is_masked_whole() -> None:
    """A10: nothing of a trajectory whose environment was lost is trained on."""
    columns = play([played(None, logprobs=None), played()])
    assert columns["env_mask"] == [[0, 0, 0, 0], [1, 0, 1, 1]]
    assert columns["logprobs"] == [[0.0] * 4, [-0.5, 0.0, -0.25, -1.0]]


def test_an_empty_completion_becomes_one_masked_token() -> None:
    """P09: TRL looks at the last token of each completion, so there must be one."""
    columns = play([played(ids=[], mask=[], logprobs=[]), lost_at_once()])
    assert columns["prompt_ids"] == [[5, 6], [0]]
    assert columns["completion_ids"] == [[0], [0]]
    assert columns["env_mask"] == [[0], [0]]
    assert columns["logprobs"] == [[0.0], [0.0]]


def test_a_game_that_is_over_before_the_first_turn_becomes_one_masked_token() -> None:
    """P09: it is scored, and nothing was sampled."""
    over = played(0.0, ids=None, logprobs=None, num_turns=0)
    over.prompt_token_ids = None
    columns = play([over, played()])
    assert columns["completion_ids"][0] == [0]
    assert columns["env_mask"][0] == [0]
    assert columns["logprobs"] == [[0.0], [-0.5, 0.0, -0.25, -1.0]]


def test_log_probabilities_that_the_engine_does_not_give_are_none() -> None:
    """T12: missing means None, never an empty list."""
    assert play([played(), played(logprobs=None)])["logprobs"] is None


def test_a_scored_trajectory_without_token_ids_is_an_error() -> None:
    """T12: ids are not made up from text."""
    with pytest.raises(ValueError, match="came without token ids"):
        play([played(ids=None)])


def test_a_trajectory_beyond_max_completion_length_is_cut_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """T11: the limit of a trajectory is not exceeded, and not in silence."""
    rollout, _ = rollout_of([played()])
    with rollout:
        for _ in range(2):
            columns = rollout(["Play"], FakeTrainer(max_completion_length=3))
    assert columns["completion_ids"] == [[7, 8, 9]]
    assert columns["env_mask"] == [[1, 0, 1]]
    assert columns["logprobs"] == [[-0.5, 0.0, -0.25]]
    (record,) = caplog.records
    assert "4 tokens, more than GRPOConfig.max_completion_length=3" in record.message
    assert "max_trajectory_tokens" in record.message


def test_sampling_follows_the_trainer_and_its_own_limit_of_a_turn() -> None:
    rollout, scheduler = rollout_of([played()], stop=["]"])
    with rollout:
        rollout(["Play"], FakeTrainer(temperature=0.7, top_p=0.9, top_k=5))
    assert scheduler.configs == [RequestConfig(max_tokens=4, temperature=0.7, top_p=0.9, top_k=5, stop=("]",))]


@pytest.mark.parametrize("args", [{"min_p": 0.1}, {"repetition_penalty": 1.2}, {"generation_kwargs": {"num_beams": 2}}])
def test_sampling_options_that_would_be_ignored_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"GRPOConfig.{next(iter(args))}="):
        play([played()], trainer=FakeTrainer(**args))


@pytest.mark.parametrize("option", ["max_new_tokens", "max_attempts"])
def test_a_number_below_one_is_refused(option: str) -> None:
    make_rollout: Any = functools.partial(TRLRollout, FakeScheduler())
    with pytest.raises(ValueError, match=f"{option} must be at least 1, not 0"):
        make_rollout(**{"max_new_tokens": 1, option: 0})


# -- from the dataset to the environment -----------------------------------------------------------------


def requests_of(prompts: list[Any]) -> list[RolloutInferRequest]:
    rollout, scheduler = rollout_of([played(fingerprint=None) for _ in prompts])
    with rollout:
        rollout(prompts, FakeTrainer())
    return scheduler.requests[0]


def test_each_rows_data_reaches_its_trajectory_and_no_other() -> None:
    """Rows with different keys do not lend them to each other."""
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "Play"}], "env_config": {"reset_kwargs": {"seed": 1}}, "level": 3},
        {"messages": [], "env_config": {"base_url": "http://other", "reset_kwargs": {"hard": True}}},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "x"}]},
    ]
    requests = requests_of(trl_dataset(rows)["prompt"])
    assert [r.data_dict for r in requests] == [
        {"env_config": {"reset_kwargs": {"seed": 1}}, "level": 3},
        {"env_config": {"base_url": "http://other", "reset_kwargs": {"hard": True}}},
        {},
    ]
    assert requests[0].messages == [{"role": "user", "content": "Play"}]
    assert requests[2].messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def test_settings_can_replace_those_of_every_row() -> None:
    dataset = trl_dataset(ROWS, env_config={"base_url": "http://127.0.0.1:9"})
    (request, *_) = requests_of(dataset["prompt"])
    assert request.data_dict["env_config"] == {**ROWS[0]["env_config"], "base_url": "http://127.0.0.1:9"}


def test_a_jsonl_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8")
    assert requests_of(trl_dataset(path)["prompt"])[3].data_dict == {"env_config": ROWS[3]["env_config"]}


def test_rows_are_handed_to_the_hook_as_they_are_in_the_dataset() -> None:
    batches: list[list[dict[str, Any]]] = []
    rollout, _ = rollout_of([played()] * 4, on_batch=lambda rows, outputs, step: batches.append(rows))
    with rollout:
        rollout(list(trl_dataset(ROWS)["prompt"]), FakeTrainer())
    assert batches == [ROWS]


def test_further_columns_stay_columns_for_reward_functions() -> None:
    dataset = trl_dataset([{"messages": [], "solution": "42"}, {"messages": []}])
    assert dataset["solution"][:] == ["42", None]


def test_a_prompt_written_by_hand_may_carry_its_env_config_as_it_is() -> None:
    config = {"reset_kwargs": {"seed": 5}}
    prompt = [{"role": "user", "content": "Play", "env_config": config}]
    assert requests_of([prompt, "just text"])[0].data_dict == {"env_config": config}


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", ValueError, "no rows"),
        ('{"messages": []}\n{"messages"', ValueError, "line 2: .*; each line must be a row as JSON"),
        ('{"messages": [{"role": "user"}]}', TypeError, "row 0: 'messages' must be a list"),
    ],
)
def test_a_faulty_dataset_is_refused_by_line_or_row(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=message):
        trl_dataset(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "Play"}, "row 1: 'messages' must be a list"),
        ({"messages": [], "env_config": 3}, "row 1: 'env_config' must be a mapping, not a int"),
    ],
)
def test_a_faulty_row_is_refused_by_number(row: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        trl_dataset([ROWS[0], row])


# -- groups, failures ------------------------------------------------------------------------------------


def test_a_group_that_played_different_puzzles_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """S12, S14: members of a group are told apart by the row, and the row without an effective seed is named."""
    prompts = [prompt for prompt in trl_dataset(ROWS)["prompt"][:2] for _ in range(2)]
    outputs = [played(fingerprint=f) for f in ("a", "a", "b", "c")]
    rollout, _ = rollout_of(outputs)
    with rollout:
        for _ in range(2):
            rollout(prompts, FakeTrainer())
    (record,) = caplog.records
    assert "began 2 different games" in record.message
    assert "row 1, env_config {'name': 'counting', 'reset_kwargs': {'seed': 1}}" in record.message


def test_a_member_whose_environment_was_lost_does_not_look_like_another_puzzle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    play([played(), lost_at_once()])
    assert not caplog.records


def test_a_batch_without_a_scored_trajectory_is_played_again_until_training_stops() -> None:
    failed, fine = [played(None), played(None)], [played(None), played()]
    rollout, scheduler = rollout_of(failed, failed, fine, failed, failed, failed)
    with rollout:
        assert sum(map(sum, rollout(["Play"] * 2, FakeTrainer())["env_mask"])) == 3
        with pytest.raises(NoScoredRolloutError, match=r"in 3 attempts.*SessionLost: gone"):
            rollout(["Play"] * 2, FakeTrainer())
    uuids = [request.uuid for requests in scheduler.requests for request in requests]
    assert len(set(uuids)) == len(uuids) == 12


@pytest.mark.parametrize("missing", ["num_turns", "stop_reason", "total_reward"])
def test_outputs_of_a_run_of_the_users_own_must_say_how_it_went(missing: str) -> None:
    output = played()
    del output.rollout_infos[missing]
    with pytest.raises(ValueError, match=f"lack {missing}; a run.. of your own must report them"):
        play([output])


def test_every_batch_is_handed_to_the_hook_also_a_failed_one() -> None:
    seen: list[Any] = []
    with pytest.raises(NoScoredRolloutError):
        play([played(None)], max_attempts=1, on_batch=lambda *batch: seen.append(batch))
    [(rows, outputs, step)] = seen
    assert rows == [{"messages": [{"role": "user", "content": "Play"}]}]
    assert (len(outputs), step) == (1, 7)


def test_an_exception_of_the_scheduler_is_raised() -> None:
    with pytest.raises(RuntimeError, match="a fault in a hook"):
        play(RuntimeError("a fault in a hook"))


# -- threads and loops -----------------------------------------------------------------------------------


async def test_it_works_where_an_event_loop_already_runs() -> None:
    """A07: as in a notebook."""
    assert play([played()])["prompt_ids"] == [[5, 6]]


def test_batches_run_in_one_event_loop_and_the_scheduler_is_closed_in_it() -> None:
    loops: list[Any] = []

    class Noting(FakeScheduler):
        async def async_infer(self, *args: Any, **kwargs: Any) -> list[RolloutOutput]:
            loops.append(asyncio.get_running_loop())
            return [played()]

        async def aclose(self) -> None:
            loops.append(asyncio.get_running_loop())

    trainer = FakeTrainer()
    rollout = TRLRollout(Noting(), max_new_tokens=4, make_engine=no_engine)
    with rollout:
        rollout(["Play"], trainer)
        rollout(["Play"], trainer)
    assert len(loops) == 3
    assert len(set(map(id, loops))) == 1
    assert loops[0].is_closed()
    rollout.close()  # a second time does nothing


def test_another_trainer_gets_an_engine_and_a_scheduler_of_its_own() -> None:
    rollout, scheduler = rollout_of([played()])
    with rollout:
        rollout(["Play"], FakeTrainer())
        first = scheduler.engine
        rollout(["Play"], FakeTrainer())
        assert scheduler.engine is not first
        assert scheduler.closed == 1


def test_an_interrupt_ends_the_rollouts_and_lets_them_clean_up() -> None:
    """Ctrl-C cancels the trajectories, waits until they have closed what they hold, and goes on."""
    events: list[str] = []

    class Endless(FakeScheduler):
        async def async_infer(self, *args: Any, **kwargs: Any) -> list[RolloutOutput]:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                events.append("closed")
            return []

    with TRLRollout(Endless(), max_new_tokens=4, make_engine=no_engine) as rollout:
        with pytest.raises(KeyboardInterrupt):
            rollout(["Play"], FakeTrainer())
        assert events == ["closed"]


# -- reward functions ------------------------------------------------------------------------------------


def test_a_reward_function_has_the_components_name_and_gives_none_for_the_unscored() -> None:
    """A10: unscored is None, not zero."""
    outputs = [played(3.0, rewards={"a": 1.0, "b": 2.0}), played(None, rewards={"a": 9.0, "b": 9.0}), played(0.0)]
    infos = [output.rollout_infos for output in outputs]
    a, b = reward_functions("a", "b")
    (total,) = reward_functions()
    assert [f.__name__ for f in (a, b, total)] == ["a", "b", "total_reward"]
    assert a(rollout_infos=infos) == [1.0, None, None]  # the third ended before there was anything to judge
    assert b(rollout_infos=infos) == [2.0, None, None]
    assert total(rollout_infos=infos, prompts=[], trainer_state=None) == [3.0, None, 0.0]


def test_a_reward_that_the_scheduler_does_not_report_is_named() -> None:
    (c,) = reward_functions("c")
    with pytest.raises(ValueError, match="no reward 'c', only a, b"):
        c(rollout_infos=[played(1.0, rewards={"b": 1.0, "a": 0.0}).rollout_infos])


def test_the_first_reward_function_logs_the_rollouts() -> None:
    logged: dict[str, list[float]] = {}
    first, second = reward_functions("a", "b")
    infos = [played(solved=True).rollout_infos, played(None, solved=False).rollout_infos]
    for function in (first, second):
        function(rollout_infos=infos, log_metric=lambda name, value: logged.setdefault(name, []).append(value))
    assert logged["rollout/turns"] == [2, 2]
    assert logged["rollout/solved"] == [1.0, 0.0]
    assert logged["rollout/unscored"] == [0.0, 1.0]
    assert logged["rollout/stop/env_done"] == [1.0, 0.0]
    assert logged["rollout/stop/env_lost"] == [0.0, 1.0]
    assert logged["rollout/stop/max_turns"] == [0.0, 0.0]


# -- the real trainer ------------------------------------------------------------------------------------


class Counting(Env):
    """Three turns; each is worth the letters said."""

    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        self.turn = 0
        return f"game {self.env_config['reset_kwargs']['seed']}", {}, "rules"

    async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        self.turn += 1
        return f"turn {self.turn}", len(action[-1]["content"]) / 10, self.turn == 3, {}

    async def close(self) -> None:
        pass


@pytest.fixture
def _counting() -> Iterator[None]:
    envs["counting"] = Counting
    yield
    del envs["counting"]


class Talkative(GYMScheduler):
    """Goes on after a completion that was cut, so that all games have three turns."""

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        return False


@pytest.mark.usefixtures("_counting")
def test_a_model_is_trained_on_games_of_several_turns_played_with_its_own_weights(train: Any) -> None:
    batches: list[list[RolloutOutput]] = []
    rollout = TRLRollout(Talkative, max_new_tokens=6, on_batch=lambda rows, outputs, step: batches.append(outputs))
    model = make_model()
    before = weights(model)
    trainer = train(rollout, steps=2, model=model, temperature=0.8, num_iterations=2)
    assert not torch.equal(weights(model), before)
    assert model.training  # as TRL keeps it

    seen, outputs = trainer.seen[0], batches[0]
    assert len(outputs) == 4
    assert len({output.rollout_infos["fingerprint"] for output in outputs}) == 1
    for index, output in enumerate(outputs):
        ids, mask = output.completion_token_ids or [], output.completion_mask or []
        assert output.rollout_infos["num_turns"] == 3
        assert seen["prompt_ids"][index][seen["prompt_mask"][index].bool()].tolist() == output.prompt_token_ids
        assert seen["completion_ids"][index][seen["completion_mask"][index].bool()].tolist() == ids
        # What TRL computes itself with the same weights, at the places of the sampled tokens.
        recomputed = seen["old_per_token_logps"][index][: len(ids)]
        assert torch.tensor(output.completion_logprobs)[torch.tensor(mask).bool()].numpy() == pytest.approx(
            recomputed[torch.tensor(mask).bool()].numpy(), abs=1e-4
        )
    log = first_log(trainer)
    assert log["rollout/turns"] == 3
    assert log["rollout/stop/env_done"] == 1
    assert math.isfinite(log["loss"])
    sampled = [sum(output.completion_mask or []) for output in outputs]
    assert log["completions/mean_length"] == sum(sampled) / 4


@pytest.mark.usefixtures("_counting")
def test_an_adapter_of_peft_is_trained_and_sampled_with(train: Any) -> None:
    base = make_model()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    batches: list[list[RolloutOutput]] = []
    rollout = TRLRollout(Talkative, max_new_tokens=4, on_batch=lambda rows, outputs, step: batches.append(outputs))
    trainer = train(rollout, model=model, num_iterations=2, beta=0.0)
    output, seen = batches[0][0], trainer.seen[0]
    mask = torch.tensor(output.completion_mask).bool()
    recomputed = seen["old_per_token_logps"][0][: len(mask)]
    assert torch.tensor(output.completion_logprobs)[mask].numpy() == pytest.approx(recomputed[mask].numpy(), abs=1e-4)


def test_components_are_logged_and_weighted(train: Any) -> None:
    """L10: environment rewards are reward functions like any other, with TRL's weights."""
    rollout, _ = rollout_of([played(0.0, rewards={"a": float(i), "b": 1.0}) for i in range(4)])
    log = first_log(train(rollout, "a", "b", reward_weights=[2.0, 10.0]))
    assert log["rewards/a/mean"] == 1.5
    assert log["rewards/b/mean"] == 1.0
    assert log["reward"] == 13.0


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_an_unscored_member_moves_neither_the_baseline_nor_the_model(train: Any, loss_type: str) -> None:
    """A10: the baseline of the group is the mean of the others, and the lost one has no part in the loss."""
    rollout, _ = rollout_of([played(1.0), played(None), played(4.0), lost_at_once()])
    trainer = train(rollout, loss_type=loss_type)
    advantages = trainer.seen[0]["advantages"].tolist()
    assert advantages[1] == advantages[3] == 0
    assert advantages[0] == pytest.approx(-advantages[2])
    assert advantages[2] > 0.5
    log = first_log(trainer)
    assert log["reward"] == 2.5
    assert log["rollout/unscored"] == 0.5
    assert math.isfinite(log["loss"])
    assert torch.isfinite(weights(trainer.model)).all()


def test_one_environment_that_fails_in_a_group_of_eight_leaves_seven_scored(train: Any) -> None:
    """A09, A10: over real sockets; the seven have their rewards, the eighth is masked and in no baseline."""
    game = [reply({"step": 0}), reply({"step": 1}, reward=1.0), reply({"step": 2}, reward=2.0, done=True)]
    batches: list[list[RolloutOutput]] = []
    with MockEnvServer(game, faults=[Fault("drop_after", "step", nth=9)], capacity=3) as server:
        rollout = TRLRollout(
            lambda engine: OpenEnvScheduler(engine, base_url=server.base_url, env_settings={"recover": "never"}),
            max_new_tokens=4,
            make_engine=lambda trainer: ScriptedEngine(lambda request, turn: "go", make_tokenizer()),
            on_batch=lambda rows, outputs, step: batches.append(outputs),
        )
        trainer = train(rollout, per_device_train_batch_size=8, num_generations=8)
        server.wait_until(lambda: server.sessions == 0)
    (outputs,) = batches
    rewards = [output.total_reward for output in outputs]
    lost = rewards.index(None)
    assert rewards[:lost] + rewards[lost + 1 :] == [3.0] * 7
    assert outputs[lost].stop_reason is StopReason.ENV_LOST
    sampled = (trainer.seen[0]["completion_mask"] * trainer.seen[0]["tool_mask"]).sum(1).tolist()
    assert [count == 0 for count in sampled] == [index == lost for index in range(8)]
    log = first_log(trainer)
    assert (log["reward"], log["rollout/unscored"]) == (3.0, 1 / 8)


def test_a_distance_to_a_reference_model_is_finite_for_unscored_trajectories(train: Any, tmp_path: Path) -> None:
    """A10."""
    make_model().save_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")  # TRL loads the reference from there
    rollout, _ = rollout_of([played(1.0), played(None), played(4.0), lost_at_once()])
    trainer = train(rollout, model=model, beta=0.1, steps=2)
    assert math.isfinite(first_log(trainer)["kl"])
    assert torch.isfinite(weights(trainer.model)).all()


def test_a_group_that_is_unscored_as_a_whole_leaves_the_other_group_as_it_is(train: Any) -> None:
    """A10."""
    rollout, _ = rollout_of([played(1.0), played(3.0), lost_at_once(), played(None)])
    trainer = train(rollout, num_generations=2)
    advantages = trainer.seen[0]["advantages"].tolist()
    assert advantages[1] == -advantages[0] > 0.5
    assert advantages[2:] == [0, 0]
    assert torch.isfinite(weights(trainer.model)).all()


def test_a_group_without_spread_teaches_nothing_and_a_metric_shows_it(train: Any) -> None:
    """R04."""
    rollout, _ = rollout_of([played(2.0) for _ in range(4)])
    trainer = train(rollout)
    assert trainer.seen[0]["advantages"].tolist() == [0, 0, 0, 0]
    log = first_log(trainer)
    assert log["frac_reward_zero_std"] == 1
    assert log["loss"] == 0


def test_empty_completions_do_not_crash_the_trainer(train: Any) -> None:
    """P09."""
    rollout, _ = rollout_of([played(float(i), ids=[], mask=[], logprobs=[]) for i in range(4)])
    assert first_log(train(rollout))["loss"] == 0


def test_training_stops_when_the_environment_stays_away(train: Any) -> None:
    rollout, _ = rollout_of([lost_at_once() for _ in range(4)], max_attempts=2)
    with pytest.raises(NoScoredRolloutError):
        train(rollout, steps=10)


# -- engines with a copy of the weights ------------------------------------------------------------------


class Copying:
    """An engine that samples from a copy of the weights, which it has to be given."""

    tokenizer = None

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def load_weights(self, weights: dict[str, Any]) -> None:
        self.given.append({name: weight.detach().clone() for name, weight in weights.items()})

    async def infer_async(self, request: Any, request_config: Any) -> Any:
        raise AssertionError("the scheduler of these tests does not sample")


def copying_rollout(engine: Copying, **options: Any) -> TRLRollout:
    scheduler = FakeScheduler([played(float(i)) for i in range(4)])
    return TRLRollout(scheduler, max_new_tokens=4, make_engine=lambda trainer: engine, **options)


def test_an_engine_gets_the_weights_before_each_batch_for_which_they_changed(train: Any) -> None:
    """With two updates a batch, that is twice in four steps; a tied output layer comes with them."""
    engine = Copying()
    model = make_model(tie_word_embeddings=True)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trainer = train(copying_rollout(engine), model=model, steps=4, num_iterations=2)
    assert len(engine.given) == 2
    assert engine.given[0].keys() == before.keys() >= {"lm_head.weight", "model.embed_tokens.weight"}
    assert all(torch.equal(engine.given[0][name], weight) for name, weight in before.items())
    assert not torch.equal(engine.given[1]["lm_head.weight"], before["lm_head.weight"])
    assert not torch.equal(engine.given[1]["lm_head.weight"], trainer.model.lm_head.weight)


def test_another_way_to_hand_over_the_weights_can_be_given(train: Any) -> None:
    engine, server = Copying(), Copying()
    train(copying_rollout(engine, load_weights=server.load_weights))
    assert (len(engine.given), len(server.given)) == (0, 1)


def test_an_engine_gets_an_adapter_merged_into_the_weights(train: Any) -> None:
    base = make_model()
    plain = {name: weight.clone() for name, weight in base.state_dict().items()}
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["lm_head"])
    model = peft.get_peft_model(base, config)
    engine = Copying()
    train(copying_rollout(engine), model=model, beta=0.0)
    (given,) = engine.given
    assert given.keys() == plain.keys()
    changed = {name for name, weight in plain.items() if not torch.equal(given[name], weight)}
    assert changed == {name for name in plain if "q_proj" in name}
    assert not any(getattr(module, "merged", False) for module in model.modules())


def test_weights_that_trl_puts_into_vllm_itself_are_left_to_it() -> None:
    engine = Copying()
    with copying_rollout(engine) as rollout:
        rollout([[{"role": "user", "content": "Play"}]] * 4, FakeTrainer(use_vllm=True))
    assert engine.given == []


def test_weights_that_fsdp_spreads_are_refused() -> None:
    trainer = FakeTrainer()
    trainer.accelerator.distributed_type = "FSDP"
    with copying_rollout(Copying()) as rollout, pytest.raises(ValueError, match=r"under FSDP .*use_vllm=True"):
        rollout([[{"role": "user", "content": "Play"}]] * 4, trainer)


def test_without_the_extra_the_import_says_which_one_is_missing() -> None:
    code = "import sys; sys.modules['trl'] = None; import schedulers.trainers.trl"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'pip install "openenv-client[train]"' in result.stderr


def test_the_package_itself_needs_no_trainer() -> None:
    code = (
        "import sys, schedulers, schedulers.engines, schedulers.trainers; "
        "print([name for name in ('torch', 'transformers', 'trl') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
