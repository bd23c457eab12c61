"""The NATS sink on a real server: what arrives, and what each refusal means."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import (
    AuthFailed,
    PermissionMissing,
    SinkRejected,
    SinkUnavailable,
    Undeliverable,
)
from deltaforge_dagster.sinks.connections import SinkTimeouts
from deltaforge_dagster.sinks.nats.link import Login
from deltaforge_dagster.sinks.nats.sink import NatsSink, subject_pattern
from deltaforge_dagster.testing.sinks import ORIGIN
from deltaforge_lab.servers.nats import NatsServer
from tests.fix_nats import Admin, StartNats
from tests.sinks.certificates import certificate
from tests.sinks.messages import sent
from tests.sinks.nats_messages import MakeSink, allow, amid, batch, kernels, numbered, opened, row

__all__ = ["kernels"]

pytestmark = pytest.mark.nats


@pytest.fixture
def make_sink(nats_server: NatsServer, nats_stream: str) -> Iterator[MakeSink]:
    """Open a sink on the test's stream; all are closed at the end."""
    yield from opened(nats_server, nats_stream)


def test_a_message_has_its_headers(
    make_sink: MakeSink, nats_admin: Admin, nats_stream: str
) -> None:
    """Id with the sink's id, key, and the event's own headers; nothing of a key that is null."""
    subject = f"{nats_stream}.a"
    rows = [row(0, subject, headers='{"x-order":"high, ä","y":""}'), row(1, subject, key=None)]

    make_sink("one").send(batch(rows), allow)
    make_sink("one").send(batch(rows, replay="r1"), allow)

    first, second, replayed, _ = nats_admin.read(nats_stream)
    del second.headers["Nats-Expected-Last-Msg-Id"]  # type: ignore[attr-defined]
    assert (first.value, first.subject) == (b'{"n":0}', subject)
    assert {name: value for name, value in first.headers.items() if name != EXPECTED} == {
        "Nats-Msg-Id": "i0|one",
        "df-key": "k0",
        "x-order": "high, ä",
        "y": "",
    }
    assert second.headers == {"Nats-Msg-Id": "i1|one"}
    assert replayed.headers["Nats-Msg-Id"] == "i0|one|replay|r1"
    assert replayed.headers["df-replay"] == "r1"


EXPECTED = "Nats-Expected-Last-Sequence"


def test_two_sinks_on_one_stream(make_sink: MakeSink, nats_admin: Admin, nats_stream: str) -> None:
    """Sinks that write the same changes to one stream at once both deliver all, each in order."""
    sinks = [make_sink(name) for name in ("one", "two")]
    threads = [
        threading.Thread(
            target=sink.send, args=(numbered(f"{nats_stream}.{place}", 6000), allow), daemon=True
        )
        for place, sink in enumerate(sinks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)

    for place in range(2):
        values = [int(one) for one in nats_admin.values(nats_stream, f"{nats_stream}.{place}")]
        assert values == list(range(6000))


@pytest.mark.parametrize("exactly_once", [False, True])
def test_others_publish_all_the_time(
    make_sink: MakeSink,
    nats_admin: Admin,
    nats_stream: str,
    nats_server: NatsServer,
    *,
    exactly_once: bool,
) -> None:
    """Somebody who never pauses neither stops the sink nor gets between its messages' order."""
    sink = make_sink(pattern=f"{nats_stream}.mine", exactly_once=exactly_once)
    ended = threading.Event()

    def publish() -> None:
        with Admin(nats_server.url) as other:
            while not ended.is_set():
                other.request(f"{nats_stream}.other", b"x")

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        sink.send(numbered(f"{nats_stream}.mine", 3000), allow)
    finally:
        ended.set()
        thread.join()

    values = [int(one) for one in nats_admin.values(nats_stream, f"{nats_stream}.mine")]
    assert values == list(range(3000))


@pytest.mark.parametrize("exactly_once", [False, True])
def test_somebody_amid_messages_without_answers(
    make_sink: MakeSink, nats_admin: Admin, nats_stream: str, *, exactly_once: bool
) -> None:
    """Only one message in a hundred is answered; what is stored of the others is not stored again, nor is anything missing."""
    sink = make_sink(pattern=f"{nats_stream}.mine", exactly_once=exactly_once)

    def publish(_: float) -> None:
        nats_admin.await_messages(nats_stream, 2001 + 137)
        nats_admin.publish_as(f"{nats_stream}.other", "x", "other")

    with amid(2, 137, publish):
        sink.send(numbered(f"{nats_stream}.mine", 6000, origin=ORIGIN), allow)

    values = [int(one) for one in nats_admin.values(nats_stream, f"{nats_stream}.mine")]
    assert values == list(range(6000))


def test_many_changes_of_a_row(make_sink: MakeSink, nats_admin: Admin, nats_stream: str) -> None:
    """10,000 changes of one row arrive in their order, in several batches."""
    sink = make_sink()
    for first in range(0, 10_000, 2_500):
        sink.send(numbered(f"{nats_stream}.row", 2_500, first), allow)

    assert [int(one) for one in nats_admin.values(nats_stream)] == list(range(10_000))


def test_many_subjects(make_sink: MakeSink, nats_admin: Admin, nats_stream: str) -> None:
    """A subject per row, as a template makes them: all in the log's order in the stream."""
    rows = [row(n, f"{nats_stream}.t.{n % 997}") for n in range(5000)]

    make_sink().send(batch(rows), allow)

    subjects = [one.subject for one in nats_admin.read(nats_stream)]
    assert subjects == [one["destination"] for one in rows]


def test_what_is_there_already_is_dropped(
    make_sink: MakeSink, nats_admin: Admin, nats_stream: str
) -> None:
    """A new run that sends again what its predecessor had sent, and more, stores only the more."""
    make_sink().send(numbered(f"{nats_stream}.a", 5000), allow)

    make_sink().send(numbered(f"{nats_stream}.a", 3000, 4000), allow)

    assert [int(one) for one in nats_admin.values(nats_stream)] == list(range(7000))


def test_a_delivery_that_starts_over_is_stored_whole(
    make_sink: MakeSink, nats_admin: Admin, nats_stream: str
) -> None:
    """After a reset nothing is dropped as known, however often: newer values stay behind older."""
    sink = make_sink()
    for _ in range(3):
        sink.send(numbered(f"{nats_stream}.a", 3000), allow)
        sink.send(numbered(f"{nats_stream}.a", 3000, 3000), allow)

    assert [int(one) for one in nats_admin.values(nats_stream)] == list(range(6000)) * 3


def test_forgotten_in_part(make_sink: MakeSink, nats_admin: Admin, nats_stream: str) -> None:
    """When a stream knows only the newest part of what comes again, it gets that again, too."""
    sink = make_sink()
    for n in (3, 4):
        nats_admin.publish_as(f"{nats_stream}.a", str(n), f"i{n}|sink")

    sink.send(numbered(f"{nats_stream}.a", 6), allow)

    values = [int(one) for one in nats_admin.values(nats_stream)]
    assert values == [3, 4, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("exactly_once", [False, True])
def test_forgotten_in_part_amid_messages_without_answers(
    make_sink: MakeSink, nats_admin: Admin, nats_stream: str, *, exactly_once: bool
) -> None:
    """The same where only one message in a hundred is answered: older values do not end up behind newer ones."""
    sink = make_sink(exactly_once=exactly_once)
    known = range(2540, 2560)
    for n in known:
        nats_admin.publish_as(f"{nats_stream}.a", str(n), f"i{n}|sink")
    if exactly_once:
        sink.position()

    sink.send(numbered(f"{nats_stream}.a", 6000, origin=ORIGIN), allow)

    values = [int(one) for one in nats_admin.values(nats_stream)]
    assert values == [*known, *range(6000)]


@pytest.mark.parametrize(
    "subject", ["", "a b", "a.*", "a.>", "a..b", ".a", "a.", "a\r\nb", "x" * 3000]
)
def test_an_impossible_subject(
    make_sink: MakeSink, nats_admin: Admin, nats_stream: str, subject: str
) -> None:
    """What is before such a message arrives, and it is named by its ordinal as one for the DLQ."""
    rows = [row(n, f"{nats_stream}.a") for n in range(5)]
    rows[3]["destination"] = subject

    with pytest.raises(Undeliverable, match="ordinal 3") as caught:
        make_sink().send(batch(rows), allow)

    assert (caught.value.ordinal, caught.value.cause) == (3, "routing")
    assert len(nats_admin.values(nats_stream)) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"key": "a\nb"},
        {"key": "a\0b"},
        {"headers": '{"Nats-Rollup":"all"}'},
        {"headers": '{"a b":"c"}'},
        {"headers": '{"a":"c\\r\\nd: e"}'},
    ],
)
def test_what_no_header_carries(
    make_sink: MakeSink, nats_admin: Admin, nats_stream: str, changes: dict[str, str]
) -> None:
    """Keys and headers never become other headers; such a message is undeliverable."""
    rows = [row(0, f"{nats_stream}.a"), row(1, f"{nats_stream}.a", **changes)]

    with pytest.raises(Undeliverable, match="ordinal 1") as caught:
        make_sink().send(batch(rows), allow)

    assert (caught.value.ordinal, caught.value.cause) == (1, "serialization")
    assert len(nats_admin.values(nats_stream)) <= 1


def test_too_large_for_the_server(make_sink: MakeSink, nats_admin: Admin, nats_stream: str) -> None:
    """A message beyond max_payload is undeliverable with its whole change; what is before arrives."""
    rows = [row(n, f"{nats_stream}.a") for n in (0, 1, 2, 2, 3)]
    rows[3]["value"] = "x" * 9_000_000

    with pytest.raises(Undeliverable, match="max_payload") as caught:
        make_sink().send(batch(rows), allow)

    assert (caught.value.ordinal, caught.value.cause) == (2, "too_large")
    assert len(nats_admin.values(nats_stream)) == 2


@pytest.mark.parametrize("place", [2, 2457, 2500])
def test_too_large_for_the_stream(
    make_sink: MakeSink, nats_admin: Admin, nats_stream: str, place: int
) -> None:
    """The same for the stream's max_msg_size, also when it was lowered while the sink was open."""
    sink = make_sink()
    nats_admin.change(nats_stream, max_msg_size=1000)
    rows = [row(n, f"{nats_stream}.a") for n in range(place + 300)]
    rows[place]["value"] = "x" * 2000

    for made in (sink, make_sink("other")):
        with pytest.raises(Undeliverable, match="max_msg_size") as caught:
            made.send(batch(rows), allow)
        assert (caught.value.ordinal, caught.value.cause) == (place, "too_large")
    assert len(nats_admin.values(nats_stream)) == 2 * place


@pytest.mark.parametrize("room", [2457, 2500])
def test_a_full_stream(make_sink: MakeSink, nats_admin: Admin, nats_stream: str, room: int) -> None:
    """A stream that discards new messages takes a beginning; the rest follows once there is room."""
    nats_admin.change(nats_stream, max_msgs=room, discard="new")
    sink = make_sink()
    messages = numbered(f"{nats_stream}.a", 6000)
    for _ in range(2):
        with pytest.raises(SinkUnavailable, match="maximum messages exceeded"):
            sink.send(messages, allow)
        assert [int(one) for one in nats_admin.values(nats_stream)] == list(range(room))
    nats_admin.change(nats_stream, max_msgs=-1)

    sink.send(messages, allow)

    assert [int(one) for one in nats_admin.values(nats_stream)] == list(range(6000))


def test_a_stream_that_is_missing(make_sink: MakeSink) -> None:
    """It is named, with the command that makes it; nothing is tried again."""
    with pytest.raises(SinkRejected, match=r"no stream 'nowhere'.*nats stream add"):
        make_sink(stream="nowhere")


def test_a_stream_that_vanishes(make_sink: MakeSink, nats_admin: Admin, nats_stream: str) -> None:
    """A stream deleted under an open sink is an error that says so, not a silent loss."""
    sink = make_sink()
    sink.send(numbered(f"{nats_stream}.a", 1), allow)
    nats_admin.delete(nats_stream)

    with pytest.raises(SinkRejected, match="no stream"):
        sink.send(numbered(f"{nats_stream}.a", 1, 1), allow)


def test_a_subject_that_is_not_the_streams(make_sink: MakeSink, nats_stream: str) -> None:
    """Found when the sink opens, or before anything of a batch is sent; named with the stream."""
    with pytest.raises(SinkRejected, match=f"does not take 'other'.*only {nats_stream}.>"):
        make_sink(pattern="other")
    rows = [row(0, f"{nats_stream}.a"), row(1, "elsewhere")]
    with pytest.raises(SinkRejected, match="does not take subject 'elsewhere'"):
        make_sink(pattern=">").send(batch(rows), allow)


def test_a_subject_that_is_added_later(
    make_sink: MakeSink, nats_admin: Admin, nats_stream: str
) -> None:
    """A stream that is given more subjects serves an open sink with them."""
    sink = make_sink(pattern=">")
    nats_admin.change(nats_stream, subjects=[f"{nats_stream}.>", f"{nats_stream}-more"])

    sink.send(numbered(f"{nats_stream}-more", 3), allow)

    assert len(nats_admin.values(nats_stream)) == 3


def test_a_stream_that_acknowledges_nothing(
    make_sink: MakeSink, nats_admin: Admin, nats_stream: str
) -> None:
    """It is refused at once instead of waiting for ever."""
    nats_admin.change(nats_stream, no_ack=True)

    with pytest.raises(SinkRejected, match="no_ack"):
        make_sink()


def test_no_jetstream(start_nats: StartNats) -> None:
    """A server without JetStream is told apart from a missing stream; core NATS works there."""
    server = start_nats({"jetstream": ""})
    sink = NatsSink("sink", server.url, "a", stream="S")
    with pytest.raises(SinkRejected, match="JetStream is not enabled"):
        sink.open()
    plain = NatsSink("sink", server.url, "a")
    plain.open()
    assert plain.send(numbered("a", 3), allow) == 2
    plain.close()
    sink.close()


def test_core_nats_reaches_whoever_listens(nats_server: NatsServer) -> None:
    """Without a stream subscribers get every message in order, and nothing is stored."""
    sink = NatsSink("sink", nats_server.url, "live")
    with Admin(nats_server.url) as admin:
        heard = admin.listen("live.core")
        sink.open()
        sink.send(numbered("live.core", 5000), allow)
        got = [int(one) for one in heard(5000)]
    sink.close()

    assert got == list(range(5000))


def test_down_and_up_again(start_nats: StartNats) -> None:
    """A server that is down can be reached later, by the same sink, with its stream as it was."""
    server = start_nats()
    with Admin(server.url) as admin:
        admin.make("S", "s.>", storage="file")
    sink = NatsSink("sink", server.url, "s.>", stream="S")
    sink.open()
    sink.send(numbered("s.a", 100), allow)
    server.stop(immediate=True)
    with pytest.raises(SinkUnavailable):
        sink.send(numbered("s.a", 100, 100), allow)
    with pytest.raises(SinkUnavailable):
        sink.open()
    server.restart()
    sink.open()

    sink.send(numbered("s.a", 100, 100), allow)

    with Admin(server.url) as admin:
        assert [int(one) for one in admin.values("S")] == list(range(200))
    sink.close()


def test_the_next_server_is_taken(nats_server: NatsServer, nats_stream: str) -> None:
    """Of several addresses one that does not answer is passed over."""
    sink = NatsSink("s", f"nats://127.0.0.1:1, {nats_server.url}", ">", stream=nats_stream)
    sink.open()
    sink.send(numbered(f"{nats_stream}.a", 1), allow)
    sink.close()


def test_a_paused_server(start_nats: StartNats) -> None:
    """It ends in a timeout; what it was sent is not stored twice once it goes on."""
    server = start_nats()
    with Admin(server.url) as admin:
        admin.make("S", "s.>")
    sink = NatsSink("sink", server.url, "s.>", stream="S", timeouts=SinkTimeouts(send=0.5, batch=1))
    sent(sink, numbered("s.a", 10))
    server.pause()
    with pytest.raises(SinkUnavailable, match="send_timeout_secs"):
        sink.send(numbered("s.a", 3000, 10), allow)
    server.resume()

    sent(sink, numbered("s.a", 3000, 10))

    with Admin(server.url) as admin:
        assert [int(one) for one in admin.values("S")] == list(range(3010))
    sink.close()


def test_not_a_nats_server() -> None:
    """Something else at that address is named as such, or as not answering."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        sink = NatsSink("sink", f"nats://{host}:{port}", "a", timeouts=SinkTimeouts(connect=0.3))
        with pytest.raises(SinkUnavailable, match="connect_timeout_secs"):
            sink.open()
        sink.close()


USERS = """{
  users: [
    { user: u, password: p, permissions: { publish: ["s.allowed", "$JS.API.>"], subscribe: "_INBOX.>" } }
    { user: mute, password: p, permissions: { publish: "s.>", subscribe: "_INBOX.>" } }
  ]
}"""


def test_users(start_nats: StartNats) -> None:
    """Wrong credentials and missing permissions end at once, and say which of the two it is."""
    server = start_nats({"authorization": USERS})

    def sink(login: Login, subject: str = "s.allowed", stream: str | None = None) -> NatsSink:
        return NatsSink("sink", server.url, subject, login, stream=stream)

    for login in (Login(), Login(username="u", password="x"), Login(token="p")):
        with pytest.raises(AuthFailed, match="refused credentials_file, username"):
            sink(login).open()
    with pytest.raises(PermissionMissing, match=r"STREAM.INFO"):
        sink(Login(username="mute", password="p"), stream="S").open()
    user = Login(username="u", password="p", token="not used")
    allowed, other = sink(user), sink(user, "s.other")
    for one in (allowed, other):
        one.open()
    allowed.send(numbered("s.allowed", 3), allow)
    with pytest.raises(PermissionMissing, match=r"may not publish to .*s\.other"):
        other.send(numbered("s.other", 3), allow)
    for one in (allowed, other):
        one.close()


def test_tls(start_nats: StartNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trusted certificate works in both spellings of the URL, an unknown one ends at once."""
    cert, key = certificate(tmp_path)
    server = start_nats({"tls": f'{{ cert_file: "{cert}", key_file: "{key}" }}'})
    untrusting = NatsSink("sink", server.url, "a")
    with pytest.raises(AuthFailed, match="TLS failed"):
        untrusting.open()
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    for url in (server.url, server.url.replace("nats://", "tls://")):
        sink = NatsSink("sink", url, "a")
        sink.open()
        sink.send(numbered("a", 5000, size=300), allow)
        sink.close()
    untrusting.close()


def test_tls_where_there_is_none(nats_server: NatsServer) -> None:
    """Nothing is sent unencrypted to a server that should have TLS."""
    sink = NatsSink("sink", nats_server.url.replace("nats://", "tls://"), "a")
    with pytest.raises(SinkRejected, match="offers no TLS"):
        sink.open()
    sink.close()


@pytest.mark.parametrize(
    ("template", "pattern"),
    [
        ("orders.created", "orders.created"),
        ("cdc.${source.table}", "cdc.>"),
        ("cdc.a-${source.table}.x", "cdc.>"),
        ("a.b.${source.db}.${op}", "a.b.>"),
        ("${source.table}", ">"),
        ("x${source.table}", ">"),
    ],
)
def test_the_pattern_of_a_template(template: str, pattern: str) -> None:
    """Only the words before the first variable are known: its value may have dots."""
    assert subject_pattern(compile_template(template)) == pattern
