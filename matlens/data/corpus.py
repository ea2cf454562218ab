"""Where sentences come from, and which of them count.

A corpus is read once, lazily, from one of the bundled samples, a file (plain text, JSON lines, Leipzig), a
dataset or what the user iterates over; sentences that are empty, too short or already seen are counted and
left out, so that "9,000 sentences" means nine thousand different ones.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import numpy as np

from matlens.data.sources import Source, open_source
from matlens.data.texts import shown
from matlens.errors import Between, InputError, PositiveInt, Seed, checked, printable
from matlens.io.bounds import CORPUS, SENTENCES

MIN_WORDS = 5
"""A sentence of fewer words, counted between spaces, gives a model too little context to count.

Scripts that put no spaces between words are counted by their characters, two of which are taken for a word.
"""
# Thai, Lao, Burmese, Khmer, and what Japanese and Chinese are written in.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
_CHARACTERS = 2  # of such a script that are taken for a word


@checked
@dataclass(frozen=True)
class Corpus:
    """Sentences that passed the checks, in the source's order, and what was left out.

    Attributes
    ----------
    name
        Name of the source as the user gave it; a part made by `split` adds its role.
    sentences
        The sentences, with white space normalised.
    n_read, n_empty, n_short, n_duplicate
        Number of sentences that the source gave, and numbers of those that were left out: empty, shorter
        than `MIN_WORDS` words, or already there. The parts that `split` makes keep the numbers of the whole.
    """

    name: str
    sentences: tuple[str, ...]
    n_read: int
    n_empty: int
    n_short: int
    n_duplicate: int

    def __len__(self) -> int:
        return len(self.sentences)

    @property
    def n_tokens(self) -> int:
        """About how many tokens the sentences have, at four characters a token."""
        return sum(map(len, self.sentences)) // 4

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that change with any sentence and with their order."""
        return hashlib.sha256("\n".join(self.sentences).encode()).hexdigest()[:16]

    def report(self) -> str:
        """One line that says how many sentences there are and how many were left out."""
        return (
            f"{len(self):,} sentences of {printable(self.name, most=200)} (read {self.n_read:,}; left out: "
            f"{self.n_empty:,} empty, {self.n_short:,} shorter than {MIN_WORDS} words, "
            f"{self.n_duplicate:,} duplicates)"
        )

    def split(
        self, *, n_train: PositiveInt, n_validation: Annotated[int, Between(2)], seed: Seed = 0
    ) -> tuple["Corpus", "Corpus"]:
        """Draw two parts at random that share no sentence.

        With one seed the validation part stays the same whatever `n_train` is, and a larger
        training part begins with the smaller one, so sizes can be compared.

        Parameters
        ----------
        n_train, n_validation
            Numbers of sentences of the training and of the validation part (a variance needs two).
        seed
            Seed of the draw.

        Returns
        -------
        tuple of Corpus
            The training and the validation part, each in the order drawn.
        """
        if n_train + n_validation > len(self):
            raise InputError(
                f"{n_train}+{n_validation} sentences (training+validation) were asked for, and {self.name} "
                f"has {len(self)}. Ask for fewer, or give a larger corpus."
            )
        order = np.random.default_rng(seed).permutation(len(self))
        validation, train = order[:n_validation], order[n_validation : n_validation + n_train]
        return self._part("train", train), self._part("validation", validation)

    def _part(self, role: str, indices: np.ndarray) -> "Corpus":
        return replace(
            self, name=f"{self.name} ({role})", sentences=tuple(self.sentences[i] for i in indices)
        )


def as_corpus(texts: Corpus | Iterable[str]) -> Corpus:
    """A corpus as it is; texts as a corpus of all of them, short and repeated ones included."""
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
    r"""Read the sentences of a source and leave out those that are empty, short or repeated.

    Parameters
    ----------
    source
        "wikipedia-sample", "news-sample", or one text in many languages, "messages-en", "messages-de" and so
        on; a file: text with one sentence a line, ``.jsonl``, Leipzig (``id<TAB>sentence``, plain or in its
        ``.tar.gz``), each also packed by gzip, bz2, xz or zip; a folder with a dataset; the id of a dataset,
        ``name`` or ``name:config``; or the sentences themselves: whatever gives them one by one, or rows of
        which a field holds a text, such as a dataset.
    field
        Name of the field that holds the text, in JSON lines and datasets. A dataset's texts are split into
        sentences.
    split
        Name of the split to read, in datasets.
    limit
        Number of sentences after which reading stops; by default all are read. A packed file is checked to
        its end all the same.
    name
        What the corpus is called, by default what the source is.

    Returns
    -------
    Corpus
        The sentences, and how many were left out.

    Raises
    ------
    InputError
        The source cannot be found or read, it is past a bound of `matlens.io.bounds`, or no sentence
        of it is left.
    """
    if not field or (name is not None and not name.strip()):
        raise InputError("field and name must not be empty.")
    if name is None:
        name = os.fspath(source) if isinstance(source, str | os.PathLike) else "given sentences"
    with open_source(source, field, split) as sentences:
        corpus = _select_sentences(name, sentences, limit)
    if not corpus.sentences:
        raise InputError(f"There is no sentence to use: {corpus.report()}.")
    return corpus


def _select_sentences(name: str, pieces: Iterable[str], limit: int | None) -> Corpus:
    kept: dict[str, None] = {}  # a set that remembers the order
    n_read = n_empty = n_short = n_duplicate = n_characters = 0
    most_read, most_characters = SENTENCES.limit, CORPUS.limit
    for piece in pieces:
        n_read += 1
        if n_read > most_read:
            raise SENTENCES.error(shown(name))
        words = piece.split()
        sentence = " ".join(words)
        if not words:
            n_empty += 1
        elif len(words) < MIN_WORDS and len(_UNSPACED.findall(sentence)) < MIN_WORDS * _CHARACTERS:
            n_short += 1
        elif sentence in kept:
            n_duplicate += 1
        else:
            kept[sentence] = None
            n_characters += len(sentence)
            if n_characters > most_characters:
                raise CORPUS.error(shown(name))
            if len(kept) == limit:
                break
    return Corpus(name, tuple(kept), n_read, n_empty, n_short, n_duplicate)
