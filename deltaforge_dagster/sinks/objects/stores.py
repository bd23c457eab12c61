"""Object storage and local folders: an object exists whole or not at all, and is never replaced.

Objects are put on the condition that no object has their name (`If-None-Match: *` in S3). A store
that does not know the condition ignores or refuses it; if it refuses, objects are put without it. A
local object gets its name by a hard link once its content is durable.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import fsspec

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SettingsError,
    SinkRejected,
    SinkUnavailable,
)
from deltaforge_dagster.folders import make_folder, sync_folder
from deltaforge_dagster.sinks.objects.sink_type import S3SinkConfig

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_IMPOSSIBLE = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}

_WRONG_KEY = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
}
_NO_LOGIN = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}
"""Names of the clients' exceptions for missing credentials."""
_TAKEN = {"PreconditionFailed", "412"}
"""Codes for an object that exists already."""
_PART_BYTES = 16 << 20
"""Bytes of a part of a large object.

They are in memory until they are sent; S3 allows 10,000 parts.
"""


class NewObject(Protocol):
    """An object that is being written: nobody sees it before `complete`."""

    def write(self, data: bytes) -> None:
        """Add bytes."""
        ...

    def complete(self) -> None:
        """Make the object visible and durable, unless an object of its name exists."""
        ...


class ObjectStore(Protocol):
    """The storage of a sink's objects. Methods raise subclasses of `DeltaforgeError`."""

    def exists(self, path: str) -> bool:
        """Return whether an object exists."""
        ...

    def create(self, path: str) -> contextlib.AbstractContextManager[NewObject]:
        """Return a new object, which is discarded on exit unless it is complete."""
        ...


def open_store(config: S3SinkConfig) -> ObjectStore:
    """Return the store of a sink, not connected yet."""
    if config.local:
        return LocalStore(config)
    return RemoteStore(config, seconds=config.send_timeout_secs)


class LocalStore:
    """A local folder.

    Args:
        config: The sink.
    """

    def __init__(self, config: S3SinkConfig) -> None:
        self._sink_id = config.id
        self._root = Path(config.root)

    def exists(self, path: str) -> bool:
        """Return whether there is a file."""
        with self._translated(path):
            return (self._root / path).exists()

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[NewObject]:
        """Return a new file, which is discarded on exit unless it is complete."""
        target = self._root / path
        with self._translated(path):
            make_folder(target.parent)
            for leftover in target.parent.glob(f".{target.name}.*"):  # by a run that was killed
                leftover.unlink(missing_ok=True)
            part = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
            try:
                with part.open("xb") as file:
                    yield _LocalObject(file, part, target)
            finally:
                part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._error(
                f"cannot write {self._root / path}: {error.strerror}", error
            ) from error

    def _error(self, what: str, error: OSError) -> DeltaforgeError:
        message = f"sink {self._sink_id}: {what}"
        if error.errno in _FULL:
            return SinkUnavailable(f"{message}; free space there, and the sink goes on")
        if error.errno in _REFUSED:
            return PermissionMissing(f"{message}; let user {os.geteuid()} write there")
        if error.errno in _IMPOSSIBLE:
            return SinkRejected(f"{message}; correct the sink's bucket and prefix")
        return SinkUnavailable(message)


class _LocalObject:
    def __init__(self, file: IO[bytes], part: Path, target: Path) -> None:
        self._file = file
        self._part = part
        self._target = target

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def complete(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(self._part, self._target)
        sync_folder(self._target.parent)


class RemoteStore:
    """A bucket.

    Args:
        config: The sink.
        seconds: How long a server of S3 may take to answer.
    """

    def __init__(self, config: S3SinkConfig, *, seconds: float) -> None:
        self._sink_id = config.id
        self._bucket = config.bucket
        self._root = config.root.partition("://")[2]
        self._scheme = str(config.scheme)
        self._options = _options(config, seconds)
        self._where = config.endpoint or f"the server of {self._scheme}://"
        self._connected: fsspec.AbstractFileSystem | None = None
        self._conditional = True

    def check(self) -> None:
        """Check that the bucket exists and can be reached."""
        with self._translated(""):
            self._client().info(self._root.partition("/")[0])

    def exists(self, path: str) -> bool:
        """Return whether there is an object."""
        with self._translated(path):
            try:
                self._client().info(f"{self._root}/{path}")
            except FileNotFoundError:
                return False
            return True

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[NewObject]:
        """Return a new object, which is discarded on exit unless it is complete."""
        mode = "xb" if self._conditional else "wb"
        with self._translated(path):
            file = self._client().open(f"{self._root}/{path}", mode, block_size=_PART_BYTES)
        remote = _RemoteObject(self, file, path)
        try:
            yield remote
        finally:
            remote.discard()

    def _client(self) -> fsspec.AbstractFileSystem:
        if self._connected is None:
            # Not shared with the journal, whose file system may have the same options but another
            # thread's errors.
            self._connected = fsspec.filesystem(
                self._scheme, **self._options, skip_instance_cache=True, use_listings_cache=False
            )
        return self._connected

    @contextlib.contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except DeltaforgeError:
            raise
        except Exception as error:  # noqa: BLE001 - clients of storage may raise anything
            if _code(error) in {"NotImplemented", "501"} and self._conditional:
                self._conditional = False  # the next attempt puts without a condition
            # Not chained: the client's text may hold a signed request.
            raise self._error(path, error) from None

    def _error(self, path: str, error: Exception) -> DeltaforgeError:
        name, code = type(error).__name__, _code(error)
        if isinstance(error, ImportError):
            return SettingsError(f"sink {self._sink_id}: {error}")
        label = f"sink {self._sink_id}: bucket {self._bucket} of {self._where}"
        shown = f" ({code or name})"
        if code in _WRONG_KEY or name in _NO_LOGIN:
            return AuthFailed(
                f"{label}: the credentials are missing, wrong or expired{shown}; correct "
                "access_key_id and secret_access_key, or the environment from which they come"
            )
        if isinstance(error, PermissionError) or code in {"401", "403"}:
            return PermissionMissing(
                f"{label}: access was denied{shown}; correct access_key_id and secret_access_key "
                "(or `options`), or grant PutObject, GetObject, ListBucket, AbortMultipartUpload "
                "and ListBucketMultipartUploads"
            )
        if isinstance(error, FileNotFoundError) or code == "404":
            return SinkRejected(f"{label}: it does not exist; create it, or correct `bucket`")
        doing = f", object {path}" if path else ""
        return SinkUnavailable(f"{label}{doing}: the storage cannot be reached, or failed{shown}")


class _RemoteObject:
    def __init__(self, store: RemoteStore, file: Any, path: str) -> None:
        self._store = store
        self._file = file
        self._path = path
        self._done = False

    def write(self, data: bytes) -> None:
        with self._store._translated(self._path):  # noqa: SLF001 - one module
            self._file.write(data)

    def complete(self) -> None:
        with self._store._translated(self._path):  # noqa: SLF001
            try:
                self._file.close()
            except FileExistsError:
                self._abort()
            except OSError as error:
                if _code(error) not in _TAKEN:
                    raise
                self._abort()
        self._done = True

    def discard(self) -> None:
        if not self._done:
            self._done = True
            self._abort()

    def _abort(self) -> None:
        """Discard the parts that were sent.

        Parts that remain are invisible until a lifecycle rule of the bucket removes them.
        """
        with contextlib.suppress(Exception):
            self._file.discard()
        self._file.closed = True


def _options(config: S3SinkConfig, seconds: float) -> Mapping[str, Any]:
    """Return the options of fsspec's file system."""
    if config.scheme != "s3":
        return {name: value.get_secret_value() for name, value in config.options.items()}
    client = {"endpoint_url": config.endpoint, "region_name": config.region}
    settings: dict[str, Any] = {
        "read_timeout": seconds,
        "connect_timeout": min(10.0, seconds),
        "retries": {"total_max_attempts": 1},  # s3fs repeats requests itself
        "s3": {"addressing_style": "virtual" if config.virtual_hosted_style else "path"},
    }
    if config.endpoint is not None:  # other servers do not know the newer checksums
        settings["request_checksum_calculation"] = "when_required"
        settings["response_checksum_validation"] = "when_required"
    options: dict[str, Any] = {
        "client_kwargs": {name: value for name, value in client.items() if value is not None},
        "config_kwargs": settings,
    }
    if config.access_key_id is not None and config.secret_access_key is not None:
        options["key"] = config.access_key_id.get_secret_value()
        options["secret"] = config.secret_access_key.get_secret_value()
    return options


def _code(error: BaseException) -> str | None:
    """Return the error code of S3, or another storage's status, from an exception or its cause."""
    for exception in (error, error.__cause__, error.__context__):
        response = getattr(exception, "response", None)
        if isinstance(response, dict) and "Code" in response.get("Error", {}):
            return str(response["Error"]["Code"])
        for name in ("status_code", "code"):  # Azure's clients, gcsfs
            if isinstance(getattr(exception, name, None), int):
                return str(getattr(exception, name))
    return None
