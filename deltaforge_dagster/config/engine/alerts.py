"""`spec.engine.alerts`: who is notified when a check or a run of the pipeline fails."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import SecretStr, field_serializer, field_validator

from deltaforge_dagster.config.blocks import Block, resolved


class AlertHook(Block):
    """A receiver that is notified once when a problem begins and once when it is resolved."""

    type: Literal["webhook", "slack"]
    """`webhook`: POST a JSON object; `slack`: post a message through a Slack incoming webhook."""
    url: SecretStr
    """The URL to post to.

    Usually given through an environment variable, because anyone who knows it can post there.
    """

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr) -> SecretStr:
        parts = urlsplit(resolved(url.get_secret_value()))
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError("must be http://... or https://...")
        return url

    @field_serializer("url")
    def _mask_url(self, _url: SecretStr) -> str:
        return "***"
