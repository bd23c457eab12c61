"""Processors of installed packages, tested with a real distribution on the import path."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from deltaforge_dagster.config.processors import Processor
from deltaforge_dagster.errors import ProcessorFailed, SpecError
from deltaforge_dagster.processors.chain import Chain, ChainSpec
from deltaforge_dagster.processors.messages.envelope import EventOrigin
from tests.processors.acme import install
from tests.processors.rows import batch, row

_PROCESSORS: TypeAdapter[tuple[Processor, ...]] = TypeAdapter(tuple[Processor, ...])


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the package of `tests.processors.acme`."""
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("acme_processors", None)


def chain(*blocks: dict[str, Any]) -> ChainSpec:
    """Return a chain for processors given as in a pipeline file."""
    return ChainSpec(
        _PROCESSORS.validate_json(json.dumps(blocks)), EventOrigin("mysql", "db", "acme")
    )


def made(spec: ChainSpec) -> list[dict[str, Any]]:
    """Return the result for one event."""
    with Chain(spec) as one:
        return [event for found in one.run([batch([row()])]) for event in found.to_pylist()]


def test_a_processor_of_a_package(acme: None) -> None:
    """The type is the name of the entry point; the processor runs among others, with its config and counters."""
    spec = chain({"type": "label", "config": {"topic": "t"}}, {"type": "filter", "ops": ["create"]})

    with Chain(spec) as one:
        (found,) = one.run([batch([row(), row(op="u")])])

        assert found.column("topic").to_pylist() == ["t"]
        assert one.counts["label"]["labelled"] == 2


def test_the_config_is_that_of_the_package(acme: None) -> None:
    """What its pydantic model rejects is found without an event, and reported by field without the value."""
    spec = chain({"type": "label", "id": "l", "config": {"topic": 5, "secret": 7}})

    ((number, text),) = spec.problems()

    assert number == 0
    assert text == (
        "processor l: label: config.topic: Input should be a valid string; "
        "config.secret: Extra inputs are not permitted"
    )


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("raise", "processor label: ValueError$"),
        ("short", "processor label: returned no column ordinal"),
        ("nothing", "processor label: returned NoneType, not a pyarrow RecordBatch"),
    ],
)
def test_what_it_does_wrong(acme: None, topic: str, said: str) -> None:
    """An error has the processor's id and no value of a row."""
    with pytest.raises(ProcessorFailed, match=said):
        made(chain({"type": "label", "config": {"topic": topic}}))


def test_one_that_cannot_be_made(acme: None) -> None:
    """The error of a failing factory is reported."""
    with pytest.raises(
        SpecError, match="processor broken: broken: cannot be created: RuntimeError: no"
    ):
        made(chain({"type": "broken"}))


def test_unknown_types_name_the_known_ones(acme: None) -> None:
    """The message lists the built-in types and those of installed packages."""
    with pytest.raises(
        ValidationError,
        match=r"is lable, which no installed package provides; known are javascript, .*, broken, label",
    ):
        chain({"type": "lable"})


def test_a_package_that_is_not_installed_where_it_runs(
    acme: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on which the package is not installed reports that."""
    spec = chain({"type": "label", "config": {"topic": "t"}})
    monkeypatch.undo()

    with pytest.raises(SpecError, match="no package that is installed here provides it"):
        made(spec)
