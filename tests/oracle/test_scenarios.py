"""Scenarios are a function of their seed, and become as small as what they show."""

from __future__ import annotations

import time

import pytest

from tests.oracle.generate import VERSIONS, scenario
from tests.oracle.scenario import Create, Insert, Run, Scenario, Source, Transaction
from tests.oracle.shrink import smaller, together


@pytest.mark.parametrize("source", ["postgres", "mysql"])
def test_a_seed_makes_one_scenario(source: Source) -> None:
    """The same each time, and another one than the next seed."""
    assert scenario(7, source) == scenario(7, source)
    assert scenario(7, source).script() != scenario(8, source).script()


@pytest.mark.parametrize("source", ["postgres", "mysql"])
def test_everything_is_tried(source: Source) -> None:
    """Every server, snapshots and none, early and late runs, every kind of definition."""
    made = [scenario(seed, source) for seed in range(200)]
    steps = [step for one in made for step in one.steps]
    ways = {
        what
        for step in steps
        if isinstance(step, Transaction)
        for statement in step.statements
        for what, _ in getattr(statement, "changes", ())
    }
    assert {one.version for one in made} == set(VERSIONS[source])
    assert {one.snapshot for one in made} == {True, False}
    assert {Run() in one.steps for one in made} == {True, False}
    assert {"ROLLBACK", "COMMIT"} == {one.ends for one in steps if isinstance(one, Transaction)}
    assert ways >= {"add", "add-default", "drop", "renamed-to", "swap", "type", "default"}
    assert (ways >= {"executed", "quotes", "escapes", "reorder"}) == (source == "mysql")


def test_a_failing_scenario_becomes_small() -> None:
    """What remains are the statements that the failure needs; a column that it does not need is gone."""
    made = scenario(3, "postgres").only(1, "messages")
    assert len(made.steps) > 5

    def fails(candidate: Scenario) -> bool:
        tried = [one for one in candidate.steps if isinstance(one, Transaction)]
        return any(isinstance(one, Insert) for step in tried for one in step.statements)

    smallest = smaller(made, lambda some: [fails(one) for one in some], time.monotonic() + 60)
    (step,) = smallest.steps
    assert isinstance(step, Transaction)
    (inserted,) = step.statements
    (created,) = smallest.tables[1]
    assert isinstance(inserted, Insert)
    assert isinstance(created, Create)
    assert set(inserted.values) == {name for name, _ in created.columns} == {*created.key, "rev"}


def test_no_time_is_no_change() -> None:
    """What is not tried in time stays."""
    made = scenario(3, "mysql")
    assert smaller(made, lambda some: [True] * len(some), time.monotonic() - 1) == made


def test_many_scenarios_are_tried_as_the_tables_of_one() -> None:
    """Each has its steps between the same runs as alone."""
    made = [scenario(seed, "postgres").only(2, "messages") for seed in (1, 5)]
    whole = together(made)
    assert list(whole.tables) == [0, 1]
    for number, one in enumerate(made):
        alone = whole.only(number, "messages")
        text = one.script().replace("t2", f"t{number}").partition("\n")[2]
        assert alone.script().partition("\n")[2] == text
