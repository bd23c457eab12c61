"""`deltaforge run`, `deltaforge replay`: materialize a pipeline's assets without Dagster's daemon.

They execute the same jobs as the sensor and the UI, in this process and on the same Dagster
instance, so the UI shows their runs like any other.

Their output appears on the terminal, and is stored with the run for Dagster's UI (`KeptLogs`).
Dagster redirects standard output and error to files and prints these through child processes.
Ctrl-C reaches the children as well: they die with stack traces, and the run's last messages are
lost. The program also no longer detects its terminal, and what it draws there ends up in the files.
Here every write goes to both.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Annotated, Any, Self, TextIO, cast

import dagster as dg
import typer
from rich.console import Console
from rich.markup import escape

from deltaforge_dagster.assets.names import (
    CAUGHT_UP_METADATA,
    COMMAND,
    OUTCOME_METADATA,
    REASON_TAG,
    RUN_TAG,
    UNTIL_TAG,
    asset_key,
    job_name,
    partition_key,
)
from deltaforge_dagster.assets.publish import add_partition
from deltaforge_dagster.cli.arguments import JsonOption, PipelineArgument, select_pipeline
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.dagster_private import ConfigurableClassData, InstanceRef
from deltaforge_dagster.dagster_private.storage import (
    CapturedLogContext,
    ComputeIOType,
    LocalComputeLogManager,
)
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.errors import DeltaforgeError, NotAllowed
from deltaforge_dagster.pipeline.committed import committed_without
from deltaforge_dagster.pipeline.control.closed_ranges import (
    keeps_what_it_has,
    split_by_delivery,
)
from deltaforge_dagster.pipeline.health.health import HealthProblem, health, sinks_by_error
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.resources.instance import dagster_home, local_instance
from deltaforge_dagster.resources.platform import Platform, existing_store
from deltaforge_dagster.state.store import StateStore

_INTERRUPTED = dg.DagsterExecutionInterruptedError.__name__


def run(
    pipeline: PipelineArgument,
    *,
    until_caught_up: Annotated[
        bool,
        typer.Option(
            "--until-caught-up",
            help="End when every change that the source has now is delivered.",
        ),
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Capture and deliver until there has been no work for a while; Ctrl-C stops the run cleanly.

    The exit code is 1 if `deltaforge status` would show an error of the pipeline: the source could
    not be read or does not send a captured table, a sink that the commit policy waits for fails,
    changes are held. It is also 1 if the lease was lost, or if another run is working on the
    pipeline. Failures of sinks that the commit policy does not wait for are reported, but do not
    change the exit code.
    """
    settings, loaded = select_pipeline(Settings.from_env(), pipeline)
    tags = {RUN_TAG: "live", REASON_TAG: COMMAND}
    if until_caught_up:
        tags[UNTIL_TAG] = "caught up"
    outcome: dict[str, Any] = {"reason": "interrupted"}
    success = False
    try:
        with _progress(settings, loaded):
            result = _execute(settings, loaded, tags=tags)
        outcome = _with_problems(settings, loaded, _outcome(result))
        success = (
            result.success
            and _delivered(loaded, outcome)
            and not any(problem["severity"] == "error" for problem in outcome["problems"])
        )
    finally:
        if json_output:
            typer.echo(json.dumps({"pipeline": loaded.name, "success": success, **outcome}))
    if outcome.get("reason") == "interrupted":
        raise KeyboardInterrupt
    if not json_output:
        _report(loaded.name, outcome)
    if not success:
        raise typer.Exit(1)


def _with_problems(
    settings: Settings, loaded: LoadedPipeline, outcome: dict[str, Any]
) -> dict[str, Any]:
    """Return a run's outcome with the problems that `deltaforge status` shows now.

    If the state store was in the run's memory, the problems are those that the run recorded at its
    end.
    """
    if not {"captured", "error"} & outcome.keys():
        return outcome
    with existing_store(settings) as store:
        if store is None:
            return {"problems": [], **outcome}
        problems = [problem.to_json() for problem in health(store, loaded).problems]
    return {**outcome, "problems": problems}


def _delivered(loaded: LoadedPipeline, outcome: Mapping[str, Any]) -> bool:
    """Return whether the commit policy is satisfied without the sinks that are behind and fail."""
    if outcome["reason"] == "held elsewhere":
        return False
    failing = outcome["sink_errors"].keys() & outcome["behind"].keys()
    return committed_without(loaded.spec, failing)


def _report(pipeline: str, outcome: Mapping[str, Any]) -> None:
    """Print what a run did.

    Raises:
        DeltaforgeError: The run failed, or another run is working on the pipeline.
    """
    if "error" in outcome:
        raise DeltaforgeError(outcome["error"])
    if outcome["reason"] == "held elsewhere":
        raise DeltaforgeError(f"another run is working on pipeline {pipeline}")
    typer.echo(_sentence(outcome))
    if outcome["capture_error"] is not None:
        typer.secho(f"error: {outcome['capture_error']}", fg=typer.colors.RED, err=True)
    capture_error = outcome["capture_error"] or ""
    for problem in (HealthProblem(**fields) for fields in outcome["problems"]):
        named = problem.text in capture_error or problem.subject.startswith("sink")
        if problem.severity == "error" and not named:
            typer.secho(f"error: {problem.line}", fg=typer.colors.RED, err=True)
    for error, sinks in sinks_by_error(outcome["sink_errors"]).items():
        fail = "is behind and fails" if len(sinks) == 1 else "are behind and fail"
        typer.echo(f"{', '.join(sinks)} {fail}: {error}")


def replay(
    pipeline: PipelineArgument,
    *,
    ranges: Annotated[str, typer.Option("--range", help="Range N, or the consecutive ranges N-M.")],
    sink: Annotated[str, typer.Option(help="The sink to deliver them to.")],
    reprocess: Annotated[
        bool,
        typer.Option(
            "--reprocess",
            help=(
                "Run the file's current processors over the captured changes, "
                "and deliver the result."
            ),
        ),
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Deliver closed ranges to one sink again, marked as a replay; no checkpoint moves.

    Ranges that the sink does not have yet are delivered in order, without the mark, and move its
    checkpoint; this requires that no run is working on the pipeline. Tables and object files keep
    what they have: nothing is written to them again. With --reprocess the sink must already have
    the ranges; the journal keeps its recorded content.
    """
    settings, loaded = select_pipeline(Settings.from_env(), pipeline)
    numbers = range_numbers(ranges)
    first, last = numbers[0], numbers[-1]
    # Check before Dagster's job does, so that a refusal is one message of this command.
    with Platform(settings, single_process=True).open() as opened:
        has, _ = split_by_delivery(opened.store, loaded.name, sink, numbers)
    tags = {RUN_TAG: "reprocess"} if reprocess else {}
    tags |= {
        "dagster/asset_partition_range_start": partition_key(first),
        "dagster/asset_partition_range_end": partition_key(last),
    }
    selection = [asset_key(loaded.name, sink)]
    result = _execute(settings, loaded, tags=tags, selection=selection, ranges=numbers)
    if not result.success:
        raise DeltaforgeError(_outcome(result)["error"])
    again, caught_up = _messages(result)
    if json_output:
        fields = {"pipeline": loaded.name, "sink": sink, "range": ranges}
        typer.echo(json.dumps({**fields, "sent": again, "caught_up": caught_up}))
        return
    if has and keeps_what_it_has(loaded.spec, sink):
        text = (
            f"The tables of {sink} have {pluralize(len(has), 'range')} of {ranges}, "
            f"and keep what they have: nothing was written again, "
            f"{pluralize(caught_up, 'change')} for the first time."
        )
        typer.echo(text)
        return
    how = "again, with the current processors" if reprocess else "again"
    text = f"Range {ranges}: {pluralize(again, 'message')} sent to {sink} {how}"
    typer.echo(text + (f", {caught_up:,} for the first time." if caught_up else "."))


def _messages(result: dg.ExecuteInProcessResult) -> tuple[int, int]:
    """Return how many messages were replayed, and how many were delivered for the first time."""
    again = caught_up = 0
    for event in result.all_events:
        metadata: Mapping[str, Any] = {}
        if event.is_step_materialization:
            metadata = event.step_materialization_data.materialization.metadata
        elif event.is_asset_observation:
            metadata = event.asset_observation_data.asset_observation.metadata
        again += sum(
            int(metadata[name].value) for name in ("replayed", "reprocessed") if name in metadata
        )
        if CAUGHT_UP_METADATA in metadata:
            caught_up += int(metadata[CAUGHT_UP_METADATA].value)
    return again, caught_up


def _execute(
    settings: Settings,
    loaded: LoadedPipeline,
    *,
    tags: Mapping[str, str],
    selection: list[dg.AssetKey] | None = None,
    ranges: Iterable[int] = (),
) -> dg.ExecuteInProcessResult:
    definitions = build_definitions(settings, [loaded], single_process=True)
    with printing_instance(settings) as instance:
        for number in ranges:
            add_partition(instance, loaded.name, number)
        return definitions.resolve_job_def(job_name(loaded.name)).execute_in_process(
            instance=instance,
            tags=tags,
            asset_selection=selection,
            run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
            raise_on_error=False,
        )


def _outcome(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    """Return the outcome that the run recorded, or `error`, or only a `reason` if there is neither.

    Dagster reports an interrupt as a step failure with a stack trace.
    """
    for event in result.all_events:
        if event.is_asset_observation:
            metadata = event.asset_observation_data.asset_observation.metadata
            if OUTCOME_METADATA in metadata:
                return cast("dict[str, Any]", metadata[OUTCOME_METADATA].value)
        if event.is_step_failure:
            error = event.step_failure_data.error
            if error is not None and error.cls_name == _INTERRUPTED:
                return {"reason": "interrupted"}
            failure = event.step_failure_data.user_failure_data
            described = failure.description if failure is not None else None
            return {"error": described or str(error)}
    return {"reason": "held elsewhere"}


def _sentence(outcome: Mapping[str, Any]) -> str:
    sent = ", ".join(f"{count:,} to {sink}" for sink, count in outcome["delivered"].items())
    captured = pluralize(outcome["captured"], "change")
    return f"Ended ({outcome['reason']}): {captured} captured, sent {sent}."


def range_numbers(text: str) -> range:
    """Return the range numbers that the value of `--range` names: `N`, or `N-M`.

    Raises:
        NotAllowed: The value has another form, or M is less than N.
    """
    first, _, last = text.partition("-")
    if not first.isdigit() or not (last or first).isdigit() or int(last or first) < int(first):
        raise NotAllowed(f"--range {text}: write a number N, or N-M")
    return range(int(first), int(last or first) + 1)


@contextmanager
def _progress(settings: Settings, loaded: LoadedPipeline) -> Iterator[None]:
    """Show the run's progress on standard error, updated once a second, if that is a terminal."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    console = Console(stderr=True)
    if settings.state_url == "memory" or not console.is_terminal:
        yield
        return
    done = threading.Event()
    store = StateStore.open(settings.state_url)

    with console.status(f"{loaded.name}: starting ...") as status:

        def show() -> None:
            with suppress(DeltaforgeError):  # the run gets the same error and reports it
                while not done.wait(1.0):
                    status.update(_state_of(store, loaded.name))

        thread = threading.Thread(target=show, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            store.close()


def _state_of(store: StateStore, pipeline: str) -> str:
    row = store.pipelines.get(pipeline)
    if row is None:
        return f"{pipeline}: starting ..."
    end = row.next_segment - 1
    sinks = ", ".join(
        f"{checkpoint.sink} {checkpoint.segment}"
        + (f" [red]({escape(checkpoint.error_line)})[/red]" if checkpoint.error_line else "")
        for checkpoint in store.checkpoints.read(pipeline).values()
    )
    return (
        f"{pipeline}: {_reading(store, pipeline)}captured {pluralize(end, 'segment')}; "
        f"delivered {sinks}"
    )


def _reading(store: StateStore, pipeline: str) -> str:
    """Return the progress of the unfinished snapshot, an empty string if there is none."""
    snapshot = store.snapshots.unfinished(pipeline)
    if snapshot is None:
        return ""
    progress = store.snapshots.progress(pipeline, snapshot.snapshot).values()
    read = sum(table.read + table.complete for table in progress)
    chunks = sum(table.chunks for table in progress)
    rows = sum(table.rows for table in progress)
    return f"snapshot {read:,} of {pluralize(chunks, 'chunk')}, {pluralize(rows, 'row')}; "


@contextmanager
def printing_instance(settings: Settings) -> Iterator[dg.DagsterInstance]:
    """Yield the instance of `local_instance`, set up so that runs print without child processes.

    This applies only if Dagster stores output in local files, which is its default.
    """
    if settings.state_url == "memory":  # nothing is kept
        with local_instance(settings) as instance:
            yield instance
        return
    ref = InstanceRef.from_dir(str(dagster_home(settings)))
    logs = ref.compute_logs_data
    if logs.class_name == LocalComputeLogManager.__name__:
        ours = ConfigurableClassData(__name__, KeptLogs.__name__, logs.config_yaml)
        ref = ref._replace(compute_logs_data=ours)
    with dg.DagsterInstance.from_ref(ref) as instance:
        yield instance


class KeptLogs(LocalComputeLogManager):
    """Stores output where Dagster's own manager does, and also prints it directly."""

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> Self:
        """Create a manager from the settings of Dagster's own."""
        return cls(inst_data=inst_data, **config_value)

    @contextmanager
    def capture_logs(self, log_key: Sequence[str]) -> Iterator[CapturedLogContext]:
        """Store everything that is printed within the block."""
        with (
            self.open_log_stream(log_key, ComputeIOType.STDOUT) as out,
            self.open_log_stream(log_key, ComputeIOType.STDERR) as err,
        ):
            assert out is not None
            assert err is not None
            with (
                contextlib.redirect_stdout(_Tee(sys.stdout, out)),
                contextlib.redirect_stderr(_Tee(sys.stderr, err)),
            ):
                yield CapturedLogContext(log_key)
        Path(self.complete_artifact_path(log_key)).touch()  # type: ignore[no-untyped-call]


class _Tee(io.TextIOBase):
    """A stream that writes to a printed stream, whose properties it has, and to a file."""

    def __init__(self, printed: TextIO, kept: IO[str]) -> None:
        self._printed = printed
        self._file = kept

    def write(self, text: str) -> int:
        if not self._file.closed:  # some libraries keep a reference to the stream
            self._file.write(text)
            self._file.flush()
        return self._printed.write(text)

    def flush(self) -> None:
        self._printed.flush()

    def isatty(self) -> bool:
        return self._printed.isatty()

    @property
    def closed(self) -> bool:
        return self._printed.closed

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a variable in the typeshed
        return self._printed.encoding

    def fileno(self) -> int:
        return self._printed.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._printed, name)
