"""Targets of the explorer, pages, pruning, catalogue, cache and inputs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

import matlens
from attack.kept import VALUES, kept, once
from attack.signatures import Target
from attack.world import World
from matlens import explorer, ffn, io, pruning

_FOLLOWED = torch.tensor([5, 6])
_ON_A_PAGE = ("model", "prompt", "tokens", "layers", "lenses", "followed", "texts", "updates")


def _updates(world: World) -> ffn.Updates:
    examples = matlens.make_prompts(world.model, list(world.sentences[:1]))
    return ffn.Updates.run(world.model, examples, None, progress=False)


def _shown(world: World) -> explorer.Exploration:
    return once(world, "page", lambda: explorer.explore(world.model, world.sentences[0], progress=False))


def _part_of_page(name: str, world: World) -> Any:
    return getattr(_shown(world), name)


def _cache(world: World) -> io.Cache:
    return io.Cache(world.root / "cache")


def _jumped(world: World, live: explorer.LiveModel) -> explorer.LiveModel:
    """Jump over blocks as a request would, with the maps that are given."""
    explorer.compare_changes(
        world.model, "w1 w2", [explorer.Change("jump", "0-3")], maps=live._maps, n_tokens=1
    )
    return live


def _fill(folder: Path) -> None:
    (folder / "x").write_text("x")


def _entry_folder(world: World) -> Path:
    entry = _cache(world).keep("model", {"a": 1}, _fill)
    assert entry is not None
    return entry.folder


def _decoder(world: World) -> Any:
    if "t5 decoder" not in world._loaded:
        folder = str(world.model_folder("t5"))
        world._loaded["t5 decoder"] = matlens.load(folder, device="cpu", stack="decoder")
    return world._loaded["t5 decoder"]


def _pruning_table(world: World) -> Any:
    return once(
        world,
        "pruning",
        lambda: pruning.pruning_table(
            world.model, world.windows, {"text": world.windows}, [1], choices=["angle"],
            methods=["out", "replaceme"], progress=False,
        ),
    )  # fmt: skip


ROOMS: list[Target] = [
    # The explorer.
    Target(
        "explorer.Change",
        {"kind": "choice", "which": "text", "value": "number"},
        {"kind": lambda _: "value", "which": lambda _: "L0D1"},
        finish=lambda w, change: explorer.compare_changes(w.model, "w1 w2", [change], n_tokens=2),
    ),
    Target(
        "explorer.offered_maps",
        {"maps": "object"},
        {"maps": lambda w: [w.stream_maps]},
        takes={"maps=[]": lambda _, offered: not any(offered.values())},
    ),
    Target(
        "explorer.compare_changes",
        {"changes": "sentences", "prompt": "prompt", "proceed": "object"},
        {"changes": lambda _: [explorer.Change("value", "L0D1", 3.0)], "n_tokens": lambda _: 2},
        takes={
            "changes=[]": lambda _, outcomes: outcomes[0] == outcomes[1],
            "maps=[]": lambda _, outcomes: outcomes[0] != outcomes[1],
        },
    ),
    Target(
        "explorer.dominant_cells",
        {"projection": "projection, other projection", "followed": "object", "n_promoted": "count"},
        {"updates": _updates, "followed": lambda _: _FOLLOWED},
    ),
    Target(
        "explorer.explore",
        {
            "prompt": "prompt",
            "lenses": "object",
            "pins": "words",
            "dominant": "count",
            "read": "choice",
        },
        {"lenses": lambda w: [w.lens]},
        takes={
            "lenses=[]": lambda _, shown: {*shown.lenses} == {"id"},
            "pins=[]": lambda _, shown: len(shown.pinned) == 2,
            "pins=[3]": lambda _, shown: shown.pinned == (3,),
        },
    ),
    Target(
        "explorer.Exploration.save",
        {"path": "file written"},
        {"path": lambda w: w.fresh("page.html")},
        _shown,
    ),
    Target("explorer.load_lens", {"folder": "path read"}, {"folder": kept("lens")}),
    Target(
        "explorer.LiveModel",
        {"lenses": "object", "maps": "object, maps", "port": "whole", "token": "text"},
        {"maps": lambda w: [w.stream_maps], "lenses": lambda w: [w.lens]},
        finish=_jumped,
        takes={
            "lenses=[]": lambda _, live: live.port == 8765,
            "maps=[]": lambda _, live: live.port == 8765,
            "token=''": lambda _, live: len(live.address) > 40,  # a new one
        },
    ),
    Target(
        "explorer.max_activating_examples",
        {**VALUES, "n_best": "whole", "checkpoint": "path written"},
        {"examples": lambda w: explorer.shortened(w.examples)},
    ),
    Target(
        "explorer.shortened",
        {"longest": "whole"},
        {"longest": lambda _: 9},
        takes={  # what is in them is looked at where a model reads them
            f"examples={label}": lambda _, part: part is not None
            for label in ("tokens_past_the_vocabulary", "negative_tokens")
        },
    ),
    Target(
        "explorer.write_value_pages",
        {
            "corpus": "corpus",
            "clusters": "clusters",
            "among": "whole",
            "neighbours": "whole",
            "n_best": "whole",
        },
        {"k": lambda _: 3, "among": lambda _: 6, "neighbours": lambda _: 2, "corpus": lambda w: w.corpus},
        takes={"neighbours=0": lambda _, path: path.is_file()},
    ),
    # Pages.
    Target(
        "plots.trajectory_page",
        {
            "model": "text",
            "prompt": "text",
            "tokens": "object",
            "layers": "layers",
            "lenses": "lenses",
            "followed": "object",
            "texts": "object",
            "updates": "object",
            "pinned": "object",
            "notes": "sentences",
        },
        {name: partial(_part_of_page, name) for name in _ON_A_PAGE},
        takes={
            **{f"{name}=''": lambda _, page: page.startswith("<!") for name in ("model", "prompt")},
            "notes=[]": lambda _, page: page.startswith("<!"),
            "pinned=[]": lambda _, page: page.startswith("<!"),
        },
    ),
    # Pruning.
    Target(
        "pruning.prune",
        {"blocks": "layers", "choice": "choice", "penalty": "positive", "heal": "seed"},
        {"blocks": lambda _: [1], "method": lambda _: "refit"},
        takes={
            "blocks=[]": lambda w, pruned: pruned.model.config.n_layer == 3,
        },
    ),
    Target(
        "pruning.prune_attention",
        {"attention": "layers", "penalty": "positive"},
        {"attention": lambda _: [1], "method": lambda _: "refit"},
        takes={"attention=[]": lambda _, pruned: pruned.attention == ()},
    ),
    Target(
        "pruning.save_pruned",
        {"table": "table"},
    ),
    Target("pruning.compare_pruned"),
    Target("pruning.compare_costs", {"rounds": "whole"}),
    Target(
        "pruning.pruning_table",
        {
            "judged": "lenses",
            "sizes": "layers",
            "methods": "methods",
            "choices": "methods",
            "heal": "seed",
        },
        {
            "judged": lambda w: {"text": w.windows},
            "sizes": lambda _: [1],
            "methods": lambda _: ["out"],
            "choices": lambda _: ["angle"],
        },
    ),
    Target("pruning.added_perplexity", good={"table": _pruning_table}),
    Target("pruning.plain_copy"),
    # Catalogue and cache.
    Target(
        "ffn.Catalogue",
        {"name": "text", "device": "choice", "dtype": "choice", "revision": "object"},
        {"name": lambda w: str(w.model_folder("gpt2"))},
        finish=lambda _, opened: opened.values,
    ),
    Target(
        "ffn.Catalogue.projection",
        {"reading": "choice"},
        {"reading": lambda _: "norm"},
        lambda w: ffn.Catalogue(w.model),
    ),
    Target(
        "ffn.Catalogue.top_tokens",
        {**VALUES, "projection": "projection, other projection", "reading": "choice"},
        owner=lambda w: ffn.Catalogue(w.model),
    ),
    Target(
        "io.hash_contents",
        {"cache": "object", "paths": "object"},
        {"cache": _cache, "paths": lambda w: [w.text]},
        takes={"paths=[]": lambda _, hashes: hashes == {}, "paths={}": lambda _, hashes: hashes == {}},
    ),
    Target(
        "io.Cache",
        {"root": "path written", "limit": "whole"},
        {"root": lambda w: w.fresh("cache")},
        finish=lambda _, kept_there: kept_there.entries(),
        takes={"root": lambda _, entries: entries == [], "limit": lambda _, entries: entries == []},
    ),
    Target(
        "io.Cache.find",
        {"kind": "text", "key": "object", "whole": "truth"},
        {"kind": lambda _: "model", "key": lambda _: {"a": 1}},
        _cache,
        takes={"key={}": lambda _, entry: entry is None},
    ),
    Target(
        "io.Cache.keep",
        {"kind": "text", "key": "object", "fill": "object", "about": "object"},
        {
            "kind": lambda _: "model",
            "key": lambda _: {"a": 1},
            "fill": lambda _: lambda folder: (folder / "x").write_text("x"),
        },
        _cache,
        takes={f"{name}={{}}": lambda _, entry: entry is not None for name in ("key", "about")},
    ),
    Target(
        "io.Cache.discard",
        {"folder": "path read", "damage": "text"},
        {"folder": _entry_folder, "damage": lambda _: "it is changed"},
        _cache,
        takes={"damage=''": lambda _, nothing: nothing is None},
    ),
    # Inputs.
    Target(
        "data.make_image_examples",
        {"images": "object", "position": "row", "name": "text"},
        {
            "model": lambda w: w.load("vit"),
            "images": lambda _: torch.rand(2, 3, 12, 12),
            "name": lambda _: "images",
        },
        takes={
            "name=''": lambda _, examples: len(examples) == 2,
            "position=-1": lambda _, examples: examples.positions.tolist() == [9, 9],
        },
    ),
    Target(
        "data.make_pairs",
        {"sources": "texts", "targets": "texts"},
        {
            "model": _decoder,
            "sources": lambda w: list(w.sentences[:2]),
            "targets": lambda w: list(w.sentences[2:4]),
        },
    ),
]
