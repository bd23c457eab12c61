"""The definitions of the project, as `create-dagster` writes them."""

from pathlib import Path

from dagster import Definitions, definitions, load_from_defs_folder


@definitions
def defs() -> Definitions:
    """Load what is in `defs`."""
    return load_from_defs_folder(path_within_project=Path(__file__).parent)
