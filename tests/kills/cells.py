"""The cells of the matrix: each source and sink, with each guarantee."""

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

EVERY_CELL = [
    pytest.mark.spark,
    pytest.mark.parametrize("ends", _ENDS, indirect=True),
    pytest.mark.parametrize(
        "exactly_once", [False, True], ids=["at-least-once", "exactly-once"], indirect=True
    ),
]
"""Marks of a module whose tests run in every cell; they get the fixture `make_campaign`."""

_SOAK = pytest.mark.soak
_CHOSEN = {("postgres-redis", False), ("mysql-kafka", True), ("postgres-nats", True)}

SHORT_CELLS = [
    pytest.mark.spark,
    pytest.mark.parametrize(
        ("ends", "exactly_once"),
        [
            pytest.param(
                *ends.values,
                exactly_once,
                marks=[*ends.marks, *([] if (ends.id, exactly_once) in _CHOSEN else [_SOAK])],
                id=f"{ends.id}-{'exactly-once' if exactly_once else 'at-least-once'}",
            )
            for ends in _ENDS
            for exactly_once in (False, True)
        ],
        indirect=True,
    ),
]
"""The same, where CI has one guarantee of each pair, and `make soak` the other one."""

POSTGRES_TO_REDIS = [
    pytest.mark.spark,
    pytest.mark.parametrize("ends", _ENDS[:1], indirect=True),
    pytest.mark.parametrize("exactly_once", [False], ids=["at-least-once"], indirect=True),
]
"""Marks of a module whose tests are about neither source nor sink."""
