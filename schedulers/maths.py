"""MathGrader: says whether an answer is mathematically the solution, in a process that can be given up on.

math-verify compares with sympy, and sympy does not come back from an answer like ``9^{9^{9^9}}``. Its own time limits
are signals, which work in a main thread only, and not within one long multiplication. So it runs in a child process,
which is killed when an answer takes too long.
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

from schedulers.textarena import visible_text

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

    Any thread may call it; calls wait for each other. The child process starts with the first call, takes about a
    second for that, and ends with the grader. A forked process gets one of its own.

    Args:
        timeout: The most seconds for one answer; one that takes longer is wrong.

    Raises:
        ImportError: math-verify is not installed.
        ValueError: ``timeout`` is not above 0.
    """

    def __init__(self, *, timeout: float = 5.0) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, not {timeout}")
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError('grading mathematics needs math-verify: pip install "openenv-client[math]"')
        self.timeout = timeout
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._finalizer: weakref.finalize[..., MathGrader] | None = None

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
        """End the child process; the next call starts another."""
        self._begin_anew_after_fork()
        with self._lock:
            self._stop()

    def _is_right(self, answer: str, solution: str) -> bool:
        if not solution.strip():
            raise ValueError(f"a solution is blank ({solution!r}), so no answer could be right")
        value = final_answer(solution)
        marked = value is not None or not _LATEX.search(solution)
        request = json.dumps([_boxed(value or solution) if marked else solution, _as_math(answer)]) + "\n"
        self._begin_anew_after_fork()
        with self._lock:
            try:
                for _ in range(2):  # a process that was killed from outside, or died, is replaced once
                    line, late = self._ask(request)
                    if line:
                        return line == "1\n"
                    if late:
                        break
            except BaseException:  # Ctrl-C: the reply is still to come and must not become that to the next request
                self._stop()
                raise
        why = f"took more than {self.timeout:g} s" if late else "ended the grader's process twice"
        logger.warning("an answer counts as wrong, since comparing it %s: %.200r", why, answer)
        return False

    def _ask(self, request: str) -> tuple[str, bool]:
        """The child's reply, empty when it ended instead, and whether it was killed for taking too long."""
        process = self._process or self._start()
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        assert process.stdin is not None  # noqa: S101 - they are pipes, which mypy cannot know
        assert process.stdout is not None  # noqa: S101
        timer = threading.Timer(self.timeout, kill)
        timer.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if late.is_set() or not line:
            self._stop()
        return line, late.is_set()

    def _start(self) -> subprocess.Popen[str]:
        # Not multiprocessing: its children import the caller's main module again, which must then guard against that.
        process = subprocess.Popen(
            [sys.executable, "-c", "from schedulers.maths import _serve; _serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        if process.stdout is None or process.stdout.readline() != "ready\n":
            self._stop()
            raise RuntimeError('math-verify does not start; python -c "import math_verify" says why')
        return process

    def _begin_anew_after_fork(self) -> None:
        if os.getpid() == self._pid:
            return
        # Two processes on the same pipes would read each other's replies, and the lock may be held for ever.
        if self._finalizer is not None:
            self._finalizer.detach()
            _of_parents.append(self._process)
        self._pid, self._lock, self._process, self._finalizer = os.getpid(), threading.Lock(), None, None

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = None


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


def _end(process: subprocess.Popen[str]) -> None:
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
