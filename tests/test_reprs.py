"""Objects that are printed in a notebook say in one line what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conftest import make_sentences

import matlens
from matlens import Lens, LinearMap, MapSet, ffn


def test_results_say_in_one_line_what_they_are(small_model: Callable[[str], Any]) -> None:
    model = small_model("gpt2")
    corpus = make_sentences()
    examples = matlens.make_examples(model, corpus)
    activations = matlens.collect(model, examples, progress=False)
    maps = MapSet.fit(activations, pairs="all", progress=False)
    name = repr(model.cfg.model_name)
    by_hand = MapSet([LinearMap(maps[0, 3].weight, None, "h.0", "h.3")])
    expected = {
        repr(corpus): ("words", f"{len(corpus):,} sentences"),
        repr(examples): (f"{len(examples):,} sentences", f"{examples.n_positions:,} positions"),
        repr(maps[0, 3]): ("h.0 -> h.3", "32 -> 32"),
        repr(matlens.Readout(model)): (name, "32 -> "),
        repr(activations): ("h.0 .. h.3", f"{activations.n_rows:,} rows", name),
        repr(maps): (f"{len(maps)} maps", "h.0 -> h.1 .. h.2 -> h.3", name),
        repr(by_hand): ("1 maps: h.0 -> h.3", "unknown model"),
        repr(Lens.identity(model)): ("'id'", "layers 0 to 2 of 3", name),
        repr(Lens.identity(model).trajectory("a")): ("'a'", "4 layers", "Lens('id'"),
        repr(ffn.Trace.run(model, examples, progress=False)): (f"{len(examples)} examples", "3 layers", name),
        repr(ffn.Updates.run(model, examples, [1], progress=False)): ("positions", "layers 1", name),
        repr(Lens.from_maps(maps)): ("'mat'", "on no model", name),
    }
    for text, parts in expected.items():
        assert "\n" not in text
        assert len(text) < 100 + len(name)
        assert all(part in text for part in parts), text
