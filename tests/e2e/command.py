"""A `deltaforge` command in a process of its own that need not import everything first.

It is forked from the server process of `tests/kills/child.py`, so that a command starts in a moment and not after
five seconds of processor time. It has its own environment, working directory and output, and ends with its exit code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from deltaforge_dagster.cli.main import app
from tests.kills.child import CONTEXT


@dataclass(frozen=True)
class Command:
    """A command that was started; standard output and standard error are in one file."""

    process: ForkServerProcess
    log: Path

    @classmethod
    def start(
        cls, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path
    ) -> Command:
        """Start `deltaforge` with arguments in a folder, with no other variables than these."""
        log.touch()
        process = CONTEXT.Process(
            target=_execute, args=(list(arguments), dict(environment), folder, log)
        )
        process.start()
        return cls(process, log)

    def wait(self, seconds: float = 300) -> int:
        """Wait for its end; return its exit code."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"not in {seconds:.0f} s: {self.output}"
        return self.process.exitcode

    @property
    def output(self) -> str:
        """What it has printed."""
        return self.log.read_text()

    @property
    def last_line(self) -> str:
        """The last line that it has printed."""
        return self.output.strip().splitlines()[-1]

    def kill(self) -> None:
        """End it, if it has not ended."""
        self.process.kill()
        self.process.join()


def _execute(arguments: list[str], environment: dict[str, str], folder: Path, log: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    app(arguments, prog_name="deltaforge")
