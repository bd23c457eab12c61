"""The cells of the matrix: each source and sink, with each guarantee."""

from collections.abc import Collection

import pytest

_ENDS = [
    pytest.param(
        "postgres-redis", marks=[pytest.mark.postgres, pytest.mark.redis], id="postgres-redis"
    ),
    pytest.param("mysql-kafka", marks=[pytest.mark.mysql, pytest.mark.kafka], id="mysql-kafka"),
    pytest.param(
        "postgres-nats", marks=[pytest.mark.postgres, pytest.mark.nats], id="postgres-nats"
    ),
]

Cell = tuple[str, bool]
"""Source and sink, and whether it is exactly once."""

ONE_OF_EACH = frozenset({("postgres-redis", False), ("mysql-kafka", True), ("postgres-nats", True)})
"""Each source, sink and guarantee is in one of these."""


def cells(scenario: str, *, gate: Collection[Cell] = ONE_OF_EACH) -> list[pytest.MarkDecorator]:
    """Return the marks of a module whose tests run in every cell, with the fixture `make_campaign`.

    Args:
        scenario: Where the cells belong that only `make soak` runs.
        gate: The cells that `make test` runs.
    """
    made = [
        pytest.param(
            *ends.values,
            exactly_once,
            marks=[
                *ends.marks,
                *([] if (ends.id, exactly_once) in gate else [pytest.mark.soak(scenario)]),
            ],
            id=f"{ends.id}-{'exactly-once' if exactly_once else 'at-least-once'}",
        )
        for ends in _ENDS
        for exactly_once in (False, True)
    ]
    return [
        pytest.mark.spark,
        pytest.mark.parametrize(("ends", "exactly_once"), made, indirect=True),
    ]


POSTGRES_TO_REDIS = [
    pytest.mark.spark,
    pytest.mark.parametrize("ends", _ENDS[:1], indirect=True),
    pytest.mark.parametrize("exactly_once", [False], ids=["at-least-once"], indirect=True),
]
"""Marks of a module whose tests are about neither source nor sink."""
