"""Paper B, Table 2 and Figure 2: share of top tokens in concepts found by annotators.

The first run samples ten value vectors, ten random vectors and ten FFN updates of every layer, and writes a
sheet for annotators, who find the concepts in the 30 top tokens of each. Give them the folder ``..._sheets``,
which hides the type of an item, and keep the key, the ``.csv`` next to it. A run with ``--filled`` computes
shares by kind, layer and class from filled sheets (one folder each), the figure and, with two annotators or
more, their agreement. Expect more tokens in concepts for value vectors than for random ones. The paper's
Table 2 has 36.7% for GPT-2's value vectors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from annotation.concept_sheets import read_concept_sheets, sheet_code, write_concept_sheets
from annotation.concept_sheets import wordnet as wordnet_meanings
from annotation.concepts import (
    MIN_PATTERN_TOKENS,
    annotator_agreement,
    draw_concept_sample,
    read_concept_sample,
    tally_concepts,
)
from figures.paper_b import concept_shares
from studies import Report, Study, run_study, show

from matlens import make_examples
from matlens.errors import Between, PositiveInt

NAME = "paper_b_table2_concepts"


def main(
    study: Study,
    report: Report,
    filled: list[Path] | None = None,
    per_layer: PositiveInt = 10,
    top: Annotated[int, Between(4)] = 30,
    wordnet: Annotated[bool, typer.Option("--wordnet")] = False,
) -> None:
    """Write annotation sheets, or compute shares from filled sheets.

    Parameters
    ----------
    filled
        Folder with a filled tokens.csv and patterns.csv; give it once for each annotator.
    per_layer
        Vectors of each kind at each layer.
    top
        Top tokens of each.
    wordnet
        Show what WordNet says of each token; needs nltk or wn.
    """
    if filled:
        count(filled, report)
        return
    describe = wordnet_meanings() if wordnet else None
    texts, model, seed = study.corpus, study.model, study.seed
    _, part = texts.split(n_train=1, n_validation=max(2, study.n_layers * per_layer), seed=seed)
    examples = make_examples(model, part, seed=seed, sample_special=False)
    sample = draw_concept_sample(model, examples, per_layer=per_layer, k=top, seed=seed)
    written = write_concept_sheets(sample, report.out / f"{NAME}_sheets", describe=describe)
    origin = {"data": examples.provenance, "sheet": sheet_code(sample)}
    report.write(NAME, sample, study.origin_of_weights | origin)
    print("This table is the key, not for annotators.")
    for path in written:
        print(path)
    print("Give the sheets to annotators, and then: --filled FOLDER, with what each has saved in a folder")


def count(filled: list[Path], report: Report) -> None:
    """Turn filled sheets into shares and agreement, and print the main ones."""
    sample = read_concept_sample(report.out / f"{NAME}.csv")
    annotations = [read_concept_sheets(folder, sample) for folder in filled]
    table, alike = tally_concepts(sample, annotations), annotator_agreement(sample, annotations)
    origin = {"sheet": sheet_code(sample), "annotators": [annotation.name for annotation in annotations]}
    report.write(f"{NAME}_shares", table, origin, concept_shares(table))
    if len(annotations) > 1:
        report.write_table(f"{NAME}_agreement", alike)
    overall = table.loc[table["layer"].isna(), ["method", "metric", "value", "low", "high", "n"]]
    show(f"Tokens in patterns of {MIN_PATTERN_TOKENS} tokens or more", overall)
    if len(alike):
        show("Agreement", alike)


if __name__ == "__main__":
    run_study(main, train=None)
