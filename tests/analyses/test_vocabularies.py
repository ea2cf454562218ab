"""Vocabularies of a corpus: counted by hand, and read back."""

from __future__ import annotations

from conftest import make_sentences
from training.running import token_sequences
from training.wikilm import word_dictionary


def test_sentences_become_tokens_between_two_ends():
    corpus = make_sentences()
    dictionary = word_dictionary(corpus, n_words=20)
    sequences = token_sequences(dictionary.tokenizer(), corpus, longest=9)
    for sentence, tokens in zip(corpus.sentences, sequences, strict=True):
        known = [word if word in dictionary.words else "<unk>" for word in sentence.split()]
        assert [dictionary.words[token] for token in tokens] == ["</s>", *known, "</s>"][:9]
