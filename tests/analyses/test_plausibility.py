"""The sheet asks what it should and no more, and the rates are those that one counts by hand."""

from __future__ import annotations

import pandas as pd
import pytest
from paper_a.predictions import COLUMNS
from plausibility import SHEET_COLUMNS, make_plausibility_sheet, plausibility_rates
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


# The sheet


def test_every_token_of_a_sentence_is_asked_once_without_telling_where_it_is_from():
    sheet = make_plausibility_sheet(predictions())
    assert list(sheet.columns) == list(SHEET_COLUMNS) == ["item", "sentence", "token", "plausible"]
    asked = list(zip(sheet["sentence"], sheet["token"], strict=True))
    assert sorted(asked) == sorted(
        {(prompt, token) for (prompt, _, _), top in TOKENS.items() for token in top.split(" ")}
    )
    assert sheet["item"].tolist() == list(range(1, len(asked) + 1))
    assert (sheet["plausible"] == "").all()


def test_sentences_stay_together_in_their_order_and_tokens_are_shuffled_by_the_seed():
    words = [chr(ord("a") + i) for i in range(20)]
    names = ["tea", "ants", "moon"]
    table = predictions({(name, "id", 0): " ".join(words) for name in names})
    orders = set()
    for seed in range(5):
        sheet = make_plausibility_sheet(table, seed=seed)
        assert sheet["sentence"].tolist() == [name for name in names for _ in words]
        orders |= {"".join(lines["token"]) for _, lines in sheet.groupby("sentence")}
        pd.testing.assert_frame_equal(make_plausibility_sheet(table, seed=seed), sheet)
    # Neither the order of the layers, nor that of another seed or sentence.
    assert len(orders) == 15
    assert "".join(words) not in orders


# Rates


@pytest.mark.parametrize("last_method", ["id alone", "id and mat"])
def test_rates_are_those_counted_by_hand(last_method):
    table = predictions()
    sheet = filled(make_plausibility_sheet(table))
    if last_method == "id and mat":  # said twice, the last layer counts no more than once for each
        last = table[table["layer"] == 2].assign(method="mat")
        table = pd.concat([table, last], ignore_index=True)
    rates = plausibility_rates(table.sample(frac=1, random_state=1), sheet)
    expected = [
        (method, layer, metric, count, n)
        for layer, (read, mapped, with_read, with_mapped, more, n) in COUNTED.items()
        for method, metric, count, n in (
            ("id", "tokens", read, 2 * n), ("id", "instances", with_read, n),
            ("mat", "tokens", mapped, 2 * n), ("mat", "instances", with_mapped, n),
            ("id", "more_than_mat", more, n),
        )
    ]  # fmt: skip
    assert list(rates.columns) == ["method", "layer", "metric", "value", "low", "high", "n"]
    assert len(rates) == len(expected)
    for row, (method, layer, metric, count, n) in zip(rates.itertuples(), expected, strict=True):
        assert (row.method, row.metric, row.n) == (method, metric, n)
        assert pd.isna(row.layer) if layer is None else row.layer == layer
        interval = stats.binomtest(count, n).proportion_ci(0.95, method="wilson")
        assert (row.value, row.low, row.high) == pytest.approx((count / n, interval.low, interval.high))


def test_sentences_that_begin_alike_are_as_many_instances():
    """A decoder has read the same of two sentences that are drawn after the same beginning."""
    table = pd.concat([predictions(), predictions()], ignore_index=True)
    once, twice = (
        plausibility_rates(one, filled(make_plausibility_sheet(one))) for one in (predictions(), table)
    )
    assert twice["n"].tolist() == (2 * once["n"]).tolist()
    assert twice["value"].tolist() == pytest.approx(once["value"].tolist())


def test_a_sheet_of_other_predictions_is_refused():
    other = {**TOKENS, ("cats", "id", 0): "a new", ("dogs", "mat", 1): "newer b"}
    with pytest.raises(InputError):
        plausibility_rates(predictions(other), filled(make_plausibility_sheet(predictions())))
    # The token alone is not enough: it has to be of the sentence.
    with pytest.raises(InputError):
        plausibility_rates(
            predictions({**TOKENS, ("cats", "id", 0): "a c"}), filled(make_plausibility_sheet(predictions()))
        )
