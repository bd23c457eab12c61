"""The four primitives, the same over memory, SQLite and PostgreSQL."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from deltaforge_dagster.state.database.primitives import Kv, Log, Queue, Slot, Versioned
from deltaforge_dagster.state.store import StateStore
from tests.chance import examples


class TestKv:
    """Last write wins; expired is absent."""

    def test_put_get_delete(self, store: StateStore) -> None:
        """A key holds what was put last, until it is deleted; any bytes are kept."""
        kv = Kv(store.database, "fsm")
        assert kv.get("a") is None
        kv.put("a", b"one")
        kv.put("a", b"\x00\xff two")
        assert kv.get("a") == b"\x00\xff two"
        assert kv.delete("a")
        assert not kv.delete("a")
        assert kv.get("a") is None

    def test_prefix(self, store: StateStore) -> None:
        """A prefix is taken as it is: with its case, and without wildcards."""
        kv = Kv(store.database, "fsm")
        for key in ("a/1", "a/2", "A/3", "a_4", "b", "a%"):
            kv.put(key, key.encode())

        assert kv.items("a/") == {"a/1": b"a/1", "a/2": b"a/2"}
        assert list(kv.items("A")) == ["A/3"]
        assert list(kv.items("a%")) == ["a%"]
        assert list(kv.items()) == ["A/3", "a%", "a/1", "a/2", "a_4", "b"]

    def test_time_to_live(self, store: StateStore) -> None:
        """An expired key is absent everywhere, and a new put without a time keeps it for good."""
        kv = Kv(store.database, "leases")
        kv.put("gone", b"x", ttl=0.05)
        kv.put("kept", b"x", ttl=0.05)
        kv.put("kept", b"y")
        kv.put("long", b"z", ttl=60)
        assert set(kv.items()) >= {"kept", "long"}
        time.sleep(0.1)

        assert kv.get("gone") is None
        assert kv.items() == {"kept": b"y", "long": b"z"}
        assert kv.sweep() == 1
        assert kv.sweep() == 0
        kv.put("again", b"x", ttl=-1)
        assert not kv.delete("again")

    def test_namespaces(self, store: StateStore) -> None:
        """Namespaces do not see each other."""
        one, two = Kv(store.database, "one"), Kv(store.database, "two")
        one.put("key", b"1")

        assert two.get("key") is None
        assert two.items() == {}
        assert not two.delete("key")
        assert two.sweep() == 0


class TestLog:
    """Numbers increase over all logs, in the order of commits."""

    def test_append_and_list(self, store: StateStore) -> None:
        """Each key lists its own entries in order; numbers increase over keys and namespaces."""
        log, other = Log(store.database, "schemas"), Log(store.database, "history")
        numbers = [
            log.append("a", b"1"),
            log.append("b", b"2"),
            other.append("a", b"3"),
            log.append("a", b"4"),
        ]

        assert numbers == sorted(set(numbers))
        assert [(one.key, one.value) for one in log.entries("a")] == [("a", b"1"), ("a", b"4")]
        assert [one.value for one in log.entries()] == [b"1", b"2", b"4"]
        assert [one.seq for one in log.entries(after=numbers[0])] == [numbers[1], numbers[3]]
        assert log.entries("a", after=numbers[3]) == []
        assert log.entries()[0].ts == pytest.approx(store.now(), abs=60)

    def test_reader_that_follows_misses_nothing(self, store: StateStore) -> None:
        """Whoever remembers the last number sees every entry once, while others append."""
        log = Log(store.database, "history")

        def append() -> None:
            for _ in range(20):
                log.append("key", b"x")

        threads = [threading.Thread(target=append) for _ in range(3)]
        for thread in threads:
            thread.start()
        seen: list[int] = []
        while any(thread.is_alive() for thread in threads) or log.entries(after=max([0, *seen])):
            seen += [entry.seq for entry in log.entries(after=max([0, *seen]))]
        for thread in threads:
            thread.join()

        assert len(seen) == 60
        assert seen == [entry.seq for entry in log.entries()]


class TestSlot:
    """Versions from 1, one winner."""

    def test_versions(self, store: StateStore) -> None:
        """Each write raises the version; a swap needs the present one, 0 an empty slot."""
        slot = Slot(store.database, "snapshots")
        assert slot.get("a") is None
        assert not slot.compare_and_swap("a", 1, b"no")
        assert slot.compare_and_swap("a", 0, b"one")
        assert not slot.compare_and_swap("a", 0, b"no")
        assert slot.compare_and_swap("a", 1, b"two")
        assert not slot.compare_and_swap("a", 1, b"no")
        assert slot.upsert("a", b"three") == 3
        assert slot.get("a") == Versioned(3, b"three")
        assert slot.upsert("b", b"one") == 1

    @pytest.mark.parametrize("expected", [0, 1])
    def test_one_winner(self, store: StateStore, expected: int) -> None:
        """Of many threads that swap the same version exactly one wins."""
        slot = Slot(store.database, "snapshots")
        if expected:
            slot.upsert("a", b"first")
        start = threading.Barrier(6)
        won: list[int] = []

        def swap(number: int) -> None:
            start.wait()
            if slot.compare_and_swap("a", expected, str(number).encode()):
                won.append(number)

        threads = [threading.Thread(target=swap, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(won) == 1
        assert slot.get("a") == Versioned(expected + 1, str(won[0]).encode())


class TestQueue:
    """First in, first out."""

    def test_order(self, store: StateStore) -> None:
        """Items come in the order of pushing, and stay until they are acknowledged."""
        queue = Queue(store.database, "dlq")
        ids = [queue.push("a", str(number).encode()) for number in range(4)]
        other = queue.push("b", b"other")

        assert ids == sorted(set(ids))
        assert [item.value for item in queue.peek("a", 3)] == [b"0", b"1", b"2"]
        assert queue.length("a") == 4
        assert queue.ack("a", ids[1]) == 2
        assert [item.id for item in queue.peek("a", 9)] == ids[2:]
        assert queue.drop_oldest("a", 1) == 1
        assert queue.ack("a", other) == 1
        assert (queue.length("a"), queue.length("b")) == (0, 1)
        assert queue.drop_oldest("a", 5) == 0

    def test_ids_are_never_used_again(self, store: StateStore) -> None:
        """After the newest item is gone, the next one has a larger id still."""
        queue = Queue(store.database, "dlq")
        first = queue.push("a", b"1")
        queue.ack("a", first)

        assert queue.push("a", b"2") > first


KEYS = st.sampled_from(["a", "ab", "A", "b%"])
VALUES = st.binary(max_size=4)


class Primitives(RuleBasedStateMachine):
    """The primitives behave like a dict, lists and a counter, whatever is called in which order."""

    @initialize()
    def begin(self) -> None:
        """Start with an empty store."""
        self.store = StateStore.open("memory")
        database = self.store.database
        self.kv, self.log = Kv(database, "n"), Log(database, "n")
        self.slot, self.queue = Slot(database, "n"), Queue(database, "n")
        self.values: dict[str, bytes] = {}
        self.entries: list[tuple[int, str, bytes]] = []
        self.slots: dict[str, Versioned] = {}
        self.items: dict[str, list[tuple[int, bytes]]] = {}

    def teardown(self) -> None:
        """Close the store."""
        self.store.close()

    @rule(key=KEYS, value=VALUES)
    def put(self, key: str, value: bytes) -> None:
        """Put a key."""
        self.kv.put(key, value)
        self.values[key] = value

    @rule(key=KEYS)
    def expire(self, key: str) -> None:
        """Put a key that is over at once."""
        self.kv.put(key, b"expired", ttl=0)
        self.values.pop(key, None)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        """Delete a key."""
        assert self.kv.delete(key) == (self.values.pop(key, None) is not None)

    @rule(key=KEYS, value=VALUES)
    def append(self, key: str, value: bytes) -> None:
        """Append to a log."""
        seq = self.log.append(key, value)
        assert not self.entries or seq > self.entries[-1][0]
        self.entries.append((seq, key, value))

    @rule(key=KEYS, value=VALUES, expected=st.integers(0, 4))
    def swap(self, key: str, value: bytes, expected: int) -> None:
        """Compare and swap a slot."""
        version = self.slots[key].version if key in self.slots else 0
        assert self.slot.compare_and_swap(key, expected, value) == (version == expected)
        if version == expected:
            self.slots[key] = Versioned(version + 1, value)

    @rule(key=KEYS, value=VALUES)
    def push(self, key: str, value: bytes) -> None:
        """Push an item."""
        self.items.setdefault(key, []).append((self.queue.push(key, value), value))

    @rule(key=KEYS, n=st.integers(0, 3))
    def ack(self, key: str, n: int) -> None:
        """Acknowledge the n-th item and all before."""
        items = self.items.get(key, [])
        if n < len(items):
            assert self.queue.ack(key, items[n][0]) == n + 1
            del items[: n + 1]

    @rule(key=KEYS, n=st.integers(0, 3))
    def drop(self, key: str, n: int) -> None:
        """Drop the oldest items."""
        items = self.items.get(key, [])
        assert self.queue.drop_oldest(key, n) == min(n, len(items))
        del items[:n]

    @invariant()
    def agrees(self) -> None:
        """Every read agrees with the model."""
        assert self.kv.items() == dict(sorted(self.values.items()))
        assert [(one.seq, one.key, one.value) for one in self.log.entries()] == self.entries
        for key in ("a", "ab", "A", "b%"):
            assert self.kv.get(key) == self.values.get(key)
            assert self.slot.get(key) == self.slots.get(key)
            items = self.items.get(key, [])
            assert [(one.id, one.value) for one in self.queue.peek(key, 99)] == items
            assert self.queue.length(key) == len(items)


TestPrimitivesModel = Primitives.TestCase
TestPrimitivesModel.settings = settings(max_examples=examples(15), stateful_step_count=15)
