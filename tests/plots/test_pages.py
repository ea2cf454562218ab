"""Standalone pages: what is packed, the policy, and the page of a prompt in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import numpy as np
import pytest
from browsing import Visit, numbers, visiting
from injections import INJECTIONS

from matlens.plots.pages import (
    LensCells,
    PromptPage,
    UpdateCells,
    assemble,
    embedded_json,
    join_script,
    packed,
)


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (np.array([[0, 255]]), "u8"), (np.array([256, 65_535]), "u16"),
        (np.array([65_536, 2**32 - 1]), "u32"),
        (np.array([-3, 5], dtype=np.int16), "i16"), (np.array([0.5, -2.25]), "f32"),
        (np.empty((0, 3), dtype=np.int64), "u8"),
    ],
)  # fmt: skip
def test_packed_arrays_come_out_as_they_went_in(array, kind):
    record = packed(array)
    kinds = {"u8": "<u1", "u16": "<u2", "u32": "<u4", "i16": "<i2", "f32": "<f4"}
    values = np.frombuffer(base64.b64decode(record["base64"]), kinds[record["kind"]])
    assert record["kind"] == kind
    np.testing.assert_array_equal(values.reshape(record["shape"]), array)
    for wrong in (np.array([-1]), np.array([2**32]), np.array(["a"])):
        with pytest.raises((ValueError, TypeError)):
            packed(wrong)


def test_embedded_json_ends_no_script():
    data = {"a": "</script><!--\u2028\u2029&amp; \ud800", "b": [1.5, None]}
    text = embedded_json(data)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == data
    with pytest.raises(ValueError, match="JSON"):
        embedded_json({"a": float("nan")})


def test_the_policy_names_what_is_in_the_page_and_allows_no_request():
    script = join_script("trajectory.js")  # each module once, and after what it imports
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)
    places = [script.index(text) for text in ("function element(", "function rankCurves(", "const data")]
    assert places == sorted(places)
    assert script.count("function unpack(") == script.count("function rankCurves(") == 1
    more = {"model": "m", "notes": [], "changes": "", "modification": ""}
    page = assemble("trajectory.html", "trajectory.js", title="<b>", data={}, **more)
    policy = re.search(r'Policy" content="([^"]+)"', page)
    assert policy is not None
    rules = dict(rule.partition(" ")[::2] for rule in policy[1].replace("&#39;", "'").split("; "))
    for tag, rule in (("style", "style-src"), ('script type="module"', "script-src")):
        text = re.search(rf"<{tag}>(.*?)</{tag.split()[0]}>", page, re.DOTALL)
        assert text is not None
        digest = base64.b64encode(hashlib.sha256(text[1].encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert "<title>&lt;b&gt;</title>" in page
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)


LAYERS, TOKENS, FOLLOWED, VOCABULARY = 4, 5, 3, 100


def made_up(
    prompt: str = "a prompt", texts: dict[int, str] | None = None, n: int = TOKENS, n_layers: int = LAYERS
) -> dict[str, Any]:
    """Arguments of a page with made-up numbers, the same each time."""
    random = np.random.default_rng(0)

    def cells() -> LensCells:
        top = np.argsort(random.random((n_layers, n, VOCABULARY)))[..., :10]
        log_probs = -np.sort(random.exponential(2, (n_layers, n, 10)))
        spread = random.random((2, n_layers, n)) * 9
        ranks = random.integers(1, VOCABULARY, (n_layers, n, 1 + FOLLOWED))
        of_followed = -random.random((n_layers, n, FOLLOWED)) * 9
        return LensCells(top, log_probs, *spread, ranks[..., 0], ranks[..., 1:], of_followed)

    ways = 12
    updates = UpdateCells(
        random.integers(0, ways, (n_layers - 1, n, 4)),
        *(random.standard_normal((n_layers - 1, n, 4)), random.random((n_layers - 1, n, 4)) / 5),
        *(random.random((n_layers - 1, n)) + 0.5, random.standard_normal((n_layers - 1, n, FOLLOWED))),
        *(random.standard_normal((n_layers - 1, FOLLOWED)), random.integers(0, 3, ways)),
        *(random.integers(0, 48, ways), random.integers(0, 2, ways)),
        *(random.integers(0, VOCABULARY, (ways, 5)), random.standard_normal((ways, FOLLOWED)), 48),
    )
    return {
        "model": "made-up", "prompt": prompt, "tokens": random.integers(0, VOCABULARY, n),
        "layers": list(range(n_layers)), "lenses": {"id": cells(), "mat": cells()},
        "followed": np.array([3, 17, 60]), "updates": updates, "pinned": [17, 3],
        "texts": {i: f"␣w{i}" for i in range(VOCABULARY)} | (texts or {}), "notes": ["A note."],
    }  # fmt: skip


def trajectory_page(**arguments: Any) -> str:
    return PromptPage(**arguments).to_html()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "page.html"
    path.write_text(trajectory_page(**made_up()), encoding="utf-8")
    return path


@pytest.fixture
def visit(browser, page):
    with visiting(browser, page) as visit:
        yield visit
        assert visit.requests == []
        assert visit.errors == []


def chosen(visit: Visit) -> str:
    return visit.page.inner_text("#cell-title")


def test_cells_have_the_top_token_its_rank_and_a_color_that_grows(visit):
    cells = made_up()["lenses"]["id"]
    order = [(row, column) for row in range(LAYERS - 1, -1, -1) for column in range(TOKENS)]
    measures = {
        "probability": np.exp(cells.log_probs[..., 0]), "entropy": cells.entropy, "kl": cells.kl,
        "rank": -cells.rank, "pin17": -cells.followed_ranks[..., 1],
    }  # fmt: skip
    for color, measure in measures.items():
        visit.page.select_option("#color", color)
        shown = visit.page.evaluate(
            "[...document.querySelectorAll('[role=grid] td')].map(e => [e.firstChild.data,"
            " e.lastChild.textContent, Number(e.className.match(/step([0-9]+)/)[1])])"
        )
        assert [cell[:2] for cell in shown] == [
            [f"␣w{cells.ids[place][0]}", str(cells.rank[place])] for place in order
        ]
        steps = np.array([step for *_, step in shown])
        assert len({*steps.tolist()}) > 4
        assert all(np.diff(steps[np.argsort([measure[place] for place in order])]) >= 0)


def test_the_url_stores_the_view(browser, page, visit):
    visit.page.select_option("#other", label="mat")
    visit.page.select_option("#view", "difference")
    visit.page.select_option("#color", "kl")
    visit.page.click("[role=grid] td[data-row='1'][data-column='2']")
    visit.page.select_option("#add", label="␣w60")
    address = visit.page.url
    assert address.endswith("#lens=id&compare=mat&view=difference&color=kl&cell=1%2C2&pins=17%2C3%2C60")
    with visiting(browser, page, fragment=address.partition("#")[1] + address.partition("#")[2]) as other:
        assert other.page.inner_text("#stage") == visit.page.inner_text("#stage")
        assert other.page.inner_text("#pins") == visit.page.inner_text("#pins")
        other.page.evaluate(
            "location.hash = 'lens=nobody&cell=77,-1&pins=x,5000000,3&color=__proto__&view=no'"
        )
        other.page.wait_for_function("document.querySelectorAll('#pins li').length === 1")
        assert other.errors == []


def test_two_lenses_stand_side_by_side_with_their_differences(visit):
    visit.page.select_option("#other", label="mat")
    first, second = (made_up()["lenses"][name] for name in ("id", "mat"))
    assert visit.page.locator("[role=grid]").count() == 2
    assert visit.page.locator("td.differs").count() == 2 * int(
        (first.ids[..., 0] != second.ids[..., 0]).sum()
    )
    rows = {row[0]: row[1:] for row in visit.rows(".comparison")}
    for name, key in (("entropy (nats)", "entropy"), ("KL to the end (nats)", "kl")):
        a, b = getattr(first, key)[3, 4], getattr(second, key)[3, 4]
        shown = [numbers(cell)[0] for cell in rows[name]]
        np.testing.assert_allclose(shown, [a, b, b - a], rtol=1e-3)
    np.testing.assert_allclose(
        [numbers(cell)[0] for cell in rows["rank of ␣w17"]],
        [first.followed_ranks[3, 4, 1], second.followed_ranks[3, 4, 1],
         second.followed_ranks[3, 4, 1] - first.followed_ranks[3, 4, 1]],
    )  # fmt: skip
    visit.page.select_option("#color", "entropy")
    visit.page.select_option("#view", "difference")
    cells = visit.page.evaluate(
        "[...document.querySelectorAll('[role=grid] td')].map(e => [e.lastChild.textContent, e.className])"
    )
    differences = (second.entropy - first.entropy)[::-1].ravel()
    np.testing.assert_allclose([numbers(text)[0] for text, _ in cells], differences, rtol=1e-3)
    assert all(
        name.startswith("less" if value < 0 else "more")
        for (_, name), value in zip(cells, differences, strict=True)
    )


def test_curves_have_the_ranks_of_pinned_tokens(visit):
    paths = visit.page.evaluate(
        "[...document.querySelectorAll('#curves path')].map(e => e.getAttribute('d'))"
    )
    heights = [[float(part.split(" ")[1]) for part in path[1:].split("L")] for path in paths]
    ranks = made_up()["lenses"]["id"].followed_ranks
    expected = [ranks[:, 4, 1], ranks[:, 4, 0], ranks[3, :, 1], ranks[3, :, 0]]
    for curve, of_token in zip(heights, expected, strict=True):
        slope, start = np.polyfit(np.log10(of_token), curve, 1)
        np.testing.assert_allclose(start + slope * np.log10(of_token), curve, atol=0.11)
        assert slope > 10


def test_no_fault_is_seen_by_axe(browser, page):
    for scheme, fragment in (("light", "#lens=id&compare=mat&view=grid"), ("dark", "#lens=id&view=table")):
        options = {"color_scheme": scheme, "viewport": {"width": 1200, "height": 900}}
        with visiting(browser, page, fragment=fragment, **options) as visit:
            assert visit.faults() == []


def test_foreign_texts_are_shown_as_text(browser, tmp_path):
    texts = {token: INJECTIONS[token % len(INJECTIONS)] for token in range(VOCABULARY)}
    arguments = made_up("".join(INJECTIONS), texts, n=16, n_layers=9) | {"model": INJECTIONS[0]}
    path = tmp_path / "page.html"
    path.write_text(trajectory_page(**arguments), encoding="utf-8")
    with visiting(browser, path) as visit:
        shown = visit.page.evaluate(
            "[...document.querySelectorAll('[role=grid] td')].map(e => e.firstChild.data)"
        )
        expected = [texts[token] for token in arguments["lenses"]["id"].ids[::-1, :, 0].ravel()]
        # Halves of pairs do not come through the driver.
        pairs = [(a, b) for a, b in zip(shown, expected, strict=True) if not b.startswith("\ud800")]
        assert [a for a, _ in pairs] == [b for _, b in pairs]
        assert visit.page.evaluate("window.obeyed") is None
        assert visit.page.evaluate("document.querySelectorAll('img, iframe, object, a, form').length") == 1
        assert (visit.requests, visit.errors) == ([], [])
