"""Settings that make no sense are refused where they are given, with what to give instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest

from openenv_client import ConfigurationError, OpenEnvWrapper
from openenv_client.checks import mapping, positive, whole
from openenv_client.testing import record


@pytest.mark.parametrize("value", ["5", None, True, 0, -1, math.nan, math.inf])
def test_what_is_no_positive_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        positive("step_timeout", value)
    assert str(caught.value) == f"step_timeout is {value!r}. Give a finite number above 0."


def test_zero_may_be_allowed() -> None:
    assert positive("capacity_timeout", 0, or_zero=True) == 0
    with pytest.raises(ConfigurationError, match="Give a finite number of 0 or more"):
        positive("capacity_timeout", -1, or_zero=True)


@pytest.mark.parametrize("value", ["3", None, True, 3.0, 0])
def test_what_is_no_whole_number_of_the_least_or_more_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        whole("max_message_size", value, least=1)
    assert str(caught.value) == f"max_message_size is {value!r}. Give a whole number of 1 or more."


def test_what_fits_is_handed_back() -> None:
    given = MappingProxyType({"a": 1})
    assert (positive("x", 0.5), whole("x", 1, least=1), mapping("x", given), mapping("x", None)) == (0.5, 1, given, {})


def test_what_is_no_mapping_is_refused_without_showing_it() -> None:
    headers: Any = ["Authorization: secret"]
    with pytest.raises(ConfigurationError) as caught:
        mapping("headers", headers)
    assert str(caught.value) == "headers is a list. Give a dict."


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (OpenEnvWrapper, {"step_timeout": "5"}),
        (OpenEnvWrapper, {"max_recoveries": "3"}),
        (OpenEnvWrapper, {"reset_kwargs": "seed"}),
        (lambda **options: record(path="never", **options), {"timeout": "60"}),
    ],
)
def test_constructors_refuse_a_wrong_type_by_name(make: Callable[..., object], option: dict[str, Any]) -> None:
    [name] = option
    with pytest.raises(ConfigurationError, match=f"^{name} is "):
        make(base_url="http://127.0.0.1:9", **option)
