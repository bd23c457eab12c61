"""Python functions over batches of events: what they get, and what they may return."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.config.processors import PythonProcessor
from deltaforge_dagster.errors import ProcessorFailed, SpecError
from deltaforge_dagster.processors import code as modules
from deltaforge_dagster.processors.chain import Chain, ChainSpec
from deltaforge_dagster.processors.code import code_of
from deltaforge_dagster.processors.messages.envelope import EventOrigin
from tests.e2e.deployment import eventually
from tests.processors.rows import Row, batch, row

MakeChain = Callable[..., ChainSpec]

HEAD = """\
import pyarrow as pa
import pyarrow.compute as pc

def column(table, name, values):
    return table.set_column(table.schema.get_field_index(name), name, values)

"""


@pytest.fixture
def make_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeChain]:
    """Create a chain of one function `f` in a module `user_code`."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(modules, "_first", [])

    def make(source: str, **options: Any) -> ChainSpec:
        tmp_path.joinpath("user_code.py").write_text(HEAD + source)
        block = PythonProcessor(
            type="python",
            function="user_code:f",
            path=str(tmp_path),
            **options,
        )
        return ChainSpec((block,), EventOrigin("mysql", "db", "acme"), code=code_of([block]))

    yield make
    sys.modules.pop("user_code", None)


LIMITED = {"timeout_ms": 60_000}
"""A limit that is never reached, so that only the child process matters."""


def made(chain: ChainSpec, rows: list[Row]) -> list[dict[str, Any]]:
    """Return the result for rows of one batch."""
    with Chain(chain) as one:
        return [event for found in one.run([batch(rows)]) for event in found.to_pylist()]


def ids(count: int) -> list[Row]:
    """Return events with different ids and log positions."""
    return [
        row(event_id=f"0192f0c1-0000-7000-8000-{number:012}", pos=number, ordinal=number)
        for number in range(count)
    ]


PASS = {"arrow": "def f(table): return table", "pandas": "def f(frame): return frame"}


@pytest.mark.parametrize("form", ["arrow", "pandas"])
def test_what_is_left_alone_stays(make_chain: MakeChain, form: str) -> None:
    """Every column of every event is unchanged, including nulls and long numbers."""
    rows = [
        row(after='{"n":12345678901234567890123456789012345678901,"d":1.10}', tx_end=False),
        row(event_id="0192f0c1-0000-7000-8000-000000000002", schema=None, op="ddl", ddl='{"sql":"x"}',
            tags='["a"]', headers='{"h":"1"}', key=None, after=None, ordinal=1, tx_end=True),
    ]  # fmt: skip

    assert made(make_chain(PASS[form], format=form), rows) == rows


@pytest.mark.parametrize(
    ("form", "source"),
    [
        (
            "arrow",
            "def f(t):\n  t = t.take([2, 0])\n  return column(t, 'after', pa.array(['{}', None]))",
        ),
        (
            "pandas",
            "def f(t):\n  t = t.iloc[[2, 0]].copy()\n  t['after'] = ['{}', None]\n  return t",
        ),
    ],
)
def test_rows_are_changed_dropped_and_moved(make_chain: MakeChain, form: str, source: str) -> None:
    """The order is the function's; each event keeps its own log position."""
    found = made(make_chain(source, format=form), ids(3))

    assert [(one["pos"], one["after"], one["synthetic"]) for one in found] == [
        (2, "{}", None), (0, None, None)
    ]  # fmt: skip


def test_new_events(make_chain: MakeChain) -> None:
    """An event without an id gets the log position of the one before it, and is marked; a copy is not marked."""
    source = """
def f(t):
    t = t.take([0, 1, 1, 1])
    return column(t, "event_id", pa.array([t["event_id"][0], t["event_id"][1], None, t["event_id"][1]], pa.string()))
"""

    found = made(make_chain(source), ids(2))

    assert [(one["pos"], one["synthetic"], one["schema_version"]) for one in found] == [
        (0, None, "sha256:00ff"), (1, None, "sha256:00ff"), (1, "python", None), (1, None, "sha256:00ff")
    ]  # fmt: skip
    assert len({one["event_id"] for one in found}) == 4


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(t): return None", "user_code:f: returned NoneType, not a pyarrow Table"),
        ("def f(t): return t.drop_columns(['op'])", "returned 0 columns op, not one"),
        ("def f(t): return t.append_column('x', t['op'])", "returned the column x, which events do not have"),
        ("def f(t): return column(t, 'after', pa.array([5]))", "column after is int64, not string"),
        ("def f(t): return column(t, 'ts_us', pa.array([2**63], pa.uint64()))", "column ts_us has values that are not of type int64"),
        ("def f(t): return column(t, 'op', pa.nulls(1))", "column op has nulls"),
        ("def f(t): return column(t, 'op', pa.array(['x']))", "column op has values other than"),
        ("def f(t): return column(t, 'after', pa.array(['{secret']))", "column after has a value that is not a JSON object"),
        ("def f(t): return column(t, 'key', pa.array(['[1]']))", "column key has a value that is not a JSON object"),
        ("def f(t): return column(t, 'headers', pa.array(['{\"a\":1}']))", "a JSON object of texts"),
        ("def f(t): return column(t, 'tags', pa.array(['[1]']))", "a JSON array of texts"),
        ("def f(t):\n  x = {'a': 1}\n  return x['secret']", r"user_code:f: KeyError in line 9 of its module$"),
    ],
)  # fmt: skip
def test_what_a_function_may_not_do(make_chain: MakeChain, source: str, said: str) -> None:
    """The error names processor, function and column or line, but no value."""
    with pytest.raises(ProcessorFailed, match=said) as caught:
        made(make_chain(source), [row()])

    assert "processor python: " in str(caught.value)
    assert "secret" not in str(caught.value)


def test_pandas_types(make_chain: MakeChain) -> None:
    """A pandas column with values of a wrong type is rejected with its name and type."""
    with pytest.raises(
        ProcessorFailed, match="column after is int64, with values that are not of type string"
    ):
        made(make_chain("def f(t): return t.assign(after=5)", format="pandas"), [row()])
    with pytest.raises(ProcessorFailed, match="returned Table, not a pandas DataFrame"):
        made(make_chain("def f(t): return pa.table({})", format="pandas"), [row()])


def test_line_breaks_between_tokens(make_chain: MakeChain) -> None:
    """A message stays a single line, whatever the function's JSON library writes."""
    source = "def f(t): return column(t, 'after', pa.array(['{\\n \"a\": \"x\\\\ny\"}']))"

    (one,) = made(make_chain(source), [row()])

    assert one["after"] == '{  "a": "x\\ny"}'


def test_memory_between_calls(make_chain: MakeChain) -> None:
    """A module's state belongs to one processor of one chain."""
    source = """
calls = []
def f(t):
    calls.append(1)
    return column(t, "topic", pa.array([str(len(calls))] * t.num_rows))
"""
    chain = make_chain(source)
    with Chain(chain) as one:
        found = [
            e["topic"] for b in one.run([batch([row()]), batch([row()])]) for e in b.to_pylist()
        ]

    assert found == ["1", "2"]
    assert made(chain, [row()])[0]["topic"] == "1"


def test_changed_code_is_another_chain(make_chain: MakeChain) -> None:
    """The hash includes the source; a worker that finds a different source than the run refuses it."""
    first = make_chain(PASS["arrow"])
    second = make_chain("def f(table): return table.slice(1)")

    assert first.hash != second.hash
    with pytest.raises(SpecError, match="the module's source is not the one that the run has"):
        Chain(first)


def test_problems_are_found_without_an_event(make_chain: MakeChain) -> None:
    """`deltaforge validate` imports the function."""
    ((number, text),) = make_chain("import nosuch").problems()

    assert (number, "there is no module nosuch" in text) == (0, True)


def test_a_limited_function_does_the_same(make_chain: MakeChain) -> None:
    """In a child process, the function has the same columns, hash and state between calls."""
    source = """
calls = []
def f(t):
    print("not an answer")
    calls.append(1)
    return t
"""
    rows = [
        row(after='{"n":12345678901234567890123456789012345678901,"d":1.10}', tx_end=False),
        row(event_id="0192f0c1-0000-7000-8000-000000000002", schema=None, key=None, after=None,
            ordinal=1, tx_end=True),
    ]  # fmt: skip
    chain = make_chain(source, format="pandas", limits=LIMITED)

    assert made(chain, rows) == rows
    assert chain.hash == make_chain(source, format="pandas").hash


def test_what_goes_wrong_in_the_process_is_told_as_without_it(make_chain: MakeChain) -> None:
    """Exceptions, wrong results and modules that cannot be loaded are reported; the module keeps its state."""
    source = """
calls = []
def f(t):
    calls.append(1)
    if len(calls) == 1:
        raise KeyError("secret")
    if len(calls) == 2:
        return None
    return column(t, "topic", pa.array([str(len(calls))] * t.num_rows))
"""
    with Chain(make_chain(source, limits=LIMITED)) as chain:
        with pytest.raises(
            ProcessorFailed, match=r"python: user_code:f: KeyError in line 12 of its module$"
        ):
            list(chain.run([batch([row()])]))
        with pytest.raises(ProcessorFailed, match="returned NoneType, not a pyarrow Table"):
            list(chain.run([batch([row()])]))
        (found,) = chain.run([batch([row()])])

    assert found["topic"].to_pylist() == ["3"]
    ((_, text),) = make_chain("import nosuch", limits=LIMITED).problems()
    assert "there is no module nosuch" in text
    ((_, text),) = make_chain("import os; os._exit(3)", limits=LIMITED).problems()
    assert "the function's process ended with exit code 3" in text


HANGS = """
import ctypes, os, pathlib, signal
tries = pathlib.Path(__file__).with_name("tries")
count = [0]
def f(t):
    count[0] += 1
    if not tries.exists():
        tries.write_text(str(os.getpid()))
        {hang}
    return column(t, "topic", pa.array([str(count[0])] * t.num_rows))
"""


@pytest.mark.parametrize(
    ("hang", "limit", "said"),
    [
        # PyDLL holds the GIL, so meanwhile no other thread and no Python signal handler can run.
        ("ctypes.PyDLL(None).sleep(3600)", 200, r"a call took more than 200 ms \(limits.timeout_ms\)$"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 60_000, "the function's process ended by signal 11$"),
    ],
)  # fmt: skip
def test_a_function_that_hangs_or_dies(
    make_chain: MakeChain, tmp_path: Path, hang: str, limit: int, said: str
) -> None:
    """Its process ends, and the error tells that with the processor's id; the next call gets a new process."""
    with Chain(make_chain(HANGS.format(hang=hang), limits={"timeout_ms": limit})) as chain:
        with pytest.raises(ProcessorFailed, match=f"^processor python: user_code:f: {said}"):
            list(chain.run([batch([row()])]))
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "tries").read_text()), 0)
        chain_again = next(iter(_patient(chain)))

    assert chain_again["topic"].to_pylist() == ["1"]


def _patient(chain: Chain) -> Iterator[Any]:
    """Retry a batch until it succeeds: on a busy machine a short limit may be exceeded by chance."""
    while True:
        with contextlib.suppress(ProcessorFailed):
            yield from chain.run([batch([row()])])
            return


def test_a_call_that_outlives_its_parent_ends(make_chain: MakeChain, tmp_path: Path) -> None:
    """A worker that is killed during a call leaves no process behind, whatever the function does."""
    source = HANGS.format(hang="ctypes.PyDLL(None).sleep(3600)")
    chain = make_chain(source, limits={"timeout_ms": 1})
    program = f"""
import os, pickle, signal, sys
from deltaforge_dagster.processors import python_child as child
from deltaforge_dagster.processors.chain import Chain
from tests.e2e.deployment import eventually
from tests.processors.rows import batch, row
child.SocketTimeLimit = lambda *_: __import__("contextlib").nullcontext()
list(Chain(pickle.loads({pickle.dumps(chain)!r})).run([batch([row()])]))
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    tries = tmp_path / "tries"
    eventually(lambda: tries.exists() and tries.read_text())
    parent.kill()
    parent.wait()

    child = int(tries.read_text())
    eventually(lambda: not _lives(child))


def _lives(process: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
