"""How much is read of what others may have written, and which environment variable raises each bound."""

from __future__ import annotations

import os
from dataclasses import dataclass

from matlens.arguments import short
from matlens.errors import InputError

MIB = 2**20


@dataclass(frozen=True)
class Bound:
    """The most that is read of something.

    Attributes
    ----------
    what
        What is bounded, such as ``"The size of a JSON file"``.
    variable
        The environment variable that raises the bound, in the same unit.
    default, unit
        The bound where the variable is not set, and what it counts.
    scale
        How many bytes or items one unit is.
    """

    what: str
    variable: str
    default: int
    unit: str
    scale: int = 1

    @property
    def most(self) -> int:
        """The bound in bytes or items.

        Raises
        ------
        InputError
            The variable holds no whole number.
        """
        setting = os.environ.get(self.variable)
        if setting is None:
            return self.default * self.scale
        if not (setting.isascii() and setting.isdigit() and len(setting) < 16):
            raise InputError(
                f"The environment variable {self.variable} is {short(setting)}. Expected a whole number of "
                f"{self.unit}."
            )
        return int(setting) * self.scale

    def error(self, name: object) -> InputError:
        """What is raised where something called ``name`` is past the bound."""
        limit = f"{self.most // self.scale:,} {self.unit}"
        return InputError(
            f"{name} cannot be read: {self.what} is bounded by {limit}. If it is right all the same, set the "
            f"environment variable {self.variable} to a higher number."
        )


LARGEST_JSON = Bound("the size of a JSON file", "MATLENS_LARGEST_JSON", 64, "MiB", MIB)
DEEPEST_JSON = Bound("how deeply JSON is nested", "MATLENS_DEEPEST_JSON", 64, "levels")
LONGEST_INTEGER = Bound("the length of a whole number", "MATLENS_LONGEST_INTEGER", 30, "digits")
LARGEST_TABLE = Bound("the size of a table", "MATLENS_LARGEST_TABLE", 1024, "MiB", MIB)
LONGEST_TABLE_LINE = Bound("the length of a table's line", "MATLENS_LONGEST_TABLE_LINE", 16, "MiB", MIB)
