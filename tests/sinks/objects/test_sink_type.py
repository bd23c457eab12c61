"""What the product asks about a sink of object files, and its options."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.errors import SinkRejected, SpecError, TableRejected
from deltaforge_dagster.sinks.objects.sink_type import S3, S3SinkConfig
from deltaforge_dagster.sinks.registry import SinkContext
from deltaforge_dagster.sinks.tables.config import CommitWhen
from deltaforge_dagster.sinks.tables.staged import ObjectForm
from tests.fix_objects import Bucket
from tests.sinks.objects.test_stores import config_of

PIPELINE = """
metadata: {name: shop, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: db, dsn: "postgres://u@localhost/shop", slot: s, publication: p, tables: [a]}
  sinks:
    - type: s3
      config: {id: files, OPTIONS}
"""


def load(folder: Path, options: str) -> S3SinkConfig:
    """Return the options of a file."""
    path = folder / "shop.yaml"
    path.write_text(PIPELINE.replace("OPTIONS", options))
    config = load_pipeline(path).spec.spec.sinks[0].config
    assert isinstance(config, S3SinkConfig)
    return config


def test_defaults(tmp_path: Path) -> None:
    """Those of the original, which names every field."""
    config = load(tmp_path, "bucket: lake")
    assert (config.root, config.scheme, config.format) == ("s3://lake", "s3", "parquet")
    assert (config.codec, config.extension, config.period) == ("snappy", "parquet", "day")
    assert config.commit_when == CommitWhen(300.0, 1_000_000, 268_435_456, 600.0)


def test_every_field_of_the_original(tmp_path: Path) -> None:
    """They are accepted as they are."""
    config = load(
        tmp_path,
        "bucket: b, prefix: cdc/, region: eu-west-1, endpoint: 'https://minio:9000', access_key_id: a, "
        "secret_access_key: geheim, virtual_hosted_style: true, local: false, format: jsonl, compression: gzip, "
        "file_roll: {max_bytes: 9, max_events: 8, max_age_secs: 7, idle_age_secs: 6}, send_timeout_secs: 5, "
        "required: false, filter: {exclude_synthetic: true}",
    )
    assert config.root == "s3://b/cdc"
    assert config.commit_when == CommitWhen(7, 8, 9, 6)
    assert "geheim" not in repr(config) + config.model_dump_json()


@pytest.mark.parametrize(
    ("options", "root", "scheme"),
    [
        ("bucket: 's3://b/', prefix: /x/y/", "s3://b/x/y", "s3"),
        ("bucket: 'gs://b', prefix: x", "gs://b/x", "gs"),
        ("bucket: 'az://b', options: {connection_string: geheim}", "az://b", "az"),
        ("bucket: /var/lake, local: true, prefix: x", "/var/lake/x", None),
    ],
)
def test_places(tmp_path: Path, options: str, root: str, scheme: str | None) -> None:
    """Buckets of three clouds, and local folders."""
    config = load(tmp_path, options)
    assert (config.root, config.scheme) == (root, scheme)


@pytest.mark.parametrize(
    ("options", "extension"),
    [
        ("format: jsonl", "jsonl.gz"),
        ("format: jsonl, compression: zstd", "jsonl.zst"),
        ("format: jsonl, compression: none", "jsonl"),
        ("compression: zstd", "parquet"),
    ],
)
def test_extensions(tmp_path: Path, options: str, extension: str) -> None:
    """A name tells format and compression; JSON lines have no snappy."""
    assert load(tmp_path, f"bucket: b, {options}").extension == extension


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("bucket: 'ftp://b'", "bucket: has the scheme ftp, but buckets are of s3://, gs:// or az://"),
        ("bucket: 's3://b/x'", "bucket: has a path (write it as `prefix`)"),
        ("bucket: /var/lake", "bucket: has a `/`, so it is no bucket's name (a local folder needs `local: true`"),
        ("bucket: ./lake", "bucket: has a `/`"),
        ("bucket: b/x", "bucket: has a `/`"),
        ("bucket: b, prefix: 'a//b'", "prefix: is not a folder"),
        ("bucket: b, folder: '/x'", "folder: is not a folder"),
        ("bucket: b, folder: '${after.id}'", "folder: names ${after.id}, which is not known of an object's folder"),
        ("bucket: b, local: true", "bucket: must be the absolute path of a folder"),
        ("bucket: /b, local: true, region: x", "region: has no meaning with `local: true`"),
        ("bucket: b, access_key_id: a", "access_key_id and secret_access_key need each other"),
        ("bucket: b, endpoint: 'minio:9000'", "endpoint: is no URL"),
        ("bucket: b, endpoint: 'http://u:geheim@h'", "endpoint: holds a login"),
        ("bucket: 'gs://b', region: x", "region: is for S3 only"),
        ("bucket: b, options: {a: b}", "options: are those of gs:// and az://"),
        ("bucket: b, file_roll: {max_events: 0}", "file_roll.max_events: must be more than 0"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path: Path, options: str, said: str) -> None:
    """They are found when the file is loaded, and show no secret."""
    with pytest.raises(SpecError) as caught:
        load(tmp_path, options)
    assert said in str(caught.value)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("name", ["a/b", "", "..", "a\\b"])
def test_names_that_are_no_folder(name: str) -> None:
    """Their tables are held; others go on."""
    made: Any = S3SinkConfig(id="files", bucket="b")
    assert made.name_of("shop", None, "orders") == ("shop", "orders")
    with pytest.raises(TableRejected, match="cannot be the name of a folder"):
        made.name_of("shop", "public", name)


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
