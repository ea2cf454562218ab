"""Cases of what other programs hand over: lenses, exported vectors, and requests to the server."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

import matlens
from attack.cases import Case, Refused, Unnamed
from attack.targets_lenses import jacobian_file, tuned_folder
from attack.targets_parts import exported
from attack.world import World
from matlens import activations, explorer

LENSES, VECTORS, REQUESTS = "lenses of others", "vectors of other engines", "requests to the server"
_TOKEN, _PORT = "a-secret", 8765
Change = Callable[[dict[str, Any]], Any]


def engine_cases(world: World) -> Iterator[Case]:
    """All cases of this file."""
    yield from _lenses(world)
    yield from _vectors(world)
    yield from _requests(world)


# Files that torch.save has written


class _Harm:
    """What a pickle can ask for, and nobody may run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _lenses(world: World) -> Iterator[Case]:
    harm = world.root / "harm"
    changes: dict[str, Change] = {
        "no matrices": lambda content: content.pop("J"),
        "no width": lambda content: content.pop("d_model"),
        "another width": lambda content: content.update(d_model=64),
        "matrices that are a list": lambda content: content.update(J=[*content["J"].values()]),
        "a layer past the last": lambda content: content["J"].update({99: torch.eye(32)}),
        "a layer that is a word": lambda content: content["J"].update({"first": torch.eye(32)}),
        "a negative layer": lambda content: content["J"].update({-7: torch.eye(32)}),
        "a narrow matrix": lambda content: content["J"].update({0: torch.eye(31)}),
        "a matrix of words": lambda content: content["J"].update({0: "words"}),
        "a number that is none": lambda content: content["J"][0].fill_(torch.nan),
        "a count that is a word": lambda content: content.update(n_prompts="many"),
        "metadata that are a list": lambda content: content.update(metadata=[1]),
        "a provenance of words": lambda content: content["metadata"].update(matlens="words"),
        "a provenance without a model": lambda content: content["metadata"]["matlens"].update(provenance={}),
        "what would be run": lambda content: content.update(extra=_Harm(harm)),
        "of another model": lambda content: None,
    }

    def read(change: Change, *, other: bool = False) -> Any:
        content = torch.load(jacobian_file(world), weights_only=True)
        change(content)
        path = world.fresh("lens.pt")
        torch.save(content, path)
        lens = matlens.Lens.from_jacobian_lens(path, world.load("weights") if other else world.model)
        return "run" if harm.exists() else lens

    for name, change in changes.items():
        yield Case(LENSES, f"from_jacobian_lens({name})", partial(read, change, other="of another" in name))
    for name, spoil in _SPOILT.items():
        yield Case(LENSES, f"from_jacobian_lens({name})", partial(_spoilt_lens, world, spoil))
    tuned: dict[str, Change] = {
        "a layer too few": lambda state: state.pop("0.weight"),
        "a layer too many": lambda state: state.update({"9.weight": torch.eye(32)}),
        "a narrow matrix": lambda state: state.update({"0.weight": torch.eye(31)}),
        "a number that is none": lambda state: state["0.weight"].fill_(torch.nan),
        "words": lambda state: state.update({"0.weight": "words"}),
    }
    for name, change in tuned.items():
        yield Case(LENSES, f"from_tuned_lens({name})", partial(_tuned, world, change))


_SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) // 2],
    "nothing": lambda _: b"",
    "noise": lambda content: bytes(len(content)),
    "a pickle": lambda _: b"\x80\x04\x95.",
    "a bit flipped": lambda content: content[:-3000] + bytes([content[-3000] ^ 1]) + content[-2999:],
}


def _spoilt_lens(world: World, spoil: Callable[[bytes], bytes]) -> Any:
    path = world.fresh("lens.pt")
    path.write_bytes(spoil(jacobian_file(world).read_bytes()))
    return matlens.Lens.from_jacobian_lens(path, world.model)


def _tuned(world: World, change: Change) -> Any:
    folder = world.fresh("tuned")
    shutil.copytree(tuned_folder(world), folder)
    state = torch.load(folder / "params.pt", weights_only=True)
    change(state)
    torch.save(state, folder / "params.pt")
    return matlens.Lens.from_tuned_lens(folder, world.model)


# Folders of safetensors files


def _vectors(world: World) -> Iterator[Case]:
    changes: dict[str, Change] = {
        "no tokens": lambda tensors: tensors.pop("token_ids"),
        "no vectors": lambda tensors: tensors.pop("hidden_states"),
        "tokens that are numbers": lambda tensors: tensors.update(token_ids=tensors["token_ids"].float()),
        "tokens past the vocabulary": lambda tensors: tensors["token_ids"].add_(1000),
        "negative tokens": lambda tensors: tensors["token_ids"].sub_(1000),
        "other tokens": lambda tensors: tensors["token_ids"].copy_(tensors["token_ids"].flip(0)),
        "a token too few": lambda tensors: tensors.update(token_ids=tensors["token_ids"][:-1].clone()),
        "no token": lambda tensors: tensors.update(
            token_ids=tensors["token_ids"][:0].clone(), hidden_states=tensors["hidden_states"][:0].clone()
        ),
        "an entry too few": lambda tensors: tensors.update(
            hidden_states=tensors["hidden_states"][:, :1].clone()
        ),
        "narrow vectors": lambda tensors: tensors.update(
            hidden_states=tensors["hidden_states"][..., :-1].clone()
        ),
        "vectors of whole numbers": lambda tensors: tensors.update(
            hidden_states=tensors["hidden_states"].long()
        ),
        "another precision": lambda tensors: tensors.update(hidden_states=tensors["hidden_states"].half()),
        "entries exchanged": lambda tensors: tensors["hidden_states"].copy_(tensors["hidden_states"].flip(1)),
        "a number that is none": lambda tensors: tensors["hidden_states"][0, 0].fill_(torch.nan),
        "other vectors": lambda tensors: tensors["hidden_states"].mul_(-1),
    }

    def read(change: Change) -> Any:
        folder = world.fresh("engine")
        shutil.copytree(exported(world), folder)
        tensors = load_file(folder / "0.safetensors")
        change(tensors)
        save_file(tensors, folder / "0.safetensors")
        return activations.read_exported(world.model, folder, ["h.0", "h.3"], progress=False)

    for name, change in changes.items():
        yield Case(VECTORS, f"read_exported({name})", partial(read, change))
    for name, spoil in _SPOILT.items():
        if name != "a bit flipped":  # which of the bits of others are right nobody knows
            yield Case(VECTORS, f"read_exported({name})", partial(_spoilt_vectors, world, spoil))


def _spoilt_vectors(world: World, spoil: Callable[[bytes], bytes]) -> Any:
    folder = world.fresh("engine")
    shutil.copytree(exported(world), folder)
    path = folder / "0.safetensors"
    path.write_bytes(spoil(path.read_bytes()))
    return activations.read_exported(world.model, folder, ["h.0", "h.3"], progress=False)


# Requests


def _requests(world: World) -> Iterator[Case]:
    prompts: dict[str, Any] = {
        "none": {}, "null": {"prompt": None}, "a number": {"prompt": 3}, "a list": {"prompt": ["w1"]},
        "nothing": {"prompt": ""}, "a blank": {"prompt": " "}, "too long": {"prompt": "w1 " * 10**4},
        "past the context": {"prompt": "w1 " * 60}, "half a pair": {"prompt": "w1 \ud800"},
    }  # fmt: skip
    for page in ("explore", "compare"):
        for name, content in prompts.items():
            yield Case(REQUESTS, f"{page}, prompt is {name}", partial(_ask, world, page, json.dumps(content)))
        for name, body in _BODIES.items():
            yield Case(REQUESTS, f"{page}, body is {name}", partial(_ask, world, page, body))
        good = json.dumps({"prompt": "w1 w2"})
        for name, headers in _HEADERS.items():
            yield Case(REQUESTS, f"{page}, {name}", partial(_ask, world, page, good, headers=headers))
        for name, path in {"another token": "x", "no token": "", "half of it": _TOKEN[:3]}.items():
            yield Case(REQUESTS, f"{page}, {name}", partial(_ask, world, page, good, token=path))
        yield Case(REQUESTS, f"{page}, read", partial(_ask, world, page, good, method="GET"))
    for name, changes in _CHANGES.items():
        body = json.dumps({"prompt": "w1 w2", "changes": changes})
        yield Case(REQUESTS, f"compare, {name}", partial(_ask, world, "compare", body))
    for number in ("x", "../..", "0" * 5000, "%00"):
        yield Case(REQUESTS, f"page {number[:9]}", partial(_ask, world, f"page/{number}", "", method="GET"))


_BODIES: dict[str, str | bytes] = {
    "nothing": "", "null": "null", "a list": "[]", "a text": '"w1"', "cut": '{"prompt": "w',
    "noise": bytes(99),
    "no UTF-8": b"\xff\xfe{", "deep": '{"prompt": ' + "[" * 9000, "huge": '{"prompt": "' + "x" * 10**5,
    "a huge number": '{"prompt": "w1", "changes": [' + "9" * 9000 + "]}", "NaN": '{"prompt": NaN}',
}  # fmt: skip
_HEADERS = {
    "a form": {"content-type": "application/x-www-form-urlencoded"},
    "no kind": {"content-type": ""},
    "another host": {"host": "example.org"},
    "another port": {"host": "127.0.0.1:1"},
    "another site": {"origin": "http://example.org"},
    "a page of another port": {"origin": "http://127.0.0.1:1"},
    "no site": {"origin": "null"},
}
_VALUE = {"kind": "value", "which": "L0D1", "value": 3}
_CHANGES: dict[str, Any] = {
    "changes that are no list": {"kind": "value"},
    "a change that is no object": ["value"],
    "a change without a kind": [{"which": "L0D1"}],
    "a change without what": [{"kind": "value"}],
    "another key": [_VALUE | {"more": 1}],
    "another kind": [_VALUE | {"kind": "bogus"}],
    "a kind that is a list": [_VALUE | {"kind": []}],
    "no value vector": [_VALUE | {"which": "x"}],
    "a value vector past the last": [_VALUE | {"which": "L0D99"}],
    "a value vector of digits": [_VALUE | {"which": "L" + "9" * 3000 + "D0"}],
    "the same twice": [_VALUE, _VALUE | {"value": 5}],
    "the same by another name": [_VALUE, _VALUE | {"which": "L-3D1"}],
    "a value that is a word": [_VALUE | {"value": "3"}],
    "a value that is null": [_VALUE | {"value": None}],
    "a value that is true": [_VALUE | {"value": True}],
    "a value past all": [_VALUE | {"value": 10**400}],
    "a value of infinity": [_VALUE | {"value": float("inf")}],
    "a value of NaN": [_VALUE | {"value": float("nan")}],
    "a jump backwards": [{"kind": "jump", "which": "3-1"}],
    "a jump past the last": [{"kind": "jump", "which": "0-99"}],
    "a jump to nowhere": [{"kind": "jump", "which": "1-"}],
    "two jumps in one another": [{"kind": "jump", "which": "0-2"}, {"kind": "jump", "which": "1-3"}],
    "a value in what is jumped": [{"kind": "jump", "which": "0-2"}, _VALUE],
    "a value in an FFN that is out": [{"kind": "ffn", "which": "0"}, _VALUE],
    "an FFN twice": [{"kind": "ffn", "which": "0"}, {"kind": "ffn", "which": "0"}],
    "a block past the last": [{"kind": "attn", "which": "3"}],
    "a block that is none": [{"kind": "attn", "which": "first"}],
    "a negative block": [{"kind": "ffn", "which": "-1"}],
    "too many": [{"kind": "attn", "which": "0"}] * 33,
}


def _ask(
    world: World, page: str, body: str | bytes, *, method: str = "POST", token: str = _TOKEN,
    headers: dict[str, str] | None = None,
) -> Any:  # fmt: skip
    live = explorer.LiveModel(world.model, token=_TOKEN, port=_PORT)

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(live.application)
        address = f"http://127.0.0.1:{_PORT}"
        async with httpx.AsyncClient(transport=transport, base_url=address) as client:
            kind = {"content-type": "application/json"} | (headers or {})
            return await client.request(method, f"/{token}/{page}", content=body, headers=kind)

    response = asyncio.run(answer())
    if not 400 <= response.status_code < 500:
        return response.status_code, response.text[:100]
    if response.status_code in (404, 405) and "json" not in response.headers["content-type"]:
        raise Refused(f"The server answers {response.status_code}: {response.text}")
    said = response.json().get("error", "")
    if not said:
        raise Unnamed(f"status {response.status_code} without a word")
    raise Refused(f"status {response.status_code}: {said}")
