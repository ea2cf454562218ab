"""Updates: what FFNs write for a token, as the sub-updates of their value vectors.

The FFN of a layer writes ``sum_i m_i v_i + b``. The sub-update ``m_i v_i`` promotes tokens by its own scores
``E m_i v_i``; where its coefficient is negative, those that ``v_i`` itself demotes. A few sub-updates do
most: the contribution of one is ``|m_i| ||v_i||``, its share that over the sum of all (paper B, A.3). Where a
norm follows the FFN, all of it is as it reaches the stream, see `matlens.ffn.values`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens import metrics
from matlens.activations.activations import Activations
from matlens.activations.collecting import collect, stream
from matlens.arguments import require_whole
from matlens.corpora.examples import Examples
from matlens.errors import InputError
from matlens.ffn.projection import TOP, Projection, iou
from matlens.ffn.values import FFN_OUT, NormGain, ValueVectors, norm_after_ffn
from matlens.models.anatomy import Anatomy
from matlens.models.readout import Readout
from matlens.models.sites import COEFFICIENTS, POST_NORM, Site
from matlens.models.vocabulary import token_texts, visible
from matlens.patching.removal import remove_sub_updates
from matlens.signatures import checked
from matlens.storage.tables import result_row, result_table

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_DRAWN = 2**22  # random numbers that are ranked together
DOMINANT = 10  # sub-updates of an update that the paper calls dominant
DOMINANCE, REMOVAL = "dominance", "removal"  # experiments
AT_LAYER, AT_END = "at the layer", "at the end"  # where the effect of a removal is read out


@checked
class Updates:
    """What the FFNs of a model write at collected positions, as sub-updates (paper B, section 3).

    Attributes
    ----------
    values
        The model's value vectors.
    activations
        ``ffn_post`` and ``ffn_out`` of each layer that is asked for, ``n`` rows; and where a norm follows the
        FFN, ``ln2_post_out``.

    Raises
    ------
    InputError
        The activations are of another model.
    """

    def __init__(self, values: ValueVectors, activations: Activations) -> None:
        activations.provenance.require_same(
            values.identity, ours="the coefficients", theirs="the value vectors"
        )
        self.values, self.activations = values, activations

    @classmethod
    def run(
        cls,
        model: TransformerBridge,
        examples: Examples,
        layers: Sequence[int] | None = None,
        *,
        progress: bool = True,
    ) -> Updates:
        """Run a model over examples and collect the coefficients and the outputs of its FFNs.

        Parameters
        ----------
        model
            The model to run.
        examples
            What the model is run on, such as `make_prompts` gives; each example has one position, which
            becomes a row.
        layers
            Layers of the FFNs, negative ones counted from the end; by default all.
        progress
            Whether to show a bar over the examples.

        Raises
        ------
        InputError
            The model has no value vectors, or a layer is out of range.
        """
        values = ValueVectors(model)
        chosen = range(values.n_layers) if layers is None else list(map(values.resolve_layer, layers))
        if not chosen:
            raise InputError("No layers are chosen. Expected at least one.")
        kinds = dict.fromkeys((COEFFICIENTS, FFN_OUT, values.output_kind))
        sites = [Site(kind, layer) for layer in chosen for kind in kinds]
        return cls(values, collect(model, examples, sites, progress=progress))

    @property
    def layers(self) -> list[int]:
        """Layers whose updates were collected, in ascending order."""
        sites = map(Site.parse, self.activations)
        return sorted({site.layer for site in sites if site.kind == COEFFICIENTS})

    def coefficients(self, layer: int) -> Float[Tensor, "n d_mlp"]:
        """``m``, the coefficients of a layer's value vectors; each multiplies one of them."""
        return self._of(COEFFICIENTS, layer)

    def outputs(self, layer: int) -> Float[Tensor, "n d_model"]:
        """What a layer's FFN adds to the stream, as the model computed it, a norm behind the FFN included."""
        return self._of(self.values.output_kind, layer)

    def scales(self, layer: int) -> Float[Tensor, " n"]:
        """By what the norm after the FFN multiplies the sub-updates of each row; 1 where no norm follows."""
        return self.values.scale(layer, self._of(FFN_OUT, layer))

    def sub_updates(self, layer: int, row: int = 0) -> Float[Tensor, "d_mlp d_model"]:
        """``m_i v_i`` of one position as they reach the stream.

        Their sum and ``scales(layer)[row] * values.bias(layer)`` are its row of `outputs`.

        Raises
        ------
        InputError
            There is no such row.
        """
        require_whole(row, "row", least=0, most=self.activations.n_rows - 1)
        scaled = self.scales(layer)[row] * self.coefficients(layer)[row]
        return scaled[:, None] * self.values.layer(layer)

    def contributions(self, layer: int) -> Float[Tensor, "n d_mlp"]:
        """``|m_i| ||v_i||``, the length of each sub-update."""
        return self.scales(layer)[:, None] * self.coefficients(layer).abs() * self.values.norms(layer)

    def shares(self, layer: int) -> Float[Tensor, "n d_mlp"]:
        """Contribution of each sub-update relative to the sum of all of them."""
        return _relative(self.contributions(layer))

    def dominant(self, layer: int, k: int = DOMINANT) -> Int[Tensor, "n k"]:
        """The ``k`` sub-updates that contribute most, the greatest first.

        Raises
        ------
        InputError
            ``k`` is less than 1, or more than a layer has value vectors.
        """
        return self.contributions(layer).topk(require_count(k, self.values)).indices

    def _of(self, kind: str, layer: int) -> Tensor:
        site = str(Site(kind, self.values.resolve_layer(layer)))
        if site not in set(self.activations):
            layers = ", ".join(map(str, self.layers)) or "none"
            raise InputError(f"{site} was not collected. There are updates of these layers: {layers}.")
        return self.activations[site].to(self.values.device)


def _relative(contributions: Tensor) -> Tensor:
    total = contributions.sum(-1, keepdim=True)
    return contributions / total.where(total > 0, torch.ones_like(total))  # an FFN that writes nothing


def require_count(k: int, values: ValueVectors) -> int:
    """Check a number of sub-updates of each layer, and return it.

    Raises
    ------
    InputError
        The number is less than 1, or more than a layer has value vectors.
    """
    if not 1 <= k <= values.d_mlp:
        raise InputError(f"{k} sub-updates were asked for. Expected 1 to {values.d_mlp}.")
    return k


def random_sub_updates(values: ValueVectors, n: int, k: int, *, seed: int) -> list[Int[Tensor, "n k"]]:
    """Draw for each layer ``k`` different sub-updates of each of ``n`` examples, from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [len(rows) for rows in torch.arange(n).split(max(_DRAWN // values.d_mlp, 1))]

    def drawn(rows: int) -> Tensor:
        return torch.rand((rows, values.d_mlp), generator=generator).topk(k).indices.to(torch.int32)

    return [torch.cat([drawn(rows) for rows in sizes]) for _ in range(values.n_layers)]


@checked
def dominant_table(
    updates: Updates, projection: Projection, *, row: int = 0, k: int = DOMINANT, n_tokens: int = 10
) -> pd.DataFrame:
    """The dominant sub-updates of one position with the tokens that they promote (appendix A.3).

    One row a sub-update, layer after layer. Columns are ``layer, rank, value, coefficient, contribution,
    share, tokens``; ``tokens`` are those that the sub-update promotes, as people see them, with commas
    between.

    Parameters
    ----------
    updates, projection
        Updates of the model, and how vectors are read in its vocabulary.
    row
        The position's row among the updates.
    k
        How many sub-updates of each layer.
    n_tokens
        How many tokens of each sub-update.

    Raises
    ------
    InputError
        There is no such row, or ``k`` or ``n_tokens`` is less than 1 or more than there are.
    """
    if not 0 <= row < updates.activations.n_rows:
        raise InputError(f"Row {row} was asked for. Expected 0 to {updates.activations.n_rows - 1}.")
    projection.require_same(updates.activations.provenance, theirs="the updates")
    rows = []
    for layer in updates.layers:
        dominant = updates.dominant(layer, k)[row]
        tokens = projection.top(updates.sub_updates(layer, row)[dominant], n_tokens).ids
        quantities = (updates.coefficients(layer), updates.contributions(layer), updates.shares(layer))
        numbers = torch.stack([quantity[row, dominant] for quantity in quantities], 1).tolist()
        sub_updates = zip(dominant.tolist(), numbers, tokens, strict=True)
        for rank, (index, of_sub_update, ids) in enumerate(sub_updates, start=1):
            texts = ", ".join(map(visible, token_texts(projection.tokenizer, ids)))
            rows.append((layer, rank, str(updates.values.vector(layer, index)), *of_sub_update, texts))
    columns = ["layer", "rank", "value", "coefficient", "contribution", "share", "tokens"]
    return pd.DataFrame(rows, columns=columns)


@checked
def dominance(
    model: TransformerBridge,
    examples: Examples,
    *,
    k: int = DOMINANT,
    seed: int = 0,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Share of the ``k`` dominant sub-updates at each layer, and of ``k`` random ones (Figure 6).

    The columns are those of all tables; the methods are ``dominant`` and ``random``, ``target`` is the layer.
    The metrics are ``share`` and ``negative``, the part of the ``k`` whose coefficients are negative (A.3).
    The random sub-updates are drawn for each example and layer from the seed, whatever the batches are.

    Parameters
    ----------
    model, examples
        The model to run, and the examples that it is run on, one position each.
    k
        How many sub-updates of each layer.
    seed
        Seed of the random sub-updates.
    batch_tokens
        Most tokens in a batch, padding counted. It does not change the numbers.
    progress
        Whether to show a bar over the examples.

    Raises
    ------
    InputError
        The model has no value vectors, or fewer than ``k`` in a layer.
    """
    values = ValueVectors(model)
    require_count(k, values)
    sites = [str(Site(COEFFICIENTS, layer)) for layer in range(values.n_layers)]
    drawn = random_sub_updates(values, examples.n_positions, k, seed=seed)
    norms = [values.norms(layer).cpu() for layer in range(values.n_layers)]
    shape = values.n_layers, examples.n_positions
    shares = {
        (method, metric): torch.empty(shape)
        for method in ("dominant", "random")
        for metric in ("share", "negative")
    }
    for rows in stream(model, examples, sites, batch_tokens=batch_tokens, progress=progress):
        index = torch.from_numpy(rows.index)
        for layer, site in enumerate(sites):
            share = _relative(rows.vectors[site].abs() * norms[layer])
            chosen = {"dominant": share.topk(k).indices, "random": drawn[layer][index].long()}
            for method, of_method in chosen.items():
                shares[method, "share"][layer, index] = share.gather(1, of_method).sum(1)
                negative = rows.vectors[site].gather(1, of_method) < 0
                shares[method, "negative"][layer, index] = negative.float().mean(1)
    corpus = examples.provenance.get("corpus", "unnamed")
    return result_table(
        result_row(
            DOMINANCE, model=values.identity.name, corpus=corpus, method=method, layer=layer, target=layer,
            metric=metric, k=k, estimate=metrics.mean(numbers[layer]),
        )
        for layer in range(values.n_layers)
        for (method, metric), numbers in shares.items()
    )  # fmt: skip


@checked
def removal_table(
    model: TransformerBridge,
    examples: Examples,
    *,
    k: int = 3,
    layers: Sequence[int] | None = None,
    n_tokens: int = TOP,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Compare what dominant sub-updates do to the logits with what readings of their value vectors say.

    Each of the ``k`` dominant sub-updates is left out at its position, and the logits without it are taken
    from those with it: of the stream behind its block (``at the layer`` in the column ``effect``), and of the
    whole model (``at the end``). A reading is true to the model as far as its scores, times the coefficient,
    agree with that difference.

    The methods are the readings: ``v`` is ``E v`` with the row ``v`` of the output matrix, ``g v`` that with
    the gain of the norm behind the FFN (where there is one: extra-norm and post-norm blocks), ``f v`` and
    ``f g v`` go through the linear parts of the head, see `Projection.through_head`: the final norm's gain,
    in masked-LM models behind the head's dense layer (``f W v``, ``f W g v``). ``ln_f(...)`` is through the
    whole final norm (a layer norm; what an RMS norm gives agrees as its gain does). ``another v`` is a random
    value vector of the layer, read as ``v``. The metrics are ``correlation``, Pearson's over the vocabulary,
    and ``common``, the share of the ``n_tokens`` top tokens that both have. Estimates are means over examples
    of the means of their ``k``; rows without a layer are over all ``layers``.

    Parameters
    ----------
    model, examples
        The model to run, and the examples that it is run on, one position each.
    k
        How many dominant sub-updates of each layer are left out, one at a time.
    layers
        Layers of the FFNs, negative ones counted from the end; by default all.
    n_tokens
        Length of the lists of top tokens.
    seed
        Seed of the random value vectors.
    progress
        Whether to show a bar over the examples.

    Raises
    ------
    InputError
        The model has no value vectors or no final norm, a layer is out of range, or there are fewer than
        ``k`` sub-updates or ``n_tokens`` tokens.
    """
    updates = Updates.run(model, examples, layers, progress=progress)
    require_whole(n_tokens, "n_tokens", least=1, most=model.cfg.d_vocab_out)
    values, readout = updates.values, Readout(model)
    readings = _readings(model, values)
    index = {layer: updates.dominant(layer, k).cpu() for layer in updates.layers}
    drawn = random_sub_updates(values, examples.n_positions, k, seed=seed)
    agreement: dict[tuple[int, str, str, str], list[float]] = {}
    for row, removed in enumerate(remove_sub_updates(model, examples, index, progress=progress)):
        for layer, streams in removed.items():
            m = updates.coefficients(layer)[row, index[layer][row].to(values.device), None]
            rows = values.matrix(layer)
            scores = {name: m * read(rows[index[layer][row]], layer) for name, read in readings.items()}
            scores["another v"] = m * readings["v"](rows[drawn[layer][row]], layer)
            for effect, stream_vectors in ((AT_LAYER, streams.after), (AT_END, streams.final)):
                logits = readout.logits(stream_vectors)
                lost = logits[:1] - logits[1:]
                for name, of_reading in scores.items():
                    for metric, agreeing in _agreement(of_reading, lost, n_tokens).items():
                        agreement.setdefault((layer, name, effect, metric), []).append(agreeing)
    cells = {key[1:] for key in agreement}
    table = []
    for name, effect, metric in sorted(
        cells, key=lambda cell: (cell[1:], [*readings, "another v"].index(cell[0]))
    ):
        by_layer = torch.tensor([agreement[layer, name, effect, metric] for layer in updates.layers])
        for at, numbers in ((None, by_layer.mean(0)), *zip(updates.layers, by_layer, strict=True)):
            table.append(
                result_row(
                    REMOVAL, model=values.identity.name, corpus=examples.provenance.get("corpus", "unnamed"),
                    method=name, layer=at, target=at, metric=metric,
                    k=n_tokens if metric == "common" else None, estimate=metrics.mean(numbers), effect=effect,
                )
            )  # fmt: skip
    return result_table(table, "effect")


def _readings(model: TransformerBridge, values: ValueVectors) -> dict[str, Callable[[Tensor, int], Tensor]]:
    """Scores of all tokens for rows of a layer's output matrix, by the name of the reading."""
    plain, normed, head = (
        make(model) for make in (Projection.from_model, Projection.after_norm, Projection.through_head)
    )
    gains: list[NormGain] = []
    if values.output_kind != FFN_OUT or Anatomy.from_model(model).family is POST_NORM:
        norms = [norm_after_ffn(model, layer) for layer in range(values.n_layers)]
        gains = [NormGain.from_module(norm, values.d_model) for norm in norms]
    through, is_rms = "f W" if hasattr(model, "mlm_head") else "f", not head.norm.gain.centred  # type: ignore[union-attr]

    def reading(projection: Projection, *, gained: bool = False) -> Callable[[Tensor, int], Tensor]:
        return lambda rows, layer: projection.scores(gains[layer](rows) if gained else rows)

    readings = {"v": reading(plain)}
    if gains:
        readings["g v"] = reading(plain, gained=True)
    readings[f"{through} v"] = reading(head)
    if gains:
        readings[f"{through} g v"] = reading(head, gained=True)
    if not is_rms:  # through an RMS norm the order and the correlation are those of its gain
        readings["ln_f(g v)" if gains else "ln_f(v)"] = reading(normed, gained=bool(gains))
    return readings


def _agreement(scores: Tensor, lost: Tensor, n_tokens: int) -> dict[str, float]:
    """Correlation over the vocabulary and top tokens in common, means over the sub-updates of an example."""
    pair = [logits.double() - logits.double().mean(1, keepdim=True) for logits in (scores, lost)]
    first, second = (logits / logits.norm(dim=1, keepdim=True).clamp_min(1e-300) for logits in pair)
    overlap = iou(scores.topk(n_tokens).indices, lost.topk(n_tokens).indices)
    return {
        "correlation": float((first * second).sum(1).mean()),
        "common": float((2 * overlap / (1 + overlap)).mean()),
    }
