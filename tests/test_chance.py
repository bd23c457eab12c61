"""Profiles of Hypothesis: what the gate tries is the same each time, and a soak tries more."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import chance

pytest_plugins = ["pytester"]


@pytest.fixture(params=["gate", "soak"])
def profile(request: pytest.FixtureRequest) -> Iterator[settings]:
    """One of the profiles, in force during the test."""
    name: str = request.param
    before = settings.get_current_profile_name()
    settings.load_profile(name)
    yield settings.get_profile(name)
    settings.load_profile(before)


def drawn(profile: settings) -> list[tuple[int, str]]:
    """Return what a test tries."""
    seen: list[tuple[int, str]] = []

    @settings(profile, database=None, max_examples=200)
    @given(st.integers(), st.text())
    def notes(number: int, text: str) -> None:
        seen.append((number, text))

    notes()
    return seen


@pytest.mark.parametrize("profile", ["gate"], indirect=True)
def test_the_gate_tries_the_same_each_time(profile: settings, tmp_path: Path) -> None:
    """Also when another test has loaded a module in which numbers and texts stand."""
    before = drawn(profile)
    path = tmp_path / "odd.py"
    path.write_text("".join(f"v{n} = {987_654_321_000 + n}, 'constant {n}'\n" for n in range(500)))
    spec = importlib.util.spec_from_file_location("odd", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["odd"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        assert drawn(profile) == before
    finally:
        del sys.modules["odd"]


@pytest.mark.parametrize("profile", ["soak"], indirect=True)
def test_a_soak_tries_others_each_time(profile: settings) -> None:
    """What is found is kept in the checkout, and can be repeated by what is printed."""
    assert drawn(profile) != drawn(profile)
    assert profile.print_blob
    assert profile.max_examples > settings.get_profile("gate").max_examples


def test_numbers_of_examples_are_in_proportion(profile: settings) -> None:
    """A test that tries twice as many as others does so in a soak, too."""
    assert chance.examples(100) == profile.max_examples
    assert chance.examples(200) == 2 * profile.max_examples
    assert chance.examples(1) >= 1


def test_seeds_are_a_tests_own(profile: settings) -> None:
    """In the gate a name's seed is always the same; in a soak it is another one each time."""
    first, again, other = (chance.seed_for(name) for name in ("a", "a", "b"))

    assert (first == again) == (not chance.is_wanted()) == profile.derandomize
    assert first != other


def test_the_seed_of_a_failed_test_is_shown(pytester: pytest.Pytester) -> None:
    """It is part of the test's output."""
    pytester.makepyfile("def test_it(seed): assert seed < 0")
    result = pytester.runpytest_inprocess("-ptests.chance", "-pno:randomly", "-pno:cacheprovider")

    result.stdout.fnmatch_lines(["*Captured stdout setup*", "seed: *[0-9]"])
