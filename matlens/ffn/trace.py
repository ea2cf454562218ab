"""Top candidates before and after every FFN, and the sub-updates that move them (paper B, section 5).

At layer ``l``, ``x`` is the residual stream before the FFN and ``x~`` after it, both read by the model's own
norm and unembedding. The dominant sub-updates, and as many random ones, are scored for two reference tokens:
the top candidate of ``x``, and the token that the model predicts in the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from matlens.activations.collecting import Rows, batch_counts, default_batch_tokens, stream
from matlens.activations.sinks import outlying_rows
from matlens.data.examples import Examples, check_examples
from matlens.errors import InputError, PositiveInt, Seed, check_int, checked
from matlens.ffn.projection import unembedding
from matlens.ffn.updates import DOMINANT
from matlens.ffn.values import ValueVectors
from matlens.io.rows import Column, read_rows, writing_rows
from matlens.models.hooks import run_of_functions
from matlens.models.identity import Provenance
from matlens.models.layout import ModelLayout
from matlens.models.readout import Readout
from matlens.models.sites import COEFFICIENTS, FFN_OUT, PARALLEL, STREAM, Site
from matlens.numerics import check_finite, without_autocast

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

TRACE = "trace"  # the kind of its folder
GROUPS = ("dominant", "random")
REFERENCES = ("before", "final")
_READOUT_ROWS = 4096  # vectors that are read out together, of one or several layers


@checked
class Trace:
    """Candidates and sub-updates at every layer, for ``n`` examples (paper B, section 5).

    Layers are those of the FFNs, ``0 .. n_layers - 1``.

    Attributes
    ----------
    examples, provenance
        The inputs of the model; the model, the corpus, the number of sub-updates and the seed.
    before, after
        ``[n, n_layers]``, the top candidates of ``x`` and of ``x~``.
    rank
        ``[n, n_layers]``, the rank of the candidate ``before`` after the update; 1 where it stays on top.
    norm, scale
        ``[n, n_layers]``, the norm of ``x~``, and the positive factor of a norm after the FFN, 1 without one.
    index, coefficient
        By group, ``dominant`` or ``random``, ``[n, n_layers, k]``: the column of each sub-update's value
        vector in its layer, and its coefficient ``m_i``.
    score
        By group and reference, such as ``("dominant", "before")``: ``e_w . m_i v_i``, times the scale.
    """

    def __init__(self, rows: Mapping[str, Any], examples: Examples, provenance: Provenance) -> None:
        check_examples(examples, provenance.examples, "the trace")
        if len(rows["before"]) != examples.n_positions:
            raise InputError(
                f"rows must be {examples.n_positions}, one per position, got {len(rows['before'])}."
            )
        self.examples, self.provenance = examples, provenance
        self.n_layers, self.k = provenance.identity.n_layers, int(provenance.details["k"])
        self.before, self.after = rows["before"].long(), rows["after"].long()
        self.rank = rows["rank"].long() + 1  # the file holds how many tokens are above it
        self.norm, self.scale = rows["norm"], rows["scale"]
        shape = -1, self.n_layers, self.k
        self.index = {group: rows[f"index.{group}"].view(shape).long() for group in GROUPS}
        self.coefficient = {group: rows[f"coefficient.{group}"].view(shape) for group in GROUPS}
        self.score = {
            (group, reference): rows[f"score.{group}.{reference}"].view(shape)
            for group in GROUPS
            for reference in REFERENCES
        }

    def __len__(self) -> int:
        return self.examples.n_positions

    def __repr__(self) -> str:
        return f"Trace({len(self):,} examples, {self.n_layers} layers, {self.provenance.identity.name!r})"

    @property
    def final(self) -> Int[Tensor, " n"]:
        """The token that the model predicts for each example."""
        return self.after[:, -1]

    @property
    def sinks(self) -> Bool[Tensor, " n"]:
        """Mask of examples at attention sinks, where sub-updates are hundreds of times larger."""
        return outlying_rows(self.norm, places=self.examples.positions)

    @classmethod
    def run(
        cls,
        model: TransformerBridge,
        examples: Examples,
        *,
        k: int = DOMINANT,
        seed: Seed = 0,
        folder: str | Path | None = None,
        batch_tokens: PositiveInt | None = None,
        progress: bool = True,
    ) -> Trace:
        """Run a model over examples, at one position each.

        Parameters
        ----------
        k
            Number of dominant sub-updates, and of random ones, per layer.
        seed
            Seed of the random sub-updates; they do not depend on the batches.
        folder
            Where the trace is stored, by default in memory. An interrupted run resumes there; a finished
            folder is opened without running anything.
        """
        reader = _BatchReader(model, examples, k, seed)
        layout = ModelLayout.from_model(model)
        width, longest = sum(map(layout.width, reader.sites)), int(examples.lengths.max())
        size = batch_tokens or default_batch_tokens(model, width, longest=longest, folder=folder)
        origin = Provenance.from_model(
            model, data=examples.provenance, examples=examples.fingerprint, details={"k": k, "seed": seed}
        )
        request = {
            "provenance": origin.to_json(),
            "run_of_functions": run_of_functions(model),
            "batch_tokens": size,
        }

        counts = batch_counts(model, examples, "sampled", size)
        with writing_rows(
            TRACE, request, reader.columns, counts,
            folder=folder, arrays=examples.arrays,
        ) as writer:  # fmt: skip
            if writer.missing:
                for batch in stream(
                    model, examples, reader.sites, batch_tokens=size, progress=progress,
                    batch_indices=writer.missing,
                ):  # fmt: skip
                    rows = reader.rows(batch)
                    for name, values in rows.items():
                        check_finite(values, name)
                    writer.add(batch.index, rows)
        return cls(writer.rows, examples, Provenance.from_config(writer.config))

    @classmethod
    def load(cls, folder: str | Path) -> Trace:
        """Open a finished folder of `run`."""
        config, arrays, rows = read_rows(folder, TRACE)
        provenance = Provenance.from_config(config)
        return cls(rows, Examples.from_arrays(arrays, provenance.data), provenance)


def sites_before_ffn(model: TransformerBridge, layer: int) -> list[str]:
    """Sites whose vectors add up to the residual stream before the FFN of a layer."""
    layout = ModelLayout.from_model(model)
    if "mid" in layout.kinds:
        return [str(Site("mid", layer))]
    if layout.wiring is PARALLEL:
        return [str(Site(kind, layer)) for kind in (STREAM, "attn_out")]  # as if attention came first
    raise InputError(
        f"The residual stream before the FFNs of {model.cfg.architecture} ({layout.wiring.name}) is unknown, "
        "so they cannot be traced."
    )


class _BatchReader:
    """Computes the rows of a trace from batches of vectors, in their stored layout."""

    def __init__(self, model: TransformerBridge, examples: Examples, k: int, seed: int) -> None:
        self._values, self._readout = ValueVectors(model), Readout(model)
        self._embedding = unembedding(model)
        self._k = check_int(k, "k", min=1, max=self._values.d_mlp)
        layers = range(self._values.n_layers)
        self._before = [sites_before_ffn(model, layer) for layer in layers]
        self._after = [[str(Site(STREAM, layer + 1))] for layer in layers]
        self._coefficients = [str(Site(COEFFICIENTS, layer)) for layer in layers]
        stream = {site for sites in (*self._before, *self._after) for site in sites}
        self._outputs = [str(Site(FFN_OUT, layer)) for layer in layers]
        self._added = [str(Site(self._values.output_kind, layer)) for layer in layers]
        self.sites = sorted(stream | {*self._coefficients, *self._outputs, *self._added})
        self._norms = [self._values.norms(layer).cpu() for layer in layers]
        self._random = self._values.random_sub_updates(examples.n_positions, k, seed=seed)
        n = self._values.n_layers
        scores = [f"score.{group}.{reference}" for group in GROUPS for reference in REFERENCES]
        self.columns = {
            **dict.fromkeys(("before", "after", "rank"), Column(n, "int32")),
            **dict.fromkeys(("norm", "scale"), Column(n)),
            **dict.fromkeys([f"index.{group}" for group in GROUPS], Column(n * k, "int32")),
            **dict.fromkeys([f"coefficient.{group}" for group in GROUPS], Column(n * k)),
            **dict.fromkeys(scores, Column(n * k)),
        }

    @torch.no_grad()
    @without_autocast()
    def rows(self, batch: Rows) -> dict[str, Tensor]:
        """The rows of a trace for the examples of a batch."""
        n, n_layers = len(batch.index), self._values.n_layers
        columns = {
            name: torch.empty(n, n_layers, column.width // n_layers, dtype=column.in_memory)
            for name, column in self.columns.items()
        }
        together = max(_READOUT_ROWS // max(n, 1), 1)  # layers
        for layers in torch.arange(n_layers).split(together):
            x, after = (
                torch.cat([self._sum(batch, sites[layer]) for layer in layers])
                for sites in (self._before, self._after)
            )
            before = self._readout.top_ids(x)
            top, rank = self._readout.top_ids_and_ranks(after, before)
            read = before, top, rank - 1, after.norm(dim=1)
            for name, values in zip(("before", "after", "rank", "norm"), read, strict=True):
                columns[name][:, layers, 0] = values.view(len(layers), n).T.to(columns[name]).cpu()
        final = columns["after"][:, -1, 0].long()
        for layer in range(n_layers):
            m = batch.vectors[self._coefficients[layer]]
            contribution = m.abs() * self._norms[layer]
            outputs = batch.vectors[self._outputs[layer]]
            self._values.check_sums(layer, m, outputs, batch.vectors[self._added[layer]])
            scale = self._values.scale(layer, outputs).cpu()
            columns["scale"][:, layer, 0] = scale
            index = {
                "dominant": contribution.topk(self._k).indices,
                "random": self._random[layer][torch.from_numpy(batch.index)].long(),
            }
            tokens = {"before": columns["before"][:, layer, 0].long(), "final": final}
            # Computing all static scores is faster than gathering the vectors of some.
            vectors = self._values.layer_view(layer)
            static = {
                reference: (
                    self._embedding[token.to(self._embedding.device)].to(vectors.device) @ vectors.T
                ).cpu()
                for reference, token in tokens.items()
            }
            for group, of_group in index.items():
                coefficient = m.gather(1, of_group)
                columns[f"index.{group}"][:, layer] = of_group
                columns[f"coefficient.{group}"][:, layer] = coefficient
                for reference, scores in static.items():
                    of_reference = scale[:, None] * coefficient * scores.gather(1, of_group)
                    columns[f"score.{group}.{reference}"][:, layer] = of_reference
        return {name: values.flatten(1) for name, values in columns.items()}

    @staticmethod
    def _sum(batch: Rows, sites: list[str]) -> Tensor:
        return sum((batch.vectors[site] for site in sites), start=torch.zeros((), dtype=torch.float32))
