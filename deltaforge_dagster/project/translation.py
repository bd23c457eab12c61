"""Translators from what a component says under `translation`.

The form of attributes, and how templates in them are evaluated, is Dagster's, as in its other
integrations. Dagster's functions for that have no public names; they are used here only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import dagster as dg
import pydantic
from dagster.components.resolved.core_models import AssetAttributesModel
from dagster.components.utils.translation import TranslatorResolvingInfo

from deltaforge_dagster.assets.translator import DeltaforgeTranslator, PipelineAsset
from deltaforge_dagster.config.blocks import sentence
from deltaforge_dagster.errors import SpecError

PARTS: Mapping[str, str] = {
    "changes": "changes",
    "sinks": "sink",
    "tables": "table",
    "source_tables": "source_table",
}
"""The parts of `translation` beside `all`, with the kind of asset that each is about."""


class AttributesTranslator(DeltaforgeTranslator):
    """Translates by the attributes that a component file gives.

    Args:
        parts: By `all` or a part of `PARTS`: attributes in Dagster's form, without `problems_of`.
        context: Evaluates templates, in which `pipeline`, `kind`, `sink`, `schema`, `table` and
            `spec` are those of the asset.
        base: Translates before.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        context: dg.ResolutionContext,
        base: Callable[[PipelineAsset], dg.AssetSpec],
    ) -> None:
        self._base = base
        tree = context.source_position_tree
        paths = {name: ("attributes", "translation", name) for name in parts}
        positions = {} if tree is None else {n: tree.lookup(path) for n, path in paths.items()}
        self._lines = {n: position.start.line for n, position in positions.items() if position}
        self._parts = {
            name: TranslatorResolvingInfo(
                part if isinstance(part, str) else AssetAttributesModel.model_validate(part),
                context,
                name,
            )
            for name, part in parts.items()
        }

    def get_asset_spec(self, data: PipelineAsset) -> dg.AssetSpec:
        """Return the spec: the base's, then with what `all` says, then with the kind's part."""
        spec = self._base(data)
        for name, info in sorted(self._parts.items()):  # `all` is the first
            if name == "all" or PARTS[name] == data.kind:
                spec = self._translated(name, info, spec, data)
        return spec

    def _translated(
        self, name: str, info: TranslatorResolvingInfo, spec: dg.AssetSpec, data: PipelineAsset
    ) -> dg.AssetSpec:
        names = {
            "pipeline": data.pipeline,
            "kind": data.kind,
            "sink": data.sink,
            "schema": data.schema,
            "table": data.table,
        }
        try:
            return info.get_asset_spec(spec, {**names, "spec": spec})
        except Exception as error:  # noqa: BLE001 - people's templates and Dagster raise anything
            # Before the last line, Dagster quotes the file and prints a stack trace.
            text = (str(error).strip() or type(error).__name__).splitlines()[-1]
            where = f" (line {self._lines[name]})" if name in self._lines else ""
            raise SpecError(f"translation.{name}{where}: {text}") from None


def problems_of(parts: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what is wrong with the parts of `translation`: the path below it, and the problem."""
    for name, part in parts.items():
        if name != "all" and name not in PARTS:
            yield (name,), f"is not known (known are {', '.join(['all', *PARTS])})"
        elif not isinstance(part, str):
            try:
                AssetAttributesModel.model_validate(part)
            except pydantic.ValidationError as error:
                for problem in error.errors(include_url=False, include_input=False):
                    unknown = problem["type"] == "extra_forbidden"
                    text = "is not an attribute of assets" if unknown else sentence(problem)
                    yield (name, *map(str, problem["loc"][:1])), text
