"""Causal reads of lenses: reads, moves and flips of a small model are those of Hugging Face in float64."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from analysing import assert_figure, run
from conftest import D_MODEL, N_LAYERS, WORDS
from lens_causal import DOSES, LENSES, crossing, half_dose, median
from lenses import causal
from lenses.causal import N_RANDOM
from lenses_by_hand import closed_forms, load_in_float64, saved_lens, stream, tokens_of, value
from torch import Tensor

from matlens import load_corpus

NAME, MODEL, N_TRAIN = "lens_causal", "llama", 60
LAYERS = range(1, N_LAYERS)


class Job(NamedTuple):
    out: Path
    table: pd.DataFrame
    prompts: list[list[int]]
    answers: list[int]
    templates: list[str]
    corpus: Path


@pytest.fixture(scope="module")
def plain(model_folder):
    return load_in_float64(model_folder(MODEL))


@pytest.fixture(scope="module")
def job(plain, model_folder, tmp_path_factory):
    """A run that was killed at its second layer and resumed there, on facts that the model answers or not."""
    folder, generator = tmp_path_factory.mktemp("causal"), np.random.default_rng(0)
    corpus, facts = folder / "words.txt", folder / "facts.txt"
    corpus.write_text("\n".join(" ".join(generator.choice(WORDS, 20 + i % 5)) for i in range(90)))
    blocks, prompts, answers, templates = [], [], [], []
    shown = [("w10", "w11"), ("w12", "w13")]
    for template, alone in (("w1 w3 w2 {}", 5), ("w6 w4 w5 {}", 5), ("w8 w7 {}", 1)):
        lines = [f"{subject}: {answer}" for subject, answer in shown]
        before = " ".join(f"{template.format(subject)} {answer}" for subject, answer in shown)
        for subject in WORDS[20 : 20 + alone]:
            ids = [WORDS.index(word) + 2 for word in f"{before} {template.format(subject)}".split()]
            with torch.no_grad():
                top = int(plain(torch.tensor([ids])).logits[0, -1].argmax())
            if not 2 <= top < len(WORDS) + 2:  # no word
                continue
            lines.append(f"{subject}: {WORDS[top - 2]}")
            if alone > 1:  # without another, there is no rival
                prompts.append(ids)
                answers.append(top)
                templates.append(template)
        lines += ["w40: w41 w42", f"w43: {WORDS[(top + 3) % 40]}"]  # two tokens; most likely not the answer
        blocks.append("\n".join([template, *lines]))
    facts.write_text("\n\n".join(blocks) + "\n")
    out, calls, move = folder / "out", [0], causal.move_stream
    options = [
        "--model", model_folder(MODEL), "--corpus", corpus, "--train", N_TRAIN, "--val", 20, "--every", 1,
        "--facts", facts, "--jacobian", 2, "--device", "cpu", "--out", out,
    ]  # fmt: skip

    def killed(*arguments: Any, **more: Any) -> dict[str, Tensor]:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        return move(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal, "move_stream", killed)
        with pytest.raises(SystemExit):
            run(NAME, *options)
        run(NAME, *options)
    assert calls[0] == 1 + 1 + 1  # neither lenses nor the first layer are computed again
    assert_figure(out, NAME)
    return Job(out, pd.read_csv(out / f"{NAME}.csv"), prompts, answers, templates, corpus)


class Reference(NamedTuple):
    """Layer by layer, by hand: flips and units by direction, and reads by lens."""

    flips: dict[tuple[str, str], np.ndarray]
    units: dict[tuple[str, str], np.ndarray]
    above: dict[str, np.ndarray]
    first: dict[str, np.ndarray]
    before: np.ndarray


def rivals(job: Job) -> list[int]:
    return list(json.loads((job.out / f"{NAME}.json").read_text())["rivals"])


def answer_of(plain: Any, ids: list[int], layer: int, h: Tensor) -> Tensor:
    """The model's logits with another vector at the last token of a layer."""

    def replace(_: Any, args: Any, kwargs: Any) -> Any:
        return (torch.cat([args[0][:, :-1], h[None, None]], dim=1), *args[1:]), kwargs

    handle = plain.model.layers[layer].register_forward_pre_hook(replace, with_kwargs=True)
    logits = plain(torch.tensor([ids])).logits[0, -1]
    handle.remove()
    return logits


def readers(plain: Any, job: Job, layer: int) -> dict[str, tuple[Callable[[Tensor], Tensor], Tensor, float]]:
    """Each lens by hand: its approximation of the last layer, its matrix, and the factor on its logits."""
    part = load_corpus(job.corpus).split(n_train=N_TRAIN, n_validation=20)[0]
    h = stream(plain, tokens_of(part))
    mat, affine = (
        each.T for each in closed_forms(*(torch.cat([text[i] for text in h]) for i in (layer, -1)))
    )
    found: dict[str, Any] = {
        "id": (lambda h: h, torch.eye(D_MODEL).double(), 1.0),
        "mat": (lambda h: mat @ h, mat, 1.0),
        "affine": (lambda h: affine[:, :-1] @ h + affine[:, -1], affine[:, :-1], 1.0),
    }
    for name in ("polished", "tuned", "jacobian"):  # trained: by their weights
        found[name] = saved_lens(job.out, NAME, name, layer)
    assert [*found] == [*LENSES]
    return found


@pytest.fixture(scope="module", params=LAYERS)
def reference(request, plain, job):
    layer, n = request.param, len(job.prompts)
    other = rivals(job)
    vectors = [each[layer][-1] for each in stream(plain, job.prompts)]
    lenses = readers(plain, job, layer)
    random = torch.randn(N_RANDOM, n, D_MODEL, generator=torch.Generator().manual_seed(0)).double()
    result = Reference({}, {}, {name: np.zeros(n, bool) for name in lenses}, {}, np.zeros(n))
    result.first.update({name: np.zeros(n, bool) for name in lenses})

    def head(y: Tensor) -> Tensor:
        return plain.lm_head(plain.model.norm(y))

    for i, (ids, h, answer, rival) in enumerate(zip(job.prompts, vectors, job.answers, other, strict=True)):

        def slope(
            logits: Callable[[Tensor], Tensor], at: Tensor, pair: tuple[int, int] = (rival, answer)
        ) -> Tensor:
            at = at.clone().requires_grad_()
            scores = logits(at)
            return torch.autograd.grad(scores[pair[0]] - scores[pair[1]], at)[0]

        directions, claims = {}, {}
        for name, (mapped, matrix, scale) in lenses.items():
            scores = head(mapped(h)).detach()
            result.above[name][i] = scores[answer] > scores[rival]
            result.first[name][i] = int(scores.argmax()) == answer
            claims[name] = slope(lambda x, f=mapped, c=scale: c * head(f(x)), h)
            directions[name, "transpose"] = claims[name]
            if name != "id":
                back = torch.from_numpy(np.linalg.pinv(matrix.numpy()))
                directions[name, "pseudo-inverse"] = back @ slope(head, mapped(h).detach())
        claims["model"] = slope(lambda x, ids=ids: answer_of(plain, ids, layer, x), h)
        directions["model", "transpose"] = claims["model"]
        directions |= {("random", str(k)): each[i] for k, each in enumerate(random)}
        with torch.no_grad():
            start = answer_of(plain, ids, layer, h)
            result.before[i] = start[answer] - start[rival]
            for key, along in directions.items():
                along = along / along.norm()
                moved = [answer_of(plain, ids, layer, h + dose * h.norm() * along) for dose in DOSES]
                flips = [int(logits.argmax()) == rival for logits in moved]
                result.flips.setdefault(key, np.zeros((n, len(DOSES))))[i] = flips
                gaps = [float(logits[rival] - logits[answer]) for logits in (start, *moved)]
                k = next((k for k, gap in enumerate(gaps) if gap > 0), 0)
                grid = [0.0, *DOSES]
                dose = np.inf if not k else np.interp(0, gaps[k - 1 : k + 1], grid[k - 1 : k + 1])
                if key[0] != "random":
                    claim = float(claims[key[0]] @ along) * float(h.norm())
                    result.units.setdefault(key, np.zeros(n))[i] = dose * claim
    return layer, result


MISSING = {"direction": "", "prompts": "", "against": ""}


def test_flips_and_reads_are_those_by_hand(reference, job):
    layer, expected = reference
    assert len(job.prompts) > 6
    for rival, answer, template in zip(rivals(job), job.answers, job.templates, strict=True):
        others = {a for a, t in zip(job.answers, job.templates, strict=True) if t == template}
        assert rival in others - {answer}
    table = job.table[job.table["layer"] == layer]
    facts, n = table[table["corpus"] == "facts"], len(job.prompts)
    areas, read = {}, partial(value, facts, MISSING)
    flips = {key: each for key, each in expected.flips.items() if key[0] != "random"}
    flips["random", ""] = sum(expected.flips["random", str(k)] for k in range(N_RANDOM)) / N_RANDOM
    assert 0 < sum(each.sum() for each in flips.values()) < len(flips) * n * len(DOSES)
    for (method, direction), each in flips.items():
        cells = {"method": method, "direction": direction}
        for k, dose in enumerate(DOSES):
            assert read(metric="flipped", k=dose, **cells) == pytest.approx(each[:, k].mean())
        areas[method, direction] = (each[:, 1:] + each[:, :-1]).mean(1) / 2
        assert read(metric="auc", **cells) == pytest.approx(areas[method, direction].mean())
        if method != "random":
            units = np.sort(expected.units[method, direction])[(n - 1) // 2]
            assert read(metric="half units", **cells) == pytest.approx(units, rel=2e-3)
    own = np.sort(expected.before)[(n - 1) // 2]
    assert read(method="model", metric="difference") == pytest.approx(own, rel=1e-3)
    difference = (areas["jacobian", "transpose"] - areas["polished", "transpose"]).mean()
    cells = {"method": "jacobian", "direction": "transpose", "metric": "auc"}
    assert read(against="polished", **cells) == pytest.approx(difference)
    for name in LENSES:
        above, area = expected.above[name], areas[name, "transpose"]
        assert read(method=name, metric="read") == pytest.approx(above.mean())
        assert read(method=name, metric="precision", k=1) == pytest.approx(expected.first[name].mean())
        parts = {name: part for name, part in (("read", above), ("misread", ~above)) if part.any()}
        cells = {"method": name, "direction": "transpose", "metric": "auc"}
        rows = facts[(facts[list(cells)] == pd.Series(cells)).all(axis=1)].set_index("prompts")
        assert rows["n"].filter(like="read").to_dict() == {each: part.sum() for each, part in parts.items()}
        for each, part in parts.items():
            assert read(prompts=each, **cells) == pytest.approx(area[part].mean())


def test_areas_over_layers_are_means_of_prompts_and_templates(job):
    rows = (
        job.table[job.table["against"].isna()]
        .fillna({"prompts": ""})
        .query("metric == 'auc' and method == 'id'")
    )
    everywhere = rows[rows["layer"].isna()].set_index("prompts")
    whole, parts = everywhere["value"][""], everywhere.drop(index="")
    assert whole == pytest.approx(rows[rows["layer"].notna() & (rows["prompts"] == "")]["value"].mean())
    assert parts["n"].to_dict() == dict(Counter(job.templates))
    assert np.average(parts["value"], weights=parts["n"]) == pytest.approx(whole)


def test_doses_are_found_between_those_that_were_tried():
    flips = np.zeros((4, len(DOSES)))
    assert half_dose(flips) == np.inf
    flips[:1, 1:], flips[:3, 2:] = 1, 1
    assert half_dose(flips) == pytest.approx((DOSES[1] * DOSES[2]) ** 0.5)
    assert half_dose(flips + 1) == DOSES[0]
    difference = torch.full((3, 1, len(DOSES)), -1.0)
    difference[0, 0, 2:], difference[1, 0, 0] = 3.0, 1.0
    doses = crossing(torch.tensor([-1.0, -3.0, -1.0]), difference)[:, 0]
    expected = [DOSES[1] + (DOSES[2] - DOSES[1]) / 4, 0.75 * DOSES[0], np.inf]
    assert doses.tolist() == pytest.approx(expected)
    assert median(np.array([3.0, 1.0, np.inf, 2.0])) == 2.0
