"""`spec.schema_sensing`: what to find out about the shape of JSON columns and tables."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from deltaforge_dagster.config.blocks import Block, Count, Text

Number = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
JsonSchemaFormat = Literal["draft-07", "draft-2020-12"]


class Selection(Block):
    """Names by pattern: exact, `prefix%` or `prefix*`, `*`; `exclude` wins."""

    include: tuple[Text, ...] = ()
    """What is looked at; none for all."""
    exclude: tuple[Text, ...] = ()
    """What is not."""


class DeepInspection(Block):
    """How far into JSON values to look."""

    enabled: bool = True
    """Whether columns are looked into at all; without it the fields of whole documents are all there is."""
    max_depth: Count = 10
    """How many levels down."""
    max_sample_size: Number = 1000
    """After so many documents a schema learns no more, and others are compared with it; 0: never."""
    columns: Selection = Selection()
    """Which columns, of those that may hold JSON."""


class Sampling(Block):
    """How many events are looked at."""

    warmup_events: Number = 1000
    """So many at the beginning, all of them."""
    sample_rate: int = 10
    """Afterwards one in so many."""
    structure_cache: bool = True
    """Whether structures that are known are skipped."""
    structure_cache_size: Number = 100
    """How many structures are remembered for each table."""


class HighCardinality(Block):
    """Objects whose keys are values, such as ids."""

    enabled: bool = True
    """Whether such objects are found."""
    min_events: Number = 100
    """Not before so many events."""
    stable_threshold: Share = 0.5
    """Share of events from which a key counts as stable."""
    min_dynamic_fields: Number = 5
    """So many other keys make an object dynamic."""
    confidence_threshold: Share = 0.7
    """How sure to be."""
    reevaluate_interval: Number = 10_000
    """Again after so many events; 0: never."""
    hll_precision: Annotated[int, Field(ge=10, le=16)] = 12
    """Precision of HyperLogLog."""
    heavy_hitter_capacity: Number = 50
    """How many frequent keys are counted."""
    sample_size: Number = 50
    """How many keys are kept as samples."""


class Tracking(Block):
    """What is counted for each field."""

    field_statistics: bool = False
    """Least and greatest value, and how many different ones."""
    null_rates: bool = True
    """How often a field is null."""
    enum_detection: bool = True
    """Whether a field has few values."""
    enum_max_cardinality: Number = 50
    """How many are few."""
    detect_drift: bool = False
    """Has no effect: drift is always looked for."""
    drift_threshold: Share = 0.1
    """Has no effect: every row that differs is counted."""


class Output(Block):
    """Where the findings go."""

    expose_api: bool = True
    """Over the API."""
    emit_events: bool = False
    """As events `_schema_change`; must be false."""
    export_json_schema: bool = True
    """As JSON Schema."""
    emit_schemas: bool = False
    """Has no effect: API, commands and Dagster show every schema."""
    json_schema_format: JsonSchemaFormat = "draft-2020-12"
    """Which draft of JSON Schema."""


class SchemaSensing(Block):
    """What to find out about tables and JSON columns."""

    enabled: bool = False
    """Whether anything is. It changes nothing that is delivered, and delays nothing."""
    tables: Selection = Selection()
    """Which tables, by their bare names."""
    deep_inspect: DeepInspection = DeepInspection()
    """JSON values."""
    sampling: Sampling = Sampling()
    """How many events."""
    high_cardinality: HighCardinality = HighCardinality()
    """Keys that are values."""
    tracking: Tracking = Tracking()
    """What is counted."""
    output: Output = Output()
    """Where the findings go."""


def is_off(sensing: SchemaSensing | None) -> bool:
    """Say whether a block finds out nothing."""
    return sensing is None or not sensing.enabled
