"""Parses Redis URIs, and makes connections to the servers that they name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

from deltaforge_dagster.errors import SettingsError, SpecError
from deltaforge_dagster.folders import unreadable_file

_MANY = re.compile(
    r"^redis(?P<tls>s?)\+(?P<kind>sentinel|cluster)://(?:(?P<user>[^@/]*)@)?(?P<hosts>[^/?#@]+)"
    r"(?:/(?P<path>[^?#]*))?(?P<query>\?.*)?$"
)
_SERVICE = re.compile(r"([^/]+)(?:/(\d+))?")
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_PORTS = {"sentinel": 26379, "cluster": 6379}

Address = tuple[str, int]
"""Host and port."""


class Endpoint:
    """Makes connections to the server that a URI names.

    The URI has a form that redis-py's `from_url` accepts (`redis://`, `rediss://` with TLS,
    `unix://`, and their options), or names several hosts, `host[:port][,host[:port]...]`:

    - `redis+sentinel://[user:password@]hosts/service[/database]`: Sentinels, which are asked for
      the master of `service` for each connection; user and password are those of the master;
    - `redis+cluster://[user:password@]hosts`: nodes of a Redis Cluster, some of which may be down.
      A single node can also be given as `redis://`.

    `rediss+` instead of `redis+` means TLS to the servers.

    Raises:
        SpecError: The URI is none of these.
    """

    def __init__(self, sink_id: str, uri: str, connect_timeout: float, send_timeout: float) -> None:
        limits = {
            "socket_connect_timeout": connect_timeout,
            "socket_timeout": send_timeout,
            "retry": Retry(NoBackoff(), 0),
        }
        self._sink_id = sink_id
        self._next: Callable[[], Address] | None = None
        try:
            if match := _MANY.match(uri):
                uri = self._single_server_uri(match, limits)
            options = parse_url(uri)
            self._class = options.pop("connection_class", redis.Connection)
            # `resp` implements RESP2.
            self._options = {**options, **limits, "protocol": 2}
            self._class(**self._options)
        except (ValueError, TypeError, redis.RedisError):
            # Not chained: the original message can repeat a password that contains "/" or "@".
            raise SpecError(
                f"sink {sink_id}: uri is not a Redis URI: expected redis://, rediss://, unix://, "
                "redis+sentinel:// or redis+cluster://, known options, and user and password "
                "percent-encoded"
            ) from None

    def _single_server_uri(self, match: re.Match[str], limits: dict[str, object]) -> str:
        """Store how to choose among a URI's hosts; return an equivalent URI of a single server."""
        kind, path, user = match["kind"], match["path"] or "", match["user"]
        addresses = [_address(host, _PORTS[kind]) for host in match["hosts"].split(",")]
        database = ""
        if kind == "sentinel":
            if (parts := _SERVICE.fullmatch(path)) is None:
                raise ValueError
            service, database = unquote(parts[1]), parts[2] or ""
            sentinel = Sentinel(addresses, sentinel_kwargs=limits)
            self._next = lambda: sentinel.discover_master(service)
        elif path not in {"", "0"}:
            raise ValueError
        else:
            self._next = itertools.cycle(addresses).__next__
        login = f"{user}@" if user else ""
        return f"redis{match['tls']}://{login}{kind}/{database}{match['query'] or ''}"

    def connection(self, address: Address | None = None) -> redis.Connection:
        """Return a connection that is not connected yet.

        Args:
            address: Another server of the same cluster; None for the server that the URI names
                (each time the next one if it names several nodes).

        Raises:
            redis.ConnectionError: No Sentinel answers, or none knows a master.
            SettingsError: A file that the URI names cannot be read.
        """
        options = self._options
        unreadable = unreadable_file({name: options.get(name) for name in _FILES})
        if unreadable is not None:
            raise SettingsError(f"sink {self._sink_id}: {unreadable}")
        if address is None and self._next is not None:
            address = self._next()
        if address is not None:
            options = {**options, "host": address[0], "port": address[1]}
        connection: redis.Connection = self._class(**options)
        return connection


def _address(text: str, port: int) -> Address:
    parts = urlsplit(f"//{text}")
    if parts.hostname is None:
        raise ValueError
    return parts.hostname, parts.port or port
