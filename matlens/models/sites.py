"""Named places in a model where every token has a vector, and the hooks that carry them.

The residual stream is ``h.0 .. h.L``: ``h.0`` enters block 0 and ``h.l`` leaves block ``l-1``. Other kinds
count blocks. ``ffn_post`` has a coefficient for each of the ``d_mlp`` value vectors; other kinds are
``d_model`` wide. A TransformerLens hook with a vector per token is a site too: ``blocks.2.attn.hook_z``, or
``z.2``, with heads concatenated. Its meaning depends on the wiring of blocks. All hook names of matlens are
in this file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral

from matlens.errors import InputError, checked, short

STREAM, COEFFICIENTS = "h", "ffn_post"
FFN_OUT, NORMED_OUT = "ffn_out", "ln2_post_out"  # added to the residual stream, the second after a norm

_LONGEST = 200  # characters of a name
_HOOK = re.compile(r"(?:\w+\.)*hook_\w+")
_BLOCK_HOOK = re.compile(rf"blocks\.(-?[0-9]+)\.({_HOOK.pattern})")
# What the kind of a hook inside of blocks begins with; the layer takes the star's place.
_IN_BLOCK = "blocks.*."
_BEFORE, _AFTER = ("hook_in", "hook_resid_pre"), ("hook_out", "hook_resid_post")  # layers
# TransformerLens' short names, as its `get_act_name` reads them, where they are not kinds of ours.
_SHORT = {
    **{name: f"hook_{name}" for name in ("resid_pre", "resid_mid", "resid_post", "mlp_in", "mlp_out")},
    **{name: f"attn.hook_{name}" for name in ("q", "k", "v", "z", "rot_q", "rot_k", "result", "pattern")},
    "attn_scores": "attn.hook_attn_scores",
    **{name: f"mlp.hook_{name}" for name in ("pre", "post", "pre_linear")},
}


@checked
@dataclass(frozen=True, order=True)
class Site:
    """A site of a model: ``Site("h", 5)`` is the residual stream after five blocks.

    ``kind`` is ``"h"``, a sub-module's input or output (``"ln1_out"``), ``"mid"``, the stream between
    attention and FFN, or a hook with a star for the layer. ``layer`` is 0 for hooks outside of blocks.
    """

    kind: str
    layer: int

    @property
    def is_hook(self) -> bool:
        """Whether it is named by a hook of TransformerLens, and is none of this project's kinds."""
        return _HOOK.fullmatch(self.kind.removeprefix(_IN_BLOCK)) is not None

    def __str__(self) -> str:
        if self.is_hook:
            return self.kind.replace("*", str(self.layer))
        return f"{self.kind}.{self.layer}"

    @classmethod
    def parse(cls, text: str | int | Site, n_layers: int | None = None) -> Site:
        """Parse ``"attn_out.3"``, a hook name, or an integer (a layer of the residual stream).

        With the number of blocks, negative layers count from the end and layers out of range are refused;
        without it, negative layers stay negative.
        """
        site = cls._as_written(text)
        if n_layers is None:
            return site._of_stream()
        count = 1 if site.is_hook and "*" not in site.kind else n_layers + (site.kind == STREAM)
        if not -count <= site.layer < count:
            raise InputError(
                f"Layer {short(site.layer)} of site {site.kind!r} is out of range: "
                f"this model has {cls(site.kind, 0)} to {cls(site.kind, count - 1)}."
            )
        return (site if site.layer >= 0 else cls(site.kind, site.layer % count))._of_stream()

    @classmethod
    def _as_written(cls, text: str | int | Site) -> Site:
        """The parsed site, with hooks of the residual stream not yet converted to layers."""
        if isinstance(text, Site):
            return cls._as_written(str(text))
        if isinstance(text, Integral) and not isinstance(text, bool):
            return cls(STREAM, int(text))
        written = text if isinstance(text, str) and len(text) <= _LONGEST else ""
        if block := _BLOCK_HOOK.fullmatch(written):
            return cls(_IN_BLOCK + block[2], int(block[1]))
        if _HOOK.fullmatch(written):
            return cls(written, 0)
        parts = re.fullmatch(r"(?:(\w+)\.)?(-?[0-9]+)", written)
        if parts is None:
            raise InputError(
                f"{short(text)} is not a site. Expected kind.layer, such as 'h.12' or 'attn_out.3', the name "
                "of a hook, such as 'blocks.3.attn.hook_z', or the bare number of a stream layer."
            )
        hook = _SHORT.get((parts[1] or "").removeprefix("hook_"))
        return cls(parts[1] or STREAM if hook is None else _IN_BLOCK + hook, int(parts[2]))

    def _of_stream(self) -> Site:
        """The layer of a residual-stream hook; other sites unchanged."""
        name = self.kind.removeprefix(_IN_BLOCK)
        if name == self.kind or name not in (*_BEFORE, *_AFTER):
            return self
        # From the end there is one layer more than there are blocks.
        after = name in _AFTER
        return Site(STREAM, self.layer + after if self.layer >= 0 else self.layer - (not after))


@dataclass(frozen=True)
class Wiring:
    """Which hook of a block carries which kind, and which sums hold, such as ``"mid = h + attn_out"``.

    ``h`` is the stream before the block, ``next`` after it. Sums with a missing site are skipped, except
    for ``next``.
    """

    name: str
    hooks: Mapping[str, str]
    equations: str

    @property
    def sums(self) -> list[tuple[str, list[str]]]:
        """Each total with its parts."""
        sides = (equation.split(" = ") for equation in self.equations.split(", ") if equation)
        return [(total, parts.split(" + ")) for total, parts in sides]


MID, MID_HOOK = "mid", "hook_resid_mid"  # what TransformerLens calls a hook that is also the input of a norm
MIXTURE_HOOK = "mlp.hook_coefficients"  # of mixtures of experts, see `matlens.models.families.mixtures`
MID_CROSS = "mid_cross"  # between self-attention and cross-attention
ROTATED_HOOKS = ("hook_rot_q", "hook_rot_k")  # queries and keys after their rotation
STREAM_HOOKS = {"h": "hook_in", "next": "hook_out"}


def _ends(*modules: str, **renamed: str) -> dict[str, str]:
    """Input and output of sub-modules, whose kinds may have other names."""
    named = dict(zip(modules, modules, strict=True)) | renamed
    return {f"{kind}_{side}": f"{name}.hook_{side}" for kind, name in named.items() for side in ("in", "out")}


_POST = "ln1_post", "ln2_post"
_SUBMODULES = _ends("attn", ffn="mlp") | {"ffn_post": "mlp.out.hook_in"}

PRE_NORM = Wiring(
    "pre-norm",
    _ends("ln1", "ln2") | _SUBMODULES | {MID: "ln2.hook_in"},
    "ln1_in = h, attn_in = ln1_out, mid = h + attn_out, ffn_in = ln2_out, next = mid + ffn_out",
)
# Each output is multiplied by one number before it is added; these hooks carry it multiplied.
SCALED = Wiring(
    "scaled",
    {**PRE_NORM.hooks, "attn_out": "hook_attn_out", "ffn_out": "hook_mlp_out"},
    PRE_NORM.equations,
)
EXTRA_NORM = Wiring(
    "extra-norm",
    _ends("ln1", "ln2", *_POST) | _SUBMODULES | {MID: "ln2.hook_in"},
    "ln1_in = h, attn_in = ln1_out, ln1_post_in = attn_out, mid = h + ln1_post_out, "
    "ffn_in = ln2_out, ln2_post_in = ffn_out, next = mid + ln2_post_out",
)
OUTPUT_NORM = Wiring(
    "output-norm",
    _ends(*_POST) | _SUBMODULES | {MID: "mlp.hook_in"},
    "attn_in = h, ln1_post_in = attn_out, mid = h + ln1_post_out, "
    "ffn_in = mid, ln2_post_in = ffn_out, next = mid + ln2_post_out",
)
POST_NORM = Wiring(
    "post-norm",
    {
        **_ends("ln1", "ln2"),
        "attn_in": "attn.hook_in",
        "attn_out": "attn.o.hook_out",
        MID: "ln1.hook_out",
        "ffn_in": "mlp.in.hook_in",
        "ffn_out": "mlp.out.hook_out",
        "ffn_post": "mlp.out.hook_in",
    },
    "attn_in = h, ln1_in = h + attn_out, ffn_in = ln1_out, ln2_in = mid + ffn_out, next = ln2_out",
)
PARALLEL = Wiring(
    "parallel",
    _ends("ln1", "ln2") | _SUBMODULES,
    "ln1_in = h, ln2_in = h, attn_in = ln1_out, next = h + attn_out + ffn_out",
)
# The decoder of an encoder-decoder: attention, attention to the encoder's last layer, FFN. Here ``ln2`` and
# ``mid`` stand before the FFN as everywhere; what stands before the attention to the encoder is named by it.
CROSS = Wiring(
    "cross-attention",
    _ends("ln1", ln2="ln3", ln_cross="ln2", attn="self_attn", cross="cross_attn", ffn="mlp")
    | {"ffn_post": "mlp.out.hook_in", MID_CROSS: "ln2.hook_in", MID: "ln3.hook_in"},
    "ln1_in = h, attn_in = ln1_out, mid_cross = h + attn_out, cross_in = ln_cross_out, "
    "mid = mid_cross + cross_out, ffn_in = ln2_out, next = mid + ffn_out",
)
STREAM_ONLY = Wiring("stream-only", {}, "")  # holds for all models
WIRINGS = (PRE_NORM, SCALED, EXTRA_NORM, OUTPUT_NORM, POST_NORM, PARALLEL, CROSS, STREAM_ONLY)


def stack_hooks(stack: str) -> dict[str, str]:
    """Prefixes of the hooks of a stack, in the full model and in the selected stack."""
    return {f"{stack}_blocks.": "blocks.", f"{stack}_ln_final.": "ln_final."}


def block_hook(layer: int, name: str) -> str:
    """Name of a hook inside a block."""
    return f"blocks.{layer}.{name}"
