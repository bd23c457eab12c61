"""Components: a pipeline, or a folder of pipelines, in a Dagster project.

Dagster derives the types of attributes from annotations, and would stop the whole code location at
the first attribute that does not fit. So attributes are taken as they are written, with a schema
for editors and `dg check yaml` only, and are checked when the component is loaded: a mistake makes
this pipeline an asset with a failing check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import dagster as dg
from pydantic import BaseModel, ConfigDict, WithJsonSchema

from deltaforge_dagster.assets.translator import DeltaforgeTranslator, PipelineAsset
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.project.scaffolding import PipelineScaffolder

if TYPE_CHECKING:
    from deltaforge_dagster.pipeline.control.catalog import AnyPipeline

_Schema = dict[str, Any]


def _text(description: str) -> _Schema:
    return {"type": "string", "description": description}


_INSTALLATION: _Schema = {
    "type": "object",
    "description": "Where the pipeline keeps its state; environment variables DELTAFORGE_... win.",
    "additionalProperties": False,
    "properties": {
        "home": _text("Folder of state, journal and caches; .deltaforge in the project if unset."),
        "state_url": _text("sqlite:///FILE or postgresql://...; SQLite in the home if unset."),
        "journal_url": _text("A folder as path or URL; journal in the home if unset."),
        "spark_remote": _text("sc://host:port of a Spark Connect server; a local one if unset."),
        "lake_jars": _text("Folder of the jars for Delta and Iceberg; jars in the home if unset."),
    },
}
_PART: _Schema = {
    "anyOf": [{"type": "string"}, {"type": "object"}],
    "description": "Attributes of assets: key, key_prefix, group_name, tags, owners, kinds, "
    "description, deps, automation_condition, metadata, freshness_policy.",
}
_TRANSLATION: _Schema = {
    "type": "object",
    "description": "What assets look like, by kind.",
    "additionalProperties": False,
    "properties": dict.fromkeys(("all", "changes", "sinks", "tables", "source_tables"), _PART),
}


class _PipelineAttributes(BaseModel):
    model_config = ConfigDict(
        extra="allow", json_schema_extra={"additionalProperties": False, "title": "Pipeline"}
    )

    path: Annotated[Any, WithJsonSchema(_text("A pipeline file, relative to this one."))] = None
    metadata: Annotated[
        Any, WithJsonSchema({"type": "object", "description": "As in a pipeline file."})
    ] = None
    spec: Annotated[
        Any, WithJsonSchema({"type": "object", "description": "As in a pipeline file."})
    ] = None
    installation: Annotated[Any, WithJsonSchema(_INSTALLATION)] = None
    translation: Annotated[Any, WithJsonSchema(_TRANSLATION)] = None


class _PipelinesAttributes(BaseModel):
    model_config = ConfigDict(
        extra="allow", json_schema_extra={"additionalProperties": False, "title": "Pipelines"}
    )

    path: Annotated[
        Any, WithJsonSchema(_text("A folder of pipeline files, relative to this file."))
    ] = None
    installation: Annotated[Any, WithJsonSchema(_INSTALLATION)] = None
    translation: Annotated[Any, WithJsonSchema(_TRANSLATION)] = None


@dataclass(frozen=True, slots=True)
class _Written:
    """The attributes of a component as they are written, and where."""

    attributes: Mapping[str, Any]
    context: dg.ComponentLoadContext
    problems: list[str] = field(default_factory=list)

    @property
    def file(self) -> Path | None:
        """The component file; None if the attributes come from a program."""
        tree = self.context.resolution_context.source_position_tree
        return None if tree is None else Path(tree.position.filename)

    @property
    def line(self) -> int:
        """The line where the component begins."""
        tree = self.context.resolution_context.source_position_tree
        return 1 if tree is None else tree.position.start.line

    @property
    def folder(self) -> Path:
        """What `path` is relative to."""
        return Path.cwd() if self.file is None else self.file.parent

    def report(self, path: Sequence[str], text: str) -> None:
        """Add a problem at a path of the attributes, with file and line."""
        tree = self.context.resolution_context.source_position_tree
        where = ": ".join([".".join(path), text]) if path else text
        if tree is None:
            self.problems.append(where)
            return
        node, line = tree, tree.position.start.line
        for part in ("attributes", *path):
            node = node.children.get(part, node)
            line = node.position.start.line
        self.problems.append(f"{tree.position.filename}:{line}: {where}")

    def texts(self, name: str) -> dict[str, str]:
        """Return an attribute that is a mapping of texts; what is not text is a problem."""
        texts = {}
        for key, value in self.mapping(name).items():
            if isinstance(value, str):
                texts[key] = value
            else:
                self.report((name, key), "must be text")
        return texts

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an attribute that is a mapping; anything else is a problem."""
        value = self.attributes.get(name)
        if value is None or isinstance(value, Mapping):
            return value or {}
        self.report((name,), "must be a mapping")
        return {}


class _Component(dg.Component):
    """What the components share.

    Args:
        pipelines: The pipelines.
        installation: Where they keep their state (`pipeline_definitions`).
        translation: Attributes of assets, by kind.
        context: Evaluates the templates in them.
    """

    def __init__(
        self,
        pipelines: Sequence[AnyPipeline],
        installation: Mapping[str, str],
        translation: Mapping[str, Any],
        context: dg.ComponentLoadContext,
    ) -> None:
        self.pipelines = pipelines
        self._installation = installation
        self._translation = translation
        self._context = context
        self.where = str(context.path)

    @classmethod
    def load(cls, attributes: BaseModel | None, context: dg.ComponentLoadContext) -> Self:
        """Return the component of a file; what is wrong is in its pipelines."""
        values = {} if attributes is None else attributes.model_dump(exclude_unset=True)
        written = _Written(values, context)
        installation, translation = _installation(written), _translation(written)
        pipelines = list(cls._pipelines(written))
        if written.problems:
            pipelines = [_broken(written, pipelines)]
        component = cls(pipelines, installation, translation, context)
        if written.file is not None:
            component.where = f"{written.file}:{written.line}"
        return component

    @classmethod
    def _pipelines(cls, written: _Written) -> Iterator[AnyPipeline]:
        """Yield the pipelines of a component that is loaded, and report its problems."""
        raise NotImplementedError

    def get_asset_spec(self, data: PipelineAsset) -> dg.AssetSpec:
        """Return what an asset looks like before `translation` is applied; may be overridden."""
        return DeltaforgeTranslator().get_asset_spec(data)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the definitions of the pipelines that no component before this one has."""
        from deltaforge_dagster.project.definitions import definitions_of  # noqa: PLC0415
        from deltaforge_dagster.project.translation import AttributesTranslator  # noqa: PLC0415

        translator = AttributesTranslator(
            self._translation, self._context.resolution_context, self.get_asset_spec
        )
        rivals = _rivals(context)
        return dg.Definitions.merge(
            *(
                definitions_of(
                    _claimed(pipeline, claims),
                    self._installation,
                    translator,
                    self._context.project_root,
                )
                for pipeline in self.pipelines
                if (claims := rivals.get(pipeline.name, [self.where]))[0] == self.where
            )
        )


@dg.scaffold_with(PipelineScaffolder)
class PipelineComponent(_Component):
    """A change data capture pipeline: a database's log to sinks, in order and without gaps.

    Made by::

        dg scaffold defs deltaforge_dagster.PipelineComponent orders --source postgres --sink delta

    Either `path` names a pipeline file, or its content is here::

        type: deltaforge_dagster.PipelineComponent
        attributes:
          metadata: {name: orders, tenant: acme}
          spec:
            source:
              type: postgres
              config: {id: shop, dsn: "{{ env.SHOP_DSN }}", tables: [public.orders]}
            sinks:
              - {type: delta, config: {id: lake, path: /srv/lake}}
          translation:
            tables: {key: "lake/{{ table }}", group_name: lake}
    """

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        """Return the model of the attributes."""
        return _PipelineAttributes

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Return what Dagster shows about this type."""
        return dg.ComponentTypeSpec(tags=["cdc", "spark"])

    @classmethod
    def _pipelines(cls, written: _Written) -> Iterator[AnyPipeline]:
        from deltaforge_dagster.config.file.load import (  # noqa: PLC0415
            load_component,
            load_files,
            load_inline,
        )

        attributes = written.attributes
        if ("path" in attributes) == ("spec" in attributes):
            both = "give either one" if "path" in attributes else "one of them is needed"
            written.report((), f"a pipeline is a file, `path`, or `metadata` and `spec`: {both}")
        elif "path" not in attributes and written.file is not None:
            yield load_component(written.file, written.line)
        elif "path" not in attributes:
            yield load_inline("pipeline", attributes, written.folder)
        elif not isinstance(attributes["path"], str):
            written.report(("path",), "must be text")
        elif unknown := attributes.keys() - {"path", "installation", "translation"}:
            written.report(sorted(unknown)[:1], "is not a known attribute beside `path`")
        elif not (path := written.folder / attributes["path"]).is_file():
            written.report(("path",), f"there is no file {path}")
        else:
            yield from load_files([path])


class PipelinesComponent(_Component):
    """A folder of pipeline files, each of which is a change data capture pipeline.

    A file that is added is a pipeline once the code location is loaded again::

        type: deltaforge_dagster.PipelinesComponent
        attributes:
          path: pipelines
    """

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        """Return the model of the attributes."""
        return _PipelinesAttributes

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Return what Dagster shows about this type."""
        return dg.ComponentTypeSpec(tags=["cdc", "spark"])

    @classmethod
    def _pipelines(cls, written: _Written) -> Iterator[AnyPipeline]:
        from deltaforge_dagster.config.file.load import load_pipelines  # noqa: PLC0415

        path = written.attributes.get("path")
        for name in written.attributes.keys() - {"path", "installation", "translation"}:
            written.report(
                (name,), "is not a known attribute (known are path, installation, translation)"
            )
        if not isinstance(path, str):
            written.report(("path",), "a folder of pipeline files is needed")
        elif not (written.folder / path).is_dir():
            written.report(("path",), f"there is no folder {written.folder / path}")
        else:
            yield from load_pipelines(written.folder / path)


def _installation(written: _Written) -> dict[str, str]:
    from deltaforge_dagster.config.settings import INSTALLATION_FIELDS  # noqa: PLC0415

    texts = written.texts("installation")
    for name in texts.keys() - INSTALLATION_FIELDS:
        fields = ", ".join(INSTALLATION_FIELDS)
        written.report(("installation", name), f"is not known (known are {fields})")
    return {name: text for name, text in texts.items() if name in INSTALLATION_FIELDS}


def _translation(written: _Written) -> Mapping[str, Any]:
    from deltaforge_dagster.project.translation import problems_of  # noqa: PLC0415

    translation = written.mapping("translation")
    problems = list(problems_of(translation))
    for path, text in problems:
        written.report(("translation", *path), text)
    return {} if problems else translation


def _broken(written: _Written, pipelines: Sequence[AnyPipeline]) -> AnyPipeline:
    """Return the pipeline of a component with problems, which are all shown."""
    from deltaforge_dagster.config.file.load import BrokenPipeline  # noqa: PLC0415

    others = [p for pipeline in pipelines for p in _problems(pipeline)]
    if len(pipelines) == 1:
        name = pipelines[0].name
    else:
        name = "components" if written.file is None else written.folder.name
    return BrokenPipeline(None, name, SpecError(*written.problems, *others), in_code=True)


def _problems(pipeline: AnyPipeline) -> tuple[str, ...]:
    from deltaforge_dagster.config.file.load import BrokenPipeline  # noqa: PLC0415

    return pipeline.error.problems if isinstance(pipeline, BrokenPipeline) else ()


def _rivals(context: dg.ComponentLoadContext) -> dict[str, list[str]]:
    """Return where each pipeline of the project is, by its name."""
    places: dict[str, list[str]] = {}
    for component in context.component_tree.get_all_components(_Component):
        for pipeline in component.pipelines:
            places.setdefault(pipeline.name, []).append(component.where)
    return {name: sorted(set(where)) for name, where in places.items()}


def _claimed(pipeline: AnyPipeline, claims: Sequence[str]) -> AnyPipeline:
    """Return a pipeline, broken if several components have it: it is undefined which is meant."""
    from deltaforge_dagster.config.file.load import BrokenPipeline  # noqa: PLC0415

    if len(claims) == 1:
        return pipeline
    text = f"the pipeline {pipeline.name} is in {len(claims)} components: {' and '.join(claims)}"
    error = SpecError(f"{claims[0]}: {text} (names must be unique)", *_problems(pipeline))
    return BrokenPipeline(None, pipeline.name, error, in_code=True)
