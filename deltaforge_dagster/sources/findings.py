"""What a look at a source or sink found: one line per point, and the statement that fixes it.

`deltaforge check` shows them before the first run, the check `preflight` those of the source after
each. A finding is an error when changes cannot be captured or delivered, or are about to be lost; a
warning when somebody should look soon; a note when it works, but not as everybody expects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from deltaforge_dagster.errors import DeltaforgeError

Level = Literal["ok", "note", "warning", "error"]

RISK = 0.8
"""Share of the log's retention that is used up, from which changes are about to be lost."""

CAUTION = 0.5
"""The share from which somebody should look."""

_NAMED = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """One point that was looked at.

    Attributes:
        subject: What it is about: `connection`, `grants`, `binlog_format`, `slot` ...
        level: Whether it is as needed.
        text: What was found; names, no secret and no value of a row.
        remedy: Statements for the server, or a command, that fix it.
    """

    subject: str
    level: Level
    text: str
    remedy: str | None = None

    @property
    def bad(self) -> bool:
        """Whether it is an error or a warning."""
        return self.level in ("error", "warning")

    @property
    def line(self) -> str:
        """Everything in one line: what it is about, what was found, what changes it."""
        return f"{self.subject}: {and_run(self.text, self.remedy)}"


def one_line(text: str) -> str:
    """Return the first line of a server's message that says something, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason given"


def and_run(text: str, command: str | None) -> str:
    """Return a sentence with the command or statement that changes what it says, if there is one."""
    return text if command is None else f"{text}; run: {command}"


@contextmanager
def finding_errors(subject: str, found: list[Finding]) -> Iterator[None]:
    """Turn an error of ours in the block into a finding; its message names the remedy."""
    try:
        yield
    except DeltaforgeError as error:
        found.append(Finding(subject, "error", str(error)))


def retention_level(used: float) -> Level:
    """Return how bad it is that this share of the retention is used up."""
    return "error" if used >= RISK else "warning" if used >= CAUTION else "ok"


def share_of_retention(text: str, used: float, remedy: str) -> Finding:
    """Return what it means that something still to come takes this share of the log's retention.

    It need not come so: a warning, at most.
    """
    if used >= RISK:
        return Finding("retention", "warning", f"HIGH RETENTION RISK: {text} ({used:.0%})", remedy)
    if used >= CAUTION:
        return Finding("retention", "warning", f"{text} ({used:.0%})", remedy)
    return Finding("retention", "ok", text)


def listed(names: Sequence[str]) -> str:
    """Return names with commas; of very many, the first and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def each(statements: Sequence[str]) -> str:
    """Return statements to run one after the other; of very many, the first and how many more."""
    more = len(statements) - _NAMED
    return "; ".join(statements[:_NAMED]) + (f"; and {more} more like these" if more > 0 else "")
