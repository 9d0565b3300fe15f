"""Whether an answer is right, whatever the answer is."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers.maths import MathGrader, _Child, final_answer, math_grader

_ROOT = Path(__file__).parents[2]
_ENDLESS = "\\boxed{9^{9^{9^9}}}"


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    grader = MathGrader(timeout=30)  # nothing here comes near it on a busy machine
    yield grader
    grader.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """The child processes that a test starts."""
    processes: list[subprocess.Popen[str]] = []

    def start(child: _Child) -> None:
        start_child(child)
        processes.append(child.process)

    start_child = _Child.__init__
    monkeypatch.setattr(_Child, "__init__", start)
    return processes


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("72", "\\boxed{72}"),
        ("72", "So she sold 72 clips in all. The answer is 72."),
        ("72", "#### 72"),
        ("She sold 48 and 24, 48+24=72.\n#### 72", "\\boxed{72}"),
        ("$\\frac{1}{2}$", "\\boxed{0.5}"),
        ("\\frac{1}{2}", "it is $\\frac{2}{4}$"),
        ("1/2", "\\boxed{\\frac12}"),
        ("We get \\boxed{\\frac{1}{2}}.", "<answer>1/2</answer>"),
        ("1,234", "\\boxed{1234}"),
        ("x = 5", "\\boxed{5}"),
        ("5", "\\boxed{x = 5}"),
        ("2\\sqrt{3}", "\\boxed{\\sqrt{12}}"),
        ("x^2 + 1", "\\boxed{1 + x^2}"),
        ("\\{1, 2\\}", "\\boxed{\\{2, 1\\}}"),
        ("(1, 2)", "\\boxed{(1, 2)}"),
        ("12%", "\\boxed{0.12}"),
        ("Tuesday", "\\boxed{\\text{Tuesday}}"),
    ],
)
def test_an_answer_is_right_by_what_it_means(grader: MathGrader, solution: str, answer: str) -> None:
    assert grader([answer], [solution]) == [1.0]


@pytest.mark.parametrize(
    "answer",
    [
        "\\boxed{73}",
        "",
        " \n",
        "I do not know.",
        "\\boxed{}",
        "\\boxed{72",
        "\\boxed{72, 73}",
        "<answer></answer>",
        "\x00",
    ],
)
def test_an_answer_is_wrong(grader: MathGrader, answer: str) -> None:
    assert grader([answer], ["72"]) == [0.0]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("\\boxed{5} no, \\boxed{4}", True),
        ("\\boxed{4} no, \\boxed{5}", False),
        ("\\boxed{5} and <answer>4</answer>", True),
        ("<answer>4</answer> or rather \\boxed{5}", False),
        ("<answer>5</answer> wait <answer>4", True),
        ("#### 5\nThat is wrong.\n#### 4", True),
        ("The answer is 5. No, wait, the answer is 4.", True),
        ("<answer>It is \\boxed{4}</answer>", True),
        ("\\boxed{\\boxed{4}}", True),
        ("#### Step 4: the sum\n\\boxed{4}\n", True),
        ("\\boxed{4}\n#### 1. A heading is no answer", True),
    ],
)
def test_the_last_answer_counts(grader: MathGrader, answer: str, right: bool) -> None:
    assert grader([answer], ["4"]) == [float(right)]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("<think>\\boxed{5}</think>\\boxed{4}", True),
        ("<think>\\boxed{4}</think>\\boxed{5}", False),
        ("so \\boxed{5}</think>\\boxed{4}", True),
        ("<think>it must be \\boxed{4}", False),
        ("<think>\\boxed{4}</think>", False),
    ],
)
def test_thinking_is_no_answer(grader: MathGrader, answer: str, right: bool) -> None:
    assert grader([answer], ["4"]) == [float(right)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no answer", None),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed {7}", "7"),
        ("\\boxed{\\{1\\}}", "\\{1\\}"),
        ("}}} \\boxed{7} {{{", "7"),
        ("\\boxed{7} \\boxed{8", "7"),
        ("<answer>7", "7"),
        ("<answer>6<answer>7</answer>", "7"),
        ("#### -$1,234.50 ", "-$1,234.50"),
    ],
)
def test_final_answer(text: str, value: str | None) -> None:
    assert final_answer(text) == value


def test_unbalanced_braces_take_no_time() -> None:
    """Of a hundred thousand boxes that never close, none is looked through to the end."""
    assert final_answer("\\boxed{" * 100_000) is None
    assert final_answer("<answer>" * 100_000) == ""


def test_an_answer_that_cannot_be_computed_is_wrong_and_the_next_one_is_graded(
    caplog: pytest.LogCaptureFixture, started: list[subprocess.Popen[str]]
) -> None:
    """Its process is killed, and it is not tried again."""
    grader = MathGrader(timeout=1)
    assert grader([_ENDLESS, "\\boxed{5}", _ENDLESS, "\\boxed{5}"], ["5"] * 4) == [0.0, 1.0, 0.0, 1.0]
    assert [record.getMessage() for record in caplog.records] == [
        f"an answer counts as wrong, since comparing it took more than 1 s: {_ENDLESS!r}"
    ] * 2
    assert len(started) == 3
    grader.close()


def test_an_answer_without_an_end_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[str]]
) -> None:
    comparing: SimpleQueue[_Child] = SimpleQueue()

    def ask(child: _Child, request: str, timeout: float) -> tuple[str, bool]:
        if "9^" in request:
            comparing.put(child)
        return ask_child(child, request, timeout)

    ask_child = _Child.ask
    monkeypatch.setattr(_Child, "ask", ask)
    grader = MathGrader(timeout=600, max_processes=2)
    with ThreadPoolExecutor(1) as pool:
        endless = pool.submit(grader, [_ENDLESS], ["5"])
        child = comparing.get()
        assert grader(["5"] * 3, ["5"] * 3) == [1.0] * 3
        assert not endless.done()
        child.process.kill()
        comparing.get().process.kill()  # it is replaced once
        assert endless.result() == [0.0]
    grader.close()
    assert len(started) == 3
    assert all(process.returncode is not None for process in started)


@pytest.mark.parametrize("limit", [1, 2])
def test_there_are_as_many_processes_as_are_needed_and_no_more_than_the_limit(
    limit: int, started: list[subprocess.Popen[str]]
) -> None:
    grader = MathGrader(timeout=30, max_processes=limit)
    assert started == []
    assert grader(["5"] * 5, ["5"] * 5) == [1.0] * 5
    assert len(started) == 1
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(grader, [["5"]] * 32, [["5"]] * 32)) == [[1.0]] * 32
    assert len(started) == limit
    grader.close()


def test_a_process_that_is_busy_when_the_grader_is_closed_ends_with_its_answer(
    monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[str]]
) -> None:
    def close_and_ask(child: _Child, request: str, timeout: float) -> tuple[str, bool]:
        grader.close()
        return ask_child(child, request, timeout)

    ask_child = _Child.ask
    monkeypatch.setattr(_Child, "ask", close_and_ask)
    grader = MathGrader(timeout=30)
    assert grader(["5"], ["5"]) == [1.0]
    assert started[0].returncode is not None


def test_many_threads_may_grade(grader: MathGrader) -> None:
    """math-verify alone refuses to run outside the main thread."""
    with ThreadPoolExecutor(8) as pool:
        verdicts = pool.map(lambda number: grader([f"\\boxed{{{number}}}"], [str(number // 2 * 2)]), range(64))
        assert list(verdicts) == [[1.0], [0.0]] * 32


def test_a_process_that_died_is_replaced() -> None:
    grader = MathGrader(timeout=30)
    assert grader(["5"], ["5"]) == [1.0]
    [child] = grader._idle
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.wait()
    assert grader(["5"], ["5"]) == [1.0]
    grader.close()
    grader.close()
    assert grader(["5"], ["5"]) == [1.0]
    grader.close()


def test_an_interrupt_does_not_shift_the_verdicts() -> None:
    """Ctrl-C in a notebook: the reply that was waited for is not taken for the next one."""
    code = """if True:
        import os, signal, threading
        from schedulers.maths import MathGrader

        grader = MathGrader(timeout=30)
        grader(["1"], ["1"])
        requests = grader._idle[0].requests

        def flush_and_interrupt():
            del requests.flush
            requests.flush()
            os.kill(os.getpid(), signal.SIGINT)

        requests.flush = flush_and_interrupt
        try:
            grader(["2"], ["1"])
        except KeyboardInterrupt:
            print(grader(["1", "2"], ["1", "1"]))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[1.0, 0.0]\n", "")


def test_no_process_is_left_behind() -> None:
    """The child ends with its grader, and with the program."""
    grader = MathGrader(timeout=30)
    grader(["5"], ["5"])
    process = grader._idle[0].process
    del grader
    assert process.poll() is not None
    code = "from schedulers.maths import math_grader as g; g()(['5'], ['5']); print(g()._idle[0].process.pid)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=_ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_a_forked_process_has_one_of_its_own() -> None:
    """Two at the same pipes would read each other's verdicts; and the end of the fork does not end the other's."""
    code = """if True:
        import os, sys
        from schedulers.maths import MathGrader

        grader = MathGrader(timeout=30)
        grader(["1"], ["1"])
        child = os.fork()
        wanted = float(child != 0)
        verdicts = grader(["\\\\boxed{%d}" % wanted] * 20, ["1"] * 20)
        if child == 0:
            sys.exit(verdicts != [wanted] * 20)
        failed = os.waitpid(child, 0)[1]
        sys.exit(failed or verdicts != [wanted] * 20 or grader._idle[0].process.poll() is not None)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_waits_for_the_main_thread(grader: MathGrader) -> None:
    results: list[list[float]] = []
    thread = threading.Thread(target=lambda: results.append(grader(["\\boxed{2}"], ["2"])))
    thread.start()
    thread.join()
    assert results == [[1.0]]


_PIECES = [
    "\\boxed{",
    "}",
    "{",
    "$",
    "\\frac",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "####",
    "answer is ",
    "-",
]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(_PIECES) | st.text(max_size=6), max_size=12).map("".join))
def test_no_text_raises(text: str) -> None:
    assert math_grader()([text], ["5"])[0] in {0.0, 1.0}


def test_lone_surrogates_and_nul_do_not_raise(grader: MathGrader) -> None:
    assert grader(["\ud800 \x00 \\boxed{5}"], ["5"]) == [1.0]


@pytest.mark.parametrize("solution", ["", " \n"])
def test_blank_solution_is_refused(grader: MathGrader, solution: str) -> None:
    with pytest.raises(ValueError, match="a solution is blank"):
        grader(["5"], [solution])


def test_as_many_solutions_as_answers(grader: MathGrader) -> None:
    with pytest.raises(ValueError, match="2 answers and 1 solutions"):
        grader(["5", "6"], ["5"])


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_timeout_must_be_above_zero(timeout: float) -> None:
    with pytest.raises(ValueError, match=r"timeout must be (above 0 seconds|a number), not"):
        MathGrader(timeout=timeout)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "openenv-client\[math\]"'):
        MathGrader()


def test_math_verify_that_does_not_start_is_no_wrong_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="math-verify does not start"):
        MathGrader()(["5"], ["5"])
