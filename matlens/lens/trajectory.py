"""Predictions of a lens at every token of a prompt and every layer."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens.activations.collecting import collect
from matlens.data.making import Prompt, make_prompts, prompt_text
from matlens.errors import check_int, checked, short
from matlens.models.identity import Provenance
from matlens.models.readout import Readout
from matlens.models.sites import Site
from matlens.models.tokens import token_texts, visible, word_token
from matlens.numerics import kl_divergence, log_softmax
from matlens.patching.contexts import skipped_layers
from matlens.plots.pages import LensCells, PromptPage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SCORES = 2**24  # scores over the vocabulary in memory at once, 64 MiB; several tensors of this size live
_TITLE = 70  # characters of a prompt in the title of a figure
_FOLLOWED = 24  # tokens whose ranks are known in every cell of a page


@checked
@dataclass(frozen=True, eq=False)
class Trajectory:
    """Predictions at each token of a prompt, by layer; the last layer is the model itself.

    Read inside ``model.hooks``, `matlens.patched` or `matlens.ffn.controlled`, it is of the changed model;
    titles and pages name the changes.

    Methods give dicts by layer: ``top_tokens()[12][-1]`` are those at layer 12 and the last token. Arrays
    have a row for each of ``layers``.

    Attributes
    ----------
    prompt
        The text.
    ids, tokens
        Its tokens, including special tokens, as ids and texts.
    layers
        The layers, the last one of the model at the end.
    top_ids, probabilities
        The ``k`` most probable tokens, the most probable first, and their probabilities.
    entropy
        Of each distribution, in nats.
    kl
        ``KL(delta(h^L) || q)`` from the model's own distribution at the token to the one read, in nats.
    final_rank
        The rank of the token that the model itself predicts there, 1 for the most probable.
    lens
        The lens that read it.
    provenance
        The model, with its active changes, and the prompt.
    place
        The token whose prediction one wants to read: the mask of a masked-LM prompt, or else the last.
    """

    prompt: str
    ids: Int[Tensor, " n"]
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    top_ids: Int[Tensor, "layers n k"]
    probabilities: Float[Tensor, "layers n k"]
    entropy: Float[Tensor, "layers n"]
    kl: Float[Tensor, "layers n"]
    final_rank: Int[Tensor, "layers n"]
    lens: Any = field(repr=False)
    provenance: Provenance = field(repr=False)
    place: int = field(repr=False)
    _vectors: Float[Tensor, "layers n d"] = field(repr=False)

    def __repr__(self) -> str:
        sizes = f"{len(self.ids)} tokens, {len(self.layers)} layers"
        changes = self.provenance.modification
        return f"Trajectory({short(self.prompt)}, {sizes}, {self.lens}{changes and f', with {changes}'})"

    def rank(self, token: str | int) -> dict[int, Int[Tensor, " n"]]:
        """The rank of a token, 1 where it is the most probable: ``rank(" Paris")[layer][position]``.

        ``token`` is a word that is one token, or its number.
        """
        return dict(zip(self.layers, self._follow(token)[0], strict=True))

    def probability(self, token: str | int) -> dict[int, Float[Tensor, " n"]]:
        """The probability of a token, by layer and position, see `rank`."""
        return dict(zip(self.layers, self._follow(token)[1], strict=True))

    def _follow(self, token: str | int) -> tuple[Tensor, Tensor]:
        followed = torch.tensor([token_number(self.lens.on_readout, token)])
        cells = read_cells(self.lens, list(self._vectors), self.layers, followed=followed, k=1)
        ranks, log_probs = map(torch.from_numpy, (cells.followed_ranks, cells.followed_log_probs))
        return ranks[..., 0], log_probs[..., 0].exp()

    def top_tokens(self) -> dict[int, list[list[str]]]:
        """The most probable tokens as texts: ``top_tokens()[layer][position]`` lists them."""
        texts = self._texts()
        return {
            layer: [[texts[token] for token in row] for row in ids]
            for layer, ids in zip(self.layers, self.top_ids.tolist(), strict=True)
        }

    def first_top1(self, answer: str | int, position: int | None = None) -> int | None:
        """The first layer at and after which an answer is the most probable token, or ``None``.

        At a token of the prompt, negative from the end, by default at ``place``; for the answer see `rank`.
        """
        n = len(self.ids)
        place = check_int(self.place if position is None else position, "position", min=-n, max=n - 1)
        ranks = self._follow(answer)[0][:, place].tolist()
        n_last = len(list(itertools.takewhile(lambda rank: rank == 1, reversed(ranks))))
        return self.layers[-n_last] if n_last else None

    def _texts(self) -> dict[int, str]:
        ids = self.top_ids.unique().tolist()
        return dict(zip(ids, token_texts(self.lens.on_readout.tokenizer, ids), strict=True))

    def to_html(self) -> str:
        """A standalone page for a browser; `explorer.explore` puts more into one."""
        return self._page().to_html()

    def _repr_html_(self) -> str:
        return self._page()._repr_html_()

    def _page(self) -> PromptPage:
        wanted = tokens_of_interest(self.top_ids[-1], self.ids, len(self.ids) - 1)
        followed = torch.tensor([*dict.fromkeys(wanted)][:_FOLLOWED])
        cells = read_cells(
            self.lens, list(self._vectors), self.layers, followed=followed, k=self.top_ids.shape[2]
        )
        ids, readout = self.ids.numpy(), self.lens.on_readout
        return PromptPage(
            self.lens.provenance.identity.name, visible(self.prompt), ids, self.layers,
            {self.lens.method: cells}, followed.numpy(),
            texts_of(readout.tokenizer, [ids, cells.ids, followed.numpy()]), pinned=followed[:2].tolist(),
            changes=self.provenance.modification,
        )  # fmt: skip

    def to_dataframe(self, answers: Sequence[str | int] = ()) -> pd.DataFrame:
        """One row per token and layer, and per answer if answers are given (see `rank`).

        Columns are ``position, token, layer, predicted, predicted_id, probability, entropy, kl, rank``, the
        last that of what the model itself predicts; and ``answer, answer_rank, answer_probability``. If the
        model was changed, ``changes`` names what.
        """
        layers, n = self.entropy.shape
        texts = self._texts()
        best = self.top_ids[..., 0].T.reshape(-1).tolist()
        table = pd.DataFrame(
            {
                "position": [position for position in range(n) for _ in range(layers)],
                "token": [token for token in self.tokens for _ in range(layers)],
                "layer": [*self.layers] * n,
                "predicted": [texts[token] for token in best],
                "predicted_id": best,
                "probability": _column(self.probabilities[..., 0]),
                "entropy": _column(self.entropy),
                "kl": _column(self.kl),
                "rank": _column(self.final_rank),
            }
        )
        if changes := self.provenance.modification:
            table["changes"] = changes
        parts = []
        for answer in answers:
            rank, probability = map(_column, self._follow(answer))
            parts.append(table.assign(answer=answer, answer_rank=rank, answer_probability=probability))
        return pd.concat(parts, ignore_index=True) if parts else table

    def plot(
        self,
        path: str | Path | None = None,
        *,
        color: str = "probability",
        positions: Sequence[int] | None = None,
    ) -> Figure:
        """Draw a cell for each token and layer, with the token predicted there.

        ``color`` is ``"probability"`` of the predicted token, ``"kl"`` from the model's own distribution,
        ``"rank"`` of the model's own prediction, or ``"entropy"``. Negative ``positions`` count from the end.
        """
        from matlens.plots.files import save
        from matlens.plots.heatmaps import plot_trajectory  # and matplotlib, which only figures need

        table, n = self.to_dataframe(), len(self.ids)
        if positions is not None:
            places = [check_int(p, "each of the positions", min=-n, max=n - 1) % n for p in positions]
            table = table[table["position"].isin(places)]
        changes = self.provenance.modification
        title = "\n".join(
            textwrap.shorten(line, _TITLE, placeholder=" …")
            for line in (f"{self.lens.method}: {self.prompt}", changes and f"with {changes}")
            if line
        )
        figure = plot_trajectory(table, color=color, title=title)
        if path is not None:
            save(figure, path)
        return figure


def _column(values: Tensor) -> np.ndarray:
    """Values over layers and tokens as a column of a table, token after token."""
    return (values.double() if values.is_floating_point() else values).T.reshape(-1).numpy()


def read_trajectory(
    lens: Any, prompt: Prompt, *, k: int = 5, layers: Sequence[int | str | Site] | None = None
) -> Trajectory:
    """Read every layer at every token of a prompt; see `Lens.trajectory`."""
    check_int(k, "k", min=1, max=lens.on_readout.d_vocab)
    computed = set(lens.layers) - skipped_layers(lens.model)
    wanted = sorted({*(computed if layers is None else map(lens.resolve, layers)), lens.n_layers})
    examples = make_prompts(lens.model, [prompt])
    activations = collect(lens.model, examples, wanted, positions="all", progress=False)
    lens.provenance.check_same(activations.provenance, ours="the lens")
    vectors = torch.stack([activations[layer] for layer in wanted])
    ids = torch.from_numpy(examples.tokens).long()
    cells = read_cells(lens, list(vectors), wanted, followed=ids[:0], k=k)
    top_ids, log_probs, entropy, kl, rank = map(
        torch.from_numpy, (cells.ids, cells.log_probs, cells.entropy, cells.kl, cells.rank)
    )
    tokens = tuple(token_texts(lens.model.tokenizer, ids.tolist()))
    return Trajectory(
        prompt_text(lens.model, prompt, examples.tokens), ids, tokens, tuple(wanted), top_ids,
        log_probs.exp(), entropy, kl, rank, lens,
        activations.provenance.with_details(**lens.provenance.transfer), int(examples.positions[0]), vectors,
    )  # fmt: skip


@torch.no_grad()
def read_cells(
    lens: Any,
    vectors: Sequence[Float[Tensor, "n d_model"]],
    layers: Sequence[int],
    *,
    followed: Int[Tensor, " followed"],
    k: int = 10,
) -> LensCells:
    """Read every token of a prompt at every layer, the last layer of the model at the end.

    The ranks and probabilities of ``followed`` tokens are in every cell, next to the ``k`` most probable.
    """
    step = max(_SCORES // lens.on_readout.d_vocab, 1)
    blocks = [
        _read_block(lens, [of_layer[start : start + step] for of_layer in vectors], layers, followed, k)
        for start in range(0, len(vectors[-1]), step)
    ]
    return LensCells(*(torch.cat(parts, 1).numpy() for parts in zip(*blocks, strict=True)))


def tokens_of_interest(final: Int[Tensor, "n k"], tokens: Int[Tensor, " n"], place: int) -> list[int]:
    """Tokens worth following through a prompt, the likeliest to be asked for first.

    Those that the model predicts at each token, from the one that is read backwards; the others that it holds
    for likely there; and the prompt's own.
    """
    return [
        *final[[*range(place, -1, -1)], 0].tolist(),
        *final[place].tolist(),
        *final[place + 1 :, 0].tolist(),
        *tokens.tolist(),
    ]


def token_number(readout: Readout, token: str | int) -> int:
    """The number of a token, given as such or as a word of one token."""
    if isinstance(token, str):
        return word_token(readout.tokenizer, token, n_tokens=readout.d_vocab)
    return check_int(token, "token", min=0, max=readout.d_vocab - 1)


def texts_of(tokenizer: Any, ids: Iterable[np.ndarray]) -> dict[int, str]:
    """How people read each of the tokens in some arrays."""
    unique = np.unique(np.concatenate([np.asarray(part).ravel() for part in ids])).tolist()
    return dict(zip(unique, map(visible, token_texts(tokenizer, unique)), strict=True))


def _read_block(
    lens: Any, vectors: Sequence[Tensor], layers: Sequence[int], followed: Tensor, k: int
) -> list[Tensor]:
    """The parts of `LensCells` for some of the tokens."""
    scores = lens.logits(vectors[-1], layers[-1])
    # Ranks and top tokens are those of logits: rounding makes ties of log-probabilities.
    true, final = log_softmax(scores), scores.argmax(-1, keepdim=True)
    chosen = followed.to(true.device)
    columns: list[tuple[Tensor, ...]] = []
    for h, layer in zip(vectors, layers, strict=True):
        logits = lens.logits(h, layer)
        log_q = log_softmax(logits)
        best = logits.topk(k).indices
        ranks = [1 + (logits > logits[:, [token]]).sum(-1) for token in chosen]
        columns.append(
            (
                best,
                log_q.gather(-1, best),
                torch.special.entr(log_q.exp()).sum(-1),
                kl_divergence(true, log_q).clamp(min=0),
                1 + (logits > logits.gather(1, final)).sum(-1),
                torch.stack(ranks, 1) if ranks else torch.empty(len(h), 0, dtype=torch.long),
                log_q[:, chosen],
            )
        )
    return [torch.stack(part).cpu() for part in zip(*columns, strict=True)]
