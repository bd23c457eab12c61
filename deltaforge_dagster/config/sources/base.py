"""What every source of a pipeline file has.

A kind of source declares its options in a subclass of `SourceConfig` (`sources.registry`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator

from deltaforge_dagster.config.blocks import Block, Text

if TYPE_CHECKING:
    from deltaforge_dagster.config.sources import Snapshot

# `schema.table` or `table`; the first dot is the separator, and a wildcard may only end a part.
_TABLE_PATTERN = re.compile(r"(?:[^.*%]+[*%]?|[*%]) (?: \. (?:[^*%]+[*%]?|[*%]) )?", re.VERBOSE)


def _table_pattern(text: str) -> str:
    if not _TABLE_PATTERN.fullmatch(text):
        raise ValueError(
            "is not a table pattern (write schema.table, where a part may end in `*` or `%` for "
            "any rest, and has no other wildcard)"
        )
    return text


TablePattern = Annotated[Text, AfterValidator(_table_pattern)]
"""`schema.table`, or `table`, with wildcards at the ends."""

OnSchemaDrift = Literal["adapt", "halt"]


class SourceConfig(Block):
    """The options of every source.

    Each kind declares `tables`, `on_schema_drift` and `snapshot` itself, because what they mean
    differs and the reference lists fields in the order of the class. A kind without snapshots
    declares `snapshot: None`.
    """

    id: Text
    """Identifies the source; part of every event id. If absent, the pipeline's name is used, with a
    warning.
    """

    if TYPE_CHECKING:
        tables: tuple[str, ...]
        on_schema_drift: OnSchemaDrift
        snapshot: Snapshot | None


DECLARED = ("tables", "on_schema_drift", "snapshot")
"""What each subclass of `SourceConfig` declares."""


class SourceBlock(Block):
    """The source of a pipeline file.

    It is an instance of one subclass per kind (`config.model`).
    """

    type: str
    config: SourceConfig
