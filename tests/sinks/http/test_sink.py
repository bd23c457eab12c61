"""The HTTP sink on a real server: what arrives, in which order, and what each answer does."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import random
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    LeaseLost,
    Retryable,
    SettingsError,
    SinkRejected,
    SinkUnavailable,
    Undeliverable,
)
from deltaforge_dagster.installation.process import free_port
from deltaforge_dagster.sinks.base import MESSAGES, SinkBatch
from deltaforge_dagster.sinks.http.client import ClientSettings, TlsFiles
from deltaforge_dagster.sinks.http.requests import RequestForm
from deltaforge_dagster.sinks.http.sink import HttpSink
from deltaforge_dagster.testing.sinks import (
    SinkContract,
    Subject,
    allow,
    messages,
    refuse_from,
)
from deltaforge_lab.servers.http import HttpAnswer, HttpServer, Received
from tests.sinks.certificates import certificate
from tests.sinks.messages import closed_during

MakeSink = Callable[..., HttpSink]


@pytest.fixture
def make_sink() -> Iterator[MakeSink]:
    """Open a sink; all are closed at the end."""
    made: list[HttpSink] = []

    def make(form: RequestForm | None = None, **settings: object) -> HttpSink:
        client = ClientSettings(**settings)  # type: ignore[arg-type]
        form = form or RequestForm(keyed=client.connections > 1)
        made.append(HttpSink("out", form, client))
        made[-1].open()
        return made[-1]

    yield make
    for one in made:
        one.close()


def keyed(url: str, *keys: str | None) -> SinkBatch:
    """Return a message for each key; its value is its number and its key."""
    rows = [
        {
            "ordinal": number,
            "destination": url,
            "key": key,
            "value": json.dumps([number, key]),
            "event_id": f"e{number}",
            "idempotency_key": f"i{number}",
        }
        for number, key in enumerate(keys)
    ]
    return SinkBatch(1, "5e9", pa.RecordBatch.from_pylist(rows, schema=MESSAGES))


def rest(batch: SinkBatch, acknowledged: int) -> SinkBatch:
    """Return what a deliverer sends again after an error."""
    ordinals = batch.messages.column("ordinal").to_numpy()
    left = batch.messages.slice(int(ordinals.searchsorted(acknowledged, "right")))
    return SinkBatch(batch.segment, batch.segment_id, left)


def subject_of(server: HttpServer, form: RequestForm) -> Subject:
    """A sink whose requests hold one message, or one per line."""

    def read(name: str, replay: str | None = None) -> list[str]:
        found = [
            one.body.decode()
            for one in server.received
            if (one.target, one.headers.get("df-replay")) == (f"/{name}", replay)
            and one.status == 204
        ]
        return [line for body in found for line in body.split("\n")[:-1]] if form.batch else found

    def make() -> HttpSink:
        return HttpSink("subject", form, ClientSettings())

    return Subject(
        sink=make(),
        another=make,
        destination=lambda name: f"{server.url}/{name}",
        delivered=read,
        replayed=lambda name: read(name, "r1"),
    )


@pytest.mark.parametrize(
    "form", [RequestForm(), RequestForm(batch=True, array=False)], ids=["one by one", "lines"]
)
class TestContract(SinkContract):
    """A request for each change, and one for many, keep the promises of every sink."""

    @pytest.fixture
    def subject(self, http_server: HttpServer, form: RequestForm) -> Iterator[Subject]:
        """A sink, open."""
        made = subject_of(http_server, form)
        made.sink.open()
        yield made
        made.sink.close()

    @pytest.mark.parametrize("count", [1, 2, 700])
    def test_everything_arrives_in_order(self, subject: Subject, count: int) -> None:
        """Fewer than for other sinks: each is a request, since destinations alternate."""
        super().test_everything_arrives_in_order(subject, count)


def test_statuses_that_pass(http_server: HttpServer, make_sink: MakeSink) -> None:
    """A request is repeated twice with the same idempotency key; nothing overtakes it."""
    answers = iter([HttpAnswer(), HttpAnswer(503), HttpAnswer(drop=True), *[HttpAnswer()] * 9])
    http_server.answer = lambda _: next(answers)

    sink = make_sink()
    sink.send(messages([(http_server.url, str(n)) for n in range(3)]), allow)

    assert [one.body for one in http_server.received] == [b"0", b"1", b"1", b"1", b"2"]
    assert len({one.headers["idempotency-key"] for one in http_server.received}) == 3
    assert sink.traffic.retries == 2


def test_a_server_that_keeps_failing(http_server: HttpServer, make_sink: MakeSink) -> None:
    """After three attempts the sink gives up; the error says what was acknowledged."""
    http_server.answer = lambda one: HttpAnswer(500 if one.body == b"2" else 200)
    batch = messages([(http_server.url, str(n)) for n in range(5)], first=7)

    with pytest.raises(SinkUnavailable, match=rf"^sink out: {http_server.url} answered 500") as one:
        make_sink().send(batch, allow)

    assert [one.body for one in http_server.received] == [b"0", b"1", b"2", b"2", b"2"]
    assert one.value.acknowledged == batch.messages.column("ordinal")[2].as_py() - 1


def test_retry_after(http_server: HttpServer, make_sink: MakeSink) -> None:
    """The server says when to come back: the sink does not try before, and passes it on."""
    http_server.answer = lambda _: HttpAnswer(429, {"Retry-After": "17"})

    with pytest.raises(SinkUnavailable) as caught:
        make_sink().send(messages([(http_server.url, "1")]), allow)

    assert (caught.value.retry_after, len(http_server.received)) == (17, 1)
    assert caught.value.acknowledged == -1


def test_an_endpoint_that_admits_few(http_server: HttpServer, make_sink: MakeSink) -> None:
    """Each attempt goes on where the last one ended, so a batch of any size is delivered in the end."""
    sink, batch = make_sink(), messages([(http_server.url, str(n)) for n in range(30)])
    room = 0

    def admit(_: Received) -> HttpAnswer:
        nonlocal room
        room -= 1
        return HttpAnswer(200) if room >= 0 else HttpAnswer(429, {"retry-after": "60"})

    http_server.answer = admit
    attempts, left = 0, batch
    while left.messages.num_rows:
        attempts, room = attempts + 1, 7
        try:
            reached = sink.send(left, allow)
        except SinkUnavailable as error:
            reached = cast("int", error.acknowledged)
        left = rest(batch, reached)

    assert attempts == 5
    assert http_server.bodies() == [str(n).encode() for n in range(30)]


def test_credentials(http_server: HttpServer, make_sink: MakeSink) -> None:
    """They are not tried again."""
    http_server.answer = lambda _: HttpAnswer(401, body=b"geheim")
    with pytest.raises(AuthFailed, match="401") as caught:
        make_sink().send(messages([(http_server.url, "1"), (http_server.url, "2")]), allow)

    assert "geheim" not in str(caught.value)
    assert len(http_server.received) == 1


def test_redirects_are_not_followed(http_server: HttpServer, make_sink: MakeSink) -> None:
    """Neither to the same server nor to another one."""
    http_server.answer = lambda one: (
        HttpAnswer(307, {"location": f"{http_server.url}/other"})
        if one.target == "/"
        else HttpAnswer()
    )
    with pytest.raises(SinkRejected, match="redirects are not followed"):
        make_sink().send(messages([(f"{http_server.url}/", "1")]), allow)

    assert len(http_server.received) == 1


def test_a_message_that_is_refused(http_server: HttpServer, make_sink: MakeSink) -> None:
    """It is undeliverable, all before it is delivered, nothing behind it is sent; what the server said is its detail."""
    http_server.answer = lambda one: (
        HttpAnswer(422, body=b"no such customer: bob") if one.body == b"2" else HttpAnswer()
    )
    batch = messages([(f"{http_server.url}/geheim", str(n)) for n in range(5)], first=4)

    with pytest.raises(Undeliverable, match=r"status 422 \(Unprocessable") as caught:
        make_sink().send(batch, allow)

    error = caught.value
    assert error.ordinal == batch.messages.column("ordinal")[2].as_py()
    assert (error.cause, error.detail) == ("serialization", "; it said: no such customer: bob")
    assert "bob" not in str(error)
    assert "geheim" not in str(error)
    assert http_server.bodies() == [b"0", b"1"]


BATCH = RequestForm(batch=True, max_events=8)


@pytest.mark.parametrize("status", [413, 400])
def test_a_batch_that_is_refused_is_divided(
    http_server: HttpServer, make_sink: MakeSink, status: int
) -> None:
    """Until everything is delivered but the one message that is refused alone, in order."""
    http_server.answer = lambda one: HttpAnswer(status if b"23" in one.body else 200)
    batch = messages([(http_server.url, str(n)) for n in range(10, 40)], each=2)

    with pytest.raises(Undeliverable) as caught:
        make_sink(BATCH).send(batch, allow)

    # 22 and 23 are the messages of one change.
    assert caught.value.ordinal == batch.messages.column("ordinal")[12].as_py()
    assert caught.value.cause == ("too_large" if status == 413 else "serialization")
    delivered = [n for body in http_server.bodies() for n in json.loads(body)]
    assert delivered == list(range(10, 22))
    for body in http_server.bodies():
        assert json.loads(body)[0] % 2 == 0


def test_a_body_that_is_too_large(http_server: HttpServer, make_sink: MakeSink) -> None:
    """What the server accepts is found by division."""
    http_server.answer = lambda one: HttpAnswer(413 if len(one.body) > 100 else 200)
    values = [str(n) for n in range(1000, 1100)]

    make_sink(RequestForm(batch=True)).send(messages([(http_server.url, v) for v in values]), allow)

    delivered = [n for body in http_server.bodies() for n in json.loads(body)]
    assert delivered == list(range(1000, 1100))
    assert max(len(body) for body in http_server.bodies()) <= 100


def test_no_answer_in_time(http_server: HttpServer, make_sink: MakeSink) -> None:
    """It is given up once, not repeated at once: the server may still be at it."""
    http_server.answer = lambda _: HttpAnswer(after=30)

    with pytest.raises(SinkUnavailable, match=r"no answer within 0\.2 s") as caught:
        make_sink(timeout=0.2).send(messages([(http_server.url, "1")]), allow)

    assert caught.value.kind == "timeout"
    assert len(http_server.received) == 1


def test_nobody_listens(make_sink: MakeSink) -> None:
    """The error names the server and the reason."""
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SinkUnavailable, match=rf"^sink out: {url}: Connection refused"):
        make_sink().send(messages([(f"{url}/geheim", "1")]), allow)
    with pytest.raises(SinkUnavailable, match=r"its address is not known"):
        make_sink().send(messages([("http://no-such-host.invalid/", "1")]), allow)


def test_closing_ends_a_wait(http_server: HttpServer, make_sink: MakeSink) -> None:
    """Of one request, or of several; what is under way then does not count as acknowledged."""
    http_server.answer = lambda one: HttpAnswer(after=0 if one.body.startswith(b"[0") else 60)
    for most in (1, 3):
        sink = make_sink(timeout=60, connections=most)
        batch = keyed(http_server.url, *"abcd")
        error = closed_during(sink, lambda sink=sink, batch=batch: sink.send(batch, allow))  # type: ignore[misc]
        assert "closed" in str(error)
        assert error.acknowledged == 0


def test_a_connection_is_used_again(http_server: HttpServer, make_sink: MakeSink) -> None:
    """One connection for all requests; one that the server has closed meanwhile does no harm."""
    sink = make_sink()
    sink.send(messages([(http_server.url, str(n)) for n in range(20)]), allow)
    assert {one.connection for one in http_server.received} == {0}

    http_server.drop_connections()
    sink.send(messages([(http_server.url, "21")]), allow)
    assert http_server.received[-1].body == b"21"


def test_a_signature(http_server: HttpServer, make_sink: MakeSink) -> None:
    """A receiver that knows the secret computes the same; the time is that of the attempt."""
    answers = iter([HttpAnswer(500), HttpAnswer()])
    http_server.answer = lambda _: next(answers)
    before = int(time.time())

    make_sink(secret="geheim", signature_header="x-sig").send(
        messages([(http_server.url, '{"ä":1}')]), allow
    )

    for one in http_server.received:
        stamp, given = (part.partition("=")[2] for part in one.headers["x-sig"].split(","))
        signed = stamp.encode() + b"." + one.body
        assert given == hmac.new(b"geheim", signed, hashlib.sha256).hexdigest()
        assert before <= int(stamp) <= time.time()


def test_tls(tmp_path: Path, make_sink: MakeSink) -> None:
    """A server is verified, and gets the client's certificate if it wants one."""
    cert, key = map(str, certificate(tmp_path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.load_verify_locations(cert)
    context.verify_mode = ssl.CERT_REQUIRED
    with HttpServer.start(context=context) as server:
        batch = messages([(server.url, "1")])
        with pytest.raises(SinkRejected, match=r"its certificate is not trusted: self.signed"):
            make_sink().send(batch, allow)
        with pytest.raises((AuthFailed, SinkUnavailable)):
            make_sink(tls=TlsFiles(ca_file=cert)).send(batch, allow)
        assert server.received == []
        for tls in (
            TlsFiles(cert, cert, key),
            TlsFiles(None, cert, key, insecure_skip_verify=True),
        ):
            sink = make_sink(tls=tls)
            sink.send(batch, allow)
            assert sink.reach(server.url) is not tls.insecure_skip_verify
        assert server.bodies() == [b"1", b"1"]
        with pytest.raises(SinkRejected, match="no TLS"), HttpServer.start() as plain:
            make_sink().send(messages([(plain.url.replace("http:", "https:"), "1")]), allow)
    with pytest.raises(
        SettingsError,
        match=r"tls\.ca_file names the file .*lost\.pem, which cannot be read \(No such file",
    ):
        make_sink(tls=TlsFiles(ca_file=str(tmp_path / "lost.pem")))


def test_several_at_once(http_server: HttpServer, make_sink: MakeSink) -> None:
    """As many as allowed, and no more."""
    most = 0

    def answer(_: Received) -> HttpAnswer:
        nonlocal most
        most = max(most, sum(one.status is None for one in http_server.received))
        return HttpAnswer(after=0.02)

    http_server.answer = answer
    make_sink(connections=4).send(keyed(http_server.url, *map(str, range(24))), allow)

    assert most == 4
    assert len(http_server.bodies()) == 24


def test_without_a_key_everything_waits(http_server: HttpServer, make_sink: MakeSink) -> None:
    """A message without a key overtakes nothing, and nothing overtakes it."""
    waiting: list[list[bytes]] = []

    def answer(_: Received) -> HttpAnswer:
        waiting.append([one.body for one in http_server.received if one.status is None])
        return HttpAnswer(after=0.02)

    http_server.answer = answer
    make_sink(connections=4).send(keyed(http_server.url, "a", "b", None, "c", "d", None), allow)

    for under_way in waiting:
        assert len(under_way) == 1 or not any(b"null" in body for body in under_way)
    order = [json.loads(one.body)[1] for one in http_server.received]
    assert (order[2], order[5]) == (None, None)


def test_the_first_failure_counts(http_server: HttpServer, make_sink: MakeSink) -> None:
    """What is under way when one fails ends, and what is before the one that is refused is delivered."""
    failed: list[bytes] = []

    def answer(one: Received) -> HttpAnswer:
        number = json.loads(one.body)[0]
        if number == 1 and one.body not in failed:
            failed.append(one.body)
            return HttpAnswer(503, after=0.1)
        return HttpAnswer(422) if number == 2 else HttpAnswer(after=0.02)

    http_server.answer = answer
    with pytest.raises(Undeliverable) as caught:
        make_sink(connections=4).send(keyed(http_server.url, *"abcdefgh"), allow)

    assert caught.value.ordinal == 2
    delivered = {json.loads(body)[0] for body in http_server.bodies()}
    assert {0, 1} <= delivered
    assert 2 not in delivered


def test_a_lost_lease_ends_what_is_under_way(http_server: HttpServer, make_sink: MakeSink) -> None:
    """Nothing is sent after the guard has refused, and the sink does not wait for answers; it can be used again."""
    http_server.answer = lambda _: HttpAnswer(after=60)
    guard, calls = refuse_from(3, LeaseLost("gone"))
    sink = make_sink(timeout=60, connections=4)

    with pytest.raises(LeaseLost):
        sink.send(keyed(http_server.url, *"abcdef"), guard)

    assert len(calls) == 3
    http_server.answer = lambda _: HttpAnswer()
    arrived = len(http_server.received)
    assert arrived <= 2
    sink.send(keyed(http_server.url, *"abcdef"), allow)
    assert len(set(http_server.bodies())) == 6


@pytest.mark.parametrize("form", [RequestForm(keyed=True), RequestForm(keyed=True, batch=True, max_events=3)])  # fmt: skip
def test_order_of_keys(
    http_server: HttpServer, make_sink: MakeSink, form: RequestForm, seed: int
) -> None:
    """With many under way and a server that fails at random: of a key no two overlap, and none comes ahead.

    Batches are sent as a deliverer sends them, from what the error says was acknowledged.
    """
    chance = random.Random(seed)
    keys = [f"k{chance.randrange(40)}" for _ in range(400)]
    overlaps: list[str] = []
    seen: dict[str, list[int]] = {}
    unanswered: dict[int, set[str]] = {}

    def answer(one: Received) -> HttpAnswer:
        parsed = json.loads(one.body)
        pairs = parsed if form.batch else [parsed]
        mine = {key for _, key in pairs}
        for other in http_server.received[-30:-1]:
            if other.status is None and not other.dropped:
                overlaps.extend(mine & unanswered[id(other)])
        unanswered[id(one)] = mine
        for number, key in pairs:
            seen.setdefault(key, []).append(number)
        return chance.choices(
            [
                HttpAnswer(after=0.002),
                HttpAnswer(500),
                HttpAnswer(drop=True),
                HttpAnswer(429, {"retry-after": "1"}),
            ],
            [91, 3, 2, 4],
        )[0]

    http_server.answer = answer
    sink, batch = make_sink(form, connections=8), keyed(http_server.url, *keys)
    left, failures = batch, 0
    while left.messages.num_rows:
        try:
            reached = sink.send(left, allow)
        except Retryable as error:
            failures += 1
            reached = cast("int", error.acknowledged)
        left = rest(batch, reached)

    assert failures
    assert overlaps == []
    for key, found in seen.items():
        expected = [number for number, one in enumerate(keys) if one == key]
        assert list(dict.fromkeys(found)) == expected
        place = {number: index for index, number in enumerate(expected)}
        for before, after in itertools.pairwise(found):
            assert place[after] <= place[before] + 1


def test_errors_show_no_value(http_server: HttpServer, make_sink: MakeSink) -> None:
    """Neither the URL's path nor the body nor a header, whatever the server answers."""
    row = (f"{http_server.url}/geheim?geheim=1", '"geheim"')
    form = RequestForm(headers={"authorization": "geheim"})
    for answer in (
        HttpAnswer(500),
        HttpAnswer(404),
        HttpAnswer(302, {"location": "/geheim"}),
        HttpAnswer(403),
    ):
        http_server.answer = lambda _, answer=answer: answer  # type: ignore[misc]
        with pytest.raises(DeltaforgeError) as caught:
            make_sink(form).send(messages([row]), allow)
        assert "geheim" not in f"{caught.value}{caught.value.__cause__}"
