"""The cells of the matrix: each source and sink, with each guarantee."""

from collections.abc import Collection, Sequence

import pytest
from _pytest.mark import ParameterSet

ENDS = [
    pytest.param(
        "postgres-redis", marks=[pytest.mark.postgres, pytest.mark.redis], id="postgres-redis"
    ),
    pytest.param("mysql-kafka", marks=[pytest.mark.mysql, pytest.mark.kafka], id="mysql-kafka"),
    pytest.param(
        "postgres-nats", marks=[pytest.mark.postgres, pytest.mark.nats], id="postgres-nats"
    ),
    pytest.param("postgres-http", marks=[pytest.mark.postgres], id="postgres-http"),
]

TABLE_ENDS = [
    pytest.param("postgres-tables", marks=[pytest.mark.postgres], id="postgres-tables"),
    pytest.param(
        "postgres-clickhouse",
        marks=[pytest.mark.postgres, pytest.mark.clickhouse],
        id="postgres-clickhouse",
    ),
    pytest.param("postgres-objects", marks=[pytest.mark.postgres], id="postgres-objects"),
]
"""Those whose sink is written in commits to tables; those of lakes have campaigns of their own."""

GUARANTEES = {
    "postgres-http": (False,),
    **dict.fromkeys((one.id for one in TABLE_ENDS), (True,)),
}
"""Those that are never or always exactly once."""

Cell = tuple[str, bool]
"""Source and sink, and whether it is exactly once."""

ONE_OF_EACH = frozenset({("postgres-redis", False), ("mysql-kafka", True), ("postgres-nats", True)})
"""Each source, sink and guarantee is in one of these."""


def crossed(
    ends: Sequence[ParameterSet], scenario: str, gate: Collection[Cell]
) -> list[ParameterSet]:
    """Return the cells of some ends with each guarantee, as the parameters `ends` and `exactly_once`.

    Args:
        ends: Sources and sinks.
        scenario: Where the cells belong that only `make soak` runs.
        gate: The cells that `make test` runs.
    """
    return [
        pytest.param(
            *pair.values,
            exactly_once,
            marks=[
                *pair.marks,
                *([] if (pair.id, exactly_once) in gate else [pytest.mark.soak(scenario)]),
            ],
            id=f"{pair.id}-{'exactly-once' if exactly_once else 'at-least-once'}",
        )
        for pair in ends
        for exactly_once in GUARANTEES.get(pair.id, (False, True))
    ]


def cells(scenario: str, *, gate: Collection[Cell] = ONE_OF_EACH) -> list[pytest.MarkDecorator]:
    """Return the marks of a module whose tests run in every cell, with the fixture `make_campaign`.

    Args:
        scenario: Where the cells belong that only `make soak` runs.
        gate: The cells that `make test` runs.
    """
    made = crossed([*ENDS, *TABLE_ENDS], scenario, gate)
    return [
        pytest.mark.spark,
        pytest.mark.parametrize(("ends", "exactly_once"), made, indirect=True),
    ]


POSTGRES_TO_REDIS = [
    pytest.mark.spark,
    pytest.mark.parametrize("ends", ENDS[:1], indirect=True),
    pytest.mark.parametrize("exactly_once", [False], ids=["at-least-once"], indirect=True),
]
"""Marks of a module whose tests are about neither source nor sink."""
