"""A script in V8: its forms, its results, its limits, and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from deltaforge_dagster.errors import ProcessorFailed, SpecError
from deltaforge_dagster.processors import v8 as script_module
from deltaforge_dagster.processors.v8 import CallLimits, Script

EVENT: dict[str, Any] = {
    "before": None,
    "after": {"id": 1, "email": "alice@example.com"},
    "source": {"db": "shop", "table": "orders"},
    "op": "c",
    "ts_ms": 1_700_000_000_000,
    "event_id": "a",
}


def event(event_id: str, **changed: Any) -> dict[str, Any]:
    """Return an event with some fields changed."""
    return {**EVENT, "event_id": event_id, **changed}


Make = Callable[..., Script]

PATIENT = CallLimits(cpu_ms=20_000, timeout_ms=120_000)
"""Limits that even a busy machine does not reach."""


@pytest.fixture
def scripts() -> Iterator[Make]:
    """Create scripts, and close them after the test."""
    with ExitStack() as stack:

        def make(source: str, limits: CallLimits = PATIENT) -> Script:
            script = Script("mask", source, limits)
            stack.callback(script.close)
            return script

        yield make


def called(
    script: Script, *events: dict[str, Any], text: str | None = None, spelled: bool = False
) -> Any:
    """Return a script's result for events, in the form of `give`."""
    told = script.call(text or json.dumps(events), spelled=spelled)
    return None if told is None else json.loads(told)


def test_events_that_go_on_unchanged_are_not_told(scripts: Make) -> None:
    """A script that returns its input unchanged gives no differences, whatever form its result has."""
    for source in (
        "function processBatch(events) { return events; }",
        "function processBatch(events) { }",
        "const processBatch2 = 1; function processBatch(events) { return null; }",
        "(event) => [event]",
        "(event) => event",
        "return [event];",
    ):
        assert called(scripts(source), event("a"), event("b")) is None


@pytest.mark.parametrize(
    "source",
    [
        "function processBatch(events) { for (const e of events) e.after.email = 'x'; return events; }",
        "function processBatch(events) { return events.map(mask); } function mask(e) { e.after.email = 'x'; return e; }",
        "(event) => { event.after.email = 'x'; return [event]; }",
        "event.after.email = 'x';\nreturn [event];",
        "globalThis.processBatch = (events) => { events.forEach((e) => { e.after.email = 'x'; }); };",
    ],
)
def test_every_form_changes_fields(scripts: Make, source: str) -> None:
    """A function of a batch, a function of an event, and a bare body give the same differences."""
    told = called(scripts(source), event("a"), event("b", after={"id": 2, "email": "x"}))

    assert told == [[0, {"after": '{"id":1,"email":"x"}'}], [1, {}]]


def test_drops_copies_and_orders(scripts: Make) -> None:
    """The returned list is passed on in its order; copies are recognized by their event id."""
    script = scripts("function processBatch([a, b, c]) { return [c, a, {...a, tags: ['copy']}]; }")

    told = called(script, event("a"), event("b"), event("c"))

    assert told == [[2, {}], [0, {}], [0, {"tags": '["copy"]'}]]


def test_a_new_event_is_given_whole(scripts: Make) -> None:
    """An event with an id that was not in the batch is new."""
    script = scripts("(event) => [event, {...event, event_id: undefined, after: {n: 1}}]")

    told = called(script, event("a"))

    assert told[0] == [0, {}]
    assert told[1][0] == -1
    assert told[1][1]["event"]["after"] == {"n": 1}


def test_a_mutated_array_counts_without_a_return(scripts: Make) -> None:
    """A script that returns nothing passes on the array that it was given, including its changes to it."""
    script = scripts("function processBatch(events) { events.reverse(); events.pop(); }")

    assert called(script, event("a"), event("b"), event("c")) == [[2, {}], [1, {}]]


def test_routes(scripts: Make) -> None:
    """`ev.route` and the global `route` set an event's route; a copy needs the global function."""
    script = scripts(
        "(e) => { e.route({topic: 'a', headers: {x: '1'}});"
        " const copy = {...e}; route(copy, {key: 'k'}); return [e, copy]; }"
    )

    assert called(script, event("a")) == [
        [0, {"route": {"topic": "a", "headers": {"x": "1"}}}],
        [0, {"route": {"key": "k"}}],
    ]


def test_aliases(scripts: Make) -> None:
    """`table` is the table's full name, `timestamp` the time of the event; changes of them are ignored."""
    script = scripts(
        "(e) => { e.tags = [e.table, new Date(e.timestamp).toISOString()];"
        " e.processed_at = 'now'; return e; }"
    )
    postgres = event("b", source={"db": "shop", "schema": "public", "table": "orders"})

    told = called(script, event("a"), postgres)

    assert told == [
        [0, {"tags": '["shop.orders","2023-11-14T22:13:20.000Z"]'}],
        [1, {"tags": '["public.orders","2023-11-14T22:13:20.000Z"]'}],
    ]


def test_state_stays_between_calls(scripts: Make) -> None:
    """Top-level definitions of a script live as long as the engine."""
    script = scripts(
        "let seen = 0; function processBatch(es) { for (const e of es) e.tags = [`${++seen}`]; }"
    )

    assert called(script, event("a")) == [[0, {"tags": '["1"]'}]]
    assert called(script, event("a")) == [[0, {"tags": '["2"]'}]]


def test_numbers_keep_their_spelling(scripts: Make) -> None:
    """Numbers that the script did not change keep their spelling, even those that no double can represent."""
    image = '{"big":12345678901234567890,"price":1.10,"one":1.0,"small":5,"list":[1.50,{"x":2e3}]}'
    text = json.dumps([{**EVENT, "after": "IMAGE"}]).replace('"IMAGE"', image)
    script = scripts("(e) => { e.after.small += 1; e.after.sum = e.after.price + 1; return e; }")

    told = called(script, text=text, spelled=True)

    assert told[0][1]["after"] == (
        '{"big":12345678901234567890,"price":1.10,"one":1.0,"small":6,"list":[1.50,{"x":2e3}],"sum":2.1}'
    )


def test_big_integers_are_written_as_numbers(scripts: Make) -> None:
    """A BigInt that a script computes becomes a number in the event."""
    script = scripts("(e) => { e.after.big = 2n ** 64n; return e; }")

    assert called(script, event("a", after={}))[0][1]["after"] == '{"big":18446744073709551616}'


@pytest.mark.parametrize(
    ("returned", "kind"), [("1", "number"), ("'x'", "string"), ("[null]", "null")]
)
def test_anything_else_is_refused(scripts: Make, returned: str, kind: str) -> None:
    """A result that is neither an event nor a list of events stops the batch."""
    with pytest.raises(ProcessorFailed, match=f"JS processor returned unsupported type: {kind}"):
        called(scripts(f"function processBatch(events) {{ return {returned}; }}"), event("a"))


def test_an_error_names_its_line(scripts: Make) -> None:
    """An exception is reported with its line in the script, whatever the script's form."""
    for source in (
        "function processBatch(events) {\n  return events[9].after;\n}",
        "// first\nreturn event.nothing.after;",
    ):
        with pytest.raises(ProcessorFailed, match=r"JS processor threw: TypeError: .*\(line 2\)"):
            called(scripts(source), event("a"))


def test_an_error_does_not_quote_what_is_parsed(scripts: Make) -> None:
    """V8 quotes text that is not JSON, which may be a value of a row, so the error omits it."""
    script = scripts("(e) => JSON.parse(e.after.email)")

    with pytest.raises(ProcessorFailed) as caught:
        called(script, event("a"))
    assert "alice" not in str(caught.value)
    assert "JSON" in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "function processBatch(events) {\n  return events +;\n}",
        "let x = 1;",
        "{\nreturn [event;\n}",
    ],
)
def test_an_invalid_script_is_refused_at_once(scripts: Make, source: str) -> None:
    """Syntax errors, and scripts without anything to call, are found without an event."""
    with pytest.raises(SpecError, match="script"):
        scripts(source)


def test_a_call_that_computes_for_too_long_is_ended(scripts: Make) -> None:
    """`cpu_ms` ends a loop, and the next call gets a new engine."""
    script = scripts(
        "let calls = 0; function processBatch(es) { if (++calls == 2) for (;;) {}; es[0].tags = [`${calls}`]; }",
        CallLimits(cpu_ms=1_000, timeout_ms=200_000),
    )

    assert called(script, event("a")) == [[0, {"tags": '["1"]'}]]
    with pytest.raises(ProcessorFailed, match=r"1000 ms of processor time \(limits.cpu_ms\)"):
        called(script, event("a"))
    assert called(script, event("a")) == [[0, {"tags": '["1"]'}]]


def test_a_call_that_waits_for_too_long_is_ended(scripts: Make) -> None:
    """`timeout_ms` ends a call that uses no processor time."""
    script = scripts(
        "function processBatch() { Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 60000); }",
        CallLimits(cpu_ms=60_000, timeout_ms=200),
    )

    with pytest.raises(ProcessorFailed, match=r"200 ms \(limits.timeout_ms\)"):
        called(script, event("a"))


def test_a_script_that_loads_for_ever_is_refused(
    scripts: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endless loop at the top level is ended, too, but by another limit than calls."""
    scripts("for (const end = Date.now() + 700; Date.now() < end;); (e) => e", CallLimits())
    monkeypatch.setattr(script_module, "_LOAD_SECONDS", 0.3)

    with pytest.raises(SpecError, match=r"does not end within 0\.5 s when it is loaded"):
        scripts("for (;;);", CallLimits())


def test_a_call_that_fills_the_memory_is_ended(scripts: Make) -> None:
    """`mem_mb` ends a call whose heap exceeds it."""
    script = scripts(
        "function processBatch() { const all = []; for (;;) all.push(new Array(1000).fill(1.5)); }",
        CallLimits(cpu_ms=60_000, timeout_ms=120_000, mem_mb=64),
    )

    with pytest.raises(ProcessorFailed, match=r"64 MiB \(limits.mem_mb\)"):
        called(script, event("a"))


@pytest.mark.parametrize(
    "name", ["require", "process", "fetch", "setTimeout", "Deno", "XMLHttpRequest"]
)
def test_nothing_outside_is_reachable(scripts: Make, name: str) -> None:
    """A script has no modules, files, network or timers."""
    assert called(scripts(f"(e) => {{ e.tags = [typeof {name}]; return e; }}"), event("a")) == [
        [0, {"tags": '["undefined"]'}]
    ]
