"""Maps at the cuts of pruned models are those of NumPy, and continuations those of one pass a token."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from calibration_texts import WRITERS, running_text
from conftest import LAYERS, assert_near
from cuts.continuations import beginnings, compare, continuation_losses, continue_prompts, measures
from cuts.maps import Cut, hadamard, insert_map, without_blocks

from matlens import InputError
from matlens.data import make_windows
from matlens.pruning import Calibration

MODEL, TWO_SPANS = "llama-deep", [1, 2, 4]  # of six blocks
PENALTY = 0.3


@pytest.fixture(scope="module")
def calibrations(small_model, windows):
    made: dict[str, Calibration] = {}

    def calibration(name: str) -> Calibration:
        if name not in made:
            made[name] = Calibration.run(small_model(name), windows(name), "refit", progress=False)
        return made[name]

    return calibration


def first_of(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def run_blocks(
    model: Any, name: str, tokens: torch.Tensor, instead: dict[int, torch.Tensor | None]
) -> tuple[list[np.ndarray], torch.Tensor]:
    """Streams before each block and logits of a plain model, in which some blocks are matrices or nothing."""
    seen: list[np.ndarray] = []
    handles = []
    for index, block in enumerate(model.get_submodule(LAYERS[name][0])):

        def before(_: Any, args: Any, kwargs: Any) -> None:
            h = args[0] if args else kwargs["hidden_states"]
            seen.append(h.flatten(0, 1).double().numpy())

        def after(_: Any, args: Any, kwargs: Any, output: Any, index: int = index) -> Any:
            if index not in instead:
                return None
            h, weight = args[0] if args else kwargs["hidden_states"], instead[index]
            h = h if weight is None else h @ weight.T.float()
            return (h, *output[1:]) if isinstance(output, tuple) else h

        handles += [
            block.register_forward_pre_hook(before, with_kwargs=True),
            block.register_forward_hook(after, with_kwargs=True),
        ]
    logits = model(tokens, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return seen, logits


def map_by_hand(cut: Cut, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The matrix that takes a column of the stream before the span to that after it."""
    if cut == Cut.jump:
        return np.linalg.lstsq(x, y, rcond=None)[0].T
    basis = np.eye(x.shape[1])
    if cut == Cut.rotated:
        basis = scipy.linalg.hadamard(x.shape[1]) / np.sqrt(x.shape[1])
    sizes = [np.abs(np.einsum("nd,de->ne", each, basis)).mean(0) for each in (x, y)]
    return basis @ np.diag(sizes[1] / sizes[0]) @ np.linalg.inv(basis)


@pytest.mark.parametrize("cut", [Cut.jump, Cut.linearpatch, Cut.rotated])
@pytest.mark.parametrize("blocks", [[2], [1, 2], [4, 5], TWO_SPANS])
def test_a_map_is_fitted_before_and_after_the_span_and_stands_in_its_place(cut, blocks, calibrations):
    """With several spans, each from the stream of the changed model to that of the original."""
    calibration = calibrations(MODEL)
    plain, tokens = calibration.layout.model, calibration.streams.tokens
    made = without_blocks(calibration, blocks, cut)
    whole, original = run_blocks(plain, MODEL, tokens, {})
    whole.append(calibration.streams.h[-1].flatten(0, 1).double().numpy())
    instead: dict[int, torch.Tensor | None] = dict.fromkeys(blocks)
    starts = [block for block in blocks if block - 1 not in blocks]
    for start in starts:
        end = next(index for index in range(start, 7) if index not in blocks)
        streams, _ = run_blocks(plain, MODEL, tokens, instead)
        weight = map_by_hand(cut, streams[start], whole[end])
        instead[start] = torch.from_numpy(weight)
        place = start - 1 - sum(block < start for block in blocks)
        writer = made.get_submodule(LAYERS[MODEL][0])[place].get_submodule(WRITERS["llama"])
        assert_near(writer.jump.weight.detach(), torch.from_numpy(weight).float(), 1e-4)
    assert sum("jump" in name for name, _ in made.named_parameters()) == len(starts)
    with torch.no_grad():
        logits = made(tokens, use_cache=False).logits
    assert_near(logits, run_blocks(plain, MODEL, tokens, instead)[1], 1e-4)
    assert float((logits - original).abs().max()) > 1e-2


def test_hadamard_matrices_are_orthogonal_with_entries_of_one_size():
    for order in (1, 2, 12, 24, 32, 144, 576):
        matrix = hadamard(order).numpy()
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(order), atol=1e-12)
        np.testing.assert_allclose(np.abs(matrix), order**-0.5)
    for order in (3, 20, 6):
        with pytest.raises(InputError, match="product of 2s and 12s"):
            hadamard(order)


def solved(x: np.ndarray, y: np.ndarray, towards: np.ndarray) -> np.ndarray:
    """``argmin |x w' - y|^2 + ridge |w - towards|^2``."""
    ridge = PENALTY * np.square(x).sum() / x.shape[1]
    design = np.vstack([x, np.sqrt(ridge) * np.eye(x.shape[1])])
    return np.linalg.lstsq(design, np.vstack([y, np.sqrt(ridge) * towards.T]), rcond=None)[0].T


@torch.no_grad()
def read_and_streams(model: Any, place: int, tokens: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Input and output of the matrix of a block of a Llama, and the stream after the block, before a map."""
    block, found = model.model.layers[place], dict[str, np.ndarray]()

    def of_writer(_: Any, args: Any, output: Any) -> None:
        found.update(read=args[0].flatten(0, 1).double().numpy(), out=output.flatten(0, 1).double().numpy())

    def of_block(_: Any, __: Any, output: Any) -> None:
        found["after"] = first_of(output).flatten(0, 1).double().numpy()

    handles = [
        block.mlp.down_proj.register_forward_hook(of_writer),
        block.register_forward_hook(of_block, prepend=True),
    ]
    model(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    return found["read"], found["out"], found["after"]


@pytest.mark.parametrize("blocks", [[1, 2], [1, 4]])
def test_a_chain_after_a_jump_refits_later_matrices_to_the_original_stream(blocks, calibrations):
    """Before a second span, to the stream before it: what follows is the next map's."""
    calibration = calibrations(MODEL)
    h = [each.flatten(0, 1).double().numpy() for each in calibration.streams.h]
    tokens, own = calibration.streams.tokens, calibration.layout.blocks
    jump, chained = (without_blocks(calibration, blocks, cut) for cut in (Cut.jump, Cut.jump_chain))
    for place, index in enumerate(index for index in range(6) if index not in blocks):
        ours, theirs = (each.model.layers[place].mlp.down_proj for each in (chained, jump))
        if place == 0:
            assert torch.equal(ours.weight, theirs.weight)
            assert torch.equal(ours.jump.weight, theirs.jump.weight)
            continue
        read, out, after = read_and_streams(chained, place, tokens)
        towards = own[index].mlp.down_proj.weight.detach().double().numpy()
        weight = solved(read, h[index + 1] - (after - out), towards)
        assert_near(ours.weight.detach(), torch.from_numpy(weight).float(), 1e-4)
        assert not torch.equal(ours.weight, theirs.weight)


def test_the_folded_start_is_penalized_towards_the_map_times_the_matrix(calibrations):
    calibration = calibrations(MODEL)
    h = [each.flatten(0, 1).double().numpy() for each in calibration.streams.h]
    made = without_blocks(calibration, [3, 4], Cut.chain_from_jump)
    writer = calibration.layout.blocks[2].mlp.down_proj.weight.detach().double().numpy()
    read, out, after = read_and_streams(calibration.layout.model, 2, calibration.streams.tokens)
    towards = map_by_hand(Cut.jump, h[3], h[5]) @ writer
    weight = solved(read, h[5] - (after - out), towards)
    assert_near(made.model.layers[2].mlp.down_proj.weight.detach(), torch.from_numpy(weight).float(), 1e-4)


@pytest.mark.parametrize(
    ("cut", "method", "places"), [(Cut.jump, "refit", [0]), (Cut.jump_chain, "chain", None)]
)
def test_healing_trains_the_map_and_the_matrices_of_the_method(cut, method, places, calibrations):
    calibration = calibrations(MODEL)
    made = without_blocks(calibration, [1, 2], cut)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    calibration.heal(made, [1, 2], method, 300, progress=False)
    changed = {name for name, value in made.state_dict().items() if not torch.equal(value, before[name])}
    trained = range(4) if places is None else places
    expected = {f"model.layers.{place}.mlp.down_proj.weight" for place in trained}
    assert changed == {*expected, "model.layers.0.mlp.down_proj.jump.weight"}


def test_a_map_is_of_the_models_precision(calibrations):
    calibration = calibrations(MODEL)
    made = calibration.without([1], "out", progress=False).bfloat16()
    layout = replace(calibration.layout, model=made)
    insert_map(layout, layout.blocks[0], torch.eye(32).double())
    assert {weight.dtype for weight in made.parameters()} == {torch.bfloat16}


PROMPTS = torch.tensor([[7, 3, 31, 12, 9], [29, 30, 22, 8, 17], [4, 4, 5, 6, 11]])
N = 7


@torch.no_grad()
def next_logits(model: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
    return logits.double()


def written_by_hand(model: Any, noise: np.ndarray | None) -> list[list[int]]:
    texts = [prompt.tolist() for prompt in PROMPTS]
    for step in range(N):
        for i, ids in enumerate(texts):
            scores = next_logits(model, ids).numpy()
            ids.append(int((scores + (0 if noise is None else noise[step, i])).argmax()))
    return [ids[PROMPTS.shape[1] :] for ids in texts]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_continuations_are_those_of_one_pass_a_token(name, plain_model):
    model = plain_model(name)
    assert continue_prompts(model, PROMPTS, N).tolist() == written_by_hand(model, None)
    generator = torch.Generator().manual_seed(5)
    size = (len(PROMPTS), model.config.vocab_size)
    draws = np.stack([torch.rand(size, generator=generator, dtype=torch.float64).numpy() for _ in range(N)])
    sampled = continue_prompts(model, PROMPTS, N, seed=5)
    assert sampled.tolist() == written_by_hand(model, -np.log(-np.log(draws)))
    assert torch.equal(sampled, continue_prompts(model, PROMPTS, N, seed=5))
    assert not torch.equal(sampled, continue_prompts(model, PROMPTS, N, seed=6))


def test_losses_are_of_the_written_tokens_alone(plain_model):
    model = plain_model("llama")
    written = torch.tensor([[1, 2, 3, 40], [9, 9, 9, 9], [30, 2, 17, 8]])
    losses = continuation_losses(model, PROMPTS, written)
    for i, tokens in enumerate(written.tolist()):
        ids = PROMPTS[i].tolist()
        for j, token in enumerate(tokens):
            expected = -float(next_logits(model, ids).log_softmax(-1)[token])
            assert float(losses[i, j]) == pytest.approx(expected, rel=1e-4)
            ids.append(token)
    assert losses.shape == written.shape


END = 0


def test_measures_by_hand():
    written = torch.tensor([
        [5, 6, 5, 6, 5, 6, 5, 6],  # 4-grams: 5656, 6565, 5656, 6565, 5656
        [1, 2, 3, 4, 5, 6, 7, 8],
        [3, 3, END, 3, 3, 3, 3, 3],  # ends
        [END, 3, 3, 3, 3, 3, 3, 3],
        [2, 2, 2, 2, 2, 2, 2, END],
    ])  # fmt: skip
    losses = torch.arange(40).reshape(5, 8).double()
    found = {name: values.tolist() for name, values in measures(written, losses, {END}).items()}
    assert found == {
        "loss": [3.5, 11.5, 17.0, 24.0, 35.5],
        "distinct-1": [2 / 8, 1, 2 / 3, 1, 2 / 8],
        "distinct-2": [2 / 7, 1, 1, 1, 2 / 7],
        "distinct-3": [2 / 6, 1, 1, 1, 2 / 6],
        "repeated 4-grams": [3 / 5, 0, 0, 0, 1 - 2 / 5],
        "length": [8, 8, 3, 1, 8],
    }
    endless = measures(written, losses, {None})  # type: ignore[arg-type]
    assert endless["length"].tolist() == [8] * 5


def test_comparisons_are_paired():
    generator = np.random.default_rng(0)
    ours = torch.from_numpy(generator.normal(3, 1, 24))
    theirs = ours - 0.1 + 0.01 * torch.from_numpy(generator.normal(0, 1, 24))
    apart = (ours - theirs).numpy()
    half = 2.0687 * apart.std(ddof=1) / math.sqrt(24)  # Student's t of 23 degrees of freedom
    difference, ratio = compare("distinct-1", ours, theirs), compare("loss", ours, theirs)
    assert difference[:3] == pytest.approx((apart.mean(), apart.mean() - half, apart.mean() + half), rel=1e-3)
    assert ratio[:3] == pytest.approx(tuple(math.exp(each) for each in difference[:3]), rel=1e-3)
    assert compare("loss", ours).value == pytest.approx(math.exp(float(ours.mean())))
    assert compare("length", ours).value == pytest.approx(float(ours.mean()))
    assert ratio.n == difference.n == 24


def test_prompts_are_the_beginnings_of_windows(small_model):
    texts = [make_windows(small_model("llama"), running_text(50, seed), size=12) for seed in (1, 2)]
    prompts = beginnings(texts, 5)
    assert [len(text) for text in texts] == [5, 5]  # the last of two tokens, which is not read
    windows = [text.tokens[start : start + 5] for text in texts for start in (0, 12, 24, 36)]
    assert np.array_equal(prompts.numpy(), np.stack(windows))
    assert beginnings(texts, 32).shape[1] == 6
