"""Where a new pipeline begins: decided once, by the first of these that is given.

1. Imported checkpoints of DeltaForge (`state.legacy`). Reading begins at the minimum of the sinks'
   own checkpoints, as in DeltaForge; a sink that is further ahead gets only segments that end after
   its own. If no sink has a key of its own, the source's plain key counts for every sink.
2. The file's seed (`engine.checkpoint.seed`): a position, or a chaser file: 8 bytes, a
   little-endian signed integer, in which event stores keep their log position
   (`SourceType.position_at`).
3. The source's own rule: `start_position`, or now.

A checkpoint of DeltaForge may be inside a transaction; the kind of source says where that
transaction begins (`SourceType.imported`), and sinks get its first changes again. A checkpoint or
position that is malformed, or belongs to another kind of source, stops the pipeline: beginning at
the log's end instead would silently lose changes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import CorruptLog, PositionLost, SettingsError
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import (
    SourceType,
    identify_position,
    parse_position,
    source_types,
)
from deltaforge_dagster.state import legacy
from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_dagster.state.store import StateStore

logger = logging.getLogger(__name__)

_CHASER_BYTES = 8  # a signed integer, as DeltaForge writes it


@dataclass(frozen=True, slots=True)
class FirstStart:
    """Where a new pipeline begins.

    Attributes:
        at: The position; None if the source's own rule decides.
        has: By sink id, the position up to which a sink has everything, for sinks that are beyond
            `at`.
    """

    at: Position | None = None
    has: Mapping[str, str] = field(default_factory=dict)


def first_start(store: StateStore | None, loaded: LoadedPipeline) -> FirstStart:
    """Return where a pipeline without a position begins; without a store nothing was imported.

    Raises:
        PositionLost: An imported checkpoint is no position of this kind of source.
        SettingsError: The seed's file cannot be read, or holds no position of this kind of source.
    """
    imported = None if store is None else _imported(store, loaded)
    return imported if imported is not None else FirstStart(_seed(loaded))


def sink_positions(loaded: LoadedPipeline, checkpoints: Mapping[str, bytes]) -> dict[str, Position]:
    """Return how far each sink of a pipeline is, according to checkpoints of DeltaForge.

    If no sink has a key of its own, the source's plain key counts for all; otherwise a sink without
    a key is left out.

    Raises:
        PositionLost: A checkpoint is no position of this kind of source.
    """
    source_id = loaded.spec.spec.source.config.id
    ids = [sink.config.id for sink in loaded.spec.spec.sinks]
    keys = {sink: legacy.sink_key(source_id, sink) for sink in ids}
    own = {sink: key for sink, key in keys.items() if key in checkpoints}
    if not own and source_id in checkpoints:
        own = dict.fromkeys(ids, source_id)
    return {sink: _position(loaded, key, checkpoints[key]) for sink, key in own.items()}


def _imported(store: StateStore, loaded: LoadedPipeline) -> FirstStart | None:
    source_id = loaded.spec.spec.source.config.id
    positions = sink_positions(
        loaded, legacy.stored(Kv(store.database, legacy.NAMESPACE), source_id)
    )
    if not positions:
        return None
    at = min(positions.values())
    logger.warning(
        "%s: begins at DeltaForge's checkpoint, %s; nothing that its sinks lack is left out",
        loaded.name,
        at.to_json(),
    )
    has = {sink: position.to_json() for sink, position in positions.items() if at < position}
    return FirstStart(at, has)


def _position(loaded: LoadedPipeline, key: str, value: bytes) -> Position:
    kind = _kind(loaded)
    identified: SourceType[Any] | None
    try:
        identified, position = identify_position(value.decode())
    except (CorruptLog, UnicodeDecodeError):
        identified = None
    if identified is not kind:
        raise PositionLost(
            f"{loaded.name}: the checkpoint {key} of DeltaForge is no position of such a source; "
            "import a sound one, or begin without: "
            f"deltaforge checkpoint import {loaded.name} --forget"
        )
    return kind.imported(position)


def _kind(loaded: LoadedPipeline) -> SourceType[Any]:
    return source_types()[loaded.spec.spec.source.type]


def _seed(loaded: LoadedPipeline) -> Position | None:
    seed = loaded.spec.spec.engine.checkpoint.seed
    if seed.type == "chaser":
        return _chaser(loaded, Path(str(seed.path)))
    if seed.position is not None:
        return parse_position(json.dumps(dict(seed.position)))
    if seed.path is None:
        return None
    where = f"{loaded.name}: engine.checkpoint.seed.path, {seed.path},"
    try:
        kind, position = identify_position(Path(seed.path).read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"{where} cannot be read: {error.strerror}") from error
    except (CorruptLog, UnicodeDecodeError) as error:
        raise SettingsError(f"{where} holds no position, as JSON text") from error
    if kind is not _kind(loaded):
        raise SettingsError(f"{where} holds the position of another kind of source")
    return position


def _chaser(loaded: LoadedPipeline, path: Path) -> Position | None:
    """Return the position of a chaser file.

    Returns None, with a warning, if the file is missing or malformed.
    """
    name, kind = loaded.name, _kind(loaded)
    try:
        content = path.read_bytes()
    except OSError as error:
        logger.warning("%s: chaser file %s: %s; begins without it", name, path, error.strerror)
        return None
    number = int.from_bytes(content, "little", signed=True)
    if len(content) != _CHASER_BYTES or number < 0:
        logger.warning(
            "%s: chaser file %s holds no log position (%d bytes, not 8; or a negative number); "
            "begins without it",
            name,
            path,
            len(content),
        )
        return None
    location = kind.place(None, number)
    logger.warning("%s: begins at %s, from chaser file %s", name, location, path)
    return kind.position_at(number)
