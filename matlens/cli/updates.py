"""The command that takes apart what feed-forward layers write for a prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matlens.cli.options import Device, Dtype, DtypeChoice, Model, Revision, Trust
from matlens.cli.terminal import Read, ReadChoice, TopTokens, load_model, print_table, projection_of
from matlens.errors import InputError

if TYPE_CHECKING:
    from matlens.corpora.examples import Examples


def update(
    prompt: Annotated[str, typer.Argument(help="A text; for masked-LM models with one mask in it.")],
    model: Model,
    layer: Annotated[
        list[int] | None,
        typer.Option(help="A layer whose dominant sub-updates to show; give it once for each."),
    ] = None,
    position: Annotated[
        int | None,
        typer.Option(help="Which token, from 0 (negative: from the end); by default the last, or the mask."),
    ] = None,
    dominant: Annotated[int, typer.Option(min=1, help="How many sub-updates count as dominant.")] = 10,
    tokens: TopTokens = 10,
    read: Read = ReadChoice.plain,
    device: Device = None,
    dtype: Dtype = DtypeChoice.float32,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Take apart what the FFNs write for a prompt: the dominant sub-updates and the tokens they promote.

    Without --layer there is a line for each layer, with its greatest sub-update.
    """
    from matlens.corpora.examples import make_prompts
    from matlens.ffn.updates import Updates, dominant_table
    from matlens.models.vocabulary import token_texts, visible

    loaded = load_model(model, device, dtype, revision, trust_remote_code)
    projection = projection_of(loaded, read)
    examples = _at(make_prompts(loaded, [prompt]), position)
    updates = Updates.run(loaded, examples, layer or None, progress=False)
    place = int(examples.positions[0])
    (token,) = token_texts(loaded.tokenizer, examples.tokens[[place]])
    at = f"{prompt}\nAt token {place}, '{visible(token)}'"
    found = dominant_table(updates, projection, k=dominant, n_tokens=tokens)
    shares = found.groupby("layer")["share"].sum().to_dict()
    if layer is None:
        first = found[found["rank"] == 1]
        title = f"{at}: the greatest sub-update of each layer, and the share of the {dominant} greatest"
        rows = [(one.layer, f"{shares[one.layer]:.1%}", *_told(one)) for one in first.itertuples()]
        print_table(title, ("layer", f"{dominant} greatest", "value", "coefficient", "share", "tokens"), rows)
        return
    for number, own in found.groupby("layer"):
        title = f"{at}, layer {number}: these are {own['share'].sum():.1%} of all contributions"
        rows = [(one.rank, *_told(one)) for one in own.itertuples()]
        print_table(title, ("rank", "value", "coefficient", "share", "tokens"), rows)


def _told(one: Any) -> tuple[str, ...]:
    return one.value, f"{one.coefficient:.3f}", f"{one.share:.1%}", one.tokens


def _at(examples: Examples, position: int | None) -> Examples:
    if position is None:
        return examples
    length = len(examples.tokens)
    if not -length <= position < length:
        raise InputError(f"Position {position} is out of range: the prompt has the tokens 0 to {length - 1}.")
    return replace(examples, positions=examples.positions * 0 + position % length)
