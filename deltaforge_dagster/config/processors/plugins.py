"""The processor types that installed packages provide.

A package declares each in its `pyproject.toml`, as an entry point (Python Packaging User Guide, "Entry
points specification")::

    [project.entry-points."deltaforge_dagster.processors"]
    redact = "acme_processors:Redact"

The name is the `type` in pipeline files. `processors.plugins` describes what the object must be.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

GROUP = "deltaforge_dagster.processors"


def processor_types() -> dict[str, EntryPoint]:
    """Return the entry points of all installed packages, by `type`."""
    return {one.name: one for one in sorted(entry_points(group=GROUP), key=lambda one: one.name)}
