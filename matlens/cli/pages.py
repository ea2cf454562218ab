"""Commands that make pages for a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from matlens.cli import ffn
from matlens.cli.options import Dominant, ModelOptions, Out, Prompt, command
from matlens.cli.printing import print_line

_OTHERS = 2  # sentences that a split of a corpus leaves out at least
Lenses = Annotated[
    list[Path] | None,
    typer.Option(
        "--lens",
        metavar="FOLDER",
        help="A lens, or maps that 'matlens fit' has written; repeat it for several. The page opens on the "
        "first; id is always in it.",
    ),
]


app = typer.Typer()


@command(app)
def explore(
    prompt: Prompt,
    model: ModelOptions,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page, a .html or .htm file.")],
    lens: Lenses = None,
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", help="A word of one token to follow through all layers; once for each."),
    ] = None,
    dominant: Dominant = 10,
    read: Annotated[
        Literal["plain", "head"],
        typer.Option(help="How value vectors are read: E v, or through the linear parts of the head."),
    ] = "plain",
) -> None:
    """Show a prompt layer by layer in a page for a browser, which needs nothing else.

    Each cell opens to its likeliest tokens and to the sub-updates that the FFN below it wrote.
    """
    from matlens.explorer.exploration import explore as explore_prompt
    from matlens.explorer.exploration import load_lens

    lenses = [load_lens(folder) for folder in lens or []]
    page = explore_prompt(model.load(), prompt, lenses, pins=pin or [], dominant=dominant, read=read)
    path = page.save(out)
    print_line(f"{path}: {len(page.tokens)} tokens, {len(page.layers)} layers, {path.stat().st_size:,} bytes")


@command(ffn.values, "explore")
def explore_values(
    model: ModelOptions,
    out: Out,
    corpus: Annotated[
        str | None,
        typer.Option(
            "--corpus",
            help="Sentences to show uses of the vectors in, such as wikipedia-sample; none without.",
        ),
    ] = None,
    sentences: Annotated[int, typer.Option(min=1, help="How many sentences are drawn of the corpus.")] = 2000,
    clusters: Annotated[
        Path | None,
        typer.Option("--clusters", metavar="FOLDER", help="Clusters that 'matlens values cluster' has kept."),
    ] = None,
    neighbours: Annotated[
        int, typer.Option(min=0, help="Neighbours of each vector; 0 where all pairs are too many.")
    ] = 8,
) -> None:
    """Write pages of all value vectors into a folder: open OUT/index.html.

    They are found by token, name, layer and cluster, with their tokens, neighbours and sentences. A call that
    was killed goes on where it was.
    """
    model.check()
    from matlens.data.corpus import load_corpus
    from matlens.explorer.value_pages import write_value_pages
    from matlens.ffn.clusters import Clusters

    drawn = None if corpus is None else load_corpus(corpus)
    if drawn is not None and len(drawn) >= sentences + _OTHERS:
        drawn, _ = drawn.split(n_train=sentences, n_validation=_OTHERS)
    fitted = None if clusters is None else Clusters.load(clusters)
    page = write_value_pages(model.load(), out, corpus=drawn, clusters=fitted, neighbours=neighbours)
    print_line(f"{page}: open it in a browser")


@command(app)
def serve(
    model: ModelOptions,
    lens: Lenses = None,
    maps: Annotated[
        list[Path] | None,
        typer.Option(
            "--maps",
            metavar="FOLDER",
            help="Maps to put in the place of blocks and sub-modules, such as a study keeps; give it "
            "once for each folder.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1024, max=65_535, help="Where the server listens.")] = 8765,
) -> None:
    """Answer the pages of a model to a browser on this machine: type prompts, and change the model.

    The address that is printed has a secret in it, without which nothing is answered.
    """
    from matlens.explorer.exploration import load_lens
    from matlens.explorer.server import LiveModel, check_server, run_server
    from matlens.linear.mapsets import MapSet

    check_server()
    lenses = [load_lens(folder) for folder in lens or []]
    sets = [MapSet.load(folder) for folder in maps or []]
    live = LiveModel(model.load(), lenses, maps=sets, port=port)
    print_line(f"Open {live.address} in a browser; Ctrl-C ends it.")
    run_server(live)
