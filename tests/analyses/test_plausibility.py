"""The sheet asks what it should and no more, and the rates are those that one counts by hand."""

from __future__ import annotations

import pandas as pd
import pytest
from paper_a.predictions import COLUMNS
from plausibility import make_plausibility_sheet, plausibility_rates
from scipy import stats

from matlens import InputError

# Two sentences, three layers, two tokens each; the last layer has one way to be read.
TOKENS = {
    ("cats", "id", 0): "a b", ("cats", "mat", 0): "b x", ("dogs", "id", 0): "x a", ("dogs", "mat", 0): "y z",
    ("cats", "id", 1): "x y", ("cats", "mat", 1): "a y", ("dogs", "id", 1): "b c", ("dogs", "mat", 1): "c x",
    ("cats", "id", 2): "x z", ("dogs", "id", 2): "y b",
}  # fmt: skip
# The same token is not the same question in another sentence: "a" and "y" are answered differently.
PLAUSIBLE = {"cats": set("xy"), "dogs": set("axz")}
# Plausible tokens, sentence by sentence:
#            layer 0           layer 1           layer 2
#            id      mat       id      mat       both
#   cats     0 of 2  1 of 2    2 of 2  1 of 2    1 of 2
#   dogs     2 of 2  1 of 2    0 of 2  1 of 2    0 of 2
COUNTED = {
    # layer: (tokens id, mat, instances with one id, mat, instances where id has more, instances)
    None: (5, 5, 3, 5, 2, 6),
    0: (2, 2, 1, 2, 1, 2),
    1: (2, 2, 1, 2, 1, 2),
    2: (1, 1, 1, 1, 0, 2),
}


def predictions(tokens: dict[tuple[str, str, int], str] = TOKENS) -> pd.DataFrame:
    rows = [
        (prompt, method, layer, rank, token, 0.5 / rank)
        for (prompt, method, layer), top in tokens.items()
        for rank, token in enumerate(top.split(" "), start=1)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def filled(sheet: pd.DataFrame) -> pd.DataFrame:
    pairs = zip(sheet["sentence"], sheet["token"], strict=True)
    return sheet.assign(plausible=[int(token in PLAUSIBLE[sentence]) for sentence, token in pairs])


def test_every_token_of_a_sentence_is_asked_once_in_an_order_of_the_seed():
    """Without telling where it is from; sentences stay together in their order."""
    names, words = ["tea", "ants", "moon"], [chr(ord("a") + i) for i in range(20)]
    tops = {(name, "id", 0): " ".join(words) for name in names} | {("ants", "mat", 1): "t a"}
    orders = set()
    for seed in range(5):
        sheet = make_plausibility_sheet(predictions(tops), seed=seed)
        assert list(sheet.columns) == ["item", "sentence", "token", "plausible"]
        assert sheet["item"].tolist() == list(range(1, 61))
        assert sheet["sentence"].tolist() == [name for name in names for _ in words]
        assert (sheet["plausible"] == "").all()
        of_sentences = ["".join(lines["token"]) for _, lines in sheet.groupby("sentence")]
        assert {"".join(sorted(order)) for order in of_sentences} == {"".join(words)}
        orders |= {*of_sentences}
        pd.testing.assert_frame_equal(make_plausibility_sheet(predictions(tops), seed=seed), sheet)
    # Neither the order of the layers, nor that of another seed or sentence.
    assert len(orders) == 15
    assert "".join(words) not in orders


@pytest.mark.parametrize("last_method", ["id alone", "id and mat"])
def test_rates_are_those_counted_by_hand(last_method):
    table = predictions()
    sheet = filled(make_plausibility_sheet(table))
    if last_method == "id and mat":  # said twice, the last layer counts no more than once for each
        last = table[table["layer"] == 2].assign(method="mat")
        table = pd.concat([table, last], ignore_index=True)
    rates = plausibility_rates(table.sample(frac=1, random_state=1), sheet)
    # A decoder has read the same of two sentences with one beginning, which are as many instances.
    twice = plausibility_rates(pd.concat([table, table], ignore_index=True), sheet)
    assert twice["n"].tolist() == (2 * rates["n"]).tolist()
    assert twice["value"].tolist() == pytest.approx(rates["value"].tolist())
    expected = [
        (method, layer, metric, count, n)
        for layer, (read, mapped, with_read, with_mapped, more, n) in COUNTED.items()
        for method, metric, count, n in (
            ("id", "tokens", read, 2 * n), ("id", "instances", with_read, n),
            ("mat", "tokens", mapped, 2 * n), ("mat", "instances", with_mapped, n),
            ("id", "more_than_mat", more, n),
        )
    ]  # fmt: skip
    for row, (method, layer, metric, count, n) in zip(rates.itertuples(), expected, strict=True):
        assert (row.method, row.metric, row.n) == (method, metric, n)
        assert pd.isna(row.layer) if layer is None else row.layer == layer
        interval = stats.binomtest(count, n).proportion_ci(0.95, method="wilson")
        assert (row.value, row.low, row.high) == pytest.approx((count / n, interval.low, interval.high))


def test_a_sheet_of_other_predictions_is_refused():
    sheet = filled(make_plausibility_sheet(predictions()))
    for token in ("a new", "a c"):  # unknown, and known of another sentence
        with pytest.raises(InputError):
            plausibility_rates(predictions({**TOKENS, ("cats", "id", 0): token}), sheet)
