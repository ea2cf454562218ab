"""Every number of a trace is the one that the plain model gives, sentence by sentence and by hooks alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conftest import MASKED, N_LAYERS, assert_near, load_plain, make_sentences, plain_vectors, save_model
from plain_values import NORM_BEHIND, plain_logits, plain_scale, plain_unembedding, plain_values
from torch import Tensor

import matlens
from matlens import InputError, make_examples
from matlens.data.examples import Examples
from matlens.ffn import trace as module
from matlens.ffn.trace import GROUPS, REFERENCES, Trace
from matlens.ffn.values import ValueVectors
from matlens.models.layout import ModelLayout

WIRINGS = ("gpt2", "gptj", "bert", "gemma2", "gemma3", "granite", "olmo2")

N, K, BUDGET = 10, 4, 30  # sentences, sub-updates, tokens of a batch

ROUNDING = 2e-5  # of the largest number


@pytest.fixture(scope="module")
def pair(small_model, plain_model, tmp_path_factory):
    """A small model, loaded and plain. BERT's has greater weights: as it is, it predicts one token always."""
    made: dict[str, tuple[Any, Any]] = {}

    def both(name: str) -> tuple[Any, Any]:
        if name not in MASKED:
            return small_model(name), plain_model(name)
        if name not in made:
            folder = save_model(name, tmp_path_factory.mktemp("lively") / name)
            plain = load_plain(name, folder)
            with torch.no_grad():
                for path, parameter in plain.named_parameters():
                    if "layer" in path and path.endswith("dense.weight"):
                        parameter.mul_(20)
            plain.save_pretrained(folder)
            made[name] = matlens.load(str(folder), device="cpu"), plain
        return made[name]

    return both


@dataclass
class PlainUpdate:
    """One FFN and one sentence, as the plain model has them."""

    before: Tensor  # x
    logits_before: Tensor
    logits_after: Tensor  # of x~
    norm: float
    m: Tensor
    scale: float  # of a norm behind the FFN


def plain_updates(name: str, plain: Any, examples: Examples, sentence: int) -> list[PlainUpdate]:
    """What the FFN of every layer does to a sentence that is read alone."""
    start, end = examples.offsets[sentence : sentence + 2]
    at = examples.positions[sentence]
    vectors_by_site = plain_vectors(name, plain, torch.from_numpy(examples.tokens[start:end]))
    layers = from_vectors(name, plain, {site: vectors[0, at] for site, vectors in vectors_by_site.items()})
    assert_near(layers[-1].logits_after, vectors_by_site["logits"][0, at])
    return layers


def from_vectors(name: str, plain: Any, at: dict[str, Tensor]) -> list[PlainUpdate]:
    layers = []
    for layer in range(N_LAYERS):
        # In parallel blocks as if attention came first.
        x = at[f"mid.{layer}"] if f"mid.{layer}" in at else at[f"h.{layer}"] + at[f"attn_out.{layer}"]
        logits = [plain_logits(name, plain, vector) for vector in (x, at[f"h.{layer + 1}"])]
        scale = plain_scale(name, plain, at.get(f"ffn_out.{layer}", x))
        m = at[f"ffn_post.{layer}"].double()
        layers.append(PlainUpdate(x, *logits, float(at[f"h.{layer + 1}"].norm()), m, scale))
        if name in NORM_BEHIND:  # the sub-updates are all that the FFN adds to the stream
            assert_near(
                scale * (m @ plain_values(name, plain, layer).double()), at[f"h.{layer + 1}"] - x, ROUNDING
            )
    return layers


def assert_top(token: Tensor, logits: Tensor) -> None:
    """Check that no other token is above it by more than rounding."""
    assert float(logits.max() - logits[token]) <= ROUNDING * float(logits.abs().max())


def rank_bounds(token: Tensor, logits: Tensor) -> tuple[int, int]:
    """The best and the worst rank that it may have, as rounding falls."""
    slack = ROUNDING * float(logits.abs().max())
    return 1 + int((logits > logits[token] + slack).sum()), int((logits > logits[token] - slack).sum())


def assert_close(ours: Tensor, theirs: Tensor, scale: float) -> None:
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=ROUNDING * scale)


def check(name: str, plain: Any, examples: Examples, trace: Trace, updates: list[list[PlainUpdate]]) -> None:
    """Compare every number of a trace, and see that the comparison says something."""
    e, sure = plain_unembedding(plain).double(), 0
    assert (len(trace), trace.n_layers, trace.k) == (len(examples), N_LAYERS, K)
    assert trace.before.dtype == trace.after.dtype == trace.rank.dtype == torch.int64
    for sentence in range(len(examples)):
        for layer, plain_update in enumerate(updates[sentence]):
            where = sentence, layer
            assert_top(trace.before[where], plain_update.logits_before)
            assert_top(trace.after[where], plain_update.logits_after)
            low, high = rank_bounds(trace.before[where], plain_update.logits_after)
            assert low <= int(trace.rank[where]) <= high
            sure += low == high
            v = plain_values(name, plain, layer).double()
            lengths = plain_update.m.abs() * v.norm(dim=1)
            chosen = trace.index["dominant"][where]
            assert_near(lengths[chosen], lengths.topk(K).values, ROUNDING)
            assert len(set(chosen.tolist())) == K
            tokens = {"before": trace.before[where], "final": trace.final[sentence]}
            # A small coefficient is a difference of large numbers: rounding is small against all of them.
            largest = float(plain_update.m.abs().max())
            assert float(trace.norm[where]) == pytest.approx(plain_update.norm, rel=1e-4)
            assert float(trace.scale[where]) == pytest.approx(plain_update.scale, rel=1e-4)
            for group in GROUPS:
                index = trace.index[group][where]
                assert_close(trace.coefficient[group][where], plain_update.m[index], largest)
                for reference in REFERENCES:
                    static = v[index] * e[tokens[reference]]
                    scale = plain_update.scale * largest * float(static.abs().sum(1).max())
                    scores = plain_update.scale * plain_update.m[index] * static.sum(1)
                    assert_close(trace.score[group, reference][where], scores, scale)
    assert sure > 0.5 * len(examples) * N_LAYERS, "most ranks could be several, so this proves little"
    assert torch.equal(trace.final, trace.after[:, -1])


@pytest.mark.parametrize("name", WIRINGS)
def test_every_number_is_the_plain_models(name, pair, sentences):
    model, plain = pair(name)
    examples = make_examples(model, sentences).head(N)
    trace = Trace.run(model, examples, k=K, batch_tokens=BUDGET, progress=False)
    check(name, plain, examples, trace, [plain_updates(name, plain, examples, i) for i in range(N)])
    assert (trace.rank > 1).any(), "no candidate ever falls, so this proves less"
    assert (trace.before != trace.final[:, None]).any(), "both references are one"
    assert all(bool((trace.coefficient[group] != 0).any()) for group in GROUPS)


@pytest.fixture
def llama(small_model):
    model = small_model("llama")
    return model, make_examples(model, make_sentences())


def test_a_stored_trace_is_the_one_in_memory_and_a_finished_folder_is_only_opened(
    llama, tmp_path, monkeypatch
):
    options: dict[str, Any] = {"k": K, "seed": 3, "progress": False}
    folder = tmp_path / "deep" / "trace"
    stored = Trace.run(*llama, folder=folder, **options)
    in_memory = Trace.run(*llama, **options)
    random = ValueVectors(llama[0]).random_sub_updates(len(stored), K, seed=3)
    assert torch.equal(stored.index["random"], torch.stack(random, 1))
    monkeypatch.setattr(module, "stream", lambda *_, **__: pytest.fail("the model is run"))
    for again in (Trace.run(*llama, folder=folder, batch_tokens=1, **options), Trace.load(folder)):
        for trace in (again, in_memory):
            for name in ("before", "after", "rank", "norm", "scale"):
                assert torch.equal(getattr(trace, name), getattr(stored, name))
            for name in ("index", "coefficient", "score"):
                for key, values in getattr(stored, name).items():
                    assert torch.equal(getattr(trace, name)[key], values)
        assert (again.provenance.details["k"], again.provenance.details["seed"]) == (K, 3)
        assert again.provenance.corpus == "words"


def test_a_trace_that_is_not_finite_is_refused(llama, monkeypatch):
    scale = torch.tensor(torch.inf)
    monkeypatch.setattr(module.ValueVectors, "scale", lambda _, __, outputs: scale.expand(len(outputs)))
    with pytest.raises(InputError, match="not finite"):
        Trace.run(*llama, k=K, progress=False)


def test_what_cannot_be_traced_is_refused_before_anything_is_run(llama, small_model, monkeypatch):
    model, examples = llama
    monkeypatch.setattr(module, "stream", lambda *_, **__: pytest.fail("the model is run"))
    with pytest.raises(InputError, match="no known value vectors"):  # these blocks are stream-only
        Trace.run(small_model("bloom"), examples, k=K)
    # Blocks with value vectors, but without a known residual stream before the FFN.
    layout = ModelLayout.from_model(model)
    bare = replace(layout, kinds=tuple(kind for kind in layout.kinds if kind != "mid"))
    monkeypatch.setattr(module.ModelLayout, "from_model", lambda _: bare)
    with pytest.raises(InputError, match=r"The residual stream before the FFNs of .*pre-norm\) is unknown"):
        Trace.run(model, examples, k=K)
