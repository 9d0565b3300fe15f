from __future__ import annotations

import pickle
import re

import pytest

from openenv_client import errors
from openenv_client.errors import (
    ConnectError,
    EnvironmentFailedError,
    MessageTooBigError,
    OpenEnvError,
    ProtocolError,
    ServerFullError,
    SessionLost,
    StepTimeoutError,
)

ALL = [getattr(errors, name) for name in errors.__all__]


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    drawn: list[str] = []
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        branch = re.match(r"    ([│├└─ ]*)([A-Z]\w+)(  |$)", line)
        if branch is not None:
            depth, name = len(branch[1]) // 4, branch[2]
            parents[depth:] = [name]
            drawn.append(name)
            assert depth == 0 or getattr(errors, name).__bases__[0].__name__ == parents[depth - 1]
    assert sorted(drawn) == errors.__all__


@pytest.mark.parametrize("error_type", ALL)
def test_every_error_survives_pickling_with_its_data(error_type: type[OpenEnvError]) -> None:
    error = error_type("it broke")
    error.url, error.attempts, error.elapsed, error.maybe_applied = "ws://h/ws", 3, 1.5, True
    error.remedy, error.transient = "Mend it.", True

    copy = pickle.loads(pickle.dumps(error))  # noqa: S301

    assert type(copy) is error_type
    assert vars(copy) == vars(error)
    assert str(copy) == str(error) == "it broke (ws://h/ws, 3 attempts in 1.5 s). Mend it."


@pytest.mark.parametrize(
    "error",
    [
        ConnectError("no", status=502, transient=True),
        ServerFullError("no", active=4, maximum=4),
        EnvironmentFailedError("no", code="VALIDATION_ERROR", errors=[{"loc": ["x"], "msg": "bad"}]),
        SessionLost("no", close_code=1001),
        StepTimeoutError("no", timeout=2.0),
        MessageTooBigError("no", side="client", limit=7),
        ProtocolError("no", reply="'{'"),
    ],
)
def test_an_error_is_pickled_with_what_only_its_class_has(error: OpenEnvError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301

    assert vars(copy) == vars(error)


def test_an_error_without_an_address_says_just_what_happened_and_what_to_do() -> None:
    assert str(errors.NotResetError("no episode")) == "no episode. Call reset() first."


def test_which_errors_are_worth_another_attempt() -> None:
    assert ServerFullError("full").transient
    assert SessionLost("cut").transient
    assert StepTimeoutError("late").transient
    assert not ConnectError("not found").transient
    assert not ProtocolError("garbage").transient
    assert not MessageTooBigError("big").transient
    assert not EnvironmentFailedError("raised").transient


@pytest.mark.parametrize("error_type", ALL)
def test_a_remedy_is_made_of_whole_sentences(error_type: type[OpenEnvError]) -> None:
    """Those without one of their own are given one where they are raised."""
    assert re.fullmatch(r"([A-Z].*|reset\(\).*)?(?<!\.)\.?", error_type.remedy)
    assert error_type.remedy.endswith(".") == bool(error_type.remedy)
