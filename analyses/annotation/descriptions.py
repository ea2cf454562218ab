"""What a token means, in a few words of WordNet, for annotators (paper B, appendix A.2).

WordNet is optional: ``nltk`` with its corpus ``wordnet``, or ``wn`` with an English lexicon.
"""

from __future__ import annotations

from collections.abc import Callable

from matlens.errors import InputError, checked

LONGEST = 120  # characters of a description
_HOW = (
    "Expected one of: pip install nltk && python -m nltk.downloader wordnet; or: pip install wn && python -m "
    "wn download oewn:2024. Sheets without descriptions need neither."
)


@checked
class WordNet:
    """Short descriptions of words: the first definition that WordNet has of a word or of its base form.

    Tokens of other words and pieces of words are looked up as they stand, so a description may be off the
    point; most pieces have none.

    Raises
    ------
    InputError
        No WordNet is installed; the message says how to get one.
    """

    def __init__(self) -> None:
        missing = []
        for name, open_wordnet in (("nltk", _nltk), ("wn", _wn)):
            try:
                self._define = open_wordnet()
            except (ImportError, LookupError) as error:
                missing.append(f"{name}: {str(error).strip().strip('*').strip().partition(chr(10))[0]}")
            else:
                self.source = name
                return
        raise InputError(f"No WordNet is installed ({'; '.join(missing)}). {_HOW}")

    def describe(self, token: str) -> str:
        """What a token means, in one line; nothing where it is no word of WordNet.

        Parameters
        ----------
        token
            A token as people see it, a leading space being ␣ or a space.
        """
        word = token.strip().removeprefix("␣")
        if len(word) < 2 or not word.isalpha():
            return ""
        definition = " ".join((self._define(word) or self._define(word.lower()) or "").split())
        return definition if len(definition) <= LONGEST else definition[: LONGEST - 1].rstrip() + "…"


def _nltk() -> Callable[[str], str | None]:
    from nltk.corpus import wordnet

    wordnet.ensure_loaded()  # a LookupError where the corpus is not there

    def define(word: str) -> str | None:
        return next((synset.definition() for synset in wordnet.synsets(word)), None)

    return define


def _wn() -> Callable[[str], str | None]:
    import wn
    from wn.morphy import Morphy

    try:
        plain = wn.Wordnet(lang="en")
    except wn.Error as error:
        raise LookupError(str(error)) from error
    lexicon = wn.Wordnet(lang="en", lemmatizer=Morphy(plain))

    def define(word: str) -> str | None:
        return next((synset.definition() for synset in lexicon.synsets(word)), None)

    return define
