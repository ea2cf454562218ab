"""The atlas gives what plain models patched by hand give."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import handpatched
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import D_MODEL, WORDS, plain_vectors
from handpatched import hand_vectors

from matlens import InputError, linearity
from matlens.activations import find_sinks
from matlens.data import Corpus, Examples, make_windows
from matlens.io.verification import verify
from matlens.linearity import atlas
from matlens.linearity.ranking import GROUPS, first_parts

Models = Callable[[str], Any]
SIZE = 16


def corpus(seed: int, n: int) -> Corpus:
    generator = np.random.default_rng(seed)
    words = (" ".join(generator.choice(WORDS, SIZE)) for _ in range(n))
    return Corpus("text", tuple(words), n, 0, 0, 0)


@pytest.fixture(scope="module")
def texts(small_model):
    def of_model(name: str) -> tuple[Examples, Examples]:
        model = small_model(name)
        return (
            make_windows(model, corpus(1, 12), size=SIZE, targets=True),
            make_windows(model, corpus(2, 4), size=SIZE, targets=True),
        )

    return of_model


@pytest.fixture(scope="module")
def tables(small_model, texts):
    known: dict[str, pd.DataFrame] = {}

    def of_model(name: str) -> pd.DataFrame:
        if name not in known:
            known[name] = linearity.linearity_atlas(small_model(name), *texts(name), progress=False)
        return known[name]

    return of_model


def sentences_of(text: Examples) -> list[torch.Tensor]:
    offsets = text.offsets
    return [torch.from_numpy(text.tokens[a:b]) for a, b in itertools.pairwise(offsets)]


def fit_by_hand(name: str, plain: Any, model: Any, text: Examples, ends: tuple[str, str], tokens: str) -> Any:
    x, y = (
        torch.cat([plain_vectors(name, plain, tokens[None])[site][0] for tokens in sentences_of(text)])
        for site in ends
    )
    if tokens == "no sinks":
        sinks = find_sinks(model, text, progress=False)
        kept = torch.cat([~row[:length] for row, length in zip(sinks, text.lengths.tolist(), strict=True)])
        x, y = x[kept], y[kept]
    ones = torch.cat([x, torch.ones(len(x), 1)], 1).double().numpy()
    solution = np.linalg.lstsq(ones, y.double().numpy(), rcond=1e-6)[0]
    return torch.from_numpy(solution[:-1].T).float(), torch.from_numpy(solution[-1]).float()


def read_by_hand(name: str, plain: Any, text: Examples, parts: list[Any]) -> tuple[list[Any], list[Any]]:
    """Losses and likeliest tokens at the positions of each sentence."""
    losses, likeliest = [], []
    for s, vectors in enumerate(hand_vectors(name, plain, parts, [x.tolist() for x in sentences_of(text)])):
        chosen = text.sentences == s
        log_p = vectors["logits"].log_softmax(-1)[text.positions[chosen]]
        losses.append(-log_p[range(len(log_p)), text.targets[chosen]].double().numpy())
        likeliest.append(log_p.argmax(1).numpy())
    return losses, likeliest


ENDS = {
    "ffn": ("ffn_in.1", "ffn_out.1"), "attn": ("attn_in.1", "attn_out.1"), "ln1": ("ln1_in.1", "ln1_out.1"),
    "block": ("h.1", "h.2"), "jump 2": ("h.1", "h.3"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "tokens"), [("bert", "all"), ("gptj", "all"), ("llama-sinks", "no sinks")])
@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("method", ["map", "removed"])
def test_costs_are_those_of_a_model_patched_by_hand(
    name, tokens, kind, method, small_model, plain_model, texts, tables
):
    if tokens == "no sinks" and kind not in ("ffn", "attn", "ln1"):
        kind = "ffn"  # by hand, blocks are replaced at all tokens alone
    (fitted, evaluated), plain = texts(name), plain_model(name)
    where: Any = "all"
    if tokens == "no sinks" and method == "map":
        sinks = find_sinks(small_model(name), evaluated, progress=False)
        assert 0 < int(sinks.sum()) < sinks.numel() / 2
        where = tuple(map(tuple, (~sinks).tolist()))
    if method == "map":
        weight, bias = fit_by_hand(name, plain, small_model(name), fitted, ENDS[kind], tokens)
    else:
        weight, bias = torch.eye(D_MODEL) * (kind not in ("ffn", "attn")), None
    part = handpatched.Part(*ENDS[kind], weight, bias, where)
    ours, theirs = (read_by_hand(name, plain, evaluated, parts) for parts in ([part], []))
    table = tables(name)
    rows = table[
        (table["kind"] == kind) & (table["layer"] == 1) & (table["method"] == method)
        & (table["tokens"] == (tokens if method == "map" else "all"))
    ].set_index("metric")  # fmt: skip
    difference = np.concatenate(ours[0]) - np.concatenate(theirs[0])
    assert rows.loc["loss increase", "value"] == pytest.approx(
        difference.mean(), abs=0.02 * np.abs(difference).max()
    )
    same = np.concatenate(ours[1]) == np.concatenate(theirs[1])
    assert rows.loc["agreement", "value"] == pytest.approx(same.mean())
    assert np.abs(difference).max() > 1e-5


def test_what_was_broken_off_goes_on(small_model, texts, tables, tmp_path, monkeypatch):
    whole = tables("llama")
    run, calls = atlas.run_variants, []

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*arguments, **options)

    monkeypatch.setattr(atlas, "run_variants", failing)
    asked = small_model("llama"), *texts("llama")
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(atlas.time, "process_time", lambda: next(clock) ** 2)
    with pytest.raises(KeyboardInterrupt):
        linearity.linearity_atlas(*asked, folder=tmp_path / "atlas", progress=False)
    (verdict,) = verify(tmp_path)
    assert (verdict.what, verdict.damage) == ("unfinished atlas of linearity", None)
    with pytest.raises(InputError, match="unfinished"):
        linearity.atlas_seconds(tmp_path / "atlas")
    table = linearity.linearity_atlas(*asked, folder=tmp_path / "atlas", progress=False)
    # Scores and one layer until 20 squared; from 30 squared on two layers and what is replaced together.
    assert linearity.atlas_seconds(tmp_path / "atlas") == 20**2 + 60**2 - 30**2
    assert len(calls) == 1 + 3 + len(GROUPS)  # the first layer is not run again
    pd.testing.assert_frame_equal(table, whole)
    again = linearity.linearity_atlas(*asked, folder=tmp_path / "atlas", progress=False)
    assert len(calls) == 1 + 3 + len(GROUPS)
    pd.testing.assert_frame_equal(again, table)
    with pytest.raises(InputError, match="belongs to another job"):
        linearity.linearity_atlas(*asked, folder=tmp_path / "atlas", jumps=[2], progress=False)
    second = linearity.linearity_atlas(*asked, every=2, jumps=[3], progress=False)
    assert set(second["kind"]) & {"jump 2", "jump 3"} == {"jump 3"}
    alone, ours = (
        each[each["layer"].notna() & (each["layer"] % 2 == 0) & ~each["kind"].str.startswith("jump")]
        for each in (whole, second)
    )
    alone, ours = (each.reset_index(drop=True) for each in (alone, ours))
    pd.testing.assert_frame_equal(ours, alone)


def test_a_rise_that_is_infinite_has_no_interval():
    texts = np.array([0, 0, 1, 1])
    whole = np.array([1.0, 2.0, 3.0, 4.0])
    assert atlas.loss_increase(np.array([1.0, np.inf, 3.0, 4.0]), whole, texts)[:2] == pytest.approx(
        (np.inf, np.nan), nan_ok=True
    )
    usual = atlas.loss_increase(whole + np.array([0.5, 0.5, 1.5, 1.5]), whole, texts)
    assert usual.value == pytest.approx(1)
    assert usual.low < 1 < usual.high
    assert usual.n == 2


def test_the_first_parts_are_replaced_together(small_model, plain_model, texts, tables):
    table, (fitted, evaluated), plain = tables("llama"), texts("llama"), plain_model("llama")
    first = first_parts(table, group="ffn")
    parts = []
    for _, layer in first:
        ends = f"ffn_in.{layer}", f"ffn_out.{layer}"
        parts.append(handpatched.Part(*ends, *fit_by_hand("llama", plain, None, fitted, ends, "all")))
    ours, theirs = (read_by_hand("llama", plain, evaluated, of_parts) for of_parts in (parts, []))
    row = table[(table["kind"] == "together: ffn") & (table["metric"] == "loss increase")].iloc[0]
    expected = (np.concatenate(ours[0]) - np.concatenate(theirs[0])).mean()
    assert row["value"] == pytest.approx(expected, abs=2e-4)
    assert row["parts"] == ", ".join(f"{kind} {layer}" for kind, layer in first)
