"""What cannot be searched for uses of value vectors is refused; what is found, the pages' tests compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_sentences

from matlens import InputError, make_examples, make_prompts
from matlens.explorer import dominant_cells, max_activating_examples, shortened
from matlens.ffn import Projection, Updates, ValueVectors


def test_long_sentences_are_cut_and_keep_their_order(small_model: Callable[[str], Any]) -> None:
    examples = make_examples(small_model("gpt2"), make_sentences())
    cut = shortened(examples, 7)
    assert cut.lengths.tolist() == np.minimum(examples.lengths, 7).tolist()
    for i in range(len(examples)):
        whole = examples.tokens[examples.offsets[i] :][: cut.lengths[i]]
        assert cut.tokens[cut.offsets[i] : cut.offsets[i + 1]].tolist() == whole.tolist()
    assert cut.positions.tolist() == (cut.lengths - 1).tolist()


@pytest.mark.refused
def test_what_cannot_be_searched_is_refused(
    small_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("gpt2")
    examples, values = make_examples(model, make_sentences()), ValueVectors(model)
    with pytest.raises(InputError, match="n_best"):
        max_activating_examples(model, examples, values, n_best=0)
    with pytest.raises(InputError, match="model"):
        max_activating_examples(model, examples, ValueVectors(small_model("llama")))
    monkeypatch.setattr("matlens.explorer.usage.LONGEST", 12)
    with pytest.raises(InputError, match="at most 12 tokens"):
        max_activating_examples(model, examples, values)
    updates = Updates.run(model, make_prompts(model, ["w1"]), progress=False)
    plain = Projection.from_model(model)
    with pytest.raises(InputError, match="0 to 59"):
        dominant_cells(updates, plain, torch.tensor([60]), progress=False)
    with pytest.raises(InputError, match="do not add up"):
        dominant_cells(updates, Projection.after_norm(model), torch.tensor([3]), progress=False)
