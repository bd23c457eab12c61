"""Putting objects: whole or not at all, and the first of a name stays."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SinkRejected,
    SinkUnavailable,
)
from deltaforge_dagster.installation.process import free_port
from deltaforge_dagster.sinks.objects import stores
from deltaforge_dagster.sinks.objects.sink_type import S3SinkConfig
from deltaforge_dagster.sinks.objects.stores import LocalStore, ObjectStore, RemoteStore, open_store
from tests.fix_objects import Bucket

PATH = "table=orders/a.parquet"


def config_of(options: Mapping[str, Any]) -> S3SinkConfig:
    """Return the options of a sink."""
    secret = ("access_key_id", "secret_access_key")
    made: dict[str, Any] = {
        name: SecretStr(value) if name in secret else value for name, value in options.items()
    }
    return S3SinkConfig(id="files", **made)


def of(**options: Any) -> ObjectStore:
    """Return the store of a sink with these options."""
    return open_store(config_of(options))


def put(store: ObjectStore, content: bytes = b"content", path: str = PATH) -> None:
    """Put an object."""
    with store.create(path) as made:
        made.write(content)
        made.complete()


def fail(store: ObjectStore, content: bytes = b"content") -> None:
    """Begin an object, and fail before it is complete."""

    def begin() -> None:
        with store.create(PATH) as made:
            made.write(content)
            raise LookupError

    with pytest.raises(LookupError):
        begin()


@pytest.fixture
def local(tmp_path: Path) -> ObjectStore:
    """A local folder, which does not exist yet."""
    return of(bucket=str(tmp_path / "lake"), local=True, prefix="cdc")


def test_a_local_object(local: ObjectStore, tmp_path: Path) -> None:
    """It is there once it is complete; an unfinished one leaves nothing."""
    assert isinstance(local, LocalStore)
    fail(local)
    assert not local.exists(PATH)
    with local.create(PATH) as made:
        made.write(b"con")
        made.write(b"tent")
        assert not local.exists(PATH)
        made.complete()
    assert local.exists(PATH)
    (file,) = (one for one in (tmp_path / "lake").rglob("*") if one.is_file())
    assert file == tmp_path / "lake/cdc" / PATH
    assert file.read_bytes() == b"content"


def test_the_first_local_object_of_a_name_stays(local: ObjectStore, tmp_path: Path) -> None:
    """A second one, of a run that has lost its lease, changes nothing; what a killed run has left is removed."""
    put(local)
    left = tmp_path / "lake/cdc/table=orders/.a.parquet.left"
    left.write_bytes(b"half")
    put(local, b"other")
    assert (tmp_path / "lake/cdc" / PATH).read_bytes() == b"content"
    assert not left.exists()


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    """The error says what to correct."""
    (tmp_path / "lake").touch()
    with pytest.raises(SinkRejected, match=r"correct the sink's bucket and prefix"):
        put(of(bucket=str(tmp_path / "lake"), local=True))


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """Let no file of this process become larger, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk(local: ObjectStore, tmp_path: Path) -> None:
    """The sink waits; nothing of the object is left."""
    with small_files(1 << 20), pytest.raises(SinkUnavailable, match="free space there"):
        put(local, b"x" * (2 << 20))
    assert not [one for one in (tmp_path / "lake").rglob("*") if one.is_file()]
    put(local)


@pytest.mark.s3
def test_an_object_in_a_bucket(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there once it is complete, in one part or in several; an unfinished one leaves nothing."""
    monkeypatch.setattr(stores, "_PART_BYTES", 5 << 20)
    store = of(**bucket.options, prefix="cdc")
    fail(store)
    large = bytes(range(256)) * (48 << 10)
    fail(store, large)
    assert not store.exists(PATH)
    assert bucket.paths() == []
    with store.create(PATH) as made:
        made.write(large)
        assert not store.exists(PATH)
        made.complete()
    put(store, path="b.parquet")
    assert store.exists(PATH)
    assert bucket.paths() == ["cdc/b.parquet", f"cdc/{PATH}"]
    assert (bucket.folder / "cdc" / PATH).read_bytes() == large
    assert (bucket.folder / "cdc/b.parquet").read_bytes() == b"content"


@pytest.mark.s3
@pytest.mark.parametrize(
    ("options", "expected", "said"),
    [
        ({"bucket": "nowhere"}, SinkRejected, "it does not exist; create it, or correct `bucket`"),
        ({"secret_access_key": "geheim"}, PermissionMissing, "correct access_key_id and secret_access_key"),
        ({"access_key_id": "nobody"}, PermissionMissing, "correct access_key_id and secret_access_key"),
    ],
)  # fmt: skip
def test_a_bucket_that_cannot_be_used(
    bucket: Bucket, options: dict[str, Any], expected: type[DeltaforgeError], said: str
) -> None:
    """The error names the bucket and the remedy, for a check as for a run, and no secret."""
    config = config_of(bucket.options | options)
    store = RemoteStore(config, seconds=5)

    def begin() -> None:
        if not store.exists(PATH):
            put(store)

    for use in (store.check, begin):
        with pytest.raises(expected, match=said) as caught:
            use()
        assert f"bucket {config.bucket} of {bucket.server.url}" in str(caught.value)
        assert "geheim" not in str(caught.value)


@pytest.mark.s3
def test_a_bucket_that_can_be_used(bucket: Bucket) -> None:
    """A check writes nothing."""
    store = of(**bucket.options)
    assert isinstance(store, RemoteStore)
    store.check()
    assert bucket.paths() == []


def test_a_server_that_is_down() -> None:
    """The sink waits for it."""
    keys = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
    store = of(bucket="b", endpoint=f"http://127.0.0.1:{free_port()}", **keys)
    for use in (lambda: store.exists(PATH), lambda: put(store)):
        with pytest.raises(SinkUnavailable, match="the storage cannot be reached, or failed"):
            use()


def test_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without keys in the file or the environment, the error says so."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    store = of(bucket="b", endpoint="http://127.0.0.1:9", region="us-east-1")
    with pytest.raises(AuthFailed, match="the credentials are missing"):
        store.exists(PATH)
