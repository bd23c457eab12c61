"""`spec.schema_sensing`: what to learn about the structure of JSON columns and tables."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from deltaforge_dagster.config.blocks import Block, Count, Text

Number = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
JsonSchemaFormat = Literal["draft-07", "draft-2020-12"]


class Selection(Block):
    """Names by pattern: exact, `prefix%` or `prefix*`, `*`; `exclude` takes precedence."""

    include: tuple[Text, ...] = ()
    """What is inspected; empty for everything."""
    exclude: tuple[Text, ...] = ()
    """What is not inspected."""


class DeepInspection(Block):
    """How deeply JSON values are inspected."""

    enabled: bool = True
    """Whether JSON in columns is inspected at all; if not, only the fields of whole documents
    are.
    """
    max_depth: Count = 10
    """How many levels of nesting are inspected."""
    max_sample_size: Number = 1000
    """After this many documents a schema stops learning, and further documents are compared with
    it; 0: it never stops.
    """
    columns: Selection = Selection()
    """Which of the columns that may contain JSON are inspected."""


class Sampling(Block):
    """How many events are inspected."""

    warmup_events: Number = 1000
    """How many events at the beginning are all inspected."""
    sample_rate: int = 10
    """Afterwards, one in this many events is inspected."""
    structure_cache: bool = True
    """Whether known structures are skipped."""
    structure_cache_size: Number = 100
    """How many structures are remembered for each table."""


class HighCardinality(Block):
    """Objects whose keys are values, such as ids."""

    enabled: bool = True
    """Whether such objects are found."""
    min_events: Number = 100
    """The minimum number of events before an object is judged."""
    stable_threshold: Share = 0.5
    """A key counts as stable if at least this share of events has it."""
    min_dynamic_fields: Number = 5
    """An object with at least this many other keys may be dynamic."""
    confidence_threshold: Share = 0.7
    """The minimum confidence of the judgment."""
    reevaluate_interval: Number = 10_000
    """The judgment is repeated after this many events; 0: never."""
    hll_precision: Annotated[int, Field(ge=10, le=16)] = 12
    """Precision of HyperLogLog."""
    heavy_hitter_capacity: Number = 50
    """How many frequent keys are counted."""
    sample_size: Number = 50
    """How many keys are kept as samples."""


class Tracking(Block):
    """What is recorded for each field."""

    field_statistics: bool = False
    """Whether to record the minimum, the maximum and the number of distinct values."""
    null_rates: bool = True
    """Whether to record how often a field is null."""
    enum_detection: bool = True
    """Whether to detect fields with few distinct values."""
    enum_max_cardinality: Number = 50
    """The maximum number of distinct values of such a field."""
    detect_drift: bool = False
    """Has no effect: drift is always detected."""
    drift_threshold: Share = 0.1
    """Has no effect: every row that differs is counted."""


class Output(Block):
    """How the findings are published."""

    expose_api: bool = True
    """Whether the REST API shows them."""
    emit_events: bool = False
    """Whether they are delivered as events `_schema_change`; must be false."""
    export_json_schema: bool = True
    """Whether they are available as JSON Schema."""
    emit_schemas: bool = False
    """Has no effect: API, commands and Dagster show every schema."""
    json_schema_format: JsonSchemaFormat = "draft-2020-12"
    """Which draft of JSON Schema."""


class SchemaSensing(Block):
    """What to learn about tables and JSON columns."""

    enabled: bool = False
    """Whether schema sensing is on. It neither changes nor delays delivery."""
    tables: Selection = Selection()
    """Which tables, by their names without schema or database."""
    deep_inspect: DeepInspection = DeepInspection()
    """How deeply JSON values are inspected."""
    sampling: Sampling = Sampling()
    """How many events are inspected."""
    high_cardinality: HighCardinality = HighCardinality()
    """Objects whose keys are values."""
    tracking: Tracking = Tracking()
    """What is recorded for each field."""
    output: Output = Output()
    """How the findings are published."""


def is_off(sensing: SchemaSensing | None) -> bool:
    """Return whether schema sensing is absent or disabled."""
    return sensing is None or not sensing.enabled
