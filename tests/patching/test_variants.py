"""What variants have for ``h^L`` is what patched passes give, one sentence at a time and whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, D_MODEL, N_LAYERS, assert_near, make_sentences
from handpatched import submodules
from patched_models import patched, run_variants
from torch import Tensor

import matlens
from matlens import InputError, LinearMap, MapSet, Site, collect, make_examples
from matlens.data.examples import Examples
from matlens.models import identity
from matlens.models.hooks import intervening
from matlens.models.layout import ModelLayout
from matlens.patching.replacements import Replacement, jump, mat_attn, mat_ffn, mat_ln1_ln2
from matlens.patching.variants import Variant

N = 10
FEW = 6  # of them where every sentence runs alone, patched in every way
BUDGET = 20  # tokens, which makes several batches of several sentences
Models = Callable[[str], Any]


def examples_of(model: Any, seed: int = 8) -> Examples:
    """Sentences of 5 to 14 words, of which one has its position at the start."""
    return make_examples(model, make_sentences(), seed=seed).head(N)


def maps_of(name: str) -> MapSet:
    """Random maps between all layers and for all sub-modules; vectors stay about as long as they are."""
    pairs = [(f"h.{a}", f"h.{b}") for a in range(N_LAYERS + 1) for b in range(a, N_LAYERS + 1)]
    pairs += [(f"{part}_in.{i}", f"{part}_out.{i}") for part in submodules(name) for i in range(N_LAYERS)]
    weights = torch.randn(len(pairs), D_MODEL, D_MODEL, generator=torch.Generator().manual_seed(0))
    return MapSet(LinearMap(w / D_MODEL**0.5, None, *pair) for w, pair in zip(weights, pairs, strict=True))


def variants_of(name: str, examples: Examples) -> dict[str, Variant]:
    """Jumps and stand-ins that start at every layer, at all tokens and at some."""
    maps, where = maps_of(name), torch.from_numpy(examples.positions)
    # At every second sentence's own position, and at every third token of all.
    some = torch.arange(int(examples.lengths.max())) % 3 == 1
    some = (
        some | (torch.arange(len(some)) == where[:, None]) & (torch.arange(len(examples)) % 2 == 1)[:, None]
    )
    return {
        "jump-0-2": Variant(0, jump(maps, 0, 2)),
        "jump-1-3": Variant(1, jump(maps, 1, 3)),
        "jumps": Variant(0, jump(maps, 0, 1) + jump(maps, 2, 3)),
        "between-2": Variant(2, jump(maps, 2, 2)),
        "attn-1": Variant(1, mat_attn(maps, 1, 3)),
        "ffn-2": Variant(2, mat_ffn(maps, 2, 3)),
        "norms-0": Variant(0, mat_ln1_ln2(maps, 0, 3)),
        "not-first-1": Variant(1, mat_attn(maps, 1, 3, where="not-first")),
        "some-1": Variant(1, mat_ffn(maps, 1, 3, where=some)),
        "one-0": Variant(0, mat_attn(maps, 0, 2, where=where)),
        "one-2": Variant(2, mat_ffn(maps, 2, 3, where=where)),
        "mixed-1": Variant(1, jump(maps, 1, 2) + mat_attn(maps, 2, 3, where=where) + mat_ffn(maps, 2, 3)),
        "none-0": Variant(0, []),
        "none-3": Variant(3, []),
    }


def at_sentence(replacement: Replacement, sentence: int) -> Replacement:
    """What is replaced in one sentence."""
    return (
        replacement
        if isinstance(replacement.where, str)
        else replace(replacement, where=replacement.where[sentence : sentence + 1])
    )


@torch.inference_mode()
def alone(model: Any, examples: Examples, replacements: Sequence[Replacement]) -> Tensor:
    """``h^L`` at the positions; the sentences run one at a time, without padding and without a cut."""
    final: list[Tensor] = []
    hook = ModelLayout.from_model(model).hook(N_LAYERS)
    for s, position in enumerate(examples.positions):
        tokens = torch.from_numpy(examples.tokens[examples.offsets[s] : examples.offsets[s + 1]])
        with patched(model, [at_sentence(replacement, s) for replacement in replacements]):
            seen: list[Tensor] = []
            with model.hooks(fwd_hooks=[(hook, lambda value, hook, seen=seen: seen.append(value))]):
                model(tokens[None])
        assert seen[0].shape == (1, len(tokens), D_MODEL)
        final.append(seen[0][0, position].clone())
    return torch.stack(final)


def assert_all_near(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name in ours:
        assert ours[name].dtype == torch.float32
        assert_near(ours[name], theirs[name])


# The same vectors, however they are run


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_variants_are_patched_passes_of_each_sentence_alone(name: str, small_model: Models) -> None:
    model = small_model(name)
    examples = examples_of(model).head(FEW)
    variants = variants_of(name, examples)
    expected = {key: alone(model, examples, variant.replacements) for key, variant in variants.items()}
    assert_near(expected["none-0"], collect(model, examples, progress=False)[N_LAYERS])
    later = torch.from_numpy(examples.positions) > 0
    assert 0 < int(later.sum()) < FEW
    for key, other in expected.items():  # every replacement shows wherever it is read
        changed = (other - expected["none-0"]).abs().amax(1) > 1e-2
        read = later if "not-first" in key and name != "bert" else torch.ones_like(later)
        assert torch.equal(changed, read & (key[:4] != "none"))
    for batch_tokens in (1, BUDGET, 10000):
        final = run_variants(model, examples, variants, batch_tokens=batch_tokens, progress=False)
        assert_all_near(final, expected)
    assert_all_near(run_variants(model, examples, variants, progress=False), expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_where_a_variant_starts_does_not_matter(name: str, small_model: Models) -> None:
    model = small_model(name)
    examples = examples_of(model).head(FEW)
    variants = variants_of(name, examples)
    final = run_variants(model, examples, variants, batch_tokens=BUDGET, progress=False)
    for first in range(N_LAYERS):
        others = {
            key: replace(variant, first=first) for key, variant in variants.items() if first <= variant.first
        }
        again = run_variants(model, examples, others, batch_tokens=BUDGET, progress=False)
        assert_all_near(again, {key: final[key] for key in others})


def test_what_a_bridge_in_half_precision_gives_is_single(
    small_model: Models, model_folder: Callable[[str], Path]
) -> None:
    examples = examples_of(small_model("llama"))
    variants = variants_of("llama", examples)
    model = matlens.load(str(model_folder("llama")), device="cpu", dtype=torch.bfloat16)
    final = run_variants(model, examples, variants, progress=False)
    expected = run_variants(small_model("llama"), examples, variants, progress=False)
    for key in variants:
        assert final[key].dtype == torch.float32
        assert_near(final[key], expected[key], 0.05)


# What is run


@contextlib.contextmanager
def counting(model: Any) -> Iterator[list[int]]:
    """How often each of the plain blocks inside the bridge runs."""
    counts = [0] * N_LAYERS

    def count(layer: int) -> Any:
        def hook(*_: Any) -> None:
            counts[layer] += 1

        return hook

    hooks = [count(layer) for layer in range(N_LAYERS)]
    handles = [
        block.original_component.register_forward_pre_hook(hook)
        for block, hook in zip(model.blocks, hooks, strict=True)
    ]
    try:
        with intervening(model, tuple, hooks):  # they change nothing, and are not taken for foreign hooks
            yield counts
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_before_the_first_layer_run_once_for_all_variants(name: str, small_model: Models) -> None:
    model, maps = small_model(name), maps_of(name)
    examples = examples_of(model)
    read = examples if name == "bert" else examples.up_to_positions()
    n = len(list(read.batches(BUDGET)))
    assert n > 2

    def counted(*variants: Variant) -> list[float]:
        named = {str(i): variant for i, variant in enumerate(variants)}
        with counting(model) as counts:
            run_variants(model, examples, named, batch_tokens=BUDGET, progress=False)
        return [count / n for count in counts]

    assert counted(Variant(0, [])) == [1, 1, 1]
    assert counted(Variant(0, jump(maps, 0, 2))) == [0, 0, 1]
    assert counted(Variant(1, jump(maps, 1, 2))) == [1, 0, 1]
    later = Variant(2, mat_ffn(maps, 2, 3))
    assert counted(later) == [1, 1, 1]
    assert counted(*[later] * 4) == [1, 1, 4]
    assert counted(*[later] * 4, Variant(1, jump(maps, 1, 3)), Variant(1, mat_attn(maps, 1, 3))) == [1, 2, 5]
    assert counted(later, Variant(0, mat_attn(maps, 0, 1))) == [2, 2, 2]
    assert counted(*[Variant(3, [])] * 3) == [1, 1, 1]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_decoder_reads_no_further_than_the_position(name: str, small_model: Models) -> None:
    model = small_model(name)
    examples = examples_of(model)
    lengths: list[int] = []
    handle = model.blocks[0].register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append((args[0] if args else kwargs["hidden_states"]).shape[1]),
        with_kwargs=True,
    )
    run_variants(model, examples, {"jump": Variant(0, jump(maps_of(name), 0, 2))}, batch_tokens=1)
    handle.remove()
    read = examples.lengths if name == "bert" else examples.positions + 1
    assert sorted(lengths) == sorted(read.tolist())


# On disk


@pytest.fixture
def job(small_model: Models) -> tuple[Any, Examples, dict[str, Variant]]:
    """A model, sentences, and a few variants."""
    model = small_model("llama")
    examples = examples_of(model)
    variants = variants_of("llama", examples)
    return model, examples, {key: variants[key] for key in ("jump-1-3", "one-0", "mixed-1")}


OPTIONS: dict[str, Any] = {"batch_tokens": BUDGET, "progress": False}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_stored_is_what_would_be_kept(
    job: tuple[Any, Examples, dict[str, Variant]], tmp_path: Path
) -> None:
    kept = run_variants(*job, **OPTIONS)
    stored = run_variants(*job, folder=tmp_path / "out", origin={"maps": "these"}, **OPTIONS)
    assert list(stored) == list(kept)
    assert all(torch.equal(stored[key], kept[key]) for key in kept)
    before = contents(tmp_path / "out")
    with counting(job[0]) as counts:  # opened, not run, whatever the batches would be
        again = run_variants(*job, folder=tmp_path / "out", origin={"maps": "these"}, progress=False)
    assert counts == [0] * N_LAYERS
    assert all(torch.equal(again[key], kept[key]) for key in kept)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("other", ["fewer", "name", "told", "origin", "no origin", "model"])
def test_a_folder_of_another_job_is_refused(
    other: str, job: tuple[Any, Examples, dict[str, Variant]], small_model: Models, tmp_path: Path
) -> None:
    model, examples, variants = job
    options: dict[str, Any] = {**OPTIONS, "folder": tmp_path / "out", "origin": {"maps": {"seed": 1}}}
    run_variants(model, examples, variants, **options)
    if other == "fewer":
        variants = {key: variants[key] for key in list(variants)[:2]}
    elif other == "name":
        variants = {f"{key}!": variant for key, variant in variants.items()}
    elif other == "told":
        variants = {key: replace(variant, description="other") for key, variant in variants.items()}
    elif other == "model":
        model = small_model("gpt2")
    else:
        options["origin"] = {"origin": {"maps": {"seed": 2}}, "no origin": None}[other]
    with pytest.raises(InputError, match=r"belongs to another job.*Choose another folder"):
        run_variants(model, examples, variants, **options)


# Errors


@pytest.mark.parametrize(
    ("first", "make", "message"),
    [
        (2, lambda maps: jump(maps, 1, 3), r"h\.1 -> h\.3"),
        (3, lambda maps: jump(maps, 0, 3), r"h\.0 -> h\.3"),
        (1, lambda maps: [*jump(maps, 1, 2), *jump(maps, 0, 0)], r"h\.0 -> h\.0"),
        (2, lambda maps: mat_ffn(maps, 1, 3), r"ffn_in\.1 -> ffn_out\.1"),
    ],
)
def test_a_replacement_before_the_first_layer_is_refused(
    first: int, make: Callable[[MapSet], list[Replacement]], message: str, small_model: Models
) -> None:
    model = small_model("llama")
    variants = {"good": Variant(1, []), "bad": Variant(first, make(maps_of("llama")))}
    with (
        counting(model) as counts,
        pytest.raises(InputError, match=rf"bad runs unpatched up to layer {first}, and {message} "),
    ):
        run_variants(model, examples_of(model), variants, progress=False)
    assert counts == [0] * N_LAYERS


def test_what_patched_refuses_is_refused_before_anything_is_run(small_model: Models, tmp_path: Path) -> None:
    model, maps = small_model("llama"), maps_of("llama")
    examples = examples_of(model)
    other = small_model("gpt2")
    origin = collect(other, examples_of(other), [0], progress=False).provenance
    foreign = LinearMap(torch.eye(D_MODEL), None, "h.1", "h.2", origin)
    for replacements, message in (
        (jump(maps, 0, 2) + jump(maps, 1, 3), "overlaps"),
        ([Replacement.from_map(foreign)], "The maps and this model do not belong together"),
        ([Replacement(lambda h: h, Site("h", 1), Site("h", 9))], "out of range"),
    ):
        for folder in (None, tmp_path / "out"):
            with counting(model) as counts, pytest.raises(InputError, match=message):
                run_variants(model, examples, {"a": Variant(0, replacements)}, folder=folder, progress=False)
            assert counts == [0] * N_LAYERS
    assert not (tmp_path / "out").exists()


def left_behind(model: Any) -> tuple[list[int], list[bool]]:
    """Hooks of all kinds, and which blocks have a forward of their own."""
    points = [len(point.fwd_hooks) + len(point.bwd_hooks) for point in model.hook_dict.values()]
    modules = [m for part in (model, model.original_model) for m in part.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules]
    return points + hooks, ["forward" in vars(block) for block in model.blocks]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_behind_after_an_exception_in_the_middle(
    error: type[BaseException], first: int, small_model: Models, tmp_path: Path
) -> None:
    model, maps = small_model("llama"), maps_of("llama")
    examples = examples_of(model)
    model(torch.arange(5, 9)[None], return_type=None)
    before = left_behind(model)
    calls: list[None] = []

    def failing(h: Tensor) -> Tensor:
        calls.append(None)
        if len(calls) == 3:
            raise error("in the middle")
        return h

    attention = mat_attn(maps, 1, 2, where="not-first")
    last = Replacement(failing, Site("ffn_in", 2), Site("ffn_out", 2))
    for kind, broken in {
        "inside": last,
        "jump": Replacement(failing, Site("h", 2), Site("h", 3)),
    }.items():
        variants = {
            "good": Variant(first, jump(maps, 1, 2)),
            "bad": Variant(first, [*attention, broken]),
        }
        for folder in (None, tmp_path / kind):
            calls.clear()
            with pytest.raises(error, match="in the middle"):
                run_variants(model, examples, variants, folder=folder, **OPTIONS)
            assert left_behind(model) == before
        assert (tmp_path / kind).exists() == (error is KeyboardInterrupt)  # it can be gone on with
    assert sum(before[0][: len(model.hook_dict)]) == 0
    assert before[1] == [False] * N_LAYERS


def test_a_variant_that_grows_beyond_all_numbers_spoils_no_other(small_model: Models, tmp_path: Path) -> None:
    model, maps = small_model("llama"), maps_of("llama")
    examples = examples_of(model)
    infinite = Replacement(lambda h: h * float("inf"), Site("h", 1), Site("h", 2))
    variants = {"good": Variant(1, jump(maps, 1, 2)), "bad": Variant(1, [infinite]), "none": Variant(2, [])}
    kept = run_variants(model, examples, variants, **OPTIONS)
    assert not kept["bad"].isfinite().any()
    for key in ("good", "none"):
        assert_near(kept[key], alone(model, examples, variants[key].replacements))
    stored = run_variants(model, examples, variants, folder=tmp_path / "out", **OPTIONS)
    for key in variants:
        assert torch.equal(stored[key].nan_to_num(), kept[key].nan_to_num())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_a_stand_in_makes_of_padding_reaches_no_token(name: str, small_model: Models) -> None:
    """Infinite values at padding would come back through attention weights of zero, as NaN."""
    model, examples = small_model(name), examples_of(small_model(name))
    batch = next(iter(examples.batches(10_000)))
    assert not batch.mask.all()
    part = submodules(name)[0]
    source, target = Site(f"{part}_in", 1), Site(f"{part}_out", 1)
    weight = torch.randn(D_MODEL, D_MODEL, generator=torch.Generator().manual_seed(0)) / D_MODEL**0.5

    def growing(x: Tensor) -> Tensor:
        return (x @ weight.T).masked_fill(batch.mask[..., None] == 0, torch.inf)

    def plain(x: Tensor) -> Tensor:
        return x @ weight.T

    logits = []
    for function in (growing, plain):
        with torch.inference_mode(), patched(model, [Replacement(function, source, target)]):
            logits.append(model(batch.tokens, attention_mask=batch.mask)[batch.mask.bool()])
    assert torch.equal(*logits)
    with torch.inference_mode():
        unpatched = model(batch.tokens, attention_mask=batch.mask)[batch.mask.bool()]
    assert float((logits[0] - unpatched).abs().max()) > 1e-3


def test_layers_count_from_both_ends(small_model: Models) -> None:
    model, examples = small_model("llama"), examples_of(small_model("llama"))
    final = run_variants(model, examples, {"a": Variant(-1, []), "b": Variant(3, [])}, progress=False)
    assert torch.equal(final["a"], final["b"])
    with pytest.raises(InputError, match="out of range"):
        run_variants(model, examples, {"a": Variant(9, [])}, progress=False)


@pytest.mark.parametrize("n", [2, N - 1, N + 1, 99])
@pytest.mark.parametrize("per_token", [False, True])
def test_where_needs_a_row_for_each_example(n: int, per_token: bool, small_model: Models) -> None:
    model, examples = small_model("llama"), examples_of(small_model("llama"))
    where = torch.ones(n, 30, dtype=torch.bool) if per_token else torch.zeros(n, dtype=torch.long)
    variants = {"a": Variant(0, mat_attn(maps_of("llama"), 0, 2, where=where))}
    with pytest.raises(InputError, match=rf"must have {N} rows, .* got {n}"):
        run_variants(model, examples, variants, progress=False)


@pytest.mark.parametrize("names", [(), ("tokens",), ("a", "positions"), ("offsets",)])
def test_variants_need_names_of_their_own(names: Sequence[str], small_model: Models) -> None:
    model, examples = small_model("llama"), examples_of(small_model("llama"))
    with pytest.raises(InputError, match="Expected one variant or more, with other names than"):
        run_variants(model, examples, {name: Variant(3, []) for name in names}, progress=False)


def test_the_weights_are_read_once_for_all_variants(
    small_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = small_model("gpt2"), small_model("llama")
    examples = examples_of(model)
    fitted = {
        name: MapSet.fit(collect(model, examples_of(model), progress=False), pairs="last", progress=False)
        for name, model in {"ours": model, "theirs": other}.items()
    }
    read: list[Any] = []
    known = identity.known_fingerprints
    monkeypatch.setattr(identity, "known_fingerprints", lambda model: read.append(model) or known(model))
    times = []
    for layers in ([0], [0, 1, 2]):
        read.clear()
        variants = {str(layer): Variant(layer, jump(fitted["ours"], layer, N_LAYERS)) for layer in layers}
        run_variants(model, examples, variants, progress=False)
        times.append(len(read))
    assert times[0] == times[1] > 0
    variants = {"0": Variant(0, jump(fitted["ours"], 0, N_LAYERS))}
    variants |= {"1": Variant(1, jump(fitted["theirs"], 1, N_LAYERS))}
    with pytest.raises(InputError, match="the maps"):
        run_variants(model, examples, variants, progress=False)
