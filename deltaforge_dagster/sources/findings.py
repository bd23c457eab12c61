"""Findings: what an inspection of a source or sink found, one line each.

A finding has the statement that fixes it. `deltaforge check` shows all of them; the Dagster check
`preflight` shows those of the source after each run. A finding is an `error` if changes cannot be
captured or delivered, or are about to be lost; a `warning` if somebody should act soon; a `note` if
everything works, but perhaps not as expected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from deltaforge_dagster.errors import Commands, DeltaforgeError, and_run, commands_of

Level = Literal["ok", "note", "warning", "error"]

RISK = 0.8
"""At this used share of the log's retention, changes are about to be lost."""

CAUTION = 0.5
"""At this used share of the log's retention, somebody should act soon."""

_NAMED = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of inspecting one point.

    Attributes:
        subject: What it is about: `connection`, `grants`, `binlog_format`, `slot` ...
        level: How serious it is; see the module.
        text: What was found. It may contain names, but no secret and no value of a row.
        remedy: A statement for the server or a command that fixes it, or several in order; None if
            there is nothing to fix.
    """

    subject: str
    level: Level
    text: str
    remedy: str | Sequence[str] | None = None

    @property
    def commands(self) -> Commands:
        """The remedy's statements or commands."""
        return commands_of(self.remedy)

    @property
    def bad(self) -> bool:
        """Whether it is an error or a warning."""
        return self.level in ("error", "warning")

    @property
    def line(self) -> str:
        """The finding in one line: subject, text and remedy."""
        return f"{self.subject}: {and_run(self.text, self.remedy)}"


def one_line(text: str) -> str:
    """Return the first non-blank line of a server's message, cut to 300 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason given"


@contextmanager
def finding_errors(subject: str, findings: list[Finding]) -> Iterator[None]:
    """Catch a `DeltaforgeError` raised in the block and append it to `findings` as a finding."""
    try:
        yield
    except DeltaforgeError as error:
        findings.append(Finding(subject, "error", error.text, error.remedy or None))


def retention_level(used: float) -> Level:
    """Return the level of a finding about a used share of the log's retention."""
    return "error" if used >= RISK else "warning" if used >= CAUTION else "ok"


def share_of_retention(text: str, used: float, remedy: str | Sequence[str]) -> Finding:
    """Return a finding about something planned that would use this share of the log's retention.

    It is a forecast, so the finding is a warning at most.
    """
    if used >= RISK:
        return Finding("retention", "warning", f"HIGH RETENTION RISK: {text} ({used:.0%})", remedy)
    if used >= CAUTION:
        return Finding("retention", "warning", f"{text} ({used:.0%})", remedy)
    return Finding("retention", "ok", text)


def listed(names: Sequence[str]) -> str:
    """Join names with commas: the first ten, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def absent_tables(names: Sequence[str]) -> Finding:
    """Return the finding for tables that `source.config.tables` names and that do not exist."""
    return Finding(
        "tables",
        "error",
        f"not captured, because no such table is there: {listed(names)}; "
        "if it has another name or schema now, "
        "write that to source.config.tables, else take it out there",
    )
