"""Every version of a pipeline's file that was in use, so that the specs of ranges are known.

The versions are in the namespace `spec/{pipeline}` of the state store, under the spec's hash: the
effective content, secrets masked, and the parts of its code versions. A range has the hash of its
spec, which shows what the present file would do differently; `deltaforge plan` compares a file with
the newest version. While a file cannot be loaded, Dagster shows the pipeline's assets as the newest
version describes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import ValidationError

from deltaforge_dagster.config.file.load import BrokenPipeline, LoadedPipeline
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.pipeline.control.specs import CodeParts, chain_part, code_parts
from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_dagster.state.records import PipelineRow, RangeRow
from deltaforge_dagster.state.store import StateStore


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
    return Kv(store.database, f"spec/{pipeline}")
