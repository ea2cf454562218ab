"""A model on calibration text, and the plain models that are made of it by leaving blocks out."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from matlens.data.examples import Examples
from matlens.data.readers import check_own_tokens, is_masked
from matlens.errors import InputError, short
from matlens.models.changes import describe_changes
from matlens.models.identity import ModelIdentity
from matlens.pruning.attention import (
    check_foldable_attention,
    choose_attention,
    fold_attention,
    silence,
)
from matlens.pruning.choices import Choice, Method, usual_penalty
from matlens.pruning.folding import REFITTED, Matrix, fold_spans
from matlens.pruning.layouts import Layout, plain_copy
from matlens.pruning.spans import choose_span, greedy_order
from matlens.pruning.streams import (
    TOLERANCE,
    Streams,
    check_foldable,
    full_block,
    tried_streams,
    whole_windows,
)

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

CHOSEN_ON = (
    2048  # tokens of the calibration text, since every candidate is a pass over them; 1,024 choose worse
)
ROWS_A_COLUMN = 4  # where maps are fitted to choose by, at least


@dataclass(frozen=True)
class Calibration:
    """A plain model, and what its blocks read and write on calibration text.

    Attributes
    ----------
    layout
        The whole model.
    streams
        Its streams on the text.
    """

    layout: Layout
    streams: Streams
    _order: list[int] = field(default_factory=list)  # blocks as they go one after the other

    @classmethod
    def run(cls, model: TransformerBridge, windows: Examples, *, fold: bool, progress: bool) -> Calibration:
        """Read the text; ``fold`` says whether maps are to be folded into the model."""
        if is_masked(model):
            raise InputError(
                f"{model.cfg.architecture} predicts masked tokens, not the next one. Expected a decoder."
            )
        if not hasattr(model, "unembed"):
            raise InputError(
                f"{model.cfg.architecture} has no head that predicts the next token. Expected a "
                "...ForCausalLM checkpoint."
            )
        changes = ModelIdentity.from_model(model).changes
        if changes:
            raise InputError(
                f"The model runs with {describe_changes(changes)}, which its weights do not hold. Expected a "
                "model without changes: prune it outside of the context, or without the hooks."
            )
        check_own_tokens(model, windows)
        layout = Layout.from_model(plain_copy(model))
        if fold:
            check_foldable(layout)
        return cls(layout, Streams(layout, whole_windows(windows), progress=progress))

    def choose(self, n: int, choice: Choice, *, progress: bool = True) -> tuple[int, ...]:
        """Choose ``n`` blocks to leave out, on the beginning of the text."""
        n_tokens = CHOSEN_ON
        if choice == Choice.r2:
            n_tokens = max(n_tokens, ROWS_A_COLUMN * self.streams.h[0].shape[-1])
        beginning = self.streams.beginning(n_tokens)
        if choice != Choice.greedy:
            return choose_span(beginning, n, choice, progress=progress)
        if n > len(self._order):
            self._order[:] = greedy_order(beginning, n, progress=progress)
        return tuple(sorted(self._order[:n]))

    def without_attention(
        self, wanted: int | tuple[int, ...], method: Method, penalty: float, *, progress: bool = True
    ) -> tuple[Any, tuple[int, ...]]:
        """A plain model in which the attention of some blocks writes nothing, and which these are."""
        _check_enough(self.layout, self.streams.tokens, method)
        if method != Method.out:
            check_foldable_attention(self.layout)
        layers = wanted
        if isinstance(layers, int):
            layers = choose_attention(self.streams.beginning(CHOSEN_ON), layers, progress=progress)
        matrices = fold_attention(self.streams, layers, method, penalty, progress=progress)
        pruned = build(self.layout, (), matrices)
        blocks = replace(self.layout, model=pruned).blocks
        for layer in layers:
            silence(blocks[layer])
        return pruned, layers

    def without(
        self, blocks: Sequence[int], method: Method, penalty: float | None = None, *, progress: bool = True
    ) -> Any:
        """A plain model without these blocks, with maps in their place by a method."""
        _check_enough(self.layout, self.streams.tokens, method)
        penalty = usual_penalty(method) if penalty is None else penalty
        return build(
            self.layout, blocks, fold_spans(self.streams, blocks, method, penalty, progress=progress)
        )


def build(layout: Layout, blocks: Iterable[int], matrices: dict[int, Matrix]) -> Any:
    """A new plain model without some blocks, and with other matrices in some of those that stay."""
    whole, gone = layout.model, set(blocks)
    kept = [index for index in range(len(layout.blocks)) if index not in gone]
    config = cut_config(whole.config, kept)
    with torch.random.fork_rng(devices=[]):
        pruned = type(whole)(config).to(whole.device, whole.dtype)
    names = {f"{layout.path}.{index}.": f"{layout.path}.{place}." for place, index in enumerate(kept)}
    lost = tuple(f"{layout.path}.{index}." for index in gone)

    def of_pruned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stay = ((name, tensor) for name, tensor in tensors.items() if not name.startswith(lost))
        return {
            next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name):
            tensor for name, tensor in stay
        }  # fmt: skip

    state = of_pruned(whole.state_dict())
    shapes = {name: tensor.shape for name, tensor in pruned.state_dict().items()}
    if shapes != {name: tensor.shape for name, tensor in state.items()}:
        raise _of_its_place(whole)
    pruned.load_state_dict(state)
    pruned.tie_weights()
    # Frequencies of positions are no weights, and stay in float32 where these are in half precision.
    for name, buffer in of_pruned(dict(whole.named_buffers())).items():
        place, _, last = name.rpartition(".")
        module = pruned.get_submodule(place)
        module._buffers[last] = buffer.to(module.get_buffer(last).device, copy=True)
    pruned_layout = replace(layout, model=pruned.eval())
    _check_moved_alike(layout, pruned_layout, kept)
    for index, matrix in matrices.items():
        pruned_layout.write(pruned_layout.blocks[kept.index(index)], matrix.weight, matrix.bias)
    pruned.generation_config = copy.deepcopy(whole.generation_config)
    return pruned


def _check_moved_alike(whole: Layout, pruned: Layout, kept: Sequence[int]) -> None:
    """Refuse blocks that do something else in their new place, tried on a few tokens, in float32 at least."""
    moved = [(place, index) for place, index in enumerate(kept) if place != index]
    if not moved:
        return
    before, after = tried_streams(whole), tried_streams(pruned)
    for place, index in moved:
        h = before.h[index]
        expected = before.after(index, full_block(whole.blocks[index]), h.clone())
        given = after.after(place, full_block(pruned.blocks[place]), h.clone())
        if not bool((given - expected).abs().max() <= TOLERANCE * expected.abs().max()):
            raise _of_its_place(whole.model, f"block {index} gives something else as block {place}")


def _of_its_place(model: Any, how: str = "blocks differ in their shapes") -> InputError:
    return InputError(
        f"A block of {type(model).__name__} depends on its place: {how}, as where GPT-2's "
        "scale_attn_by_inverse_layer_idx is set, or a setting that counts them. So none before it can be "
        "left out. Expected a model whose blocks do the same wherever they stand, or blocks at the end alone."
    )


PER_LAYER = (
    "layer_types", "mlp_layer_types", "layers_block_type", "attention_layers", "no_rope_layers",
    "layer_rope_theta", "kv_sharing_modes", "indexer_types", "sliding_windows", "swiglu_limits",
    "swiglu_limits_shared", "activation_sparsity_pattern", "num_attention_heads_per_layer",
    "num_key_value_heads_per_layer", "intermediate_size", "attention_window",
)  # fmt: skip
"""Settings of transformers that hold an entry a block, where they are lists."""


def cut_config(config: Any, kept: Sequence[int]) -> Any:
    """A configuration of the blocks that stay: their number, and every setting with an entry per block."""
    cut = copy.deepcopy(config)
    text = cut.get_text_config()
    lists = {
        key: [value[index] for index in kept]
        for key in PER_LAYER
        if isinstance(value := getattr(text, key, None), list | tuple)
        and len(value) == text.num_hidden_layers
        and not isinstance(getattr(type(text), key, None), property)
    }
    text.num_hidden_layers = len(kept)
    for key, value in lists.items():
        setattr(text, key, value)
    if "attention_layers" in lists and hasattr(text, "attention_types"):
        text.attention_types = [[lists["attention_layers"], 1]]  # GPT-Neo's files hold these alone
    try:
        again = type(cut).from_dict(cut.to_dict()).get_text_config()
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise InputError(
            f"The configuration of {type(cut).__name__} without some blocks is not valid: {short(error)}. "
            "Expected a model whose settings an entry a block are known."
        ) from error
    if any(list(getattr(again, key)) != value for key, value in lists.items()):
        raise InputError(
            f"The settings {', '.join(lists)} of {type(cut).__name__} would be others in a file. Expected a "
            "model that keeps its settings an entry a block."
        )
    return cut


def _check_enough(layout: Layout, tokens: Tensor, method: Method) -> None:
    if method == Method.out:
        return
    rows, columns = layout.weight_of(layout.blocks[0]).shape
    if method in REFITTED:
        least, what, other = columns, f"a matrix of {columns} columns", "'replaceme' needs fewer"
    else:
        least, what, other = rows, f"a map of {rows} coordinates", "'out' needs none"
    if tokens.numel() < least:
        raise InputError(
            f"The calibration text has {tokens.numel()} tokens in whole windows, and {what} is to be fitted. "
            f"Expected {least} at least, better ten times as many; method={other}."
        )
