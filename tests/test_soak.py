"""The long tests' plugin, in runs of pytest on small files of tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import hypothesis
import pytest

from tests import soak

pytest_plugins = ["pytester"]

FILE = """\
import pytest
from hypothesis import given, strategies as st

@pytest.mark.soak("kills")
@pytest.mark.parametrize("n", range(3))
def test_kill(n): pass

@pytest.mark.soak("stalls")
def test_stall(): assert False

@pytest.mark.soak("fuzz")
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.soak("versions"))])
def test_fuzz(n): pass

@given(st.none())
def test_property(drawn): pass

@pytest.mark.mysql
@given(st.none())
def test_property_of_a_server(drawn): pass

def test_short(): pass
"""
LONG = [
    *(f"test_kill[{n}]" for n in range(3)),
    "test_stall",
    *(f"test_fuzz[{n}]" for n in (1, 2)),
    "test_property",
]


PLUGINS = [
    "--disable-plugin-autoload",  # looking for plugins takes most of such a run's time
    *(
        f"-p{name}"
        for name in ("_hypothesis_pytestplugin", "pytest_timeout", "xdist", "tests.soak")
    ),
]


class Files:
    """A folder of tests, and runs of pytest there."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        marks = "markers =\n  mysql: needs a server\n  soak: takes long\n"
        pytester.makeini(f"[pytest]\naddopts = -m 'not soak'\n{marks}")
        pytester.makepyfile(test_all=FILE)

    def run(self, *options: str) -> pytest.RunResult:
        """Run the tests in the order of the file."""
        return self.pytester.runpytest_inprocess(*PLUGINS, "-v", *options)

    def ran(self, *options: str) -> list[str]:
        """Return the names of the tests that ran, in their order."""
        lines = self.run(*options).outlines
        return [
            line.partition("::")[2].split()[0]
            for line in lines
            if line.startswith("test_all.py::") and line.endswith("%]")
        ]


@pytest.fixture
def files(pytester: pytest.Pytester) -> Iterator[Files]:
    """A folder with tests of several scenarios, and others; Hypothesis's profile stays ours."""
    profile = hypothesis.settings.get_current_profile_name()
    yield Files(pytester)
    hypothesis.settings.load_profile(profile)


def test_scenarios_are_chosen_by_name(files: Files) -> None:
    """All of them, several or one; other tests and what `-m` says are as ever without the option.

    A test with two names belongs to the one at the test itself.
    """
    assert files.ran("--soak=all") == LONG
    assert files.ran("--soak=fuzz stalls") == LONG[3:6]
    assert files.ran() == ["test_property", "test_property_of_a_server", "test_short"]
    assert files.ran("-m", "soak") == LONG[:6]


def test_properties_are_those_that_need_no_server(files: Files) -> None:
    """A test that uses Hypothesis needs no mark to be one."""
    assert files.ran("--soak=properties") == ["test_property"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--soak=kills oops"], "unknown scenario: oops; there are"),
        (["--soak="], "no scenario is named; there are"),
        (["--soak=all", "-n2"], "one after the other"),
        (["--soak-minutes=5"], "--soak-minutes needs --soak"),
        (["--soak=all", "--soak-minutes=-1"], "-1 is not a number of minutes"),
    ],
)
def test_what_cannot_be_run_is_refused(files: Files, options: list[str], says: str) -> None:
    """At once, and for a name with the list of those that there are."""
    result = files.run(*options)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert says in result.stderr.str()
    assert ("there are" in says) == (soak.SCENARIOS["fuzz"] in result.stderr.str())


def test_a_mark_names_one_scenario(files: Files) -> None:
    """Else its file cannot be collected, in any run."""
    files.pytester.makepyfile(
        test_wrong="""\
        import pytest

        @pytest.mark.soak
        def test_no_name(): pass

        @pytest.mark.soak("oops")
        def test_unknown(): pass

        @pytest.mark.soak("kills", "fuzz")
        def test_two(): pass
        """
    )
    result = files.run("test_wrong.py")

    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(
        [
            f"test_wrong.py::test_{name}: the mark soak* does not name one of kills, *"
            for name in ("no_name", "unknown", "two")
        ]
    )


def test_scenarios_are_listed(files: Files) -> None:
    """Each with its description and how many tests it has; nothing runs."""
    result = files.run("--soak=list")

    assert result.ret == pytest.ExitCode.OK
    assert result.parseoutcomes().keys() <= {"deselected"}
    result.stdout.fnmatch_lines(["kills           3  runs killed*", "total           7"])


def test_the_summary_counts_each_scenario(files: Files) -> None:
    """Passed, failed, skipped, not run and minutes; then the seeds."""
    result = files.run("--soak=kills stalls")

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "soak: kills, stalls",
            "scenario       passed   failed  skipped  not run  minutes",
            "kills               3        0        0        0      0.0",
            "stalls              0        1        0        0      0.0",
            "total               3        1        0        0      0.0",
            "Hypothesis's profile: soak; order and random numbers: as written",
        ]
    )
    result.stdout.no_fnmatch_line("*not run: *")


def test_no_test_begins_without_time(files: Files) -> None:
    """What was not begun is listed, and no reason to fail."""
    result = files.run("--soak=all", "--soak-minutes=0")

    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["7 of 7 not run: out of time (0 minutes)"])
    result.stdout.fnmatch_lines_random([f"  test_all.py::{name.split('[')[0]}*" for name in LONG])


def test_scenarios_take_turns_until_the_time_is_used_up(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test of each, then the next of each; a clock that goes on a minute per test ends it."""
    clock = count(0, 60)
    monkeypatch.setattr(soak, "monotonic", lambda: next(clock))

    assert files.ran("--soak=all", "--soak-minutes=6") == [
        "test_kill[0]",
        "test_stall",
        "test_property",
        "test_fuzz[1]",
        "test_kill[1]",
    ]


def test_what_stands_for_deltaforges_scenarios_is_there() -> None:
    """docs/from-deltaforge.md names scenarios that exist, and files that have tests of them."""
    root = Path(soak.__file__).parents[1]
    text = (root / "docs" / "from-deltaforge.md").read_text().partition("### Chaos scenarios")[2]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    theirs = {name for row in rows for name in re.findall(r"`([a-z0-9_-]+)`", row[0])}
    assert {"network_partition", "sink_outage", "crash_recovery", "binlog_purge"} <= theirs
    for _, ours in rows:
        scenarios = re.findall(r'SCENARIOS="?([a-z ]+)', ours)
        assert {name for names in scenarios for name in names.split()} <= soak.SCENARIOS.keys()
        files = [root / name for name in re.findall(r"`(tests/[a-z_/.]+)`", ours)]
        assert all(file.exists() for file in files), ours
        marks = "".join(
            each.read_text()
            for file in files
            for each in ([file] if file.is_file() else file.rglob("*.py"))
        )
        for name in {name for names in scenarios if files for name in names.split()}:
            assert f'soak("{name}")' in marks or name == "fuzz", (name, ours)


def test_a_run_that_stops_says_what_it_left_out(files: Files) -> None:
    """Also when it was not for want of time."""
    result = files.run("--soak=all", "-x")

    result.stdout.fnmatch_lines(["3 of 7 not run: the run stopped", "  test_all.py::test_fuzz?1?"])
