"""What a trajectory says of each token and layer is recomputed from the plain model's vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import N_LAYERS, assert_near, plain_vectors
from small_lenses import make_lens

from matlens import Lens
from matlens.models.tokens import word_token

Models = Callable[[str], Any]
PROMPT = "w3 w14 w15 w9 w26"


def expected_logits(lens: Lens, plain: Any, ids: torch.Tensor) -> torch.Tensor:
    """Scores of every layer and token by the plain model's own modules, ``[layers, tokens, vocabulary]``."""
    seen = plain_vectors("llama", plain, ids[None])
    scores = []
    with torch.no_grad():
        for layer in (*lens.layers, N_LAYERS):
            h = seen[f"h.{layer}"][0]
            if layer < N_LAYERS:
                bias = getattr(lens.maps[layer], "bias", None)
                h = h @ lens.matrix(layer).T + (0 if bias is None else bias)
            scores.append(plain.lm_head(plain.model.norm(h)) * lens.scales.get(layer, 1))
    return torch.stack(scores)


@pytest.mark.parametrize("in_memory", [2**24, 100])  # scores: all tokens at once, and one at a time
def test_everything_is_as_computed_from_the_plain_model(in_memory, small_model, plain_model, monkeypatch):
    monkeypatch.setattr("matlens.lens.trajectory._SCORES", in_memory)
    model = small_model("llama")
    lens = make_lens(model).on(model)
    trajectory = lens.trajectory(PROMPT, k=3)
    assert trajectory.tokens == tuple(PROMPT.split())
    assert trajectory.layers == (0, 1, 2, 3)
    logits = expected_logits(lens, plain_model("llama"), trajectory.ids).double()
    q = logits.softmax(-1)
    p = q[-1:]
    assert torch.equal(trajectory.top_ids, q.topk(3).indices)
    assert_near(trajectory.probabilities, q.topk(3).values.float())
    assert_near(trajectory.entropy, -(q * q.log()).sum(-1).float())
    assert_near(trajectory.kl, (p * (p.log() - q.log())).sum(-1).float(), 1e-4)
    final = torch.stack([q[:, i, token] for i, token in enumerate(trajectory.top_ids[-1, :, 0])], 1)
    assert torch.equal(trajectory.final_rank, 1 + (q > final[..., None]).sum(-1))
    word = word_token(model.tokenizer, "w7")
    ranks, probabilities = trajectory.rank("w7"), trajectory.probability(word)
    assert list(ranks) == list(probabilities) == [0, 1, 2, 3]
    assert torch.equal(torch.stack([*ranks.values()]), 1 + (q > q[..., word, None]).sum(-1))
    assert_near(torch.stack([*probabilities.values()]), q[..., word].float())
    for place, token in enumerate([*trajectory.top_ids[-1, :, 0].tolist()[:4], word]):
        first = next((x for x in range(N_LAYERS + 1) if (q[x:, place].argmax(-1) == token).all()), None)
        assert trajectory.first_top1(token, place) == first
    assert trajectory.first_top1(int(trajectory.top_ids[-1, -1, 0])) is not None


def test_tokens_are_texts_by_layer_and_position(small_model):
    model = small_model("llama")
    lens = make_lens(model).on(model)
    trajectory = lens.trajectory(PROMPT, k=2, layers=[1, -2])
    texts = trajectory.top_tokens()
    assert list(texts) == [1, 2, 3]
    assert texts[1][4] == [model.tokenizer.decode([int(token)]) for token in trajectory.top_ids[0, 4]]
    assert "answer" not in trajectory.to_dataframe()
    table = trajectory.to_dataframe(["w7", 9])
    assert len(table) == 2 * 5 * 3
    row = table.query("position == 4 and layer == 2 and answer == 'w7'").iloc[0]
    assert row["token"] == "w26"
    assert row["predicted"] == texts[2][4][0]
    assert row["kl"] == pytest.approx(float(trajectory.kl[1, 4]))
    assert row["answer_rank"] == int(trajectory.rank("w7")[2][4])
    other = table.query("position == 4 and layer == 2 and answer == 9").iloc[0]
    assert other["answer_probability"] == pytest.approx(float(trajectory.probability(9)[2][4]))
    assert row.drop(["answer", "answer_rank", "answer_probability"]).equals(other.drop(row.index[-3:]))
    assert (table[table["layer"] == N_LAYERS]["kl"] == 0).all()
    figure = trajectory.plot(positions=[0, -1])
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["w3", "w26"]


def test_the_last_layer_ranks_its_own_prediction_first(small_model):
    """Also where a soft cap makes logits so alike that log-probabilities are rounded to ties."""
    trajectory = Lens.identity(small_model("gemma2")).trajectory("w1 w2 w3 w4 w5 w6 w7 w8")
    assert bool((trajectory.final_rank[-1] == 1).all())
