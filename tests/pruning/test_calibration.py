"""Matrices are fitted one after the other, on the stream of the model that is pruned so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import LAYERS, WORDS, plain_vectors

from matlens import InputError, pruning
from matlens.corpora import Corpus, make_windows
from matlens.pruning.calibration import whole_windows

Models = Callable[[str], Any]
WRITERS = {"gpt2": "mlp.c_proj", "llama": "mlp.down_proj"}
NORMS = {"gpt2": "transformer.ln_f", "llama": "model.norm"}


@pytest.mark.parametrize("name", WRITERS)
def test_a_chain_makes_what_is_left_of_the_error_good_behind_the_span(
    name: str, small_model: Models, plain_model: Models
) -> None:
    """The last block's matrix, solved for by numpy from what the pruned model gives it."""
    text = Corpus("text", (" ".join(np.random.default_rng(3).choice(WORDS, 1200)),), 1, 0, 0, 0)
    windows, penalty = make_windows(small_model(name), text, size=24), 0.3
    asked: dict[str, Any] = {"penalty": penalty, "progress": False}
    chain, refit = (
        pruning.prune(small_model(name), windows, [1], method=method, **asked).model
        for method in ("chain", "refit")
    )
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    final: list[torch.Tensor] = []
    writer = chain.get_submodule(LAYERS[name][0])[1].get_submodule(WRITERS[name])
    hooks = [
        writer.register_forward_hook(lambda _, args, out: (read.append(args[0]), written.append(out))),
        chain.get_submodule(NORMS[name]).register_forward_pre_hook(lambda _, args: final.append(args[0])),
    ]
    tokens = whole_windows(windows)
    with torch.no_grad():
        chain(tokens)
    for hook in hooks:
        hook.remove()
    a, m, h = (np.vstack(part[0].double().numpy()) for part in (read, written, final))
    right = [plain_vectors(name, plain_model(name), row)["h.3"][0].double().numpy() for row in tokens]
    right = np.vstack(right) - (h - m)
    weights = {
        label: model.get_submodule(LAYERS[name][0])[1].get_submodule(WRITERS[name])
        for label, model in (("chain", chain), ("refit", refit))
    }
    turn = np.transpose if name == "llama" else np.asarray  # nn.Linear keeps its matrix transposed
    own = turn(weights["refit"].weight.detach().double().numpy())
    ridge = penalty * np.square(a).sum() / a.shape[1]
    bias = weights["refit"].bias
    rest = right - a @ own - (0 if bias is None else bias.detach().double().numpy())
    if bias is not None:
        a, rest = a - a.mean(0), rest - rest.mean(0)
    change = np.linalg.solve(a.T @ a + ridge * np.eye(a.shape[1]), a.T @ rest)
    ours = turn(weights["chain"].weight.detach().double().numpy())
    np.testing.assert_allclose(ours, own + change, atol=2e-5 * np.abs(own).max())
    assert np.abs(change).max() > 1e-3 * np.abs(own).max()
    first = (model.get_submodule(LAYERS[name][0])[0].state_dict() for model in (chain, refit))
    for ours_of, theirs in zip(*(state.values() for state in first), strict=True):
        assert torch.equal(ours_of, theirs)


def test_attention_has_no_chain(small_model: Models) -> None:
    text = Corpus("text", (" ".join(np.random.default_rng(3).choice(WORDS, 300)),), 1, 0, 0, 0)
    windows = make_windows(small_model("llama"), text, size=24)
    with pytest.raises(InputError, match="Expected one of out, magnitude, replaceme, refit"):
        pruning.prune_attention(small_model("llama"), windows, [1], method="chain")
