"""Which tables are outboxes."""

from __future__ import annotations

import pytest

from deltaforge_dagster.sources.outbox import NO_OUTBOX, MysqlOutboxTables


@pytest.mark.parametrize(
    ("pattern", "outboxes", "others"),
    [
        ("shop.outbox", ["shop.outbox"], ["shop.outbox2", "ship.outbox", "shop.Outbox"]),
        ("*.outbox", ["shop.outbox", "a_b.outbox"], ["shop.outboxes"]),
        ("outbox", ["shop.outbox", "ship.outbox"], ["outbox.orders"]),
        ("shop.outbox_%", ["shop.outbox_eu"], ["shop.outbox", "shop.outboxes"]),
        ("shop.*_outbox", ["shop.orders_outbox", "shop.a.b_outbox"], ["shop.outbox", "x.a_outbox"]),
        ("sh%p.*", ["shop.orders", "sharp.a"], ["ship2.a"]),
    ],
)
def test_patterns(pattern: str, outboxes: list[str], others: list[str]) -> None:
    """Exact, in any database, with wildcards at the ends and inside; `_` is a character."""
    tables = MysqlOutboxTables(["no.thing", pattern])

    assert tables
    assert all(tables.has(*name.split(".", 1)) for name in outboxes)
    assert not any(tables.has(*name.split(".", 1)) for name in others)


def test_without_patterns_there_is_none() -> None:
    """An outbox is one only where the file says so."""
    assert not NO_OUTBOX
    assert not NO_OUTBOX.has("shop", "outbox")
