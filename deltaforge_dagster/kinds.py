"""Find the kinds of sources and sinks: built-in ones, and entry points of installed packages."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field, create_model

_LOG = logging.getLogger(__name__)

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class Kinds(Generic[_Kind]):
    """The kinds of one group.

    Attributes:
        types: The usable kinds by name: the built-in ones, then those of installed packages.
        blocks: Models of their blocks in a pipeline file, in the same order.
        broken: The kinds that cannot be used, by name, with a reason that names the package.
    """

    types: Mapping[str, _Kind]
    blocks: tuple[type[BaseModel], ...]
    broken: Mapping[str, str]


def find_kinds(
    group: str,
    built_in: Mapping[str, str],
    base: type[Any],
    block: type[BaseModel],
    check: Callable[[_Kind], None],
) -> Kinds[_Kind]:
    """Load and return all kinds of a group.

    Args:
        group: The group of the entry points.
        built_in: The built-in kinds, `module:object` by name. A package cannot replace them.
        base: The class of which a kind must be an instance; it has `name`, `summary` and the model
            `config`.
        block: The base class for the models of blocks with `type` and `config`.
        check: Raises an exception if a kind cannot be used.
    """
    types: dict[str, _Kind] = {}
    blocks: list[type[BaseModel]] = []
    broken: dict[str, str] = {}

    def add(entry_point: EntryPoint) -> None:
        kind: Any = entry_point.load()
        if not isinstance(kind, base):
            raise TypeError(f"{entry_point.value} is no {base.__name__}")
        if kind.name != entry_point.name:
            raise ValueError(
                f"{entry_point.value} is named {kind.name!r}, "
                f"and its entry point {entry_point.name!r}"
            )
        loaded: Any = kind
        check(loaded)
        blocks.append(_block(kind, block))
        types[entry_point.name] = loaded

    for name, value in built_in.items():
        add(EntryPoint(name, value, group))
    entries: dict[str, list[EntryPoint]] = defaultdict(list)
    for entry_point in sorted(entry_points(group=group), key=lambda point: point.name):
        entries[entry_point.name].append(entry_point)
    for name, providers in entries.items():
        packages = " and ".join(sorted(map(_package, providers)))
        if name in built_in:
            noun = group.rpartition(".")[2].removesuffix("s")
            text = "%s: %s type %s is not used, because one of ours has that name"
            _LOG.warning(text, packages, noun, name)
        elif len(providers) > 1:
            broken[name] = f"{packages} both provide it (uninstall one)"
        else:
            try:
                add(providers[0])
            except Exception as error:  # noqa: BLE001 - the package may raise anything
                broken[name] = f"{packages} cannot be loaded: {type(error).__name__}: {error}"
    return Kinds(types, tuple(blocks), broken)


def _block(kind: Any, base: type[BaseModel]) -> type[BaseModel]:
    """Return the model of a kind's blocks in a pipeline file.

    For a `KafkaSinkConfig` it is named `KafkaSink`.
    """
    form: Any = Literal[kind.name]
    config: Any = Field(description=kind.config.__doc__)
    return create_model(
        kind.config.__name__.removesuffix("Config"),
        __base__=base,
        __doc__=kind.summary,
        type=(form, ...),
        config=(kind.config, config),
    )


def _package(entry_point: EntryPoint) -> str:
    return (
        f"package {entry_point.dist.name} {entry_point.dist.version}"
        if entry_point.dist
        else "a package"
    )
