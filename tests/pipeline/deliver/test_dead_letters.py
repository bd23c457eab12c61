"""Dead letters in real runs: from PostgreSQL to Redis and from MySQL to Kafka, seen from the sink.

What cannot be delivered is too large for the server, or does not say where it goes.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest
import redis
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from deltaforge_dagster.state.records import DeadLetterRow
from tests.e2e.conftest import shop
from tests.pipeline.changes import eventually
from tests.pipeline.ends import KafkaTopic, RedisStream
from tests.pipeline.test_exactly_once import (
    BOTH,
    CELLS,
    ENDS,
    MakeWorld,
    World,
    make_world,
    numbers,
    once,
)

__all__ = ["make_world", "shop"]

pytestmark = pytest.mark.spark

TO_REDIS = pytest.mark.parametrize("ends", ENDS[:1])

LIMITS = {RedisStream: 1 << 20, KafkaTopic: 20_000}
"""Bytes that the server takes, until its limit is raised; the lowest that there is for Redis."""


def large(world: World) -> str:
    """Return a name that is too large, however well it is compressed."""
    return secrets.token_urlsafe(LIMITS[type(world.sink)] + 10_000)


def limit(world: World, *, raised: bool) -> None:
    """Let the sink's server take messages of so many bytes."""
    sink = world.sink
    size = 8 << 20 if raised else LIMITS[type(sink)]
    if isinstance(sink, RedisStream):
        client = redis.Redis.from_url(sink._server.uri)
        client.config_set("proto-max-bulk-len", size)
        client.close()
        return
    assert isinstance(sink, KafkaTopic)
    entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, sink._topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": sink._server.brokers})  # requests end with it
    (done,) = admin.incremental_alter_configs([resource]).values()
    done.result(60)

    def known() -> bool:  # the controller answers before the broker has heard of it
        asked = ConfigResource(ConfigResource.Type.TOPIC, sink._topic)
        (found,) = admin.describe_configs([asked]).values()
        return bool(found.result(60)["max.message.bytes"].value == str(size))

    eventually(known)


def configure(world: World, journal: str, *, hold_key: bool = False) -> None:
    """Give the pipeline a queue."""
    text = world.text.replace("  engine:\n", f"  journal: {journal}\n  engine:\n")
    if hold_key:
        text = text.replace("  engine:\n", "  engine:\n    dlq: {hold_key: true}\n")
    world.text = text
    world.feed.path.write_text(text)
    limit(world, raised=False)


def insert(world: World, *rows: tuple[int, str]) -> None:
    """Insert customers in one transaction."""
    values = ", ".join(f"({number}, '{name}')" for number, name in rows)
    world.database.shop.execute(f"INSERT INTO customers VALUES {values}")


def letters(world: World) -> list[DeadLetterRow]:
    """Return the queue."""
    return world.feed.store.dead_letters.read(world.name)


def fates(world: World) -> dict[str, list[int]]:
    """Return what the first segment has of changes that the sink never got."""
    found = world.feed.store.undelivered.read(world.name, 1).get("sink", {})
    return {fate: [one for run in runs for one in run] for fate, runs in found.items()}


def shown(row: DeadLetterRow) -> dict[str, Any]:
    """Return the event of an entry."""
    event: dict[str, Any] = json.loads(row.event)
    return event


@CELLS
def test_a_change_that_is_too_large(make_world: MakeWorld, exactly_once: bool) -> None:
    """It goes to the queue, the others pass in order; once the limit is raised it arrives, whole."""
    world = make_world(exactly_once=exactly_once)
    configure(world, "{enabled: true, max_event_bytes: 9000}")
    insert(world, (1, "a"), (2, large(world)), (3, "b"), (4, large(world)))
    insert(world, (5, "c"))
    outcome = world.feed.catch_up()

    assert outcome.sink_errors == {}
    assert once(world.sink.arrived()) == [1, 3, 5]
    if exactly_once:
        assert world.sink.arrived() == [1, 3, 5]
    two, four = letters(world)
    assert (two.sink, two.state, two.error_kind, two.attempts) == ("sink", "dead", "too_large", 1)
    assert (two.payload_truncated, four.payload_truncated) == (True, True)
    assert shown(two)["after"].startswith("<truncated: original payload exceeded 9000 bytes>")
    assert shown(two)["event_id"] == two.event_id

    before = world.sink.position()
    limit(world, raised=True)
    assert world.feed.store.dead_letters.redrive(world.name) == 2
    outcome = world.feed.catch_up()

    assert outcome.sink_errors == {}
    assert letters(world) == []
    assert once(world.sink.arrived()) == [1, 3, 5, 2, 4]
    insert(world, (6, "d"))
    world.feed.catch_up()
    assert once(world.sink.arrived()) == [1, 3, 5, 2, 4, 6]
    if exactly_once:
        assert len(world.sink.arrived()) == 6
    assert before is None or exactly_once
    assert world.checkpoint().notice is None


@CELLS
def test_a_key_waits(make_world: MakeWorld, exactly_once: bool) -> None:
    """Later changes of the same row wait behind it, also under another key; the others pass.

    Re-driven, they arrive in their order, and after them what has come meanwhile.
    """
    world = make_world(exactly_once=exactly_once)
    configure(world, "{enabled: true, max_event_bytes: 9000}", hold_key=True)
    insert(world, (1, "a"), (2, "b"))
    world.feed.catch_up()
    run = world.database.shop.execute
    run(f"UPDATE customers SET name = '{large(world)}' WHERE id = 2")
    world.feed.catch_up()
    run("UPDATE customers SET name = 'c' WHERE id = 2", "UPDATE customers SET id = 5 WHERE id = 2")
    run(
        "UPDATE customers SET name = 'd' WHERE id = 5",
        "UPDATE customers SET name = 'e' WHERE id = 1",
    )
    insert(world, (2, "again"), (3, "f"))
    assert world.feed.catch_up().sink_errors == {}

    assert world.sink.arrived() == [1, 2, 1, 3]
    states = [(row.state, row.error_kind, row.attempts) for row in letters(world)]
    assert states == [("dead", "too_large", 1), *[("waiting", "waiting", 0)] * 4]
    world.feed.catch_up()
    assert world.sink.arrived() == [1, 2, 1, 3]

    limit(world, raised=True)
    world.feed.store.dead_letters.redrive(world.name)
    run("UPDATE customers SET name = 'g' WHERE id = 5")
    assert world.feed.catch_up().sink_errors == {}

    assert letters(world) == []
    assert world.sink.arrived() == [1, 2, 1, 3, 2, 2, 5, 5, 2, 5]
    run("UPDATE customers SET name = 'h' WHERE id = 5")
    world.feed.catch_up()
    assert world.sink.arrived()[-2:] == [5, 5]


@TO_REDIS
@BOTH
def test_what_does_not_say_where_it_goes(make_world: MakeWorld, exactly_once: bool) -> None:
    """Found in bulk; re-driven by the file of today, each key in order; what still fails stays."""
    world = make_world(exactly_once=exactly_once)
    topic = "topic: " if isinstance(world.sink, KafkaTopic) else "stream: "
    world.text = world.text.replace(topic + world.name, topic + '"${after.name}"')
    configure(world, "{enabled: true}")
    values = ", ".join(f"({n}, NULL)" for n in numbers(1, 2500))
    world.database.shop.execute(f"INSERT INTO customers VALUES {values}")
    insert(world, (3000, world.name))
    assert world.feed.catch_up().sink_errors == {}

    assert world.sink.arrived() == [3000]
    found = letters(world)
    assert len(found) == 2500
    assert {(row.error_kind, row.state) for row in found} == {("routing", "dead")}
    assert "${after.name} in '${after.name}' has no value" in found[7].error_message
    assert [shown(row)["after"]["id"] for row in found] == numbers(1, 2500)

    world.feed.store.dead_letters.redrive(world.name, seqs=[row.seq for row in found[:700]])
    world.feed.catch_up()
    assert [row.attempts for row in letters(world)] == [2] * 700 + [1] * 1800
    assert world.sink.arrived() == [3000]

    world.text = world.text.replace(topic + '"${after.name}"', topic + world.name)
    world.feed.path.write_text(world.text)
    world.feed.store.dead_letters.redrive(world.name)
    insert(world, (3001, "x"))
    assert world.feed.catch_up().sink_errors == {}
    assert letters(world) == []
    arrived = world.sink.arrived()
    assert sorted(arrived) == [*numbers(1, 2500), 3000, 3001]
    assert [one for one in arrived if one <= 2500] == numbers(1, 2500)


@TO_REDIS
def test_a_full_queue_blocks(make_world: MakeWorld) -> None:
    """The sink waits with a clear error, having sent all before; when there is room it goes on."""
    world = make_world()
    configure(world, "{enabled: true, dlq: {max_entries: 2}, max_event_bytes: 9000000}")
    insert(world, (1, "a"), (2, large(world)), (3, "b"), (4, large(world)), (5, "c"))
    insert(world, (6, large(world)), (7, "d"))
    outcome = world.feed.catch_up()

    assert world.sink.arrived() == [1, 3, 5]
    assert "the dead letters of" in outcome.sink_errors["sink"]
    assert "are full (2 entries)" in outcome.sink_errors["sink"]
    first, _ = letters(world)
    world.feed.store.dead_letters.remove(world.name, seqs=[first.seq])
    assert world.feed.catch_up().sink_errors == {}
    assert world.sink.arrived() == [1, 3, 5, 7]
    assert [shown(row)["after"]["id"] for row in letters(world)] == [4, 6]
    assert fates(world) == {"acknowledged": [first.ordinal]}

    world.reset(0)
    limit(world, raised=True)
    assert world.feed.catch_up().sink_errors == {}
    assert world.sink.arrived() == [1, 3, 5, 7, 1, 2, 3, 5, 7]
    assert fates(world) == {}


@TO_REDIS
@pytest.mark.parametrize("policy", ["drop_oldest", "reject"])
def test_a_full_queue_that_costs_dead_letters(make_world: MakeWorld, policy: str) -> None:
    """The sink never waits: the oldest or the new ones are lost, and counted.

    A change behind one that was lost is not: it arrives, as all others do, in the order of its key.
    """
    world = make_world()
    limits = f"dlq: {{max_entries: 2, overflow_policy: {policy}}}, max_event_bytes: 9000000"
    configure(world, f"{{enabled: true, {limits}}}", hold_key=True)
    insert(world, (1, large(world)), (2, large(world)), (3, "a"), (4, large(world)))
    world.database.shop.execute("UPDATE customers SET name = 'small' WHERE id = 4")
    insert(world, (5, "b"))

    first, second = world.feed.catch_up(), world.feed.catch_up()

    assert (first.sink_errors, second.sink_errors) == ({}, {})
    arrived, left = world.sink.arrived(), [shown(row)["after"]["id"] for row in letters(world)]
    lost = world.feed.store.dead_letters.depth(world.name)
    if policy == "reject":
        assert (sorted(arrived), left) == ([3, 4, 5], [1, 2])
        assert (lost.rejected, lost.evicted) == (1, 0)
    else:
        assert (arrived, left) == ([3, 5], [4, 4])
        assert (lost.rejected, lost.evicted) == (0, 2)


@TO_REDIS
def test_without_a_queue_it_blocks(make_world: MakeWorld) -> None:
    """The sink stops there, names the change, and says what would let the others pass."""
    world = make_world()
    limit(world, raised=False)
    insert(world, (1, "a"), (2, large(world)), (3, "b"))
    error = world.feed.catch_up().sink_errors["sink"]

    assert "segment 1, ordinal 1" in error
    assert "set spec.journal.enabled: true" in error
    assert world.sink.arrived() == [1]
    assert letters(world) == []
    limit(world, raised=True)
    assert world.feed.catch_up().sink_errors == {}
    assert world.sink.arrived() == [1, 2, 3]


@TO_REDIS
def test_a_sink_that_is_set_back(make_world: MakeWorld) -> None:
    """What is in the queue stays there, though it could be delivered now; the rest comes again."""
    world = make_world()
    configure(world, "{enabled: true, max_event_bytes: 9000}", hold_key=True)
    insert(world, (1, "a"), (2, large(world)), (3, "b"))
    world.database.shop.execute("UPDATE customers SET name = 'c' WHERE id = 2")
    world.feed.catch_up()
    before = letters(world)
    limit(world, raised=True)

    world.reset(0)
    assert world.feed.catch_up().sink_errors == {}
    assert world.sink.arrived() == [1, 3, 1, 3]
    assert letters(world) == before

    world.feed.store.dead_letters.redrive(world.name)
    world.feed.catch_up()
    assert world.sink.arrived() == [1, 3, 1, 3, 2, 2]


@TO_REDIS
def test_what_was_kept_is_lost(make_world: MakeWorld) -> None:
    """An entry whose file is damaged says so and waits for a person; nothing else stops."""
    world = make_world()
    configure(world, "{enabled: true, max_event_bytes: 9000}")
    insert(world, (1, large(world)), (2, "a"))
    world.feed.catch_up()
    (letter,) = letters(world)
    file = world.home / "journal" / letter.path
    file.chmod(0o600)
    file.write_bytes(file.read_bytes()[:-1] + b"x")

    world.feed.store.dead_letters.redrive(world.name)
    insert(world, (3, "b"))
    assert world.feed.catch_up().sink_errors == {}
    assert world.sink.arrived() == [2, 3]
    (letter,) = letters(world)
    assert (letter.state, letter.attempts) == ("dead", 2)
    assert "checksum differs" in letter.error_message
