"""Choosing blocks to remove; comparing and timing pruned models."""

from __future__ import annotations

import copy
import heapq
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from calibration_texts import logits_without, running_text
from conftest import D_MODEL, N_LAYERS, WORDS
from cuts.continuations import beginnings, continuation_losses, continue_prompts, measures
from cuts.maps import Cut, without_blocks
from pruning import PrunedModels, added_perplexity, recovered_estimate
from torch.nn.functional import cross_entropy

import matlens
from matlens import InputError, pruning
from matlens.data import Corpus, make_windows
from matlens.ffn import TextLosses
from matlens.pruning import Calibration, evaluation, read_text, time_in_turns
from matlens.pruning.choosing import choose_span, greedy_order, linearity_of, loss_without, no_sinks
from matlens.pruning.layouts import Layout, Streams, full_windows


def streams_of(model: Any) -> Streams:
    windows = full_windows(make_windows(model, running_text(200), size=20))
    return Streams(Layout.from_model(model), windows, progress=False)


@pytest.fixture(scope="module")
def streams(small_model):
    return streams_of(small_model("gpt2"))


def test_the_most_linear_span_is_that_of_least_squares_without_sinks(streams):
    """A token that is a hundred times as long as others would be all that counts."""
    marked = copy.copy(streams)
    marked.h = [h.clone() for h in streams.h]
    generator = torch.Generator().manual_seed(1)
    for h in marked.h[1:]:
        h[:, 7] = 300 * torch.randn(D_MODEL, generator=generator)
    sinks = torch.zeros(streams.tokens.shape, dtype=torch.bool)
    sinks[:, 7] = True
    assert torch.equal(no_sinks(marked), ~sinks)
    scores = {}
    for start in (1, 2):
        x, y = (marked.h[i][~sinks].double().numpy() for i in (start, start + 1))
        x = np.hstack([x, np.ones((len(x), 1))])
        rest = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
        scores[start] = float((1 - rest.var(0) / y.var(0)).mean())
        assert linearity_of(marked.h[start], marked.h[start + 1], ~sinks) == pytest.approx(scores[start])
    best = max(scores, key=scores.__getitem__)
    assert choose_span(marked, 1, "r2", progress=False) == (best,)
    few = streams.beginning(1)
    few.tokens, few.h = few.tokens[:1], [h[:1] for h in few.h]
    with pytest.raises(InputError, match="more than 33 tokens"):
        choose_span(few, 1, "r2", progress=False)


@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_lazy_greedy_is_exact_greedy_where_losses_rise(seed, rising, streams, monkeypatch):
    """The order of exact greedy changes from round to round, by what blocks cost together."""
    n_layers, generator = 9, np.random.default_rng(seed)
    alone = generator.uniform(0, 1, n_layers)
    together = generator.uniform(0, 1, (n_layers, n_layers)) ** 6
    if not rising:  # two blocks can cost less than one
        together -= generator.uniform(0, 0.5, (n_layers, n_layers))
    tried: list[frozenset[int]] = []

    def loss(gone: Any) -> float:
        tried.append(frozenset(gone))
        out = sorted(gone)
        return float(alone[out].sum() + together[np.ix_(out, out)].sum())

    monkeypatch.setattr("matlens.pruning.choosing.loss_without", lambda _, gone: loss(gone))
    deep = copy.copy(streams)
    deep.layout = SimpleNamespace(blocks=range(n_layers))  # type: ignore[assignment]
    order = greedy_order(deep, 6, progress=False)
    n_tried = len(tried)
    gone: list[int] = []
    for _ in range(6):  # every block that is left, tried in every round
        rest = [block for block in range(1, n_layers) if block not in gone]
        gone.append(min(rest, key=lambda block: loss([*gone, block])))
    assert (order == gone) == rising
    assert n_tried < len(tried) - n_tried
    known = [(loss([block]), block, 1) for block in range(1, n_layers)]  # and of how many removed
    lazy: list[int] = []
    heapq.heapify(known)
    while len(lazy) < 6:
        _, block, n_removed = heapq.heappop(known)
        if n_removed == len(lazy) + 1:
            lazy.append(block)
        else:
            heapq.heappush(known, (loss([*lazy, block]), block, len(lazy) + 1))
    assert order == lazy


@pytest.mark.parametrize(
    "choose",
    [
        lambda streams: choose_span(streams, 1, "loss", progress=False),
        lambda streams: tuple(greedy_order(streams, 1, progress=False)),
    ],
)
def test_a_loss_that_is_no_number_is_never_the_least(choose, streams, monkeypatch):
    losses = iter([float("nan"), 3.0, float("nan"), float("nan")])
    monkeypatch.setattr(Streams, "losses", lambda *_: torch.tensor([next(losses)]))
    assert choose(streams) == (2,)
    with pytest.raises(InputError, match="finite"):
        choose(streams)


def test_streams_that_overflow_are_refused(model_folder):
    half = matlens.load(str(model_folder("gpt2")), dtype=torch.float16, device="cpu")
    layout = Layout.from_model(half)
    with torch.no_grad():
        layout.blocks[1].mlp.c_proj.weight.fill_(6e4)
    with pytest.raises(InputError, match=r"h\.2 are not finite"):
        Streams(layout, torch.tensor([[3, 4, 5, 6]]), progress=False)


def test_losses_are_those_by_hand_and_choices_the_least_of_all(streams, plain_model):
    plain = plain_model("gpt2")

    def loss(*gone: int) -> float:
        logits = logits_without(plain, [plain.transformer.h[i] for i in gone], streams.tokens)[:, :-1]
        return float(cross_entropy(logits.flatten(0, 1), streams.tokens[:, 1:].flatten()))

    for gone in ((1,), (2,), (1, 2)):
        assert loss_without(streams, gone) == pytest.approx(loss(*gone), abs=1e-5)
    assert float(streams.losses(streams.h[N_LAYERS]).mean()) == pytest.approx(loss(), abs=1e-5)
    best = min((1, 2), key=loss)
    assert choose_span(streams, 1, "loss", progress=False) == (best,)
    assert greedy_order(streams, 1, progress=False) == [best]
    unit = [h.double() / h.double().norm(dim=-1, keepdim=True) for h in streams.h]
    turned = {i: float((unit[i] * unit[i + 1]).sum(-1).clamp(-1, 1).arccos().mean()) for i in (1, 2)}
    assert choose_span(streams, 1, "angle", progress=False) == (min(turned, key=turned.__getitem__),)
    assert choose_span(streams, 0, "loss", progress=False) == ()


METHODS, CHOICES = ("out", "replaceme", "refit"), ("angle", "loss")


@pytest.fixture(scope="module")
def texts(small_model):
    names = enumerate(("fitted", "a", "b"))
    return [make_windows(small_model("gpt2"), running_text(400, 5 + i, name), size=20) for i, name in names]


@pytest.fixture(scope="module")
def table(small_model, texts):
    evaluated = {"a": texts[1], "b": texts[2]}
    return PrunedModels(
        small_model("gpt2"), texts[0], evaluated, [1, 2], methods=METHODS, choices=CHOICES
    ).table()


@pytest.mark.parametrize("healed", [False, True])
def test_methods_are_compared_with_jump_on_the_same_windows_and_prompts(healed, small_model, texts):
    """Healed with healed; jump itself is compared with the original model."""
    model, evaluated, tokens = small_model("gpt2"), {"a": texts[1], "b": texts[2]}, 9
    methods: list[str] = [Cut.jump, "chain", Cut.linearpatch]
    table = PrunedModels(
        model, texts[0], evaluated, [1, 2], methods=methods, choices=["greedy"], tokens=tokens, heal=60,
        heal_methods=methods[:2],
    ).table()  # fmt: skip
    calibration = Calibration.run(model, texts[0], "chain", progress=False)
    plain, prompts = pruning.plain_copy(model), beginnings(evaluated.values(), 32)
    assert prompts.shape == (sum(int((text.lengths == 20).sum()) for text in texts[1:]), 10)
    names = [*methods, *(f"{method}, healed" for method in methods[:2])]
    assert list(dict.fromkeys(table[table["n_removed"] == 1]["method"])) == ["pruned", "jump", *names[1:]]
    assert set(table[table["n_removed"] == 2]["method"]) == {"pruned", *names}
    blocks = calibration.choose(1, "greedy", progress=False)
    jump, chain = (
        without_blocks(calibration, blocks, Cut.jump),
        calibration.without(blocks, "chain", progress=False),
    )
    if healed:
        calibration.heal(jump, blocks, "refit", 60, progress=False)
        calibration.heal(chain, blocks, "chain", 60, progress=False)
    ours = table[(table["n_removed"] == 1) & (table["choice"] == "greedy")]
    for method, of_method, other, of_other in (
        ("chain", chain, "jump", jump), ("jump", jump, "original", plain),
    ):  # fmt: skip
        rows = ours[ours["method"] == method + ", healed" * healed]
        for corpus, text in evaluated.items():
            losses, rivals = (read_text(each, text, progress=False).losses for each in (of_method, of_other))
            found = rows[(rows["corpus"] == corpus) & (rows["metric"] == "ratio")].set_index("against")
            assert [*found.index] == ["", "jump" if method == "chain" else "chain"]
            ratio = losses.ratio(rivals)
            against = "" if other == "original" else other
            assert found.loc[against, ["value", "low", "high"]].tolist() == pytest.approx(ratio[:3], rel=1e-4)
            assert len({round(value, 9) for value in found["value"]}) == 2
        for decoding, options in (("greedy", {}), ("sampled", {"seed": 0})):
            both = []
            for each in (of_method, of_other):
                written = continue_prompts(each, prompts, tokens, **options)
                both.append(
                    measures(
                        written, continuation_losses(plain, prompts, written), {model.tokenizer.eos_token_id}
                    )
                )
            for metric in both[0]:
                mine, theirs = (each[metric].numpy() for each in both)
                name = "perplexity" if metric == "loss" else metric
                found = rows[(rows["decoding"] == decoding) & (rows["metric"] == name)].set_index("against")
                assert [*found.index] == ["", other]
                expected = [mine.mean(), (mine - theirs).mean()]
                if metric == "loss":
                    expected = [float(value) for value in np.exp(expected)]
                assert found["value"].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-9)
                assert set(found["n"]) == {len(prompts)}
                low, high = found["low"].iloc[1], found["high"].iloc[1]
                assert low <= found["value"].iloc[1] <= high
    assert set(table[table["decoding"] != ""]["corpus"]) == {""}


def test_what_is_gone_is_told_with_an_interval(table):
    gone = added_perplexity(table)
    assert len(gone) == 2 * len(CHOICES) * len(METHODS) * 2
    rows = table[table["metric"] == "recovered"]
    assert np.allclose(rows["value"], gone["recovered"])
    published = gone[(gone["method"] == "replaceme") & (gone["choice"] == "angle")]
    assert (published[["recovered", "low", "high"]] == 0).all().all()
    others = gone[gone["method"] != "replaceme"]
    assert (others["low"] < others["recovered"]).all()
    assert (others["recovered"] < others["high"]).all()


def test_one_window_alone_is_refused_before_the_work(small_model, texts, monkeypatch):
    model = small_model("gpt2")
    corpus = Corpus("few", (" ".join(WORDS[:30]),), 1, 0, 0, 0)
    one, two = make_windows(model, corpus, size=20), make_windows(model, corpus, size=15)
    pruned = pruning.prune(model, texts[0], 1, method="out", progress=False)
    monkeypatch.delattr("matlens.pruning.pruned.Calibration.run")
    for evaluate in (
        lambda: pruning.compare_pruned(model, pruned, one, progress=False),
        lambda: PrunedModels(model, texts[0], {"a": texts[1], "b": one}, [1]).table(),
    ):
        with pytest.raises(InputError, match="at least two"):
            evaluate()
    with pytest.warns(matlens.InputWarning, match="intervals over 2 texts are too wide"):
        table = pruning.compare_pruned(model, pruned, two, progress=False)
    assert not table["low"].isna().any()


LENGTH = 30


def losses(means: np.ndarray) -> TextLosses:
    return TextLosses(means * LENGTH, np.full(len(means), LENGTH))


def test_the_recovered_fraction():
    rows = [
        ("original", "", 0, 10.0), ("replaceme", "angle", 3, 30.0), ("refit", "greedy", 3, 20.0),
        ("out", "angle", 3, 50.0),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["method", "choice", "n_removed", "value"]).assign(
        corpus="a", metric="perplexity", blocks="", low=math.nan, high=math.nan
    )
    recovered = added_perplexity(table).set_index("method")
    assert recovered["recovered"].to_dict() == pytest.approx({"replaceme": 0, "refit": 0.5, "out": -1})
    assert recovered["low"].isna().all()
    limits = {"metric": "recovered", "value": 0.5, "low": 0.4, "high": 0.7}
    with_limits = pd.concat([table, table[table["method"] == "refit"].assign(**limits)])
    (refit,) = added_perplexity(with_limits).query("method == 'refit'").to_dict("records")
    assert (refit["recovered"], refit["low"], refit["high"]) == pytest.approx((0.5, 0.4, 0.7))
    with pytest.raises(InputError):
        added_perplexity(table[table["choice"] != "angle"])


def test_an_interval_is_that_of_resampled_windows():
    """All models have read the same windows, so what these differ in themselves does not widen it."""
    generator = np.random.default_rng(3)
    n = 14
    whole = generator.normal(4, 0.6, n)
    published = whole + generator.normal(0.4, 0.02, n)
    ours = whole + generator.normal(0.2, 0.03, n)
    estimate = recovered_estimate(losses(ours), losses(whole), losses(published))
    of_all = [math.exp(each.mean()) for each in (ours, whole, published)]
    assert estimate.value == pytest.approx(1 - (of_all[0] - of_all[1]) / (of_all[2] - of_all[1]))
    drawn = []
    for _ in range(4000):
        index = generator.integers(n, size=n)
        a, b, c = (math.exp(each[index].mean()) for each in (ours, whole, published))
        drawn.append(1 - (a - b) / (c - b))
    assert (estimate.low, estimate.high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.01)
    assert estimate.high - estimate.low < 0.15
    assert estimate == recovered_estimate(losses(ours), losses(whole), losses(published))


def test_a_cache_holds_what_its_blocks_write(pruned_llama, small_model):
    table = pruning.compare_costs(small_model("llama"), pruned_llama, rounds=1)
    values = {(row.method, row.metric): row.value for row in table.itertuples()}
    assert values["original", "cache"] == 3 * 2 * 2 * 8 * 4  # blocks, keys and values, heads, width, bytes
    assert values["pruned", "cache"] == 2 * 2 * 2 * 8 * 4
    weights = sum(weight.numel() for weight in pruned_llama.model.parameters()) * 4
    assert values["original", "weights"] > values["pruned", "weights"] == weights
    ratio = values["pruned", "seconds"] / values["original", "seconds"]
    assert values["pruned", "seconds ratio"] == pytest.approx(ratio)
    assert set(table["corpus"]) == {""}
    with pytest.raises(InputError, match="pruned model"):
        pruning.compare_costs(small_model("gpt2"), pruned_llama)


def test_models_take_turns_and_medians_count(plain_model, monkeypatch):
    models = [plain_model("gpt2"), plain_model("llama")]
    seconds = iter([3.0, 1.0, 50.0, 10.0, 4.0, 2.0])  # the second round is slow
    turns = []

    def written(model: Any, prompt: torch.Tensor, n_tokens: int) -> tuple[float, int]:
        turns.append(model)
        assert prompt.tolist() == [[3, 4, 5, 6, 7, 8, 9, 10]]
        return n_tokens * next(seconds), 0

    monkeypatch.setattr(evaluation, "_written", written)
    first, second = time_in_turns(models, rounds=3)
    assert turns == models * 3
    assert (first.rounds, second.rounds) == ([3, 50, 4], [1, 10, 2])
    estimates = second.estimates(first)
    assert (estimates["seconds"].value, estimates["seconds"].n) == (2, 3)
    assert estimates["seconds ratio"].value == pytest.approx(1 / 3)  # of 1/3, 1/5 and 2/4
    assert "seconds ratio" not in first.estimates()
