"""`spec.engine.columns`: which column values are hidden before anything is written."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import (
    AfterValidator,
    Field,
    SecretStr,
    field_serializer,
    field_validator,
    model_validator,
)

from deltaforge_dagster.config.blocks import Block, Count, Text, environment_filled, resolved

# A table pattern as in `source.config.tables`, a dot, and a column pattern.
_COLUMN_PATTERN = re.compile(
    r"""(?:[^.*%]+[*%]?|[*%]) (?: \. (?:[^.*%]+[*%]?|[*%]) )? \. (?:[^.*%]+[*%]?|[*%])""",
    re.VERBOSE,
)
_LEAST_SALT = 16


def _column_pattern(text: str) -> str:
    if not _COLUMN_PATTERN.fullmatch(text):
        raise ValueError(
            "is not a column pattern (write schema.table.column or table.column, where a part may "
            "end in `*` or `%` for any rest, and has no other wildcard)"
        )
    return text


Pattern = Annotated[Text, AfterValidator(_column_pattern)]
"""`schema.table.column`, or `table.column` for that table in any database or schema."""

_MaskText = Annotated[str, AfterValidator(environment_filled)]


class HashedColumns(Block):
    """Columns whose values become salted hashes, which reveal only which values are equal."""

    columns: Annotated[tuple[Pattern, ...], Field(min_length=1)]
    """Patterns of the columns whose values are replaced by the SHA-256 of salt and value."""
    salt: SecretStr
    """A secret of at least 16 characters that is hashed before each value. Usually given through an
    environment variable.
    """

    @field_validator("salt")
    @classmethod
    def _check_salt(cls, salt: SecretStr) -> SecretStr:
        if len(resolved(salt.get_secret_value())) < _LEAST_SALT:
            raise ValueError(
                f"is shorter than {_LEAST_SALT} characters, so that values could be found by "
                "trying (take a long random text)"
            )
        return salt

    @field_serializer("salt")
    def _mask_salt(self, salt: SecretStr) -> str:
        del salt
        return "***"


class ColumnOptions(Block):
    """Which column values are hidden at capture (docs/columns.md)."""

    exclude: tuple[Pattern, ...] = ()
    """Patterns of columns that are left out of events."""
    include: tuple[Pattern, ...] = ()
    """Patterns of columns: events of the tables that they name contain only these columns and the
    key.
    """
    hash: HashedColumns | None = None
    """Columns whose values are replaced by salted hashes."""
    mask: Mapping[Pattern, _MaskText] = {}
    """Patterns of columns, each with the text that replaces every value."""
    truncate: Mapping[Pattern, Count] = {}
    """Patterns of text columns, each with the number of characters to keep of a value."""

    @model_validator(mode="after")
    def _check_repeated(self) -> ColumnOptions:
        seen: dict[str, str] = {}
        for action, patterns in self.patterns().items():
            for pattern in patterns:
                other = seen.setdefault(pattern, action)
                if other != action:
                    raise ValueError(
                        f"{pattern} is in {other} and in {action} (a column has one of them)"
                    )
        return self

    def patterns(self) -> dict[str, tuple[str, ...]]:
        """Return the patterns of each action that hides something, by its name in the file.

        `include` is not among them.
        """
        return {
            "exclude": self.exclude,
            "mask": tuple(self.mask),
            "hash": self.hash.columns if self.hash else (),
            "truncate": tuple(self.truncate),
        }

    def salt_digest(self) -> str:
        """Return a keyed digest that identifies the salt and hides it; empty without a salt."""
        if self.hash is None:
            return ""
        salt = self.hash.salt.get_secret_value().encode()
        return hmac.new(salt, b"spec.engine.columns.hash.salt", hashlib.sha256).hexdigest()
