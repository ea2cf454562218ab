"""What `load` and `wrap` give is the published model with its own tokenizer, or is refused."""

from __future__ import annotations

import ast
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub.constants
import pytest
import torch
import transformers
from conftest import WORDS, assert_near, load_plain, make_tokenizer, save_model
from safetensors.torch import load_file, save_file
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoTokenizer

import matlens
from matlens import InputError
from matlens.io.cache import default_cache
from matlens.models import ModelIdentity, registry, sizes, token_policy
from matlens.models.families import gguf
from matlens.models.places import locate
from matlens.models.registry import families
from matlens.models.sizes import read_sizes
from matlens.models.tokens import encode_text

# Bridges booted elsewhere

SHORT_TEXT = " ".join(WORDS[:6])


def test_a_bos_that_is_the_unknown_token_too_is_a_bos(tmp_path):
    """As in GPT-2's vocabulary, where one token is BOS, EOS and unknown."""
    folder = save_model("gpt2", tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "w49", "eos_token": "w49", "unk_token": "w49"})
    tokenizer.save_pretrained(folder)
    model, bridge = (
        matlens.load(str(folder), device="cpu"),
        TransformerBridge.boot_transformers(str(folder), device="cpu"),
    )
    plain = make_tokenizer()(SHORT_TEXT)["input_ids"]
    matlens.wrap(bridge, prepend_bos=True)
    assert encode_text(bridge, SHORT_TEXT).ids == [tokenizer.bos_token_id, *plain]
    matlens.wrap(bridge, prepend_bos=False)
    assert encode_text(bridge, SHORT_TEXT).ids == plain == bridge.to_tokens(SHORT_TEXT)[0].tolist()
    assert token_policy(bridge) == token_policy(model)


def test_a_bridge_takes_the_published_tokenizer(model_folder):
    """TransformerLens loads BERT's tokenizer so that it puts no [CLS] and [SEP] around a text."""
    folder = str(model_folder("bert"))
    model, bridge = (
        matlens.load(folder, device="cpu"),
        TransformerBridge.boot_transformers(folder, device="cpu"),
    )
    assert token_policy(bridge) != token_policy(model)
    with pytest.raises(InputError, match="which the tokenizer cannot do"):
        matlens.wrap(bridge, prepend_bos=True)
    published = AutoTokenizer.from_pretrained(folder)
    size = bridge.cfg.d_vocab
    matlens.wrap(bridge, tokenizer=published)
    assert ModelIdentity.from_model(bridge).key == ModelIdentity.from_model(model).key
    assert token_policy(bridge).words == "'[CLS]' in front and '[SEP]' at the end"
    ids = published(SHORT_TEXT)["input_ids"]
    assert bridge.to_tokens(SHORT_TEXT)[0].tolist() == ids == encode_text(bridge, SHORT_TEXT).ids
    assert bridge.cfg.d_vocab == size


def test_what_cannot_be_wrapped_is_refused(model_folder):
    folder = str(model_folder("gpt2"))
    bridge = TransformerBridge.boot_transformers(folder, device="cpu")
    before = token_policy(bridge)
    attempts: list[tuple[dict[str, Any], str]] = [
        ({"prepend_bos": True, "tokenizer": make_tokenizer()}, "either tokenizer"),
        ({"prepend_bos": True}, "which the tokenizer cannot do: its BOS is"),  # it has none of its own
    ]
    for options, told in attempts:
        with pytest.raises(InputError, match=told):
            matlens.wrap(bridge, **options)
    assert token_policy(bridge) == before
    with torch.no_grad():
        next(bridge.original_model.parameters())[0, 0] = float("nan")
    with pytest.raises(InputError, match="are not finite, including"):
        matlens.wrap(bridge)
    bridge.enable_compatibility_mode(disable_warnings=True, no_processing=True)
    with pytest.raises(InputError, match="compatibility mode"):
        matlens.wrap(bridge)


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def _drop_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_checkpoint_without_its_head_is_refused(model_folder, tmp_path):
    """An encoder saved alone would get a head of random numbers."""
    load_plain("bert", model_folder("bert")).bert.save_pretrained(tmp_path)
    make_tokenizer(bert=True).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"cls\.predictions.*Expected a complete checkpoint"):
        matlens.load(str(tmp_path), device="cpu")


def _with_config(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def _with_weight(value: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.1.mlp.down_proj.weight"][3, 4] = value
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


CAUSES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (_truncate, "could not be loaded"),
    "incomplete": (_drop_a_tensor, r"lack 1 tensors, including model\.layers\.1\.mlp\.down_proj"),
    "NaN": (_with_weight(float("nan")), r"not finite, including model\.layers\.1\.mlp\.down_proj"),
    "fewer layers": (_with_config(num_hidden_layers=2), r"hold 9 tensors of blocks that its configuration"),
    "more layers": (_with_config(num_hidden_layers=4), r"lack 9 tensors, including model\.layers\.3\."),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUSES)
def test_a_damaged_folder_is_refused_for_its_true_cause(case, model_folder, tmp_path, no_network):
    damage, cause = CAUSES[case]
    shutil.copytree(model_folder("llama"), tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(InputError, match=cause) as caught:
        matlens.load(str(tmp_path / "model"), device="cpu")
    assert len(str(caught.value)) < 2000
    assert no_network == []


@pytest.fixture
def source(tmp_path, model_folder, monkeypatch):
    """A file that stands for a model, with the precisions in which it was read."""
    monkeypatch.setenv("MATLENS_CACHE", str(tmp_path / "cache"))
    path, folder, dtypes = tmp_path / "model.gguf", model_folder("llama"), list[torch.dtype]()
    path.write_bytes(b"a model")

    def read(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
        dtypes.append(dtype)
        return transformers.AutoTokenizer.from_pretrained(folder), load_plain("llama", folder, dtype=dtype)

    monkeypatch.setattr(gguf, "_dequantize", read)
    return SimpleNamespace(path=path, read=read, dtypes=dtypes)


def assert_same(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> None:
    (tokens, model), (plain_tokens, plain) = ours, theirs
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert tokens.get_vocab() == plain_tokens.get_vocab()


def test_the_second_time_the_cache_is_read_unless_it_is_damaged(source, capsys):
    plain, cache = source.read(source.path, torch.bfloat16), default_cache()
    source.dtypes.clear()
    for _ in range(2):
        assert_same(gguf.read_gguf(source.path, torch.bfloat16), plain)
        assert source.dtypes == [torch.float32]
    assert cache is not None
    (entry,) = cache.entries()
    weights = entry.folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.unlink()  # a model that is loaded still reads the old file
    weights.write_bytes(content)
    for _ in range(2):
        assert_same(gguf.read_gguf(source.path, torch.bfloat16), plain)
        assert len(source.dtypes) == 2
    assert "damaged and recomputed" in capsys.readouterr().err


def test_what_does_not_come_back_as_it_was_is_not_stored(source, monkeypatch, capsys):
    load, plain, cache = gguf._load, source.read(source.path, torch.float32), default_cache()

    def rounded(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
        tokenizer, model = load(folder, dtype)
        next(model.parameters()).data[0, 0] += 1
        return tokenizer, model

    monkeypatch.setattr(gguf, "_load", rounded)
    for _ in range(2):
        assert_same(gguf.read_gguf(source.path, torch.float32), plain)
        assert "what is read back is not what was written" in capsys.readouterr().err
    assert cache is not None
    assert cache.entries() == []


def test_an_unknown_hub_name_without_network_is_refused_after_one_question(
    no_network, empty_cache, monkeypatch
):
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(InputError, match=r"hub cannot be reached.*Expected a hub name"):
        matlens.load("someone/no-such-model")
    assert len(no_network) <= 2
    assert sum(slept) < 5


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000, "~no-such-user/m", "a/b/c", "/not/there"])
def test_what_is_no_name_is_refused(name, no_network):
    with pytest.raises(InputError, match=r"^name must be|no model"):
        locate(name, None)
    assert no_network == []


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(("offline", "revision"), [(True, None), (False, COMMIT)])
def test_a_cached_hub_model_is_loaded_without_network(
    revision, offline, model_folder, plain_model, no_network, empty_cache, monkeypatch
):
    repository = empty_cache / "models--someone--small"
    shutil.copytree(model_folder("gpt2"), repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    model = matlens.load("someone/small", device="cpu", revision=revision)
    assert len(no_network) <= (0 if offline else 2)
    assert (model.cfg.model_name, model.matlens_revision) == ("someone/small", COMMIT)
    tokens = torch.arange(5, 25)[None]
    with torch.inference_mode():
        assert_near(model(tokens, return_type="logits"), plain_model("gpt2")(tokens).logits)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2-moe"])
def test_sizes_are_those_of_the_model_and_read_once(kind, model_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("MATLENS_CACHE", str(tmp_path / "cache"))
    read = Mock(wraps=sizes.read_configuration)
    monkeypatch.setattr(sizes, "read_configuration", read)
    plain, folder = load_plain(kind, model_folder(kind)), tmp_path / "model"
    shutil.copytree(model_folder(kind), folder)
    first = read_sizes(str(folder))
    assert first["n_parameters"] == sum(weight.numel() for weight in plain.parameters())
    assert (first["n_layers"], first["d_model"]) == (plain.config.num_hidden_layers, plain.config.hidden_size)
    d_mlp = {"llama": 48, "gpt2": 0, "qwen2-moe": 88}[kind]  # GPT-2 does not say it
    assert (first["d_vocab"], first["d_mlp"]) == (plain.config.vocab_size, d_mlp)
    assert read_sizes(str(folder)) == first
    assert read.call_count == 1
    assert read_sizes(str(folder), trust_remote_code=True) == first  # code that is not here may say otherwise
    assert read.call_count == 2
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 77}))
    assert read_sizes(str(folder))["d_vocab"] == 77


PACKAGE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from matlens.models import Family, register

@register
class Tiny(Family):
    def read_file(self, path, dtype):
        if path.suffix != ".tiny":
            return None
        folder = path.read_text()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return AutoTokenizer.from_pretrained(folder), model
"""


@pytest.fixture
def forgotten(monkeypatch):
    """What a test registers is gone after it."""
    families()
    monkeypatch.setattr(registry, "_REGISTERED", list(registry._REGISTERED))
    yield
    registry._find.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_an_installed_package_adds_an_architecture(model_folder, plain_model, tmp_path, monkeypatch):
    (tmp_path / "tiny_models.py").write_text(PACKAGE)
    about = tmp_path / "tiny_models-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-models\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[matlens.families]\ntiny = tiny_models\n")
    (tmp_path / "a.tiny").write_text(str(model_folder("llama")))
    with pytest.raises(InputError, match="unknown file format"):
        matlens.load(tmp_path / "a.tiny", device="cpu")
    monkeypatch.syspath_prepend(tmp_path)
    registry._find.cache_clear()
    model = matlens.load(tmp_path / "a.tiny", device="cpu")
    tokens = torch.arange(1, 9)[None]
    with torch.inference_mode():
        assert_near(model(tokens), plain_model("llama")(tokens).logits)


def test_the_core_imports_no_architecture():
    """An architecture is a new file in ``families``, and no other module of the package changes."""
    for path in Path(registry.__file__).parent.glob("*.py"):
        imported = {
            node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
        }
        assert not [name for name in imported if name and "families" in name], path.name
