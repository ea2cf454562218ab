"""Standalone HTML pages from a template, style sheet, script and data.

A page fetches nothing: its Content-Security-Policy allows the one script and the one style sheet in it, by
their hashes, and no request at all. Scripts are ES modules next to this file, joined here into one: imports
of each other are removed, and exports become plain names.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from matlens.errors import InputError, printable
from matlens.io.files import write_files

if TYPE_CHECKING:
    from jinja2 import Template

_IMPORT = re.compile(r'^import [^;]*?from "\./([a-z_]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:const|let|function|class|async) )", re.MULTILINE)
_KINDS = {"f4": "f32", "i2": "i16", "u1": "u8", "u2": "u16", "u4": "u32"}
_OUTSIDE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
_LONGEST_TITLE = 120
_STEPS = 2**15 - 1  # of a score stored as an integer, relative to the largest of its value vector
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
    """The text of a standalone page.

    ``template`` and ``script`` are files next to this one, the Jinja template and the script that imports the
    others. ``title`` may be foreign text, and ``data`` is for the script, with arrays as `packed` writes
    them. ``sources`` are other origins of scripts in the policy's words, such as ``"'self'"``, and
    ``rules`` more rules of the policy. The template gets ``more``.
    """
    from markupsafe import Markup

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
    return read_template("matlens", "plots", template).render(
        title=printable(title, limit=_LONGEST_TITLE), policy=policy, style=Markup(style),
        script=Markup(joined), data=Markup(embedded_json(data)), **more,
    )  # fmt: skip


def read_template(package: str, folder: str, name: str) -> Template:
    """A Jinja template for HTML; values are escaped, undefined names are errors."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package, folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(name)


@cache
def read_asset(name: str) -> str:
    """The text of a file next to this one."""
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
    """The hash of a script or style sheet, as a Content-Security-Policy writes it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def embedded_json(data: Any) -> str:
    """JSON for a script element, safe for any text."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_OUTSIDE)


def packed(array: Shaped[np.ndarray, ...]) -> dict[str, Any]:
    """An array as the page's script reads it: its dtype, its shape, and its bytes in base64.

    Integers take as many bytes as the largest of them needs, all others are float32.
    """
    if array.dtype.kind == "f":
        array = array.astype("<f4")
    elif array.dtype == np.int16:
        array = array.astype("<i2")
    else:
        largest = int(array.max(initial=0))
        if int(array.min(initial=0)) < 0 or largest >= 2**32:
            raise ValueError("Integers must be between 0 and 4,294,967,295 to be packed.")
        array = array.astype("u1" if largest < 2**8 else "<u2" if largest < 2**16 else "<u4")
    return {
        "kind": _KINDS[array.dtype.str[1:]],
        "shape": list(array.shape),
        "base64": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(),
    }


def packed_fields(record: Any, **instead: Shaped[np.ndarray, ...]) -> dict[str, Any]:
    """The arrays of a dataclass, packed, by name; ``instead`` replaces some, or adds others."""
    values = {each.name: getattr(record, each.name) for each in fields(record)} | instead
    return {name: packed(v) if isinstance(v, np.ndarray) else v for name, v in values.items()}


@dataclass(frozen=True, eq=False)
class LensCells:
    """Predictions of one lens at every layer and token of a prompt.

    ``kl`` is ``KL(delta(h^L) || q)``, in nats as ``entropy``. Ranks count from 1; ``rank`` is that of the
    token that the model predicts in the end.
    """

    ids: Int[np.ndarray, "layers tokens k"]
    log_probs: Float[np.ndarray, "layers tokens k"]
    entropy: Float[np.ndarray, "layers tokens"]
    kl: Float[np.ndarray, "layers tokens"]
    rank: Int[np.ndarray, "layers tokens"]
    followed_ranks: Int[np.ndarray, "layers tokens followed"]
    followed_log_probs: Float[np.ndarray, "layers tokens followed"]


@dataclass(frozen=True, eq=False)
class UpdateCells:
    """Dominant sub-updates of every FFN at every token, and their effects on tokens.

    A sub-update ``s m_i v_i`` points along its value vector or, if its coefficient is negative, against it.
    ``way`` is that direction: a row of ``layer``, ``index``, ``negative``, ``promoted`` and ``static``. The
    effect on the score of a followed token is ``scale * |coefficient| * static[way]``. The effects of the
    dominant ones, ``rest`` (all others) and ``scale * bias`` add up to that of the FFN.

    Attributes
    ----------
    scale
        ``s``, the factor of a norm after the FFN on all of a token's sub-updates; 1 without such a norm.
    static
        ``E v_i``, or its opposite, for the followed tokens.
    """

    way: Int[np.ndarray, "ffns tokens k"]
    coefficient: Float[np.ndarray, "ffns tokens k"]
    share: Float[np.ndarray, "ffns tokens k"]
    scale: Float[np.ndarray, "ffns tokens"]
    rest: Float[np.ndarray, "ffns tokens followed"]
    bias: Float[np.ndarray, "ffns followed"]
    layer: Int[np.ndarray, " ways"]
    index: Int[np.ndarray, " ways"]
    negative: Int[np.ndarray, " ways"]
    promoted: Int[np.ndarray, "ways n"]
    static: Float[np.ndarray, "ways followed"]
    d_mlp: int


@dataclass(frozen=True, eq=False)
class PromptPage:
    """A prompt through lenses, with the sub-updates of every cell; a notebook shows its page.

    Attributes
    ----------
    layers
        Layers that all lenses read, ascending; the last is the model's own prediction.
    lenses
        Predictions of each lens, by name. The page opens on the first.
    followed, pinned
        Tokens whose ranks are known in every cell, and those of them that are pinned at first.
    updates
        None if the model has no known value vectors.
    changes
        What was changed in the model, empty for the plain model.
    modified
        Predictions of the same lenses for the model after a further change; a layer that it does not compute
        has NaN, and 0 as ranks and tokens. They are shown next to those of the same name in ``lenses``.
    modification
        What was changed for ``modified``.
    """

    model: str
    prompt: str
    tokens: Int[np.ndarray, " tokens"]
    layers: Sequence[int]
    lenses: Mapping[str, LensCells]
    followed: Int[np.ndarray, " followed"]
    texts: Mapping[int, str]
    updates: UpdateCells | None = None
    pinned: Sequence[int] = ()
    notes: Sequence[str] = ()
    changes: str = ""
    modified: Mapping[str, LensCells] = field(default_factory=dict)
    modification: str = ""

    def to_html(self) -> str:
        """The page as a self-contained HTML text."""
        modified = {f"{name}, modified": cells for name, cells in self.modified.items()}
        lenses = {**self.lenses, **modified}
        parts = [self.tokens, self.followed, *(cells.ids for cells in lenses.values())]
        if self.updates is not None:
            parts.append(self.updates.promoted)
        ids = np.unique(np.concatenate([part.ravel() for part in parts]))  # tokens by their place in it

        def places(tokens: Shaped[np.ndarray, ...]) -> Shaped[np.ndarray, ...]:
            return np.searchsorted(ids, tokens)

        updates = None
        if self.updates is not None:
            static = self.updates.static
            largest = np.abs(static).max(1, initial=0)
            steps = static / np.where(largest > 0, largest, 1)[:, None] * _STEPS
            updates = packed_fields(
                self.updates, promoted=places(self.updates.promoted), step=largest / _STEPS,
                static=steps.round().astype(np.int16),
            )  # fmt: skip
        data = {
            "prompt": self.prompt,
            "layers": list(map(int, self.layers)),
            "texts": [self.texts[int(token)] for token in ids],
            "ids": packed(ids),
            "tokens": packed(places(self.tokens)),
            "followed": packed(places(self.followed)),
            "pinned": places(np.asarray(self.pinned, dtype=np.int64)).tolist(),
            "lenses": [
                {"name": name, **packed_fields(cells, ids=places(cells.ids))}
                for name, cells in lenses.items()
            ],
            "compared": [*lenses].index(next(iter(modified))) if modified else -1,
            "updates": updates,
        }
        return assemble(
            "trajectory.html", "trajectory.js", data=data,
            title=f"{self.prompt} · {self.model}{', modified' if self.changes or modified else ''}",
            model=printable(self.model), notes=list(map(printable, self.notes)),
            changes=printable(self.changes), modification=printable(self.modification),
        )  # fmt: skip

    def save(self, path: str | Path) -> Path:
        """Write the page to a ``.html`` or ``.htm`` file; an existing one is replaced."""
        path = Path(path)
        if path.suffix.lower() not in (".html", ".htm"):
            raise InputError(f"The file's name must end in .html or .htm, got {path.name}.")
        write_files({path: self.to_html()})
        return path

    def _repr_html_(self) -> str:
        """The page in a sandboxed frame, for notebooks."""
        return (
            f'<iframe sandbox="allow-scripts" width="100%" height="{_FRAME_HEIGHT}" style="border:0" '
            f'title="matlens" srcdoc="{escape(self.to_html())}"></iframe>'
        )
