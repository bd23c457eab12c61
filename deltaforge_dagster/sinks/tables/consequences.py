"""Texts of `deltaforge plan` about changed options of sinks that keep tables.

`registry.SinkType.consequences` refers to them.
"""

RESYNC = (
    "needs a resync: existing tables keep their form, and have none of the rows that are delivered "
    "already in the new one (deltaforge resync PIPELINE --sink SINK)"
)
"""For an option that decides how rows are written."""

MOVED = (
    "later changes go there; tables that are new there need a resync, because they lack the rows "
    "that are delivered already (deltaforge resync PIPELINE --sink SINK)"
)
"""For an option that decides where tables are."""

KEYS = f"lets a table go on that is held because it has no key; a table that exists {RESYNC}"
"""For `keys`."""

TYPES = (
    "applies to columns that are created from now on, and lets a held table go on if the column is "
    "new; a table that has the column with another type needs a resync "
    "(deltaforge resync PIPELINE --sink SINK --tables TABLE)"
)
"""For `types`."""

LATER = "applies to changes after the checkpoint; what the tables have stays as it is"
"""For an option that selects changes."""
