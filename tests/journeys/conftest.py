"""What the journeys share: deployments and databases of the end-to-end tests."""

from tests.e2e.conftest import deploy, shop

__all__ = ["deploy", "shop"]
