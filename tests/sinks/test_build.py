"""Which sinks a pipeline file makes, and what they are called on servers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.sinks.build import build_sink
from deltaforge_dagster.sinks.kafka.sink import KafkaSink
from deltaforge_dagster.sinks.redis.sink import RedisSink
from deltaforge_dagster.sinks.registry import SinkContext
from deltaforge_lab.faulty_sink import FaultySink

NAMES = ("a", "a-b", "a_b", "a.b", "b", "b-c", "c", "b.c", "a-b-c")

FILE = """\
metadata: {{name: {pipeline}, tenant: acme}}
spec:
  source:
    type: postgres
    config: {{id: s, dsn: "postgres://u@h/d", slot: s, publication: p, tables: [public.t]}}
  sinks:
    - type: kafka
      config: {{id: {sink}, brokers: "h:9092", topic: t, exactly_once: true}}
    - type: redis
      config: {{id: {sink}-r, uri: "redis://h", stream: t, exactly_once: true}}
"""


def spec(folder: Path, pipeline: str, sink: str) -> PipelineSpec:
    """Return a pipeline with a sink of each kind that keeps a position under a name of its own."""
    path = folder / "pipeline.yaml"
    path.write_text(FILE.format(pipeline=pipeline, sink=sink))
    return load_pipeline(path).spec


def test_no_two_sinks_share_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sink `c` of `a-b` and sink `b-c` of `a` are two: neither fences the other, nor reads its position."""
    made: list[object] = []
    monkeypatch.setattr(KafkaSink, "__init__", lambda _, *__, **names: made.append(names))
    monkeypatch.setattr(RedisSink, "__init__", lambda _, *__, **names: made.append(names))

    for pipeline, sink in itertools.product(NAMES, NAMES):
        declared = spec(tmp_path, pipeline, sink).spec.sinks
        for one in declared:
            build_sink(declared, one.config.id, SinkContext(pipeline))

    kept = [one.get("transactional_id") or one["position_key"] for one in made]  # type: ignore[attr-defined, index]
    assert len(kept) == len(set(kept)) == 2 * len(NAMES) ** 2


def test_build_chooses_by_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each type has its sink; all are wrapped when the environment says so, and only then."""
    made = spec(tmp_path, "shop", "out").spec.sinks
    context = SinkContext("shop")
    monkeypatch.delenv("DELTAFORGE_SINK_FAULTS", raising=False)

    plain = [type(build_sink(made, name, context)) for name in ("out", "out-r")]
    monkeypatch.setenv("DELTAFORGE_SINK_FAULTS", str(tmp_path))
    wrapped = [type(build_sink(made, name, context)) for name in ("out", "out-r")]

    assert ([KafkaSink, RedisSink], [FaultySink] * 2) == (plain, wrapped)


def test_build_of_an_unknown_sink(tmp_path: Path) -> None:
    """A sink that the pipeline does not have is named."""
    with pytest.raises(NotAllowed, match="'lost'"):
        build_sink(spec(tmp_path, "shop", "out").spec.sinks, "lost", SinkContext("shop"))


def test_tables_get_no_messages(tmp_path: Path) -> None:
    """A replay to a sink that writes tables is refused before anything is read."""
    path = tmp_path / "pipeline.yaml"
    lake = "\n    - {type: delta, config: {id: lake, path: /lake}}\n"
    path.write_text(FILE.format(pipeline="shop", sink="out").rstrip() + lake)
    declared = load_pipeline(path).spec.spec.sinks

    with pytest.raises(NotAllowed, match="lake: nothing can be sent to it, because delta sinks"):
        build_sink(declared, "lake", SinkContext("shop"))
