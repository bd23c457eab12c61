"""A pipeline's life over a server: what a file's contract proves at length, once."""

from __future__ import annotations

import json

from deltaforge_dagster.sources.turso.connection import HranaDatabase
from deltaforge_dagster.sources.turso.source import TursoSource
from deltaforge_dagster.sources.turso.source_type import TursoSourceConfig
from deltaforge_dagster.testing.sources import (
    LIMITS,
    Taken,
    Versions,
    add,
)


def check_a_pipelines_life(url: str, token: str | None) -> None:
    """Check what a source does in a database that has tables `orders` and `items`."""
    config = TursoSourceConfig.model_validate(
        {
            "id": "shop",
            "url": url,
            "auth_token": token,
            "tables": ("orders", "items"),
            "auto_create_triggers": True,
            "poll_interval_ms": 20,
        },
        strict=False,
    )
    source = TursoSource(config)
    database = HranaDatabase(url, token)
    start = source.ensure_start()
    assert start.mode == "triggers"
    with database.session(30, write=True) as session:
        for number in range(100):
            session.query("INSERT INTO orders VALUES (?, ?)", (number, str(number)))
        session.query("INSERT INTO items VALUES (1, ?)", (b"\x00\xff",))
        session.query("UPDATE items SET v = 0.1")
        session.query("DELETE FROM items")
    assert source.has_changes(start)
    taken = Taken([], start, [])
    reading = source.read(start, LIMITS, Versions())
    while len(taken.rows) < 103:
        add(taken, next(reading))
    source.confirm(taken.end)
    left: list[object] = [[1]]
    while left != [[0]]:
        add(taken, next(reading))
        with database.session(30) as session:
            left = [list(row) for row in session.query("SELECT count(*) FROM _df_cdc_changes")]

    assert [json.loads(str(row["after"])) for row in taken.rows[:100]] == [
        {"id": number, "v": str(number)} for number in range(100)
    ]
    assert [(row["op"], row["before"], row["after"]) for row in taken.rows[100:]] == [
        ("c", None, '{"id":1,"v":{"_base64":"AP8="}}'),
        ("u", '{"id":1,"v":{"_base64":"AP8="}}', '{"id":1,"v":"0.1"}'),
        ("d", '{"id":1,"v":"0.1"}', None),
    ]
    snapshots = source.snapshots()
    watermark = snapshots.watermark()
    with snapshots.reader() as reader:
        found = [
            row["key"]
            for chunk in snapshots.plan(["main.orders"], 25)
            for batch in reader.read(chunk, watermark).batches
            for row in batch.to_pylist()
        ]
    assert found == [f'{{"id":{number}}}' for number in range(100)]
    assert {one.level for one in source.preflight(taken.end, None)} == {"ok"}
    source.close()
    database.close()
