"""Checkpoints that fairseq would have written are read to equal logits, and others refused in words."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fairseq_by_hand import EMBEDDINGS, N_WORDS, SOFTMAX, run, save, settings, weights
from torch import Tensor
from training import write_wikilm

from matlens import InputError
from matlens.models.families.wikilm.checkpoint import read_wikilm

TOKENS = [2, 5, 40, 17, 55, 6, 31]
HEAD = f"{SOFTMAX}.head.word_proj.weight"
OLD = {"no_tie_adaptive_proj": False, "no_decoder_final_norm": True}
VARIANTS = {
    "as published": settings(),
    "own projections": settings(tie_adaptive_proj=False),
    "own output": settings(tie_adaptive_weights=False, tie_adaptive_proj=False),
    "final norm": settings(no_decoder_final_norm=False),
    "old": settings(**OLD),
}


def logits_of(path: Path) -> Tensor:
    model, dictionary = read_wikilm(path)
    assert len(dictionary) == model.config.vocab_size == N_WORDS
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_checkpoint_is_read_to_equal_logits_and_written_as_fairseq_would(name: str, tmp_path: Path) -> None:
    """The file that is written is loaded by torch alone, and run by hand."""
    args = VARIANTS[name]
    model, dictionary = read_wikilm(save(tmp_path / "theirs", args))
    expected = run(args, weights(args), TOKENS)["logits"]
    with torch.no_grad():
        torch.testing.assert_close(model(torch.tensor([TOKENS])).logits[0], expected, atol=1e-5, rtol=0)
    path = write_wikilm(model, dictionary, tmp_path / "ours")
    written = torch.load(path, weights_only=False)
    assert isinstance(written["args"], Namespace)
    assert written["args"].arch == "transformer_lm_wiki103"
    torch.testing.assert_close(run(written["args"], written["model"], TOKENS)["logits"], expected)
    torch.testing.assert_close(logits_of(path), expected, atol=1e-5, rtol=0)
    assert (path.parent / "dict.txt").read_text() == (tmp_path / "theirs" / "dict.txt").read_text()


def test_old_names_are_read(tmp_path: Path) -> None:
    args = settings()
    tensors = weights(args)
    expected = run(args, tensors, TOKENS)["logits"]
    for layer in range(args.decoder_layers):
        place = f"decoder.layers.{layer}"
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"{place}.self_attn.{letter}_proj.{kind}") for letter in "qkv"]
            tensors[f"{place}.self_attn.in_proj_{kind}"] = torch.cat(parts)
            for number, norm in enumerate(("self_attn_layer_norm", "final_layer_norm")):
                tensors[f"{place}.layer_norms.{number}.{kind}"] = tensors.pop(f"{place}.{norm}.{kind}")
    # The fused matrix and the first norms are older than the second norm's present number.
    for layer in range(args.decoder_layers):
        for kind in ("weight", "bias"):
            old = tensors.pop(f"decoder.layers.{layer}.layer_norms.1.{kind}")
            tensors[f"decoder.layers.{layer}.layer_norms.2.{kind}"] = old
    path = save(tmp_path, args, tensors)
    torch.testing.assert_close(logits_of(path), expected, atol=1e-5, rtol=0)


def test_half_precision_is_read_in_full(tmp_path: Path) -> None:
    args = settings()
    halved = {name: tensor.half() for name, tensor in weights(args).items()}
    full = {name: tensor.float() for name, tensor in halved.items()}
    path = save(tmp_path, args, halved)
    torch.testing.assert_close(logits_of(path), run(args, full, TOKENS)["logits"], atol=1e-5, rtol=0)


# Nothing in a checkpoint is run


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", ["args", "extra_state", "model"])
@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_checkpoint_is_refused_and_not_run(where: str, zipped: bool, tmp_path: Path) -> None:
    path = save(tmp_path)
    content = torch.load(path, weights_only=False) | {where: Harm(tmp_path / "done")}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InputError, match=r"mkdir, which may be code"):
        read_wikilm(path)
    assert not (tmp_path / "done").exists()


def test_meters_of_a_training_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of fairseq's own classes, which are not there when the checkpoint is read."""
    module, package = ModuleType("fairseq.meters"), ModuleType("fairseq")
    meter = type("AverageMeter", (), {"__module__": "fairseq.meters"})
    module.AverageMeter = meter  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "fairseq", package)
        patch.setitem(sys.modules, "fairseq.meters", module)
        average = meter()
        average.sum = 3.0  # type: ignore[attr-defined]
        path = save(tmp_path, extra_state={"train_meters": {"loss": average}})
    expected = run(settings(), weights(settings()), TOKENS)["logits"]
    torch.testing.assert_close(logits_of(path), expected, atol=1e-5, rtol=0)


# What is no WikiLM


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in weights(settings()).items() if key != name}


@pytest.mark.parametrize(
    ("args", "tensors", "said"),
    [
        (settings(arch="transformer_iwslt_de_en"), None, "transformer_iwslt_de_en"),
        (settings(adaptive_input=False), None, "no adaptive input"),
        (settings(adaptive_softmax_cutoff="14,31"), None, "bands"),
        (settings(decoder_learned_pos=True), None, "decoder_learned_pos"),
        (settings(activation_fn="__import__('os')"), None, "hidden_act"),
        (settings(decoder_layers=10**9), weights(settings()), "1000000000 blocks"),
        (settings(decoder_embed_dim=20), weights(settings()), "do not fit"),
        (settings(), without(f"{EMBEDDINGS}.1.1.weight"), "lacks"),
        (settings(), without(f"{SOFTMAX}.version"), "first kind"),
        (settings(), weights(settings()) | {"encoder.x": torch.zeros(1)}, "encoder.x"),
        (settings(), weights(settings()) | {HEAD: torch.ones(14, 16)}, "differ"),
        (settings(), {"decoder.x": "text"}, "no weights"),
        ("args", weights(settings()), "no settings"),
    ],
)  # fmt: skip
def test_other_models_are_refused(args: Any, tensors: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        read_wikilm(save(tmp_path, args, tensors))


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _list(path: Path) -> None:
    torch.save([1, 2], path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_half, "truncated"),
        (lambda path: path.write_text("no pickle"), "truncated"),
        (_list, "holds a list"),
        (lambda path: (path.unlink(), path.mkdir()), "must be a file"),
        (lambda path: (path.parent / "dict.txt").write_text("a 1\n"), "5 words"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused(damage: Callable[[Path], Any], said: str, tmp_path: Path) -> None:
    path = save(tmp_path)
    damage(path)
    with pytest.raises(InputError, match=said):
        read_wikilm(path)
