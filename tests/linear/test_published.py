"""Maps as the authors publish them become maps, value for value, and no pickle is executed."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import D_MODEL, N_LAYERS
from torch import Tensor

from matlens import InputError, MapSet
from matlens.linear.published import convert_published, read_tensors

Models = Callable[[str], Any]
VALUES = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 3)))


def published(folder: Path) -> tuple[dict[tuple[str, str], Tensor], Tensor]:
    """A folder as the authors' code writes it: coefficients, and of one map the intercept."""
    generator = torch.Generator().manual_seed(0)
    maps = {}

    def write(name: str, *sites: str) -> None:
        weight = torch.randn(D_MODEL, D_MODEL, generator=generator, dtype=torch.float64)
        (folder / name).write_bytes(pickle.dumps(weight))
        if sites:
            maps[sites[0], sites[1]] = weight

    folder.mkdir()
    for a in range(N_LAYERS):
        for b in range(a + 1, N_LAYERS + 1):
            write(f"{a}_{b}.pickle", f"h.{a}", f"h.{b}")
        for ends, name in {(0, 1): "ln1", (1, 2): "attn", (3, 4): "ln2", (4, 5): "ffn"}.items():
            write(f"p{a}_{ends[0]}_{ends[1]}.pickle", f"{name}_in.{a}", f"{name}_out.{a}")
        write(f"p{a}_2_3.pickle")
    (folder / "README.md").write_text("Not a map.")
    bias = torch.randn(D_MODEL, generator=generator, dtype=torch.float64)
    (folder / "0_2.pickle").write_bytes(pickle.dumps([maps["h.0", "h.2"], bias]))
    return maps, bias


def test_published_maps_become_maps(small_model, tmp_path):
    model, (expected, bias) = small_model("gpt2"), published(tmp_path / "wikipedia")
    maps = convert_published(tmp_path / "wikipedia", model, tmp_path / "maps")
    assert set(maps) == set(expected)
    for pair, weight in expected.items():
        assert torch.equal(maps[pair].weight, weight.float())
        assert (maps[pair].bias is None) == (pair != ("h.0", "h.2"))
    assert torch.equal(maps[0, 2].bias, bias.float())
    again = MapSet.load(tmp_path / "maps")
    assert again.provenance.corpus == "wikipedia"
    assert again.provenance.identity.n_layers == N_LAYERS
    h = torch.randn(2, D_MODEL)
    assert torch.allclose(again[0, -1](h), h @ expected["h.0", f"h.{N_LAYERS}"].float().T, atol=1e-5)


SQUARE = torch.zeros(D_MODEL, D_MODEL)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("0_4.pickle", SQUARE), ("p3_1_2.pickle", SQUARE), ("p0_0_3.pickle", SQUARE), ("map.pickle", SQUARE),
        ("0_1.pickle", torch.zeros(D_MODEL, 8)), ("0_1.pickle", torch.zeros(600, 600)),
        ("0_1.pickle", [SQUARE, SQUARE]), ("0_1.pickle", torch.zeros(1).expand(300_000, 300_000)),
        ("0_1.pickle", os.system),
    ],
)  # fmt: skip
def test_what_are_no_maps_of_the_model_is_refused(name, value, small_model, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(pickle.dumps(value))
    with pytest.raises(InputError, match=str(tmp_path / "in")):
        convert_published(tmp_path / "in", small_model("gpt2"), tmp_path / "maps")


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_tensors_come_out_as_they_went_in(protocol):
    single = VALUES.float()
    tensors = [single, VALUES, single.half(), single.T, single[1:, 1:], single[2]]
    for content, expected in [*((tensor, [tensor]) for tensor in tensors), (tensors, tensors)]:
        for found, tensor in zip(read_tensors(pickle.dumps(content, protocol), "a"), expected, strict=True):
            assert torch.equal(found, tensor)
            assert found.dtype == tensor.dtype


class Runs:
    """An object that calls something when it is loaded."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call, self.arguments


def harmful(path: Path) -> list[bytes]:
    """Pickles that leave a file when they are loaded, in some of the ways that there are."""
    command = f"touch {path}"
    tensor = torch.zeros(2)
    inner = pickle.dumps(Runs(os.system, command))
    return [
        *(pickle.dumps(Runs(os.system, command), protocol) for protocol in range(6)),
        pickle.dumps([tensor, Runs(os.system, command)]),
        pickle.dumps(Runs(eval, f"__import__('pathlib').Path({str(path)!r}).touch()")),
        pickle.dumps({"coef_": VALUES, "intercept_": Runs(os.system, command)}),
        f"(S'{command}'\nios\nsystem\n.".encode(),
        f"(cos\nsystem\nS'{command}'\no.".encode(),
        pickle.dumps(Runs(torch.storage._load_from_bytes, inner)),
        pickle.dumps(tensor)[:-1] + pickle.dumps(Runs(os.system, command)),
    ]


def test_nothing_is_executed(tmp_path):
    path = tmp_path / "touched"
    for content in harmful(path):
        with pytest.raises(InputError, match=r"^a must be a pickle of tensors"):
            read_tensors(content, "a")
        assert not path.exists()
    for content in harmful(path)[:11]:  # loaded by pickle they do harm
        with contextlib.suppress(Exception):
            pickle.loads(content)
        assert path.exists()
        path.unlink()


def bombs() -> list[bytes]:
    """Forty tuples, each of two of the one before, to be hashed; and a place in the memo that takes 32 GB."""
    nested = b"(" + b"t" + b"".join(b"\x94" + b"h" + bytes([i]) + b"\x86" for i in range(40))
    return [
        b"\x80\x04}" + nested + b"Ns.",
        b"\x80\x04ccollections\nOrderedDict\n(" + nested + b"N\x86l\x85R.",
        b"\x80\x04ccollections\nOrderedDict\n(" + nested + b"N\x86t\x85R.",
        b"\x80\x04Nr\xff\xff\xff\xff.",
    ]


def test_other_contents_are_refused():
    values = [Path("a"), {1, 2}, {"a": VALUES}, VALUES.numpy(), torch.arange(3), "text", [], [[VALUES]], None]
    tensor = pickle.dumps(torch.zeros(2, 3, dtype=torch.float64))
    larger = tensor.replace(b"K\x02K\x03\x86", b"K\x08K\x08\x86")  # than its storage
    for content in [*map(pickle.dumps, values), *bombs(), larger]:
        with pytest.raises(InputError, match=r"^a must be a pickle of tensors"):
            read_tensors(content, "a")
