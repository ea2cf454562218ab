"""The job: choose blocks, leave them out, fold maps in their place, and build a plain model of the rest."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from matlens.arguments import require_choice, require_number
from matlens.corpora.examples import Examples, is_masked, require_own_tokens
from matlens.errors import InputError
from matlens.models.changes import describe_changes
from matlens.models.identity import ModelIdentity, Provenance
from matlens.progress import Bar
from matlens.pruning.choices import Choice, Method
from matlens.pruning.folding import Matrix, fold
from matlens.pruning.layouts import Layout, plain_copy
from matlens.pruning.spans import choose_blocks, read_blocks, spans_of
from matlens.pruning.streams import Streams, require_foldable
from matlens.signatures import checked

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

CHOSEN_ON = 2048  # tokens of the calibration text, since every candidate is a pass over them
PENALTY = 0.1  # of the refitted matrix, which has more numbers than calibration text can settle


@dataclass(frozen=True)
class Pruned:
    """A plain Hugging Face model with blocks left out, and how it was made.

    Attributes
    ----------
    model
        A model of transformers' own, to be run, saved or trained like any other.
    tokenizer
        The tokenizer of the whole model.
    blocks
        Numbers, in the whole model, of the blocks that were left out.
    method
        What became of the matrix before each span of them.
    provenance
        The whole model, the calibration text, and the settings.
    """

    model: Any
    tokenizer: Any
    blocks: tuple[int, ...]
    method: Method
    provenance: Provenance

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Runs of blocks that were left out, each as its first block and the one after its last."""
        return spans_of(self.blocks)


@checked
def prune(
    model: TransformerBridge,
    windows: Examples,
    blocks: int | Sequence[int],
    *,
    method: str = Method.refit,
    choice: str = Choice.greedy,
    penalty: float | None = None,
    progress: bool = True,
) -> Pruned:
    """Leave blocks out of a model and fold maps into the weights before them (definitions, section 11).

    Of several spans each map is fitted on the stream of the model that is pruned so far.

    Parameters
    ----------
    model
        A decoder whose FFNs write into the stream as it is: the kinds of GPT-2, Llama, GPT-NeoX and GPT-J.
    windows
        Calibration text, see `matlens.corpora.make_windows`; windows that are shorter than the first are not
        read. A refitted matrix needs several times as many tokens as it has columns.
    blocks
        How many blocks to leave out, or which: numbers from 1 on, since the map needs a block before it.
    method
        What becomes of the matrix before a span: ``refit``, ``replaceme``, ``magnitude`` or ``out``, see
        `Method`.
    choice
        How blocks are chosen of which only the number is given: ``greedy``, ``loss`` or ``angle``, see
        `Choice`; on the first 2,048 tokens of the calibration text.
    penalty
        How much the folded map is held near what the model has; by default 0.1 for ``refit`` and 0 otherwise.
    progress
        Whether to show bars.

    Raises
    ------
    InputError
        The model cannot be folded into, and the message says why; or blocks, text or settings are not usable.
    """
    method = Method(require_choice(method, Method, "method"))
    choice = Choice(require_choice(choice, Choice, "choice"))
    if penalty is None:
        penalty = PENALTY if method == Method.refit else 0.0
    penalty = require_number(penalty, "penalty", least=0)
    if is_masked(model):
        raise InputError(
            f"{model.cfg.architecture} predicts masked tokens, not the next one. Expected a decoder to prune."
        )
    identity = ModelIdentity.from_model(model)
    if identity.changes:
        raise InputError(
            f"The model runs with {describe_changes(identity.changes)}, which its weights do not hold. "
            "Expected a model without changes: prune it outside of the context, or without the hooks."
        )
    require_own_tokens(model, windows)
    given = None if isinstance(blocks, int) else read_blocks(blocks, model.cfg.n_layers)
    layout = Layout.from_model(plain_copy(model))
    if method != Method.out:
        require_foldable(layout)
    tokens = whole_windows(windows)
    streams = Streams(layout, tokens, progress=progress)
    few = streams.beginning(CHOSEN_ON)
    gone = choose_blocks(few, blocks, choice, progress=progress) if isinstance(blocks, int) else given
    assert gone is not None
    if method == Method.refit:
        _require_enough(layout, tokens)
    matrices = fold_spans(streams, gone, method, penalty, progress=progress)
    details = {
        "blocks_left_out": list(gone), "method": method.value, "penalty": penalty,
        "choice": choice.value if isinstance(blocks, int) else "given", "n_tokens": tokens.numel(),
    }  # fmt: skip
    provenance = Provenance(identity, data=windows.provenance, details=details)
    return Pruned(build(layout, gone, matrices), model.tokenizer, gone, method, provenance)


def fold_spans(
    streams: Streams, blocks: Sequence[int], method: Method, penalty: float, *, progress: bool = True
) -> dict[int, Matrix]:
    """The matrix of the block before each span, by its number; maps are fitted one after another."""
    layout, matrices = streams.layout, dict[int, Matrix]()
    spans = spans_of(blocks)
    if method == Method.out or not spans:
        return matrices
    at = 0
    h = streams.h[0]
    with Bar(total=len(spans), desc="folding", unit="span", disable=not progress) as bar:
        for first, last in spans:
            h = streams.h[first - 1] if not matrices else _through(streams, h, at, first - 1)
            block = layout.blocks[first - 1]
            passed = streams.through(first - 1, block, h)
            rest = passed.h - passed.written
            bias = layout.writer_of(block).bias
            own = Matrix(layout.weight_of(block).detach(), None if bias is None else bias.detach())
            matrix = fold(
                method,
                own,
                passed.read.flatten(0, 1),
                (streams.h[last] - rest).flatten(0, 1),
                penalty=penalty,
            )
            matrices[first - 1] = matrix
            changed = copy.deepcopy(block)
            layout.write(changed, matrix.weight, matrix.bias)
            h, at = streams.after(first - 1, changed, h), last
            bar.update(1)
    return matrices


def _through(streams: Streams, h: Tensor, first: int, last: int) -> Tensor:
    """The stream before block ``last`` from that before block ``first``."""
    for index in range(first, last):
        h = streams.after(index, streams.layout.blocks[index], h)
    return h


def build(layout: Layout, blocks: Iterable[int], matrices: dict[int, Matrix]) -> Any:
    """A new plain model without some blocks, and with other matrices in some of those that stay."""
    whole, gone = layout.model, set(blocks)
    kept = [index for index in range(len(layout.blocks)) if index not in gone]
    config = cut_config(whole.config, kept)
    with torch.random.fork_rng(devices=[]):
        pruned = type(whole)(config).to(whole.dtype)
    names = {f"{layout.path}.{index}.": f"{layout.path}.{place}." for place, index in enumerate(kept)}
    lost = tuple(f"{layout.path}.{index}." for index in gone)
    state = {}
    for name, tensor in whole.state_dict().items():
        if name.startswith(lost):
            continue
        block = next((old for old in names if name.startswith(old)), None)
        state[name if block is None else names[block] + name.removeprefix(block)] = tensor
    pruned.load_state_dict(state)
    pruned.tie_weights()
    pruned_layout = replace(layout, model=pruned)
    for index, matrix in matrices.items():
        pruned_layout.write(pruned_layout.blocks[kept.index(index)], matrix.weight, matrix.bias)
    pruned.generation_config = copy.deepcopy(whole.generation_config)
    return pruned.eval()


def cut_config(config: Any, kept: Sequence[int]) -> Any:
    """A configuration of the blocks that stay: their number, and every list that has an entry a block."""
    cut = copy.deepcopy(config)
    n_layers = config.num_hidden_layers
    cut.num_hidden_layers = len(kept)
    for key, value in config.to_dict().items():
        if isinstance(value, list | tuple) and len(value) == n_layers:
            setattr(cut, key, [value[index] for index in kept])
    return cut


def whole_windows(windows: Examples) -> Int[Tensor, "n length"]:
    """The tokens of the windows that are as long as the first."""
    length = int(windows.lengths[0])
    parts = [
        torch.from_numpy(windows.tokens[start : start + length])
        for start, of_window in zip(windows.offsets[:-1].tolist(), windows.lengths.tolist(), strict=True)
        if of_window == length
    ]
    return torch.stack(parts).long()


def _require_enough(layout: Layout, tokens: Tensor) -> None:
    columns = layout.weight_of(layout.blocks[0]).shape[1]
    if tokens.numel() < columns:
        raise InputError(
            f"The calibration text has {tokens.numel()} tokens in whole windows, and a matrix of {columns} "
            f"columns is to be fitted. Expected {columns} at least, better ten times as many; "
            "method='replaceme' needs fewer."
        )
