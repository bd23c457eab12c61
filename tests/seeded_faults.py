"""Faults seeded into a copy of the product, each of which the tests must find.

    python -m tests.seeded_faults                         # all of them: make faults
    python -m tests.seeded_faults resume-table tick-dead  # these
    python -m tests.seeded_faults --list                  # what there is
    python -m tests.seeded_faults --against ../old        # in the sources and by the tests of another checkout

Each fault is one small change of the sort that somebody makes by mistake, in a module of its own, with the
tests that are run for that module. The checkout is copied once, as it is in the working tree. Then fault after fault
is put into the copy, its tests are run there, and the file is restored. A fault is found when a test fails. The exit code
is 1 if one was not found, 2 if something else went wrong: tests fail without a fault, pytest could not run, or a
fault's text is not in its file any more.

What pytest printed is kept in `build/faults`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "deltaforge_dagster"

_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_PASSED, _TESTS_FAILED = 0, 1
"""Exit codes of pytest; the others say that it could not do its work."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A change that makes the product wrong.

    Attributes:
        name: What it is called on the command line.
        kind: What sort of mistake it is.
        file: The file that it changes, below the repository.
        old: The text that is there, once.
        new: The text in its place.
        tests: What pytest is given: the tests of that module which run in `make test`.
        matters: What would go wrong for a user.
    """

    name: str
    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    matters: str


FAULTS = (
    Fault(
        "frees-nothing",
        "dropped condition",
        "deltaforge_dagster/pipeline/run/confirmer.py",
        "if log.retained > above and freed > above / 2:",
        "if log.retained > above:",
        ("tests/pipeline/run/test_confirmer.py",),
        "The log is confirmed before delivery although that frees nothing: an open transaction retains it.",
    ),
    Fault(
        "decimal-rounded",
        "dropped condition",
        "deltaforge_dagster/typed_rows/numbers.py",
        "too_precise = bool(too_precise or digit > 0)",
        "too_precise = False",
        ("tests/typed_rows/test_columns.py",),
        "Decimals beyond a column's scale are cut off without a word.",
    ),
    Fault(
        "absent-is-null",
        "dropped condition",
        "deltaforge_dagster/typed_rows/cells.py",
        "elif not (marks_unchanged and equals(source, value, at, UNCHANGED)):",
        "else:",
        ("tests/typed_rows/test_rows.py",),
        "A large value that an update did not change is replaced by the mark that stands in its place.",
    ),
    Fault(
        "zone-guessed",
        "dropped condition",
        "deltaforge_dagster/typed_rows/times.py",
        "if has_zone == (zone == stop):",
        "if has_zone and zone == stop:",
        ("tests/typed_rows/test_columns.py",),
        "A moment with an offset becomes a local time, without the offset.",
    ),
    Fault(
        "empty-variable",
        "dropped condition",
        "deltaforge_dagster/config/env.py",
        "if value is not None and (value or not colon):",
        "if value is not None:",
        ("tests/config/test_env.py",),
        "An empty variable takes the place of the default that the pipeline file gives.",
    ),
    Fault(
        "gtid-touching",
        "boundary",
        "deltaforge_dagster/sources/mysql/position.py",
        "begin = bisect.bisect_left(lasts, first - 1)",
        "begin = bisect.bisect_left(lasts, first)",
        ("tests/sources/mysql/test_position.py",),
        "Intervals that touch stay apart, so that equal sets differ and positions grow with every transaction.",
    ),
    Fault(
        "version-order",
        "swapped order",
        "deltaforge_dagster/tables.py",
        "combined = [*(version for version in older if version not in newer), *newer]",
        "combined = [*newer, *(version for version in older if version not in newer)]",
        ("tests/journal/test_writer.py",),
        "A range tells its oldest table version as the one that holds at its end.",
    ),
    Fault(
        "hash-of-batches",
        "forgotten offset",
        "deltaforge_dagster/journal/hashing.py",
        'self._hash.update((starts + self._rows).astype("<i8").data)',
        'self._hash.update(starts.astype("<i8").data)',
        ("tests/journal/test_hashing.py",),
        "The same rows have another content hash when they were cut into other batches: `verify` cries wolf.",
    ),
    Fault(
        "lease-epoch",
        "dropped fence",
        "deltaforge_dagster/state/leases.py",
        "if locked.epoch != lease.epoch:",
        "if locked.epoch < lease.epoch:",
        ("tests/contracts/test_store.py::TestFence",),
        "A run that was overtaken goes on to write beside the one that holds the lease.",
    ),
    Fault(
        "checkpoint-backwards",
        "dropped comparison",
        "deltaforge_dagster/state/checkpoints.py",
        'backwards = (segment, complete) < (row["segment"], row["complete"]) or (',
        'backwards = segment < row["segment"] or (',
        ("tests/contracts/test_store_checkpoints.py::TestCheckpoints",),
        "A checkpoint that is complete becomes incomplete again, and its segment is sent once more.",
    ),
    Fault(
        "retention-paused",
        "changed operator",
        "deltaforge_dagster/state/ranges.py",
        'checkpoints.c.state != "detached",',
        'checkpoints.c.state == "attached",',
        (
            "tests/contracts/test_store_checkpoints.py::TestPaused",
            "tests/contracts/test_store_journal.py::TestRetention",
        ),
        "Retention removes the segments that a paused sink has yet to get.",
    ),
    Fault(
        "postgres-transaction-end",
        "dropped mark",
        "deltaforge_dagster/sources/postgres/decode/decoder.py",
        "return [self._ending_at(with_tx_end(parked), int(tx[TX_END_LSN]), int(tx[TX_XID]))]",
        "return [self._ending_at(parked, int(tx[TX_END_LSN]), int(tx[TX_XID]))]",
        ("tests/sources/postgres/decode/test_decoder.py",),
        "A transaction whose commit comes with the next piece of the stream has no last change.",
    ),
    Fault(
        "postgres-keepalive",
        "dropped condition",
        "deltaforge_dagster/sources/postgres/decode/scan.py",
        "if state[OPEN] == 0 and passed > state[IDLE_LSN]:",
        "if passed > state[IDLE_LSN]:",
        ("tests/sources/postgres/decode/test_decoder.py",),
        "A keepalive amid a transaction counts as its end, so that segments are cut within it.",
    ),
    Fault(
        "mysql-negative",
        "wrong sign",
        "deltaforge_dagster/sources/mysql/values/scalars.py",
        "value = (value ^ (~_ZERO >> np.uint64(64 - 8 * size))) + _ONE",
        "value = value ^ (~_ZERO >> np.uint64(64 - 8 * size))",
        ("tests/sources/mysql/decode/test_decoder.py",),
        "Negative integers are read as one's complement: -1 arrives as -0, -2 as -1.",
    ),
    Fault(
        "mysql-open-gtid",
        "wrong moment",
        "deltaforge_dagster/sources/mysql/decode/transaction_assembler.py",
        "ended = int(state[TXS]) - (1 if state[OPEN] else 0)",
        "ended = int(state[TXS])",
        ("tests/sources/mysql/decode/test_decoder.py",),
        "The GTID of a transaction counts when it has begun: after a restart its rest is never read.",
    ),
    Fault(
        "turso-last-row",
        "boundary",
        "deltaforge_dagster/sources/turso/polling.py",
        'begin, bounds = (">=", _LOWEST) if after is None else (">", after)',
        'begin, bounds = ">=", _LOWEST if after is None else after',
        ("tests/sources/turso/test_polling.py",),
        "The newest row of each table comes again at every poll.",
    ),
    Fault(
        "kafka-guard",
        "dropped fence",
        "deltaforge_dagster/sinks/kafka/sink.py",
        "        guard()  # as late as possible: the answer about a topic may have taken long\n",
        "",
        (
            "tests/contracts/test_sink.py::TestSink::test_guard_refuses_at_once[bare-kafka]",
            "tests/contracts/test_sink.py::TestSink::test_guard_refuses_on_the_way[bare-kafka]",
        ),
        "A run that has lost its lease sends on to Kafka, between the messages of its successor.",
    ),
    Fault(
        "redis-not-executed",
        "dropped comparison",
        "deltaforge_dagster/sinks/redis/sink.py",
        "            if not verdict.executed:\n"
        "                raise self._position_moved()\n"
        "        if keeping:\n",
        "        if keeping:\n",
        ("tests/sinks/redis/test_positions.py",),
        "A block that Redis has dropped, because the position had moved, counts as delivered.",
    ),
    Fault(
        "nats-lost-stream",
        "dropped comparison",
        "deltaforge_dagster/sinks/nats/session.py",
        "elif current.problem is not None or current.live != self.tail.live:",
        "elif current.problem is not None:",
        ("tests/sinks/nats/test_positions.py",),
        "A stream that was recreated or restored is written on to, and what it has lost never comes again.",
    ),
    Fault(
        "http-overlap",
        "dropped comparison",
        "deltaforge_dagster/sinks/http/sink.py",
        "        return bool(self._busy[request.keys].any())",
        "        return False",
        ("tests/sinks/http/test_sink.py",),
        "Two changes of a row are under way at once, and the later one may arrive first.",
    ),
    Fault(
        "outbox-updates",
        "changed operator",
        "deltaforge_dagster/processors/outbox.py",
        'if op != "c":',
        'if op == "d":',
        ("tests/processors/test_outbox.py",),
        "Whoever marks a row of an outbox as done sends its event once more.",
    ),
    Fault(
        "drift-length",
        "boundary",
        "deltaforge_dagster/sensing/drift.py",
        "return len(json.loads(text, strict=False)) <= column.length",
        "return len(json.loads(text, strict=False)) < column.length",
        ("tests/sensing/test_table.py",),
        "Texts that just fit their column are reported as too long for it.",
    ),
    Fault(
        "deliverer-order",
        "order of two writes",
        "deltaforge_dagster/pipeline/deliver/sender.py",
        "            try:\n                if not self._send_after(reached, encoded, row, sink):\n",
        "            try:\n"
        "                self._progress.advance(row, last, sink, complete=last == row.rows - 1)\n"
        "                if not self._send_after(reached, encoded, row, sink):\n",
        ("tests/pipeline/deliver/test_sender.py",),
        "The checkpoint moves before the sink has anything: what was not acknowledged in time is lost.",
    ),
    Fault(
        "cutter-full",
        "boundary",
        "deltaforge_dagster/pipeline/capture/segments.py",
        "if writer is not None and writer.rows >= limits.max_events:",
        "if writer is not None and writer.rows > limits.max_events:",
        ("tests/pipeline/capture/test_segments.py",),
        "A segment that has reached its limit takes in another transaction, however large.",
    ),
    Fault(
        "table-ends-ignored",
        "forgotten condition",
        "deltaforge_dagster/pipeline/tables/planner.py",
        " or last.segment in ends:",
        ":",
        ("tests/pipeline/tables/test_delivery.py", "tests/pipeline/tables/test_planner.py"),
        "After `checkpoint reset`, a changelog gets changes twice that it has already.",
    ),
    Fault(
        "table-plan-overwritten",
        "missing check",
        "deltaforge_dagster/state/table_commits.py",
        'row["planned_to"] not in {None, to} or',
        "",
        ("tests/contracts/test_store_table_commits.py",),
        "A planned commit is replaced by another, of which some tables have a part already.",
    ),
    Fault(
        "resume-table",
        "boundary",
        "deltaforge_dagster/pipeline/deliver/resumption.py",
        "min(journal.next_segment, sent_segment + 1)",
        "min(journal.next_segment, sent_segment)",
        ("tests/pipeline/deliver/test_resumption_rules.py",),
        "A sink that has lost its newest data, which the journal no longer has, goes on instead of stopping.",
    ),
    Fault(
        "splice-moved-key",
        "forgotten removal",
        "deltaforge_dagster/pipeline/snapshots/chunk_rows.py",
        "row = self._moved.pop(old_key or key, -1)",
        "row = self._moved.get(old_key or key, -1)",
        ("tests/pipeline/snapshots/test_chunk_rows.py",),
        "A snapshot's row whose key moved and came back is delivered under the key that it has left.",
    ),
    Fault(
        "publication-run",
        "changed operator",
        "deltaforge_dagster/pipeline/control/closed_ranges.py",
        "(asset == CHANGES and row.epoch != lease.epoch)",
        "(asset == CHANGES and row.epoch > lease.epoch)",
        ("tests/assets/test_publish.py", "tests/pipeline/control/test_closed_ranges.py"),
        "A range that an earlier run captured links to the log of the run that published it.",
    ),
    Fault(
        "publish-order",
        "order of two writes",
        "deltaforge_dagster/assets/publish.py",
        "        if not wanted(publication):\n"
        "            store.pipelines.note_since(pipeline, UNREPORTED)\n"
        "        elif not _is_recorded(instance, pipeline, publication):\n"
        "            emit(materialization(pipeline, publication, journal))\n"
        "            written += 1\n"
        "        store.ranges.mark_published(pipeline, publication.range, publication.asset)\n",
        "        store.ranges.mark_published(pipeline, publication.range, publication.asset)\n"
        "        if not wanted(publication):\n"
        "            store.pipelines.note_since(pipeline, UNREPORTED)\n"
        "        elif not _is_recorded(instance, pipeline, publication):\n"
        "            emit(materialization(pipeline, publication, journal))\n"
        "            written += 1\n",
        ("tests/assets/test_publish.py",),
        "A range whose publisher is killed between the two writes never shows in Dagster.",
    ),
    Fault(
        "memory-state",
        "wrong default",
        "deltaforge_dagster/resources/platform.py",
        "single_process: bool = False",
        "single_process: bool = True",
        ("tests/resources/test_platform.py",),
        "Under Dagster each process has a state in memory of its own, and forgets it.",
    ),
    Fault(
        "tick-dead",
        "wrong sign",
        "deltaforge_dagster/sensors/tick.py",
        "dead = store.now() - lease.expires_at > LOST_SECONDS",
        "dead = lease.expires_at - store.now() > LOST_SECONDS",
        ("tests/sensors/test_tick.py",),
        "A run that is at work is reported as dead, and one that is dead never.",
    ),
    Fault(
        "guard-token",
        "changed operator",
        "deltaforge_dagster/api/guard.py",
        'return scheme.lower() == "bearer" and same',
        'return scheme.lower() == "bearer" or same',
        ("tests/api/test_guard.py",),
        "Any token opens the REST API.",
    ),
    Fault(
        "validate-exit-code",
        "dropped condition",
        "deltaforge_dagster/cli/files/validate.py",
        "valid = not missing and all(isinstance(pipeline, LoadedPipeline) for pipeline in pipelines)",
        "valid = all(isinstance(pipeline, LoadedPipeline) for pipeline in pipelines)",
        ("tests/cli/files/test_validate.py",),
        "A pipeline file that is not there passes CI, which looks at the exit code.",
    ),
    Fault(
        "pinned-file",
        "order of two writes",
        "deltaforge_dagster/installation/maven.py",
        "        _receive(artifact, f\"{repository.rstrip('/')}/{artifact.path}\", part, stream, progress)\n"
        "        _finish(stream, file)\n",
        "        _finish(stream, file)\n"
        "        _receive(artifact, f\"{repository.rstrip('/')}/{artifact.path}\", file, stream, progress)\n",
        ("tests/installation/test_maven.py",),
        "A download that is not the pinned file is kept, and used without a word the next time.",
    ),
)


Result = tuple[str, str, float]
"""What became of a fault (`found`, `NOT found`, `not applicable`, `error`), what more is to say, and seconds."""


class Broken(Exception):  # noqa: N818 - the script stops with its text
    """Something is wrong that is no fault which was not found."""


def problem(fault: Fault, checkout: Path) -> str | None:
    """Return why a fault cannot be put into a checkout, None if it can."""
    file = checkout / fault.file
    if not file.exists():
        return f"there is no {fault.file}"
    times = file.read_text().count(fault.old)
    if times != 1:
        return f"its text occurs {times} times in {fault.file}"
    missing = [one for one in fault.tests if not (checkout / one.partition("::")[0]).exists()]
    return f"there is no {missing[0]}" if missing else None


class Copy:
    """A copy of a checkout, in which tests are run.

    Args:
        checkout: What is copied, as it is in the working tree.
        folder: An empty directory for it.
        logs: Where what pytest printed is kept.
    """

    def __init__(self, checkout: Path, folder: Path, logs: Path) -> None:
        self.root = folder / "checkout"
        self._logs = logs
        names = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"],
            cwd=checkout, check=True, capture_output=True, text=True,
        ).stdout.split("\0")  # fmt: skip
        for name in filter(None, dict.fromkeys(names)):
            if os.path.lexists(checkout / name):  # else it is deleted, but not in the index
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(checkout / name, self.root / name, follow_symlinks=False)
        # Child processes import the copy, not what is installed; each fault has kernels of its own.
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "NUMBA_CACHE_DIR": str(folder / "kernels"),
        }
        self._check_import(folder)

    def _check_import(self, elsewhere: Path) -> None:
        program = f"import {PACKAGE}; print({PACKAGE}.__file__)"
        found = subprocess.run(
            [sys.executable, "-c", program],
            cwd=elsewhere, env=self._environment, check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        if not Path(found).resolve().is_relative_to(self.root.resolve()):
            raise Broken(f"{PACKAGE} is imported from {found}, not from the copy {self.root}")

    def pytest(self, name: str, tests: Sequence[str], *options: str) -> tuple[int, str]:
        """Run tests, in the order and with the examples of `make test`; return exit code and output."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        log = self._logs / f"{name}.log"
        with log.open("w") as output:
            ended = subprocess.run(
                [*command, "--randomly-seed=1", *options, *tests],
                cwd=self.root, env=self._environment, check=False,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        return ended.returncode, log.read_text(errors="replace")

    def write(self, file: str, text: str) -> None:
        """Change a file; its compiled form goes, which knows it by size and second only."""
        path = self.root / file
        path.write_text(text)
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def found_by(self, fault: Fault) -> str | None:
        """Return the first test that fails with a fault, None if none does.

        Raises:
            Broken: Pytest could not run the tests.
        """
        before = (self.root / fault.file).read_text()
        self.write(fault.file, before.replace(fault.old, fault.new))
        try:
            code, output = self.pytest(fault.name, fault.tests, "-x")
        finally:
            self.write(fault.file, before)
        if code == _PASSED:
            return None
        if code != _TESTS_FAILED:
            raise Broken(f"pytest ended with exit code {code}:\n{_tail(output)}")
        return failed(output)


def failed(output: str) -> str:
    """Return the first failed test that pytest names in what it printed."""
    found = _FAILED.search(output)
    return found[1] if found else "a test"


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-30:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit code."""
    options = _options(arguments)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if options.list:
        for fault in FAULTS:
            console.print(f"{fault.name:<24}  {fault.kind:<19}  {fault.file}: {fault.matters}")
        return 0
    try:
        return _run(console, options)
    except Broken as error:
        console.print(str(error))
        return 2


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.seeded_faults",
        description="Seed faults into a copy of the product, each of which the tests must find.",
    )
    parser.add_argument("--list", action="store_true", help="show the faults, and do nothing")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout than this")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the tests without any fault first"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults; all without")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {fault.name for fault in FAULTS}:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; --list shows what there is")
    return options


def _run(console: Console, options: argparse.Namespace) -> int:
    checkout = (options.against or REPOSITORY).resolve()
    chosen = [fault for fault in FAULTS if not options.names or fault.name in options.names]
    problems = {fault.name: why for fault in chosen if (why := problem(fault, checkout))}
    if problems and options.against is None:
        raise Broken("\n".join(f"{name}: {why}" for name, why in problems.items()))
    possible = [fault for fault in chosen if fault.name not in problems]
    results: dict[str, Result] = {
        name: ("not applicable", f": {why}", 0.0) for name, why in problems.items()
    }
    logs = REPOSITORY / "build" / "faults"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="deltaforge-faults-") as folder:
        copy = Copy(checkout, Path(folder), logs)
        if possible and not options.no_baseline:
            _check_baseline(console, copy, possible)
        for fault in possible:
            results[fault.name] = _tried(copy, fault)
            outcome, said, seconds = results[fault.name]
            console.print(f"{fault.name}: {outcome}{said}, {seconds:.0f} s")
    _print(console, chosen, results)
    outcomes = {outcome for outcome, _, _ in results.values()}
    return 2 if "error" in outcomes else int("NOT found" in outcomes)


def _tried(copy: Copy, fault: Fault) -> Result:
    """Return what became of a fault; one whose tests cannot be run does not keep the others from theirs."""
    begun = time.monotonic()
    try:
        test = copy.found_by(fault)
    except Broken as error:
        return "error", f": {error}", time.monotonic() - begun
    found = ("NOT found", "") if test is None else ("found", f" by {test}")
    return *found, time.monotonic() - begun


def _check_baseline(console: Console, copy: Copy, faults: Sequence[Fault]) -> None:
    tests = list(dict.fromkeys(test for fault in faults for test in fault.tests))
    begun = time.monotonic()
    code, output = copy.pytest("baseline", tests)
    if code != _PASSED:
        raise Broken(f"without any fault pytest ends with exit code {code}:\n{_tail(output)}")
    console.print(f"without any fault the tests pass, {time.monotonic() - begun:.0f} s")


def _print(console: Console, faults: Sequence[Fault], results: dict[str, Result]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("fault", "kind", "file", "outcome"):
        table.add_column(title, overflow="fold")
    table.add_column("seconds", justify="right")
    for fault in faults:
        outcome, _, seconds = results[fault.name]
        row = (fault.name, fault.kind, fault.file.removeprefix(f"{PACKAGE}/"), outcome)
        table.add_row(*row, f"{seconds:.0f}")
    console.print(table)
    counts = Counter(outcome for outcome, _, _ in results.values())
    console.print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    for fault in faults:
        outcome, said, _ = results[fault.name]
        if outcome == "NOT found":
            console.print(f"NOT found: {fault.name}: {fault.matters}")
        elif outcome != "found":
            console.print(f"{outcome}: {fault.name}{said}")


if __name__ == "__main__":
    sys.exit(main())
