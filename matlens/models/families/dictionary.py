"""fairseq's dictionaries, as tokenizers of transformers."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matlens.errors import InputError, PositiveInt, checked

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DICTIONARY = "dict.txt"
"""Name of the file of a dictionary, next to the checkpoint."""
BOS, PAD, EOS, UNK = SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
"""The words that every dictionary begins with; its file does not list them."""
# WikiText writes 'well @-@ known', '1 @,@ 000' and '3 @.@ 5' for what stands between letters or digits.
_JOINERS = ((r"(?<=\w)-(?=\w)", " @-@ "), (r"(?<=\d),(?=\d)", " @,@ "), (r"(?<=\d)\.(?=\d)", " @.@ "))
_WORD = r"@[-,.]@|<unk>|(?<=\w)'\w+|^'(?:s|t|re|ve|ll|d|m)$|\w+|[^\w\s]"
_LINE = re.compile(r"(.+) ([0-9]{1,18})( #fairseq:overwrite)?\s*")
_ENDED = re.compile(r"\w+\.")
_SELDOM = 100  # "album." ends a sentence if "album" is this many times more frequent


@dataclass(frozen=True)
class WordDictionary:
    """Words by number, the special ones first, and how often each was seen."""

    words: tuple[str, ...]
    counts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def read(cls, path: Path) -> WordDictionary:
        """Read a ``dict.txt``: a word and its count on each line."""
        words, counts = list(SPECIAL), [0] * len(SPECIAL)
        ids = {word: number for number, word in enumerate(words)}
        text = path.read_bytes().decode().rstrip()
        for row, line in enumerate(io.StringIO(text), start=1):  # not splitlines: words hold U+2028
            parts = _LINE.fullmatch(line)
            if parts is None or (parts[1] in ids and not parts[3]):
                raise InputError(
                    f"Line {row} of {path} must be another word, a space and its count, got {line[:60]!r}."
                )
            if parts[1] in ids:  # the earlier keeps its number, under a name that no text holds
                earlier = ids[parts[1]]
                words[earlier] = f"<overwritten {earlier}>"
            ids[parts[1]] = len(words)
            words.append(parts[1])
            counts.append(int(parts[2]))
        return cls(tuple(words), tuple(counts))

    def tokenizer(self, *, longest: PositiveInt | None = None) -> Any:
        """A tokenizer of transformers that splits text as WikiText is split, with ``</s>`` in front.

        ``well @-@ known``, ``1 @,@ 000``, ``it 's``. Between spaces, words of the dictionary stay whole
        (``U.S.``, ``...``), but not a word with a full stop that is seen a hundred times as often without.
        """
        from tokenizers import Tokenizer, models, processors
        from transformers import PreTrainedTokenizerFast

        ids = {word: number for number, word in enumerate(self.words)}
        tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNK))
        joiners = [pair for pair in _JOINERS if pair[1].strip() in ids]
        _take_apart(tokenizer, joiners, self._whole())
        ends = [(EOS, ids[EOS])]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{EOS} $A", special_tokens=ends)
        special: dict[str, Any] = {"bos_token": EOS, "eos_token": EOS, "unk_token": UNK, "pad_token": PAD}
        special["name_or_path"] = ""  # which bridges ask for
        if longest is not None:
            special["model_max_length"] = longest
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="right", **special)

    def _whole(self) -> list[str]:
        """Words that are not split, although they contain punctuation."""
        count_of = dict(zip(self.words, self.counts, strict=True))
        mixed = [word for word in self.words[len(SPECIAL) :] if not word.isalnum()]
        return [
            word
            for word, parts in zip(mixed, words_of(mixed), strict=True)
            if len(parts) > 1
            and not any(map(str.isspace, word))
            and not (_ENDED.fullmatch(word) and count_of[word] * _SELDOM < count_of.get(word[:-1], 0))
        ]


def _take_apart(
    tokenizer: Tokenizer, joiners: Sequence[tuple[str, str]] = _JOINERS, whole: Sequence[str] = ()
) -> None:
    from tokenizers import Regex, normalizers, pre_tokenizers

    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(pattern), joiner) for pattern, joiner in joiners]
    )
    by_first: dict[str, list[str]] = {}
    for word in whole:
        by_first.setdefault(word[0], []).append(re.escape(word[1:]))
    known = "|".join(f"{re.escape(first)}(?:{'|'.join(rest)})" for first, rest in by_first.items())
    pattern = rf"^\w+$|^(?:{known})$|{_WORD}" if known else _WORD
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(pattern), "isolated")]
    )


@checked
def words_of(texts: Sequence[str]) -> list[list[str]]:
    """Split texts into words and punctuation, like the tokenizer of a dictionary."""
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({UNK: 0}, unk_token=UNK))
    _take_apart(tokenizer)
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    assert normalizer is not None
    assert splitter is not None
    return [[word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))] for text in texts]
