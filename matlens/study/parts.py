"""Both parts of a corpus as a model reads them: vectors, or of all positions what fits need of them.

What is collected is not collected again, and what was broken off goes on. A study's folder holds
``train/`` and ``validation/`` (activations; of all positions ``moments/`` in the place of the first).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
from matlens.study.plan import Shape, collected_bytes
from matlens.study.room import check_disk, check_room_for_moments, free_disk, moments_on_disk

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@checked
def collect_parts(
    model: TransformerBridge,
    parts: tuple[Corpus, Corpus],
    folder: str | Path,
    *,
    seed: Seed = 0,
    positions: Positions | Literal["auto"] = "drawn",
    draw_special: bool = True,
    batch_tokens: PositiveInt | None = None,
    progress: bool = True,
) -> tuple[Activations, Activations]:
    """Collect the stream on the two parts of a corpus, into ``train/`` and ``validation/``.

    Parameters
    ----------
    model
        What is run.
    parts
        The training and the validation sentences, as `Corpus.split` gives them.
    folder
        Where both are written.
    seed, draw_special
        As in `make_examples`.
    positions
        With ``"all"`` maps are fitted on every token of the training part; the validation part keeps one
        drawn position a sentence, so that its numbers compare. ``"auto"`` is ``"all"`` where the training
        sentences are fewer than twice the width of the model, and that is possible.
    batch_tokens, progress
        As in `collect`.

    Raises
    ------
    InputError
        All positions are asked for, and cannot be used.
    """
    check_usable(model, positions, draw_special)
    if len(parts) != 2:
        raise InputError(
            f"{len(parts)} parts of a corpus are given. Expected two, as Corpus.split gives them."
        )
    collected = []
    for name, part in zip((TRAIN, VALIDATION), parts, strict=True):
        examples = _examples_of(model, part, seed, draw_special)
        where: Positions = "drawn"
        if name == TRAIN:
            n_bytes = len(examples.tokens) * (model.cfg.n_layers + 1) * model.cfg.d_model * 4
            wanted = draw_special and positions == "auto"
            wanted = wanted and _all_are_better(model, examples, Path(folder), TRAIN, n_bytes)
            where = "all" if wanted or positions == "all" else "drawn"
        _check_room(model, examples, where, Path(folder) / name)
        collected.append(
            collect(
                model, examples, positions=where, folder=Path(folder) / name,
                batch_tokens=batch_tokens, progress=progress,
            )
        )  # fmt: skip
    return collected[0], collected[1]


def _check_room(model: TransformerBridge, examples: Examples, positions: Positions, folder: Path) -> None:
    """Refuse to begin what the disk has no room for; what was begun has taken its room."""
    if folder.exists():
        return
    n_rows = len(examples.tokens) if positions == "all" else examples.n_positions
    needed = collected_bytes(Shape.from_model(model), n_rows, len(examples.tokens), examples.n_positions)
    ways = "Collect fewer sentences, or write elsewhere (--out)."
    if positions == "all":
        ways = "One drawn token of each sentence takes far less (--positions drawn)."
    check_disk(needed, folder, f"Collecting {n_rows:,} vectors of each layer", ways)


@checked
def sum_parts(
    model: TransformerBridge,
    parts: tuple[Corpus, Corpus],
    folder: str | Path,
    *,
    pairs: Pairs = "all",
    seed: Seed = 0,
    positions: Positions | Literal["auto"] = "all",
    draw_special: bool = True,
    batch_tokens: PositiveInt | None = None,
    progress: bool = True,
) -> Activations:
    """Do what `collect_parts` does, but of all positions keep what fits need, and no vectors.

    The moments are in ``moments/``, where ``train/`` would be; where only drawn positions are wanted, or
    vectors are there already, they are in ``train/`` as ever.

    Parameters
    ----------
    pairs
        Which maps can be fitted afterwards, as in `fit_maps`.
    model, parts, folder, seed, positions, draw_special, batch_tokens, progress
        As in `collect_parts`.

    Returns
    -------
    Activations
        The stream at the drawn positions of the validation sentences.
    """
    folder = Path(folder)
    there = has_moments(folder)
    if not (folder / TRAIN).is_dir() and len(parts) == 2:
        examples = _examples_of(model, parts[0], seed, draw_special)
        chosen = training_positions(model, examples, folder, pairs, positions, draw_special=draw_special)
        if chosen == "all" or there:
            sum_up(
                model, examples, folder / MOMENTS, pairs=pairs, positions=chosen, batch_tokens=batch_tokens,
                progress=progress,
            )  # fmt: skip
            return collect(
                model, _examples_of(model, parts[1], seed, draw_special), folder=folder / VALIDATION,
                batch_tokens=batch_tokens, progress=progress,
            )  # fmt: skip
        positions = chosen
    return collect_parts(
        model, parts, folder, seed=seed, positions=positions, draw_special=draw_special,
        batch_tokens=batch_tokens, progress=progress,
    )[1]  # fmt: skip


@checked
def sum_up(
    model: TransformerBridge,
    examples: Examples,
    folder: str | Path,
    *,
    pairs: Pairs,
    positions: Positions,
    shard: tuple[int, int] = (1, 1),
    batch_tokens: PositiveInt | None = None,
    progress: bool = True,
) -> StoredMoments:
    """Do what `stream_moments` does, where memory and disk have room for it.

    Raises
    ------
    InputError
        They have not.
    """
    wanted, widths = pairs_and_widths(model, pairs)
    _, of = check_shard(shard)
    n_rows = examples.n_positions if positions == "drawn" else len(examples.tokens)
    check_room_for_moments(-(-n_rows // of), wanted, widths, folder)
    return stream_moments(
        model, examples, folder, pairs=wanted, positions=positions, shard=shard, batch_tokens=batch_tokens,
        progress=progress,
    )  # fmt: skip


@checked
def training_positions(
    model: TransformerBridge,
    examples: Examples,
    folder: Path,
    pairs: Pairs,
    positions: Positions | Literal["auto"],
    *,
    draw_special: bool = True,
) -> Positions:
    """Which positions of the training sentences moments are kept of, as `collect_parts` says it.

    Raises
    ------
    InputError
        All positions are asked for, and cannot be used.
    """
    check_usable(model, positions, draw_special)
    if positions != "auto":
        return positions
    room = moments_on_disk(len(examples.tokens), *pairs_and_widths(model, pairs))
    better = draw_special and _all_are_better(model, examples, folder, MOMENTS, room)
    return "all" if better else "drawn"


def check_usable(model: TransformerBridge, positions: str, draw_special: bool) -> None:
    """Refuse all positions where they cannot be used."""
    if positions == "all" and is_masked(model):
        raise InputError(
            "All positions of a masked-LM model cannot be used: only the drawn token of each sentence is "
            "masked, and the others are no predictions. Expected positions='drawn'."
        )
    if positions == "all" and not draw_special:
        raise InputError("All positions include the special tokens: skip them only with drawn positions.")


def _examples_of(model: TransformerBridge, part: Corpus, seed: int, draw_special: bool) -> Examples:
    examples = make_examples(model, part, seed=seed, draw_special=draw_special)
    if examples.n_truncated:
        tqdm.write(
            f"{examples.n_truncated} sentences of {printable(part.name)} were cut at the model's context."
        )
    return examples


def _all_are_better(
    model: TransformerBridge, examples: Examples, folder: Path, name: str, n_bytes: int
) -> bool:
    """Whether maps need all positions of the examples, which are few, and the disk has room for them."""
    d_model = model.cfg.d_model
    if is_masked(model) or not are_few(len(examples), d_model):
        return False
    if n_bytes > free_disk(folder) / 2 and not (folder / name).exists():
        return False
    tqdm.write(
        f"{len(examples):,} sentences are few for {d_model:,} dimensions: the maps are fitted on all of "
        f"their {len(examples.tokens):,} tokens. --positions drawn takes one of each sentence.",
        file=sys.stderr,
    )
    return True
