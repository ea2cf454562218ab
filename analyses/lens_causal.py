"""Are the reads causal? Move the residual stream along what a lens reads, and see whether the answer flips.

Each prompt has the model's answer and a rival. At the last token of the prompt, the stream of a layer is
moved along a direction that raises the rival's logit over the answer's as a lens reads them: the gradient of
the lens's logit difference (the transpose of its map), or the vector that its map takes to the gradient of
the readout (the pseudo-inverse). The blocks after the layer run on; the answer flips if the rival becomes the
model's top token. Compared with random directions of the same length, and with the gradient of the model's
own logit difference. What the lens reads is evaluated at the same vectors.

Prompts are those of ``analyses/prompts/facts.txt`` that the model answers. Expect the lens that reads best
not to be the one whose directions flip most answers. An interrupted run resumes at the lens or the layer
where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures.beyond import plot_causal
from jaxtyping import Bool, Float
from lenses.causal import RANDOM, TRANSPOSE, Prompts, direction_names, move_stream
from studies import Cells, Model, Report, Study, bootstrap, run_study
from torch import Tensor

from matlens import InputError, Lens, Readout, collect, make_examples, make_prompts, metrics
from matlens.activations import Activations
from matlens.errors import PositiveInt
from matlens.io import result_row, result_table
from matlens.lens import evaluate_lenses
from matlens.metrics import Estimate
from matlens.parallel import Bar

NAME = "lens_causal"
COLUMNS = ("direction", "prompts", "against")
LENSES = ("id", "mat", "affine", "polished", "tuned", "jacobian")
READER = "polished"  # the best of the lens report, with which others are compared
DOSES = [2.0**i for i in range(-3, 3)]  # lengths of moves, relative to the vector
FACTS = Path(__file__).parent / "prompts" / "facts.txt"
PROMPTS, LONGEST = 200, 48  # most prompts; tokens that a sentence is cut to for Jacobians
_RESAMPLES = 2000


def main(
    study: Study,
    report: Report,
    facts: Path = FACTS,
    every: PositiveInt = 5,
    jacobian: PositiveInt = 4,
) -> None:
    """Fit lenses, move the stream along their directions, and plot which answers flip.

    Parameters
    ----------
    facts
        Templates, each with subjects and answers.
    every
        Move the stream at every n-th layer.
    jacobian
        Sentences that Jacobians are taken on.
    """
    model, layers, asked = study.model, list(range(every, study.n_layers, every)), list(read_facts(facts))
    chosen = answered_prompts(model, asked, PROMPTS, study.seed)
    job = {
        **study.origin_of_weights, "layers": layers, "doses": DOSES,
        "n_prompts": jacobian, "longest": LONGEST, "examples": chosen.examples.fingerprint,
        "rivals": chosen.rival.tolist(), "corpora": [part.fingerprint for part in study.parts],
    }  # fmt: skip
    with Cells.stored(study.folder / NAME, "causal reads", job) as cells:
        lenses = fit_lenses(study, cells, layers, n_prompts=jacobian, longest=LONGEST)
        vectors = collect(model, chosen.examples, layers, positions="all", progress=False)
        move = partial(move_stream, model, lenses, doses=DOSES, seed=study.seed)
        results = {
            layer: cells.get(f"layer-{layer}", partial(move, layer, chosen, vectors))
            for layer in Bar(layers, desc="layers", unit="layer")
        }
    row = partial(result_row, NAME, model=model.cfg.model_name, corpus=facts.stem, target=study.n_layers)
    rows: list[Any] = [*layer_rows(row, results, study.seed), *area_rows(row, results, chosen.template)]
    validation = collect(model, study.validation_examples, [*layers, study.n_layers], progress=False)
    read = evaluate_lenses(lenses, validation, layers=layers, progress=False)
    rows += read[read["metric"] == "precision"].to_dict("records")
    table = result_table(rows, *COLUMNS)
    origin = job | {
        "n_facts": len(asked), "n_sentences": list(map(len, study.parts)), "seconds": cells.seconds,
        **cells.total,
    }  # fmt: skip
    report.write(NAME, table, origin, plot_causal(table))


def read_facts(path: Path) -> Iterator[tuple[str, str, str]]:
    """Template, prompt and answer of each fact; the first two of a template are shown before the others."""
    for block in path.read_text().strip().split("\n\n"):
        template, *lines = block.splitlines()
        pairs = [line.split(": ") for line in lines]
        shown = [f"{template.format(subject)} {answer}\n" for subject, answer in pairs[:2]]
        for subject, answer in pairs[2:]:
            yield template, "".join([*shown, template.format(subject)]), answer


def answered_prompts(model: Model, facts: Sequence[tuple[str, str, str]], n: int, seed: int) -> Prompts:
    """Sample prompts whose answer is one token and the model's top token, with a rival for each.

    The rival is the answer of another such prompt of the same template.
    """
    templates, texts, answers = zip(*facts, strict=True)
    last = int(model.cfg.n_layers)
    top = Readout(model).top_ids(collect(model, make_prompts(model, texts), [last], progress=False)[last])
    ids = [model.tokenizer.encode(f" {answer}", add_special_tokens=False) for answer in answers]
    right = [i for i, tokens in enumerate(ids) if tokens == [int(top[i])]]
    generator, rivals = np.random.default_rng(seed), dict[int, int]()
    for i in generator.permutation(right).tolist()[:n]:
        others = {ids[j][0] for j in right if templates[j] == templates[i]} - {*ids[i]}
        if others:
            rivals[i] = int(generator.choice(sorted(others)))
    if len(rivals) < 2:
        raise InputError(f"facts must have at least two prompts that the model answers, got {len(rivals)}.")
    chosen = sorted(rivals)
    return Prompts(
        make_prompts(model, [texts[i] for i in chosen]), [templates[i] for i in chosen],
        torch.tensor([ids[i][0] for i in chosen]), torch.tensor([rivals[i] for i in chosen]),
    )  # fmt: skip


def fit_lenses(study: Study, cells: Cells, layers: Sequence[int], **jacobian: int) -> dict[str, Lens]:
    """Fit each lens at every token of the training sentences, or load it."""
    model, corpus = study.model, study.parts[0]

    @cache
    def rows() -> Activations:
        examples = make_examples(model, corpus, seed=study.seed)
        return collect(model, examples, [*layers, study.n_layers], positions="all", progress=False)

    options: Any = jacobian | {"layers": layers, "seed": study.seed, "progress": False}

    def fit(name: str) -> Lens:
        return Lens.fit(model, corpus if name == "jacobian" else rows(), method=name, **options)

    return {
        name: cells.lens(name, model, partial(fit, name)) for name in Bar(LENSES, desc="lenses", unit="lens")
    }


def layer_rows(
    row: Callable[..., dict[str, Any]], results: Mapping[int, Mapping[str, Tensor]], seed: int
) -> Iterator[dict[str, Any]]:
    """What lenses read, and which answers flip, at each layer.

    ``flipped`` is the share of answers that flip at dose ``k``, and ``half dose`` the dose that flips half.
    ``half units`` is the median of what a lens claims to add to the logit difference where the model begins
    to rank the rival above the answer, and ``difference`` that of the model's own, which is to be overcome.
    ``read`` is the share of prompts of which a lens ranks the answer above the rival.
    """
    for layer, found in results.items():
        names, top = direction_names(LENSES), flips_by_name(found)
        n_random = found["top"].shape[1] - len(names)
        units = crossing(found["before"], found["difference"][:, : len(names)]) * found["claimed"]
        for i, (method, direction) in enumerate([*names, RANDOM]):
            at = partial(row, method=method, layer=layer, direction=direction)
            for share, dose in zip(top[:, i].T, DOSES, strict=True):
                n_flips = len(share) * (n_random if (method, direction) == RANDOM else 1)
                yield at(metric="flipped", k=dose, estimate=metrics.share(share, n_entries=n_flips))
            yield at(metric="half dose", estimate=over_prompts(half_dose, top[:, i], seed))
            if method != "random":
                yield at(metric="half units", estimate=over_prompts(median, units[:, i], seed))
        own = over_prompts(median, -found["before"], seed)
        yield row(method="model", layer=layer, metric="difference", estimate=own)
        above, reader = found["above"], found["above"][:, LENSES.index(READER)].double()
        for method, read, first in zip(LENSES, above.T, found["first"].T, strict=True):
            at = partial(row, method=method, layer=layer)
            yield at(metric="precision", k=1, estimate=metrics.proportion(first))
            yield at(metric="read", estimate=metrics.proportion(read))
            yield at(metric="read", against=READER, estimate=metrics.difference(read.double(), reader))


def area_rows(
    row: Callable[..., dict[str, Any]], results: Mapping[int, Mapping[str, Tensor]], templates: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The area under the share of flipped answers over the logarithm of the dose, from 0 to 1 (``auc``).

    By layer, also of prompts that the lens reads right and wrong; and as a mean over layers, also of each
    template. Paired differences to the transpose of the reader and to random directions.
    """
    names = [*direction_names(LENSES), RANDOM]
    areas = {
        layer: torch.trapezoid(flips_by_name(found)) / (len(DOSES) - 1) for layer, found in results.items()
    }
    everywhere = torch.stack([*areas.values()]).mean(0)
    for layer, area in [*areas.items(), (None, everywhere)]:
        n_steps = (len(DOSES) - 1) * (len(areas) if layer is None else 1)
        for i, (method, direction) in enumerate(names):
            at = partial(row, method=method, direction=direction, layer=layer, metric="auc")
            yield at(estimate=metrics.share(area[:, i], n_entries=n_steps * len(area)))
            for other in [each for each in ((READER, TRANSPOSE), RANDOM) if each != names[i]]:
                yield at(against=other[0], estimate=metrics.mean(area[:, i] - area[:, names.index(other)]))
            parts: dict[str, Bool[Tensor, " n"]] = {}
            if layer is None:
                parts = {name: torch.tensor([each == name for each in templates]) for name in {*templates}}
            elif method in LENSES:
                read = results[layer]["above"][:, LENSES.index(method)]
                parts = {"read": read, "misread": ~read}
            for name, part in sorted(parts.items()):
                if n := int(part.sum()):
                    of_part = metrics.share(area[part, i], n_entries=n_steps * n)
                    yield at(prompts=name, estimate=of_part)


def flips_by_name(found: Mapping[str, Tensor]) -> Float[Tensor, "n name dose"]:
    """Whether the answer flips, by direction; random ones are averaged, and are last."""
    named, random = found["top"].double().tensor_split([len(direction_names(LENSES))], dim=1)
    return torch.cat([named, random.mean(1, keepdim=True)], dim=1)


def crossing(
    before: Float[Tensor, " n"], difference: Float[Tensor, "n direction dose"]
) -> Float[Tensor, "n direction"]:
    """The least dose at which a difference passes 0, linear between doses; infinite if none does."""
    start = before[:, None, None].expand(-1, difference.shape[1], 1)
    doses, values = torch.tensor([0.0, *DOSES]), torch.cat([start, difference], dim=-1)
    after = (values > 0).int().argmax(-1, keepdim=True).clamp(min=1)
    low, high = values.gather(-1, after - 1), values.gather(-1, after)
    dose = doses[after - 1] + (doses[after] - doses[after - 1]) * low / (low - high)
    return dose.where((values > 0).any(-1, keepdim=True), torch.inf)[..., 0]


def half_dose(flips: Float[np.ndarray, "n dose"]) -> float:
    """The dose at which half of the prompts flip, between doses by its logarithm; infinite if none does."""
    share, logs = flips.mean(0), np.log2(DOSES)
    after = int((share >= 0.5).argmax())
    if share[after] < 0.5 or not after:
        return np.inf if share[after] < 0.5 else DOSES[0]
    part = (0.5 - share[after - 1]) / (share[after] - share[after - 1])
    return float(2 ** (logs[after - 1] + part * (logs[after] - logs[after - 1])))


def median(values: Float[np.ndarray, " n"]) -> float:
    """The lower median, which may be infinite."""
    return float(np.quantile(values, 0.5, method="inverted_cdf"))


def over_prompts(statistic: Callable[[np.ndarray], float], values: Tensor, seed: int) -> Estimate:
    """A statistic of prompts, which may be infinite, with its interval."""
    generator = np.random.default_rng(seed)
    return bootstrap(
        statistic, values.double().numpy(), generator, resamples=_RESAMPLES, method="inverted_cdf"
    )


if __name__ == "__main__":
    run_study(main, train=200, val=200)
