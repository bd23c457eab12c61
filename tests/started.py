"""How fixtures start servers of every kind: say why one cannot, and close what a test started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import pytest

from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_lab.servers.base import Server

S = TypeVar("S", bound=Server)


def or_fail(start: Callable[[], S]) -> S:
    """Return the server; where it cannot be had, fail with the reason alone, without a stack."""
    try:
        return start()
    except DeltaforgeError as error:
        pytest.fail(str(error), pytrace=False)


@contextmanager
def each_closed(start: Callable[..., S]) -> Iterator[Callable[..., S]]:
    """Lend `start`, taking settings and options, and close every server that it has started."""
    with ExitStack() as stack:

        def lent(settings: Mapping[str, str] | None = None, **options: Any) -> S:
            server = or_fail(lambda: start(settings=settings, **options))
            stack.callback(server.close)
            return server

        yield lent
