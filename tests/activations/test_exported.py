"""Vectors of another engine: read as rows, when they are what they are said to be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import load_plain
from safetensors.torch import save_file

import matlens
from matlens.activations import read_exported
from matlens.errors import InputError
from matlens.linear.mapsets import MapSet

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16, 17], [18]]
ENTRIES = [1, 3, 0, None]  # in any order; the last is past the final norm


@pytest.fixture(scope="module")
def model(model_folder):
    return matlens.load(str(model_folder("llama")), device="cpu")


@pytest.fixture(scope="module")
def hidden(model_folder):
    """Layers of each prompt as Hugging Face gives them, and what enters the final norm."""
    plain = load_plain("llama", model_folder("llama"))
    made = []
    with torch.inference_mode():
        for tokens in PROMPTS:
            last: list[torch.Tensor] = []
            handle = plain.model.norm.register_forward_pre_hook(
                lambda _, args, last=last: last.append(args[0])
            )
            states = plain(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            handle.remove()
            made.append((states[1][0], last[0][0], states[0][0], states[3][0]))
    return made


def by_the_model(model: Any, tokens: list[int], layers: list[int]) -> dict[str, torch.Tensor]:
    """A prompt's file as an engine without fault would write it."""
    example = matlens.make_token_examples(model, [tokens], attention_mask=[[1] * len(tokens)])
    vectors = matlens.collect(model, example, [*set(layers)], positions="all", progress=False)
    states = torch.stack([vectors[layer] for layer in layers], 1).to(model.cfg.dtype)
    return {"token_ids": torch.tensor(tokens), "hidden_states": states}


Write = Callable[..., Path]


@pytest.fixture
def written(hidden, tmp_path):
    """Write the folder of an engine; ``change`` alters the tensors of the second prompt."""

    def write(change: Callable[[dict[str, torch.Tensor]], Any] | None = None) -> Path:
        folder = tmp_path / "engine"
        folder.mkdir()
        for number, (tokens, states) in enumerate(zip(PROMPTS, hidden, strict=True)):
            tensors = {"token_ids": torch.tensor(tokens), "hidden_states": torch.stack(states, 1).clone()}
            if number == 1 and change is not None:
                change(tensors)
            save_file(tensors, folder / f"cmpl-{number}.safetensors")
            (folder / f"cmpl-{number}.safetensors.lock").touch()
        return folder

    return write


@pytest.mark.parametrize("positions", ["all", "sampled"])
@pytest.mark.parametrize("kept", [True, False])
def test_rows_are_those_that_collect_gives(positions, kept, model, written, tmp_path):
    folder = tmp_path / "rows" if kept else None
    rows = read_exported(model, written(), ENTRIES, positions=positions, folder=folder, progress=False)
    assert list(rows) == ["h.1", "h.3", "h.0"]
    examples = matlens.make_token_examples(model, PROMPTS)
    ours = matlens.collect(model, examples, [0, 1, 3], positions=positions, progress=False)
    for site in rows:
        torch.testing.assert_close(rows[site], ours[site], rtol=1e-4, atol=1e-5)
    maps = MapSet.fit(rows, pairs=[(0, 3)], ridge=0.1, progress=False)
    maps.provenance.check_same(ours.provenance, ours="the maps")
    assert rows.provenance.data is not None
    assert rows.provenance.data["engine"] == "another"


@pytest.mark.parametrize(
    "entries",
    [
        [1, None, 0, 3], [2, 3, 0, None], [1, 3, 0], [1, 1, 0, None], ["ffn_post.1", 3, 0, None],
    ],
)  # fmt: skip
def test_entries_must_be_the_sites_that_they_are_said_to_be(entries, model, written):
    with pytest.raises(InputError, match=r"differs from the model's|entries"):
        read_exported(model, written(), entries, progress=False)


def _changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def apply(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = change(tensors[name].clone()).contiguous()

    return apply


def _set(value: float, *place: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda vectors: vectors.index_put(tuple(torch.tensor(at) for at in place), torch.tensor(value))


VECTORS, TOKENS = "hidden_states", "token_ids"
# As if the tokens of the file were not those that were run, and as if the first vector were missing.
_of_another_prompt = _changed(TOKENS, lambda tokens: tokens + 1)
_without_the_first = _changed(VECTORS, lambda vectors: vectors.roll(1, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_changed(VECTORS, _set(float("nan"), 2, 1, 4)), r"non-zero vectors at h\.3"),
        (_changed(VECTORS, _set(0.0, [0], [0])), r"non-zero vectors at h\.1"),  # from a cache
        (_changed(VECTORS, lambda vectors: vectors[:2]), r"= \[3, 4, 32\], got \[2, 4, 32\]"),
        (_changed(VECTORS, lambda vectors: vectors.bfloat16()), "float32, got BF16"),
        (_changed(TOKENS, lambda tokens: tokens.float()), "must be integers"),
        (lambda tensors: tensors.pop(VECTORS), "must have the tensors"),
        (
            _changed(VECTORS, lambda vectors: vectors * torch.tensor([1, 1, 1.2])[:, None, None]),
            r"entry \d.* at 1 of 3 tokens, .* number 2 by 0\.2 of",
        ),
    ],
)
def test_what_is_damaged_or_of_another_model_is_refused(change, message, model, written):
    with pytest.raises(InputError, match=message):
        read_exported(model, written(change), ENTRIES, progress=False)


@pytest.mark.parametrize("change", [_of_another_prompt, _without_the_first])
def test_embeddings_are_compared_in_all_prompts(change, model, written):
    """The second prompt is not among those that the model is run on; batches of prompts end before it."""
    folder = written(change)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matlens.activations.exported._TOGETHER", 1)
        for name in ("a", "b"):  # two shorter ones
            save_file(by_the_model(model, [5, 6], [1, 3, 0, 0]), folder / f"{name}.safetensors")
        with pytest.raises(InputError, match=r"cmpl-1.safetensors: entry 2, h.0, differs"):
            read_exported(model, folder, ENTRIES, progress=False)


def test_in_half_precision_one_vector_may_be_another(model_folder, tmp_path):
    """What is an attention sink here may be none there; a tenth of a prompt, or one vector of a short one."""
    half = matlens.load(str(model_folder("llama")), device="cpu", dtype=torch.bfloat16)
    tensors = by_the_model(half, PROMPTS[2], [1, 3])
    for n_others in (1, 2):
        tensors["hidden_states"][n_others, 0] *= 1.5
        save_file(tensors, tmp_path / "a.safetensors")
        if n_others == 1:
            assert read_exported(half, tmp_path, [1, 3], progress=False).n_rows == 6
    with pytest.raises(InputError, match=r"h.1, differs from the model's at 2 of 6 tokens"):
        read_exported(half, tmp_path, [1, 3], progress=False)


def test_rows_of_rewritten_files_are_not_those_of_before(model, written, tmp_path):
    folder, options = written(), {"folder": tmp_path / "rows", "progress": False}
    before = read_exported(model, folder, ENTRIES, **options)
    moved = shutil.copytree(folder, tmp_path / "moved")  # with the times of the files
    assert torch.equal(read_exported(model, moved, ENTRIES, **options)[1], before[1])
    path = folder / "cmpl-2.safetensors"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"belongs to another job \(files"):
        read_exported(model, folder, ENTRIES, **options)


def test_layers_that_hardly_differ_are_told_apart(model_folder, tmp_path):
    """A block of a real model changes the stream by less than half precision may differ."""
    model = matlens.load(str(model_folder("llama-deep")), device="cpu", dtype=torch.bfloat16)
    with torch.no_grad():
        model.original_model.get_input_embeddings().weight.mul_(8)
    for number, tokens in enumerate(PROMPTS):
        save_file(by_the_model(model, tokens, [2, 3]), tmp_path / f"{number}.safetensors")
    assert list(read_exported(model, tmp_path, [2, 3], progress=False)) == ["h.2", "h.3"]
    for wrong in ([3, 2], [1, 4]):
        with pytest.raises(InputError, match="entries must be the sites"):
            read_exported(model, tmp_path, wrong, progress=False)
