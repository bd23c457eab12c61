"""The position that a NATS sink keeps in its messages, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace

import pytest

from deltaforge_dagster.errors import (
    PositionMoved,
    SinkRejected,
    SinkUnavailable,
    Undeliverable,
)
from deltaforge_dagster.sinks.base import SinkBatch
from deltaforge_dagster.sinks.nats import session
from deltaforge_dagster.sinks.nats.link import Login, NatsLink, addresses
from deltaforge_dagster.sinks.nats.pack import Packer, PositionHeader
from deltaforge_dagster.sinks.nats.sink import NatsSink
from deltaforge_dagster.testing.sinks import ORIGIN
from deltaforge_lab.servers.nats import NatsServer
from tests.fix_nats import Admin
from tests.sinks.nats_messages import MakeSink, allow, amid, batch, kernels, numbered, opened, row

__all__ = ["kernels"]

pytestmark = pytest.mark.nats


@pytest.fixture
def make_sink(nats_server: NatsServer, nats_stream: str) -> Iterator[MakeSink]:
    """Open a sink that delivers exactly once to the test's stream."""
    yield from opened(nats_server, nats_stream, exactly_once=True)


def values(admin: Admin, stream: str, subject: str = ">") -> list[int]:
    """Return the numbers in a stream."""
    return [int(one) for one in admin.values(stream, subject)]


@pytest.mark.parametrize("room", [1, 2, 1999, 2000, 2001, 2457, 4001])
def test_wherever_it_stops(
    make_sink: MakeSink, nats_admin: Admin, nats_stream: str, room: int
) -> None:
    """The position is exactly that of the last message that was stored, first, middle or last."""
    nats_admin.change(nats_stream, max_msgs=room, discard="new")
    messages = numbered(f"{nats_stream}.a", 5000, origin=ORIGIN)
    with pytest.raises(SinkUnavailable):
        make_sink().send(messages, allow)

    assert make_sink().position() == messages.position_at(room - 1)


def changes(subject: str) -> SinkBatch:
    """Return changes of which some are two or three messages."""
    ordinals = [0, 0, 1, 2, 2, 2, 3, 4, 4]
    rows = [
        row(n, subject, ordinal=ordinal, value=str(n), change_id=f"c{ordinal}")
        for n, ordinal in enumerate(ordinals)
    ]
    return batch(rows, origin=replace(ORIGIN, rows=5))


@pytest.mark.parametrize("room", range(1, 9))
def test_in_the_middle_of_a_change(
    make_sink: MakeSink, nats_admin: Admin, nats_stream: str, room: int
) -> None:
    """A change that arrived in part does not count, and only its other part is sent again."""
    nats_admin.change(nats_stream, max_msgs=room, discard="new")
    whole = changes(f"{nats_stream}.a")
    ordinals = whole.messages.column("ordinal").to_pylist()
    with pytest.raises(SinkUnavailable):
        make_sink().send(whole, allow)
    complete = [n for n in range(room) if n + 1 == len(ordinals) or ordinals[n + 1] != ordinals[n]]
    sink = make_sink()
    found = sink.position()
    start = complete[-1] + 1 if complete else 0

    assert found == (whole.position_at(complete[-1]) if complete else None)
    nats_admin.change(nats_stream, max_msgs=-1)
    sink.send(replace(whole, messages=whole.messages.slice(start)), allow)
    assert values(nats_admin, nats_stream) == list(range(9))
    assert make_sink().position() == whole.position_at(8)
    assert whole.position_at(8).start == ORIGIN.end


def test_a_replay_between(make_sink: MakeSink, nats_admin: Admin, nats_stream: str) -> None:
    """A replay that ran when a change had arrived in part hides neither position nor part."""
    nats_admin.change(nats_stream, max_msgs=5, discard="new")
    whole = changes(f"{nats_stream}.a")
    with pytest.raises(SinkUnavailable):
        make_sink().send(whole, allow)
    nats_admin.change(nats_stream, max_msgs=-1)
    replay = batch([row(n, f"{nats_stream}.a", value="-1") for n in range(3)], replay="r1")
    make_sink().send(replay, allow)
    sink = make_sink()

    assert sink.position() == whole.position_at(2)
    sink.send(replace(whole, messages=whole.messages.slice(3)), allow)
    assert [one for one in values(nats_admin, nats_stream) if one >= 0] == list(range(9))


def test_another_publisher_is_refused(
    make_sink: MakeSink, nats_admin: Admin, nats_stream: str
) -> None:
    """Somebody else on the sink's subjects is named; on other subjects of the stream nobody minds."""
    sink = make_sink(pattern=f"{nats_stream}.mine.>")
    sink.send(numbered(f"{nats_stream}.mine.a", 10, origin=ORIGIN), allow)
    nats_admin.request(f"{nats_stream}.other", b"1")
    sink.send(numbered(f"{nats_stream}.mine.a", 10, 10, origin=ORIGIN), allow)
    nats_admin.request(f"{nats_stream}.mine.b", b"1")

    with pytest.raises(PositionMoved):
        sink.send(numbered(f"{nats_stream}.mine.a", 10, 20, origin=ORIGIN), allow)
    sink.close()
    sink.open()
    with pytest.raises(SinkRejected, match="another publisher's"):
        sink.position()
    # What a checkpoint that overrules does: it sends all the same.
    sink.send(numbered(f"{nats_stream}.mine.a", 10, 20, origin=ORIGIN), allow)
    assert values(nats_admin, nats_stream, f"{nats_stream}.mine.a") == list(range(30))


def test_from_at_least_once(make_sink: MakeSink, nats_admin: Admin, nats_stream: str) -> None:
    """What was sent at least once before says no position, and is gone on after."""
    make_sink(exactly_once=False).send(numbered(f"{nats_stream}.a", 10), allow)
    sink = make_sink()

    assert sink.position() is None
    more = numbered(f"{nats_stream}.a", 10, 10, origin=ORIGIN)
    sink.send(more, allow)
    assert sink.position() == more.position_at(9)


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("every", [1, 100])
def test_a_lost_connection_delivers_amid_a_block(
    nats_server: NatsServer,
    nats_admin: Admin,
    nats_stream: str,
    make_sink: MakeSink,
    *,
    every: int,
    before: int,
) -> None:
    """What an earlier connection sent is stored late, so the next one's are duplicates, and behind them are not.

    Nothing is stored twice, and the position is that of the last message. Where each message is answered, the sink notices.
    """
    whole = numbered(f"{nats_stream}.a", 20, origin=ORIGIN)
    late = Packer(whole.messages, "|sink", "_INBOX.lost").pack(
        0,
        10,
        1,
        first={"Nats-Expected-Last-Subject-Sequence": "0"},
        marks={},
        keeping=PositionHeader(lambda row: whole.position_at(row).to_json(), None),
    )

    def deliver_late(deadline: float) -> None:
        nats_admin.await_messages(nats_stream, 1 + before)
        with closing(
            NatsLink("lost", addresses("lost", nats_server.url)[0], "lost", 60, 60)
        ) as lost:
            lost.connect(Login())
            lost.transmit(late.data, deadline)
            nats_admin.await_messages(nats_stream, 10)

    noticed = pytest.raises(PositionMoved) if every == 1 else nullcontext()
    with (
        pytest.MonkeyPatch.context() as patch,
        amid(1, before, deliver_late),
        noticed,
    ):
        patch.setattr(session, "_ANSWER_INTERVAL", every)
        make_sink().send(whole, allow)

    assert values(nats_admin, nats_stream) == list(range(20))
    assert make_sink().position() == whole.position_at(19)


def test_a_reset_is_stored_whole(make_sink: MakeSink, nats_admin: Admin, nats_stream: str) -> None:
    """Another lineage sends the same again inside the duplicate window: nothing is dropped."""
    messages = numbered(f"{nats_stream}.a", 3000, origin=ORIGIN)
    make_sink().send(messages, allow)
    again = replace(messages, origin=replace(ORIGIN, incarnation="another"))
    sink = make_sink()
    sink.position()
    sink.send(again, allow)

    assert values(nats_admin, nats_stream) == list(range(3000)) * 2
    assert sink.position() == again.position_at(2999)


@pytest.mark.parametrize("loss", ["recreated", "restored"])
def test_a_loss_is_noticed(
    make_sink: MakeSink, nats_admin: Admin, nats_stream: str, loss: str
) -> None:
    """A stream that is not what the sink left takes nothing before the position is read again."""
    sink = make_sink()
    sent = numbered(f"{nats_stream}.a", 100, origin=ORIGIN)
    sink.send(sent, allow)
    nats_admin.delete(nats_stream)
    nats_admin.make(nats_stream, f"{nats_stream}.>")
    kept = 50 if loss == "restored" else 0
    if kept:
        make_sink().send(replace(sent, messages=sent.messages.slice(0, kept)), allow)

    with pytest.raises(PositionMoved):
        sink.send(numbered(f"{nats_stream}.a", 10, 100, origin=ORIGIN), allow)
    sink.close()
    sink.open()
    assert sink.position() == (sent.position_at(kept - 1) if kept else None)
    sink.send(numbered(f"{nats_stream}.a", 110 - kept, kept, origin=ORIGIN), allow)
    assert values(nats_admin, nats_stream) == list(range(110))


def test_a_purge_is_no_loss(make_sink: MakeSink, nats_admin: Admin, nats_stream: str) -> None:
    """Who empties a stream under a sender does not get everything again; the position goes on."""
    sink = make_sink()
    sink.send(numbered(f"{nats_stream}.a", 100, origin=ORIGIN), allow)
    nats_admin.purge(nats_stream)
    assert make_sink().position() is None
    more = numbered(f"{nats_stream}.a", 10, 100, origin=ORIGIN)
    sink.send(more, allow)

    assert values(nats_admin, nats_stream) == list(range(100, 110))
    assert make_sink().position() == more.position_at(9)


def test_no_position_at_all(make_sink: MakeSink, nats_admin: Admin, nats_stream: str) -> None:
    """A header that is none is said, with its place."""
    headers = {"Nats-Msg-Id": "x|sink", "df-position": "{}"}
    nats_admin.request(f"{nats_stream}.a", b"", headers)

    with pytest.raises(SinkRejected, match=r"message 1 on .*not a position"):
        make_sink().position()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"retention": "workqueue"}, "retention: workqueue"),
        ({"retention": "interest"}, "retention: interest"),
        ({"max_msgs_per_subject": 1}, "max_msgs_per_subject"),
        ({"subject_transform": {"src": ">", "dest": "x.>"}}, "renames subjects"),
    ],
)
def test_streams_that_cannot_keep_it(
    nats_server: NatsServer, nats_admin: Admin, config: dict[str, object], said: str
) -> None:
    """A stream that drops or renames what the position is in is refused when the sink opens."""
    name = nats_admin.make("df_unfit", "unfit.>", **config)
    try:
        sink = NatsSink("sink", nats_server.url, "unfit.>", stream=name, exactly_once=True)
        with pytest.raises(SinkRejected, match=said):
            sink.open()
        sink.close()
    finally:
        nats_admin.delete(name)


def test_subjects_beyond_the_pattern(make_sink: MakeSink, nats_stream: str) -> None:
    """An event routed elsewhere cannot be delivered exactly once, and is named."""
    rows = [row(0, f"{nats_stream}.mine.a"), row(1, f"{nats_stream}.other")]
    with pytest.raises(SinkRejected, match="does not take"):
        make_sink(pattern=">")
    with pytest.raises(Undeliverable, match=r"other' is not one of") as caught:
        make_sink(pattern=f"{nats_stream}.mine.>").send(batch(rows, origin=ORIGIN), allow)
    assert (caught.value.ordinal, caught.value.cause) == (1, "routing")
