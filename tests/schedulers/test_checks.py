"""What constructors say at once of an argument that does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from schedulers import GYMScheduler, MultiTurnScheduler, OpenEnvScheduler, RequestConfig, TextArenaScheduler
from schedulers.checks import as_dict, check_number, check_seconds, check_whole
from schedulers.engines.openai import OpenAIEngine
from schedulers.engines.scripted import ScriptedEngine
from schedulers.engines.vllm_server import VLLMServerWeights
from schedulers.maths import MathGrader


@pytest.mark.parametrize("value", ["3", 3.0, True, [3], math.nan])
def test_what_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"^turns must be a whole number, not "):
        check_whole("turns", value)


def test_whole_numbers_are_those_of_numpy_too() -> None:
    for value in (1, np.int64(1), 10**30):
        check_whole("turns", value, least=1)


def test_the_range_is_named_and_what_none_means() -> None:
    check_whole("turns", None, least=1, none="no limit")
    with pytest.raises(ValueError, match=r"^turns must be at least 1 \(or None for no limit\), not 0$"):
        check_whole("turns", 0, least=1, none="no limit")
    with pytest.raises(TypeError, match=r"^turns must be a whole number \(or None for no limit\), not '3'$"):
        check_whole("turns", "3", least=1, none="no limit")
    with pytest.raises(TypeError, match=r"^turns must be a whole number, not None$"):
        check_whole("turns", None, least=1)


@pytest.mark.parametrize("value", ["1", None, True, 1j])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"^weight must be a number, not "):
        check_number("weight", value)


def test_nan_is_refused_and_other_numbers_are_not() -> None:
    for value in (-1, 0.5, np.float32(0.5), math.inf):
        check_number("weight", value)
    with pytest.raises(ValueError, match=r"^weight must be a number, not nan$"):
        check_number("weight", math.nan)


def test_seconds_have_a_range() -> None:
    check_seconds("timeout", 0.1)
    check_seconds("timeout", math.inf)
    check_seconds("timeout", 0, or_zero=True)
    check_seconds("timeout", None, none="no limit")
    with pytest.raises(ValueError, match=r"^timeout must be above 0 seconds, not 0$"):
        check_seconds("timeout", 0)
    with pytest.raises(ValueError, match=r"^timeout must be 0 or more seconds, not -1$"):
        check_seconds("timeout", -1, or_zero=True)
    with pytest.raises(ValueError, match=r"^timeout must be above 0 seconds \(or None for no limit\), not -1$"):
        check_seconds("timeout", -1, none="no limit")


def test_any_mapping_is_copied_and_nothing_else_is_taken() -> None:
    given = {"a": 1}
    copy = as_dict("weights", given)
    assert copy == given
    assert copy is not given
    assert as_dict("weights", MappingProxyType(given)) == given
    assert as_dict("weights", None) == {}
    bad: Any = [("authorization", "secret")]
    with pytest.raises(TypeError, match=r"^weights must be a dict, not a list$"):
        as_dict("weights", bad)


def _openai(**options: Any) -> OpenAIEngine:
    return OpenAIEngine("http://127.0.0.1:9", "model", **options)


def _weights(**options: Any) -> VLLMServerWeights:
    return VLLMServerWeights("http://127.0.0.1:9", **options)


def _scripted(**options: Any) -> ScriptedEngine:
    return ScriptedEngine([], **options)


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [
        (MultiTurnScheduler, "max_turns", "3"),
        (GYMScheduler, "max_turns", 2.5),
        (MultiTurnScheduler, "max_trajectory_tokens", "512"),
        (MultiTurnScheduler, "extra_rewards", ["x"]),
        (MultiTurnScheduler, "template_kwargs", "enable_thinking"),
        (OpenEnvScheduler, "max_concurrent_envs", "4"),
        (OpenEnvScheduler, "max_parse_failures", None),
        (OpenEnvScheduler, "slot_timeout", "600"),
        (OpenEnvScheduler, "env_settings", [("step_timeout", 5)]),
        (TextArenaScheduler, "reward_weights", ["x"]),
        (RequestConfig, "max_tokens", "16"),
        (RequestConfig, "temperature", "hot"),
        (RequestConfig, "top_p", None),
        (RequestConfig, "top_k", 1.5),
        (RequestConfig, "n", "1"),
        (RequestConfig, "seed", "7"),
        (RequestConfig, "stop", "</answer>"),
        (MathGrader, "timeout", "5"),
        (MathGrader, "max_processes", True),
        (_openai, "max_model_len", "4096"),
        (_openai, "max_concurrency", "64"),
        (_openai, "request_timeout", None),
        (_openai, "total_timeout", "1"),
        (_openai, "max_retries", 1.0),
        (_openai, "retry_delay", "1"),
        (_openai, "extra_body", "temperature"),
        (_weights, "timeout", "600"),
        (_scripted, "max_model_len", "4096"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named_by_the_constructor(
    make: Callable[..., object], option: str, value: object
) -> None:
    with pytest.raises(TypeError, match=f"^{option} must be a "):
        make(**{option: value})


def test_a_weight_that_is_no_number_is_named() -> None:
    weights: Any = {"environment_reward": "1"}
    with pytest.raises(TypeError, match=r"^the weight of environment_reward must be a number, not '1'$"):
        TextArenaScheduler(reward_weights=weights)


def test_a_grader_has_one_process_at_least() -> None:
    with pytest.raises(ValueError, match=r"^max_processes must be at least 1 "):
        MathGrader(max_processes=0)


@pytest.mark.parametrize("option", ["temperature", "top_p"])
def test_nan_is_no_way_to_sample(option: str) -> None:
    options: Any = {option: math.nan}
    with pytest.raises(ValueError, match=f"^{option} must be a number, not nan$"):
        RequestConfig(**options)
