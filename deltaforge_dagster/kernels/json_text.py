r"""Kernels that write JSON text (RFC 8259) into a byte buffer; shared by every source.

Each writes one value for the text `source[start:end]` into `out` from `at` on, and returns the
offset after it, or `INVALID` if the text is not of the kernel's kind. The caller must provide room
for the most bytes that the kernel's docstring states, for n bytes of input.

=============  =============================================  ==================================
kind           input text                                     JSON
=============  =============================================  ==================================
`STRING`       any UTF-8                                      string, escaped
`INTEGER`      decimal integer                                number, unchanged
`FLOAT`        JSON number, `NaN`, `Infinity`, `-Infinity`    number, unchanged; else a string
`BOOLEAN`      `t` or `f`                                     `true` or `false`
`JSON`         a JSON document                                the document without white space
`BYTEA`        PostgreSQL's bytea, hex or escape format       `{"_base64":"..."}`
`TIMESTAMP`    PostgreSQL's timestamp, `DateStyle` ISO        string, as its `to_json` writes it
=============  =============================================  ==================================
"""

# ruff: noqa: C901, PLR0911, PLR0917, PLR1714, SIM109, SIM110 - kernels are long flat loops over
# bytes, see `kernels.runtime`

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.runtime import (
    BACKSLASH,
    CLOSE_BRACE,
    CLOSE_BRACKET,
    COLON,
    COMMA,
    DOT,
    EQUALS,
    LOWER_B,
    LOWER_E,
    LOWER_F,
    LOWER_N,
    LOWER_R,
    LOWER_T,
    LOWER_U,
    LOWER_X,
    MINUS,
    NINE,
    OPEN_BRACE,
    OPEN_BRACKET,
    PLUS,
    QUOTE,
    SLASH,
    SPACE,
    TAB,
    UPPER_E,
    UPPER_T,
    ZERO,
    Bytes,
    copy,
    kernel,
)

INVALID = -1
"""Returned instead of an offset: the text is not of the kernel's kind."""
TOO_DEEP = -2
"""Returned instead of an offset: a JSON document is nested deeper than `MAX_DEPTH`."""

STRING, INTEGER, FLOAT, BOOLEAN, JSON, BYTEA, TIMESTAMP = range(7)
"""Kinds of scalar texts."""

MAX_DEPTH = 1 << 16
"""The deepest nesting of a JSON document, and the size of `write_document`'s `stack`."""

ESCAPES = np.zeros(256, np.uint8)
"""For each byte that must be escaped, the letter after the backslash; 0 for all others."""
ESCAPES[:32] = LOWER_U
for _plain, _letter in zip(b'"\\\b\f\n\r\t', b'"\\bfnrt', strict=True):
    ESCAPES[_plain] = _letter

HEX_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8).copy()
HEX_VALUES = np.full(256, 255, np.uint8)
"""The value of each hexadecimal digit; 255 for other bytes."""
for _value, _digit in enumerate(b"0123456789abcdef"):
    HEX_VALUES[_digit] = _value
for _value, _digit in enumerate(b"ABCDEF"):
    HEX_VALUES[_digit] = _value + 10
BASE64 = np.frombuffer(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8
).copy()

NULL = np.frombuffer(b"null", np.uint8).copy()
_TRUE = np.frombuffer(b"true", np.uint8).copy()
_FALSE = np.frombuffer(b"false", np.uint8).copy()
_NAN = np.frombuffer(b"NaN", np.uint8).copy()
_INFINITY = np.frombuffer(b"Infinity", np.uint8).copy()
_FOREVER = np.frombuffer(b"infinity", np.uint8).copy()
_BEFORE_CHRIST = np.frombuffer(b" BC", np.uint8).copy()
_DAY_AND_CLOCK = np.frombuffer(b"-00-00 00:00:00", np.uint8).copy()
_NO_MINUTES = np.frombuffer(b":00", np.uint8).copy()
BASE64_OPEN = np.frombuffer(b'{"_base64":"', np.uint8).copy()
UNCHANGED = np.frombuffer(b'{"_unchanged":true}', np.uint8).copy()
"""Written in place of a value that the log does not contain."""

STRING_GROWTH = 6
"""The most bytes of a JSON string per byte of input, apart from two quotes.

A control character takes that many.
"""
OVERHEAD = 32
"""Room in bytes that any value needs in addition to its text: quotes, `{"_base64":""}`, `null`."""


@kernel
def equals(source: Bytes, start: int, end: int, text: Bytes) -> bool:
    """Return whether `source[start:end]` equals `text`."""
    if end - start != text.size:
        return False
    for i in range(text.size):
        if source[start + i] != text[i]:
            return False
    return True


@kernel
def write_null(out: Bytes, at: int) -> int:
    """Write `null`."""
    return copy(NULL, 0, 4, out, at)


@kernel
def write_true(out: Bytes, at: int) -> int:
    """Write `true`."""
    return copy(_TRUE, 0, 4, out, at)


@kernel
def write_false(out: Bytes, at: int) -> int:
    """Write `false`."""
    return copy(_FALSE, 0, 5, out, at)


@kernel
def string_size(source: Bytes, start: int, end: int) -> int:
    """Return the exact size of `write_string` for the same text."""
    size = end - start + 2
    for i in range(start, end):
        letter = ESCAPES[source[i]]
        if letter != 0:
            size += 5 if letter == LOWER_U else 1
    return size


@kernel
def write_string(source: Bytes, start: int, end: int, out: Bytes, at: int) -> int:
    """Write a string, quoted and escaped, with non-ASCII bytes unchanged; at most 6 n + 2 bytes."""
    out[at] = QUOTE
    at += 1
    for i in range(start, end):
        byte = source[i]
        letter = ESCAPES[byte]
        if letter == 0:
            out[at] = byte
            at += 1
        else:
            out[at] = BACKSLASH
            out[at + 1] = letter
            at += 2
            if letter == LOWER_U:
                out[at] = ZERO
                out[at + 1] = ZERO
                out[at + 2] = HEX_DIGITS[byte >> 4]
                out[at + 3] = HEX_DIGITS[byte & 15]
                at += 4
    out[at] = QUOTE
    return at + 1


@kernel
def _digits_end(source: Bytes, start: int, end: int) -> int:
    """Return the offset after the decimal digits at `start`."""
    at = start
    while at < end and ZERO <= source[at] <= NINE:
        at += 1
    return at


@kernel
def _integer_end(source: Bytes, start: int, end: int) -> int:
    """Return the offset after `-?(0|[1-9][0-9]*)`, or `INVALID`."""
    at = start
    if at < end and source[at] == MINUS:
        at += 1
    first = at
    at = _digits_end(source, first, end)
    if at == first or (at > first + 1 and source[first] == ZERO):
        return INVALID
    return at


@kernel
def _number_end(source: Bytes, start: int, end: int) -> int:
    """Return the offset after the JSON number at `start`, or `INVALID`."""
    at = _integer_end(source, start, end)
    if at == INVALID:
        return INVALID
    if at < end and source[at] == DOT:
        first = at + 1
        at = _digits_end(source, first, end)
        if at == first:
            return INVALID
    if at < end and (source[at] == LOWER_E or source[at] == UPPER_E):
        first = at + 1
        if first < end and (source[first] == PLUS or source[first] == MINUS):
            first += 1
        at = _digits_end(source, first, end)
        if at == first:
            return INVALID
    return at


@kernel
def write_integer(source: Bytes, start: int, end: int, out: Bytes, at: int) -> int:
    """Write a decimal integer of any length; at most n bytes."""
    if _integer_end(source, start, end) != end:
        return INVALID
    return copy(source, start, end, out, at)


@kernel
def write_float(source: Bytes, start: int, end: int, out: Bytes, at: int) -> int:
    """Write a floating point number: unchanged, or a string if not finite; at most n + 2 bytes."""
    if _number_end(source, start, end) == end:
        return copy(source, start, end, out, at)
    first = start + 1 if start < end and source[start] == MINUS else start
    special = equals(source, first, end, _INFINITY) or equals(source, start, end, _NAN)
    return write_string(source, start, end, out, at) if special else INVALID


@kernel
def write_boolean(source: Bytes, start: int, end: int, out: Bytes, at: int) -> int:
    """Write `true` for `t` and `false` for `f`."""
    if end - start == 1 and source[start] == LOWER_T:
        return write_true(out, at)
    if end - start == 1 and source[start] == LOWER_F:
        return write_false(out, at)
    return INVALID


@kernel
def write_group(group: np.int64, count: int, out: Bytes, at: int) -> int:
    """Write the highest `count` bytes (1 to 3) of a 24-bit `group` as four Base64 characters."""
    out[at] = BASE64[(group >> 18) & 63]
    out[at + 1] = BASE64[(group >> 12) & 63]
    out[at + 2] = BASE64[(group >> 6) & 63] if count > 1 else EQUALS
    out[at + 3] = BASE64[group & 63] if count > 2 else EQUALS
    return at + 4


@kernel
def _write_hex(source: Bytes, start: int, end: int, out: Bytes, at: int) -> int:
    """Decode pairs of hexadecimal digits, and write the bytes in Base64."""
    if (end - start) & 1 != 0:
        return INVALID
    for position in range(start, end, 6):
        group, wrong = np.int64(0), np.uint8(0)
        digits = min(6, end - position)
        for i in range(digits):
            value = HEX_VALUES[source[position + i]]
            wrong |= value
            group |= np.int64(value) << (20 - 4 * i)
        if wrong > 15:
            return INVALID
        at = write_group(group, digits >> 1, out, at)
    return at


@kernel
def _write_escaped(source: Bytes, start: int, end: int, out: Bytes, at: int) -> int:
    """Decode `bytea` text in the escape format, and write its bytes in Base64."""
    group, count = np.int64(0), 0
    position = start
    while position < end:
        byte = np.int64(source[position])
        position += 1
        if byte < 32 or byte > 126:
            return INVALID
        if byte == BACKSLASH:
            if position < end and source[position] == BACKSLASH:
                position += 1
            elif end - position >= 3:
                byte = np.int64(0)
                for _ in range(3):
                    digit = np.int64(source[position]) - ZERO
                    if digit < 0 or digit > 7:
                        return INVALID
                    byte = byte << 3 | digit
                    position += 1
                if byte > 255:
                    return INVALID
            else:
                return INVALID
        group |= byte << (16 - 8 * count)
        count += 1
        if count == 3:
            at = write_group(group, count, out, at)
            group, count = np.int64(0), 0
    return at if count == 0 else write_group(group, count, out, at)


@kernel
def write_bytea(source: Bytes, start: int, end: int, out: Bytes, at: int) -> int:
    r"""Write the bytes of a bytea text as `{"_base64":"..."}` (RFC 4648); at most 4/3 n + 18 bytes.

    The formats are in PostgreSQL's manual, section "Binary Data Types". Hex format: `\x`, then two
    digits per byte. Escape format: printable ASCII unchanged, a backslash as two, any other byte as
    `\` and three octal digits; so a text in this format never begins with `\x`.
    """
    at = copy(BASE64_OPEN, 0, BASE64_OPEN.size, out, at)
    if end - start >= 2 and source[start] == BACKSLASH and source[start + 1] == LOWER_X:
        at = _write_hex(source, start + 2, end, out, at)
    else:
        at = _write_escaped(source, start, end, out, at)
    if at == INVALID:
        return INVALID
    out[at] = QUOTE
    out[at + 1] = CLOSE_BRACE
    return at + 2


@kernel
def _follows(source: Bytes, start: int, end: int, form: Bytes) -> bool:
    """Return whether the text at `start` matches `form`.

    A zero in `form` stands for any digit, every other byte for itself.
    """
    if end - start < form.size:
        return False
    for i in range(form.size):
        byte = source[start + i]
        if not (byte == form[i] or (form[i] == ZERO and ZERO <= byte <= NINE)):
            return False
    return True


@kernel
def write_timestamp(source: Bytes, start: int, end: int, out: Bytes, at: int) -> int:
    """Write a timestamp in the form of ISO 8601; at most n + 5 bytes.

    The input is PostgreSQL's (manual, section "Date/Time Output"): `2026-03-01 12:34:56.789+05:45
    BC`, where fraction, offset and era may be absent and a year has four digits or more. The space
    is replaced by a `T`, and an offset of whole hours gets `:00`. `infinity` and `-infinity` are
    unchanged.
    """
    year_end = _digits_end(source, start, end)
    if year_end - start < 4:
        first = start + 1 if start < end and source[start] == MINUS else start
        forever = equals(source, first, end, _FOREVER)
        return write_string(source, start, end, out, at) if forever else INVALID
    if not _follows(source, year_end, end, _DAY_AND_CLOCK):
        return INVALID
    space = year_end + 6
    zone = year_end + _DAY_AND_CLOCK.size
    if zone < end and source[zone] == DOT:
        first = zone + 1
        zone = _digits_end(source, first, end)
        if zone == first:
            return INVALID
    era = zone
    if era < end and (source[era] == PLUS or source[era] == MINUS):
        if _digits_end(source, zone + 1, min(end, zone + 3)) != zone + 3:
            return INVALID
        era += 3
        while _follows(source, era, end, _NO_MINUTES):
            era += 3
    if era != end and not equals(source, era, end, _BEFORE_CHRIST):
        return INVALID
    out[at] = QUOTE
    at = copy(source, start, space, out, at + 1)
    out[at] = UPPER_T
    at = copy(source, space + 1, era, out, at + 1)
    if era == zone + 3:
        at = copy(_NO_MINUTES, 0, _NO_MINUTES.size, out, at)
    at = copy(source, era, end, out, at)
    out[at] = QUOTE
    return at + 1


@kernel
def _string_end(source: Bytes, start: int, end: int) -> int:
    """Return the offset after the JSON string whose opening quote is at `start`, or `INVALID`."""
    at = start + 1
    while at < end:
        byte = source[at]
        if byte == QUOTE:
            return at + 1
        if byte < 32:
            return INVALID
        if byte == BACKSLASH:
            at += 1
            if at >= end:
                return INVALID
            letter = source[at]
            if letter == LOWER_U:
                if end - at < 5:
                    return INVALID
                for i in range(1, 5):
                    if HEX_VALUES[source[at + i]] > 15:
                        return INVALID
                at += 4
            elif not (
                letter == QUOTE
                or letter == BACKSLASH
                or letter == SLASH
                or letter == LOWER_B
                or letter == LOWER_F
                or letter == LOWER_N
                or letter == LOWER_R
                or letter == LOWER_T
            ):
                return INVALID
        at += 1
    return INVALID


@kernel
def _scalar_end(source: Bytes, start: int, end: int) -> int:
    """Return the offset after the JSON scalar (no object or array) at `start`, or `INVALID`."""
    byte = source[start]
    if byte == QUOTE:
        return _string_end(source, start, end)
    if byte == LOWER_T:
        return start + 4 if equals(source, start, min(end, start + 4), _TRUE) else INVALID
    if byte == LOWER_F:
        return start + 5 if equals(source, start, min(end, start + 5), _FALSE) else INVALID
    if byte == LOWER_N:
        return start + 4 if equals(source, start, min(end, start + 4), NULL) else INVALID
    return _number_end(source, start, end)


_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _BEFORE_VALUE, _AFTER = range(6)
"""States of the parser, by what may come next; `_AFTER`: a comma or the container's end."""


@kernel
def write_document(source: Bytes, start: int, end: int, out: Bytes, at: int, stack: Bytes) -> int:
    """Write a JSON document without white space between its tokens; at most n bytes.

    The document is checked against the grammar, so the output is valid JSON, on one
    line. Numbers, escapes and the order of keys are unchanged. `stack` is scratch of
    `MAX_DEPTH` bytes; for a deeper document, `TOO_DEEP` is returned.
    """
    depth = 0
    state = _VALUE
    position = start
    while position < end:
        byte = source[position]
        if byte == 32 or byte == 10 or byte == 13 or byte == 9:
            position += 1
            continue
        opens = byte == OPEN_BRACE or byte == OPEN_BRACKET
        if opens and (state == _VALUE or state == _VALUE_OR_END):
            if depth == MAX_DEPTH:
                return TOO_DEEP
            stack[depth] = byte
            depth += 1
            state = _KEY_OR_END if byte == OPEN_BRACE else _VALUE_OR_END
        elif byte == CLOSE_BRACE or byte == CLOSE_BRACKET:
            opened = OPEN_BRACE if byte == CLOSE_BRACE else OPEN_BRACKET
            empty = state == (_KEY_OR_END if byte == CLOSE_BRACE else _VALUE_OR_END)
            if depth == 0 or stack[depth - 1] != opened or not (empty or state == _AFTER):
                return INVALID
            depth -= 1
            state = _AFTER
        elif byte == COMMA and state == _AFTER and depth > 0:
            state = _KEY if stack[depth - 1] == OPEN_BRACE else _VALUE
        elif byte == COLON and state == _BEFORE_VALUE:
            state = _VALUE
        else:
            is_key = (state == _KEY or state == _KEY_OR_END) and byte == QUOTE
            if not (is_key or state == _VALUE or state == _VALUE_OR_END):
                return INVALID
            token_end = _scalar_end(source, position, end)
            if token_end == INVALID:
                return INVALID
            at = copy(source, position, token_end, out, at)
            position = token_end
            state = _BEFORE_VALUE if is_key else _AFTER
            continue
        out[at] = byte
        at += 1
        position += 1
    return at if depth == 0 and state == _AFTER else INVALID


@kernel
def write_null_document(out: Bytes, at: int) -> int:
    """Write the JSON document `null` and a tab, unlike the `null` that stands for a missing value.

    JSON parsers ignore the tab, so to them both are the same.
    """
    at = write_null(out, at)
    out[at] = TAB
    return at + 1


@kernel
def write_json_value(source: Bytes, start: int, end: int, out: Bytes, at: int, stack: Bytes) -> int:
    """Write a JSON document as the value of a column; at most n + 1 bytes.

    A document whose text is `null` or `UNCHANGED` gets white space, which tells it apart from the
    markers with the same text: `null` for a missing value, and `UNCHANGED` for an unchanged one.
    """
    after = write_document(source, start, end, out, at, stack)
    if equals(out, at, after, NULL):
        return write_null_document(out, at)
    if equals(out, at, after, UNCHANGED):
        out[after - 1], out[after] = SPACE, CLOSE_BRACE
        return after + 1
    return after


@kernel
def write_scalar(
    kind: int, source: Bytes, start: int, end: int, out: Bytes, at: int, stack: Bytes
) -> int:
    """Write a text of kind `kind` as JSON; at most `STRING_GROWTH` n + `OVERHEAD` bytes."""
    if kind == STRING:
        return write_string(source, start, end, out, at)
    if kind == INTEGER:
        return write_integer(source, start, end, out, at)
    if kind == FLOAT:
        return write_float(source, start, end, out, at)
    if kind == BOOLEAN:
        return write_boolean(source, start, end, out, at)
    if kind == JSON:
        return write_json_value(source, start, end, out, at, stack)
    if kind == BYTEA:
        return write_bytea(source, start, end, out, at)
    return write_timestamp(source, start, end, out, at)
