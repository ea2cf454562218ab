"""Paper B, sections 3 and 4: search value vectors by words; updates of a prompt.

For each set of words, the value vector with most of them in its 30 top tokens; and for a prompt, the dominant
sub-update of every layer and the tokens that it promotes. Expect value vectors of one concept, most of them
in the last third of the layers.
"""

from __future__ import annotations

import pandas as pd
from studies import Report, Study, run_study, show

from matlens import InputError, make_prompts
from matlens.errors import PositiveInt
from matlens.ffn import Projection, Updates, ValueVectors
from matlens.models import visible

NAME, UPDATES = "paper_b_sec4_search", "paper_b_sec4_updates"
SEARCHES = (
    "three four five seven eight", "which whose whom where who", "January March June October December",
    "judge court lawyer trial attorney", "rain snow storm winds temperature", "red blue green yellow purple",
    "coffee tea beer wine milk",
)  # fmt: skip
PROMPT = "The Eiffel Tower stands in the city of"


def main(
    study: Study,
    report: Report,
    words: list[str] | None = None,
    prompt: str = PROMPT,
    top: PositiveInt = 30,
    shown: PositiveInt = 10,
) -> None:
    """Search value vectors by words, and show the dominant sub-updates of a prompt.

    Parameters
    ----------
    words
        Words, separated by spaces, that a vector should promote (repeatable).
    prompt
        A text whose next token is predicted.
    top
        Top tokens of each vector to search.
    shown
        Top tokens to show.
    """
    model = study.model
    values, projection = ValueVectors(model), Projection.from_model(model)
    tokens = projection.top_of_all(values, top)
    rows = []
    for search in words or SEARCHES:
        spaced = [f" {word}" for word in search.split()]
        best = projection.search(values, tokens, spaced).head(1)
        if best.empty:
            raise InputError(f"No value vector has one of {search!r} in its {top} top tokens.")
        promoted = projection.table(values, best["value"].tolist(), k=shown)
        texts = ", ".join(promoted[promoted["side"] == "top"]["token"].map(visible))
        rows.append(best.assign(search=search, searched=len(spaced), tokens=texts))
    table = pd.concat(rows, ignore_index=True)
    updates = Updates.run(model, make_prompts(model, [prompt]))
    dominant = updates.table(projection, k=1, n_tokens=shown)
    report.write(NAME, table, study.origin_of_weights | {"searched": top})
    report.write(UPDATES, dominant.assign(prompt=prompt), study.origin_of_weights | {"prompt": prompt})
    show("Value vectors by their tokens", table[["search", "words", "searched", "value", "tokens"]])


if __name__ == "__main__":
    run_study(main, corpus=None, train=None)
