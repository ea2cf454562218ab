"""Pruned models: choose and remove blocks, fold maps, and build a plain model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from matlens.data.examples import Examples
from matlens.data.overlap import fitted_on
from matlens.data.readers import check_decoder, check_own_tokens
from matlens.errors import Between, InputError, NonNegative, Seed, checked, short
from matlens.models.checkpoints import naming
from matlens.models.hooks import describe_hooks
from matlens.models.identity import Provenance
from matlens.pruning.choosing import (
    CHOSEN_ON,
    ROWS_A_COLUMN,
    Choice,
    choose_attention,
    choose_span,
    greedy_order,
    parse_blocks,
    spans_of,
)
from matlens.pruning.folding import (
    PENALTIES,
    Healed,
    Matrix,
    Method,
    check_foldable,
    check_foldable_attention,
    fold_attention,
    fold_block,
    fold_spans,
)
from matlens.pruning.folding import heal as train_folded
from matlens.pruning.layouts import (
    Layout,
    Streams,
    differ,
    full_block,
    full_windows,
    silence,
)

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@dataclass(frozen=True)
class Pruned:
    """A plain Hugging Face model with blocks removed, and how it was made.

    Attributes
    ----------
    model
        A model of transformers' own, to be run, saved or trained like any other.
    blocks
        Indices of the removed blocks, in the original model.
    provenance
        The original model, the calibration text, and the settings.
    attention
        Indices of the blocks without attention.
    """

    model: Any
    tokenizer: Any
    blocks: tuple[int, ...]
    method: Method
    provenance: Provenance
    attention: tuple[int, ...] = ()

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Runs of removed blocks, each as its first block and the one after its last."""
        return spans_of(self.blocks)


@checked
def prune(
    model: TransformerBridge,
    windows: Examples,
    blocks: int | Sequence[int],
    *,
    method: Method = "chain",
    choice: Choice = "greedy",
    penalty: NonNegative | None = None,
    heal: Annotated[int, Between(0, 10**9)] = 0,
    seed: Seed = 0,
    progress: bool = True,
) -> Pruned:
    """Remove blocks from a model and fold maps into the weights before them.

    With several spans, each map is fitted on the model pruned so far.

    Parameters
    ----------
    model
        A decoder like GPT-2, Llama, GPT-NeoX or GPT-J, without norms after FFNs.
        ``out`` removes blocks of others too, such as mixtures of experts.
    windows
        Calibration text, see `matlens.data.make_windows`; windows shorter than the first are not
        read. A refitted matrix needs several times as many tokens as it has columns.
    blocks
        The number of blocks to remove, or their indices, at least 1: a map needs a block before it.
    method
        What replaces the output matrix ``W`` of the FFN before a span. ``out``: nothing (ShortGPT).
        ``magnitude``: each channel of ``m = W x`` is scaled to the mean absolute value of the target; unlike
        LinearPatch, which scales the whole stream. ``replaceme``: ``T W``, with the least-squares map ``T``
        of ``m`` to the target (ReplaceMe). ``refit``: least squares from ``x`` to the target, with a penalty
        towards ``W``. ``chain``: ``refit``, also for the FFN of every later block, whose target is the
        original model's own stream; so later blocks correct the remaining error.
    choice
        How blocks are chosen if only their number is given, on the first 2,048 tokens of the calibration
        text. ``greedy``: one at a time by lazy greedy, each with the smallest loss increase of the blocks
        tried; a block is skipped if its last known loss, with fewer removed, is not below the smallest.
        ``loss``, ``angle``, ``r2``: the span with the smallest loss increase, with the smallest mean angle
        between ``h^i`` and ``h^{i+n}``, or with the most linear map between them, without attention sinks
        (on at least ``4 d_model`` tokens).
    penalty
        Penalty of the folded map towards the original; by default 0.3 for ``chain``, 0.1 for ``refit`` and 0
        otherwise.
    heal
        Minimum tokens of the text on which the changed matrices are trained towards the original model's
        predictions, in updates of about 1,024. Takes about five times as long as a forward pass.
    seed
        Seed of the order of texts in healing.
    """
    requested = parse_blocks(blocks, model.cfg.n_layers)
    if heal and (method == "out" or not requested):
        raise InputError("heal needs blocks to remove, and another method than out.")
    calibration = Calibration.run(model, windows, method, progress=progress)
    removed = requested
    if isinstance(removed, int):
        removed = calibration.choose(removed, choice, progress=progress)
    made = calibration.without(removed, method, penalty, progress=progress)
    details: dict[str, Any] = {
        "removed_blocks": list(removed), "method": method, "penalty": _penalty(method, penalty),
        "n_tokens": calibration.streams.tokens.numel(),
        "choice": choice if isinstance(requested, int) else "given",
    }  # fmt: skip
    if heal:
        healed = calibration.heal(made, removed, method, heal, seed=seed, progress=progress)
        details["healed"] = {**healed._asdict(), "seed": seed}
    if method != "out" or details["choice"] != "given":  # else the text decides nothing
        details |= fitted_on(windows)
    return Pruned(made, model.tokenizer, removed, method, calibration.provenance.with_details(**details))


@checked
def prune_attention(
    model: TransformerBridge,
    windows: Examples,
    attention: int | Sequence[int],
    *,
    method: Literal["out", "magnitude", "replaceme", "refit"] = "refit",
    penalty: NonNegative | None = None,
    progress: bool = True,
) -> Pruned:
    """Remove the attention of some blocks, and fold a map in its place into the FFN before it.

    Its output matrix becomes zero. A plain model still computes and caches the attention, so time and memory
    are saved only by an engine that skips it.

    Parameters
    ----------
    model, windows, method, penalty
        See `prune`; there is no ``chain``. Maps can be folded if the FFN reads the stream after attention,
        as in GPT-2 and Llama.
    attention
        Their number (those whose removal alone increases the loss on the first 2,048 tokens least), or the
        indices of the blocks, from 1 on.
    """
    requested = parse_blocks(attention, model.cfg.n_layers, "attentions")
    penalty = _penalty(method, penalty)
    calibration = Calibration.run(model, windows, method, progress=progress)
    streams, layers = calibration.streams, requested
    calibration._check_enough(method)
    if method != "out":
        check_foldable_attention(calibration.layout)
    if isinstance(layers, int):
        layers = choose_attention(streams.beginning(CHOSEN_ON), layers, progress=progress)
    matrices = fold_attention(streams, layers, method, penalty, progress=progress)
    made = build(calibration.layout, (), matrices)
    layout = replace(calibration.layout, model=made)
    for layer in layers:
        silence(layout.attention_of(layout.blocks[layer]))
    provenance = calibration.provenance.with_details(
        removed_attention=list(layers), method=method, penalty=penalty,
        n_tokens=streams.tokens.numel(), choice="loss" if isinstance(requested, int) else "given",
        **({} if method == "out" and layers is requested else fitted_on(windows)),
    )  # fmt: skip
    return Pruned(made, model.tokenizer, (), method, provenance, layers)


def _penalty(method: Method, penalty: float | None) -> float:
    return PENALTIES.get(method, 0.0) if penalty is None else penalty


@checked
@dataclass(frozen=True)
class Calibration:
    """A plain model and its streams on calibration text, for several ways of pruning it."""

    layout: Layout
    streams: Streams
    provenance: Provenance
    _order: list[int] = field(default_factory=list)  # in the order of greedy removal

    @classmethod
    def run(
        cls, model: TransformerBridge, windows: Examples, method: Method = "out", *, progress: bool = True
    ) -> Calibration:
        """Read the text; maps of any method but ``out`` must be foldable into the model."""
        check_decoder(model, "cannot be pruned")
        provenance = Provenance.from_model(model, data=windows.provenance)
        if provenance.active_hooks:
            raise InputError(
                f"The model must have no active hooks, got {describe_hooks(provenance.active_hooks)}. Prune "
                "it outside the context."
            )
        check_own_tokens(model, windows)
        layout = Layout.from_model(model)
        if method != "out":
            check_foldable(layout)
        streams = Streams(layout, full_windows(windows), progress=progress)
        return cls(layout, streams, provenance)

    def choose(self, n: int, choice: Choice = "greedy", *, progress: bool = True) -> tuple[int, ...]:
        """Choose ``n`` blocks to remove, on the beginning of the text."""
        n_tokens = CHOSEN_ON
        if choice == "r2":
            n_tokens = max(n_tokens, ROWS_A_COLUMN * self.streams.h[0].shape[-1])
        beginning = self.streams.beginning(n_tokens)
        if choice != "greedy":
            return choose_span(beginning, n, choice, progress=progress)
        if n > len(self._order):
            self._order[:] = greedy_order(beginning, n, progress=progress)
        return tuple(sorted(self._order[:n]))

    def without(
        self, blocks: Sequence[int], method: Method, penalty: float | None = None, *, progress: bool = True
    ) -> Any:
        """A plain model without these blocks, with maps folded by a method."""
        self._check_enough(method)
        penalty = _penalty(method, penalty)
        matrices = fold_spans(self.streams, blocks, method, penalty, progress=progress)
        return build(self.layout, blocks, matrices)

    def fold_block(self, index: int, block: nn.Module, h: Tensor, target: Tensor, method: Method) -> Matrix:
        """The output matrix of a changed copy of a block that reads ``h``, by a method's default penalty."""
        return fold_block(self.streams, index, block, h, target, method, _penalty(method, None))

    def heal(
        self, pruned: Any, blocks: Sequence[int], method: Method, n_tokens: int, *,
        seed: Seed = 0, progress: bool = True,
    ) -> Healed:  # fmt: skip
        """Train the matrices that `without` has changed, in place, towards the original's predictions."""
        return train_folded(self.streams, pruned, blocks, method, n_tokens, seed=seed, progress=progress)

    def _check_enough(self, method: Method) -> None:
        """Refuse fewer tokens than a fit has columns."""
        if method == "out":
            return
        d_model, d_mlp = self.layout.weight_of(self.layout.blocks[0]).shape
        columns, n_tokens = d_mlp if method in PENALTIES else d_model, self.streams.tokens.numel()
        if n_tokens < columns:
            raise InputError(
                f"The calibration text must have at least {columns} tokens in full windows for {method}, "
                f"got {n_tokens}. Use ten times as many, or another method: 'out' needs none."
            )


@torch.inference_mode(False)  # its weights can be trained
def build(layout: Layout, blocks: Iterable[int], matrices: dict[int, Matrix]) -> Any:
    """A new plain model without some blocks, with replaced matrices in others."""
    original, removed = layout.model, set(blocks)
    remaining = [index for index in range(len(layout.blocks)) if index not in removed]
    config = cut_config(original.config, remaining)
    problem = f"{type(original).__name__} must run without the blocks {sorted(removed)}, and does not."
    with naming(problem), torch.random.fork_rng(devices=[]):
        pruned = type(original)(config).to(original.device, original.dtype)
    names = {f"{layout.path}.{index}.": f"{layout.path}.{place}." for place, index in enumerate(remaining)}
    lost = tuple(f"{layout.path}.{index}." for index in removed)

    def of_pruned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stay = ((name, tensor) for name, tensor in tensors.items() if not name.startswith(lost))
        return {
            next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name):
            tensor for name, tensor in stay
        }  # fmt: skip

    state = of_pruned(original.state_dict())
    shapes = {name: tensor.shape for name, tensor in pruned.state_dict().items()}
    if shapes != {name: tensor.shape for name, tensor in state.items()}:
        raise _of_its_place(original)
    pruned.load_state_dict(state)
    pruned.tie_weights()
    # Rotary frequencies are not weights, and stay in float32 in half precision.
    for name, buffer in of_pruned(dict(original.named_buffers())).items():
        place, _, last = name.rpartition(".")
        module = pruned.get_submodule(place)
        if last in module._buffers:  # rotary frequencies of a kind of block that has gone are not there
            module._buffers[last] = buffer.to(module.get_buffer(last).device, copy=True)
    pruned_layout = replace(layout, model=pruned.eval())
    with naming(problem):
        _check_moved_alike(layout, pruned_layout, remaining)
    for index, matrix in matrices.items():
        pruned_layout.write(pruned_layout.blocks[remaining.index(index)], matrix.weight, matrix.bias)
    pruned.generation_config = copy.deepcopy(original.generation_config)
    return pruned


def _check_moved_alike(original: Layout, pruned: Layout, remaining: Sequence[int]) -> None:
    """Check on a few tokens that blocks compute the same at their new index."""
    moved = [(place, index) for place, index in enumerate(remaining) if place != index]
    before, after = Streams.tried(original), Streams.tried(pruned)
    for place, index in moved:
        h = before.h[index]
        expected = before.after(index, full_block(original.blocks[index]), h.clone())
        given = after.after(place, full_block(pruned.blocks[place]), h.clone())
        if differ(given, expected, expected):
            raise _of_its_place(original.model, f"block {index} gives something else as block {place}")


def _of_its_place(model: Any, how: str = "blocks differ in their shapes") -> InputError:
    return InputError(
        f"A block of {type(model).__name__} depends on its place: {how}, as with GPT-2's "
        "scale_attn_by_inverse_layer_idx. So none before it can be removed."
    )


_PER_LAYER = (  # settings of transformers with one entry per block
    "layer_types", "mlp_layer_types", "layers_block_type", "block_types", "attention_layers",
    "no_rope_layers", "layer_rope_theta", "kv_sharing_modes", "indexer_types", "sliding_windows",
    "swiglu_limits", "swiglu_limits_shared", "activation_sparsity_pattern", "num_attention_heads_per_layer",
    "num_key_value_heads_per_layer", "intermediate_size", "attention_window",
)  # fmt: skip
_FIRST = ("first_k_dense_replace", "num_dense_layers")  # how many blocks at the start are of another kind
_LAST = ("num_kv_shared_layers",)  # and at the end


def cut_config(config: Any, remaining: Sequence[int]) -> Any:
    """A configuration for the remaining blocks, in which each is what it was."""
    cut = copy.deepcopy(config)
    text = cut.get_text_config()
    n_layers = text.num_hidden_layers
    settings: dict[str, Any] = {}
    for key in _PER_LAYER:
        value = getattr(text, key, None)
        if key == "block_types" and value:  # of RecurrentGemma, repeated for all blocks
            value = (list(value) * n_layers)[:n_layers]
        if isinstance(value, list | tuple) and len(value) == n_layers:
            settings[key] = [value[index] for index in remaining]
    counts = {key: getattr(text, key, None) for key in (*_FIRST, *_LAST)}
    for key, count in counts.items():
        if type(count) is int:
            start = 0 if key in _FIRST else n_layers - count
            settings[key] = sum(start <= index < start + count for index in remaining)
    text.num_hidden_layers = len(remaining)
    for key, value in settings.items():
        # What transformers derives from other settings is compared below.
        if not isinstance(getattr(type(text), text.attribute_map.get(key, key), None), property):
            setattr(text, key, value)
    if "attention_layers" in settings and hasattr(text, "attention_types"):
        text.attention_types = [[settings["attention_layers"], 1]]  # GPT-Neo's files hold these alone
    try:
        again = type(cut).from_dict(cut.to_dict()).get_text_config()
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise InputError(
            f"The configuration of {type(cut).__name__} without some blocks is not valid: {short(error)}."
        ) from error
    lost = [
        key
        for key, value in settings.items()
        if (list(saved) if isinstance(saved := getattr(again, key), list | tuple) else saved) != value
    ]
    if lost:
        raise InputError(
            f"The blocks to remove must leave a configuration that {type(cut).__name__} can express, got one "
            f"whose {', '.join(lost)} would change. Choose other blocks to remove."
        )
    return cut
