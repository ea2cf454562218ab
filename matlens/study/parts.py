"""Both parts of a corpus collected: vectors, or of all positions the moments that fits need of them.

What exists is not collected again, and an interrupted run resumes. A study's folder holds ``train/`` and
``validation/`` (activations; of all positions ``moments/`` in the place of the first).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tqdm.auto import tqdm

from matlens.activations.activations import Activations, Positions
from matlens.activations.collecting import collect
from matlens.activations.stored_moments import StoredMoments
from matlens.activations.sums import check_shard, pairs_and_widths, stream_moments
from matlens.data.corpus import Corpus
from matlens.data.corpus_examples import make_examples
from matlens.data.examples import Examples
from matlens.data.readers import is_masked
from matlens.errors import InputError, PositiveInt, Seed, checked, printable
from matlens.linear.pairs import Pairs
from matlens.linear.samples import are_few
from matlens.study.output import MOMENTS, TRAIN, VALIDATION, has_moments
from matlens.study.plan import Shape, check_disk, check_moments, collected_bytes, free_disk, written_bytes

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

PositionsOrAuto = Positions | Literal["auto"]


@checked
def collect_parts(
    model: TransformerBridge,
    parts: tuple[Corpus, Corpus],
    folder: str | Path,
    *,
    seed: Seed = 0,
    positions: PositionsOrAuto = "drawn",
    draw_special: bool = True,
    pairs: Pairs = "all",
    keep_rows: bool = True,
    batch_tokens: PositiveInt | None = None,
    progress: bool = True,
) -> tuple[Any, Activations]:
    """Collect the stream on the two parts of a corpus, into ``train/`` and ``validation/``.

    Parameters
    ----------
    parts
        The training and the validation sentences, as `Corpus.split` gives them.
    seed, draw_special
        As in `make_examples`.
    positions
        With ``"all"`` maps are fitted on every token of the training part; the validation part has one
        sampled position a sentence, so that its numbers compare. ``"auto"`` is ``"all"`` where the training
        sentences are fewer than twice the width of the model, and that is possible.
    pairs, keep_rows
        With ``keep_rows=False`` and all positions, the training part is not written as vectors, but as the
        moments that maps between these layers need, into ``moments/``.

    Returns
    -------
    tuple
        The training part (`Activations` or `StoredMoments`) and the validation part.
    """
    folder = Path(folder)
    keep_rows = keep_rows or (folder / TRAIN).is_dir()
    train, validation = (_examples_of(model, part, seed, draw_special) for part in parts)
    options: dict[str, Any] = {"batch_tokens": batch_tokens, "progress": progress}
    chosen = training_positions(model, train, folder, pairs, positions, draw_special, keep_rows)
    fitted: Activations | StoredMoments
    if keep_rows or (chosen == "drawn" and not has_moments(folder)):
        fitted = _collect(model, train, chosen, folder / TRAIN, options)
    else:
        fitted = accumulate(model, train, folder / MOMENTS, pairs=pairs, positions=chosen, **options)
    return fitted, _collect(model, validation, "drawn", folder / VALIDATION, options)


def accumulate(
    model: TransformerBridge,
    examples: Examples,
    folder: Path,
    *,
    pairs: Pairs,
    positions: Positions,
    shard: tuple[int, int] = (1, 1),
    **options: Any,
) -> StoredMoments:
    """Do what `stream_moments` does, if memory and disk have room for it."""
    wanted, widths = pairs_and_widths(model, pairs)
    _, of = check_shard(shard)
    n_rows = examples.n_positions if positions == "drawn" else len(examples.tokens)
    check_moments(-(-n_rows // of), wanted, widths, folder)
    return stream_moments(model, examples, folder, pairs=wanted, positions=positions, shard=shard, **options)


def training_positions(
    model: TransformerBridge,
    examples: Examples,
    folder: Path,
    pairs: Pairs,
    positions: PositionsOrAuto,
    draw_special: bool,
    keep_rows: bool,
) -> Positions:
    """Positions of the training sentences that are fitted on, where ``"auto"`` is decided."""
    if positions == "all" and is_masked(model):
        raise InputError(
            "All positions of a masked-LM model cannot be used: only the drawn token of each sentence is "
            "masked, and the others are no predictions. Expected positions='drawn'."
        )
    if positions == "all" and not draw_special:
        raise InputError("All positions include the special tokens: skip them only with drawn positions.")
    if positions != "auto":
        return positions
    n_tokens, d_model = len(examples.tokens), model.cfg.d_model
    if is_masked(model) or not draw_special or not are_few(len(examples), d_model):
        return "drawn"
    if not (folder / (TRAIN if keep_rows else MOMENTS)).exists():
        if keep_rows:
            n_bytes = collected_bytes(Shape.from_model(model), n_tokens, n_tokens, len(examples))
        else:
            n_bytes = written_bytes(n_tokens, *pairs_and_widths(model, pairs))
        if n_bytes > free_disk(folder) / 2:
            return "drawn"
    tqdm.write(
        f"{len(examples):,} sentences are few for {d_model:,} dimensions: the maps are fitted on all of "
        f"their {n_tokens:,} tokens. --positions drawn takes one of each sentence.",
        file=sys.stderr,
    )
    return "all"


def _collect(
    model: TransformerBridge, examples: Examples, positions: Positions, folder: Path, options: dict[str, Any]
) -> Activations:
    if not folder.exists():  # what was begun has its room
        n_tokens = len(examples.tokens)
        n_rows = n_tokens if positions == "all" else examples.n_positions
        advice = "Collect fewer sentences, or write elsewhere (--out)."
        if positions == "all":
            advice = "One drawn token of each sentence takes far less (--positions drawn)."
        needed = collected_bytes(Shape.from_model(model), n_rows, n_tokens, examples.n_positions)
        check_disk(needed, folder, f"Collecting {n_rows:,} vectors of each layer", advice)
    return collect(model, examples, positions=positions, folder=folder, **options)


def _examples_of(model: TransformerBridge, part: Corpus, seed: int, draw_special: bool) -> Examples:
    examples = make_examples(model, part, seed=seed, draw_special=draw_special)
    if examples.n_truncated:
        tqdm.write(
            f"{examples.n_truncated} sentences of {printable(part.name)} were cut at the model's context."
        )
    return examples
