"""The report: each number is the measure of its member, and swapping two members swaps theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch

from matlens import InputError, Lens
from matlens.cli.printing import print_members
from matlens.io.tables import COLUMNS
from matlens.lens.exits import lens_exit_sweep
from matlens.lens.judgement import judge_scores
from matlens.lens.measures import lens_r2, lens_scores
from matlens.lens.report import Member, report_by_member, report_table

Settings = Callable[[str], Any]


def members(model: Any, train: Any) -> dict[str, Member]:
    mat = Lens.fit(model, train, method="mat", progress=False)
    return {"mat": Member(mat, 6.0, 900.0), "id": Member(Lens.identity(model))}


def values(table: Any) -> dict[Any, float]:
    keys = zip(table["method"], table["layer"], table["metric"], table["k"], table["against"], strict=True)
    return {
        tuple(None if pd.isna(part) else part for part in key): value
        for key, value in zip(keys, table["value"], strict=True)
    }


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_each_row_is_the_measure_of_its_member(name: str, setting: Settings) -> None:
    model, train, validation = setting(name)
    fitted = members(model, train)
    sinks = torch.arange(validation.n_rows) < 3
    table = report_table(fitted, validation, layers=[1, 2], against="id", sinks=sinks, progress=False)
    assert list(table.columns) == [*COLUMNS, "against"]
    found, last = values(table), model.cfg.n_layers
    mat, truth = fitted["mat"].lens, validation[last]
    for layer in (1, 2):
        h = validation[layer]
        scores = {key: lens_scores(member.lens, h, layer) for key, member in fitted.items()}
        judged = judge_scores(mat.on_readout, truth, scores, progress=False)
        for (metric, k), estimate in judged["mat"].estimates().items():
            assert found["mat", layer, metric, k, ""] == pytest.approx(estimate.value, rel=1e-6)
        for (metric, k), estimate in judged["mat"].differences(judged["id"]).items():
            assert found["mat", layer, metric, k, "id"] == pytest.approx(estimate.value, rel=1e-6, abs=1e-9)
            plain = found["mat", layer, metric, k, ""] - found["id", layer, metric, k, ""]
            assert found["mat", layer, metric, k, "id"] == pytest.approx(plain, abs=1e-5)
        assert found["mat", layer, "r2", None, ""] == lens_r2(mat, h, truth, layer).value
        without = lens_r2(mat, h, truth, layer, rows=~sinks).value
        assert found["mat", layer, "r2 without sinks", None, ""] == without
        assert without != found["mat", layer, "r2", None, ""]
    assert not any(key[0] == "id" and key[4] for key in found)
    assert found["mat", None, "seconds", None, ""] == 6.0 / 3
    assert found["mat", None, "flops", None, ""] == 300
    assert found["mat", None, "numbers", None, ""] == model.cfg.d_model**2
    assert found["mat", None, "bytes", None, ""] == 4 * model.cfg.d_model**2
    assert found["id", None, "bytes", None, ""] == 0
    wide = report_by_member(table)
    assert wide.loc["mat", "P@1"] == pytest.approx(
        (found["mat", 1, "precision", 1, ""] + found["mat", 2, "precision", 1, ""]) / 2
    )
    assert wide.loc["id", "kl"] != wide.loc["mat", "kl"]


def test_r2_is_given_of_lenses_of_one_space_alone(
    setting: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standardized vectors have another variance than those that ``mat`` maps."""
    model, train, validation = setting("llama")
    lens = Lens.fit(model, train, method="normed+affine", progress=False)
    fitted = {**members(model, train), "normed+affine": Member(lens, 6.0)}
    sinks = torch.arange(validation.n_rows) < 3
    table = report_table(fitted, validation, layers=[1], sinks=sinks, progress=False)
    assert set(table.loc[table["metric"].str.startswith("r2"), "method"]) == {"mat", "id"}
    assert "kl" in set(table.loc[table["method"] == "normed+affine", "metric"])
    exits = lens_exit_sweep({"normed+affine": lens}, validation, layers=[1], progress=False)
    print_members(table[table["method"] == "normed+affine"], exits)
    assert "nan" not in capsys.readouterr().out


def test_members_that_are_swapped_swap_their_numbers(setting: Settings) -> None:
    model, train, validation = setting("llama")
    fitted = members(model, train)
    swapped = {"mat": fitted["id"], "id": fitted["mat"]}
    ours, theirs = (
        values(report_table(each, validation, layers=[2], against="id", progress=False))
        for each in (fitted, swapped)
    )
    for metric, k in (("precision", 10), ("surprisal", None), ("kl", None), ("r2", None)):
        assert ours["mat", 2, metric, k, ""] == theirs["id", 2, metric, k, ""]
        assert ours["id", 2, metric, k, ""] == theirs["mat", 2, metric, k, ""]
    assert ours["mat", 2, "kl", None, "id"] == -theirs["mat", 2, "kl", None, "id"] != 0


@pytest.mark.refused
def test_what_cannot_be_reported_on_is_refused(setting: Settings) -> None:
    model, train, validation = setting("llama")
    fitted = members(model, train)
    with pytest.raises(InputError, match="nothing to report"):
        report_table({}, validation)
    with pytest.raises(InputError, match="no member 'tuned'"):
        report_table(fitted, validation, against="tuned")
    with pytest.raises(InputError, match="do not belong together"):
        report_table(fitted, setting("bert").validation)
    with pytest.raises(InputError, match="True or False for each"):
        report_table(fitted, validation, sinks=torch.ones(validation.n_rows, dtype=torch.bool))
    narrow = {"mat": Member(Lens.fit(model, train, method="mat", layers=[1], progress=False))}
    with pytest.raises(InputError, match="no map of layer 2"):
        report_table(narrow, validation, layers=[2])
    with pytest.raises(InputError, match="seconds"):
        Member(fitted["id"].lens, seconds=-1.0)
    with pytest.raises(InputError, match=r"lens\.report_table"):
        report_by_member(report_table(fitted, validation, layers=[1], progress=False)[["value"]])
