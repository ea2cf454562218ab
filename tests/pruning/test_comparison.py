"""Methods side by side give what each gives alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calibration_texts import running_text
from conftest import WORDS
from cuts.continuations import beginnings, continuation_losses, continue_prompts, measures
from cuts.maps import Cut, without_blocks
from pruning import PrunedModels, added_perplexity

import matlens
from matlens import InputError, pruning
from matlens.data import Corpus, make_windows
from matlens.pruning import Calibration, read_text

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


def test_a_healed_model_is_judged_healed(small_model, texts):
    """Blocks go one after the other; the model that is healed is another than the folded one."""
    model = small_model("gpt2")
    table = PrunedModels(
        model, texts[0], {"a": texts[1]}, [1, 2], methods=["chain", "out"],
        choices=["greedy", "angle"], heal=60,
    ).table()  # fmt: skip
    calibration = Calibration.run(model, texts[0], "chain", progress=False)
    perplexities = list[float]()
    for n in (1, 2):
        blocks = calibration.choose(n, "greedy", progress=False)
        rows = table[(table["n_removed"] == n) & (table["choice"] == "greedy")]
        assert set(rows["blocks"]) == {" ".join(map(str, blocks))}
        assert list(dict.fromkeys(rows["method"])) == ["chain", "out", "chain, healed"]
        for method in ("chain", "out", "chain, healed"):
            pruned = calibration.without(blocks, method.partition(",")[0], progress=False)
            if method == "chain, healed":
                calibration.heal(pruned, blocks, "chain", 60, progress=False)
            losses = read_text(pruned, texts[1], progress=False).losses
            of_method = rows[rows["method"] == method].set_index("metric")["value"]
            perplexities.append(np.exp(losses.total.sum() / losses.n_tokens.sum()))
            assert of_method["perplexity"] == pytest.approx(perplexities[-1], rel=1e-6)
    assert len({round(value, 6) for value in perplexities}) == 6
    assert "chain, healed" not in set(table[table["choice"] == "angle"]["method"])
    assert "recovered" not in set(table["metric"])


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


def test_each_size_is_timed_once_beside_the_whole(small_model, plain_model, texts, monkeypatch):
    turns = list[int]()

    def written(model: Any, _: Any, n_tokens: int) -> tuple[float, int]:
        turns.append(len(model.transformer.h))
        slow = 10.0 if len(turns) % 5 == 0 else 1.0
        return n_tokens * slow * turns[-1], 40 * 1000 * turns[-1]

    monkeypatch.setattr("matlens.pruning.evaluation._written", written)
    table = PrunedModels(
        small_model("gpt2"), texts[0], {"a": texts[1]}, [2, 1], methods=["out"], choices=CHOICES,
    ).table()  # fmt: skip
    assert turns == [3, 1] * 7 + [3, 2] * 7
    costs = table[table["corpus"] == ""]
    values = {(row.method, row.n_removed, row.metric): row.value for row in costs.itertuples()}
    sizes = {0: ("original", 3), 1: ("pruned", 2), 2: ("pruned", 1)}
    assert {key[:2] for key in values} == {(method, n) for n, (method, _) in sizes.items()}
    for n, (method, n_blocks) in sizes.items():
        assert values[method, n, "seconds"] == n_blocks
        assert values[method, n, "cache"] == 1000 * n_blocks
    weights = [values[method, n, "weights"] for n, (method, _) in sizes.items()]
    whole = sum(weight.numel() * 4 for weight in plain_model("gpt2").parameters())
    assert weights[0] == whole
    assert weights[0] - weights[1] == weights[1] - weights[2] > 0
    assert ("original", 0, "seconds ratio") not in values
    assert [values["pruned", n, "seconds ratio"] for n in (1, 2)] == pytest.approx([2 / 3, 1 / 3])


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
