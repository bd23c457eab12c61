"""What an asset of a pipeline is called and looks like in Dagster, as a project wants it.

A project's `DeltaforgeTranslator` changes what the product would show. The keys that it gives are
used wherever the product names an asset: in definitions, in the events of runs and ticks, and when
history is deleted. So the translator of a pipeline is known to the whole process (`translate`),
which has one set of definitions: Dagster loads them once, and starts another process to load them
again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import dagster as dg

from deltaforge_dagster.errors import SpecError

AssetKind = Literal[
    "changes", "sink", "table", "source_table", "schemas", "snapshot", "maintenance", "health"
]


@dataclass(frozen=True, slots=True)
class PipelineAsset:
    """An asset of a pipeline, as a translator gets it.

    Attributes:
        pipeline: The pipeline's name.
        kind: `changes`; a `sink`, or a `table` in which a sink keeps a table of the source; a
            `source_table`; or one of the pipeline's own: `schemas`, `snapshot`, `maintenance` of a
            sink's tables, `health`.
        spec: What the product would show. While only the key is asked for, nothing but the key.
        sink: The sink's id, for `sink`, `table` and `maintenance`.
        schema: The schema of the source's table (MySQL's database), for `table` and
            `source_table`.
        table: The name of the source's table, for the same.
    """

    pipeline: str
    kind: AssetKind
    spec: dg.AssetSpec
    sink: str | None = None
    schema: str | None = None
    table: str | None = None


class DeltaforgeTranslator:
    """Says what the assets of a pipeline look like; to be subclassed.

    Example::

        class Warehouse(DeltaforgeTranslator):
            def get_asset_spec(self, data: PipelineAsset) -> dg.AssetSpec:
                spec = super().get_asset_spec(data)
                if data.kind != "table":
                    return spec
                return spec.replace_attributes(key=["warehouse", data.table])
    """

    def get_asset_spec(self, data: PipelineAsset) -> dg.AssetSpec:
        """Return the spec of an asset.

        Its key may depend on the names in `data` only, because events need it before Dagster has
        loaded the asset. A pipeline's assets must have different keys.
        """
        return data.spec


class _Translation:
    """The translator of one pipeline, and the keys that it has given so far."""

    def __init__(self, translator: DeltaforgeTranslator) -> None:
        self.translator = translator
        self._keys: dict[dg.AssetKey, dg.AssetKey] = {}
        self._own: dict[dg.AssetKey, dg.AssetKey] = {}

    def key(self, asset: PipelineAsset) -> dg.AssetKey:
        own = asset.spec.key
        if own not in self._keys:
            bare = replace(asset, spec=dg.AssetSpec(own))
            key = self._keys[own] = self.translator.get_asset_spec(bare).key
            other = self._own.setdefault(key, own)
            if other != own:
                raise SpecError(
                    f"translation: {other.to_user_string()} and {own.to_user_string()} get the "
                    f"same key, {key.to_user_string()} (give each asset its own)"
                )
        return self._keys[own]


_translations: dict[str, _Translation] = {}


def translate(pipeline: str, translator: DeltaforgeTranslator | None) -> None:
    """Have a pipeline's assets translated in this process from now on; None ends it."""
    _translations.pop(pipeline, None)
    if translator is not None:
        _translations[pipeline] = _Translation(translator)


def shown_key(asset: PipelineAsset) -> dg.AssetKey:
    """Return the key that an asset has in Dagster.

    Raises:
        SpecError: Another asset of the pipeline has that key.
    """
    translation = _translations.get(asset.pipeline)
    return asset.spec.key if translation is None else translation.key(asset)


def shown_spec(asset: PipelineAsset) -> dg.AssetSpec:
    """Return the spec of an asset as Dagster shows it.

    Raises:
        SpecError: Its key depends on more than names, or is that of another asset of the pipeline.
    """
    translation = _translations.get(asset.pipeline)
    if translation is None:
        return asset.spec
    key, spec = translation.key(asset), translation.translator.get_asset_spec(asset)
    if spec.key != key:
        raise SpecError(
            f"translation of {asset.spec.key.to_user_string()}: the key "
            f"{spec.key.to_user_string()} depends on more than names, from which it would be "
            f"{key.to_user_string()} (use the names of sink, schema and table only)"
        )
    return spec
