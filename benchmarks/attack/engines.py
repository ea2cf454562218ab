"""Cases of what other programs hand over: lenses, exported vectors, and requests to the server."""

from __future__ import annotations

import asyncio
import copy
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
from attack.cases import Case, Misread, Refused, Unnamed
from attack.folders import places
from attack.world import World
from matlens import activations, explorer

LENSES, VECTORS, REQUESTS = "lenses of others", "vectors of other engines", "requests to the server"
_TOKEN, _PORT = "a-secret", 8765


def engine_cases(world: World) -> Iterator[Case]:
    """All cases of this file."""
    yield from _lenses(world)
    yield from _vectors(world)
    yield from _requests(world)


class _Harm:
    """What a pickle can ask for, and nobody may run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _edits(content: dict[Any, Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Nested tensors and words with one of them missing, too narrow, NaN, negative, or a word."""
    for number, (_, key) in enumerate(list(places(content))):
        for way, change in _WAYS.items():
            edited = copy.deepcopy(content)
            holder, _ = list(places(edited))[number]
            tensor, floating = torch.is_tensor(holder[key]), False
            if tensor:
                floating = holder[key].is_floating_point()
            if {"too narrow": floating, "NaN": floating, "negative": tensor and not floating}.get(way, True):
                holder[key] = change(holder[key])
                yield f"{key} is {way}", edited
        if isinstance(holder, dict):
            del holder[key]
            yield f"{key} is missing", edited


_WAYS: dict[str, Callable[[Any], Any]] = {
    "too narrow": lambda tensor: tensor[..., :-1].contiguous(),
    "NaN": lambda tensor: tensor * torch.nan,
    "negative": lambda tensor: tensor - 1000,
    "a word": lambda _: "words",
}
_SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) // 2],
    "nothing": lambda _: b"",
    "noise": lambda content: bytes(len(content)),
    "a pickle": lambda _: b"\x80\x04\x95.",
}


def _lenses(world: World) -> Iterator[Case]:
    whole = torch.load(world.saved("lens.pt"), weights_only=True)
    harm, noted = world.root / "harm", whole["metadata"]
    parts = {key: whole[key] for key in ("J", "d_model", "n_prompts")}
    edits = [(label, content | {"metadata": noted}) for label, content in _edits(parts)]
    edits.append(("what would be run", whole | {"extra": _Harm(harm)}))
    edits.append(("a list noted", whole | {"metadata": [1]}))
    for key in noted["matlens"]:
        left = {name: value for name, value in noted["matlens"].items() if name != key}
        edits.append((f"without its {key}", whole | {"metadata": noted | {"matlens": left}}))
    for label, content in edits:
        right = (lambda _: True) if label == "n_prompts is missing" else None  # not all count them
        yield Case(LENSES, f"from_jacobian_lens({label})", partial(_read_lens, world, content, harm), right)
    for label, spoil in _SPOILT.items():
        spoilt = spoil(world.saved("lens.pt").read_bytes())
        yield Case(LENSES, f"from_jacobian_lens({label})", partial(_read_lens, world, spoilt, harm))
    yield Case(
        LENSES,
        "from_jacobian_lens(of another model)",
        lambda: matlens.Lens.from_jacobian_lens(world.saved("lens.pt"), world.of("weights").model),
    )
    tuned = torch.load(world.saved("tuned lens") / "params.pt", weights_only=True)
    for label, content in (*_edits(tuned), ("a layer too many", tuned | {"9.weight": torch.eye(32)})):
        yield Case(LENSES, f"from_tuned_lens({label})", partial(_read_tuned, world, content))


def _read_lens(world: World, content: Any, harm: Path) -> Any:
    path = world.fresh("lens.pt")
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    read = matlens.Lens.from_jacobian_lens(path, world.model)
    if harm.exists():
        raise Misread("what the file asks for was run")
    return read


def _read_tuned(world: World, content: Any) -> Any:
    folder = Path(shutil.copytree(world.saved("tuned lens"), world.fresh("tuned")))
    torch.save(content, folder / "params.pt")
    return matlens.Lens.from_tuned_lens(folder, world.model)


def _vectors(world: World) -> Iterator[Case]:
    tensors = load_file(world.saved("exported") / "0.safetensors")
    edits = [(label, content) for label, content in _edits(tensors) if "word" not in label]
    flipped = {name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}
    edits += [("of other tokens", tensors | {"token_ids": flipped["token_ids"]})]
    edits += [("in another order", tensors | {"hidden_states": flipped["hidden_states"]})]
    edits += [("in another precision", {name: tensor.half() for name, tensor in tensors.items()})]
    for label, content in (*edits, *_SPOILT.items()):
        yield Case(VECTORS, f"read_exported({label})", partial(_read_vectors, world, content))


def _read_vectors(world: World, content: Any) -> Any:
    folder = Path(shutil.copytree(world.saved("exported"), world.fresh("engine")))
    path = folder / "0.safetensors"
    save_file(content, path) if isinstance(content, dict) else path.write_bytes(content(path.read_bytes()))
    return activations.read_exported(world.model, folder, ["h.0", "h.3"], progress=False)


# Good requests, of which each part is spoilt in turn; and whole bodies, headers and addresses that are bad.
_CHANGED = {"prompt": "w1 w2", "changes": [{"kind": "value", "which": "L0D1", "value": 3}]}
_PARTS: tuple[Any, ...] = (
    None,
    [],
    {},
    "",
    "x",
    -1,
    True,
    float("nan"),
    10**400,
    "9" * 5000,
    "L9D0",
    "3-1",
    "w1 " * 10**4,
)
_BODIES: tuple[str | bytes, ...] = (
    "", "null", "[]", '"w1"', '{"prompt": "w', bytes(99), b"\xff\xfe{", '{"prompt": ' + "[" * 9000,
    '{"prompt": "' + "x" * 10**5, '{"prompt": "w1 \\ud800"}',
)  # fmt: skip
_HEADERS = (
    {"content-type": "application/x-www-form-urlencoded"}, {"content-type": ""}, {"host": "example.org"},
    {"host": "127.0.0.1:1"}, {"origin": "http://example.org"}, {"origin": "null"},
)  # fmt: skip


def _requests(world: World) -> Iterator[Case]:
    for number, (_, key) in enumerate(list(places(_CHANGED))):
        for part in _PARTS:
            edited = copy.deepcopy(_CHANGED)
            holder, _ = list(places(edited))[number]
            if type(part) is not type(holder[key]) or isinstance(part, str):
                holder[key] = part
                ask = partial(_ask, world, "compare", json.dumps(edited))
                # Any text is a prompt, and nothing is changed where there are no changes.
                right = (lambda done: done[0] == 200) if (key, part) in _FINE else None
                yield Case(REQUESTS, f"compare, {key} is {str(part)[:9]}", ask, right)
    good = json.dumps({"prompt": "w1 w2"})
    for page in ("explore", "compare"):
        for body in _BODIES:
            yield Case(REQUESTS, f"{page}, body is {body[:9]!r}", partial(_ask, world, page, body))
        for headers in _HEADERS:
            yield Case(REQUESTS, f"{page}, {headers}", partial(_ask, world, page, good, headers=headers))
        for token in ("x", "", _TOKEN[:3]):
            yield Case(REQUESTS, f"{page}, token {token!r}", partial(_ask, world, page, good, token=token))
        yield Case(REQUESTS, f"{page}, read", partial(_ask, world, page, good, method="GET"))


_FINE: tuple[tuple[str, Any], ...] = (
    ("prompt", "x"), ("prompt", "L9D0"), ("prompt", "3-1"), ("prompt", "9" * 5000),
)  # fmt: skip


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
