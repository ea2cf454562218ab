"""Lenses by budget: quality is that of Hugging Face in float64 on a budget's tokens, and rounds continue."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from analysing import assert_figure, run
from conftest import D_MODEL, WORDS
from figures.beyond import plot_budgets
from lens_budgets import AGAINST, LENSES, STEPS
from lenses.budgets import fit_jacobian, is_falling, passages_of, sentences_of, tune_further
from lenses_by_hand import closed_forms, load_in_float64, saved_lens, stream, tokens_of, value
from torch import Tensor

from matlens import Lens, collect, load_corpus, make_examples
from matlens.lens import evaluate_open_sets, read_evaluations, trained

NAME, MODEL = "lens_budgets", "llama"
N_TRAIN, N_VALIDATION, N_STOPPING, N_PASSAGES, LONGEST = 90, 20, 10, 8, 22
LAYERS, BUDGETS, BATCHES, ROUNDS = (1, 2), (150, 700), (16, 32), 3


class Job(NamedTuple):
    out: Path
    table: pd.DataFrame
    corpus: Path
    sets: Path
    samples: dict[str, int]  # read by the training of each lens


@pytest.fixture(scope="module")
def job(model_folder, tmp_path_factory):
    """A run that was killed after the first round and resumed there."""
    folder, generator = tmp_path_factory.mktemp("budgets"), np.random.default_rng(0)
    corpus, out = folder / "words.txt", folder / "out"
    corpus.write_text("\n".join(" ".join(generator.choice(WORDS, 19 + i % 5)) for i in range(110)))
    items = [{"prompt": " ".join(WORDS[i : i + 9]), "intermediates": [WORDS[i]]} for i in range(30)]
    (folder / "lens-eval-multihop.json").write_text(json.dumps({"items": items}))
    options = [
        "--model", model_folder(MODEL), "--corpus", corpus, "--train", N_TRAIN, "--val", N_VALIDATION,
        "--stopping", N_STOPPING, "--jacobian", N_PASSAGES, "--longest", LONGEST, "--rounds", ROUNDS,
        *(part for n in LAYERS for part in ("--layer", n)), "--evaluations", folder,
        *(part for n in BUDGETS for part in ("--budget", n)),
        *(part for n in BATCHES for part in ("--batch", n)), "--device", "cpu", "--out", out,
    ]  # fmt: skip
    calls, samples = [0, 0], dict[str, int]()  # of fits, of rounds
    fit, tune, loss = Lens.fit.__func__, trained.LayerTraining.tune, trained.LayerTraining._loss  # type: ignore[attr-defined]

    def counted(cls: Any, *arguments: Any, **more: Any) -> Any:
        calls[0] += 1
        return fit(cls, *arguments, **more)

    def killed(self: Any, **more: Any) -> None:
        calls[1] += "batch" in more
        if "batch" in more and calls[1] == 2:
            raise KeyboardInterrupt
        tune(self, **more)

    def watched(self: Any, rows: Tensor, *arguments: Any) -> Tensor:
        name = f"{'tuned' if self.residual else 'polished'} {len(self.h)}"
        samples[name] = samples.get(name, 0) + len(rows)
        return loss(self, rows, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lens, "fit", classmethod(counted))
        patch.setattr(trained.LayerTraining, "tune", killed)
        patch.setattr(trained.LayerTraining, "_loss", watched)
        with pytest.raises(SystemExit):
            run(NAME, *options)
        run(NAME, *options)
    table = pd.read_csv(out / f"{NAME}.csv")
    # No passage is left for the last budget, and no fit is repeated but the round that was killed.
    assert calls == [len(LENSES) * 3 - 1, 1 + (table["metric"] == "kl, stopping").sum()]
    assert_figure(out, NAME)
    return Job(out, table, corpus, folder, samples)


@pytest.fixture(scope="module")
def plain(model_folder):
    return load_in_float64(model_folder(MODEL))


def parts_of(job: Job) -> tuple[Any, Any, Any]:
    training, held_out = load_corpus(job.corpus).split(n_train=N_TRAIN, n_validation=N_VALIDATION)
    ends = slice(-N_STOPPING), slice(-N_STOPPING, None)
    first, last = (replace(training, sentences=training.sentences[part]) for part in ends)
    return first, last, held_out


def quality(logits: Tensor, true: Tensor) -> dict[tuple[str, float], Tensor]:
    p, q = true.log_softmax(-1), logits.log_softmax(-1)
    predicted = p.gather(1, q.argmax(-1, keepdim=True))
    rank = (p > predicted).sum(-1) + 1
    metrics = {("precision", float(k)): (rank <= k).double() for k in (1, 10)}
    return metrics | {("surprisal", -1.0): -predicted[:, 0], ("kl", -1.0): (p.exp() * (p - q)).sum(-1)}


MISSING = {"against": "", "k": -1.0, "round": 0, "batch": 0}


def test_quality_and_paired_differences_are_those_by_hand(job, plain, small_model):
    fitted_on, watched_on, held_out = parts_of(job)
    texts, positions = tokens_of(held_out), make_examples(small_model(MODEL), held_out).positions.tolist()
    of_tokens = stream(plain, texts)
    x, ends = stream(plain, tokens_of(fitted_on)), np.cumsum([len(ids) for ids in tokens_of(fitted_on)])
    counts = [next(i + 1 for i, end in enumerate(ends) if end >= n) for n in BUDGETS] + [len(ends)]
    assert sorted(job.table["tokens"].unique()) == [ends[n - 1] for n in counts]

    def head(h: Tensor) -> Tensor:
        with torch.no_grad():
            return plain.lm_head(plain.model.norm(h))

    true = head(torch.stack([each[-1][i] for each, i in zip(of_tokens, positions, strict=True)]))
    final: dict[str, dict[tuple[str, float], Tensor]] = {}
    for n in counts:
        tokens = int(ends[n - 1])
        y = torch.cat([each[-1] for each in x[:n]])
        for layer in LAYERS:
            h = torch.stack([each[layer][i] for each, i in zip(of_tokens, positions, strict=True)])
            inputs = torch.cat([each[layer] for each in x[:n]])
            mat, affine = closed_forms(inputs, y)
            logits = {
                "id": head(h), "mat": head(h @ mat),
                "affine": head(torch.cat([h, torch.ones(len(h), 1)], dim=1) @ affine),
            }  # fmt: skip
            for name in ("scaled", "polished", "tuned", "jacobian"):  # by their weights
                mapped, _, scale = saved_lens(job.out, NAME, f"{name}-{tokens}", layer)
                logits[name] = scale * head(mapped(h))
            assert [*logits] == [*LENSES]
            final = {name: quality(each, true) for name, each in logits.items()}
            rows = job.table[(job.table["tokens"] == tokens) & (job.table["layer"] == layer)]
            for name, metrics in final.items():
                for (metric, k), expected in metrics.items():
                    cells = {"method": name, "metric": metric, "k": k}
                    found = value(rows, MISSING, **cells)
                    assert found == pytest.approx(expected.mean().item(), rel=1e-3, abs=1e-5)
                    for other in AGAINST.get(name, ()):
                        difference = expected - final[other][metric, k]
                        found = value(rows, MISSING, against=other, **cells)
                        assert found == pytest.approx(difference.mean().item(), rel=1e-2, abs=2e-4)
    rounds, others = job.table[job.table["round"].notna()], stream(plain, tokens_of(watched_on))
    assert set(rounds["layer"]) == {layer} == {LAYERS[-1]}
    watched = [head(torch.cat([each[-1] for each in others])), torch.cat([each[layer] for each in others])]
    for batch, number in rounds[["batch", "round"]].drop_duplicates().astype(int).to_numpy():
        mapped, _, _ = saved_lens(job.out, NAME, f"tuned-{batch}-round-{number}", layer)
        read = partial(value, rounds, MISSING, method="tuned", batch=batch, round=number)
        kl = quality(head(mapped(h)), true)["kl", -1.0]
        assert read(metric="kl") == pytest.approx(kl.mean().item(), rel=1e-3)
        difference = (kl - final["polished"]["kl", -1.0]).mean().item()
        assert read(against="polished", metric="kl") == pytest.approx(difference, rel=1e-2, abs=2e-4)
        expected = quality(head(mapped(watched[1])), watched[0])["kl", -1.0].mean().item()
        assert read(metric="kl, stopping") == pytest.approx(expected, rel=1e-3)


def test_tokens_seen_are_those_of_the_steps(job):
    plain = job.table[job.table["against"].isna() & (job.table["metric"] == "kl")]
    all_tokens, in_rounds = plain["tokens"].max(), plain[plain["round"].notna()]
    for (method, tokens), rows in plain[plain["round"].isna()].groupby(["method", "tokens"]):
        (seen,) = set(rows["seen"])
        if method == "polished" or (method == "tuned" and tokens < all_tokens):
            assert seen == job.samples[f"{method} {tokens}"] / len(LAYERS)
        elif method in ("mat", "affine", "scaled"):
            assert seen == tokens
        elif method == "id":
            assert seen == 0
    last = in_rounds.groupby("batch").last()
    default = plain[(plain["method"] == "tuned") & plain["round"].isna() & (plain["tokens"] == all_tokens)]
    assert job.samples[f"tuned {all_tokens}"] == last["seen"].sum() + default["seen"].sum()
    assert (in_rounds["seen"] == in_rounds["round"] * STEPS * in_rounds["batch"]).all()


def test_jacobians_are_of_the_longest_sentences_within_the_budget(job, small_model):
    model, fitted_on = small_model(MODEL), parts_of(job)[0]
    passages = passages_of(model, fitted_on, N_PASSAGES, LONGEST)
    longest = sorted(fitted_on.sentences, key=lambda text: -len(text.split()))[:N_PASSAGES]
    lengths = [min(LONGEST, len(text.split())) for text in passages]
    assert sorted(lengths) == sorted(min(LONGEST, len(text.split())) for text in longest)
    assert [*passages.values()] == np.cumsum(lengths).tolist()
    options: dict[str, Any] = {"layers": [*LAYERS], "longest": LONGEST, "progress": False}
    first = fit_jacobian(model, fitted_on, passages, 3 * LONGEST, **options)
    second = fit_jacobian(model, fitted_on, passages, 5 * LONGEST + 1, (first, 3 * LONGEST), **options)
    for lens, n in ((first, 3), (second, 5)):
        part = replace(fitted_on, sentences=tuple(passages)[:n])
        alone = Lens.fit(model, part, method="jacobian", n_prompts=n, **options)
        torch.testing.assert_close(lens.matrix(2), alone.matrix(2))
        assert lens.provenance.details["n_tokens"] == n * LONGEST
    table = job.table.query("method == 'jacobian' and metric == 'kl' and layer == 2 and against.isna()")
    within = [max(end for end in passages.values() if end <= n) for n in table["tokens"]]
    assert table["seen"].tolist() == within


def test_rounds_begin_where_the_last_one_ended(job, small_model, monkeypatch):
    model, h = small_model(MODEL), torch.randn(4, D_MODEL, generator=torch.Generator().manual_seed(0))
    rows = collect(model, make_examples(model, parts_of(job)[0]), [2, 3], positions="all", progress=False)
    training = trained.LayerTraining(Lens.identity(model).on_readout, rows[2], rows[3], seed=0)
    training.tune(batch=BATCHES[0])
    first, second = (saved_lens(job.out, NAME, f"tuned-{BATCHES[0]}-round-{n}", 2)[:2] for n in (1, 2))
    torch.testing.assert_close(training.result()["weight"].double(), first[1], rtol=1e-4, atol=1e-4)
    begin = tune_further(model, rows, 2, batch=BATCHES[0], seed=0).maps[2]
    further = tune_further(model, rows, 2, batch=BATCHES[0], seed=1, begin=begin)
    torch.testing.assert_close(further(h, 2).double(), second[0](h.double()), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(trained.LayerTraining, "tune", lambda self, **_: setattr(self, "residual", True))
    unchanged = tune_further(model, rows, 2, batch=BATCHES[0], seed=1, begin=begin)
    torch.testing.assert_close(unchanged(h, 2).double(), first[0](h.double()), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(unchanged(h, 2), h)


def test_rounds_end_when_the_kl_stops_falling(job):
    for values in ([3.0], [3.0, 2.96], [3.0, 3.5, 2.9], [3.0, 2.98], [3.0, 2.0, 2.5]):
        assert is_falling(values) == (values[-1] in (3.0, 2.96, 2.9))
    losses = {
        batch: rows["value"].tolist()
        for batch, rows in job.table.query("metric == 'kl, stopping'").groupby("batch")
    }
    ended = next((i for i in range(1, ROUNDS + 1) if not is_falling(losses[16][:i])), ROUNDS)
    assert (len(losses[16]), len(losses[32])) == (ended, 1)
    assert ended > 1


def test_words_passed_are_those_of_the_lenses_of_the_budget(job, small_model):
    rows = job.table[job.table["metric"] == "pass"]
    assert (set(rows["corpus"]), set(rows["n"])) == ({"multihop"}, {30})
    for tokens, found in rows.groupby("tokens"):
        folders = {name: next(job.out.glob(f"studies/*/{NAME}/lens-{name}-{tokens}")) for name in LENSES}
        lenses = {name: Lens.load(folder, small_model(MODEL)) for name, folder in folders.items()}
        expected = evaluate_open_sets(lenses, read_evaluations(job.sets), progress=False)
        both = (each.set_index(["method", "k"])["value"].to_dict() for each in (found, expected))
        assert next(both) == pytest.approx(next(both))
    assert rows["value"].nunique() > 3


def test_sentences_have_the_tokens_of_their_budget():
    offsets = np.array([0, 5, 9, 20, 21])
    assert sentences_of(offsets, [1, 5, 6, 9, 10, 20]) == [1, 2, 3, 4]
    assert sentences_of(offsets, [9]) == [2, 4]
    assert sentences_of(offsets, [10, 21, 99]) == [3, 4]


def test_seconds_are_per_layer_and_add_up(job):
    seconds = json.loads((job.out / f"{NAME}.json").read_text())["seconds"]
    rows, earlier = job.table[job.table["metric"] == "seconds"], 0.0
    for tokens, found in rows[rows["round"].isna()].groupby("tokens"):
        earlier += seconds[f"jacobian-{tokens}"]  # of smaller budgets, whose passages are not read again
        expected = [seconds[f"mat-{tokens}"] / 2, earlier / 2]
        assert found.set_index("method")["value"][["mat", "jacobian"]].tolist() == pytest.approx(
            expected, rel=1e-4
        )
    in_rounds = rows[rows["batch"] == BATCHES[0]].sort_values("round")["value"].to_numpy()
    parts = [seconds[f"tuned-{BATCHES[0]}-round-{n + 1}"] for n in range(len(in_rounds))]
    assert in_rounds == pytest.approx(np.cumsum(parts), rel=1e-4)


def test_the_figure_has_the_values_of_the_table(job):
    lines = [{line.get_label(): line for line in ax.get_lines()} for ax in plot_budgets(job.table).axes]
    assert set(lines[0]) == set(lines[1]) == {*LENSES}
    plain = job.table[job.table["against"].isna() & (job.table["layer"] == LAYERS[-1])]
    panels = [
        (panel, name, "tokens", plain[plain["round"].isna() & (plain["method"] == name)].query(chosen))
        for name in LENSES
        for panel, chosen in ((0, "metric == 'kl'"), (1, "k == 1"))
    ]
    rounds = plain[(plain["batch"] == BATCHES[0]) & (plain["metric"] == "kl")].sort_values("round")
    for panel, name, x, rows in [*panels, (2, f"{BATCHES[0]} per step", "seen", rounds)]:
        expected = rows.sort_values(x)[[x, "value"]].to_numpy()
        assert lines[panel][name].get_xydata() == pytest.approx(expected)
