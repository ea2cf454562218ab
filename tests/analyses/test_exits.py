"""Early exit: outcomes, classifiers, the comparison of methods and all readings, against plain loops."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import N_LAYERS, WORDS, assert_near, plain_vectors
from exits import comparison
from exits.classifiers import LASSO, RIDGE, ExitClassifiers, best_threshold
from exits.comparison import classifier_features, classifier_sites
from exits.outcomes import EvaluatedExits, ExampleSplit, evaluate_exits, split_examples, summarize_exits
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_values import NORM_BEHIND
from rule_by_hand import layer_left
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import StratifiedKFold
from small_lenses import Sharp
from traces import make_clusters, make_trace

from matlens import InputError, collect, ffn, make_examples
from matlens.data.corpus import Corpus

STRENGTHS = (1e-4, 3e-2, 1e-1, 1.0)
SEEDS, MANY = 2, 90
OPTIONS: dict[str, Any] = {"seeds": SEEDS, "strengths": [1e-2], "kinds": [RIDGE], "folds": 2, "fewest": 2}


@pytest.mark.parametrize("n", [10, 19, 57])
def test_parts_are_disjoint_and_complete(n):
    split = split_examples(n, seed=3)
    assert sorted(np.concatenate(split)) == list(range(n))
    assert (len(split.test), len(split.calibration)) == (n // 10, n // 10)
    assert all((one == two).all() for one, two in zip(split, split_examples(n, seed=3), strict=True))
    assert any((one != two).any() for one, two in zip(split, split_examples(n, seed=4), strict=True))


def test_outcomes_are_counted_and_chance_is_over_all_ways_to_deal_out_the_layers():
    right = np.random.default_rng(0).random((5, 4)) < 0.5
    right[:, -1] = True
    leaves = np.array([0, 3, 1, 1, 2])
    dealt = [(order, evaluate_exits(np.array(order), right)) for order in itertools.permutations(leaves)]
    accuracies = [one.accuracy for _, one in dealt]
    assert len(set(accuracies)) > 2
    for order, one in dealt:
        saved = [3 - layer for row, layer in enumerate(order) if right[row, layer]]
        assert (one.accuracy, one.exited) == (len(saved) / 5, 0.8)
        assert one.saved == pytest.approx(np.mean(saved))
        assert one.chance == pytest.approx(np.mean(accuracies))
        assert one.chance_sd == pytest.approx(np.std(accuracies))
    alone = evaluate_exits(np.array([0]), np.array([[False, True]]))
    assert (alone.accuracy, alone.chance_sd, np.isnan(alone.saved)) == (0, 0, True)


def test_the_summary_is_mean_and_deviation_over_seeds():
    evaluated = {"a": [EvaluatedExits(0.8, 3, 0.5, 0.6, 0), EvaluatedExits(0.9, 5, 0.7, 0.5, 0)]}
    assert summarize_exits(evaluated, 16).to_dict("records") == [{
        "method": "a", "accuracy": pytest.approx(0.85), "accuracy_sd": pytest.approx(0.1 / 2**0.5),
        "saved": 4, "saved_sd": pytest.approx(2**0.5), "saved_share": 0.25, "exited": pytest.approx(0.6),
        "chance": pytest.approx(0.55), "above": pytest.approx(0.3), "above_sd": pytest.approx(0.02**0.5),
        "seeds": 2,
    }]  # fmt: skip


def by_loops(
    x: np.ndarray, truth: np.ndarray, kinds: tuple[int, ...], folds: int, seed: int
) -> tuple[str, np.ndarray]:
    """The penalty with the best mean average precision, and the scores of all examples with it."""

    def fitted(rows: np.ndarray, kind: int, strength: float) -> np.ndarray:
        mean, sd = x[rows].mean(0), x[rows].std(0)
        y = truth[rows]
        weight = np.where(y, len(y) / (2 * y.sum()), len(y) / (2 * (~y).sum()))
        model = LogisticRegression(
            C=strength, l1_ratio=kind, solver="liblinear" if kind else "lbfgs", max_iter=5000,
            random_state=seed,
        )  # fmt: skip
        return model.fit((x[rows] - mean) / sd, y, sample_weight=weight).decision_function((x - mean) / sd)

    tried = []
    for kind, strength in itertools.product(kinds, STRENGTHS):
        precisions = []
        for train, held in StratifiedKFold(folds, shuffle=True, random_state=seed).split(x, truth):
            precisions.append(average_precision_score(truth[held], fitted(train, kind, strength)[held]))
        tried.append((np.mean(precisions), kind, strength))
    _, kind, strength = max(tried, key=lambda each: each[0])
    return f"{('ridge', 'lasso')[kind]} {strength:g}", fitted(np.arange(len(x)), kind, strength)


@pytest.mark.parametrize(
    ("seed", "kinds"), [(0, (RIDGE, LASSO)), (1, (RIDGE, LASSO)), (1, (RIDGE,))], ids=str
)
def test_penalty_weights_and_threshold_are_those_of_a_plain_loop(seed, kinds):
    """One coordinate of thirty tells, with more or less noise; their sizes are very different."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(150, 30))
    truth = x[:, 0] + [0.1, 1][seed] * generator.normal(size=150) > 0.5
    x *= 10.0 ** generator.integers(-2, 3, 30)
    split = ExampleSplit(np.arange(100), np.arange(100, 125), np.arange(125, 150))
    learnt = ExitClassifiers(strengths=STRENGTHS, kinds=kinds, folds=4, fewest=2, seed=seed)
    learnt.fit([x], np.where(truth, 0, -1), split)
    penalty, expected = by_loops(x[:100], truth[:100], kinds, 4, seed)
    assert learnt.penalties == [penalty]
    np.testing.assert_allclose(learnt.models_[0].decision_function(x[:100]), expected, atol=2e-3)
    score = learnt.models_[0].predict_proba(x)[:, 1]
    assert learnt.thresholds_ == [best_threshold(score[100:125], truth[100:125])]
    said = learnt.signals([x], split.test)[:, 0]
    assert (said == (score[125:] >= learnt.thresholds_[0])).all()
    assert 0 < said.sum() < len(said)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=25))
def test_the_threshold_has_the_largest_f1_of_all(pairs):
    """Of those midway between two scores, and of the lowest score; the highest of equals."""
    score = np.array([value / 6 for value, _ in pairs])
    truth = np.array([true for _, true in pairs])
    known = sorted(set(score), reverse=True)
    best, wanted = Fraction(-1), 0.0
    for threshold in [*((a + b) / 2 for a, b in itertools.pairwise(known)), known[-1]]:
        hits = sum(t and s >= threshold for s, t in zip(score, truth, strict=True))
        wrong = sum(t != (s >= threshold) for s, t in zip(score, truth, strict=True))
        f1 = Fraction(2 * int(hits), 2 * int(hits) + int(wrong)) if hits + wrong else Fraction(0)
        if f1 > best:
            best, wanted = f1, threshold
    assert best_threshold(score, truth) == wanted


def test_layers_without_enough_of_a_class_are_not_learnt():
    """Too few events to learn from or to calibrate on: never. Too few others: always."""
    n = 100
    x = np.random.default_rng(0).normal(size=(n, 2))
    split = ExampleSplit(np.arange(60), np.arange(60, 80), np.arange(80, n))

    def learnt(events: int, calibrating: int) -> ExitClassifiers:
        made_at = np.full(n, -1)
        made_at[:events] = made_at[60 : 60 + calibrating] = 0
        return ExitClassifiers(folds=3, fewest=5).fit([x], made_at, split)

    for events, calibrating, model, always in (
        (5, 5, True, False), (4, 5, False, False), (5, 4, False, False), (0, 0, False, False),
        (55, 5, True, False), (56, 5, False, True), (60, 20, False, True), (60, 4, False, False),
    ):  # fmt: skip
        classifiers = learnt(events, calibrating)
        assert (classifiers.models_[0] is not None) == model
        assert len(classifiers.penalties) == model
        if not model:
            assert classifiers.signals([x], split.test)[:, 0].tolist() == [always] * 20


def sharp(model: Any) -> Sharp:
    readout = Sharp(model)
    readout.factor = 30.0
    return readout


def corpus(n: int) -> Corpus:
    generator = np.random.default_rng(5)
    texts = tuple(" ".join(generator.choice(WORDS, int(generator.integers(5, 12)))) for _ in range(n))
    return Corpus("words", texts, n, 0, 0, 0)


@pytest.fixture(scope="module")
def study(small_model):
    """Everything that `compare_exits` is given, and what it gives."""
    model = small_model("gptj")
    examples = make_examples(model, corpus(MANY), seed=1)
    trace = ffn.Trace.run(model, examples, k=4, progress=False)
    clusters = ffn.Clusters.fit(ffn.ValueVectors(model), 30)
    activations = collect(model, examples, classifier_sites(model), progress=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "Readout", sharp)
        given = model, trace, clusters, activations
        evaluated, penalties = comparison.compare_exits(*given, **OPTIONS)
    return SimpleNamespace(
        given=given, model=model, activations=activations, evaluated=evaluated, penalties=penalties,
        layer=ffn.find_saturation(trace).layer.numpy(), active=ffn.active_clusters(trace, clusters).tolist(),
        right=(trace.after == trace.after[:, -1:]).numpy(),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "gptj", "bert", "gemma3"])
def test_classifiers_see_the_stream_before_the_ffn_and_what_it_writes(name, small_model, plain_model):
    model = small_model(name)
    before = ("h", "attn_out") if name in ("gptj", "neox") else ("mid",)
    written = "ln2_post_out" if name in NORM_BEHIND else "ffn_out"
    examples = make_examples(model, corpus(6), seed=1)
    activations = collect(model, examples, classifier_sites(model), progress=False)
    features = [torch.from_numpy(np.stack(each)) for each in classifier_features(model, activations).values()]
    for row, (start, end) in enumerate(itertools.pairwise(examples.offsets)):
        plain = plain_vectors(name, plain_model(name), torch.from_numpy(examples.tokens[start:end]))
        at = examples.positions[row]
        for layer in range(N_LAYERS):
            x = torch.stack([plain[f"{kind}.{layer}"][0, at] for kind in before]).sum(0)
            o = plain[f"{written}.{layer}"][0, at]
            for ours, expected in zip(features, (x, o, x + o), strict=True):
                assert_near(ours[layer, row], expected)
            if name != "bert":  # whose norm follows
                assert_near(features[2][layer, row], plain[f"h.{layer + 1}"][0, at])


def by_rule(study: Any, learn: np.ndarray, rows: np.ndarray, overlap: str = "sets") -> np.ndarray:
    """Where the rule leaves, example by example."""
    known, made_at = [study.active[row] for row in learn], study.layer[learn].tolist()
    return np.array([layer_left(study.active[row], known, made_at, "later", overlap) for row in rows])


def test_the_rule_the_oracle_and_classifiers_are_evaluated_on_the_test_part(study):
    counted: dict[str, int] = {}
    for seed in range(SEEDS):
        train, calibration, test = split = split_examples(MANY, seed=seed)
        learn = np.concatenate([train, calibration])
        left = {
            comparison.ORACLE: study.layer[test],
            comparison.RULE: by_rule(study, learn, test),
            comparison.PLACES: by_rule(study, learn, test, "places"),
        }
        for method, features in classifier_features(study.model, study.activations).items():
            learnt = ExitClassifiers(strengths=[1e-2], kinds=[RIDGE], folds=2, fewest=2, seed=seed)
            signals = learnt.fit(features[:-1], study.layer, split).signals(features[:-1], test)
            left[method] = np.array([[*row, True].index(True) for row in signals])
            counted[method] = counted.get(method, 0) + len(learnt.penalties)
        for method, layers in left.items():
            assert study.evaluated[method][seed] == evaluate_exits(layers, study.right[test]), method
        assert study.evaluated[comparison.ORACLE][seed].accuracy == 1
    assert len(set(study.layer)) == N_LAYERS, "all are made at one layer, which proves little"
    assert sum(exits.exited for exits in study.evaluated[comparison.RULE]) > 0, "nobody leaves"
    assert all(counted.values()), "nothing is learnt, which proves little"
    assert study.penalties == {method: {"ridge 0.01": n} for method, n in counted.items()}


def test_what_is_set_by_the_rule_is_as_right_as_it_on_the_calibration_part(study):
    """The least lam and the first layer that are; `mat` fitted by LAPACK on the training part alone."""
    readout, data = sharp(study.model), study.activations
    positions = data.examples.positions
    final = [int(readout.logits(data[-1][row]).argmax()) for row in range(MANY)]
    for seed in range(SEEDS):
        train, calibration, test = split_examples(MANY, seed=seed)
        wanted = study.right[calibration, by_rule(study, train, calibration)].mean()
        layers = [layer for layer in range(N_LAYERS) if study.right[calibration, layer].mean() >= wanted]
        expected = evaluate_exits(np.full(len(test), layers[0]), study.right[test])
        assert study.evaluated[comparison.FIXED][seed] == expected
        mean_length = sum(positions[row] + 1 for row in train) / len(train)
        for method in ("id", "mat"):
            said = {}
            for row, layer in itertools.product((*calibration, *test), range(1, N_LAYERS + 1)):
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
                if np.mean([said[row, leave(row, lam)][1] for row in calibration]) >= wanted:
                    break
            left = [leave(row, lam) for row in test]
            hits = [said[row, layer][1] for row, layer in zip(test, left, strict=True)]
            exits = study.evaluated[f"confidence, {method}"][seed]
            assert exits.accuracy == pytest.approx(np.mean(hits))
            saved = [N_LAYERS - layer for layer, hit in zip(left, hits, strict=True) if hit]
            assert exits.saved == pytest.approx(np.mean(saved))


def test_vectors_of_other_examples_are_refused(study):
    *given, activations = study.given
    with pytest.raises(InputError, match="activations must be of the examples of the trace"):
        comparison.compare_exits(*given, activations.head(MANY - 1), **OPTIONS)


def test_every_reading_tests_every_example_once():
    """Candidates that agree with the final token from a layer on that the clusters tell, at 1 of 3 layers."""
    generator, n, n_layers = np.random.default_rng(0), 60, 3
    made = generator.integers(0, n_layers, n)
    after = torch.from_numpy(
        np.where(np.arange(n_layers) >= made[:, None], 7, generator.integers(0, 7, (n, 3)))
    )
    by_ffn = np.arange(n) % 3 > 0  # of the others attention has brought the token up
    before = torch.from_numpy(np.where(np.arange(n_layers) >= made[:, None] + by_ffn[:, None], 7, 8))
    trace = make_trace(before, after, torch.zeros(n, n_layers), k=2)
    index = generator.integers(0, 4, (n, n_layers, 2))
    index[np.arange(n), made, 0] = 5
    trace.index["dominant"] = torch.from_numpy(index)
    identity = trace.provenance.identity
    clusters = {18 // size: make_clusters(np.arange(18) // size, identity) for size in (1, 2)}
    table = comparison.compare_readings(trace, list(clusters.values()), seed=3)
    assert len(table.drop_duplicates(["clusters", "overlap", "others", "events"])) == len(table) == 24
    parts = np.array_split(np.random.default_rng(3).permutation(n), 10)
    right = (after == 7).numpy()
    for row in table.to_dict("records"):
        active = ffn.active_clusters(trace, clusters[row["clusters"]]).tolist()
        made_at = made if row["events"] == "FFN and attention" else np.where(by_ffn, made, -1)
        leaves, chances, variances = np.zeros(n, int), 0.0, 0.0
        for part in parts:
            rest = [i for i in range(n) if i not in part]
            how = [active[i] for i in rest], made_at[rest].tolist(), row["others"], row["overlap"]
            leaves[part] = [layer_left(active[i], *how) for i in part]
            evaluated = evaluate_exits(leaves[part], right[part])
            chances += len(part) * evaluated.chance / n
            variances += (len(part) * evaluated.chance_sd / n) ** 2
        hits, sd = right[np.arange(n), leaves], variances**0.5
        z = abs(hits.mean() - chances) / sd if sd else 0
        expected = {
            "n": n, "accuracy": hits.mean(), "exited": (leaves < 2).mean(),
            "saved": (2 - leaves)[hits].mean(),
            "chance": chances, "chance_sd": sd, "above": hits.mean() - chances, "p": math.erfc(z / 2**0.5),
        }  # fmt: skip
        assert {name: row[name] for name in expected} == pytest.approx(expected)
    published = table[(table["others"] == "later") & (table["overlap"] == "sets")].iloc[0]
    assert published["exited"] > 0.3
    assert published["p"] < 1e-3


def test_parts_of_different_sizes_and_accuracies_are_pooled_as_all_examples():
    generator = np.random.default_rng(2)
    parts = [
        (generator.integers(0, 4, n), generator.random((n, 4)) < share)
        for n, share in ((7, 0.2), (12, 0.9), (5, 0.0))
    ]
    pooled = comparison._pooled([evaluate_exits(*part) for part in parts], np.array([7, 12, 5]), 4)
    together = evaluate_exits(*map(np.concatenate, zip(*parts, strict=True)))
    assert (pooled["accuracy"], pooled["saved"], pooled["exited"]) == pytest.approx(together[:3])
