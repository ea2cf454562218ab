"""Plain models of the blocks that stay: their configuration, their places, and fits one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from calibration_texts import WRITERS, logits_without, running_text
from conftest import LAYERS, assert_near, plain_vectors
from patched_models import patched

from matlens import InputError, pruning
from matlens.data import make_windows
from matlens.linear import LinearMap
from matlens.pruning.layouts import Layout, full_windows
from matlens.pruning.pruned import build

Models = Callable[[str], Any]
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": None, "bos_token_id": None,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
ENDS = [1, 2, 3]  # as many as there are layers, and none of theirs
MIXED = ["full_attention", "sliding_attention", "full_attention"]
CONFIGS: dict[str, Callable[[], Any]] = {
    "layer_types": lambda: transformers.Qwen3Config(
        **GROUPED, layer_types=list(MIXED), use_sliding_window=True, sliding_window=3, eos_token_id=ENDS
    ),
    "no_rope_layers": lambda: transformers.SmolLM3Config(
        **GROUPED, no_rope_layers=[0, 1, 0], eos_token_id=ENDS
    ),
    "attention_layers": lambda: transformers.GPTNeoConfig(
        vocab_size=40, hidden_size=16, num_layers=3, num_heads=2, max_position_embeddings=32, window_size=3,
        attention_types=[[["global", "local"], 1], [["global"], 1]], eos_token_id=ENDS, bos_token_id=None,
    ),
}  # fmt: skip
NORMS = {"gpt2": "transformer.ln_f", "llama": "model.norm"}
TOKENS = torch.tensor([[7, 3, 31, 12, 12, 29, 30, 22, 8, 17]])


def make(config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("key", CONFIGS)
@pytest.mark.parametrize("gone", [1, 2])
def test_what_has_an_entry_a_block_is_cut_and_nothing_else(key, gone, tmp_path):
    """The second block attends by another rule than its neighbors, so a list cut elsewhere would show."""
    model = make(CONFIGS[key]())
    layout = Layout(model, "transformer.h" if key == "attention_layers" else "model.layers")
    values = list(getattr(model.config, key))
    assert len(set(values)) == 2
    expected = [value for index, value in enumerate(values) if index != gone]
    pruned = build(layout, [gone], {})
    assert list(getattr(pruned.config, key)) == expected
    assert pruned.config.eos_token_id == ENDS
    assert pruned.config.num_hidden_layers == 2
    with torch.no_grad():
        logits = pruned(TOKENS).logits
        assert_near(logits, logits_without(model, [layout.blocks[gone]], TOKENS), 1e-5)
        pruned.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(loaded(TOKENS).logits, logits)
    assert list(getattr(loaded.config, key)) == expected
    assert getattr(model.config, key) == values


def test_a_block_that_depends_on_its_place_cannot_move():
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}
    for scaled in (False, True):
        config = transformers.GPT2Config(**sizes, scale_attn_by_inverse_layer_idx=scaled)
        model = make(config)
        layout = Layout(model, "transformer.h")
        last = build(layout, [2], {})
        with torch.no_grad():
            assert_near(last(TOKENS).logits, logits_without(model, [layout.blocks[2]], TOKENS), 1e-5)
        if scaled:
            with pytest.raises(InputError, match="depends on its place: block 2 gives something else as blo"):
                build(layout, [1], {})
        else:
            assert build(layout, [1], {}).config.n_layer == 2


@pytest.mark.parametrize("method", ["refit", "replaceme", "magnitude", "out"])
def test_too_few_tokens_for_a_method_are_refused(method, small_model):
    """A fit of as many numbers as there are tokens, or more, would be exact and worth nothing."""
    text, model = running_text(100), small_model("llama")
    least = {"refit": 48, "replaceme": 32, "magnitude": 32, "out": 0}[method]
    few, enough = (
        make_windows(model, text, size=8, max_windows=n) for n in (max(1, least // 8 - 1), max(1, least // 8))
    )
    for prune in (pruning.prune, pruning.prune_attention):
        if method != "out":
            with pytest.raises(InputError, match=f"at least {least} tokens"):
                prune(model, few, [1], method=method, progress=False)
        assert prune(model, enough, [1], method=method, progress=False).method == method


@torch.no_grad()
def folded_by_hand(
    method: str, whole: Any, tokens: torch.Tensor, gone: list[int]
) -> tuple[Any, dict[int, np.ndarray]]:
    """The whole model with a solved matrix before each span of one block, and the matrices.

    Of a later span all is taken from a pass in which the earlier spans are left out already.
    """
    model, matrices = pruning.plain_copy(whole), dict[int, np.ndarray]()
    blocks = model.model.layers
    right_at = {index: _stream_before(pruning.plain_copy(whole), index + 1, tokens, []) for index in gone}
    for place, index in enumerate(gone):
        writer, reads = blocks[index - 1].mlp.down_proj, []
        hook = writer.register_forward_hook(lambda _, args, __, reads=reads: reads.append(args[0]) or None)
        before = _stream_before(model, index, tokens, gone[:place])
        hook.remove()
        a = torch.cat(reads).flatten(0, 1).double().numpy()
        w = writer.weight.double().numpy()
        right = (right_at[index] - before).flatten(0, 1).double().numpy() + a @ w.T
        m = a if method == "refit" else a @ w.T
        solved = np.linalg.lstsq(m, right, rcond=None)[0].T
        matrices[index - 1] = solved if method == "refit" else solved @ w
        writer.weight.copy_(torch.from_numpy(matrices[index - 1]).float())
    return model, matrices


def _stream_before(model: Any, index: int, tokens: torch.Tensor, gone: list[int]) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    hook = model.model.layers[index].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    logits_without(model, [model.model.layers[i] for i in gone], tokens)
    hook.remove()
    return torch.cat(seen)


@pytest.mark.parametrize("method", ["refit", "replaceme"])
def test_spans_are_fitted_one_after_the_other(method, small_model, windows):
    """Each on the stream of the model that is pruned so far, and towards the whole model's own."""
    model, gone = small_model("llama-deep"), [1, 4]
    text = windows("llama-deep")
    tokens = full_windows(text)
    pruned = pruning.prune(model, text, gone, method=method, penalty=0.0, progress=False)
    by_hand, matrices = folded_by_hand(method, model, tokens, gone)
    for block, place in ((0, 0), (3, 2)):
        ours = pruned.model.model.layers[place].mlp.down_proj.weight.detach()
        assert_near(ours, torch.from_numpy(matrices[block]).float(), 1e-3)
    with torch.no_grad():
        logits = pruned.model(tokens[:4]).logits
    layers = [by_hand.model.layers[i] for i in gone]
    assert_near(logits, logits_without(by_hand, layers, tokens[:4]), 1e-4)
    parts = [
        LinearMap(
            torch.from_numpy(matrix).float(), None, f"blocks.{block}.mlp.out.hook_in", f"ffn_out.{block}"
        )
        for block, matrix in matrices.items()
    ]
    jumps = [LinearMap(torch.eye(32), None, f"h.{index}", f"h.{index + 1}") for index in gone]
    with torch.no_grad(), patched(model, [*parts, *jumps]):
        assert_near(logits, model(tokens[:4], return_type="logits"), 1e-4)
    alone = pruning.prune(model, text, [4], method=method, penalty=0.0, progress=False)
    both = (alone.model.model.layers[3], pruned.model.model.layers[2])
    on_its_own, behind_another = (block.mlp.down_proj.weight.detach() for block in both)
    assert float((on_its_own - behind_another).abs().max()) > 1e-3


@pytest.mark.parametrize("name", NORMS)
def test_a_chain_makes_what_is_left_of_the_error_good_behind_the_span(
    name, small_model, plain_model, windows
):
    """The last block's matrix, solved for by numpy from what the pruned model gives it."""
    text, penalty = windows(name), 0.3
    asked: dict[str, Any] = {"penalty": penalty, "progress": False}
    chain, refit = (
        pruning.prune(small_model(name), text, [1], method=method, **asked).model
        for method in ("chain", "refit")
    )
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    final: list[torch.Tensor] = []
    writer = chain.get_submodule(LAYERS[name][0])[1].get_submodule(WRITERS[name])
    hooks = [
        writer.register_forward_hook(
            lambda _, args, out: (read.append(args[0]), written.append(out), None)[2]
        ),
        chain.get_submodule(NORMS[name]).register_forward_pre_hook(lambda _, args: final.append(args[0])),
    ]
    tokens = full_windows(text)
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
