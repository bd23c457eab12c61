"""`spec.engine.alerts`: who is told when a check or a run of the pipeline fails."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import SecretStr, field_serializer, field_validator

from deltaforge_dagster.config.blocks import Block, resolved


class AlertHook(Block):
    """Somebody who is told, once when a problem begins and once when it is over."""

    type: Literal["webhook", "slack"]
    """`webhook`: a POST of a JSON object; `slack`: a message of an incoming webhook."""
    url: SecretStr
    """Where to. Usually a variable of the environment: whoever knows it can post there."""

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
