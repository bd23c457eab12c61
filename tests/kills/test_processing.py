"""Runs killed while processors run over the journal, and right after."""

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

PROCESSORS = """\
  processors:
    - type: javascript
      id: double
      limits: {cpu_ms: 5000, timeout_ms: 30000}
      inline: "(e) => e.after.id % 3 ? [e, {...e, tags: [`${Math.random()}`]}] : []"
"""


@BOTH
def test_the_chain_counts_once(make_world: MakeWorld, exactly_once: bool) -> None:
    """Killed before and after the note: rows dropped, copied and kept arrive in order.

    Exactly once nothing arrives twice, whatever the first try of the chain had made.
    """
    world = make_world(exactly_once=exactly_once)
    world.feed.path.write_text(world.text.replace("  sinks:", f"{PROCESSORS}  sinks:", 1))
    world.database.shop.execute("INSERT INTO customers SELECT n, 'x' FROM generate_series(1, 7) n")

    for step in ("processed-file-written", "processed-noted", "sink-sent"):
        assert run(world, step) == -signal.SIGKILL, step
    assert run(world) == 0

    arrived = world.sink.arrived()
    expected = [1, 1, 2, 2, 4, 4, 5, 5, 7, 7]
    if exactly_once:
        assert arrived == expected
    assert once(arrived) == once(expected)
    assert arrived[-2:] == [7, 7]
