"""What was found in many scenarios: each kind of difference once, with the smallest sequence that shows it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.oracle.compare import Difference
from tests.oracle.scenario import Scenario
from tests.oracle.shrink import smaller, together
from tests.oracle.trial import Trial

_TEXTS = {"stopped", "held", "failing", "unreadable"}
"""Differences that say why in a text."""


_DEFINITIONS = {
    "swap": "rename", "renamed-from": "rename", "renamed-to": "rename", "drop": "drop", "add-default": "default",
    "quotes": "default", "executed": "add", "escapes": "add", "add": "add", "type": "type",
}  # fmt: skip
"""What is done to columns, the most probable cause of a difference first."""


@dataclass(slots=True)
class Finding:
    """A kind of difference.

    Attributes:
        signature: What tells it from others.
        difference: The first one.
        scenario: What it was found in.
        seconds: After how many seconds.
        scenarios: In which scenario.
        readers: Everybody who has seen it.
        smallest: What still shows it.
    """

    signature: str
    difference: Difference
    scenario: Scenario
    seconds: float
    scenarios: int
    readers: dict[str, int] = field(default_factory=dict)
    smallest: Scenario | None = None

    def text(self) -> str:
        """Return it for people."""
        difference = self.difference
        column = f" of column {difference.column} ({difference.kind})" if difference.column else ""
        table = "" if difference.table is None else f", table t{difference.table}"
        found = (
            f"found after {self.seconds:.0f} s in scenario {self.scenarios} ({self.scenario.source}:{self.scenario.seed}, "
            f"{self.scenario.version}{table}); {difference.reader}: {difference.what}{column}: "
            f"{difference.says[:600]}"
        )
        lines = [f"## {self.signature}", found]
        if self.smallest is not None:
            lines.append(f"```sql\n{self.smallest.script()}\n```")
            seen = ", ".join(f"{reader} ({count})" for reader, count in self.readers.items())
            lines.append(f"seen by {seen}")
        return "\n\n".join(lines) + "\n\n"


def signature(scenario: Scenario, difference: Difference) -> str:
    """Return what two differences have in common that probably have one cause."""
    parts = [scenario.source, difference.what]
    if difference.what in _TEXTS:
        parts.append(
            re.sub(r"\d+|'[^']*'|\"[^\"]*\"|`[^`]*`|\bdf_\w+|\b[tcn]\d+\b", "_", difference.says)[
                :120
            ]
        )
    else:
        sink = difference.reader.split(" by ")[0].rpartition("-")[2]
        parts.append("table" if sink in {"current", "pending", "history"} else sink)
    if difference.column and difference.table is not None:
        history = scenario.column_history(difference.table, difference.column)
        causes = [cause for what, cause in _DEFINITIONS.items() if what in history]
        parts.append(causes[0] if causes else difference.kind)
    return " | ".join(parts)


class Findings:
    """Everything that was found so far.

    Args:
        attempt: Tries a scenario.
        report: Gets each new finding, and each again when it is as small as it gets.
    """

    def __init__(
        self, attempt: Callable[[Scenario], Trial], report: Callable[[Finding], None]
    ) -> None:
        self.found: dict[str, Finding] = {}
        self.scenarios = 0
        self._attempt = attempt
        self._report = report
        self._began = time.monotonic()

    def try_out(self, scenario: Scenario) -> Trial:
        """Try a scenario, and remember what it shows."""
        self.scenarios += 1
        trial = self._attempt(scenario)
        seconds = time.monotonic() - self._began
        for difference in trial.differences:
            name = signature(scenario, difference)
            if name not in self.found:
                self.found[name] = Finding(name, difference, scenario, seconds, self.scenarios)
                self._report(self.found[name])
            readers = self.found[name].readers
            readers[difference.reader] = readers.get(difference.reader, 0) + 1
        return trial

    def shrink(self, until: float) -> None:
        """Make everything that was found smaller, with an equal part of the time for each."""
        waiting = [one for one in self.found.values() if one.smallest is None]
        while waiting:
            finding = waiting.pop(0)
            now = time.monotonic()
            self._shrink(finding, now + max(0.0, until - now) / (len(waiting) + 1))
            self._report(finding)

    def _shrink(self, finding: Finding, until: float) -> None:
        """Find the smallest scenario with a difference of the same kind, if possible in a sink that is quick."""
        difference = finding.difference
        wanted = (difference.what, difference.kind, _cause(difference))

        def failing(candidates: Sequence[Scenario]) -> list[bool]:
            if difference.table is None:
                shown = [self._attempt(one).differences for one in candidates]
                return [any(_kind(one) == wanted for one in each) for each in shown]
            differences = self._attempt(together(candidates)).differences
            failed = {one.table for one in differences if _kind(one) == wanted}
            return [number in failed for number in range(len(candidates))]

        finding.smallest = finding.scenario
        for alone in _alone(finding.scenario, difference):
            if time.monotonic() < until and failing([alone]) == [True]:
                finding.smallest = smaller(alone, failing, until)
                return


def _alone(scenario: Scenario, difference: Difference) -> list[Scenario]:
    """Return scenarios of one table that probably show a difference, the quickest first."""
    sink = difference.reader.split(" by ")[0]
    sinks = [sink] if sink in scenario.sinks else list(scenario.sinks[:1])
    if sink.startswith(("delta", "iceberg")):
        sinks.insert(0, "postgres-" + sink.rpartition("-")[2].replace("pending", "current"))
    tables = scenario.tables if difference.table is None else [difference.table]
    return [scenario.only(table, one) for one in sinks for table in tables]


def _kind(difference: Difference) -> tuple[str, str, str]:
    return difference.what, difference.kind, _cause(difference)


def _cause(difference: Difference) -> str:
    """Return the constant part of what an error says."""
    if difference.what not in _TEXTS:
        return ""
    return re.sub(r"\d+|'[^']*'|\"[^\"]*\"|`[^`]*`|\bdf_\w+", "_", difference.says)[:60]
