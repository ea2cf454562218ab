"""Corpora: sentences from samples, files, datasets or iterables, without duplicates."""

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import numpy as np

from matlens.data.sources import Source, open_source
from matlens.errors import Between, InputError, PositiveInt, Seed, checked, printable

MIN_WORDS = 5
"""Minimum number of words of a sentence, or twice as many characters in scripts without spaces."""
# Thai, Lao, Burmese, Khmer, Japanese and Chinese.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
_CHARACTERS = 2  # of such a script that count as a word


@checked
@dataclass(frozen=True)
class Corpus:
    """Different sentences of a source, in its order, and counts of those that were excluded.

    Attributes
    ----------
    name
        Name of the source; parts made by `split` add their role.
    sentences
        The sentences, with white space normalized.
    n_read, n_empty, n_short, n_duplicate
        Number of sentences in the source, and of those that were excluded: empty, shorter than five words, or
        duplicates. Parts made by `split` keep the counts of the whole corpus.
    """

    name: str
    sentences: tuple[str, ...]
    n_read: int
    n_empty: int
    n_short: int
    n_duplicate: int

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}, {len(self):,} sentences)"

    def __len__(self) -> int:
        return len(self.sentences)

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change with any sentence and with their order."""
        return hashlib.sha256("\n".join(self.sentences).encode()).hexdigest()[:16]

    def report(self) -> str:
        """One line with the number of sentences, and of those that were excluded."""
        return (
            f"{len(self):,} sentences of {printable(self.name, limit=200)} (read {self.n_read:,}; excluded: "
            f"{self.n_empty:,} empty, {self.n_short:,} shorter than {MIN_WORDS} words, "
            f"{self.n_duplicate:,} duplicates)"
        )

    def split(
        self, *, n_train: PositiveInt, n_validation: Annotated[int, Between(2)], seed: Seed = 0
    ) -> tuple["Corpus", "Corpus"]:
        """Sample two parts without common sentences: training and validation.

        With one seed, the validation part is the same for any ``n_train``, and a larger training part begins
        with the smaller one.
        """
        if n_train + n_validation > len(self):
            raise InputError(
                f"n_train + n_validation must be at most {len(self)}, the sentences of {self.name}, got "
                f"{n_train} + {n_validation}."
            )
        order = np.random.default_rng(seed).permutation(len(self))
        validation, train = order[:n_validation], order[n_validation : n_validation + n_train]
        return self._part("train", train), self._part("validation", validation)

    def _part(self, role: str, indices: np.ndarray) -> "Corpus":
        return replace(
            self, name=f"{self.name} ({role})", sentences=tuple(self.sentences[i] for i in indices)
        )


def as_corpus(texts: Corpus | Iterable[str]) -> Corpus:
    """A corpus unchanged; texts as a corpus of all of them, including short ones and duplicates."""
    if isinstance(texts, Corpus):
        return texts
    sentences = tuple(texts)
    return Corpus("given texts", sentences, len(sentences), 0, 0, 0)


@checked
def load_corpus(
    source: Source,
    *,
    field: str = "text",
    split: str = "train",
    limit: PositiveInt | None = None,
    name: str | None = None,
) -> Corpus:
    r"""Read the sentences of a source, without those that are empty, short or duplicates.

    Parameters
    ----------
    source
        A sample: "wikipedia-sample", "news-sample", or one text in many languages, "messages-en",
        "messages-de" and so on. A file: text with one sentence per line, ``.jsonl``, or Leipzig
        (``id<TAB>sentence``, plain or in its ``.tar.gz``), each also compressed by gzip. A folder with a
        dataset, or the id of a dataset on the hub, ``name`` or ``name:config``. Or an iterable of sentences,
        or of rows with a text.
    field
        The field that holds the text, in JSON lines and datasets. A dataset's texts are split into sentences.
    split
        The split of a dataset.
    limit
        Maximum number of sentences.
    name
        Name of the corpus, by default that of the source.
    """
    if not field or (name is not None and not name.strip()):
        raise InputError("field and name must not be empty.")
    if name is None:
        name = os.fspath(source) if isinstance(source, str | os.PathLike) else "given sentences"
    with open_source(source, field, split) as sentences:
        corpus = _select_sentences(name, sentences, limit)
    if not corpus.sentences:
        raise InputError(f"source must have sentences of {MIN_WORDS} words or more, got {corpus.report()}.")
    return corpus


def _select_sentences(name: str, pieces: Iterable[str], limit: int | None) -> Corpus:
    sentences: dict[str, None] = {}  # an ordered set
    n_read = n_empty = n_short = n_duplicate = 0
    for piece in pieces:
        n_read += 1
        words = piece.split()
        sentence = " ".join(words)
        if not words:
            n_empty += 1
        elif len(words) < MIN_WORDS and len(_UNSPACED.findall(sentence)) < MIN_WORDS * _CHARACTERS:
            n_short += 1
        elif sentence in sentences:
            n_duplicate += 1
        else:
            sentences[sentence] = None
            if len(sentences) == limit:
                break
    return Corpus(name, tuple(sentences), n_read, n_empty, n_short, n_duplicate)
