"""Standalone pages: what is packed comes out again, and the policy allows nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import numpy as np
import pytest

from matlens.plots.pages import assemble, embedded_json, join_script, packed


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
    page = assemble("trajectory.html", "trajectory.js", title="<b>", data={}, model="m", notes=[])
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
