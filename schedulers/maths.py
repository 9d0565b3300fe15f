"""MathGrader: says whether an answer is mathematically the solution, in processes that can be given up on.

math-verify compares with sympy, and sympy does not come back from an answer like ``9^{9^{9^9}}``. Its own time limits
are signals, which work in a main thread only, and not within one long multiplication. So it runs in child processes,
one of which is killed when an answer takes too long.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

from schedulers.checks import check_seconds, check_whole
from schedulers.thinking import visible_text

__all__ = ["AccuracyFunction", "MathGrader", "final_answer", "math_grader"]

logger = logging.getLogger(__name__)

AccuracyFunction: TypeAlias = Callable[[list[str], list[str]], Sequence[float]]
"""Answers and their solutions to accuracies, 1.0 for right; called in a thread, so it must not rely on signals."""

_BRACES = re.compile(r"(?P<box>\\boxed\s*\{)|(?P<open>\{)|(?P<close>\})|\\.", re.DOTALL)
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)(?:</answer>|\Z)", re.DOTALL)
_HASHED = re.compile(r"####[ \t]*([-+]?\$?\d[\d,]*(?:[./]\d+)?%?)[ \t]*$", re.MULTILINE)  # as GSM8K ends; no heading
_LATEX = re.compile(r"\$|\\\(|\\\[")

_of_parents: list[object] = []  # processes started before a fork; kept, since to collect them would be to touch them


class MathGrader:
    r"""Compares answers with solutions by what they mean: ``\frac{1}{2}`` is ``0.5``.

    Of an answer its last ``\boxed{…}``, ``<answer>…</answer>`` or ``#### number`` outside of thinking counts, whichever
    comes last; an answer with none of them is searched for what it says the answer is. A solution is the bare value or
    a text that marks it in the same way.

    Any thread may call it. Answers are compared in child processes, each of which takes about a second to start: the
    first call starts one, and another is started when an answer comes while all are busy. They end with the grader. A
    forked process gets some of its own.

    Args:
        timeout: The most seconds for one answer; one that takes longer is wrong.
        max_processes: The most child processes at a time; when all are busy, answers wait. By default two more than
            there are CPUs, 8 at most, so that answers without an end do not hold up the others.

    Raises:
        ImportError: math-verify is not installed.
        ValueError: ``timeout`` is not above 0, or ``max_processes`` below 1.
    """

    _idle: list[_Child]

    def __init__(self, *, timeout: float = 5.0, max_processes: int | None = None) -> None:
        check_seconds("timeout", timeout)
        check_whole("max_processes", max_processes, least=1, none="as many as suit this machine")
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError('grading mathematics needs math-verify: pip install "openenv-client[math]"')
        self.timeout = timeout
        self.max_processes = min(8, (os.cpu_count() or 1) + 2) if max_processes is None else max_processes
        self._begin()

    def __call__(self, completions: Sequence[str], solutions: Sequence[str]) -> list[float]:
        """Grade answers.

        Args:
            completions: What the model said. Nothing in it raises.
            solutions: The right values, one for each.

        Returns:
            1.0 for each that is right, else 0.0.

        Raises:
            ValueError: A solution is blank, or there are not as many as answers.
            RuntimeError: math-verify is installed but does not start.
        """
        if len(completions) != len(solutions):
            raise ValueError(f"there are {len(completions)} answers and {len(solutions)} solutions")
        return [float(self._is_right(answer, value)) for answer, value in zip(completions, solutions, strict=True)]

    def close(self) -> None:
        """End the child processes; one that is busy ends with its answer. The next call starts others."""
        self._begin_anew_after_fork()
        idle = self._idle
        self._idle = []
        with contextlib.suppress(IndexError):  # it is empty; a call in another thread may have taken the last one
            while True:
                idle.pop().end()

    def _is_right(self, answer: str, solution: str) -> bool:
        if not solution.strip():
            raise ValueError(f"a solution is blank ({solution!r}), so no answer could be right")
        value = final_answer(solution)
        marked = value is not None or not _LATEX.search(solution)
        request = json.dumps([_boxed(value or solution) if marked else solution, _as_math(answer)]) + "\n"
        self._begin_anew_after_fork()
        with self._places:
            line, late = self._ask(request)
            if not line and not late:  # the process was killed from outside, or died; it is replaced once
                line, late = self._ask(request, anew=True)
        if line:
            return line == "1\n"
        why = f"took more than {self.timeout:g} s" if late else "ended the grader's process twice"
        logger.warning("an answer counts as wrong, since comparing it %s: %.200r", why, answer)
        return False

    def _ask(self, request: str, *, anew: bool = False) -> tuple[str, bool]:
        """What a child says: one that is free, else a new one."""
        idle = self._idle  # close puts another in its place; what comes back into this one then ends with it
        try:
            child = _Child() if anew else idle.pop()
        except IndexError:
            child = _Child()
        line, late = child.ask(request, self.timeout)
        if child.end.alive:
            idle.append(child)
        return line, late

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._places = threading.Semaphore(self.max_processes)
        self._idle = []

    def _begin_anew_after_fork(self) -> None:
        # Two processes on the same pipes would read each other's replies, and all places may be taken for ever.
        if os.getpid() != self._pid:
            self._begin()


class _Child:
    """A process that compares. It ends with this object, and as soon as it is late or asking it was interrupted."""

    def __init__(self) -> None:
        # Not multiprocessing: its children import the caller's main module again, which must then guard against that.
        process = subprocess.Popen(
            [sys.executable, "-c", "from schedulers.maths import _serve; _serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.process = process
        self.end = weakref.finalize(self, _end, process, os.getpid())
        assert process.stdin is not None  # noqa: S101 - they are pipes, which mypy cannot know
        assert process.stdout is not None  # noqa: S101
        self.requests, self.replies = process.stdin, process.stdout
        line = ""
        try:
            line = self.replies.readline()
        finally:
            if line != "ready\n":
                self.end()
        if line != "ready\n":
            raise RuntimeError('math-verify does not start; python -c "import math_verify" says why')

    def ask(self, request: str, timeout: float) -> tuple[str, bool]:
        """The reply, empty when the process ended instead, and whether it was killed for taking too long."""
        late, process = threading.Event(), self.process

        def kill() -> None:  # without self, which the timer's thread would hold
            late.set()
            process.kill()

        line = ""
        timer = threading.Timer(timeout, kill)
        timer.start()
        try:
            with contextlib.suppress(OSError):  # it has ended
                self.requests.write(request)
                self.requests.flush()
                line = self.replies.readline()
        finally:
            timer.cancel()
            if late.is_set() or not line:  # also after Ctrl-C: the reply must not become that to the next request
                self.end()
        return line, late.is_set()


@functools.cache
def math_grader() -> MathGrader:
    """The grader that everything in this process shares unless it is given another.

    Raises:
        ImportError: math-verify is not installed.
    """
    return MathGrader()


def final_answer(text: str) -> str | None:
    r"""What stands in the last ``\boxed{…}``, ``<answer>…</answer>`` or ``#### number``, or None without any of them.

    An answer tag may lack its end, which engines cut off as a stop text; a box may not.
    """
    found = [(match.start(), match[1]) for pattern in (_TAGGED, _HASHED) for match in pattern.finditer(text)]
    return max(found + _boxes(text), default=(0, None))[1]


def _boxes(text: str) -> list[tuple[int, str]]:
    """Where each box begins and what it holds, found in one pass whatever the braces do."""
    boxes: list[tuple[int, str]] = []
    open_braces: list[re.Match[str]] = []
    for brace in _BRACES.finditer(text):
        if brace["box"] or brace["open"]:
            open_braces.append(brace)
        elif brace["close"] and open_braces:
            start = open_braces.pop()
            if start["box"]:
                boxes.append((start.start(), text[start.end() : brace.start()]))
    return boxes


def _as_math(answer: str) -> str:
    shown = visible_text(answer)
    value = final_answer(shown)
    return shown if value is None else _boxed(value)


def _boxed(value: str) -> str:
    return f"\\boxed{{{value.strip()}}}"


def _end(process: subprocess.Popen[str], pid: int) -> None:
    if os.getpid() != pid:  # a fork, of whose parent it is
        _of_parents.append(process)
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was written last never arrived
                pipe.close()


def _serve() -> None:
    """The child process: a line for each pair of texts, 1 where they are equal."""
    import math_verify

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, which then ends this process
    logging.disable()
    replies, sys.stdout = sys.stdout, sys.stderr  # parsers print now and then
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        solution, answer = (math_verify.parse(text, parsing_timeout=None) for text in json.loads(line))
        right = math_verify.verify(solution, answer, timeout_seconds=None)
        print(int(right), file=replies, flush=True)
