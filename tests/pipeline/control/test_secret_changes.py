"""Tests that another secret in a file is noticed, although the file's hash is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.errors import AuthFailed, SinkUnavailable
from deltaforge_dagster.pipeline.control.secret_changes import with_restart_hint
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.pipeline.health.health import health
from deltaforge_dagster.pipeline.health.recorded import capture_failed
from deltaforge_dagster.state.store import StateStore

FILE = """\
metadata: {name: orders, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: db, dsn: "postgres://app:$SHOP_PASSWORD@db/shop", slot: s, publication: p, tables: [orders]}
  sinks:
    - type: redis
      config: {id: cache, uri: "redis://:erstes@cache:6379", stream: s}
    - type: http
      config: {id: hook, url: "http://hook", headers: {Authorization: "${HOOK_TOKEN}"}}
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    """The state store of the installation."""
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SHOP_PASSWORD", "geheim")
    monkeypatch.setenv("HOOK_TOKEN", "token-1")
    opened = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    yield opened
    opened.close()


def loaded(folder: Path, text: str = FILE) -> LoadedPipeline:
    """Write the pipeline file, and return the pipeline."""
    path = folder / "orders.yaml"
    path.write_text(text)
    return load_pipeline(path)


def planned(path: Path) -> dict[str, object]:
    """Return the changes that `plan` shows, by path."""
    found = CliRunner().invoke(app, ["plan", str(path), "--json"], catch_exceptions=False)
    assert "geheim" not in found.output
    return {one["path"]: one["consequence"] for one in json.loads(found.stdout)["changes"]}


def test_another_secret(store: StateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` names it; the next tick lets every sink try at once, and only then; the file's hash stays."""
    before = loaded(tmp_path)
    register(store, before)
    assert planned(tmp_path / "orders.yaml") == {}
    lease = store.leases.acquire("orders", "run", 900.0)
    assert lease is not None
    later = store.now() + 500
    with store.fenced(lease) as writer:
        writer.checkpoints.failed("cache", "refused", later)
    store.pipelines.set_probe("orders", later, 60.0)

    def waits_until() -> tuple[float, float]:
        row = store.pipelines.get("orders")
        assert row is not None
        return store.checkpoints.read("orders")["cache"].next_attempt_at, row.probe_after

    register(store, before)
    assert waits_until() == (later, later)
    monkeypatch.setenv("HOOK_TOKEN", "token-2")
    after = loaded(tmp_path, FILE.replace("erstes", "zweites"))
    assert after.hash == before.hash
    next_run = "applies from the next run; an active run notices the changed file and ends"
    assert planned(tmp_path / "orders.yaml") == {
        "spec.sinks[cache].config.uri": f"the password of sink cache changed; {next_run}",
        "spec.sinks[hook].config.headers.Authorization": (
            f"the secret Authorization of sink hook changed; {next_run}"
        ),
    }
    register(store, after)
    assert waits_until() == (0.0, 0.0)
    assert planned(tmp_path / "orders.yaml") == {}
    kept = b"".join(path.read_bytes() for path in (tmp_path / "home").glob("state.db*"))
    assert not [secret for secret in (b"geheim", b"zweites", b"token-2") if secret in kept]
    key = tmp_path / "home" / "secrets.key"
    assert (key.stat().st_mode & 0o777, len(key.read_bytes())) == (0o600, 32)


def test_homes_of_their_own(
    store: StateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine's digests, made with another key, are no change."""
    register(store, loaded(tmp_path))
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "other"))
    second = loaded(tmp_path, FILE.replace("erstes", "zweites"))
    assert planned(tmp_path / "orders.yaml") == {}
    register(store, second)
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    assert len(planned(tmp_path / "orders.yaml")) == 1


def test_a_secret_from_the_environment(store: StateStore, tmp_path: Path) -> None:
    """Refused credentials name the variables of just that block, and who must be restarted; other errors do not."""
    file = loaded(tmp_path)
    register(store, file)
    capture_failed(store, "orders", "run", AuthFailed("wrong password"), None)
    assert health(store, file).error == (
        "wrong password. The file takes SHOP_PASSWORD from the environment: after a correction there, restart the "
        "process that has it (`deltaforge dev`, Dagster's code server)"
    )
    refused = AuthFailed("refused")
    assert "takes HOOK_TOKEN from" in with_restart_hint(store, "orders", refused, "hook")
    assert with_restart_hint(store, "orders", refused, "cache") == "refused"
    assert with_restart_hint(store, "orders", SinkUnavailable("down"), "hook") == "down"
