"""Token in, token out, on real tokenizers: what is recorded is what was sampled, and what a forward pass computes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.spellings import boards, make_policy, make_tokenizer, moves, teach
from benchmarks.token_drift import Recorder
from openenv_client.testing import MockEnvServer
from schedulers import Episode, RequestConfig
from schedulers.engines.transformers import TransformersEngine
from schedulers.tokens import ChatPrompts
from tests.examples.sudoku.games import seeded
from tests.schedulers.exactness import (
    Scheduler,
    assert_recorded_as_sampled,
    assert_respelled,
    furthest_from_forward,
    furthest_of_segment,
    make_talker,
    play,
    rows,
)

POLICY = Path(__file__).parents[2] / "examples" / "sudoku" / "policy"
GAMES = 200
CLOSE = 1e-4


@dataclass(frozen=True)
class Policy:
    model: Any
    tokenizer: Any

    @property
    def engine(self) -> Recorder:
        return Recorder(TransformersEngine(self.model, self.tokenizer))


@pytest.fixture(scope="module")
def server() -> Iterator[MockEnvServer]:
    with MockEnvServer(seeded(3), capacity=GAMES) as server:
        yield server


@pytest.fixture(scope="module")
def embedded() -> Policy:
    """Its tokenizer knows the words of the game; a move is three tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(POLICY)
    return Policy(model.eval(), transformers.AutoTokenizer.from_pretrained(POLICY))


def chatter(rng: random.Random, count: int) -> list[str]:
    """Moves, half of them after a thought, half of them before a line end."""
    pairs = zip(moves(rng, count), moves(rng, count), strict=True)
    return [rng.choice(["", f"<think>{other}</think>"]) + move + rng.choice(["", "\n"]) for move, other in pairs]


@pytest.fixture(scope="module")
def bpe() -> Policy:
    """A tokenizer that was trained here, with ``[5 3 7]`` as one token, and a model that spells moves in many ways."""
    return Policy(*make_policy())


@pytest.fixture(scope="module")
def talker() -> Policy:
    """The same, with thoughts and line ends around its moves. Its chat template is for each test to set."""
    rng = random.Random(0)
    answers, prompts = chatter(rng, 2000), boards(rng, 8)
    tokenizer = make_tokenizer(answers + prompts)
    return Policy(teach(tokenizer, prompts, answers, steps=200), tokenizer)


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path) -> Policy:
    """SmolLM2's tokenizer, and a small model that spells words in many ways."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    return Policy(make_talker(tokenizer), tokenizer)


@pytest.fixture(
    params=["embedded", "bpe", pytest.param("smollm2_tokenizer", marks=pytest.mark.smollm2)],
)
def policy(request: pytest.FixtureRequest) -> Policy:
    made: Policy = request.getfixturevalue(request.param)
    return made


async def test_200_games_equal_a_forward_pass_over_each_trajectory(policy: Policy, server: MockEnvServer) -> None:
    """T01, T03, T04, T07, T08: ids and mask exactly, log-probabilities to 1e-4, at their places."""
    engine = policy.engine
    outputs = await play(engine, server.base_url, GAMES, RequestConfig(max_tokens=24, seed=1))
    assert [output.error for output in outputs] == [None] * GAMES
    for output in outputs:
        assert_recorded_as_sampled(output, engine.turns[output.uuid])
    assert max(furthest_from_forward(policy.model, output) for output in outputs) < CLOSE
    assert max(len(turns) for turns in engine.turns.values()) > 1
    assert_respelled(policy.tokenizer, engine.turns.values())


async def test_greedy_ids_are_the_likeliest_of_a_forward_pass(policy: Policy, server: MockEnvServer) -> None:
    outputs = await play(policy.engine, server.base_url, 24, RequestConfig(max_tokens=16, temperature=0))
    for output in outputs:
        prompt, ids = output.prompt_token_ids or [], output.completion_token_ids or []
        places = torch.tensor([len(prompt) + i for i, mask in enumerate(output.completion_mask or []) if mask])
        whole = torch.tensor([prompt + ids])
        with torch.no_grad():
            likeliest = policy.model(whole, logits_to_keep=places - 1).logits[0].argmax(-1)
        assert torch.equal(likeliest, whole[0, places])


@pytest.mark.smollm2
@pytest.mark.timeout(900)  # 135 million parameters: a minute on two idle cores, several on busy ones
async def test_games_of_a_real_language_model_equal_a_forward_pass(smollm2: Path, server: MockEnvServer) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    policy = Policy(model, transformers.AutoTokenizer.from_pretrained(smollm2))
    engine = policy.engine
    outputs = await play(engine, server.base_url, 2, RequestConfig(max_tokens=24, seed=1, stop=("]",)))
    for output in outputs:
        assert_recorded_as_sampled(output, engine.turns[output.uuid])
    assert max(furthest_from_forward(model, output) for output in outputs) < CLOSE


def test_the_bpe_tokenizer_has_moves_as_single_tokens(bpe: Policy) -> None:
    assert bpe.tokenizer.convert_ids_to_tokens(bpe.tokenizer.encode("[5 3 7]")) == ["[5 3 7]"]


# Templates that rewrite history

_TURN = "{% for message in messages %}<{{ message['role'] }}>"
_END = "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = _TURN + "{{ message['content'] }}" + _END
THINKING_REMOVED = (
    _TURN + "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}" + _END
)
NEWLINE_ADDED = _TURN + "{{ message['content'] }}{{ '\\n' }}" + _END
TRIMMED = _TURN + "{{ message['content'] | trim }}" + _END
COUNTED = "{{ messages | length }}" + PLAIN


async def games_with(template: str, policy: Policy, server: MockEnvServer) -> list[Episode]:
    """Trajectories of at least two turns, each compared with what passed by the engine."""
    tokenizer = policy.tokenizer
    tokenizer.chat_template = template
    engine = policy.engine
    async with Scheduler(engine) as scheduler:
        config = RequestConfig(max_tokens=32, seed=2)
        outputs = await scheduler.async_infer(rows(server.base_url, 40), config, use_tqdm=False)
        for output in outputs:
            episode = scheduler.ended[output.uuid]
            passed = [(list(turn.prompt_ids or ()), list(turn.token_ids or ())) for turn in episode.turns]
            assert passed == engine.turns[output.uuid]
            assert output.rollout_infos["segments"] == len(episode.segments)
            last = len(episode.segments[-1])
            assert_segment(output.prompt_token_ids, output.completion_token_ids, passed[-last:])
    return [episode for episode in scheduler.ended.values() if len(episode.turns) > 1]


def assert_segment(prompt: list[int] | None, completion: list[int] | None, turns: Sequence[Any]) -> None:
    """What a trainer gets is the last segment, from its own first prompt on."""
    assert prompt == turns[0][0]
    assert completion is not None
    assert turns[0][0] + completion == turns[-1][0] + turns[-1][1]


def shown(policy: Policy, episode: Episode, turn: int) -> str:
    """What the template shows of the conversation before a turn."""
    messages = episode.request.messages
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return str(
        policy.tokenizer.apply_chat_template(messages[: answers[turn]], tokenize=False, add_generation_prompt=True)
    )


def breaks(episode: Episode) -> list[bool]:
    """Of each turn but the first, whether a segment begins with it."""
    starts = [turn is segment[0] for segment in episode.segments for turn in segment]
    return starts[1:]


async def test_thinking_that_is_removed_splits_where_there_was_thinking(talker: Policy, server: MockEnvServer) -> None:
    """T09: a turn begins a segment exactly when the answer before it had a thought, which is no longer shown."""
    episodes = await games_with(THINKING_REMOVED, talker, server)
    found: set[bool] = set()
    for episode in episodes:
        thought = ["</think>" in turn.text for turn in episode.turns[:-1]]
        assert breaks(episode) == thought
        found |= set(thought)
        for number, turn in enumerate(episode.turns):
            assert talker.tokenizer.decode(turn.prompt_ids) == shown(talker, episode, number)
        assert max(furthest_of_segment(talker.model, segment) for segment in episode.segments) < CLOSE
    assert found == {True, False}


@pytest.mark.parametrize("template", [NEWLINE_ADDED, COUNTED], ids=["newline added", "beginning rewritten"])
async def test_a_template_that_rewrites_every_answer_splits_at_every_turn(
    talker: Policy, server: MockEnvServer, template: str
) -> None:
    """T09: each segment is a turn, sampled from what the template shows, tokenised as a conversation that begins."""
    for episode in await games_with(template, talker, server):
        assert all(breaks(episode))
        messages = episode.request.messages
        for number, turn in enumerate(episode.turns):
            prompt = list(turn.prompt_ids or ())
            assert talker.tokenizer.decode(prompt) == shown(talker, episode, number)
            before = [index for index, message in enumerate(messages) if message["role"] == "assistant"][number]
            assert prompt == ChatPrompts(talker.tokenizer).first(messages[:before])
        assert max(furthest_of_segment(talker.model, segment) for segment in episode.segments) < CLOSE


@pytest.mark.parametrize("template", [PLAIN, TRIMMED], ids=["plain", "trimmed"])
async def test_a_template_that_keeps_answers_splits_nowhere(
    talker: Policy, server: MockEnvServer, template: str
) -> None:
    """Also one that trims: the model goes on reading the blanks that it sampled around an answer."""
    trimmed = False
    for episode in await games_with(template, talker, server):
        assert not any(breaks(episode))
        for number, turn in enumerate(episode.turns):
            read, rendered = talker.tokenizer.decode(turn.prompt_ids), shown(talker, episode, number)
            trimmed |= read != rendered
            if template == TRIMMED:
                read, rendered = "".join(read.split()), "".join(rendered.split())
            assert read == rendered
        assert furthest_of_segment(talker.model, episode.turns) < CLOSE
    assert trimmed == (template == TRIMMED)
