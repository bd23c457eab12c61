"""Every version of a pipeline's file that was in use, so that the specs of ranges are known.

The versions are in the namespace `spec/{pipeline}` of the state store, under the spec's hash: the
effective content, secrets masked, and the parts of its code versions. A range has the hash of its
spec, which shows what the present file would do differently; `deltaforge plan` compares a file with
the newest version. While a file cannot be loaded, Dagster shows the pipeline's assets as the newest
version describes them.

Code versions are short hashes of those parts of a file that determine the data. There are separate
parts, so that users see which one differs: `capture` (the source, and how its values look), `chain`
(the processors, and the source of Python functions), and one for each sink (where it writes, and in
which form). What determines only when or how fast something happens (limits, timeouts, policies,
labels) is in none of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from deltaforge_dagster.config.file.load import BrokenPipeline, LoadedPipeline
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.sinks import SinkBlock
from deltaforge_dagster.config.sources import SourceBlock
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.processors.code import chain_hash, code_of
from deltaforge_dagster.sinks.registry import sink_types
from deltaforge_dagster.sources.registry import source_types
from deltaforge_dagster.state.records import PipelineRow, RangeRow

if TYPE_CHECKING:
    from deltaforge_dagster.state.database.primitives import Kv
    from deltaforge_dagster.state.store import StateStore

NO_CHAIN = "none"

_LENGTH = 12  # hex digits of a hash: 48 bits tell files apart, and Dagster's UI shows them whole

_OF_SOURCE = frozenset({"snapshot", "on_schema_drift"})
_OF_SINK = frozenset({"required", "start"})
"""Fields that do not affect the data; a kind of source or sink adds its own (`timing`)."""


@dataclass(frozen=True, slots=True)
class NotedSpec:
    """A version of a pipeline file that was in use.

    Attributes:
        content: The effective file as plain values, secrets masked, scripts as their hashes.
        parts: The parts of its code versions.
    """

    content: Mapping[str, Any]
    parts: CodeParts


def note_spec(store: StateStore, loaded: LoadedPipeline) -> None:
    """Store a spec that is about to be used.

    It is written only if it is new or the source of a Python function has changed.
    """
    specs = _specs(store, loaded.name)
    noted = {"content": kept_form(loaded.spec), "parts": asdict(code_parts(loaded.spec))}
    text = json.dumps(noted).encode()
    if specs.get(loaded.hash) != text:
        specs.put(loaded.hash, text)


def kept_form(spec: PipelineSpec) -> dict[str, Any]:
    """Return a spec as it is stored: with scripts as hashes.

    Scripts may contain values of environment variables.
    """
    content = spec.masked()
    for processor in content["spec"]["processors"]:
        if "inline" in processor:
            digest = hashlib.sha256(processor["inline"].encode()).hexdigest()
            processor["inline"] = f"sha256:{digest}"
    return content


def noted_spec(store: StateStore, pipeline: str, spec_hash: str) -> NotedSpec | None:
    """Return a spec that was in use; None if an older DeltaForge used it and stored no specs."""
    text = _specs(store, pipeline).get(spec_hash)
    if text is None:
        return None
    noted = json.loads(text)
    return NotedSpec(noted["content"], CodeParts(**noted["parts"]))


@dataclass(frozen=True, slots=True)
class FormerPipeline:
    """A pipeline whose file cannot be loaded, as it was when it was last in use.

    Attributes:
        loaded: The pipeline, without secrets and scripts: it can be shown, but must not run.
        parts: The parts of its code versions.
        problem: Why its file cannot be loaded now.
    """

    loaded: LoadedPipeline
    parts: CodeParts
    problem: SpecError


def former_pipeline(store: StateStore, broken: BrokenPipeline) -> FormerPipeline | None:
    """Return a broken pipeline as it was when it was last in use.

    None if it was never in use, or if another version of DeltaForge stored its spec in a form that
    this one cannot read.
    """
    row = store.pipelines.get(broken.name)
    noted = None if row is None else noted_spec(store, broken.name, row.spec_hash)
    spec = None if noted is None else _spec_of(noted)
    if row is None or noted is None or spec is None:
        return None
    loaded = LoadedPipeline(broken.path, spec, (), row.spec_hash)
    return FormerPipeline(loaded, noted.parts, broken.error)


def last_spec(store: StateStore, row: PipelineRow) -> PipelineSpec | None:
    """Return the spec that a pipeline last used, secrets masked.

    Returns None if it is unknown, as for `former_pipeline`.
    """
    noted = noted_spec(store, row.name, row.spec_hash)
    return None if noted is None else _spec_of(noted)


def _spec_of(noted: NotedSpec) -> PipelineSpec | None:
    try:
        return PipelineSpec.model_validate_json(json.dumps(noted.content))
    except ValidationError:
        return None


class RangeVersions:
    """Determines the code versions under which a pipeline's ranges are published."""

    def __init__(self, store: StateStore, pipeline: str) -> None:
        self._store = store
        self._pipeline = pipeline
        self._parts_by_hash: dict[str, CodeParts | None] = {}
        row = store.pipelines.get(pipeline)
        self._today = None if row is None else self._parts(row.spec_hash)

    def of(self, row: RangeRow, sink: str | None, *, reprocessed: bool = False) -> str | None:
        """Return the version of a range; None if unknown.

        Args:
            row: The range.
            sink: The sink to which it was delivered with the current spec; None for `changes`.
            reprocessed: Whether the sink has the output of today's processors, not of those with
                which the range's segments were processed.
        """
        then, today = self._parts(row.spec_hash), self._today
        if then is None:
            return None
        if sink is None:
            return then.version()
        if today is None or sink not in today.sinks:
            return None
        chain = today.chain if reprocessed else self._chain(row) or then.chain
        return replace(then, chain=chain, sinks=today.sinks).version(sink)

    def _chain(self, row: RangeRow) -> str:
        hashes = self._store.segments.chains(
            self._pipeline, first=row.first_segment, last=row.last_segment
        )
        return chain_part(hashes)

    def _parts(self, spec_hash: str) -> CodeParts | None:
        if spec_hash not in self._parts_by_hash:
            noted = noted_spec(self._store, self._pipeline, spec_hash)
            self._parts_by_hash[spec_hash] = None if noted is None else noted.parts
        return self._parts_by_hash[spec_hash]


def _specs(store: StateStore, pipeline: str) -> Kv:
    from deltaforge_dagster.state.database.primitives import Kv  # noqa: PLC0415 - as the store

    return Kv(store.database, f"spec/{pipeline}")


@dataclass(frozen=True, slots=True)
class CodeParts:
    """The parts of the code versions of a pipeline's assets.

    Attributes:
        capture: Hash of the source and of how its values look.
        chain: Hash of the processors.
        sinks: Hash of each sink, by its id.
    """

    capture: str
    chain: str
    sinks: Mapping[str, str]

    def version(self, sink: str | None = None) -> str:
        """Return the code version of `changes`, or of a sink: what is sent depends on both."""
        parts = [self.capture, self.chain]
        return ".".join(parts if sink is None else [*parts, self.sinks[sink]])


def chain_part(hashes: Collection[str]) -> str:
    """Return the part for a range that chains with these hashes processed.

    An empty hash means no chain.
    """
    return "+".join(sorted(digest[:_LENGTH] or NO_CHAIN for digest in hashes))


def code_parts(spec: PipelineSpec) -> CodeParts:
    """Return the parts of the code versions of a pipeline's assets; secrets do not count."""
    content = spec.spec
    capture = {
        "name": spec.metadata.name,
        "tenant": spec.metadata.tenant,
        "source": content.source.model_dump(mode="json", exclude=_without_data(content.source)),
        "values": content.engine.values.model_dump(mode="json"),
        "columns": content.engine.columns.model_dump(mode="json"),
        "salt": content.engine.columns.salt_digest(),
    }
    return CodeParts(
        _hash(capture),
        chain_part({chain_hash(content.processors, code_of(content.processors))})
        if content.processors
        else NO_CHAIN,
        {
            sink.config.id: _hash(sink.model_dump(mode="json", exclude=_without_data(sink)))
            for sink in content.sinks
        },
    )


def _without_data(block: SourceBlock | SinkBlock) -> dict[str, set[str]]:
    if isinstance(block, SourceBlock):
        return {"config": {*_OF_SOURCE, *source_types()[block.type].timing}}
    return {"config": {*_OF_SINK, *sink_types()[block.type].timing}}


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]
