"""From what is written on a command line to the things that it names: schedulers, policies, engines, options."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from schedulers import GYMScheduler, OpenEnvScheduler, RolloutScheduler, envs, multi_turns
from schedulers.engines.base import InferEngine
from schedulers.engines.policies import Policy
from schedulers.engines.scripted import Script, ScriptedEngine
from schedulers.names import did_you_mean
from schedulers.rows import read_rows

__all__ = [
    "ENGINES",
    "WrongUse",
    "engine_named",
    "find",
    "in_checkout",
    "pairs",
    "policies_of",
    "policy_named",
    "rows_named",
    "scheduler_for",
    "scheduler_named",
]

ENGINES = {
    "transformers": ("schedulers.engines.transformers:TransformersEngine.from_pretrained", "model_name_or_path"),
    "vllm": ("schedulers.engines.vllm:VLLMEngine.from_pretrained", "model_name_or_path"),
    "openai": ("schedulers.engines.openai:OpenAIEngine", "model"),
}
"""What makes each engine, and which of its keywords is the model."""

_SERVER = "server_scripts.launch"
_EXAMPLES = "examples.registry"


class WrongUse(Exception):  # noqa: N818 - it is shown to the user, not handled
    """What the user can put right: one line, which names the remedy."""


def find(name: str, *, what: str) -> Any:
    """What ``module:NAME`` or ``path.py:NAME`` names; the current folder is searched as well.

    Args:
        name: The name.
        what: The option that it is for, with its value, to begin an error with.

    Raises:
        WrongUse: There is no such thing.
    """
    source, colon, attribute = name.rpartition(":")
    if not colon or not source or not attribute:
        raise WrongUse(f"{what}: name it as module:NAME or path.py:NAME")
    thing: Any = _module(source, what)
    for part in attribute.split("."):
        if not hasattr(thing, part):
            hint = did_you_mean(part, dir(thing)) or "see what is defined there"
            raise WrongUse(f"{what}: {source} has no {part!r}; {hint}")
        thing = getattr(thing, part)
    return thing


def scheduler_named(name: str) -> type[RolloutScheduler]:
    """The class of a scheduler: by its registered name, or as `find` finds it.

    Raises:
        WrongUse: There is none.
    """
    what = f"--scheduler {name}"
    if in_checkout():
        importlib.import_module(_EXAMPLES)  # they register their schedulers and environments
    if ":" in name:
        scheduler = find(name, what=what)
    else:
        if name not in multi_turns:
            hint = did_you_mean(name, multi_turns) or f"registered are {', '.join(sorted(multi_turns))}."
            raise WrongUse(f"{what}: {hint} One of your own is named as module:Class or path.py:Class")
        scheduler = multi_turns[name]
    if not (isinstance(scheduler, type) and issubclass(scheduler, RolloutScheduler)):
        raise WrongUse(f"{what}: it must be a subclass of RolloutScheduler, not {scheduler!r}")
    return scheduler


def scheduler_for(env_id: str) -> str:
    """The name of the scheduler for a game of the server: the example's in a checkout, else the one for all games."""
    if in_checkout():
        for example in importlib.import_module(_EXAMPLES).EXAMPLES.values():
            scheduler = example.scheduler
            if example.env_id is not None and example.env_id.partition("-")[0] == env_id.partition("-")[0]:
                return f"{scheduler.__module__}:{scheduler.__qualname__}"
    return "textarena_scheduler"


def policies_of(scheduler: type[RolloutScheduler], env: str | None = None) -> Mapping[str, Policy]:
    """Players without a model by name.

    Args:
        scheduler: Has ``policies``.
        env: The environment of this process that it plays, if it plays one; that has ``policies`` as well.

    Raises:
        WrongUse: No environment of that name is registered.
    """
    if env is not None and issubclass(scheduler, GYMScheduler) and not issubclass(scheduler, OpenEnvScheduler):
        if env not in envs:
            hint = did_you_mean(env, envs) or f"registered are {', '.join(sorted(envs))}"
            raise WrongUse(f"there is no environment {env!r}; {hint}")
        return {**scheduler.policies, **envs[env].policies}
    return scheduler.policies


def policy_named(name: str, scheduler: type[RolloutScheduler], env: str | None = None) -> InferEngine:
    """A player without a model: one of `policies_of`, or as `find` finds it.

    Raises:
        WrongUse: There is none.
    """
    policies = policies_of(scheduler, env)
    if ":" in name:
        policy = find(name, what=f"--policy {name}")
        if not callable(policy):
            raise WrongUse(f"--policy {name}: it must be a function of a request and a turn, not {policy!r}")
        return ScriptedEngine(cast("Script", policy))
    if name not in policies:
        has = f"{scheduler.__name__} has {', '.join(policies) or 'no policies'}"
        raise WrongUse(f"--policy {name}: {has}; one of your own is module:function, and 'model' takes --model")
    return ScriptedEngine(policies[name])


def engine_named(name: str, model: str, options: dict[str, Any]) -> InferEngine:
    """Make an engine of a model.

    Args:
        name: One of `ENGINES`.
        model: What it is to sample from.
        options: Its other keywords; a ``tokenizer`` is given by its folder or name.

    Raises:
        WrongUse: There is no such engine, it is not installed, or it does not take the model or an option.
    """
    if name not in ENGINES:
        raise WrongUse(f"--engine {name}: there are {', '.join(ENGINES)}")
    if "api_key" in options:
        raise WrongUse(
            "--engine-option api_key: everyone on the machine can read a command line, and results name its options; "
            "put the key into a variable and name that, as api_key_variable=OPENAI_API_KEY"
        )
    what = f"--engine {name}"
    source, keyword = ENGINES[name]
    make = find(source, what=what)
    if isinstance(options.get("tokenizer"), str):
        load = find("transformers:AutoTokenizer.from_pretrained", what=what)
        options = {**options, "tokenizer": construct(load, f"{what}, tokenizer", options["tokenizer"])}
    return cast("InferEngine", construct(make, what, **{**options, keyword: model}))


def construct(make: Callable[..., Any], what: str, *args: Any, **options: Any) -> Any:
    """Call what the user has named, with the user's options.

    Raises:
        WrongUse: It does not take them, or does not start.
    """
    try:
        return make(*args, **options)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in options:
            raise WrongUse(f"{what}: {_one_line(error)}") from error
        raise WrongUse(f"{what}: there is no option {unknown[1]!r}; {_options_of(make, unknown[1])}") from error
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise WrongUse(f"{what}: {_one_line(error)}") from error


def _options_of(make: Callable[..., Any], name: str) -> str:
    """What was probably meant, else what there is, as far as signatures tell."""
    makers = make.__mro__ if isinstance(make, type) else (make,)
    found = {
        parameter.name
        for maker in makers
        if maker is not object
        for parameter in inspect.signature(maker).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    return did_you_mean(name, found) or f"there are {', '.join(sorted(found)) or 'none'}"


def in_checkout() -> bool:
    """Whether the server scripts and the examples can be imported: the current folder is the root of the checkout."""
    return _exists(_SERVER) and _exists(_EXAMPLES)


def server_process() -> Any:
    """The class that starts an environment server.

    Raises:
        WrongUse: The server scripts are not here.
    """
    if not _exists(_SERVER):
        raise WrongUse(
            "--serve needs the server scripts, which are in the checkout only: run this in its root, or start a server "
            "(python server_scripts/start_textarena_server.py there) and give its address with --base-url"
        )
    return importlib.import_module(_SERVER).ServerProcess


def rows_named(dataset: str) -> list[dict[str, Any]]:
    """The rows of the file that ``--dataset`` names.

    Raises:
        WrongUse: There is no such file, or it is none of rows.
    """
    try:
        return read_rows(dataset)
    except OSError as error:
        raise WrongUse(f"--dataset {dataset}: {error.strerror}; paths start from {os.getcwd()}") from error
    except ValueError as error:
        raise WrongUse(f"--dataset {error}") from error


def pairs(option: str, given: Iterable[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; a value is read as JSON where it is JSON, else as text.

    Raises:
        WrongUse: One is no such pair.
    """
    found: dict[str, Any] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise WrongUse(f"{option} {pair}: write it as NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _module(source: str, what: str) -> ModuleType:
    try:
        if source.endswith(".py"):
            return _file_module(Path(source).resolve())
        return importlib.import_module(source)
    except FileNotFoundError as error:
        raise WrongUse(f"{what}: {error.strerror}; paths start from {os.getcwd()}") from error
    except ModuleNotFoundError as error:
        if error.name is not None and (source == error.name or source.startswith(f"{error.name}.")):
            raise WrongUse(
                f"{what}: there is no module {error.name!r} among the installed packages or in "
                f"{os.getcwd()}; a file is named with its ending, as path.py:NAME"
            ) from error
        raise WrongUse(f"{what}: {_one_line(error)}; install what it needs") from error
    except ImportError as error:
        raise WrongUse(f"{what}: {_one_line(error)}") from error
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{at.filename}, line {at.lineno}"
        raise WrongUse(f"{what}: importing it failed at {where}: {_one_line(error)}") from error


@functools.cache
def _file_module(path: Path) -> ModuleType:
    # Under a name of its own: a file called random.py must not become everybody's random.
    name = f"openenv_rollout_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for the modules beside it
    spec.loader.exec_module(module)
    return module


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, (OSError, ValueError, ImportError)) and text else f"{type(error).__name__}: {text}"
