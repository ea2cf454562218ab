"""What is written down of a model reads back as the model; what is not in its files is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import matlens
from matlens.ffn.known import Known, describe, describe_or_say_why
from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueVectors
from matlens.ffn.weights import NotInFiles, WeightFiles
from matlens.models.identity import ModelIdentity


def test_parts_read_back_as_the_models_own(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = model_folder("bert")
    files, model = WeightFiles(folder), matlens.load(folder, device="cpu")
    describe(tmp_path, files, model)
    known, values = Known(tmp_path, files, torch.float32, torch.device("cpu")), ValueVectors(model)
    assert known.reason is None
    assert known.identity == ModelIdentity.from_model(model).of_weights
    read = known.values(known.identity, known.matrix)
    assert (read.n_layers, read.d_mlp, read.d_model) == (values.n_layers, values.d_mlp, values.d_model)
    for layer in range(values.n_layers):
        assert torch.equal(read.matrix(layer), values.matrix(layer))
    projection, expected = known.projection(known.identity, "head"), Projection.through_head(model)
    assert projection is not None
    vectors = values.layer(0)
    assert torch.equal(projection.scores(vectors), expected.scores(vectors))
    text = "w1 w2 w3"
    assert projection.tokenizer(text)["input_ids"] == model.tokenizer(text)["input_ids"]
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(NotInFiles, match=r"tokenizer.json is not there"):
        known.projection(known.identity, "plain")


def test_why_a_model_cannot_be_read_in_its_files_is_written_down(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """The value vectors of a mixture of experts are in several tensors a layer."""
    folder = model_folder("olmoe")
    files, model = WeightFiles(folder), matlens.load(folder, device="cpu")
    with pytest.raises(NotInFiles, match="one matrix of value vectors a layer"):
        describe(tmp_path, files, model)
    describe_or_say_why(tmp_path, files, model)
    assert (
        Known(tmp_path, files, torch.float32, torch.device("cpu")).reason
        == "one matrix of value vectors a layer"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.json"]
