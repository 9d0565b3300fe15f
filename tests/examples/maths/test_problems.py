"""Problems and their answers."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from examples.maths.problems import random_problem, solve


@pytest.mark.parametrize(
    ("question", "value"),
    [
        ("Solve for x: 3x + 5 = 20", Fraction(5)),
        ("Solve for x: 3x - 5 = -20", Fraction(-5)),
        ("What is 15% of 80?", Fraction(12)),
        ("What is 1/2 - 3/4?", Fraction(-1, 4)),
        ("What is 50 - 3 * 10?", Fraction(20)),
        ("What is 2 + 3 * 4?", Fraction(14)),
    ],
)
def test_solve(question: str, value: Fraction) -> None:
    assert solve(question) == value


def test_question_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot solve 'Why"):
        solve("Why?")


def test_the_same_seed_gives_the_same_problem_and_others_give_others() -> None:
    problems = [random_problem(random.Random(seed)) for seed in range(200)]
    assert problems == [random_problem(random.Random(seed)) for seed in range(200)]
    assert len(set(problems)) > 190
    assert {problem.question.split()[0] for problem in problems} == {"What", "Solve"}


def test_fractions_are_written_as_latex() -> None:
    answers = {random_problem(random.Random(seed)).answer for seed in range(200)}
    assert any(answer.startswith("-\\frac{") for answer in answers)
    assert any(answer.startswith("\\frac{") for answer in answers)
    assert any(answer.lstrip("-").isdigit() for answer in answers)
