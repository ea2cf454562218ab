"""Tensors are found in files by their numbers, and what is not what was written down is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import matlens
from matlens.ffn.weights import NotInFiles, WeightFiles, build_modules, module_record, named_tensors

FIRST, SECOND = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4) + 1


@pytest.fixture
def files(tmp_path: Path) -> WeightFiles:
    save_file({"block.down.weight": FIRST, "other": SECOND}, tmp_path / "one.safetensors")
    save_file({"half": FIRST.bfloat16(), "number": torch.tensor(2.0)}, tmp_path / "two.safetensors")
    return WeightFiles(tmp_path)


def test_a_tensor_is_found_by_its_numbers_whatever_it_is_called(files: WeightFiles) -> None:
    assert files.find("model.block.down.weight", FIRST)["name"] == "block.down.weight"
    assert files.find("block.down.weight", SECOND)["name"] == "other"
    assert files.find("x", FIRST.bfloat16())["name"] in ("block.down.weight", "half")
    assert files.find("x", torch.tensor(2.0))["name"] == "number"
    for absent in (FIRST + 2, FIRST[:2], FIRST.T):
        with pytest.raises(NotInFiles):
            files.find("block.down.weight", absent)


def test_a_tensor_is_read_by_its_record_or_refused(files: WeightFiles, tmp_path: Path) -> None:
    record = files.find("other", SECOND)
    assert torch.equal(files.take(record, torch.float32), SECOND)
    assert files.take(record, torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(NotInFiles, match="absent is not there"):
        files.take({**record, "name": "absent"}, torch.float32)
    with pytest.raises(NotInFiles, match="other does not hold what was written down"):
        files.take({**record, "sha256": "0" * 64}, torch.float32)


def test_modules_are_built_from_the_files_as_the_model_has_them(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("gpt2")
    files, model = WeightFiles(folder), matlens.load(folder, device="cpu")
    norm: Any = model.ln_final.original_component
    record = module_record(files, model, norm)
    (built,) = build_modules("GPT2LMHeadModel", files, [record], torch.float32)
    x = torch.randn(5, model.cfg.d_model, generator=torch.Generator().manual_seed(0))
    assert torch.equal(built(x), norm(x))
    assert repr(built) == repr(norm)
    built.eps = 2 * norm.eps  # type: ignore[assignment]
    assert repr(built) != repr(norm)
    with pytest.raises(NotInFiles, match="NoSuchModel"):
        build_modules("NoSuchModel", files, [record], torch.float32)
    with pytest.raises(NotInFiles):
        module_record(files, model, torch.nn.LayerNorm(3))  # stands nowhere
    names = named_tensors(model)
    assert names[id(norm.weight)] == "transformer.ln_f.weight"
    assert len(names) == len(list(model.original_model.parameters()))
