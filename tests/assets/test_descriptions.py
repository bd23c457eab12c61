"""Tests of the owners and tags of assets."""

from __future__ import annotations

from collections.abc import Mapping

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.assets.descriptions import owners, tags
from deltaforge_dagster.config.model import Metadata


def metadata(
    labels: Mapping[str, str] | None = None, annotations: Mapping[str, str] | None = None
) -> Metadata:
    """Return the metadata of a file."""
    return Metadata(
        name="orders", tenant="acme", labels=labels or {}, annotations=annotations or {}
    )


@pytest.mark.parametrize(
    ("labels", "annotations", "found"),
    [
        ({}, {}, []),
        ({"team": "data"}, {}, ["team:data"]),
        ({"owner": "team:data"}, {}, ["team:data"]),
        ({}, {"owner": "ada@example.com"}, ["ada@example.com"]),
        ({}, {"owners": "ada@example.com, data ,"}, ["ada@example.com", "team:data"]),
        ({"team": "data"}, {"owner": "data, ops"}, ["team:data", "team:ops"]),
        ({"team": "team:"}, {"owner": " "}, []),
    ],
)
def test_owners(labels: dict[str, str], annotations: dict[str, str], found: list[str]) -> None:
    """Owners are email addresses and teams, from annotations first, without duplicates."""
    assert owners(metadata(labels, annotations)) == found


def test_tags() -> None:
    """Tags are the tenant and the labels that Dagster accepts."""
    labels = {"env": "prod", "note": "not a tag, this", "dagster/priority": "1", "a b": "c"}

    assert tags(metadata(labels)) == {"env": "prod", "tenant": "acme"}


_TEXTS = st.dictionaries(
    st.sampled_from(["owner", "team", "env", "a/b", "dagster/x"]) | st.text(), st.text()
)


@given(labels=_TEXTS, annotations=_TEXTS)
def test_dagster_takes_whatever_comes_of_it(
    labels: dict[str, str], annotations: dict[str, str]
) -> None:
    """No text in a pipeline file makes an asset that Dagster refuses."""
    given_ = metadata(labels, annotations)

    spec = dg.AssetSpec("a", owners=owners(given_), tags=tags(given_))

    dg.Definitions.validate_loadable(dg.Definitions(assets=[spec]))
