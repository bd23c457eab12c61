"""A failing scenario of one table becomes smaller: fewer steps, statements and columns with the same difference.

Tables do not depend on one another, so many smaller scenarios are tried at once, as the tables of one scenario.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import islice, zip_longest
from typing import Any, TypeVar

from tests.oracle.scenario import Run, Scenario, Statement, Step, Transaction

AT_ONCE = 16
"""How many scenarios are tried together."""

Failing = Callable[[Sequence[Scenario]], Sequence[bool]]
"""Says of each scenario whether it still fails."""

S = TypeVar("S", bound=Statement)


def smaller(scenario: Scenario, failing: Failing, until: float) -> Scenario:
    """Return the smallest scenario that still fails, as far as that is found by the time `until`."""
    tried: set[str] = set()
    while time.monotonic() < until:
        new = (one for one in _candidates(scenario) if one.script() not in tried)
        candidates = list(islice(new, AT_ONCE))
        if not candidates:
            return scenario
        tried |= {one.script() for one in candidates}
        found = [one for one, fails in zip(candidates, failing(candidates), strict=True) if fails]
        scenario = min([scenario, *found], key=_size)
    return scenario


def _size(scenario: Scenario) -> int:
    return len(scenario.script())


def _candidates(scenario: Scenario) -> Iterator[Scenario]:
    """Return smaller scenarios, those first that would be much smaller."""
    ways = [
        list(way(scenario))
        for way in (_without_steps, _without_columns, _without_statements, _without_circumstances)
    ]
    for turn in zip_longest(*ways):
        yield from (one for one in turn if one is not None and one != scenario)


def _without_steps(scenario: Scenario) -> Iterator[Scenario]:
    steps = scenario.steps
    size = len(steps)
    while size > 1:
        size = -(-size // 2)
        for begin in range(0, len(steps), size):
            yield scenario.with_steps((*steps[:begin], *steps[begin + size :]))
    if len(steps) == 1:
        yield scenario.with_steps(())


def _without_columns(scenario: Scenario) -> Iterator[Scenario]:
    columns = scenario.columns()
    for kept in columns:
        left = scenario
        for column in columns:
            left = left if column == kept else left.without_column(column)
        yield left
    for column in columns:
        yield scenario.without_column(column)


def _without_statements(scenario: Scenario) -> Iterator[Scenario]:
    for number, statements in scenario.tables.items():
        for place in range(1, len(statements)):
            left = (*statements[:place], *statements[place + 1 :])
            yield replace(scenario, tables={**scenario.tables, number: left})
    for number, step in enumerate(scenario.steps):
        if isinstance(step, Run) or len(step.statements) < 2:
            continue
        for place in range(len(step.statements)):
            left = (*step.statements[:place], *step.statements[place + 1 :])
            yield _with(scenario, number, replace(step, statements=left))


def _without_circumstances(scenario: Scenario) -> Iterator[Scenario]:
    yield scenario.with_steps(one for one in scenario.steps if not isinstance(one, Run))
    for number, step in enumerate(scenario.steps):
        if isinstance(step, Transaction) and step.session:
            yield _with(scenario, number, replace(step, session=()))


def _with(scenario: Scenario, number: int, step: Transaction) -> Scenario:
    return scenario.with_steps([*scenario.steps[:number], step, *scenario.steps[number + 1 :]])


def together(scenarios: Sequence[Scenario]) -> Scenario:
    """Return one scenario whose table n is the only one of scenario n, with its steps between the same runs."""
    parts: list[list[list[Step]]] = []
    tables: dict[int, tuple[Statement, ...]] = {}
    for number, scenario in enumerate(scenarios):
        ((old, statements),) = scenario.tables.items()
        tables[number] = tuple(_moved(one, old, number) for one in statements)
        parts.append([[]])
        for step in scenario.steps:
            if isinstance(step, Run):
                parts[-1].append([])
            else:
                made = tuple(_moved(one, old, number) for one in step.statements)
                parts[-1][-1].append(replace(step, table=number, statements=made))
    steps: list[Step] = []
    for turn in zip_longest(*parts, fillvalue=[]):
        steps += [step for part in turn for step in part]
        steps.append(Run())
    return replace(scenarios[0], tables=tables).with_steps(steps)


def _moved(statement: S, old: int, new: int) -> S:
    """Return a statement about another table."""
    changed: dict[str, Any] = {
        one.name: re.sub(rf"\bt{old}(_pkey)?\b", rf"t{new}\1", value)
        for one in fields(statement)  # type: ignore[arg-type] # all are dataclasses
        if isinstance(value := getattr(statement, one.name), str)
    }
    return replace(statement, **changed)  # type: ignore[type-var] # all are dataclasses
