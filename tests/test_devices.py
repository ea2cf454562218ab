"""On a device, and on two, everything gives the numbers that it gives on the CPU (`pretend`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import paper_b_removal
import pretend
import pytest
import torch
from conftest import WORDS, make_sentences
from control.baselines import SelfDebiasing, debiased_losses
from control.generation import continue_prompts
from identities import make_activations
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_lens.model_bridge import TransformerBridge

import matlens
from matlens import InputError, MapSet, ffn, lens, linearity, metrics, pruning  # fmt: skip
from matlens.data import Corpus, make_windows
from matlens.lens.early_exit import exit_layers, thresholds
from matlens.lens.trained import token_chances
from matlens.linear import LeastSquares, fit_samples
from matlens.linearity.scores import held_out_scores
from matlens.models import ModelIdentity, Provenance, active_hooks
from matlens.numerics import split_product
from matlens.pruning.choosing import angles


@pytest.fixture
def without_float64():
    """There is a device without float64."""
    with pretend.devices(without_float64=True):
        yield


@functools.cache
def texts(seed: int, n: int, length: int) -> Corpus:
    generator = np.random.default_rng(seed)
    words = (" ".join(generator.choice(WORDS, length)) for _ in range(n))
    return Corpus("text", tuple(words), n, 0, 0, 0)


def fits_and_exits(model: Any) -> Any:
    train, validation = make_sentences().split(n_train=30, n_validation=10, seed=0)
    rows = [
        matlens.collect(model, matlens.make_examples(model, part), progress=False)
        for part in (train, validation)
    ]
    maps = MapSet.fit(rows[0], pairs="last", ridge=1.0, progress=False)
    lenses = {"mat": matlens.Lens.from_maps(maps, model=model), "id": matlens.Lens.identity(model)}
    table = lens.exit_sweep(lenses, rows[1], progress=False)
    return [maps[0, -1].weight, table["value"]]


def judged_lenses(model: Any, folder: Path) -> Any:
    parts = make_sentences().split(n_train=30, n_validation=10, seed=0)
    methods = ["mat", lens.LensConfig(standardise=True, intercept=True, sinks="exclude"), "polished"]
    made = lens.compare_lenses(model, parts, folder, methods=methods, layers=[1, 2], progress=False)
    timed = made.report["metric"] == "seconds"
    return [made.report.loc[~timed, "value"], made.exits["value"]]


def read_layers(model: Any) -> Any:
    fitted = matlens.Lens.fit(model, make_sentences(), method="mat", progress=False)
    seen = fitted.trajectory("w1 w2 w3 w4")
    return [seen.probabilities, seen.entropy, seen.kl]


def losses(model: Any) -> Any:
    examples = matlens.make_examples(model, texts(1, 3, 6))
    debiased = debiased_losses(model, examples, SelfDebiasing(["profanity"]))
    return [ffn.text_losses(model, examples, progress=False).total, debiased.total]


def continuations(model: Any) -> Any:
    with ffn.controlled(model, ["L1D3", "L2D5"], 3.0, where="not-first"):
        return continue_prompts(model, ["w1 w2", "w3"], n_tokens=4, n_samples=2)


def atlas(model: Any) -> Any:
    fitted, evaluated = (
        make_windows(model, texts(i, n, 16), size=16, targets=True) for i, n in ((1, 4), (2, 2))
    )
    return linearity.linearity_atlas(model, fitted, evaluated, jumps=[2], every=2, progress=False)["value"]


def pruned(model: Any) -> Any:
    windows = make_windows(model, texts(5, 1, 400), size=20)
    made = pruning.prune(model, windows, 1, heal=200, progress=False)
    return pruning.compare_pruned(model, made, windows, progress=False)["value"]


def traced(model: Any) -> Any:
    examples = matlens.make_examples(model, texts(3, 4, 6))
    trace = ffn.Trace.run(model, examples, k=2, progress=False)
    removed = paper_b_removal.removal_table(model, examples, k=2, n_tokens=5)
    return [trace.before, trace.after, removed["value"]]


def value_vectors(model: Any) -> Any:
    values = ffn.ValueVectors(model)
    vectors = values.vectors(["L0D1", "L2D3"])
    scores = [
        make(model).scores(vectors) for make in (ffn.Projection.after_norm, ffn.Projection.through_head)
    ]
    outputs = torch.linspace(-1, 1, 64).view(2, 32)
    others = (values.bias(2), values.random(1, 2), values.norms(2), values.scale(2, outputs))
    return [each.cpu() for each in (vectors, *scores, *others)]


TOUR: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        fits_and_exits, judged_lenses, read_layers, losses, continuations, atlas, pruned, traced,
        value_vectors,
    )
}  # fmt: skip


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(ours, list):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(ours, pd.DataFrame):
        pd.testing.assert_frame_equal(ours, theirs)
    else:
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def on_cpu(small_model, tmp_path_factory):
    @functools.cache
    def of(step: str, name: str = "gpt2") -> Any:
        return called(step, small_model(name), tmp_path_factory.mktemp("cpu"))

    return of


@pytest.fixture(scope="module")
def placed(model_folder):
    """A small model on a device, by name, for as long as there is one."""

    @functools.cache
    def model(name: str) -> Any:
        loaded = matlens.load(str(model_folder(name)), device=pretend.FIRST)
        assert {weight.device for weight in loaded.original_model.parameters()} == {pretend.FIRST}
        return loaded

    return model


def called(step: str, model: Any, folder: Path) -> Any:
    return TOUR[step](model, *([folder] if step == "judged_lenses" else []))


@pytest.mark.usefixtures("without_float64")
@pytest.mark.parametrize("step", TOUR)
def test_a_device_without_float64_gives_the_numbers_of_the_cpu(step, placed, on_cpu, tmp_path):
    assert_same(called(step, placed("gpt2"), tmp_path), on_cpu(step))


def fits_of(samples: dict[str, torch.Tensor], **how: Any) -> torch.Tensor:
    return next(fit_samples(make_activations(samples, Provenance()), [("h.0", "h.1")], **how)).weight


OF_TENSORS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "fit": lambda x, y: fits_of({"h.0": x, "h.1": y}),
    "weighted fit": lambda x, y: fits_of({"h.0": x, "h.1": y}, weights=x[:, 0].abs(), intercept=True),
    "split fit": lambda x, y: fits_of({"h.0": x, "h.1": y}, split=True),
    "fit of x elsewhere": lambda x, y: LeastSquares(4, 4).update(x, y.cpu()).solve()["y"].weight,
    "split_product": split_product,
    "norms": lambda x, y: LeastSquares(4, 4, norms=True).update(x, y).norms,
    "r2": metrics.r2,
    "mean": lambda x, y: metrics.mean(x)[:3],
    "angles": angles,
    "exit layers": lambda x, y: exit_layers(x, thresholds(y[:, 0].abs().long(), 0.5)),
    "scores": lambda x, y: list(held_out_scores(x, y).values()),
    "sample": lambda x, y: token_chances(x.flatten().abs(), 5),
}


@pytest.mark.usefixtures("without_float64")
@pytest.mark.parametrize("name", OF_TENSORS)
def test_tensors_of_a_device_without_float64_are_taken(name):
    x, y = torch.randn(2, 40, 4, generator=torch.Generator().manual_seed(0))
    given, expected = (
        OF_TENSORS[name](*pair) for pair in ((x.to(pretend.FIRST), y.to(pretend.FIRST)), (x, y))
    )
    torch.testing.assert_close(torch.as_tensor(given).cpu(), torch.as_tensor(expected))


# By accelerate, as device_map of TransformerLens does it: the first block here, the others there. GPT-2's
# unembedding is its embedding, so it lies behind blocks of another device.
PLACES = {
    "gpt2": {"transformer.wte": 0, "transformer.wpe": 0, "transformer.drop": 0, "transformer.h.0": 0,
             "transformer.h.1": 1, "transformer.h.2": 1, "transformer.ln_f": 1, "lm_head": 0},
    "gemma2": {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1,
               "model.layers.2": 1, "model.norm": 1, "lm_head": 0},
}  # fmt: skip


@pytest.fixture(scope="module")
def spread(model_folder):
    """A small model on two devices, by name, for as long as there are these."""

    @functools.cache
    def model(name: str) -> Any:
        places = {part: str((pretend.FIRST, pretend.SECOND)[place]) for part, place in PLACES[name].items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # other threads know of no such devices
            bridge = TransformerBridge.boot_transformers(str(model_folder(name)), device_map=places)
        blocks = [next(block.parameters()).device for block in bridge.blocks]
        assert blocks == [pretend.FIRST, pretend.SECOND, pretend.SECOND]
        return matlens.wrap(bridge, prepend_bos=False)

    return model


@pytest.fixture
def two_devices():
    with pretend.devices():
        yield


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(
    ("step", "name"),
    [(step, "gpt2") for step in TOUR if step != "pruned"]
    + [(step, "gemma2") for step in ("value_vectors", "fits_and_exits")],
)
def test_a_model_on_two_devices_gives_the_numbers_of_one(step, name, spread, on_cpu, tmp_path):
    assert_same(called(step, spread(name), tmp_path), on_cpu(step, name))


@pytest.mark.usefixtures("two_devices")
def test_a_model_on_two_devices_is_the_same_and_is_not_pruned(spread, small_model):
    model, whole = spread("gpt2"), ModelIdentity.from_model(small_model("gpt2"))
    identity = ModelIdentity.from_model(model)
    assert (identity.fingerprint, active_hooks(model)) == (whole.fingerprint, ())
    with pytest.raises(InputError, match="must be on one device, got lazy:0, lazy:1"):
        pruned(model)


@pytest.mark.usefixtures("two_devices")
def test_maps_of_a_model_are_on_its_device(spread, small_model, tmp_path):
    model, data = spread("gpt2"), make_sentences()
    config = lens.LensConfig(shared_map=True)
    fitted = matlens.Lens.fit(small_model("gpt2"), data, method=["mat", config], progress=False)
    for own in fitted.values():
        on_model = own.on(model)
        assert on_model.n_parameters == own.n_parameters
        assert on_model.digest == own.digest
        assert {linear.weight.device for linear in on_model.maps.values()} == {pretend.FIRST}
        on_model.save(tmp_path / own.method)
    in_memory = MapSet(fitted["mat"].maps.values())
    in_memory.save(tmp_path / "maps")
    for maps in (in_memory, MapSet.load(tmp_path / "maps")):
        assert {linear.weight.device for linear in maps.on(model).values()} == {pretend.FIRST}
    moved = list[torch.Size]()

    class Moves(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default:
                moved.append(args[0].shape)
            return func(*args, **kwargs or {})

    square, on_model = torch.Size((32, 32)), fitted["mat"].on(model)
    jump = matlens.LinearMap(torch.eye(32), None, "h.1", "h.2")
    with matlens.patched(model, [jump]), Moves():
        model("w1 w2 w3", prepend_bos=False)
        on_model.logits(torch.zeros(2, 32), 1)
    assert square not in moved


@pytest.mark.usefixtures("two_devices")
def test_devices_are_not_mixed():
    x, y = torch.ones(2, device=pretend.FIRST), torch.ones(2, device=pretend.SECOND)
    for mixed in (lambda: x + y, lambda: torch.cat([x, y]), lambda: x * torch.ones(2), lambda: x.numpy()):
        with pytest.raises(RuntimeError):
            mixed()
    assert (x + y.to(x)).tolist() == [2, 2]


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("how", [{}, {"split": True}, {"intercept": True, "ridge": 0.1, "weighted": True}])
def test_maps_are_fitted_on_another_device_and_brought_back(how, monkeypatch):
    how, generator = dict(how), torch.Generator().manual_seed(1)
    samples = {f"h.{layer}": torch.randn(200, 6, generator=generator) for layer in range(3)}
    if how.pop("weighted", False):
        how["weights"] = torch.rand(200, generator=generator)
    places, add = set[torch.device](), LeastSquares._add

    def seen(self: LeastSquares, n: int, rows: torch.Tensor, blocks: Any, norms: Any) -> None:
        places.update(part.device for part in (rows, *blocks))
        add(self, n, rows, blocks, norms)

    monkeypatch.setattr("matlens.linear.fitting.chunk_size", lambda _: 64)
    monkeypatch.setattr(LeastSquares, "_add", seen)
    pairs = [("h.0", "h.1"), ("h.0", "h.2"), ("h.1", "h.2")]
    collected = make_activations(samples, Provenance())
    expected = list(fit_samples(collected, pairs, **how))
    assert places == {torch.device("cpu")}
    places.clear()
    ours = list(fit_samples(collected, pairs, device=pretend.FIRST, **how))
    assert places == {pretend.FIRST}
    for a, b in zip(ours, expected, strict=True):
        assert (a.source, a.target, a.weight.device) == (b.source, b.target, torch.device("cpu"))
        torch.testing.assert_close(a.weight, b.weight, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("without_float64")
def test_a_device_that_cannot_fit_is_refused():
    samples = make_activations({"h.0": torch.ones(3, 2), "h.1": torch.ones(3, 2)}, Provenance())
    for device, why in (
        (pretend.FIRST, "support float64"),
        ("nowhere", "available on this machine"),
        (3.5, "3.5"),
    ):
        with pytest.raises(InputError, match=why):
            next(fit_samples(samples, [("h.0", "h.1")], device=device))  # type: ignore[arg-type]
