"""Contract tests of sinks, as test classes to subclass.

They test what every sink that gets messages promises a deliverer::

    class TestCsv(SinkContract):
        @pytest.fixture
        def subject(self, tmp_path: Path) -> Iterator[Subject]:
            sink = CsvSink(...)
            sink.open()
            yield Subject(sink, ...)
            sink.close()

A sink that stores its own position also passes `ExactlyOnceContract`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa
import pytest

from deltaforge_dagster.errors import LeaseLost, PositionMoved, SinkUnavailable
from deltaforge_dagster.sinks.base import MESSAGES, Origin, Sink, SinkBatch

ORIGIN = Origin(
    pipeline="shop",
    uid="uid-1",
    incarnation="lineage-1",
    source="orders-db",
    start='{"lsn": "0/10"}',
    end='{"lsn": "0/20"}',
    rows=100_000,
)
"""Origin of the batches for a sink that stores its own position."""


def messages(
    rows: list[tuple[str, str]],
    *,
    first: int = 0,
    each: int = 1,
    replay: str | None = None,
    origin: Origin | None = None,
) -> SinkBatch:
    """Return a batch with a message for each (destination, value).

    `each` consecutive messages belong to one change. Every third ordinal is missing, as if the
    sink's filter had removed that change.
    """
    columns = [
        {
            "ordinal": (first + number) // each * 3 // 2,
            "destination": destination,
            "key": f"k{number % 7}",
            "value": value,
            "event_id": f"e{first + number}",
            "idempotency_key": f"i{first + number}",
            "headers": None,
        }
        for number, (destination, value) in enumerate(rows)
    ]
    rows_of_segment = pa.RecordBatch.from_pylist(columns, schema=MESSAGES)
    return SinkBatch(1, "5e9", rows_of_segment, replay, origin)


def allow() -> None:
    """Allow every send; used as a guard."""


def refuse_from(call: int, error: Exception) -> tuple[Callable[[], None], list[int]]:
    """Return a guard that raises from its `call`-th call on, and a list with an entry per call."""
    calls: list[int] = []

    def guard() -> None:
        calls.append(len(calls) + 1)
        if calls[-1] >= call:
            raise error

    return guard, calls


@dataclass(frozen=True)
class Subject:
    """A sink, and how a consumer sees what it delivered.

    Attributes:
        sink: The sink; not open.
        another: Makes a second sink with the same configuration, as another process would.
        destination: Returns the destination for a short name.
        delivered: Returns the values at a destination, in order.
        replayed: Returns the values that replay `r1` delivered to a destination, in order.
    """

    sink: Sink
    another: Callable[[], Sink]
    destination: Callable[[str], str]
    delivered: Callable[[str], list[str]]
    replayed: Callable[[str], list[str]]

    def rows(self, values: list[str], *names: str) -> list[tuple[str, str]]:
        """Return messages with these values, distributed in turn over the named destinations."""
        destinations = [self.destination(name) for name in names or ("a",)]
        return list(zip(itertools.cycle(destinations), values, strict=False))


def numbered(count: int, size: int = 1) -> list[str]:
    """Return numbered JSON values of at least `size` characters."""
    return [f'{{"n":{n},"pad":"{"x" * size}"}}' for n in range(count)]


class SinkContract:
    """The promises of every sink; needs a fixture `subject`, a `Subject` whose sink is open."""

    @pytest.mark.parametrize("count", [1, 2, 7000])
    def test_everything_arrives_in_order(self, subject: Subject, count: int) -> None:
        """Each destination has all of its values in order, and the last ordinal is acknowledged."""
        values = numbered(count)
        batch = messages(subject.rows(values, "a", "b", "c"), first=10)

        acknowledged = subject.sink.send(batch, allow)

        assert batch.messages.column("ordinal")[-1].as_py() == acknowledged
        for turn, name in enumerate("abc"):
            assert values[turn::3] == subject.delivered(name)

    def test_values_are_untouched(self, subject: Subject) -> None:
        """Any text without a line break arrives as it is: empty, large, beyond ASCII."""
        values = ["", "ä€🜁", "a\tb\\n", "\x7f", "x" * 3_000_000, '{"n":1.10}']

        subject.sink.send(messages(subject.rows(values)), allow)

        assert values == subject.delivered("a")

    def test_guard_refuses_at_once(self, subject: Subject) -> None:
        """If the guard raises before the first send, nothing leaves the process."""
        guard, _ = refuse_from(1, LeaseLost("gone"))

        with pytest.raises(LeaseLost):
            subject.sink.send(messages(subject.rows(numbered(100))), guard)

        assert subject.delivered("a") == []

    def test_guard_refuses_on_the_way(self, subject: Subject) -> None:
        """The guard is called repeatedly for a large batch; nothing is sent once it has raised."""
        values = numbered(20_000, size=1000)
        guard, calls = refuse_from(2, LeaseLost("gone"))

        with pytest.raises(LeaseLost):
            subject.sink.send(messages(subject.rows(values)), guard)
        arrived = subject.delivered("a")
        time.sleep(0.1)

        assert len(calls) == 2
        assert 0 < len(arrived) < len(values)
        assert values[: len(arrived)] == arrived == subject.delivered("a")

    def test_goes_on_after_a_guard_refused(self, subject: Subject) -> None:
        """The same sink can send again after its guard raised."""
        values = numbered(10)
        with pytest.raises(LeaseLost):
            subject.sink.send(messages(subject.rows(values)), refuse_from(1, LeaseLost("gone"))[0])

        subject.sink.send(messages(subject.rows(values)), allow)

        assert values == subject.delivered("a")

    def test_reopen_after_close(self, subject: Subject) -> None:
        """A closed sink can be opened again and continues after what it delivered."""
        values = numbered(20)

        for first, part in ((0, values[:10]), (10, values[10:])):
            subject.sink.open()
            subject.sink.send(messages(subject.rows(part), first=first), allow)
            subject.sink.close()

        assert values == subject.delivered("a")

    def test_close_twice(self, subject: Subject) -> None:
        """Closing twice is safe."""
        subject.sink.close()
        subject.sink.close()

    def test_nothing_is_sent_after_close(self, subject: Subject) -> None:
        """A closed sink raises the retryable `SinkUnavailable` and sends nothing."""
        subject.sink.close()

        with pytest.raises(SinkUnavailable, match=r"subject.*closed"):
            subject.sink.send(messages(subject.rows(numbered(3))), allow)

        assert subject.delivered("a") == []

    def test_close_during_a_send(self, subject: Subject) -> None:
        """Closing ends a send by another thread: a prefix has arrived, and nothing follows."""
        values = numbered(20_000, size=1000)
        batch = messages(subject.rows(values))
        sending = threading.Event()
        closed = threading.Event()
        errors: list[Exception] = []

        def guard() -> None:
            if sending.is_set():
                closed.wait(60)  # the second piece: closed in the middle
            sending.set()

        def work() -> None:
            try:
                subject.sink.send(batch, guard)
            except SinkUnavailable as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        assert sending.wait(60)
        subject.sink.close()
        closed.set()
        thread.join(60)
        arrived = subject.delivered("a")

        assert (thread.is_alive(), len(errors)) == (False, 1)
        assert values[: len(arrived)] == arrived
        assert len(arrived) < len(values)

    def test_replay_is_marked(self, subject: Subject) -> None:
        """A replay can be distinguished from live delivery, and its values are byte-identical."""
        values = [*numbered(5), '{"name":"ä"}']
        subject.sink.send(messages(subject.rows(values)), allow)

        subject.sink.send(messages(subject.rows(values), replay="r1"), allow)

        assert (values, values) == (subject.delivered("a"), subject.replayed("a"))

    def test_position_is_optional(self, subject: Subject) -> None:
        """A batch without an origin stores no position, whatever the kind of sink."""
        before = subject.sink.position()
        subject.sink.send(messages(subject.rows(numbered(3))), allow)

        assert (before, subject.sink.position()) == (None, None)


class ExactlyOnceContract:
    """What a sink that stores its own position promises in addition.

    The tests need a fixture `exact`, like `subject`.
    """

    def test_position_is_that_of_the_last_message(self, exact: Subject) -> None:
        """Reopening the sink returns the origin and place of the last message that arrived."""
        assert exact.sink.position() is None
        first = messages(exact.rows(numbered(7000, size=300), "a", "b"), origin=ORIGIN)
        second = messages(exact.rows(numbered(1), "c"), first=7000, origin=ORIGIN)

        for batch, last in ((first, 6999), (second, 0)):
            exact.sink.send(batch, allow)
            exact.sink.close()
            exact.sink.open()
            assert exact.sink.position() == batch.position_at(last)
        assert second.position_at(0).event_id == "e7000"

    def test_parts_that_are_sent_at_once(self, exact: Subject) -> None:
        """A sink that takes parts sends earlier ones before the last; others get one by one."""
        values = numbered(30)
        rows = exact.rows(values)
        batches = [messages(rows[n : n + 10], first=n, origin=ORIGIN) for n in range(0, 30, 10)]
        last = batches[-1]
        if exact.sink.takes_parts:
            earlier = tuple(batch.messages for batch in batches[:-1])
            batches = [replace(last, earlier=earlier)]

        acknowledged = [exact.sink.send(batch, allow) for batch in batches]

        assert acknowledged[-1] == last.messages.column("ordinal")[-1].as_py()
        assert values == exact.delivered("a")
        assert exact.sink.position() == last.position_at(9)

    def test_a_replay_leaves_the_position(self, exact: Subject) -> None:
        """A replay, even beside a live sender, moves no position and does not stop that sender."""
        live = messages(exact.rows(numbered(3)), origin=ORIGIN)
        more = messages(exact.rows(numbered(3)), first=3, origin=ORIGIN)
        other = exact.another()
        other.open()
        exact.sink.send(live, allow)

        other.send(messages(exact.rows(numbered(9000, size=300)), replay="r1"), allow)
        exact.sink.send(more, allow)
        other.send(messages(exact.rows(numbered(1)), first=9000, replay="r1"), allow)
        exact.sink.send(messages(exact.rows(numbered(1)), first=9001, replay="r1"), allow)
        other.close()

        assert exact.sink.position() == more.position_at(2)
        assert exact.delivered("a") == numbered(3) * 2
        assert len(exact.replayed("a")) == 9002

    def test_another_sender_is_noticed(self, exact: Subject) -> None:
        """If another sender has moved the position, a sender stores nothing until it rereads it."""
        stalled = exact.another()
        stalled.open()
        assert (stalled.position(), exact.sink.position()) == (None, None)
        exact.sink.send(messages(exact.rows(numbered(3)), origin=ORIGIN), allow)

        for _ in range(2):
            with pytest.raises(PositionMoved):
                stalled.send(messages(exact.rows(numbered(9000, size=300)), origin=ORIGIN), allow)
        assert exact.delivered("a") == numbered(3)
        stalled.close()
        stalled.open()
        assert stalled.position() == messages(exact.rows(numbered(3)), origin=ORIGIN).position_at(2)
        stalled.send(messages(exact.rows(numbered(3)), first=3, origin=ORIGIN), allow)
        stalled.close()

        assert exact.delivered("a") == numbered(3) * 2
        with pytest.raises(PositionMoved):
            exact.sink.send(messages(exact.rows(numbered(3)), first=3, origin=ORIGIN), allow)

    def test_position_says_which_prefix_arrived(self, exact: Subject) -> None:
        """If a send stops midway, the position is that of the last change that arrived in full."""
        values = numbered(20_000, size=1000)
        batch = messages(exact.rows(values), each=4, origin=ORIGIN)
        with pytest.raises(LeaseLost):
            exact.sink.send(batch, refuse_from(3, LeaseLost("gone"))[0])

        exact.sink.close()
        exact.sink.open()

        arrived = exact.delivered("a")
        position = exact.sink.position()
        assert values[: len(arrived)] == arrived
        assert position == (batch.position_at(len(arrived) - 1) if arrived else None)
        assert len(arrived) % 4 == 0
