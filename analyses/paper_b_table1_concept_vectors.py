"""Paper B, Table 1: search for value vectors whose top tokens are one concept.

All value vectors, as many random vectors and, for the chance level, value vectors with shuffled tokens are
ranked by the largest pattern in their 30 top tokens: different words with similar contexts in the corpus
(`annotation.find_patterns`). The output has the shares of vectors with a pattern, by size and layer, and in
``..._vectors.csv`` thirty value vectors of different concepts, and random ones. Expect large patterns of
value vectors, most of them in the last third of the layers, and hardly any of random ones. The model is not
run on the corpus, which only provides similarities of words.
"""

from __future__ import annotations

from typing import Annotated

import pandas as pd
from annotation.patterns import distinct_concepts, pattern_shares, search_concepts
from annotation.word_similarity import WordSimilarity
from figures.paper_b import pattern_sizes
from studies import Report, Study, run_study, show

from matlens.errors import Between, PositiveInt

NAME = "paper_b_table1_concept_vectors"


def main(
    study: Study,
    report: Report,
    vectors: PositiveInt = 30,
    per_layer: PositiveInt = 3,
    top: Annotated[int, Between(4)] = 30,
) -> None:
    """Search top tokens of all value vectors for patterns; compare with random vectors.

    Parameters
    ----------
    vectors
        Value vectors to show.
    per_layer
        Most of them from one layer.
    top
        Top tokens of each vector.
    """
    texts, seed = study.corpus, study.seed
    model = study.model
    word_similarity = WordSimilarity.fit(texts.sentences, seed=seed)
    searched = search_concepts(model, word_similarity, k=top, seed=seed)
    table = pattern_shares(searched, str(model.cfg.model_name), texts.name, k=top)
    data = {
        "corpus": texts.name, "fingerprint": texts.fingerprint, "n_words": len(word_similarity.words),
    }  # fmt: skip
    origin = study.origin_of_weights | {"data": data}
    report.write(NAME, table, origin, pattern_sizes(table, 5))
    best = {
        method: distinct_concepts(searched[method], n=vectors, per_layer=per_layer)
        for method in ("values", "random")
    }
    both = pd.concat([concepts.assign(method=method) for method, concepts in best.items()])
    report.write(f"{NAME}_vectors", both, origin)
    show("Each of another concept", best["values"][["value", "words", "pattern"]])
    overall = table[table["layer"].isna() & (table["metric"] == "pattern")]
    wide = overall.pivot(index="k", columns="method", values="value")
    show("Share of vectors with a pattern of so many words", wide, **dict.fromkeys(map(str, wide), "{:.3%}"))


if __name__ == "__main__":
    run_study(main, train=None)
