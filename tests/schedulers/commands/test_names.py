"""From what is written on a command line to what it names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.guess_the_number.game import GuessTheNumberScheduler
from examples.sudoku.scheduler import SudokuScheduler
from schedulers import GYMScheduler, OpenEnvScheduler, RequestConfig, RolloutInferRequest, TextArenaScheduler
from schedulers.commands import names
from schedulers.commands.names import (
    WrongUse,
    construct,
    engine_named,
    find,
    pairs,
    policies_of,
    policy_named,
    rows_named,
    scheduler_for,
    scheduler_named,
)
from schedulers.engines import ScriptedEngine

GAME = """
from helper_beside import value
from schedulers import TextArenaScheduler

def echo(request, turn):
    return f"[{turn}] {value}"

class MyScheduler(TextArenaScheduler):
    policies = {"echo": echo}

def make_engine(*, model, tokenizer=None, limit=1):
    return model, tokenizer, limit

plain = 3
"""


@pytest.fixture
def game(tmp_path: Path) -> Iterator[str]:
    """A file with a scheduler, which imports what lies beside it."""
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "helper_beside.py").write_text("value = 7\n")
    path = list(sys.path)
    yield str(tmp_path / "game.py")
    sys.path[:] = path
    for name in ("openenv_rollout_game", "helper_beside"):
        sys.modules.pop(name, None)
    names._file_module.cache_clear()


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        ("openenv_scheduler", OpenEnvScheduler),
        ("examples.sudoku.scheduler:SudokuScheduler", SudokuScheduler),
        ("sudoku_scheduler", SudokuScheduler),
        ("schedulers:GYMScheduler", GYMScheduler),
    ],
)
def test_scheduler_is_found_by_name_and_in_a_module(name: str, scheduler: type) -> None:
    assert scheduler_named(name) is scheduler


def test_scheduler_and_policy_are_found_in_a_file(game: str) -> None:
    """The file is executed once, and may import its neighbours."""
    scheduler = scheduler_named(f"{game}:MyScheduler")
    assert issubclass(scheduler, TextArenaScheduler)
    assert scheduler is scheduler_named(f"{game}:MyScheduler")
    engine = policy_named("echo", scheduler)
    assert isinstance(engine, ScriptedEngine)
    assert engine.script is find(f"{game}:echo", what="--policy")
    assert isinstance(policy_named(f"{game}:echo", OpenEnvScheduler), ScriptedEngine)


async def test_policy_answers(game: str) -> None:
    engine = policy_named(f"{game}:echo", OpenEnvScheduler)
    response = await engine.infer_async(RolloutInferRequest(), RequestConfig())
    assert response.choices[0].message.content == "[0] 7"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sudoku_schedular", "did you mean 'sudoku_scheduler'"),
        (
            "nothing_like_it",
            "registered are .*openenv_scheduler.*. One of your own is named as module:Class or path.py:Class",
        ),
        ("no_such_module:A", "there is no module 'no_such_module' among the installed packages or in /"),
        ("examples.nothing:A", "there is no module 'examples.nothing'"),
        ("no/such/file.py:A", "No such file or directory; paths start from /"),
        ("schedulers:GYMSchedular", "schedulers has no 'GYMSchedular'; did you mean 'GYMScheduler'"),
        ("schedulers:Episode", "must be a subclass of RolloutScheduler, not <class"),
        ("schedulers:envs", "must be a subclass of RolloutScheduler, not {"),
        (":A", "name it as module:NAME or path.py:NAME"),
        ("schedulers:", "name it as module:NAME or path.py:NAME"),
    ],
)
def test_scheduler_that_is_not_there_is_one_line_with_the_remedy(name: str, message: str) -> None:
    with pytest.raises(WrongUse, match=f"^--scheduler {name}:.*{message}") as caught:
        scheduler_named(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_package\n", "No module named 'no_such_package'; install what it needs"),
        ("from schedulers import Nothing\n", "cannot import name 'Nothing'"),
        ("x = 1\nraise KeyError('k')\n", "importing it failed at .*bad.py, line 2: KeyError: 'k'"),
        ("def f(:\n", "importing it failed at .*SyntaxError"),
    ],
)
def test_file_that_cannot_be_imported_says_why(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(WrongUse, match=message) as caught:
        scheduler_named(f"{tmp_path / 'bad.py'}:A")
    assert "\n" not in str(caught.value)


def test_policy_that_is_not_there(game: str) -> None:
    with pytest.raises(WrongUse, match=r"--policy hint: SudokuScheduler has random, hints, solver; .*module:function"):
        policy_named("hint", SudokuScheduler)
    with pytest.raises(WrongUse, match="OpenEnvScheduler has no policies"):
        policy_named("random", OpenEnvScheduler)
    with pytest.raises(WrongUse, match="must be a function of a request and a turn, not 3"):
        policy_named(f"{game}:plain", SudokuScheduler)


def test_environment_in_this_process_brings_its_players() -> None:
    """In a checkout those of the examples are known once a scheduler was looked up, under whatever name."""
    scheduler = scheduler_named("schedulers:GYMScheduler")
    assert set(policies_of(scheduler, "frozen_lake")) == set(policies_of(scheduler, "math")) == {"random", "solver"}
    assert policies_of(scheduler, None) == {}
    with pytest.raises(WrongUse, match=r"there is no environment 'frozen_lak'; did you mean 'frozen_lake'\?"):
        policies_of(scheduler, "frozen_lak")
    assert isinstance(policy_named("solver", scheduler, "frozen_lake"), ScriptedEngine)


def test_rows_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=r"^--dataset none\.jsonl: No such file or directory; paths start from /"):
        rows_named("none.jsonl")
    (tmp_path / "rows.jsonl").write_text("{}\nx\n")
    with pytest.raises(WrongUse, match=r"^--dataset .*rows\.jsonl, line 2: "):
        rows_named(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("env_id", "scheduler"),
    [
        ("Sudoku-v0-very-easy", SudokuScheduler),
        ("Sudoku-v0", SudokuScheduler),
        ("GuessTheNumber-v0-hardcore", GuessTheNumberScheduler),
        ("Wordle-v0", TextArenaScheduler),
    ],
)
def test_a_checkout_knows_the_schedulers_of_its_examples(env_id: str, scheduler: type) -> None:
    assert scheduler_named(scheduler_for(env_id)) is scheduler


def test_elsewhere_there_is_one_for_all_games(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_EXAMPLES", "no_examples.registry")
    assert scheduler_for("Sudoku-v0") == "textarena_scheduler"


def test_server_is_started_in_a_checkout_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names.server_process().__name__ == "ServerProcess"
    monkeypatch.setattr(names, "_SERVER", "no_server_scripts.launch")
    with pytest.raises(WrongUse, match=r"in the checkout only: run this in its root, or start a server .* --base-url"):
        names.server_process()


def test_engine_gets_its_model_and_options(game: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer is given by its folder or name."""
    monkeypatch.setitem(names.ENGINES, "mine", (f"{game}:make_engine", "model"))
    engine: Any = engine_named("mine", "m", {"limit": 3, "tokenizer": "examples/sudoku/policy"})
    assert (engine[0], engine[2]) == ("m", 3)
    assert engine[1].eos_token_id is not None
    with pytest.raises(WrongUse, match=r"--engine mine: there is no option 'limits'; did you mean 'limit'\?"):
        engine_named("mine", "m", {"limits": 3})
    with pytest.raises(WrongUse, match="--engine mine, tokenizer: "):
        engine_named("mine", "m", {"tokenizer": "no/such/folder"})


def test_engine_that_is_not_there() -> None:
    with pytest.raises(WrongUse, match="--engine tensorflow: there are transformers, vllm, openai"):
        engine_named("tensorflow", "m", {})


def test_engine_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "schedulers.engines.vllm", raising=False)
    with pytest.raises(WrongUse, match=r'needs vLLM: pip install "openenv-client\[vllm\]"'):
        engine_named("vllm", "m", {})


def test_key_is_not_taken_from_the_command_line() -> None:
    with pytest.raises(WrongUse, match="put the key into a variable"):
        engine_named("openai", "m", {"base_url": "http://127.0.0.1:1", "api_key": "secret"})


def test_model_that_is_not_there_is_one_line() -> None:
    with pytest.raises(WrongUse, match=r"--engine transformers: cannot load .* from 'no/such/folder'") as caught:
        engine_named("transformers", "no/such/folder", {})
    assert "\n" not in str(caught.value)


def test_what_the_user_has_named_may_refuse_the_options() -> None:
    with pytest.raises(WrongUse, match="what: difficulty must be one of easy, medium, hard, not 'none'"):
        construct(SudokuScheduler, "what", difficulty="none")
    with pytest.raises(WrongUse, match=r"what: there is no option 'colour'; there are .*difficulty.*slot_timeout"):
        construct(SudokuScheduler, "what", colour="red")


def test_an_engine_that_does_not_start_is_one_line() -> None:
    """VLLM's own words, of a model for which there is no room."""

    def start() -> None:
        raise RuntimeError("Engine core initialization failed.\nSee root cause above.")

    with pytest.raises(WrongUse, match=r"^--engine vllm: RuntimeError: Engine core initialization failed\. See root"):
        construct(start, "--engine vllm")


def test_pairs_are_json_where_they_are() -> None:
    given = ["a=1", "b=1.5", "c=true", "d=text", 'e={"f": [1]}', "g=a=b", "h="]
    expected = {"a": 1, "b": 1.5, "c": True, "d": "text", "e": {"f": [1]}, "g": "a=b", "h": ""}
    assert pairs("--option", given) == expected


@pytest.mark.parametrize("pair", ["a", "=1", ""])
def test_what_is_no_pair_is_refused(pair: str) -> None:
    with pytest.raises(WrongUse, match=f"--option {pair}: write it as NAME=VALUE"):
        pairs("--option", [pair])
