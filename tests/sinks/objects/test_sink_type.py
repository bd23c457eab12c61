"""What the product asks about a sink of object files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from deltaforge_dagster.errors import SinkRejected
from deltaforge_dagster.sinks.objects.sink_type import S3, S3SinkConfig
from deltaforge_dagster.sinks.registry import SinkContext
from deltaforge_dagster.sinks.tables.staged import ObjectForm
from tests.fix_objects import Bucket
from tests.sinks.objects.test_stores import config_of

CONTEXT = SinkContext("shop", brief=True)


def test_a_local_folder(tmp_path: Path) -> None:
    """A check says whether it can be written, and makes nothing."""
    config = S3SinkConfig(id="files", bucket=str(tmp_path / "lake"), local=True)
    (found,) = S3.preflight(config, CONTEXT, [])
    assert (found.level, found.text) == ("ok", f"objects in {tmp_path / 'lake'} will be made")
    assert not (tmp_path / "lake").exists()
    (tmp_path / "lake").touch()
    (found,) = S3.preflight(config, CONTEXT, [])
    assert (found.level, found.remedy) == ("error", "correct the bucket")


@pytest.mark.s3
def test_a_bucket(bucket: Bucket) -> None:
    """A check asks whether there is one, and says what only a run shows; it writes nothing."""
    found = S3.preflight(config_of(bucket.options | {"prefix": "cdc"}), CONTEXT, [])
    assert [(one.level, one.text) for one in found] == [
        ("ok", f"bucket {bucket.name} can be reached"),
        ("note", f"only a run shows whether objects may be put into s3://{bucket.name}/cdc"),
    ]
    assert bucket.paths() == []
    with pytest.raises(SinkRejected, match="it does not exist"):
        S3.preflight(config_of(bucket.options | {"bucket": "nowhere"}), CONTEXT, [])


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has a problem then, which names the package; local folders need none."""
    monkeypatch.setattr(
        "deltaforge_dagster.sinks.objects.sink_type.find_spec",
        lambda name: None if name == "gcsfs" else importlib.util.find_spec(name),
    )
    (problem,) = S3.problems(S3SinkConfig(id="files", bucket="gs://lake"), CONTEXT)
    assert (
        problem
        == "sink files: gs:// needs the package gcsfs, which is not installed: pip install gcsfs"
    )
    assert S3.problems(S3SinkConfig(id="files", bucket="lake"), CONTEXT) == []
    assert S3.problems(S3SinkConfig(id="files", bucket="/lake", local=True), CONTEXT) == []


def test_what_it_says_of_itself() -> None:
    """Exactly once without an option; where the objects are, and their form."""
    config = S3SinkConfig(id="files", bucket="lake", prefix="cdc", format="jsonl")
    assert S3.exactly_once(config)
    assert S3.metadata(config) == {"objects": "s3://lake/cdc", "format": "jsonl.gz"}
    assert S3.object_form(config) == ObjectForm("jsonl", "gzip", "day")
    target = S3.column_types()
    assert (target.unsigned, target.time, target.uuid) == (False, True, False)
