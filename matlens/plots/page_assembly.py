"""One file for a browser: a template with its style sheet, its script and its data inside.

Nothing is fetched when such a page is opened: the Content-Security-Policy that it carries allows the one
script and the one style sheet in it, by their hashes, and no request at all. Scripts are ES modules beside
this file. They are joined here into one, which is all the building there is: imports of each other are left
out, and exports are plain names.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
from jaxtyping import Shaped

from matlens.errors import InputError, printable

_IMPORT = re.compile(r'^import [^;]*?from "\./([a-z_]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:const|let|function|class|async) )", re.MULTILINE)
_KINDS = {"f4": "f32", "i2": "i16", "u1": "u8", "u2": "u16", "u4": "u32"}
_OUTSIDE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
_LONGEST_TITLE = 120
_FRAME_HEIGHT = 760  # pixels of a page in a notebook


def assemble(
    template: str,
    script: str,
    *,
    title: str,
    data: Mapping[str, Any],
    sources: Sequence[str] = (),
    rules: Sequence[str] = (),
    **more: Any,
) -> str:
    """Make the text of a page, which needs nothing but itself.

    Parameters
    ----------
    template, script
        Names of files beside this one: the Jinja template, and the script that imports the others.
    title
        What the page is about, in which there may be what others wrote.
    data
        What the script shows; arrays as `packed` writes them.
    sources
        Where the page may take scripts from beside its own, as the policy spells it, such as ``"'self'"``.
    rules
        More rules of the policy, such as ``"connect-src 'self'"`` of a page that a server answers.
    more
        What else the template names.

    Raises
    ------
    InputError
        The data are nothing that JSON can hold.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("matlens", "plots"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, joined = read_asset("style.css"), join_script(script)
    policy = "; ".join(
        (
            "default-src 'none'",
            " ".join(["script-src", source_hash(joined), *sources]),
            f"style-src {source_hash(style)}",
            *([] if sources else ["require-trusted-types-for 'script'"]),
            "base-uri 'none'",
            "form-action 'none'",
            *rules,
        )
    )
    return environment.get_template(template).render(
        title=printable(title, most=_LONGEST_TITLE), policy=policy, style=Markup(style),
        script=Markup(joined), data=Markup(embedded_json(data)), **more,
    )  # fmt: skip


def framed(page: str) -> str:
    """A page inside another, such as a notebook, of which it can touch nothing."""
    return (
        f'<iframe sandbox="allow-scripts" width="100%" height="{_FRAME_HEIGHT}" style="border:0" '
        f'title="matlens" srcdoc="{escape(page)}"></iframe>'
    )


@cache
def read_asset(name: str) -> str:
    """The text of a file beside this one."""
    return files("matlens.plots").joinpath(name).read_text(encoding="utf-8")


@cache
def join_script(name: str) -> str:
    """A script with all that it imports before it, each module once."""
    order: list[str] = []

    def visit(module: str) -> None:
        if module not in order:
            for imported in _IMPORT.findall(read_asset(module)):
                visit(imported)
            order.append(module)

    visit(name)
    return "".join(_EXPORT.sub("", _IMPORT.sub("", read_asset(module))) for module in order)


def source_hash(text: str) -> str:
    """How a Content-Security-Policy names a script or a style sheet by what it holds."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def embedded_json(data: Any) -> str:
    """JSON that can stand in a script element, whatever texts are in it.

    Raises
    ------
    InputError
        It is nothing that JSON can hold.
    """
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_OUTSIDE)
    except (TypeError, ValueError) as error:
        raise InputError(f"The page's data are no JSON: {error}.") from error


def packed(array: Shaped[np.ndarray, ...]) -> dict[str, Any]:
    """An array as the page's script reads it: its kind of numbers, its shape, and its bytes in base64.

    Whole numbers take as many bytes as the largest of them needs, all others are float32.

    Raises
    ------
    InputError
        It is no array of numbers, or has whole numbers below 0 or past 2**32 - 1.
    """
    narrowed = _narrowed(array)
    kind = _KINDS[narrowed.dtype.str[1:]]
    little = narrowed.astype(narrowed.dtype.newbyteorder("<"), copy=False)
    return {
        "kind": kind,
        "shape": list(array.shape),
        "base64": base64.b64encode(np.ascontiguousarray(little).tobytes()).decode(),
    }


def _narrowed(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.int16:
        return array
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    if array.dtype.kind not in "iub":
        raise InputError(f"An array of {array.dtype} cannot be packed. Expected numbers.")
    largest = int(array.max(initial=0))
    if int(array.min(initial=0)) < 0 or largest >= 2**32:
        raise InputError("Whole numbers below 0 or past 4,294,967,295 cannot be packed.")
    return array.astype("u1" if largest < 2**8 else "u2" if largest < 2**16 else "u4")


class PageVocabulary:
    """The tokens of a page, numbered as they come up; their texts are written once.

    Parameters
    ----------
    ids
        Token ids that come up, in any order and any number of times.
    """

    def __init__(self, ids: Iterable[np.ndarray]) -> None:
        parts = [np.asarray(part).ravel() for part in ids]
        self.ids = np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)

    def places(self, ids: Shaped[np.ndarray, ...]) -> Shaped[np.ndarray, ...]:
        """The number of each token on this page."""
        return np.searchsorted(self.ids, ids)
