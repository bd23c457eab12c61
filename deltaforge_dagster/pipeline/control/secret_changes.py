"""Detect that a secret of a pipeline file has changed; the file's hash does not cover secrets.

The state store keeps a digest of each secret, keyed with a random key of the installation's home
(mode 0600). The digests serve nothing but this comparison: a hash of the file that knew secrets
would make Dagster show ranges as stale. Each home has digests of its own, so machines with
different homes do not take each other's for changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from deltaforge_dagster.config.file.document import variables_of
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import AuthFailed, DeltaforgeError
from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_dagster.state.store import StateStore

_KEY_BYTES = 32  # the size of SHA-256 digests, the least that RFC 2104 advises for HMAC
_PASSWORDS = {"dsn", "uri", "url", "password"}
"""Fields whose secret part is a password."""


def changed_secrets(store: StateStore, loaded: LoadedPipeline) -> list[str]:
    """Return the paths of secrets that have changed since the pipeline was last registered."""
    key = _key(make=False)
    return [] if key is None else _changed(store, loaded, key)


def described(path: str) -> str:
    """Return what a secret's path means: `the password of sink redis`."""
    where, _, field = path.rpartition(".")
    what = "password" if field in _PASSWORDS else f"secret {field}"
    if where.startswith("spec.source"):
        return f"the {what} of the source"
    if match := re.match(r"spec\.sinks\[(.*?)\]", where):
        return f"the {what} of sink {match[1]}"
    return f"the secret {path}"


def note_secrets(store: StateStore, loaded: LoadedPipeline) -> list[str]:
    """Store the digests of the secrets of a file that is about to be used.

    Returns the paths of secrets that have changed.
    """
    key = _key(make=True)
    if key is None:
        return []
    changed = _changed(store, loaded, key)
    digests, kept = _digests(loaded, key), Kv(store.database, _namespace(loaded.name))
    text = json.dumps(digests, sort_keys=True).encode()
    if kept.get(_name_of(key)) != text:
        kept.put(_name_of(key), text)
    return changed


def with_restart_hint(
    store: StateStore, pipeline: str, error: DeltaforgeError, sink: str | None = None
) -> str:
    """Return an error's text; if credentials from the environment are refused, add what to restart.

    Args:
        store: Has the path of the pipeline's file.
        pipeline: The pipeline.
        error: The error.
        sink: The sink that the error is about; None for the source.
    """
    if not isinstance(error, AuthFailed):
        return error.text
    row = store.pipelines.get(pipeline)
    names = variables_of(Path(row.file), sink) if row is not None and row.file else []
    if not names:
        return error.text
    return (
        f"{error.text}. The file takes {', '.join(names)} from the environment: after a correction "
        "there, restart the process that has it (`deltaforge dev`, Dagster's code server)"
    )


def _changed(store: StateStore, loaded: LoadedPipeline, key: bytes) -> list[str]:
    text = Kv(store.database, _namespace(loaded.name)).get(_name_of(key))
    if text is None:
        return []
    before: Mapping[str, str] = json.loads(text)
    # A secret without an earlier digest is new, not changed.
    return sorted(
        path for path, digest in _digests(loaded, key).items() if before.get(path, digest) != digest
    )


def _digests(loaded: LoadedPipeline, key: bytes) -> dict[str, str]:
    return {
        path: hmac.new(key, value.encode(), hashlib.sha256).hexdigest()
        for path, value in loaded.spec.secrets().items()
    }


def _name_of(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()[:16]


def _key(*, make: bool) -> bytes | None:
    """Return the key of the installation's home, created with `make`; None without a valid key."""
    path = Settings.from_env().home / "secrets.key"
    with contextlib.suppress(OSError):
        if make and not path.exists():
            _make(path)
        key = path.read_bytes()
        return key if len(key) == _KEY_BYTES else None
    return None


def _make(path: Path) -> None:
    """Create the key file under another name, then link it.

    So one of several processes wins, and none reads half a key, also after a crash.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(_KEY_BYTES))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    with contextlib.suppress(FileExistsError):
        os.link(new, path)
    new.unlink()


def _namespace(pipeline: str) -> str:
    return f"secrets/{pipeline}"
