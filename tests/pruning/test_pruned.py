"""Pruned models against plain models with blocks removed and matrices folded by hand."""

from __future__ import annotations

import copy
import itertools
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers
from calibration_texts import WRITERS, logits_without, running_text
from conftest import LAYERS, N_LAYERS, assert_near, plain_vectors
from patched_models import patched
from torch.nn.functional import cross_entropy

import matlens
from matlens import InputError, ffn, pruning
from matlens.data import make_windows
from matlens.io.verification import verify
from matlens.linear import LinearMap
from matlens.pruning import Method, folding
from matlens.pruning.choosing import choose_attention
from matlens.pruning.folding import Matrix, fold
from matlens.pruning.layouts import Layout, Streams, full_windows
from matlens.pruning.pruned import build

TOKENS = torch.tensor([[7, 3, 31, 12, 12, 29, 30, 22, 8, 17]])
FAMILIES = ("gpt2", "llama", "neox", "falcon-alibi")


def logits(model: Any) -> torch.Tensor:
    return logits_without(model, [], TOKENS)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fold_is_least_squares_by_hand_and_the_rest_is_as_it_was(name, small_model, plain_model, windows):
    pruned = pruning.prune(
        small_model(name), windows(name), [1], method="refit", penalty=0.0, progress=False
    ).model
    plain, tokens, reads, writes = plain_model(name), full_windows(windows(name)), [], []
    writer = plain.get_submodule(LAYERS[name][0])[0].get_submodule(WRITERS[name])
    hook = writer.register_forward_hook(
        lambda _, args, out: (reads.append(args[0]), writes.append(out.clone()), None)[2]
    )
    seen = plain_vectors(name, plain, tokens)
    hook.remove()
    a, m, before, after = (x.flatten(0, -2).double() for x in (*reads, *writes, seen["h.1"], seen["h.2"]))
    read = a if writer.bias is None else torch.cat([a, torch.ones(len(a), 1)], 1)
    written = read @ torch.linalg.lstsq(read, after - (before - m), driver="gelsd").solution
    whole = pruning.plain_copy(small_model(name))
    blocks, left = (model.get_submodule(LAYERS[name][0]) for model in (whole, pruned))
    folded = left[0].get_submodule(WRITERS[name])
    with torch.no_grad():
        assert_near(folded(a.float()), written.float(), 1e-4)
    blocks[0].get_submodule(WRITERS[name]).load_state_dict(folded.state_dict())
    assert len(left) == N_LAYERS - 1 == pruned.config.num_hidden_layers
    assert_near(logits(pruned), logits_without(whole, [blocks[1]], TOKENS), 1e-5)
    assert float((logits(pruned) - logits(plain)).abs().max()) > 1e-3


@pytest.mark.parametrize(("name", "dtype"), [("llama-tied", torch.bfloat16), ("neox", torch.float16)])
def test_half_precision_is_folded_and_stays(name, dtype, model_folder, small_model, windows, tmp_path):
    """As in float32 but for rounding, in memory as in the folder; what cannot be folded is seen as ever."""
    half = matlens.load(str(model_folder(name)), dtype=dtype, device="cpu")
    pruned = pruning.prune(half, windows(name), [1], progress=False)
    assert {weight.dtype for weight in pruned.model.parameters()} == {dtype}
    full = pruning.prune(small_model(name), windows(name), [1], progress=False)
    assert_near(logits(pruned.model).float(), logits(full.model), 0.02)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        pruning.save_pruned(pruned, tmp_path / "model"), dtype="auto"
    ).eval()
    assert torch.equal(logits(loaded), logits(pruned.model))
    tied = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert tied == (name == "llama-tied")
    buffers = dict(loaded.named_buffers())
    assert {key: buffer.dtype for key, buffer in pruned.model.named_buffers()} == {
        key: buffer.dtype for key, buffer in buffers.items()
    }
    for key, buffer in pruned.model.named_buffers():
        assert torch.equal(buffer, buffers[key]), key


@pytest.mark.parametrize("name", ["gpt1", "olmoe"])
def test_blocks_are_left_out_where_nothing_can_be_folded(name, small_model, windows, model_folder, tmp_path):
    """GPT-1 has norms after the FFN, OLMoE experts; `out` folds nothing."""
    for other, prune in (
        ("gemma2", pruning.prune), ("granite", pruning.prune), ("neox", pruning.prune_attention)
    ):  # fmt: skip
        with pytest.raises(InputError, match="model must"):
            prune(small_model(other), windows(other), [1], progress=False)
    with pytest.raises(InputError, match=r"model must|Use method='out'"):
        pruning.prune(small_model(name), windows(name), [1], progress=False)
    pruned = pruning.prune(small_model(name), windows(name), 1, method="out", progress=False)
    by_hand = transformers.AutoModelForCausalLM.from_pretrained(model_folder(name)).eval()
    (gone,) = pruned.blocks
    del by_hand.get_submodule(LAYERS[name][0])[gone]
    assert_near(logits(pruned.model), logits(by_hand), 1e-6)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        pruning.save_pruned(pruned, tmp_path / "model")
    )
    assert_near(logits(loaded.eval()), logits(pruned.model), 1e-6)


def test_a_model_that_is_changed_is_refused(small_model, windows):
    model = small_model("llama")
    with (
        ffn.controlled(model, ["L1D3"], 2.0),
        pytest.raises(InputError, match="outside the context"),
    ):
        pruning.prune(model, windows("llama"), [1], progress=False)


# What of a block is turned to nothing; that of BLOOM adds the stream itself.
ATTENTION = {"gpt2": "attn", "llama": "self_attn", "bloom": "self_attention.dense"}
OUTPUTS = {"gpt2": "attn.c_proj", "llama": "self_attn.o_proj", "bloom": "self_attention.dense"}


@pytest.mark.parametrize("name", ATTENTION)
def test_a_fold_is_what_least_squares_by_hand_gives(name, small_model, plain_model, windows):
    """Block 1 loses its attention: what the FFN before it writes is to be that and attention's sum."""
    pruned = pruning.prune_attention(small_model(name), windows(name), [1], penalty=0.0, progress=False)
    plain, tokens = plain_model(name), full_windows(windows(name))
    layers = plain.get_submodule(LAYERS[name][0])
    writer, output = layers[0].get_submodule(WRITERS[name]), layers[1].get_submodule(OUTPUTS[name])
    reads, writes, added = [], [], []
    hooks = [
        writer.register_forward_hook(
            lambda _, args, out: (reads.append(args[0].detach()), writes.append(out.detach()), None)[2]
        ),
        output.register_forward_hook(lambda _, __, out: added.append(out.detach())),
    ]
    with torch.no_grad():
        plain(tokens)
    for hook in hooks:
        hook.remove()
    a, m, more = (torch.cat(x).flatten(0, -2).double().numpy() for x in (reads, writes, added))
    a = a if writer.bias is None else np.hstack([a, np.ones((len(a), 1))])
    expected = a @ np.linalg.lstsq(a, m + more, rcond=None)[0]
    ours = pruned.model.get_submodule(LAYERS[name][0])[0].get_submodule(WRITERS[name])
    read = torch.cat(reads).flatten(0, -2)
    with torch.no_grad():
        assert_near(ours(read), torch.from_numpy(expected).float(), 1e-4)
    assert pruned.attention == (1,)
    assert not pruned.blocks


@pytest.mark.parametrize("name", ATTENTION)
def test_the_model_is_what_a_patched_pass_is(name, small_model, windows):
    """The folded matrices put into the whole model, whose attention is turned to nothing by hooks."""
    pruned = pruning.prune_attention(
        small_model(name), windows(name), [1, 2], method="replaceme", progress=False
    )
    tokens = full_windows(windows(name))[:4]
    whole = pruning.plain_copy(small_model(name))
    layers, folded = (model.get_submodule(LAYERS[name][0]) for model in (whole, pruned.model))
    for block in (0, 1):
        writer = layers[block].get_submodule(WRITERS[name])
        writer.load_state_dict(folded[block].get_submodule(WRITERS[name]).state_dict())
    attention = [layers[block].get_submodule(ATTENTION[name]) for block in (1, 2)]
    expected = logits_without(whole, attention, tokens, nothing=True)
    with torch.no_grad():
        assert_near(pruned.model(tokens).logits, expected, 1e-5)
    assert float((expected - logits_without(whole, [], tokens)).abs().max()) > 1e-3


def test_the_attention_with_the_least_loss_is_chosen(small_model, plain_model, windows):
    plain, tokens = plain_model("llama"), full_windows(windows("llama"))
    streams = Streams(Layout.from_model(small_model("llama")), tokens, progress=False)
    losses = {}
    for i in (1, 2):
        logits = logits_without(plain, [plain.model.layers[i].self_attn], tokens, nothing=True)
        losses[i] = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert choose_attention(streams, 1, progress=False) == (min(losses, key=losses.__getitem__),)
    assert choose_attention(streams, 2, progress=False) == (1, 2), "every block after the first"


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

    Of a later span all is taken from a pass in which the earlier spans are removed already.
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


N, D, D_MLP = 70, 5, 8


def setting(*, bias: bool) -> tuple[Matrix, torch.Tensor, torch.Tensor]:
    """A block's matrix, what it read, and what would be right: near what it writes, and not linear in it."""
    generator = torch.Generator().manual_seed(3)
    read = torch.randn(N, D_MLP, generator=generator) * torch.tensor([9.0, 3, 1, 1, 1, 0.5, 0.5, 0.1]) + 0.4
    matrix = Matrix(
        torch.randn(D, D_MLP, generator=generator), torch.randn(D, generator=generator) if bias else None
    )
    written = read @ matrix.weight.T + (0 if matrix.bias is None else matrix.bias)
    right = written.tanh() * 4 + 0.7 * torch.randn(N, D, generator=generator) + 1
    return matrix, read, right


def ridge_by_hand(
    x: np.ndarray, y: np.ndarray, towards: np.ndarray, ridge: float, *, intercept: bool
) -> tuple[np.ndarray, np.ndarray]:
    """``argmin |x w' + b - y|^2 + ridge |w - towards|^2``: the weight, and the bias, which is free."""
    design = np.hstack([x, np.ones((len(x), int(intercept)))])
    penalty = np.sqrt(ridge) * np.eye(x.shape[1], design.shape[1])
    target = np.sqrt(ridge) * towards.T
    solution = np.linalg.lstsq(np.vstack([design, penalty]), np.vstack([y, target]), rcond=None)[0]
    weight = solution[: x.shape[1]].T
    return weight, solution[-1] if intercept else np.zeros(len(weight))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("method", get_args(Method))
def test_a_fold_is_least_squares_held_near_what_was(method, penalty, bias, monkeypatch):
    monkeypatch.setattr(folding, "_ROWS", 16)
    matrix, read, right = setting(bias=bias)
    ours = fold(method, matrix, read, right, penalty=penalty)
    x, y, w = (each.double().numpy() for each in (read, right, matrix.weight))
    b = np.zeros(D) if matrix.bias is None else matrix.bias.double().numpy()
    written = x @ w.T + b
    if method == "out":
        weight, offset = w, b
    elif method == "magnitude":
        factor = np.abs(y).mean(0) / np.abs(written).mean(0)
        weight, offset = factor[:, None] * w, factor * b
    elif method == "replaceme":
        ridge = penalty * np.square(written).sum() / D
        turned, _ = ridge_by_hand(written, y, np.eye(D), ridge, intercept=False)
        weight, offset = turned @ w, turned @ b
    else:
        ridge = penalty * np.square(x).sum() / D_MLP
        weight, offset = ridge_by_hand(x, y, w, ridge, intercept=bias)
    np.testing.assert_allclose(ours.weight.double().numpy(), weight, rtol=1e-5, atol=1e-6)
    assert (ours.bias is None) == (not bias)
    if ours.bias is not None:
        np.testing.assert_allclose(ours.bias.double().numpy(), offset, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_a_matrix_that_reads_nothing_stays(bias):
    matrix, read, right = setting(bias=bias)
    ours = fold("refit", matrix, torch.zeros_like(read), right, penalty=0.3)
    np.testing.assert_allclose(ours.weight.numpy(), matrix.weight.numpy(), rtol=1e-6)


def divergence(whole: Any, pruned: Any, tokens: torch.Tensor) -> torch.Tensor:
    truth, given = (model(tokens).logits.log_softmax(-1) for model in (whole, pruned))
    return torch.nn.functional.kl_div(given, truth, log_target=True, reduction="none").sum(-1).mean()


def test_steps_grow_for_a_tenth_of_the_updates_and_then_fall(small_model, plain_model, windows, monkeypatch):
    folded = pruning.prune(
        small_model("gpt2"), windows("gpt2"), [2], method="replaceme", progress=False
    ).model
    tokens = full_windows(windows("gpt2"))
    streams = Streams(Layout.from_model(small_model("gpt2")), tokens, progress=False)
    by_hand, whole, losses = copy.deepcopy(folded), plain_model("gpt2"), list[float]()
    weight = by_hand.get_parameter("transformer.h.1.mlp.c_proj.weight")
    bias = by_hand.get_parameter("transformer.h.1.mlp.c_proj.bias")
    optimizer = torch.optim.Adam([weight, bias])
    texts = folding._order(len(tokens), 30 * (size := 1024 // 24), 2).split(size)
    for step, rate in enumerate([1 / 3, 2 / 3, 1, *[1] * 27]):
        optimizer.param_groups[0]["lr"] = 1e-3 * rate * (30 - step) / 30
        optimizer.zero_grad()
        loss = divergence(whole, by_hand, tokens[texts[step]])
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    monkeypatch.setattr(folding, "RATE", 1e-3)
    healed = folding.heal(streams, folded, [2], "replaceme", 24 * 30 * size, seed=2, progress=False)
    assert healed.divergence == pytest.approx(sum(losses[-3:]) / 3, rel=1e-3)
    expected = by_hand.state_dict()
    for name, tensor in folded.state_dict().items():
        if name.startswith("transformer.h.1.mlp.c_proj"):
            assert_near(tensor, expected[name], 1e-3)
        else:
            assert torch.equal(tensor, expected[name]), name
    assert all(weight.grad is None and weight.requires_grad for weight in folded.parameters())


@pytest.mark.parametrize(("method", "places"), [("refit", (0, 2)), ("chain", (0, 1, 2, 3))])
def test_of_several_spans_the_changed_matrices_alone_are_healed(method, places, small_model, windows):
    """Where blocks before a changed one are gone, it has another number in the pruned model."""
    asked = small_model("llama-deep"), windows("llama-deep"), [1, 4]
    before, after = (pruning.prune(*asked, method=method, heal=n, progress=False).model for n in (0, 60))
    state = before.state_dict()
    changed = {key for key, value in after.state_dict().items() if not torch.equal(value, state[key])}
    assert changed == {f"model.layers.{place}.mlp.down_proj.weight" for place in places}


def test_what_cannot_be_healed_is_refused(small_model, windows):
    asked = small_model("llama"), windows("llama")
    with pytest.raises(InputError, match="heal needs blocks"):
        pruning.prune(*asked, [1], method="out", heal=10, progress=False)
    with pytest.raises(InputError, match="heal needs blocks"):
        pruning.prune(*asked, 0, heal=10, progress=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_healed_in_small_steps(dtype, model_folder, windows, monkeypatch):
    """Steps far below what bfloat16 can tell add up, and squares below the least of float16 do no harm."""
    half = matlens.load(str(model_folder("llama")), dtype=dtype, device="cpu")
    streams = Streams(Layout.from_model(half), full_windows(windows("llama")), progress=False)
    folded = pruning.prune(half, windows("llama"), [2], method="replaceme", progress=False).model
    writer = folded.get_submodule(f"{LAYERS['llama'][0]}.1.{WRITERS['llama']}")
    before = writer.weight.clone()
    monkeypatch.setattr(folding, "RATE", 1e-5)
    folding.heal(streams, folded, [2], "replaceme", 60 * 1024, progress=False)
    assert writer.weight.dtype == dtype
    assert bool(writer.weight.isfinite().all())
    assert float((writer.weight != before).float().mean()) > 0.5


def test_a_folder_loads_to_the_same_logits(pruned_llama, small_model, windows, tmp_path):
    table = pruning.compare_pruned(small_model("llama"), pruned_llama, windows("llama", 600), progress=False)
    folder = pruning.save_pruned(pruned_llama, tmp_path / "model", table)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, pruned_llama.model(TOKENS).logits)
    assert loaded.config.num_hidden_layers == 2 == len(loaded.model.layers)
    assert transformers.AutoTokenizer.from_pretrained(folder)("w1 w2").input_ids == [
        small_model("llama").tokenizer.convert_tokens_to_ids(word) for word in ("w1", "w2")
    ]
    assert json.loads((folder / "matlens.json").read_text())["request"]["removed_blocks"] == [1]
    with pytest.raises(InputError, match="new or empty"):
        pruning.save_pruned(pruned_llama, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [verdict[1:] for verdict in verify(folder)] == [("pruned model, 6 files", None)]
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors does not hold what was written" in str(next(iter(verify(folder))).damage)


@pytest.mark.parametrize("room", [20_000, 800])
def test_a_full_disk_is_told_and_nothing_is_left(room, pruned_llama, tmp_path, monkeypatch):
    """The library of the weights and that of the tokenizer have errors of their own for it."""
    if room == 800:
        monkeypatch.setattr(pruned_llama.model, "save_pretrained", lambda _: None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(Exception, match=r"File too large|os error 27"):
            pruning.save_pruned(pruned_llama, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_what_is_measured_is_what_passes_by_hand_give(pruned_llama, small_model, plain_model, windows):
    table = pruning.compare_pruned(small_model("llama"), pruned_llama, windows("llama", 600), progress=False)
    values = {(row.method, row.metric): row.value for row in table.itertuples()}
    text = windows("llama", 600)
    whole = [text.tokens[a:b] for a, b in itertools.pairwise(text.offsets) if b - a == 24]
    tokens = torch.from_numpy(np.stack(whole)).long()
    logits = {}
    for name, model in (("original", plain_model("llama")), ("pruned", pruned_llama.model)):
        with torch.no_grad():
            logits[name] = model(tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[name].flatten(0, 1), tokens[:, 1:].flatten())
        assert values[name, "perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)
    same = (logits["original"].argmax(-1) == logits["pruned"].argmax(-1)).double().mean()
    assert values["pruned", "agreement"] == pytest.approx(float(same))
    assert 0 < float(same) < 1
    ratio = values["pruned", "perplexity"] / values["original", "perplexity"]
    assert values["pruned", "ratio"] == pytest.approx(ratio)


BARE = """
import json, sys
sys.modules["matlens"] = sys.modules["transformer_lens"] = None
import torch, transformers
given = json.loads(sys.stdin.read())
made = {}
for name, folder in given["folders"].items():
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        logits = model(torch.tensor(given["tokens"])).logits
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    made[name] = {"dtype": str(logits.dtype), "tied": tied, "logits": logits.float().tolist()}
try:
    import matlens
except ImportError:
    print(json.dumps(made))
"""


def test_folders_load_in_a_process_without_matlens(small_model, model_folder, tmp_path):
    """One process for all families: the same logits, and weights that are one stay one."""
    text = running_text(600)
    models = {name: small_model(name) for name in ("gpt2", "llama", "neox")}
    models["bf16"] = matlens.load(str(model_folder("llama-tied")), dtype=torch.bfloat16, device="cpu")
    expected, folders = {}, {}
    for name, model in models.items():
        made = pruning.prune(model, make_windows(model, text, size=24), [1], progress=False).model
        assert made.config.num_hidden_layers == 2
        folders[name] = str(tmp_path / name)
        made.save_pretrained(folders[name])
        with torch.no_grad():
            logits = made(TOKENS).logits
        tied = made.get_input_embeddings().weight is made.get_output_embeddings().weight
        expected[name] = {"dtype": str(logits.dtype), "tied": tied, "logits": logits.float().tolist()}
    bare = subprocess.run(
        [sys.executable, "-c", BARE], input=json.dumps({"folders": folders, "tokens": TOKENS.tolist()}),
        capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path,
    )  # fmt: skip
    assert bare.returncode == 0, bare.stderr[-2000:]
    assert json.loads(bare.stdout) == expected
    assert {name for name, of_model in expected.items() if of_model["tied"]} == {"gpt2", "bf16"}
    assert expected["bf16"]["dtype"] == "torch.bfloat16"
