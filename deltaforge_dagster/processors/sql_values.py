"""Write computed values into row images as JSON, and leave every other byte unchanged.

A field is set or removed (`with_field`, `without_field`). Images are not parsed and serialized
again, because that could change the spelling of numbers and escapes. Instead the field is located
in the text, and the text around it is copied. Python's scanner handles the rare objects in which a
name has an escape or is duplicated: all fields with the name are set, or removed.

Values become JSON text in the same formats as captured values (`json_texts`, docs/types.md).

=====================  =================================================================
null                   `null`
boolean, integer       boolean, number
float                  number, the shortest that parses to the same value; `"NaN"`, `"Infinity"`
decimal                string with the type's scale: `"99.90"`
text                   string
date                   `"2026-03-01"`
timestamp              `"2026-03-01T12:00:00.000000Z"`; no `Z` if the type has no time zone
binary                 `{"_base64":"..."}`
list, struct, map      array, object, object
=====================  =================================================================
"""

# ruff: noqa: C901, PLR0912, PLR0917, PLR1714, SIM109 - kernels are flat loops over bytes, see
# `kernels.runtime`

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import ProcessorFailed, UnsupportedEvent
from deltaforge_dagster.kernels.json_fields import blank, members, string_end, value_end
from deltaforge_dagster.kernels.message_text import MAX_BYTES, layout
from deltaforge_dagster.kernels.runtime import (
    BACKSLASH,
    COLON,
    COMMA,
    OPEN_BRACE,
    QUOTE,
    Bytes,
    copy,
    kernel,
)
from deltaforge_dagster.processors.exact_json import dumps

_NULL = pa.scalar("null", pa.string())


def json_texts(column: pa.Array[Any]) -> pa.StringArray:
    """Return the JSON text of each value.

    Raises:
        ProcessorFailed: There is no JSON form for values of this type.
    """
    return cast("pa.StringArray", _texts(column).fill_null(_NULL))


def _texts(column: Any) -> Any:  # noqa: PLR0911 - one line per type
    kind, types = column.type, pa.types
    if types.is_null(kind):
        return pa.nulls(len(column), pa.string())
    if types.is_boolean(kind) or types.is_integer(kind):
        return column.cast(pa.string())
    if types.is_floating(kind):
        finite = pc.is_finite(column)
        negative = pc.less(column, pa.scalar(0, kind))
        named = pc.if_else(pc.is_nan(column), "NaN", pc.if_else(negative, *_INFINITE))
        return pc.if_else(finite, column.cast(pa.string()), _quoted(named))
    if types.is_decimal(kind):
        return _from_values(column, lambda number: f'"{number:f}"')
    if types.is_string(kind) or types.is_large_string(kind):
        return _from_values(column, dumps)
    if types.is_date(kind):
        return _quoted(column.cast(pa.string()))
    if types.is_timestamp(kind):
        zone = "" if kind.tz is None else "Z"
        plain = column.cast(pa.timestamp("us", "UTC" if zone else None))
        return _quoted(pc.strftime(plain, f"%Y-%m-%dT%H:%M:%S{zone}"))
    if types.is_binary(kind):
        return _from_values(column, lambda data: f'{{"_base64":"{b64encode(data).decode()}"}}')
    if types.is_list(kind):
        return _lists(cast("pa.ListArray[Any]", column))
    if types.is_struct(kind):
        return _structs(cast("pa.StructArray", column))
    if types.is_map(kind):
        return _maps(cast("pa.MapArray[Any, Any]", column))
    raise ProcessorFailed(f"values of type {kind} have no JSON form (cast them)")


_INFINITE = ("-Infinity", "Infinity")


def _quoted(texts: Any) -> Any:
    """Quote texts that need no escapes."""
    return pc.binary_join_element_wise('"', texts, '"', "")


def _from_values(column: pa.Array[Any], text: Any) -> pa.Array[Any]:
    texts = [None if value is None else text(value) for value in column.to_pylist()]
    return pa.array(texts, pa.string())


def _joined(counts: Iterable[int | None], items: Iterator[str], brackets: str) -> pa.Array[Any]:
    """Join the next `count` items into one text for each count; null for a null count."""
    texts = [
        None if count is None else f"{brackets[0]}{','.join(islice(items, count))}{brackets[1]}"
        for count in counts
    ]
    return pa.array(texts, pa.string())


def _lists(column: pa.ListArray[Any]) -> pa.Array[Any]:
    items = cast("list[str]", json_texts(column.flatten()).to_pylist())
    return _joined(column.value_lengths().to_pylist(), iter(items), "[]")


def _structs(column: pa.StructArray) -> Any:
    names = [f"{dumps(member.name)}:" for member in column.type]
    children = [json_texts(member).to_pylist() for member in column.flatten()]
    texts = [
        "{" + ",".join(map("".join, zip(names, values, strict=True))) + "}"
        for values in (zip(*children, strict=True) if names else [()] * len(column))
    ]
    return pc.if_else(column.is_valid(), pa.array(texts, pa.string()), pa.scalar(None, pa.string()))


def _maps(column: pa.MapArray[Any, Any]) -> pa.Array[Any]:
    entries: Any = column.cast(
        pa.list_(pa.struct([("key", column.type.key_type), ("value", column.type.item_type)]))
    )
    pairs = entries.flatten()
    names = pairs.field("key").cast(pa.string()).to_pylist()
    values = json_texts(pairs.field("value")).to_pylist()
    items = [f"{dumps(name)}:{value}" for name, value in zip(names, values, strict=True)]
    return _joined(entries.value_lengths().to_pylist(), iter(items), "{}")


_Ints: TypeAlias = npt.NDArray[np.int32]

_Item = TypeVar("_Item", bound=np.generic)

_NO_OBJECT, _EMPTY, _ABSENT, _FOUND, _UNUSUAL = range(5)


def with_field(images: pa.StringArray, name: str, values: pa.StringArray) -> pa.StringArray:
    """Return images in which a field has new values; a missing one is added at the end.

    Args:
        images: JSON objects as text; null and other values stay unchanged.
        name: The field's name.
        values: The JSON text of the new value for each image.
    """
    return _spliced(images, name, values)


def without_field(images: pa.StringArray, name: str) -> pa.StringArray:
    """Return images without a field; see `with_field`."""
    return _spliced(images, name, None)


def warm() -> None:
    """Compile the kernels, or load them from the cache."""
    images = pa.array(['{"a":1}'])
    with_field(images, "a", pa.array(["2"]))
    without_field(images, "a")


def _spliced(images: pa.StringArray, name: str, values: pa.StringArray | None) -> pa.StringArray:
    ends, source = layout(images)
    rows = len(images)
    text = np.frombuffer(dumps(name).encode(), np.uint8)
    starts, stops = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    kinds = np.zeros(rows, np.uint8)
    valid = images.is_valid().to_numpy(zero_copy_only=False)
    whole = values is None
    _find(_fixed(source), _fixed(ends), _fixed(valid), _fixed(text), whole, starts, stops, kinds)
    if (kinds == _UNUSUAL).any():
        return _one_by_one(images, name, values)
    if whole and not (kinds == _FOUND).any():
        return images
    value_ends, value_bytes = layout(pa.array([""] * rows) if values is None else values)
    opening = np.frombuffer(f",{dumps(name)}:".encode(), np.uint8)
    changed = kinds != _NO_OBJECT
    added = np.diff(value_ends).astype(np.int64)
    if not whole:
        added += np.where(kinds == _ABSENT, len(opening), 0)
        added += np.where(kinds == _EMPTY, len(opening) - 1, 0)
    sizes = np.diff(ends) + np.where(changed, added - (stops - starts), 0)
    total = np.zeros(rows + 1, np.int64)
    np.cumsum(sizes, out=total[1:])
    if total[-1] > MAX_BYTES:
        raise UnsupportedEvent(f"images with the field {name} need more than 2 GiB in one call")
    out, bounds = np.empty(int(total[-1]), np.uint8), total.astype(np.int32)
    _write(_fixed(source), _fixed(ends), starts, stops, kinds, _fixed(opening),
           _fixed(value_bytes), _fixed(value_ends), whole, out, bounds)  # fmt: skip
    bitmap = pa.py_buffer(np.packbits(valid, bitorder="little").data)
    return pa.StringArray.from_buffers(
        rows, pa.py_buffer(bounds.data), pa.py_buffer(out.data), bitmap
    )


def _fixed(array: npt.NDArray[_Item]) -> npt.NDArray[_Item]:
    """Return a read-only view.

    With one array type for all inputs, Numba compiles a single kernel.
    """
    array = array.view()
    array.flags.writeable = False
    return array


def _one_by_one(images: pa.StringArray, name: str, values: pa.StringArray | None) -> pa.StringArray:
    texts = images.to_pylist()
    new = [None] * len(texts) if values is None else values.to_pylist()
    changed = [
        image if image is None or not image.startswith("{") else _image(image, name, value)
        for image, value in zip(texts, new, strict=True)
    ]
    return pa.array(changed, pa.string())


def _image(image: str, name: str, value: str | None) -> str:
    """Return an object with a field set to a JSON text, or removed if `value` is None."""
    fields = list(members(image))
    places = [number for number, field in enumerate(fields) if field[0] == name]
    if value is None:
        if not places:
            return image
        kept = ",".join(image[field[1] : field[3]] for field in fields if field[0] != name)
        return f"{image[: fields[0][1]]}{kept}{image[fields[-1][3] :]}"
    for number in reversed(places):
        _, _, begin, end = fields[number]
        image = image[:begin] + value + image[end:]
    if not places:
        end = image.rindex("}")
        image = f"{image[:end]}{',' if fields else ''}{dumps(name)}:{value}{image[end:]}"
    return image


@kernel
def _find(
    source: Bytes,
    ends: _Ints,
    valid: npt.NDArray[np.bool_],
    name: Bytes,
    whole: bool,
    starts: _Ints,
    stops: _Ints,
    kinds: Bytes,
) -> None:
    """Find the text to replace in each object.

    That is a field's value, its whole member, or an empty range at the end. `name` is the name as
    JSON text, with quotes. `whole` selects whole members, to remove them.
    """
    for row in range(len(kinds)):
        at, stop = int(ends[row]), int(ends[row + 1])
        kinds[row] = _NO_OBJECT
        if not valid[row] or at == stop or source[at] != OPEN_BRACE:
            continue
        kind = _EMPTY
        comma = -1
        at += 1
        while True:
            while at < stop and (blank(source[at]) or source[at] == COMMA):
                if source[at] == COMMA:
                    comma = at
                at += 1
            if at >= stop or source[at] != QUOTE:
                break
            if kind == _EMPTY:
                kind = _ABSENT
            begin = at
            at = string_end(source, at, stop)
            same = at - begin == len(name)
            for index in range(begin, at):
                if source[index] == BACKSLASH:
                    kind = _UNUSUAL
                if same and source[index] != name[index - begin]:
                    same = False
            if kind == _UNUSUAL or (same and kind == _FOUND):
                kind = _UNUSUAL
                break
            while at < stop and (blank(source[at]) or source[at] == COLON):
                at += 1
            value = at
            at = value_end(source, at, stop)
            if not same:
                continue
            kind = _FOUND
            starts[row], stops[row] = value, at
            if whole:
                starts[row] = comma if comma >= 0 else begin
                if comma < 0:
                    end = at
                    while end < stop and blank(source[end]):
                        end += 1
                    if end < stop and source[end] == COMMA:
                        stops[row] = end + 1
        kinds[row] = kind
        if kind == _EMPTY or kind == _ABSENT:
            starts[row], stops[row] = at, at


@kernel
def _write(
    source: Bytes,
    ends: _Ints,
    starts: _Ints,
    stops: _Ints,
    kinds: Bytes,
    opening: Bytes,
    values: Bytes,
    value_ends: _Ints,
    whole: bool,
    out: Bytes,
    bounds: _Ints,
) -> None:
    """Copy every image with its new value at the position found."""
    for row in range(len(kinds)):
        position = int(bounds[row])
        first, last = int(ends[row]), int(ends[row + 1])
        kind = kinds[row]
        if kind == _NO_OBJECT:
            copy(source, first, last, out, position)
            continue
        position = copy(source, first, int(starts[row]), out, position)
        if not whole:
            if kind == _ABSENT:
                position = copy(opening, 0, len(opening), out, position)
            elif kind == _EMPTY:
                position = copy(opening, 1, len(opening), out, position)
            position = copy(values, int(value_ends[row]), int(value_ends[row + 1]), out, position)
        copy(source, int(stops[row]), last, out, position)
