"""Queries that the documentation recommends, so that tests execute them as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[3] / "docs"


def current_rows(page: str, documented: str, table: str) -> str:
    """Return the query for current rows from a changelog.

    Args:
        page: The page of the docs.
        documented: The name that the table has there.
        table: The name that it has in the test.
    """
    _, _, section = (DOCS / page).read_text().partition("## Current rows from a changelog")
    found = re.search("```sql\n(.*?)```", section, re.DOTALL)
    assert found is not None
    query = found[1]
    assert documented in query
    return query.replace(documented, table)


def with_all_values(operation: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an operation of a source whose log lacks no values: a changelog has null for those."""
    return tuple(frozenset() if isinstance(part, frozenset) else part for part in operation)
