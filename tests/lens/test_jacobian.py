"""A Jacobian lens is the mean Jacobian, by automatic differentiation of the blocks themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import D_MODEL, WORDS

from matlens import InputError
from matlens.lens.jacobian import fit_jacobian

Models = Callable[[str], Any]


def test_it_is_the_mean_over_sources_of_the_sum_over_later_targets(small_model: Models) -> None:
    model, text = small_model("gpt2"), " ".join(WORDS[3:12])
    lens = fit_jacobian(model, [text, "w1 w2"], layers=[2], skip=1, progress=False)
    assert list(lens.maps) == [2]
    assert lens.maps[2].bias is None
    tokens = model.to_tokens(text)

    def onward(h: torch.Tensor) -> torch.Tensor:
        out = []
        model.run_with_hooks(
            tokens,
            fwd_hooks=[
                ("blocks.1.hook_out", lambda value, hook: h[None]),
                (f"blocks.{model.cfg.n_layers - 1}.hook_out", lambda value, hook: out.append(value[0])),
            ],
        )
        return out[0]

    stream = []
    with torch.no_grad():
        model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_out", lambda v, hook: stream.append(v[0]))])
    whole = torch.autograd.functional.jacobian(onward, stream[0].clone())
    n = len(stream[0])
    counted = range(1, n - 1)  # neither the first, which is skipped, nor the last
    expected = sum(whole[t, :, s] for s in counted for t in counted if t >= s) / len(counted)
    torch.testing.assert_close(lens.maps[2].matrix(D_MODEL), expected, rtol=1e-3, atol=1e-5)
    assert lens.provenance.details["n_fitted"] == 1  # the second text is too short
    assert lens.provenance.details["n_tokens"] == n


@pytest.mark.refused
def test_what_has_no_jacobian_lens_is_refused(small_model: Models) -> None:
    with pytest.raises(InputError, match="cannot fit a Jacobian lens here"):
        fit_jacobian(small_model("bert"), ["w1 w2 w3"], skip=0)
    with pytest.raises(InputError, match="layers from 1 to 2"):
        fit_jacobian(small_model("gpt2"), ["w1 w2 w3"], layers=[0])
    with pytest.raises(InputError, match="too short"):
        fit_jacobian(small_model("gpt2"), ["w1 w2 w3"], progress=False)
    with pytest.raises(InputError, match="no text"):
        fit_jacobian(small_model("gpt2"), [" "])
