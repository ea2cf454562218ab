"""How much of what others wrote is taken: bounds, the variables that raise them, and JSON within them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from matlens.errors import InputError, printable

_LARGEST = 2**62
_REASON = 200  # characters of what another package says of a fault


@dataclass(frozen=True)
class Bound:
    """A bound on foreign data, which the environment variable of its name raises or lowers.

    Attributes
    ----------
    variable
        The environment variable.
    default
        The bound where it is not set.
    what
        What is counted, with its unit, such as ``"MiB in a line"``.
    scale
        How many of what `check` counts are one of these, such as bytes in a MiB.
    """

    variable: str
    default: int
    what: str
    scale: int = 1

    @property
    def limit(self) -> int:
        """The bound that holds now, in what `check` counts.

        Raises
        ------
        InputError
            The environment variable is set to something else than a number above 0.
        """
        text = os.environ.get(self.variable, "").strip()
        if not text:
            return self.default * self.scale
        if not (text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) <= _LARGEST):
            raise InputError(
                f"The environment variable {self.variable} is '{printable(text, most=60)}'. Expected a whole "
                f"number above 0, the most {self.what}; it is {self.default:,} where it is not set."
            )
        return int(text) * self.scale

    def check(self, count: int, where: str) -> None:
        """Raise InputError if there is more than the bound; ``where`` begins the message."""
        if count > self.limit:
            raise self.error(where)

    def error(self, where: str) -> InputError:
        """The error for what is past the bound."""
        return InputError(
            f"{where} has more than {self.limit // self.scale:,} {self.what}, which is the bound. If it is "
            f"meant to, raise it by the environment variable {self.variable}."
        )


_MIB = 2**20
LINE = Bound("MATLENS_MAX_LINE_MIB", 8, "MiB in one line or text", _MIB)
UNPACKED = Bound("MATLENS_MAX_UNPACKED_MIB", 16_384, "MiB once it is unpacked", _MIB)
RATIO = Bound("MATLENS_MAX_RATIO", 200, "bytes unpacked for each byte packed")
MEMBERS = Bound("MATLENS_MAX_MEMBERS", 10_000, "files packed into it")
HEADER = Bound("MATLENS_MAX_HEADER_MIB", 4, "MiB of names and headers", _MIB)
SENTENCES = Bound("MATLENS_MAX_SENTENCES", 100_000_000, "sentences")
CORPUS = Bound("MATLENS_MAX_CORPUS_MIB", 1024, "MiB of text to be kept in memory", _MIB)
JSON = Bound("MATLENS_MAX_JSON_MIB", 64, "MiB of JSON", _MIB)
TABLE = Bound("MATLENS_MAX_TABLE_MIB", 1024, "MiB in a table", _MIB)
SHEET = Bound("MATLENS_MAX_SHEET_MIB", 64, "MiB in a filled sheet", _MIB)
LAYERS = Bound("MATLENS_MAX_LAYERS", 1000, "layers")
BOUNDS = (LINE, UNPACKED, RATIO, MEMBERS, HEADER, SENTENCES, CORPUS, JSON, TABLE, SHEET, LAYERS)
"""All bounds of foreign text; the how-to on bounds has them in a table."""


def parse_json(text: str, where: str) -> Any:
    """Read JSON that somebody else wrote; ``where`` says where it stands, such as ``"line 3 of 'a.jsonl'"``.

    Raises
    ------
    InputError
        It is not JSON, has a number of thousands of digits, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = printable(str(error).partition("\n")[0], most=_REASON)
        raise InputError(f"There is no JSON in {where} ({reason}).") from error
