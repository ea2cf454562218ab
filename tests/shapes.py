"""What checks the types and shapes of the package's functions while tests run."""

from __future__ import annotations

from typing import Any, Self

from beartype import BeartypeConf, FrozenDict, beartype

# A whole number serves where a real one is meant, as it does for type checkers. Functions are decorated
# before their class is there, so that Self has no meaning yet.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict({Self: Any})))
