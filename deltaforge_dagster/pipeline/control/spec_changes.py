"""The differences between two versions of a pipeline file, and the consequence of each.

Effective specs are compared as `specs` stores them, field by field; sinks and processors are
matched by id. A consequence says what a difference means for data that is already captured or
delivered, and for later data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deltaforge_dagster.sinks.registry import sink_types
from deltaforge_dagster.sources.registry import source_types
from deltaforge_dagster.state.records import CheckpointRow, PipelineRow

_Spec = Mapping[str, Any]
_Block = Mapping[str, Any]

_STARTED = "has no effect any more: the pipeline has a position"
NEXT_RUN = "applies from the next run; an active run notices the changed file and ends"
_RELOADED = (
    "applies when Dagster has reloaded the file: by itself under `deltaforge dev` and where "
    "DELTAFORGE_DAGSTER_URL names the webserver, else by Reload in its UI"
)
_ASSET = "Dagster shows it when it has reloaded the file"

_CONSEQUENCES = (
    (
        "spec.source.type",
        (
            "positions of the other source are not valid here: give the pipeline another name, or "
            "start over with `deltaforge checkpoint reset PIPELINE --all`"
        ),
    ),
    ("spec.source.config.id", "events captured after the change have other ids"),
    (
        "spec.source.config.dsn",
        (
            "if this is another server or database, and not only another address, a run continues "
            "only where that is safe; otherwise it ends with the reason"
        ),
    ),
    ("spec.source.config.outbox", "decides which later changes are outbox events"),
    (
        "spec.source.config.snapshot",
        (
            "decides when tables are read from now on; `initial` has no effect once the pipeline "
            "has begun"
        ),
    ),
    ("spec.source.config.start_position", _STARTED),
    ("spec.engine.checkpoint.seed", _STARTED),
    (
        "spec.engine.values",
        "applies to changes captured from now on; the journal and the sinks keep the old form",
    ),
    (
        "spec.engine.columns",
        "applies to changes captured from now on; the journal and the sinks keep what they have",
    ),
    (
        "spec.engine.schemas",
        (
            "applies to later changes of table definitions; with `continue`, changes that wait for "
            "approval are delivered"
        ),
    ),
    ("spec.engine.dagster.freshness", "applies from the sensor's next check of the sinks"),
    ("spec.engine.dagster", _RELOADED),
    (
        "spec.engine.alerts",
        (
            "applies from the sensor's next evaluation; if no pipeline had a hook before, it "
            f"{_RELOADED}"
        ),
    ),
    (
        "spec.commit_policy",
        "decides from the next run which part of its log the source may discard",
    ),
    ("spec.journal", "applies to messages that cannot be delivered from now on"),
    (
        "metadata.tenant",
        (
            "is part of the idempotency keys of later events: consumers that deduplicate by key "
            "take repeated events for new ones"
        ),
    ),
    ("metadata", f"is displayed only; in Dagster it {_RELOADED}"),
    ("", NEXT_RUN),
)
"""Path prefixes and consequences; the first match counts.

A kind of source adds its own (`SourceType.consequences`).
"""

_ELSEWHERE = "messages after the checkpoint go there; delivered messages stay where they are"
_NEW_FORM = (
    "later messages have the new form; `deltaforge replay` sends delivered ranges again in the new "
    "form"
)
_OF_SINKS = {
    "type": "another kind of server with the same checkpoint: it gets the changes after it, and "
    "none before it",
    **dict.fromkeys(
        ["envelope", "encoding", "filter", "skipped_operations", "key_updates"], _NEW_FORM
    ),
    "encoding.schema_registry_url": "later messages have the ids of that registry, so consumers "
    "must ask it; schemas are registered there when they are needed",
    "encoding.subject_strategy": "schemas are registered under the new subjects when later "
    "messages need them; messages stay as they are",
    **dict.fromkeys(
        [
            "encoding.username",
            "encoding.password",
            "encoding.ca_file",
            "encoding.certificate_file",
            "encoding.key_file",
            "encoding.oauth_token_url",
            "encoding.oauth_client_id",
            "encoding.oauth_client_secret",
            "encoding.oauth_scope",
            "encoding.oauth_logical_cluster",
            "encoding.oauth_identity_pool",
        ],
        NEXT_RUN,
    ),
    "key": "later messages have other keys: order per key is kept before the change and after it, "
    "not across it",
    "exactly_once": "applies from the next batch, which begins at the checkpoint",
    "required": "decides from the next run which part of its log the source may discard",
    "start": "has no effect any more: the sink has a checkpoint",
}


@dataclass(frozen=True, slots=True)
class SpecChange:
    """One difference between two specs.

    Attributes:
        path: The field; sinks and processors as `spec.sinks[id]`.
        kind: What happened to it.
        before: Its value before; None where it had none.
        after: Its value now; None where it has none.
        consequence: What the difference means, as a sentence.
    """

    path: str
    kind: Literal["added", "removed", "renamed", "changed"]
    before: Any
    after: Any
    consequence: str


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """How far a pipeline has come when its file changes, which decides what a change does.

    Attributes:
        pipeline: The pipeline's row in the state store.
        checkpoints: The checkpoints of its sinks, by sink id.
    """

    pipeline: PipelineRow
    checkpoints: Mapping[str, CheckpointRow]

    def beginning(self, start: str | None) -> str:
        """Return where a sink that is added now begins, as the predicate of a sentence."""
        attached = [row for row in self.checkpoints.values() if row.attached]
        if start == "tail":
            return "begins with changes captured after it was added"
        if start == "snapshot":
            return (
                "begins with changes captured after it was added, and a snapshot brings it the "
                "rows that exist already"
            )
        if attached and start is None:
            last = min(attached, key=lambda row: (row.whole_segment, row.ordinal))
            return (
                f"begins with segment {last.whole_segment + 1}, the checkpoint of sink {last.sink}"
            )
        return "begins with the oldest segment of the journal"


def spec_changes(before: _Spec, after: _Spec, status: PipelineStatus) -> list[SpecChange]:
    """Return every difference of `after` from `before`, source first, then processors and sinks."""
    old, new = dict(before["spec"]), dict(after["spec"])
    chains = old.pop("processors"), new.pop("processors")
    sinks = old.pop("sinks"), new.pop("sinks")
    kind = source_types().get(new["source"]["type"])
    own = {
        f"spec.source.config.{field}": text
        for field, text in ({} if kind is None else kind.consequences).items()
    }
    rest = (
        SpecChange(
            path,
            "changed",
            earlier,
            later,
            own.get(path) or _consequence(path, earlier, later, status),
        )
        for path, earlier, later in _differences(
            {"metadata": before["metadata"], "spec": old},
            {"metadata": after["metadata"], "spec": new},
        )
    )
    return [*rest, *_of_processors(*chains), *_of_sinks(*sinks, status)]


def snapshot_due(spec: _Spec, *, known: bool) -> str | None:
    """Return a sentence about the snapshot that a new or changed file starts; None for none.

    Args:
        spec: The file as it is now.
        known: Whether the pipeline has run with another file.
    """
    mode = (spec["spec"]["source"]["config"].get("snapshot") or {}).get("mode")
    if mode == "always":
        return "every captured table is read once with this version of the file (snapshot: always)"
    if mode == "initial" and not known:
        return "every captured table is read once the pipeline has begun (snapshot: initial)"
    begin = [sink["config"]["id"] for sink in spec["spec"]["sinks"] if _begins_whole(sink)]
    if begin and not known:
        return (
            f"every captured table is read once the pipeline has begun, for {', '.join(begin)} "
            "(start: snapshot)"
        )
    return None


def _differences(before: _Block, after: _Block, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*before, *after]):
        earlier, later = before.get(name), after.get(name)
        field = f"{path}.{name}" if path else name
        if isinstance(earlier, dict) and isinstance(later, dict):
            yield from _differences(earlier, later, field)
        elif earlier != later:
            yield field, earlier, later


def _consequence(path: str, before: Any, after: Any, status: PipelineStatus) -> str:
    if path == "spec.source.config.tables":
        return _of_tables(before or [], after or [])
    consequence = next(text for start, text in _CONSEQUENCES if path.startswith(start))
    if consequence == _STARTED and status.pipeline.start_position is None:
        return "decides where the pipeline begins"
    return consequence.replace("PIPELINE", status.pipeline.name)


def _of_tables(before: Sequence[str], after: Sequence[str]) -> str:
    more = ", ".join(pattern for pattern in after if pattern not in before) or (
        "all tables" if not after else ""
    )
    fewer = ", ".join(pattern for pattern in before if pattern not in after)
    consequences = []
    if more:
        consequences.append(
            f"changes of {more} are captured from now on; rows that exist already come only with a "
            "snapshot"
        )
    if fewer:
        consequences.append(
            f"{fewer}: captured from now on only if another pattern matches; changes in the "
            "journal are still delivered"
        )
    return "; ".join(consequences) or "the order of patterns has no effect"


def _of_processors(before: Sequence[_Block], after: Sequence[_Block]) -> Iterator[SpecChange]:
    consequence = (
        "segments that were not processed yet go through the new chain; processed and delivered "
        "messages stay unchanged (`deltaforge preview` compares, `replay --reprocess` sends again)"
    )
    old, new = ({block["id"]: block for block in chain} for chain in (before, after))
    for name in dict.fromkeys([*old, *new]):
        path = f"spec.processors[{name}]"
        if name not in new:
            yield SpecChange(path, "removed", old[name]["type"], None, consequence)
        elif name not in old:
            yield SpecChange(path, "added", None, new[name]["type"], consequence)
        else:
            for field, earlier, later in _differences(old[name], new[name]):
                yield SpecChange(f"{path}.{field}", "changed", earlier, later, consequence)
    kept = [[name for name in chain if name in old and name in new] for chain in (old, new)]
    if kept[0] != kept[1]:
        yield SpecChange("spec.processors", "changed", [*old], [*new], consequence)


def _of_sinks(
    before: Sequence[_Block], after: Sequence[_Block], status: PipelineStatus
) -> Iterator[SpecChange]:
    old, new = ({block["config"]["id"]: block for block in sinks} for sinks in (before, after))
    gone = {_but_id(old[name]): name for name in old if name not in new}
    for name in new:
        if name in old:
            yield from _of_sink(old[name], new[name])
            continue
        begins = status.beginning(new[name]["config"].get("start"))
        former = gone.pop(_but_id(new[name]), None)
        if former is None:
            text = f"{begins}; {_ASSET}"
            yield SpecChange(f"spec.sinks[{name}]", "added", None, new[name]["type"], text)
        else:
            text = (
                f"a renamed sink is a new one: the checkpoint of {former} is dropped, {name} "
                f"{begins}, and changes after that arrive there again; {_ASSET}"
            )
            yield SpecChange(f"spec.sinks[{name}]", "renamed", former, name, text)
    for name in gone.values():
        text = (
            "gets no more changes; its checkpoint is dropped, and the journal keeps nothing for "
            "it; "
            f"{_ASSET}"
        )
        yield SpecChange(f"spec.sinks[{name}]", "removed", old[name]["type"], None, text)


def _of_sink(before: _Block, after: _Block) -> Iterator[SpecChange]:
    path = f"spec.sinks[{after['config']['id']}]"
    if before["type"] != after["type"]:
        text = _OF_SINKS["type"]
        yield SpecChange(f"{path}.type", "changed", before["type"], after["type"], text)
        return
    kind = sink_types().get(after["type"])
    own: dict[str, str] = {}
    if kind is not None:
        own = dict.fromkeys(kind.where, _ELSEWHERE) | dict.fromkeys(kind.form, _NEW_FORM)
        own |= kind.consequences
    for name, earlier, later in _differences(before["config"], after["config"]):
        field = name.partition(".")[0]
        text = own.get(field) or _OF_SINKS.get(name) or _OF_SINKS.get(field, NEXT_RUN)
        yield SpecChange(f"{path}.config.{name}", "changed", earlier, later, text)


def _begins_whole(sink: _Block) -> bool:
    return bool(sink["config"].get("start") == "snapshot")


def _but_id(sink: _Block) -> str:
    """Return a sink's block without its id, as text that is equal if a sink was only renamed."""
    return json.dumps({**sink, "config": {**sink["config"], "id": None}}, sort_keys=True)
