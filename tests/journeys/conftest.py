"""What the journeys share: deployments and databases of the end-to-end tests, and one running installation."""

from tests.e2e.conftest import deploy, shop
from tests.journeys.installation import installation

__all__ = ["deploy", "installation", "shop"]
