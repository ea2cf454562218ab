"""Sites are read from what people write, and say what is wrong with it."""

from __future__ import annotations

import pytest

from matlens import InputError, Site


@pytest.mark.parametrize("text", ["", "h.", "h", "attn_out", "h.one", "h.1,2", "h 3", "1.5e0.z"])
def test_what_is_not_a_site_says_what_is(text: str) -> None:
    with pytest.raises(InputError, match=r"is not a site.*'h\.12' or 'attn_out\.3'"):
        Site.parse(text)


@pytest.mark.parametrize("site", [Site("h", 0), Site("h", 12), Site("ln1_post_out", 3)])
def test_a_site_is_read_back_from_its_name(site: Site) -> None:
    assert Site.parse(str(site)) == site
    assert Site.parse(site) is site


def test_layers_are_counted_where_the_depth_is_known() -> None:
    resolved = {"h.-1": "h.3", -4: "h.0", "mid.-3": "mid.0", Site("h", -2): "h.2", 3: "h.3"}
    for given, expected in resolved.items():
        assert str(Site.parse(given, 3)) == expected
    for given, last in ((4, "h.3"), (-5, "h.3"), ("attn_out.3", "attn_out.2"), (Site("mid", -4), "mid.2")):
        with pytest.raises(InputError, match=rf"out of range: this model has \w+\.0 to {last}\."):
            Site.parse(given, 3)


@pytest.mark.parametrize("given", [-1, "h.-1", "attn_out.-2", Site("h", -3)])
def test_a_layer_that_counts_from_an_unknown_end_is_refused(given: str | int | Site) -> None:
    with pytest.raises(InputError, match="counts from the end of a model that is not known here"):
        Site.parse(given)
