"""How long the tests took: the ten slowest modules, at the end of every run. Reported, never failed."""

from __future__ import annotations

import time
from collections import Counter

import pytest

SHOWN = 10


class ModuleTimes:
    """Adds up what the tests of each module took, with their fixtures.

    With several processes this lives in the one that distributes the tests; the sum is then longer than the run.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test's setup, call or teardown to its module."""
        module = report.nodeid.partition("::")[0]
        self._seconds[module] += report.duration  # type: ignore[assignment]  # a Counter of floats
        self._tests[module] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the slowest modules, and all of them together."""
        if len(self._seconds) < 2:
            return
        terminalreporter.section("slowest modules")
        for module, seconds in self._seconds.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:7.1f} s {self._tests[module]:5} tests  {module}")
        terminalreporter.write_line(
            f"{self._seconds.total():7.1f} s {self._tests.total():5} tests  "
            f"in {len(self._seconds)} modules, {time.monotonic() - self._began:.0f} s by the clock"
        )


def pytest_configure(config: pytest.Config) -> None:
    """Measure where the tests are reported, not in each process that runs some of them."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(ModuleTimes(), "module-times")
