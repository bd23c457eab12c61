"""Checks of a pipeline, evaluated at the end of each run that works on it.

During a run, each tick of the sensor also reports when a sink begins to fail or has everything
again, and when changes are held or cannot be delivered; and every quarter of an hour what only the
costly checks find.

- `source`: source and state store can be queried and changes are captured; each tick reports it as
  well.
- `preflight`: the source's server is set up as capture needs it; errors and warnings fail it, notes
  do not.
- `contiguity`: ranges and their segments follow one another without a gap.
- `agreement`: Dagster's metadata of the newest ranges agrees with the state store.
- `holds`: no changes are held because they could not be decoded or wait for schema approval.
- `dead_letters`: the dead letter queue is empty; an error if it is full.
- `delivered`, one per sink: the sink is attached and has everything that was captured. A sink that
  is paused, or had lost data and got it again, is a warning.
- `freshness`, one per sink: no captured change has waited longer for the sink than the file's
  `engine.dagster.freshness` allows. A quiet source makes no sink stale.
- `sensing` and `drift`, if schema sensing is enabled: it makes progress, and rows match their
  tables. Both only warn.

They are `check_specs` of the pipeline's asset, and the run logs their results itself, since Dagster
skips a separate check step if an asset yields nothing. Definitions import this module for the
specs; so what only an evaluation needs is imported by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import dagster as dg

from deltaforge_dagster.assets.names import asset_key
from deltaforge_dagster.assets.publish import recorded
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.sensing import is_off
from deltaforge_dagster.errors import and_run
from deltaforge_dagster.pipeline.committed import go_on_command, segments_behind, sink_lag_seconds
from deltaforge_dagster.pipeline.control.closed_ranges import CHANGES, facts
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.state.records import HoldRow, RangeRow

if TYPE_CHECKING:
    from deltaforge_dagster.pipeline.health.health import HealthProblem
    from deltaforge_dagster.state.store import StateStore

AGREEMENT_RANGES = 50
"""How many of the newest ranges `agreement` compares; earlier evaluations compared older ones."""

SOURCE_CHECK = "source"
"""Fails while changes are not captured; the sensor reports it as well."""

DAY = 86_400
"""Drift that was last seen longer ago than this many seconds no longer counts."""

_SHOWN_COLUMNS = 20


def check_specs(loaded: LoadedPipeline) -> list[dg.AssetCheckSpec]:
    """Return the checks of a pipeline's assets."""
    changes = asset_key(loaded.name, CHANGES)
    return [
        dg.AssetCheckSpec(
            "contiguity",
            asset=changes,
            description="Whether ranges and segments follow one another without a gap.",
        ),
        dg.AssetCheckSpec(
            "agreement",
            asset=changes,
            description="Whether Dagster's metadata agrees with the state store.",
        ),
        dg.AssetCheckSpec("holds", asset=changes, description="Whether no changes are held."),
        dg.AssetCheckSpec(
            "dead_letters", asset=changes, description="Whether the dead letter queue is empty."
        ),
        dg.AssetCheckSpec(
            SOURCE_CHECK, asset=changes, description="Whether changes of the source are captured."
        ),
        dg.AssetCheckSpec(
            "preflight",
            asset=changes,
            description="Whether the source's server is set up as capture needs it.",
        ),
        *(
            dg.AssetCheckSpec(
                "delivered",
                asset=asset_key(loaded.name, sink.config.id),
                description="Whether the sink has everything that was captured.",
            )
            for sink in loaded.spec.spec.sinks
        ),
        *(
            dg.AssetCheckSpec(
                "freshness",
                asset=asset_key(loaded.name, sink.config.id),
                description="Whether no captured change has waited too long for the sink.",
            )
            for sink in loaded.spec.spec.sinks
        ),
        *_sensing_specs(loaded),
    ]


def evaluate(
    instance: dg.DagsterInstance,
    store: StateStore,
    loaded: LoadedPipeline,
    source_error: str | None,
    findings: Sequence[Finding],
) -> Iterator[dg.AssetCheckEvaluation]:
    """Yield the current result of every check of a pipeline.

    Args:
        instance: The Dagster instance with the published metadata.
        store: The state store.
        loaded: The pipeline.
        source_error: Why the source could not be read, None if it could.
        findings: The result of the preflight check of the source's server.
    """
    from deltaforge_dagster.pipeline.health.health import HealthProblem, health  # noqa: PLC0415

    yield from costly(instance, store, loaded, findings)
    yield from kept_back(store, loaded)
    problem = health(store, loaded).uncaptured
    if source_error is not None:
        problem = HealthProblem("source", "error", source_error)
    yield source_evaluation(loaded.name, problem)
    yield from delivered(store, loaded)
    yield from freshness(store, loaded)


def costly(
    instance: dg.DagsterInstance,
    store: StateStore,
    loaded: LoadedPipeline,
    findings: Sequence[Finding],
) -> Iterator[dg.AssetCheckEvaluation]:
    """Yield the results of the checks that read too much to be evaluated by every tick."""
    changes = asset_key(loaded.name, CHANGES)
    ranges = store.ranges.read(loaded.name)
    yield _evaluation(changes, "contiguity", _gap(ranges), {"ranges": len(ranges)})
    yield _evaluation(changes, "agreement", _disagreement(instance, store, loaded.name), {})
    yield _preflight(changes, findings)
    yield from sensing_checks(store, loaded)


def source_evaluation(pipeline: str, problem: HealthProblem | None) -> dg.AssetCheckEvaluation:
    """Return the result of the check `source`.

    Args:
        pipeline: The pipeline.
        problem: What prevents capture; None if nothing does.
    """
    text = None if problem is None else and_run(problem.text, problem.remedy)
    return _evaluation(asset_key(pipeline, CHANGES), SOURCE_CHECK, text, {})


def preflight_evaluation(pipeline: str, findings: Sequence[Finding]) -> dg.AssetCheckEvaluation:
    """Return the result of the check `preflight`."""
    return _preflight(asset_key(pipeline, CHANGES), findings)


def kept_back(store: StateStore, loaded: LoadedPipeline) -> Iterator[dg.AssetCheckEvaluation]:
    """Yield the results of the checks `holds` and `dead_letters`."""
    changes = asset_key(loaded.name, CHANGES)
    yield _on_hold(changes, store.holds.read(loaded.name), loaded.name)
    yield _dead_letters(changes, store, loaded)


def _on_hold(key: dg.AssetKey, holds: Sequence[HoldRow], pipeline: str) -> dg.AssetCheckEvaluation:
    from deltaforge_dagster.state.holds import SCHEMA  # noqa: PLC0415 - see the module

    kept = [hold for hold in holds if hold.state != "journaled"]
    remedy = f"; once that is fixed: deltaforge hold release {pipeline} {{}}"
    lines = [
        f"{hold.kind} {hold.subject} ({hold.state}), {pluralize(hold.events, 'event')}: "
        f"{hold.reason}" + ("" if hold.kind == SCHEMA else remedy.format(hold.subject))
        for hold in kept
    ]
    events = sum(hold.events for hold in kept)
    return _evaluation(key, "holds", "\n".join(lines) or None, {"events": events})


def _dead_letters(
    key: dg.AssetKey, store: StateStore, loaded: LoadedPipeline
) -> dg.AssetCheckEvaluation:
    from deltaforge_dagster.pipeline.health.undelivered import saturation  # noqa: PLC0415

    depth = store.dead_letters.depth(loaded.name)
    full = saturation(depth, loaded.spec.spec.journal.dlq.max_entries)
    age = 0 if depth.oldest is None else round(store.now() - depth.oldest)
    problems = [] if full is None else [full[1]]
    if depth.entries:
        problems.append(
            f"{pluralize(depth.dead, 'change')} could not be delivered, "
            f"{depth.entries - depth.dead:,} on their way or behind them; "
            f"deltaforge dlq list {loaded.name}"
        )
    return _evaluation(
        key,
        "dead_letters",
        "; ".join(problems) or None,
        {
            "entries": depth.entries,
            "dead": depth.dead,
            "oldest_seconds": age,
            "evicted": depth.evicted,
            "rejected": depth.rejected,
            "expired": depth.expired,
        },
        dg.AssetCheckSeverity.ERROR
        if full is not None and full[0] == "error"
        else dg.AssetCheckSeverity.WARN,
    )


def _preflight(key: dg.AssetKey, findings: Sequence[Finding]) -> dg.AssetCheckEvaluation:
    levels = Counter(finding.level for finding in findings)
    lines = [
        finding.line
        for level in ("error", "warning", "note")
        for finding in findings
        if finding.level == level
    ]
    return dg.AssetCheckEvaluation(
        asset_key=key,
        check_name="preflight",
        passed=not levels["error"] and not levels["warning"],
        severity=dg.AssetCheckSeverity.ERROR if levels["error"] else dg.AssetCheckSeverity.WARN,
        description="\n".join(lines) or None,
        metadata={f"{level}s": count for level, count in levels.items() if level != "ok"},
    )


def delivered(store: StateStore, loaded: LoadedPipeline) -> Iterator[dg.AssetCheckEvaluation]:
    """Yield the result of the check `delivered` of every sink.

    For a sink that is behind, it names the ranges that the sink lacks.
    """
    row = store.pipelines.get(loaded.name)
    if row is None:
        return
    for sink_id, checkpoint in store.checkpoints.read(loaded.name).items():
        behind = segments_behind(row, checkpoint)
        problem = paused = None
        command = go_on_command(loaded.name, sink_id, checkpoint.state)
        if not checkpoint.attached:
            problem = f"{checkpoint.error_line or 'detached'}; to attach it again: {command}"
        elif checkpoint.paused:
            paused = f"paused, {pluralize(behind, 'segment')} kept for it; to resume it: {command}"
        elif behind:
            lacking = store.ranges.behind(loaded.name, checkpoint.whole_segment)
            ranges = "range" if len(lacking) == 1 else "ranges"
            because = f": {checkpoint.error_line}" if checkpoint.error_line else ""
            problem = f"{pluralize(behind, 'segment')} behind, {ranges} {_listed(lacking)}{because}"
        yield _evaluation(
            asset_key(loaded.name, sink_id),
            "delivered",
            "; ".join(text for text in (problem, paused, checkpoint.notice) if text) or None,
            {
                "state": checkpoint.state,
                "segments_behind": behind,
                "failures": checkpoint.failures,
            },
            dg.AssetCheckSeverity.ERROR if problem else dg.AssetCheckSeverity.WARN,
        )


def freshness(store: StateStore, loaded: LoadedPipeline) -> Iterator[dg.AssetCheckEvaluation]:
    """Yield the result of the check `freshness` of every sink."""
    row = store.pipelines.get(loaded.name)
    if row is None:
        return
    limits = loaded.spec.spec.engine.dagster.freshness
    now = store.now()
    for sink_id, checkpoint in store.checkpoints.read(loaded.name).items():
        lag = sink_lag_seconds(store, row, checkpoint, now)
        passed = [limit for limit in (limits.warn_seconds, limits.error_seconds) if lag > limit]
        problem = None
        if not checkpoint.attached:
            problem = "detached: nothing is delivered to it"
        elif passed:
            problem = f"lacks a change that is older than {passed[-1]:g} s"
        late = not checkpoint.attached or lag > limits.error_seconds
        yield _evaluation(
            asset_key(loaded.name, sink_id),
            "freshness",
            problem,
            {
                "lag_seconds": round(lag, 3),
                "checkpoint_age_seconds": round(max(0.0, now - checkpoint.updated_at), 3),
                "limits": f"warns after {limits.warn_seconds:g} s, "
                f"fails after {limits.error_seconds:g} s",
            },
            dg.AssetCheckSeverity.ERROR if late else dg.AssetCheckSeverity.WARN,
        )


def _gap(ranges: Sequence[RangeRow]) -> str | None:
    for before, after in pairwise(ranges):
        if after.range != before.range + 1:
            return f"range {before.range} is followed by range {after.range}"
        if after.first_segment != before.last_segment + 1:
            return (
                f"range {before.range} ends with segment {before.last_segment}, "
                f"range {after.range} begins with segment {after.first_segment}"
            )
    return None


def _disagreement(instance: dg.DagsterInstance, store: StateStore, pipeline: str) -> str | None:
    from deltaforge_dagster.state.since import UNREPORTED  # noqa: PLC0415 - see the module

    ranges = store.ranges.read(pipeline, state="closed", limit=AGREEMENT_RANGES, newest_first=True)
    if not ranges:
        return None
    by_number = {row.range: row for row in ranges}
    unreported = store.pipelines.since(pipeline, UNREPORTED) or 0.0
    for number, asset in sorted(store.ranges.published(pipeline, min(by_number), max(by_number))):
        event = recorded(instance, pipeline, asset, number)
        if event is None and (by_number[number].closed_at or 0.0) <= unreported:
            continue
        if event is None:
            return f"range {number} of {asset} is published, but Dagster has no record of it"
        expected = facts(by_number[number])
        for name in ("events", "content_hash", "end_position"):
            value = event.metadata.get(name)
            if value is None or value.value != expected[name]:
                return f"range {number} of {asset}: {name} in Dagster differs from the state store"
    return None


def _evaluation(
    key: dg.AssetKey,
    name: str,
    problem: str | None,
    metadata: Mapping[str, int | float | str],
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
) -> dg.AssetCheckEvaluation:
    return dg.AssetCheckEvaluation(
        asset_key=key,
        check_name=name,
        passed=problem is None,
        severity=severity,
        description=problem,
        metadata=metadata,
    )


def _listed(ranges: Sequence[int]) -> str:
    if len(ranges) <= 5:
        return ", ".join(map(str, ranges))
    return f"{ranges[0]} to {ranges[-1]}"


def _sensing_specs(loaded: LoadedPipeline) -> list[dg.AssetCheckSpec]:
    """Return the checks of sensing, none if it is not enabled."""
    if is_off(loaded.spec.spec.schema_sensing):
        return []
    changes = asset_key(loaded.name, CHANGES)
    return [
        dg.AssetCheckSpec(
            "sensing", asset=changes, description="Whether sensing processes the captured changes."
        ),
        dg.AssetCheckSpec(
            "drift",
            asset=changes,
            description="Whether rows match the declarations of their tables.",
        ),
    ]


def sensing_checks(store: StateStore, loaded: LoadedPipeline) -> Iterator[dg.AssetCheckEvaluation]:
    """Yield the current results of the checks of sensing."""
    if is_off(loaded.spec.spec.schema_sensing):
        return
    yield _sensing(store, loaded)
    yield _drift(store, loaded)


def _sensing(store: StateStore, loaded: LoadedPipeline) -> dg.AssetCheckEvaluation:
    progress, row = store.sensing.progress(loaded.name), store.pipelines.get(loaded.name)
    reached = 0 if progress is None else progress.segment
    captured = 0 if row is None else row.next_segment - 1
    problem = None if progress is None else progress.problem
    metadata = {
        "segments_behind": max(0, captured - reached),
        "segments_skipped": 0 if progress is None else progress.skipped,
    }
    return _warning(loaded, "sensing", problem, metadata)


def _drift(store: StateStore, loaded: LoadedPipeline) -> dg.AssetCheckEvaluation:
    from deltaforge_dagster.pipeline.sensing.views import recent_drift  # noqa: PLC0415 - slow

    drift = recent_drift(store, loaded, store.now() - DAY)
    lines = [f"{column}: {', '.join(kinds)}" for column, kinds in drift.items()]
    if len(lines) > _SHOWN_COLUMNS:
        more = len(lines) - _SHOWN_COLUMNS
        lines = [
            *lines[:_SHOWN_COLUMNS],
            f"and {more} more; deltaforge sensing drift {loaded.name}",
        ]
    return _warning(loaded, "drift", "\n".join(lines) or None, {"columns": len(drift)})


def _warning(
    loaded: LoadedPipeline, name: str, problem: str | None, metadata: dict[str, int]
) -> dg.AssetCheckEvaluation:
    return dg.AssetCheckEvaluation(
        asset_key=asset_key(loaded.name, CHANGES),
        check_name=name,
        passed=problem is None,
        severity=dg.AssetCheckSeverity.WARN,
        description=problem,
        metadata=metadata,
    )
