"""Bounds on foreign data, the environment variables that raise them, and JSON within them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from matlens.errors import InputError, short


@dataclass(frozen=True)
class Bound:
    """A bound on foreign data, which an environment variable raises or lowers."""

    variable: str
    default: int
    unit: str  # and subject, such as "MiB in a line"
    scale: int = 1  # of the unit in counts of `check`, such as bytes in a MiB

    @property
    def limit(self) -> int:
        """The current limit, in the unit of `check`; raises InputError for an invalid variable."""
        text = os.environ.get(self.variable, "").strip() or str(self.default)
        if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text)):
            raise InputError(
                f"The environment variable {self.variable} ({self.unit}) must be an integer above 0, got "
                f"{short(text)}. The default is {self.default}."
            )
        return int(text) * self.scale

    def check(self, count: int, where: str) -> None:
        """Raise InputError if there is more than the bound; ``where`` begins the message."""
        if count > self.limit:
            raise InputError(
                f"{where} has more than {self.limit // self.scale:,} {self.unit}. If this is intended, raise "
                f"the bound with the environment variable {self.variable}."
            )


_MIB = 2**20
LINE = Bound("MATLENS_MAX_LINE_MIB", 8, "MiB in one line or text", _MIB)
UNPACKED = Bound("MATLENS_MAX_UNPACKED_MIB", 16_384, "MiB when decompressed", _MIB)
CORPUS = Bound("MATLENS_MAX_CORPUS_MIB", 1024, "MiB of text in memory", _MIB)
JSON = Bound("MATLENS_MAX_JSON_MIB", 64, "MiB of JSON", _MIB)
TABLE = Bound("MATLENS_MAX_TABLE_MIB", 1024, "MiB in a table", _MIB)
LAYERS = Bound("MATLENS_MAX_LAYERS", 1000, "layers")
BOUNDS = (LINE, UNPACKED, CORPUS, JSON, TABLE, LAYERS)
"""All bounds, as a table in docs/how-to/own-sentences.md lists them."""


def parse_json(text: str | bytes, where: str) -> Any:
    """Parse foreign JSON; ``where`` names its place, such as ``"line 3 of 'a.jsonl'"``."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # of nesting, or of a number of thousands of digits
        raise InputError(f"{where} must be JSON ({str(error)[:200]}).") from error
