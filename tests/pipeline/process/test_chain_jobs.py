"""Chains with SQL and Python in Spark's tasks: what comes out of segments, and what goes wrong."""

from __future__ import annotations

import itertools
import json
import threading
import uuid
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import TypeAdapter
from pyspark.sql.connect.session import SparkSession

from deltaforge_dagster.config.processors import Processor
from deltaforge_dagster.errors import ProcessorFailed, SpecError
from deltaforge_dagster.frame import FRAME, PROCESSED
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.process.chain_jobs import check_expressions, run_job
from deltaforge_dagster.pipeline.process.segment_job import ProcessingJob, processed_by
from deltaforge_dagster.processors.chain import ChainSpec
from deltaforge_dagster.processors.code import code_of
from deltaforge_dagster.processors.messages.envelope import EventOrigin
from deltaforge_dagster.state.records import Processed
from tests.e2e.conftest import shop
from tests.e2e.deployment import eventually
from tests.fix_spark import SparkAddress, connected
from tests.pipeline.process.test_processing import MakeFeed, events, make_feed
from tests.processors.acme import install
from tests.processors.rows import Row, batch, row

__all__ = ["make_feed", "shop"]

pytestmark = pytest.mark.spark

_PROCESSORS: TypeAdapter[tuple[Processor, ...]] = TypeAdapter(tuple[Processor, ...])

ODD = [
    "12345678901234567890123456789012345678901", "1.10", "-0.0", "1E+2", '"\\u0041\\/"', '"}{,:\\""',
    '{"b":1,"a":[ ]}', '"é😀"', "null",
]  # fmt: skip
"""Values that a JSON library, or VARIANT, would write otherwise."""

JS = {
    "type": "javascript", "id": "script", "limits": {"cpu_ms": 5000, "timeout_ms": 30_000},
    "inline": "(e) => { e.tags = ['seen']; return e; }",
}  # fmt: skip
BROKEN = {"type": "javascript", "id": "broken", "inline": "(e) => e.a.b.c"}


class Sessions:
    """Lends one session."""

    elsewhere = False

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def session(self) -> SparkSession:
        """Return it."""
        return self._spark

    def lost(self, error: BaseException) -> bool:
        """Say no."""
        return False


def chain_of(*blocks: dict[str, Any]) -> ChainSpec:
    """Return a chain as a file has it."""
    processors = _PROCESSORS.validate_json(json.dumps(blocks))
    return ChainSpec(processors, EventOrigin("mysql", "db", "acme"), code=code_of(processors))


class Bench:
    """Runs chains over segments of a journal of its own."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self._journal = Journal(folder.as_uri())
        self._sessions = Sessions(spark)

    def made(self, chain: ChainSpec, *segments: Sequence[Row]) -> list[Processed]:
        """Return what a job notes of segments."""
        written = []
        for number, rows in enumerate(segments, 1):
            writer = self._journal.writer("feed", "uid", number, 1)
            writer.write(batch(rows).select(PROCESSED.names))
            written.append((number, writer.close().path))
        run = uuid.uuid4().hex
        job = ProcessingJob(chain, run, self._journal.url, "feed", "uid", 1, written)
        tasks = len(segments)
        return processed_by(run_job(self._sessions, job, tasks, tasks, "these segments"))

    def rows(self, made: Processed) -> list[dict[str, Any]]:
        """Return the rows of an output, in order."""
        assert made.path is not None
        batches = self._journal.share(made.path, FRAME.names, ordinals=None, part=0, of=1)
        return pa.Table.from_batches(batches).to_pylist()

    def events(self, chain: ChainSpec, *rows: Row) -> list[dict[str, Any]]:
        """Return what becomes of some rows of one segment."""
        (only,) = self.made(chain, rows)
        return self.rows(only)

    def check(self, chain: ChainSpec) -> None:
        """Have Spark analyse a chain."""
        check_expressions(self._sessions, chain)


@pytest.fixture
def bench(tmp_path: Path, spark: SparkSession) -> Bench:
    """Make a bench."""
    return Bench(tmp_path / "journal", spark)


def sql(**block: Any) -> dict[str, Any]:
    """Return a `sql` processor."""
    return {"type": "sql", **block}


def test_stages(bench: Bench) -> None:
    """Two segments through script, SQL, flatten and SQL again, each as one piece and in order.

    Numbers, escapes and the order of fields that nobody named are the same to the byte; rows are
    numbered, transactions end once, and every processor has counted.
    """
    chain = chain_of(
        JS,
        sql(id="first", where="after:id::bigint % 3 <> 0", set={
            "after.total": "after:total::decimal(38, 2) * 2", "after.twin": "after:nested"}, drop=["secret"],
            route={"topic": "concat(op, '.', table)", "headers": {"h": "after:id::string"}}),
        {"type": "flatten"},
        sql(id="second", set={"before.seen": "variant_get(tags, '$[0]', 'string')"}),
    )  # fmt: skip

    def rows(begin: int, count: int) -> list[Row]:
        odd = itertools.cycle(ODD)
        return [
            row(
                event_id=f"0192f0c1-0000-7000-8000-{number:012}",
                after=f'{{"z":{next(odd)},"id":{number},"secret":1,"total":"{number}.25","nested":{{"x":7}}}}',
                before='{"b":1.10}' if number % 2 else None,
                tx_id=str(number // 10),
                ordinal=number - begin,
            )
            for number in range(begin, begin + count)
        ]

    segments = [rows(0, 4500), rows(4500, 7)]
    made = bench.made(chain, *segments)

    assert [one.segment for one in made] == [1, 2]
    for one, captured in zip(made, segments, strict=True):
        kept = [e for e in captured if json.loads(e["after"])["id"] % 3]
        found = bench.rows(one)
        assert [e["ordinal"] for e in found] == list(range(len(kept)))
        assert [e["event_id"] for e in found] == [e["event_id"] for e in kept]
        for event, old in zip(found, kept, strict=True):
            number = json.loads(old["after"])["id"]
            odd = old["after"][5:].partition(',"id"')[0]
            odd = odd if odd != '{"b":1,"a":[ ]}' else None
            start = f'{{"z":{odd},' if odd else '{"z__b":1,"z__a":[],'
            expected = f'"id":{number},"total":"{2 * number}.50","nested__x":7,"twin__x":7}}'
            if (
                event["after"] != start + expected
            ):  # flatten reads escapes of objects that it flattens
                assert json.loads(event["after"]) == json.loads(start + expected)
            assert event["before"] == ('{"b":1.10,"seen":"seen"}' if number % 2 else None)
            assert (event["topic"], event["headers"]) == ("c.orders", f'{{"h":"{number}"}}')
        ends = [e["tx_id"] for e in found if e["tx_end"]]
        assert ends == sorted({e["tx_id"] for e in kept}, key=int)
        counts = {name: (c["events_in"], c["events_out"]) for name, c in one.counts.items()}
        assert counts == {
            "script": (len(captured), len(captured)), "first": (len(captured), len(kept)),
            "flatten": (len(kept), len(kept)), "second": (len(kept), len(kept)),
        }  # fmt: skip


def test_every_other_byte_stays(bench: Bench) -> None:
    """One field among values of every spelling is set; what stands around it is untouched."""
    pairs = list(itertools.permutations(ODD, 2))
    images = [f'{{ "k\\u00e9y":{one},"n":1,"a":{two}}}' for one, two in pairs]
    chain = chain_of(sql(set={"after.n": "after:n::int + 1"}))

    found = bench.events(chain, *(row(after=one, ordinal=n) for n, one in enumerate(images)))

    assert [one["after"] for one in found] == [one.replace('"n":1', '"n":2') for one in images]


def test_values(bench: Bench) -> None:
    """Exact numbers, null and every type; nothing is computed for rows that do not pass."""
    digits = "12345678901234567890123456789012345678"
    image = f'{{"n":{digits},"long":{digits}9.5,"text":"7.10","zero":0,"no":null,"o":{{"b":1.10,"a":[]}}}}'
    expressions = {
        "sum": ("after:n::decimal(38,0) + 1", f'"{digits[:-1]}9"'),
        "long": ("after:long::string", f'"{digits}9.5"'),
        "double": ("after:text::double * 2", "14.2"),
        "missing": ("after:nothing::int", "null"),
        "json_null": ("after:no::int is null and is_variant_null(after:no)", "true"),
        "object": ("after:o", '{"a":[],"b":1.1}'),
        "number": ("parse_json(after:text::string)", "7.1"),
        "struct": ("named_struct('t', array(1.50), 'd', date '2026-03-01')", '{"t":["1.50"],"d":"2026-03-01"}'),
        "time": ("timestamp_micros(ts_us)", '"2023-11-14T22:13:20.123456Z"'),
        "bytes": ("X'00ff'", '{"_base64":"AP8="}'),
        "none": ("null", "null"),
        "old": ("before:x::int", "null"),
    }  # fmt: skip
    set_all = {f"after.new_{name}": text for name, (text, _) in expressions.items()}
    chain = chain_of(sql(where="after:zero::int <> 0 or 1 / after:one::int = 1", set=set_all))
    passing, failing = image[:-1] + ',"one":1}', image.replace('"zero":0', '"zero":null')

    found = bench.events(chain, row(after=passing), row(after=failing), row(after=None))

    added = ",".join(f'"new_{name}":{text}' for name, (_, text) in expressions.items())
    assert [one["after"] for one in found] == [f"{passing[:-1]},{added}}}"]


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"where": "after:secret"}, "where: must be true or false, but `after:secret` is variant"),
        ({"set": {"after.a": "1", "after.x": "nosuch + 1"}}, r"set.after.x: Spark refuses `nosuch \+ 1`: .*nosuch.* There are before"),
        ({"set": {"after.x": "1 +"}}, r"set.after.x: Spark refuses `1 \+`: .*Syntax error"),
        ({"set": {"after.x": "interval 1 day"}}, "set.after.x: has no JSON form"),
        ({"route": {"key": "sum(ts_us)"}}, "route.key: Spark refuses `sum"),
        ({"route": {"topic": "array('a')"}}, "route.topic: must be text"),
    ],
)  # fmt: skip
def test_what_spark_refuses(bench: Bench, block: dict[str, Any], said: str) -> None:
    """It is told before there are rows, by processor, place and expression."""
    with pytest.raises(SpecError, match=f"processor totals: {said}"):
        bench.check(chain_of(sql(id="totals", **block)))


@pytest.mark.parametrize(
    ("blocks", "error", "said"),
    [
        ([sql(set={"after.x": "after:v::int"})], ProcessorFailed, "processor sql: these segments: a row makes an expression fail: INVALID_VARIANT_CAST"),
        ([sql(where="cast(after:v::string as int) > 1")], ProcessorFailed, r"CAST_INVALID_INPUT in `cast\(after:v::string as int\)`"),
        ([sql(set={"before.x": "1"}), {"type": "flatten"}, sql(id="two", where="parse_json(after:v::string) is null")], ProcessorFailed, "processor sql or two: .*MALFORMED_RECORD_IN_PARSING"),
        ([sql(set={"after.x": "raise_error(after:v::string)"})], ProcessorFailed, "USER_RAISED_EXCEPTION"),
        ([BROKEN, sql(drop=["v"])], ProcessorFailed, "processor broken: JS processor threw"),
        ([sql(drop=["v"]), BROKEN], ProcessorFailed, "processor broken: JS processor threw"),
        ([sql(drop=["v"]), {"type": "python", "function": "nosuch_module:f"}], SpecError, "there is no module nosuch_module"),
    ],
)  # fmt: skip
def test_what_breaks_in_a_task(
    bench: Bench, capfd: pytest.CaptureFixture[str], blocks: list[dict[str, Any]], error: type[Exception], said: str
) -> None:  # fmt: skip
    """Whatever the stage: the class and the processor are told, and no value, not even on the console."""
    with pytest.raises(error, match=said) as caught:
        bench.made(chain_of(*blocks), [row(after='{"v":"hunter2"}')] * 3)

    assert "hunter2" not in str(caught.value) + capfd.readouterr().err


def test_python_and_packages_in_workers(spark_server: SparkAddress, tmp_path: Path) -> None:
    """A function of a directory, and a processor of a package that the session has sent along."""
    folder = tmp_path / "packages"
    folder.mkdir()
    install(folder)
    archive = tmp_path / "acme_processors.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for one in folder.rglob("*"):
            file.write(one, one.relative_to(folder))
    tmp_path.joinpath("cleaning_module.py").write_text(
        "def clean(frame):\n"
        "    frame['tags'] = '[\"' + frame['op'] + '\"]'\n"
        "    return frame[frame['ts_us'] > 1]\n"
    )
    session = connected(spark_server.remote)
    try:
        session.addArtifacts(str(archive), pyfile=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(folder))
            chain = chain_of(
                {"type": "label", "config": {"topic": "t"}},
                sql(where="topic = 't'"),
                {"type": "python", "function": "cleaning_module:clean", "format": "pandas", "path": str(tmp_path)},
            )  # fmt: skip
        found = Bench(tmp_path / "journal", session).events(chain, row(ts_us=1), row(op="u"))
    finally:
        session.stop()

    assert [(one["op"], one["topic"], one["tags"]) for one in found] == [("u", "t", '["u"]')]


def test_a_function_that_hangs_in_a_worker(bench: Bench, tmp_path: Path) -> None:
    """Its process is ended at the limit, though it is in C code; the task fails, and the worker goes on."""
    tries = tmp_path / "tries"
    tmp_path.joinpath("hanging_module.py").write_text(
        "import ctypes, os, pathlib\n"
        f"tries = pathlib.Path({str(tries)!r})\n"
        "def f(table):\n"
        "    if not tries.exists():\n"
        "        tries.write_text(str(os.getpid()))\n"
        "        ctypes.PyDLL(None).sleep(3600)\n"
        "    return table\n"
    )

    def limited(milliseconds: int) -> ChainSpec:
        block = {"type": "python", "function": "hanging_module:f", "path": str(tmp_path)}
        return chain_of({**block, "limits": {"timeout_ms": milliseconds}})

    said = r"processor python: hanging_module:f: a call took more than 500 ms \(limits.timeout_ms\)"
    with pytest.raises(ProcessorFailed, match=said):
        bench.made(limited(500), [row()])
    assert not Path(f"/proc/{tries.read_text()}").exists()

    (found,) = bench.events(limited(60_000), row(op="u"))
    assert found["op"] == "u"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write a module beside the pipeline file."""
    path = tmp_path / "code" / "shop_cleaning.py"
    path.parent.mkdir()
    path.write_text("def clean(table):\n    return table.slice(0, 1)\n")
    return path


PIPELINE = """
- type: sql
  where: after:name::string <> 'hidden'
  set: {after.name: "upper(after:name::string)"}
- type: python
  function: shop_cleaning:clean
  path: code
"""


@pytest.mark.postgres
@pytest.mark.redis
def test_a_pipeline(make_feed: MakeFeed, source: Path) -> None:
    """The file's own directory counts, changed code is used from then on, and SQL that is wrong stops sinks."""
    feed = make_feed(PIPELINE)
    feed.shop.execute("INSERT INTO customers VALUES (1, 'a'), (2, 'hidden'), (3, 'c')")
    assert not feed.catch_up().behind
    source.write_text("def clean(table):\n    return table\n")
    feed.shop.execute("INSERT INTO customers VALUES (4, 'd'), (5, 'e')")
    assert not feed.catch_up().behind

    assert [one["after"] for one in events(feed)] == [
        {"id": 1, "name": "A"}, {"id": 4, "name": "D"}, {"id": 5, "name": "E"}
    ]  # fmt: skip
    first, second = (one.chain_hash for one in feed.store.segments.read("feed")[-2:])
    assert first != second
    feed.path.write_text(feed.path.read_text().replace("upper(", "uppper("))
    feed.shop.execute("INSERT INTO customers VALUES (6, 'f')")
    outcome = feed.catch_up()
    assert "processor sql: set.after.name: Spark refuses `uppper(" in outcome.sink_errors["redis"]


HANGS = """
import pathlib, time

def clean(table):
    here = pathlib.Path(__file__)
    here.with_name("begun").touch()
    while not here.with_name("released").exists():
        time.sleep(0.05)
    return table
"""


@pytest.mark.postgres
@pytest.mark.redis
def test_a_run_ends_although_a_job_hangs(make_feed: MakeFeed, source: Path) -> None:
    """No thread of an ended run waits for Spark any more; the interpreter could not end with one."""
    source.write_text(HANGS)
    begun = source.with_name("begun")
    feed = make_feed(PIPELINE)
    feed.shop.execute("INSERT INTO customers VALUES (1, 'a')")
    run = feed.begin()
    try:
        eventually(begun.exists)
        run.end()

        assert not [one.name for one in threading.enumerate() if one.name == "process feed"]
    finally:
        source.with_name("released").touch()
