"""The long tests, run by `make soak`: scenarios by name, a time budget, and a summary at the end.

A test marked `@pytest.mark.soak("kills")` belongs to the scenario `kills`. It runs with
`--soak=all` and `--soak=kills`; without the option pytest leaves it out, as its `addopts` say.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Sequence
from itertools import zip_longest
from time import monotonic

import hypothesis
import pytest

from tests.conftest import SERVICE_MARKS

SCENARIOS = {
    "kills": "runs killed at random under load, up to fifty times each",
    "stalls": "runs stopped for longer than their lease, which go on after another took over",
    "snapshots": "snapshots killed at random, read again by chunks, and for sinks that join",
    "faults": "networks that cut connections for minutes, disks that are full, servers that stop and go on",
    "log": "ten minutes of load while a sink is down, and runs are killed: the primary's log stays small",
    "reconcile": "damage of ten kinds in lake tables; an hour of load for each database while its copies are compared",
    "versions": "other versions of PostgreSQL, MySQL, MariaDB and libSQL, and sessions of Spark without a server",
    "dagster": "ranges and sinks that catch up through Dagster's daemon; what touches Dagster, on its oldest and newest release",
    "charts": "the Helm chart, rendered and compared with the schemas of Kubernetes; needs Helm or Go",
    "formats": "what is the same in both formats of lake tables, with the one that CI leaves out",
    "benchmarks": "`bench` with the pairs that CI leaves out",
    "properties": "property tests that need no server, with Hypothesis's profile `soak`",
    "oracle": "tables, definitions and changes by chance, compared with the source in every sink, for 20 minutes",
    "large": "transactions of millions of rows, values of a gigabyte",
    "managed": "the first hour with a database of each service, on servers that behave like it",
    "remedies": "what the product tells people to run, for further problems, sources and sinks",
    "pictures": "the pages of Dagster's UI that the docs show, as pictures with `make pictures`; needs Chromium",
    "image": "the container image, built and run; needs Podman or Docker",
    "growth": "a simulated month, after which nothing has grown",
    "fuzz": "millions of damaged logs, thousands of random ALTER statements",
}
"""Every scenario, in the order in which they take turns: what takes hours comes last."""

LEFT_OUT = "not soak"
"""The `-m` of pytest's `addopts`, which `--soak` replaces."""

PROFILE = "soak"
"""Hypothesis's profile, where `--hypothesis-profile` names no other."""

PROPERTY_SECONDS = 3600
"""The limit of a property test that has none of its own: more examples take more time."""

TOTAL = "total"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--soak` and `--soak-minutes`."""
    group = parser.getgroup("soak", "long tests")
    group.addoption(
        "--soak",
        metavar="NAMES",
        help="run only these scenarios of long tests; `all` for every one, `list` to show them",
    )
    group.addoption(
        "--soak-minutes",
        metavar="MINUTES",
        type=_minutes,
        help="begin no test after so many minutes; scenarios take turns",
    )


def _minutes(text: str) -> float:
    minutes = float(text)
    if not (math.isfinite(minutes) and minutes >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes")
    return minutes


@pytest.hookimpl(tryfirst=True)  # before Hypothesis looks which profile is asked for
def pytest_configure(config: pytest.Config) -> None:
    """Turn the options into a run, or say what is wrong with them."""
    text: str | None = config.getoption("--soak")
    minutes: float | None = config.getoption("--soak-minutes")
    if text is None:
        if minutes is not None:
            raise pytest.UsageError("--soak-minutes needs --soak, as `--soak=all`")
        return
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("--soak runs tests one after the other: leave out -n")
    names = set(text.replace(",", " ").split())
    wrong = sorted(names - {*SCENARIOS, "all", "list"})
    if wrong or not names:
        known = "".join(f"\n  {name:<12}{what}" for name, what in SCENARIOS.items())
        problem = f"unknown scenario: {', '.join(wrong)}" if wrong else "no scenario is named"
        raise pytest.UsageError(f"{problem}; there are{known}\nand `all`, `list`")
    if config.option.markexpr == LEFT_OUT:
        config.option.markexpr = ""
    config.option.hypothesis_profile = config.option.hypothesis_profile or PROFILE
    chosen = [name for name in SCENARIOS if name in names or not names.isdisjoint({"all", "list"})]
    config.pluginmanager.register(SoakRun(config, chosen, minutes, listing="list" in names))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail to collect a test whose mark `soak` does not name a scenario."""
    report = yield
    wrong = [
        f"{node.nodeid}: the mark soak{mark.args} does not name one of {', '.join(SCENARIOS)}"
        for node in report.result or []
        if isinstance(node, pytest.Item)
        for mark in node.iter_markers("soak")
        if mark.kwargs or len(mark.args) != 1 or mark.args[0] not in SCENARIOS
    ]
    if wrong:
        report.outcome = "failed"
        report.longrepr = "\n".join(wrong)
        report.result = []
    return report


def scenario_of(item: pytest.Item) -> str | None:
    """Return the scenario that a test belongs to; None for a test that is not part of a soak.

    The test's own mark counts before one of a parameter or module.
    """
    mark = item.get_closest_marker("soak")
    if mark is not None:
        return str(mark.args[0])
    marks = {mark.name for mark in item.iter_markers()}
    return "properties" if "hypothesis" in marks and not marks & SERVICE_MARKS else None


def in_turns(groups: Iterable[Sequence[pytest.Item]]) -> list[pytest.Item]:
    """Take one of each group, then the next one of each, until all are taken."""
    return [item for turn in zip_longest(*groups) for item in turn if item is not None]


class SoakRun:
    """One run of pytest with `--soak`: which tests it has, how long it may take, what came of it."""

    def __init__(
        self, config: pytest.Config, names: list[str], minutes: float | None, *, listing: bool
    ) -> None:
        self.config = config
        self.names = names
        self.minutes = minutes
        self.listing = listing
        self.began_at = monotonic()
        self.out_of_time = False
        self.scenarios: dict[str, str] = {}
        self.outcomes: dict[str, str] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_report_header(self) -> str:
        """Say what is run."""
        limit = "" if self.minutes is None else f"; none begins after {self.minutes:g} minutes"
        return f"soak: {', '.join(self.names)}{limit}"

    @pytest.hookimpl(trylast=True)  # after Hypothesis has marked its tests
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests of these scenarios; with a budget, have the scenarios take turns."""
        groups: dict[str, list[pytest.Item]] = {name: [] for name in self.names}
        others: list[pytest.Item] = []
        for item in items:
            groups.get(scenario_of(item) or "", others).append(item)
        for item in groups.get("properties", []):
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(PROPERTY_SECONDS))
        if others:
            self.config.hook.pytest_deselected(items=others)
        if self.minutes is not None:
            items[:] = in_turns(groups.values())
        else:
            left_out = set(others)
            items[:] = [item for item in items if item not in left_out]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember what is to be run."""
        self.scenarios = {item.nodeid: scenario_of(item) or "" for item in session.items}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool | None:
        """Run nothing when scenarios are only listed."""
        return True if self.listing else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        """Begin no test when the time is used up."""
        if self.minutes is not None and monotonic() - self.began_at >= 60 * self.minutes:
            self.out_of_time = True
        return True if self.out_of_time else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember how a test ended, and what it took."""
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped and not hasattr(report, "wasxfail"):
            self.outcomes.setdefault(report.nodeid, "skipped")
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, "passed")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write what came of each scenario, what was not run, and what repeats the run."""
        if self.config.option.collectonly:
            return
        terminalreporter.section("soak")
        for line in self._scenarios() if self.listing else self._results():
            terminalreporter.write_line(line)

    def _scenarios(self) -> list[str]:
        tests = Counter(self.scenarios.values())
        return [
            f"{'scenario':<12}{'tests':>5}",
            *(f"{name:<12}{tests[name]:>5}  {SCENARIOS[name]}" for name in self.names),
            f"{TOTAL:<12}{tests.total():>5}",
        ]

    def _results(self) -> list[str]:
        kinds = ("passed", "failed", "skipped", "not run")
        counts = {name: Counter[str]() for name in (*self.names, TOTAL)}
        minutes: defaultdict[str, float] = defaultdict(float)
        for test, scenario in self.scenarios.items():
            for name in (scenario, TOTAL):
                counts[name][self.outcomes.get(test, "not run")] += 1
                minutes[name] += self.seconds[test] / 60
        rows = [
            f"{name:<12}{''.join(f'{count[kind]:>9}' for kind in kinds)}{minutes[name]:>9.1f}"
            for name, count in counts.items()
        ]
        heads = "".join(f"{head:>9}" for head in (*kinds, "minutes"))
        seed = self.config.getoption("randomly_seed", None)
        order = "as written" if seed is None else f"--randomly-seed={seed}"
        profile = hypothesis.settings.get_current_profile_name()
        return [
            f"{'scenario':<12}{heads}",
            *rows,
            *self._not_run(),
            f"Hypothesis's profile: {profile}; order and random numbers: {order}",
        ]

    def _not_run(self) -> list[str]:
        left = [test for test in self.scenarios if test not in self.outcomes]
        if not left:
            return []
        why = f"out of time ({self.minutes:g} minutes)" if self.out_of_time else "the run stopped"
        return [f"{len(left)} of {len(self.scenarios)} not run: {why}", *(f"  {t}" for t in left)]
