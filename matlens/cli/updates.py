"""The command that takes apart what feed-forward layers write for a prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matlens.cli.groups import ModelOptions, ReadOptions, grouped
from matlens.cli.options import Dominant
from matlens.cli.printing import print_table
from matlens.errors import InputError
from matlens.io.numbers import number_text

if TYPE_CHECKING:
    from matlens.data.examples import Examples


@grouped
def update(
    prompt: Annotated[str, typer.Argument(help="A text; for masked-LM models with one mask in it.")],
    model: ModelOptions,
    reading: ReadOptions,
    layer: Annotated[
        list[int] | None,
        typer.Option(help="A layer whose dominant sub-updates to show; give it once for each."),
    ] = None,
    position: Annotated[
        int | None,
        typer.Option(help="Which token, from 0 (negative: from the end); by default the last, or the mask."),
    ] = None,
    dominant: Dominant = 10,
) -> None:
    """Take apart what the FFNs write for a prompt: the dominant sub-updates and the tokens they promote.

    Without --layer there is a line for each layer, with its greatest sub-update. A sub-update with a negative
    coefficient promotes the tokens that its value vector demotes.
    """
    from matlens.data.prompts import make_prompts
    from matlens.ffn.catalogue import Catalogue
    from matlens.ffn.updates import Updates, dominant_table
    from matlens.models.vocabulary import token_texts, visible

    bridge = model.load()
    projection = reading.projection(Catalogue(bridge))
    examples = _at(make_prompts(bridge, [prompt]), position)
    updates = Updates.run(bridge, examples, layer or None, progress=False)
    place = int(examples.positions[0])
    (token,) = token_texts(bridge.tokenizer, examples.tokens[[place]])
    at = f"{prompt}\nAt token {place}, '{visible(token)}'"
    table = dominant_table(updates, projection, k=dominant, n_tokens=reading.tokens)
    shares = table.groupby("layer")["share"].sum().to_dict()
    if layer is None:
        greatest = table[table["rank"] == 1]
        title = f"{at}: the greatest sub-update of each layer, and the share of the {dominant} greatest"
        rows = [(row.layer, f"{shares[row.layer]:.1%}", *_cells(row)) for row in greatest.itertuples()]
        print_table(
            title, ("layer", f"{dominant} greatest", "value", "coefficient", "share", "promoted"), rows
        )
        return
    for number, part in table.groupby("layer"):
        title = f"{at}, layer {number}: these are {part['share'].sum():.1%} of all contributions"
        rows = [(row.rank, *_cells(row)) for row in part.itertuples()]
        print_table(title, ("rank", "value", "coefficient", "share", "promoted"), rows)


def _cells(row: Any) -> tuple[str, ...]:
    return row.value, number_text(row.coefficient), f"{row.share:.1%}", row.promoted


def _at(examples: Examples, position: int | None) -> Examples:
    if position is None:
        return examples
    length = len(examples.tokens)
    if not -length <= position < length:
        raise InputError(f"Position {position} is out of range: the prompt has the tokens 0 to {length - 1}.")
    return replace(examples, positions=examples.positions * 0 + position % length)
