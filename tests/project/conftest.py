"""Dagster projects of the tests, with a `defs` folder, loaded in the test's process."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster.components.testing import DefsFolderSandbox, create_defs_folder_sandbox

from deltaforge_dagster.assets import translator

QUIET = [
    pytest.mark.filterwarnings("ignore::dagster.BetaWarning"),
    pytest.mark.filterwarnings("ignore::dagster.PreviewWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of pydantic, in Dagster
]
"""Marks of tests that load components: Dagster warns that its own parts are new."""

ORDERS = """
type: deltaforge_dagster.PipelineComponent
attributes:
  metadata: {name: orders, tenant: acme}
  spec:
    source:
      type: postgres
      config:
        id: shop
        dsn: "{{ env.SHOP_DSN }}"
        slot: orders
        publication: orders
        tables: [public.orders]
    sinks:
      - {type: file, config: {id: lines, path: /tmp/orders.jsonl}}
"""


@dataclass(frozen=True)
class Project:
    """A project's `defs` folder.

    Attributes:
        sandbox: Dagster's own, for tests of components.
    """

    sandbox: DefsFolderSandbox

    @property
    def defs(self) -> Path:
        """The folder."""
        return self.sandbox.defs_folder_path

    def write(self, path: str, text: str) -> Path:
        """Write a file below `defs`."""
        file = self.defs / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text).lstrip())
        return file

    def load(self) -> dg.Definitions:
        """Load everything, and let Dagster check that it fits together."""
        with self.sandbox.build_all_defs() as definitions:
            dg.Definitions.validate_loadable(definitions)
            return definitions


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """An empty project whose variables are set, outside of any installation of ours."""
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SHOP_DSN", "postgres://u:5432@localhost:1/shop")
    with create_defs_folder_sandbox() as sandbox:
        yield Project(sandbox)


def keys(definitions: dg.Definitions) -> set[str]:
    """Return the asset keys as the UI writes them."""
    return {key.to_user_string() for key in definitions.resolve_all_asset_keys()}


def specs(definitions: dg.Definitions) -> dict[str, Any]:
    """Return the specs of assets by their key."""
    return {spec.key.to_user_string(): spec for spec in definitions.resolve_all_asset_specs()}


@pytest.fixture(autouse=True)
def own_translations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the keys of assets afterwards: other tests have pipelines of the same names."""
    monkeypatch.setattr(translator, "_translations", {})
