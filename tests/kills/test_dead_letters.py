"""Runs killed while changes go to the queue of dead letters, and while they leave it."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.conftest import shop
from tests.kills.worlds import run
from tests.pipeline.test_exactly_once import BOTH, MakeWorld, make_world, once

__all__ = ["make_world", "shop"]

pytestmark = [
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.parametrize("ends", ["postgres-redis"]),
]


@BOTH
def test_nothing_is_lost_or_repeated_in_the_queue(
    make_world: MakeWorld, exactly_once: bool
) -> None:
    """Killed after each step: one entry for each change, each arrives in the order of its row.

    Exactly once, each arrives once, too.
    """
    world = make_world(exactly_once=exactly_once)
    text = world.text.replace("    run: {", "    dlq: {hold_key: true}\n    run: {")
    text = text.replace("  engine:", "  journal: {enabled: true}\n  engine:")
    astray = text.replace(f"stream: {world.name}", 'stream: "${after.name}"')
    world.feed.path.write_text(astray)
    name = world.name
    world.database.shop.execute(
        f"INSERT INTO customers VALUES (1, '{name}'), (2, NULL), (3, '{name}'), (4, NULL)",
        f"UPDATE customers SET name = '{name}' WHERE id = 2",
        f"INSERT INTO customers VALUES (5, '{name}')",
    )

    for step in ("dead-letter-file-written", "dead-letter-written", "sink-sent"):
        assert run(world, step) == -signal.SIGKILL, step
    assert run(world) == 0

    letters = world.feed.store.dead_letters.read(name)
    assert [(row.ordinal, row.state) for row in letters] == [
        (1, "dead"),
        (3, "dead"),
        (4, "waiting"),
    ]
    arrived = world.sink.arrived()
    assert (arrived if exactly_once else once(arrived)) == [1, 3, 5]

    world.feed.path.write_text(text)
    world.feed.store.dead_letters.redrive(name)
    for step in ("redrive-sent", "redrive-written"):
        assert run(world, step) == -signal.SIGKILL, step
    world.database.shop.execute("INSERT INTO customers VALUES (6, 'x')")
    assert run(world) == 0

    assert world.feed.store.dead_letters.read(name) == []
    arrived = world.sink.arrived()
    if exactly_once:
        assert arrived == [1, 3, 5, 2, 4, 2, 6]
    assert once(arrived) == [1, 3, 5, 2, 4, 6]
    assert world.checkpoint().notice is None
