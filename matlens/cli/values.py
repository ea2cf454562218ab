"""Commands about value vectors: shown, searched, and clustered."""

from __future__ import annotations

from typing import Annotated

import typer

from matlens.cli.clusters import cluster
from matlens.cli.options import Device, Dtype, DtypeChoice, Model, Revision, Trust
from matlens.cli.terminal import (
    AmongTop,
    Most,
    Read,
    ReadChoice,
    TopTokens,
    Words,
    load_model,
    print_table,
    projection_of,
    top_texts,
)

app = typer.Typer(help="Value vectors of feed-forward layers, read in the vocabulary.", no_args_is_help=True)


@app.command()
def show(
    names: Annotated[list[str], typer.Argument(help="Value vectors, such as L3D12.", show_default=False)],
    model: Model,
    tokens: TopTokens = 10,
    read: Read = ReadChoice.plain,
    device: Device = None,
    dtype: Dtype = DtypeChoice.float32,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Show the tokens that value vectors promote and demote most, with their scores."""
    from matlens.ffn.projection import token_table
    from matlens.ffn.values import ValueVector, ValueVectors
    from matlens.models.vocabulary import visible

    for name in names:  # before the model, which can take minutes
        ValueVector.parse(name)
    loaded = load_model(model, device, dtype, revision, trust_remote_code)
    found = token_table(ValueVectors(loaded), projection_of(loaded, read), names, k=tokens)
    for value, own in found.groupby("value", sort=False):
        columns = [own[own["side"] == side] for side in ("top", "bottom")]
        lines = zip(*(zip(one["token"], one["score"], strict=True) for one in columns), strict=True)
        rows = [
            (rank, visible(up), f"{raised:.3f}", visible(down), f"{lowered:.3f}")
            for rank, ((up, raised), (down, lowered)) in enumerate(lines, start=1)
        ]
        print_table(str(value), ("rank", "promotes", "score", "demotes", "score"), rows)


@app.command()
def search(
    words: Words,
    model: Model,
    among: AmongTop = 30,
    limit: Most = 20,
    tokens: TopTokens = 10,
    read: Read = ReadChoice.plain,
    device: Device = None,
    dtype: Dtype = DtypeChoice.float32,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Find the value vectors that have a word among their top tokens; of several words, most first."""
    from matlens.ffn.projection import top_tokens_of_all, values_with_tokens
    from matlens.ffn.values import ValueVectors
    from matlens.models.vocabulary import word_tokens

    loaded = load_model(model, device, dtype, revision, trust_remote_code)
    values, projection = ValueVectors(loaded), projection_of(loaded, read)
    word_tokens(projection.tokenizer, words)  # before the work, not after it
    found = values_with_tokens(values, projection, top_tokens_of_all(values, projection, k=among), words)
    if found.empty:
        print(
            f"No value vector has {', '.join(words)} among its {among} top tokens. A larger --among may help."
        )
        return
    title = f"{len(found):,} of {len(values):,} value vectors, by words, rank and score"
    part = found.head(limit)
    texts = top_texts(projection, values.vectors(part["value"]), tokens)
    lines = zip(part["value"], part["words"], part["rank"], part["score"], texts, strict=True)
    rows = [(name, n, rank, f"{score:.3f}", text) for name, n, rank, score, text in lines]
    print_table(title, ("value", "words", "rank", "score", "top tokens"), rows)


@app.command()
def promoting(
    words: Words,
    model: Model,
    limit: Most = 20,
    tokens: TopTokens = 10,
    read: Read = ReadChoice.plain,
    device: Device = None,
    dtype: Dtype = DtypeChoice.float32,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Find the value vectors that raise the odds of a word, or of several, most over other tokens'."""
    from matlens.ffn import projection as of_vectors
    from matlens.ffn.values import ValueVectors

    loaded = load_model(model, device, dtype, revision, trust_remote_code)
    values, projection = ValueVectors(loaded), projection_of(loaded, read)
    found = of_vectors.values_promoting(values, projection, words, n=min(limit, len(values)))
    texts = top_texts(projection, values.vectors(found["value"]), tokens)
    lines = zip(found["value"], found["score"], found["lift"], texts, strict=True)
    rows = [(name, f"{score:.3f}", f"{lift:.3f}", text) for name, score, lift, text in lines]
    print_table(
        "By lift, the score above the mean of all tokens", ("value", "score", "lift", "top tokens"), rows
    )


app.command()(cluster)
