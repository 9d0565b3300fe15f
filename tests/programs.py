"""Programs that run beside a test, for what only the end of a process shows."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["Program", "program"]

ROOT = Path(__file__).parents[1]


class Program:
    """A running Python program.

    Args:
        process: The process.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def read(self) -> str:
        """The next line that it prints."""
        return _pipe(self.process.stdout).readline().rstrip("\n")

    def write(self, line: str = "") -> None:
        """Give it a line to read."""
        stdin = _pipe(self.process.stdin)
        stdin.write(line + "\n")
        stdin.flush()

    def end(self) -> tuple[int, str]:
        """Wait for its end: the exit code and what it wrote to stderr."""
        _, stderr = self.process.communicate()
        return self.process.returncode, stderr


@contextlib.contextmanager
def program(script: str, *options: str) -> Iterator[Program]:
    """Run a script, with options of the interpreter; it is killed when the block ends."""
    pipe = subprocess.PIPE
    command = [sys.executable, *options, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield Program(process)
        finally:
            process.kill()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
