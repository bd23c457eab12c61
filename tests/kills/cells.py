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

_SHORT = {("postgres-redis", False), ("mysql-kafka", True), ("postgres-nats", True)}


def _cells(*, short: bool) -> list[pytest.MarkDecorator]:
    return [
        pytest.mark.spark,
        pytest.mark.parametrize(
            ("ends", "exactly_once"),
            [
                pytest.param(
                    *ends.values,
                    exactly_once,
                    marks=[
                        *ends.marks,
                        *(
                            [pytest.mark.soak]
                            if short and (ends.id, exactly_once) not in _SHORT
                            else []
                        ),
                    ],
                    id=f"{ends.id}-{'exactly-once' if exactly_once else 'at-least-once'}",
                )
                for ends in _ENDS
                for exactly_once in (False, True)
            ],
            indirect=True,
        ),
    ]


EVERY_CELL = _cells(short=False)
"""Marks of a module whose tests run in every cell; they get the fixture `make_campaign`."""

SHORT_CELLS = _cells(short=True)
"""The same, where CI has one guarantee of each pair, and `make soak` the other one."""

POSTGRES_TO_REDIS = [
    pytest.mark.spark,
    pytest.mark.parametrize("ends", _ENDS[:1], indirect=True),
    pytest.mark.parametrize("exactly_once", [False], ids=["at-least-once"], indirect=True),
]
"""Marks of a module whose tests are about neither source nor sink."""
