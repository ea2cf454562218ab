"""Commands that make pages for a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from matlens.cli import ffn
from matlens.cli.options import LensesOptions, ModelOptions, as_prompt, command
from matlens.cli.printing import print_line
from matlens.errors import Between, NonNegativeInt, PositiveInt

_OTHERS = 2  # min validation sentences of a split

app = typer.Typer()


@command(app)
def explore(
    prompt: str,
    /,
    model: ModelOptions,
    out: Path,
    lens: LensesOptions,
    pin: list[str] | None = None,
    dominant: PositiveInt = 10,
    read: Literal["plain", "head"] = "plain",
    chat: bool = False,
) -> None:
    """Write an HTML page that shows a prompt layer by layer and works offline.

    Select a cell to see its most probable tokens and the dominant sub-updates of the FFN before it.

    Parameters
    ----------
    out
        The page, a .html or .htm file.
    pin
        Plot the rank of this one-token word over layers (repeatable).
    read
        Projection of value vectors: E v, or through the linear parts of the head.
    """
    from matlens.explorer.exploration import explore as explore_prompt

    given = as_prompt(prompt, chat=chat)
    bridge, lenses = lens.load(model)
    page = explore_prompt(bridge, given, lenses, pins=pin or [], dominant=dominant, read=read)
    path = page.save(out)
    print_line(f"{path}: {len(page.tokens)} tokens, {len(page.layers)} layers, {path.stat().st_size:,} bytes")


@command(ffn.values, "explore")
def explore_values(
    model: ModelOptions,
    out: Path,
    corpus: str | None = None,
    sentences: PositiveInt = 2000,
    clusters: Path | None = None,
    neighbors: NonNegativeInt = 8,
) -> None:
    """Write pages of all value vectors into a folder: open OUT/index.html.

    Search by token, name, layer or cluster; see tokens, neighbors and sentences. An interrupted call resumes.

    Parameters
    ----------
    corpus
        Corpus of activating sentences, such as wikipedia-sample; by default none.
    sentences
        Number of sentences sampled from the corpus.
    clusters
        Folder of clusters from 'matlens values cluster'.
    neighbors
        Number of nearest neighbors; 0 to skip the search.
    """
    from matlens.data.corpus import load_corpus
    from matlens.explorer.value_pages import write_value_pages
    from matlens.ffn.clusters import Clusters

    texts = None if corpus is None else load_corpus(corpus)
    if texts is not None and len(texts) >= sentences + _OTHERS:
        texts, _ = texts.split(n_train=sentences, n_validation=_OTHERS)
    fitted = None if clusters is None else Clusters.load(clusters)
    page = write_value_pages(model.load(), out, corpus=texts, clusters=fitted, neighbors=neighbors)
    print_line(f"{page}: open it in a browser")


@command(app)
def serve(
    model: ModelOptions,
    lens: LensesOptions,
    maps: list[Path] | None = None,
    port: Annotated[int, Between(1024, 65_535)] = 8765,
) -> None:
    """Serve the live explorer on this machine: type prompts and modify the model.

    The printed address contains a secret; other requests are refused.

    Parameters
    ----------
    maps
        Fitted maps to offer as replacements of blocks and sub-modules (repeatable).
    port
        Port of the server.
    """
    from matlens.explorer.server import LiveModel, run_server
    from matlens.linear.mapsets import MapSet

    sets = [MapSet.load(folder) for folder in maps or []]
    bridge, lenses = lens.load(model)
    live = LiveModel(bridge, lenses, maps=[each.on(bridge, strict=lens.strict) for each in sets], port=port)
    print_line(f"Open {live.address} in a browser; Ctrl-C ends it.")
    run_server(live)
