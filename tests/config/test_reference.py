"""docs/configuration.md and the models say the same."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deltaforge_dagster.config import settings
from deltaforge_dagster.config.fields import field_table
from deltaforge_dagster.config.support import (
    LATER_ENVELOPES,
    LATER_SINKS,
    LATER_SOURCES,
    UNREAD,
    UNREAD_IN_SPEC,
)

REFERENCE = Path(__file__).parents[2] / "docs" / "configuration.md"
ROW = re.compile(
    r"^\| `(?P<path>(?:metadata|spec)[^`]*)` \|[^|]*\|(?P<default>[^|]*)\|", re.MULTILINE
)


def shown(info: FieldInfo) -> str | None:
    """Return a default as the reference shows it; None for blocks, which show their fields'."""
    if info.is_required():
        return "required"
    default = info.get_default()
    if isinstance(default, BaseModel):
        return None
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return "none" if default is None else f"`{default}`"


@pytest.fixture(scope="module")
def documented() -> dict[str, str]:
    """Return the default shown for each documented field."""
    rows = ROW.finditer(REFERENCE.read_text())
    return {row["path"]: row["default"].strip() for row in rows}


def test_every_field_is_documented_and_nothing_else(documented: dict[str, str]) -> None:
    """A new field needs its row, a removed one must go from the page."""
    top = {"metadata", "spec"}

    assert set(documented) == set(field_table()) - top


def test_defaults_are_those_of_the_models(documented: dict[str, str]) -> None:
    """The page shows what a field really is when the file leaves it out."""
    derived = {"spec.source.config.id", "spec.sinks[].config.id"}
    expected = {
        path: shown(info)
        for path, info in field_table().items()
        if path in documented and path not in derived and shown(info) is not None
    }

    assert {path: documented[path] for path in expected} == expected


@pytest.mark.parametrize("name", sorted(LATER_ENVELOPES | LATER_SINKS | LATER_SOURCES))
def test_what_is_not_supported_is_listed(name: str) -> None:
    """Nobody has to try a feature to learn that it is not there yet."""
    (paragraph,) = re.findall(r"\*\*Not supported yet\*\*.*?\n- ", REFERENCE.read_text(), re.DOTALL)

    assert f"`{name}`" in paragraph


@pytest.mark.parametrize("name", [*UNREAD, *(f"spec.{name}" for name in UNREAD_IN_SPEC)])
def test_what_is_not_read_is_listed(name: str) -> None:
    """A field without meaning is named as such."""
    (line,) = re.findall(r"\*\*Accepted and not read\*\*.*", REFERENCE.read_text())

    assert f"`{name}`" in line


def test_settings_are_documented() -> None:
    """Every environment variable of the settings has its row."""
    names = set(re.findall(r"DELTAFORGE_[A-Z_]+", settings.__doc__ or ""))

    assert names == set(
        re.findall(r"^\| `(DELTAFORGE_[A-Z_]+)`", REFERENCE.read_text(), re.MULTILINE)
    )
