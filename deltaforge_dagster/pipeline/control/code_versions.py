"""Code versions: short hashes of those parts of a pipeline file that determine the data.

There are separate parts, so that users see which one differs: `capture` (the source, and how its
values look), `chain` (the processors, and the source of Python functions), and one for each sink
(where it writes, and in which form). What determines only when or how fast something happens
(limits, timeouts, policies, labels) is in none of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.sinks import SinkBlock
from deltaforge_dagster.config.sources import SourceBlock
from deltaforge_dagster.processors.code import chain_hash, code_of
from deltaforge_dagster.sinks.registry import sink_types
from deltaforge_dagster.sources.registry import source_types

NO_CHAIN = "none"

_LENGTH = 12

_OF_SOURCE = frozenset({"snapshot", "on_schema_drift"})
_OF_SINK = frozenset({"required", "start"})
"""Fields that do not affect the data; a kind of source or sink adds its own (`timing`)."""


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
