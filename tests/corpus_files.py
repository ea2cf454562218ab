"""Files of sentences for tests of corpora, and the counts of what is left out of them."""

from pathlib import Path

from matlens.data.corpus import Corpus

FIRST = "The first sentence has six words."
SECOND = "A second one is also here."
THIRD = "Schließlich gibt es noch eine dritte."


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def counts(corpus: Corpus) -> tuple[int, int, int, int]:
    return corpus.n_read, corpus.n_empty, corpus.n_short, corpus.n_duplicate
