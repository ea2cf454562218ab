"""Commands for FFNs: show, search and cluster value vectors; decompose updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from matlens.cli.options import LinkageChoice, ModelOptions, ReadOptions, as_prompt, command
from matlens.cli.printing import print_frame, print_line, top_texts
from matlens.errors import InputError, NonNegative, PositiveInt

_N_NAMED = 3  # vectors listed per cluster

app = typer.Typer()
values = typer.Typer(
    help="Value vectors of feed-forward layers, read in the vocabulary.", no_args_is_help=True
)


@command(values)
def show(names: list[str], /, model: ModelOptions, reading: ReadOptions) -> None:
    """Show the tokens that value vectors promote and demote most, with their scores."""
    from matlens.models.tokens import visible

    catalogue = model.catalogue()
    table = catalogue.projection(reading.read).table(catalogue.values, names, k=reading.tokens)
    table["token"] = table["token"].map(visible)
    for value, scores in table.groupby("value", sort=False):
        top, bottom = (
            scores[scores["side"] == side][["rank", "token", "score"]].rename(columns={"token": name})
            for side, name in (("top", "promotes"), ("bottom", "demotes"))
        )
        print_frame(str(value), top.merge(bottom, on="rank", suffixes=("", " down")))


@command(values)
def search(
    words: list[str],
    /,
    model: ModelOptions,
    reading: ReadOptions,
    top_k: PositiveInt = 30,
    limit: PositiveInt = 20,
) -> None:
    """Find the value vectors with the words in their top tokens, most matches first.

    Parameters
    ----------
    top_k
        Number of top tokens of each vector to search.
    """
    catalogue = model.catalogue()
    values, projection = catalogue.values, catalogue.projection(reading.read)
    tokens = catalogue.top_tokens(reading.read, k=top_k)
    matches = projection.search(values, tokens, words)
    if matches.empty:
        print_line(
            f"No value vector has {', '.join(words)} in its {top_k} top tokens. A larger --top-k may help."
        )
        return
    first = matches.head(limit)[["value", "words", "rank", "score"]]
    print_frame(
        f"{len(matches):,} of {len(values):,} value vectors, by words, rank and score",
        first.assign(tokens=top_texts(projection, values.vectors(first["value"]), reading.tokens)),
    )


@command(values)
def promoting(
    words: list[str], /, model: ModelOptions, reading: ReadOptions, limit: PositiveInt = 20
) -> None:
    """Find the value vectors that raise the odds of the words most."""
    catalogue = model.catalogue()
    values, projection = catalogue.values, catalogue.projection(reading.read)
    lifts = projection.promoting(values, words, n=min(limit, len(values)))[["value", "score", "lift"]]
    print_frame(
        "By lift, the score above the mean of all tokens",
        lifts.assign(tokens=top_texts(projection, values.vectors(lifts["value"]), reading.tokens)),
    )


@command(values)
def cluster(
    names: list[str] | None = None,
    /,
    *,
    model: ModelOptions,
    reading: ReadOptions,
    clusters: PositiveInt = 10_000,
    linkage: LinkageChoice = "average",
    memory: NonNegative = 4.0,
    limit: PositiveInt = 20,
    out: Path = Path("out"),
) -> None:
    """Cluster all value vectors; show the largest clusters or those of given vectors.

    The clusters are stored in the output folder and reused.

    Parameters
    ----------
    names
        Value vectors, such as L3D12, whose clusters to show.
    clusters
        Number of clusters.
    linkage
        Linkage of exact clusters; the authors of paper B use complete.
    memory
        Maximum GiB for exact clusters; beyond it, nearest neighbors are used.
    limit
        Number of clusters to show, largest first, if no vector is named.
    """
    from matlens.study.study import cluster_values

    catalogue = model.catalogue()
    values = catalogue.values
    asked = [values.resolve(name) for name in names or ()]  # before the work
    projection = catalogue.projection(reading.read)
    fitted = cluster_values(values, out, clusters, linkage=linkage, memory=memory)
    chosen = fitted.containing(values, asked) if asked else list(range(min(limit, len(fitted))))
    table = fitted.table(values, projection, chosen, n_tokens=reading.tokens)
    how = f"exactly, by {fitted.linkage} linkage" if fitted.method == "exact" else "by near neighbors"
    first, last = table["first_layer"].astype(str), table["last_layer"].astype(str)
    shown = table.assign(
        layers=first.where(first == last, first + "-" + last),
        members=[_members(members.split(), set(map(str, asked))) for members in table["members"]],
    )
    print_frame(
        f"{len(values):,} value vectors in {len(fitted):,} clusters, {how}; tokens of their means",
        shown.drop(columns=["first_layer", "last_layer"]),
        digits={"cosine": 2},
    )


def _members(members: list[str], asked: set[str]) -> str:
    """The requested names, and a few others."""
    named = sum(name in asked for name in members)
    shown = sorted(members, key=lambda name: name not in asked)[: max(_N_NAMED, named)]
    more = f" +{len(members) - len(shown)}" if len(shown) < len(members) else ""
    return " ".join(shown) + more


@command(app)
def update(
    prompt: str,
    /,
    model: ModelOptions,
    reading: ReadOptions,
    layer: list[int] | None = None,
    position: int | None = None,
    dominant: PositiveInt = 10,
    chat: bool = False,
) -> None:
    """Show the dominant sub-updates of the FFNs for a prompt and the tokens they promote.

    Without --layer, one line per layer with its largest sub-update and the share of the dominant ones. A
    sub-update with a negative coefficient promotes the tokens that its value vector demotes.

    Parameters
    ----------
    layer
        Show all dominant sub-updates of this layer (repeatable).
    position
        Token position from 0 (negative: from the end); by default the last, or the mask.
    """
    from matlens.data.making import make_prompts
    from matlens.ffn.catalogue import Catalogue
    from matlens.ffn.updates import Updates
    from matlens.models.tokens import token_texts, visible

    bridge = model.load()
    projection = Catalogue(bridge).projection(reading.read)
    examples = make_prompts(bridge, [as_prompt(prompt, chat=chat)])
    if position is not None:
        length = len(examples.tokens)
        if not -length <= position < length:
            raise InputError(f"position must be between 0 and {length - 1}, got {position}.")
        examples = replace(examples, positions=examples.positions * 0 + position % length)
    updates = Updates.run(bridge, examples, layer or None, progress=False)
    place = int(examples.positions[0])
    (token,) = token_texts(bridge.tokenizer, examples.tokens[[place]])
    table = updates.table(projection, k=dominant, n_tokens=reading.tokens)
    shares = table.groupby("layer")["share"].transform("sum").map("{:.1%}".format)
    table.insert(1, f"share of {dominant}", shares)
    table["share"] = table["share"].map("{:.1%}".format)
    print_frame(
        f"{prompt}\nAt token {place}, '{visible(token)}'",
        (table if layer else table[table["rank"] == 1]).drop(columns="contribution"),
    )
