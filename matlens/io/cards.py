"""Model cards: Markdown from a template in a package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def render_card(
    package: str, template: str, values: Mapping[str, Any], filters: Mapping[str, Callable[..., str]]
) -> str:
    """A card from the Jinja template of this name in the folder of a package, such as ``lens``."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("matlens", package), trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters.update(filters)
    return environment.get_template(template).render(values)
