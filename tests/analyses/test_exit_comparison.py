"""Ways of leaving early, on small models, against loops over examples written from the definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from conftest import N_LAYERS, WORDS, assert_near, plain_vectors
from exits import comparison
from exits.classifiers import RIDGE, ExitClassifiers
from exits.comparison import classifier_features, classifier_sites, compare_exits, least_lam
from exits.outcomes import evaluate_exits, split_examples
from plain_values import NORM_BEHIND
from small_lenses import Sharp

from matlens import InputError, Readout, collect, make_examples
from matlens.data.corpus import Corpus
from matlens.ffn.clusters import Clusters
from matlens.ffn.events import find_saturation
from matlens.ffn.trace import Trace
from matlens.ffn.values import ValueVectors
from matlens.lens.early_exit import ExitConfidence

SEEDS, MANY = 2, 90
OPTIONS: dict[str, Any] = {"seeds": SEEDS, "strengths": [1e-2], "kinds": [RIDGE], "folds": 2, "fewest": 2}


def sharp(model: Any) -> Readout:
    readout = Sharp(model)
    readout.factor = 30.0
    return readout


def corpus(n: int) -> Corpus:
    generator = np.random.default_rng(5)
    texts = tuple(" ".join(generator.choice(WORDS, int(generator.integers(5, 12)))) for _ in range(n))
    return Corpus("words", texts, n, 0, 0, 0)


class ComparedModel:
    """Everything that `compare_exits` is given, and what it gives."""

    def __init__(self, model: Any) -> None:
        self.model, examples = model, make_examples(model, corpus(MANY), seed=1)
        self.trace = Trace.run(model, examples, k=4, progress=False)
        self.clusters = Clusters.fit(ValueVectors(model), 30)
        self.activations = collect(model, examples, classifier_sites(model), progress=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comparison, "Readout", sharp)
            self.comparison = compare_exits(model, self.trace, self.clusters, self.activations, **OPTIONS)
        saturation = find_saturation(self.trace)
        self.layer, self.by_ffn = saturation.layer.numpy(), saturation.by_ffn.numpy()
        self.right = (self.trace.after == self.trace.after[:, -1:]).numpy()


@pytest.fixture(scope="module")
def study(small_model):
    return ComparedModel(small_model("gptj"))


@pytest.mark.parametrize("name", ["gpt2", "gptj", "bert", "gemma3"])
def test_classifiers_see_the_stream_before_the_ffn_and_what_it_writes(name, small_model, plain_model):
    model = small_model(name)
    before = ("h", "attn_out") if name in ("gptj", "neox") else ("mid",)
    written = "ln2_post_out" if name in NORM_BEHIND else "ffn_out"
    examples = make_examples(model, corpus(6), seed=1)
    x, o, total = classifier_features(
        model, collect(model, examples, classifier_sites(model), progress=False)
    ).values()
    for row, (start, end) in enumerate(zip(examples.offsets[:-1], examples.offsets[1:], strict=True)):
        plain = plain_vectors(name, plain_model(name), torch.from_numpy(examples.tokens[start:end]))
        at = examples.positions[row]
        for layer in range(N_LAYERS):
            before_ffn = torch.stack([plain[f"{kind}.{layer}"][0, at] for kind in before]).sum(0)
            assert_near(torch.from_numpy(x[layer][row]), before_ffn)
            assert_near(torch.from_numpy(o[layer][row]), plain[f"{written}.{layer}"][0, at])
            assert_near(torch.from_numpy(total[layer][row]), before_ffn + plain[f"{written}.{layer}"][0, at])
            if name != "bert":  # whose norm follows
                assert_near(torch.from_numpy(total[layer][row]), plain[f"h.{layer + 1}"][0, at])


def test_leaving_where_the_prediction_is_made_is_always_right(study):
    for seed, exits in enumerate(study.comparison.evaluated[comparison.ORACLE]):
        test = split_examples(MANY, seed=seed).test
        assert exits.accuracy == 1
        assert exits.saved == pytest.approx(np.mean([N_LAYERS - 1 - study.layer[row] for row in test]))
    assert len(set(study.layer)) == N_LAYERS, "all are made at one layer, which proves little"


def by_rule(study: ComparedModel, learn: np.ndarray, rows: np.ndarray, *, places: bool = False) -> list[int]:
    """Where the rule leaves, example by example."""
    d_mlp = len(study.clusters.labels) // N_LAYERS
    dominant, size = (getattr(study.trace, name)["dominant"].numpy() for name in ("index", "coefficient"))
    order = np.argsort(-abs(size), axis=-1, kind="stable")
    index = np.take_along_axis(dominant, order, -1)
    clusters = [
        [list(study.clusters.labels[layer * d_mlp + index[row, layer]]) for layer in range(N_LAYERS)]
        for row in range(MANY)
    ]

    def overlap(row: int, other: int, layer: int) -> int:
        mine, theirs = clusters[row][layer], clusters[other][layer]
        return sum(map(int.__eq__, map(int, mine), map(int, theirs))) if places else len({*mine} & {*theirs})

    left = []
    for row in rows:
        for layer in range(N_LAYERS):
            sizes = [
                [overlap(row, i, layer) for i in learn if study.layer[i] == made]
                for made in range(layer, N_LAYERS)
            ]
            signal = sizes[0] and all(
                np.mean(sizes[0]) > np.mean(later) and max(sizes[0]) > max(later)
                for later in sizes[1:]
                if later
            )
            if signal or layer == N_LAYERS - 1:
                left.append(layer)
                break
    return left


def test_the_rule_learns_from_ninety_per_cent(study):
    early = 0.0
    for seed in range(SEEDS):
        train, calibration, test = split_examples(MANY, seed=seed)
        learn = np.concatenate([train, calibration])
        for method, places in ((comparison.RULE, False), (comparison.PLACES, True)):
            left = by_rule(study, learn, test, places=places)
            hits = [bool(study.right[row, layer]) for row, layer in zip(test, left, strict=True)]
            exits = study.comparison.evaluated[method][seed]
            assert exits.accuracy == pytest.approx(np.mean(hits))
            saved = [N_LAYERS - 1 - layer for layer, hit in zip(left, hits, strict=True) if hit]
            assert exits.saved == pytest.approx(np.mean(saved))
            early += exits.exited
    assert early > 0, "nobody leaves, which proves little"


def test_what_is_set_by_the_rule_is_as_right_as_it_on_the_calibration_part(study):
    """The least lam and the first layer that are; `mat` fitted by LAPACK on the training part alone."""
    readout, data = sharp(study.model), study.activations
    positions = data.examples.positions
    final = [int(readout.logits(data[-1][row]).argmax()) for row in range(MANY)]
    for seed in range(SEEDS):
        train, calibration, test = split_examples(MANY, seed=seed)
        left = by_rule(study, train, calibration)
        wanted = np.mean([study.right[row, layer] for row, layer in zip(calibration, left, strict=True)])
        layers = [layer for layer in range(N_LAYERS) if study.right[calibration, layer].mean() >= wanted]
        expected = evaluate_exits(np.full(len(test), layers[0]), study.right[test])
        assert study.comparison.evaluated[comparison.FIXED][seed] == expected
        mean_length = sum(positions[row] + 1 for row in train) / len(train)
        for method in ("id", "mat"):
            said = {}
            for row in (*calibration, *test):
                for layer in range(1, N_LAYERS + 1):
                    h = data[layer][row].double()
                    if method == "mat" and layer < N_LAYERS:
                        x, y = (data[i][torch.from_numpy(train)].double() for i in (layer, N_LAYERS))
                        h = h @ torch.linalg.lstsq(x, y, driver="gelsd").solution
                    p = readout.logits(h.float()).double().softmax(-1)
                    first, second = p.topk(2).values.tolist()
                    said[row, layer] = first - second, int(p.argmax()) == final[row]

            def leave(row: int, lam: float, said: Any = said, mean: float = mean_length) -> int:
                threshold = 0.9 * lam + 0.1 * math.exp(-4 * positions[row] / mean)
                passed = [layer for layer in range(1, N_LAYERS) if said[row, layer][0] > threshold]
                return passed[0] if passed else N_LAYERS

            for lam in np.linspace(-0.112, 1.112, 613):
                hits = [said[row, leave(row, lam)][1] for row in calibration]
                if np.mean(hits) >= wanted:
                    break
            left = [leave(row, lam) for row in test]
            hits = [said[row, layer][1] for row, layer in zip(test, left, strict=True)]
            exits = study.comparison.evaluated[f"confidence, {method}"][seed]
            assert exits.accuracy == pytest.approx(np.mean(hits))
            saved = [N_LAYERS - layer for layer, hit in zip(left, hits, strict=True) if hit]
            assert exits.saved == pytest.approx(np.mean(saved))


def test_classifiers_learn_events_below_the_last_layer_from_the_training_part(study):
    counted: dict[str, int] = {}
    for seed in range(SEEDS):
        split = split_examples(MANY, seed=seed)
        for method, features in classifier_features(study.model, study.activations).items():
            learnt = ExitClassifiers(strengths=[1e-2], kinds=[RIDGE], folds=2, fewest=2, seed=seed)
            learnt.fit(features[:-1], study.layer, split)
            signals = learnt.signals(features[:-1], split.test)
            left = np.array([list(row).index(True) if row.any() else N_LAYERS - 1 for row in signals])
            assert study.comparison.evaluated[method][seed] == evaluate_exits(left, study.right[split.test])
            counted[method] = counted.get(method, 0) + len(learnt.penalties)
    assert all(counted.values()), "nothing is learnt, which proves little"
    assert study.comparison.penalties == {method: {"ridge 0.01": n} for method, n in counted.items()}


def test_vectors_of_other_examples_are_refused(study):
    few = study.activations.head(MANY - 1)
    with pytest.raises(InputError, match="activations must be of the examples of the trace"):
        compare_exits(study.model, study.trace, study.clusters, few, **OPTIONS)


def test_the_least_lam_is_the_first_of_the_steps_that_is_right_often_enough():
    """All at position 0 of sentences of one token: the threshold is 0.9 lam + 0.1."""
    at = torch.zeros(4, dtype=torch.long)
    confidence = ExitConfidence(
        torch.tensor([[0.2, 0.9, 0.9], [0.3, 0.9, 0.9], [0.5, 0.9, 0.9], [0.7, 0.8, 0.9]]),
        torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 0, 1]]) == 1,
    )
    for wanted, gap in ((0.5, 0.0), (0.51, 0.2), (0.75, 0.2), (0.76, 0.3), (1.0, 0.3)):
        lam = least_lam(confidence, at, 1.0, wanted)
        if not gap:
            assert lam == pytest.approx(-0.112)
            continue
        # The first step whose threshold that example's confidence does not exceed.
        assert 0.9 * lam + 0.1 >= gap - 1e-6
        assert 0.9 * (lam - 0.002) + 0.1 < gap
