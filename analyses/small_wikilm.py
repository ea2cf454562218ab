"""Train a small WikiLM for paper B's analyses, without a model hub.

The paper's first model is a decoder of whole words with adaptive input and softmax, ReLU and no gates
(Baevski and Auli 2019): 16 layers, 1,024 dimensions, 267,744 words, 100 million words of text. This one has 8
layers, 128 dimensions and the 8,000 most frequent words of a corpus, and reads its training part a few times;
the validation part is held out. It predicts far worse than the published one, but shows the results of the
analyses on this architecture.

The folder ``small-wikilm`` has a checkpoint in fairseq's format and its dictionary: pass
``--model OUT/small-wikilm/checkpoint.pt`` to other analyses. With the same ``--seed``, and at most as many
sentences as ``--val`` here, their sentences are held out here, too. An interrupted run resumes. The table has
the training and held-out losses, and the perplexity next to that of n-grams with Kneser-Ney smoothing.
"""

from __future__ import annotations

from typing import Annotated

import torch
from figures.paper_a import training_curves
from studies import Report, Study, run_study
from training.running import token_sequences, train
from training.tables import compare_with_ngrams, training_table
from training.wikilm import WikiLMConfig, WikiLMForCausalLM, word_dictionary, write_wikilm

from matlens.errors import Between, PositiveInt

NAME = "small_wikilm"
LONGEST = 128  # tokens that the model reads
TRAINED = 64  # tokens of a sentence that are trained on


def main(
    study: Study,
    report: Report,
    updates: PositiveInt = 1200,
    words: Annotated[int, Between(64)] = 8000,
    layers: PositiveInt = 8,
    width: Annotated[int, Between(16)] = 128,
) -> None:
    """Train the model, save it as fairseq would, and compare it with n-grams.

    Parameters
    ----------
    updates
        Updates of 32 sentences each.
    words
        Words of the vocabulary.
    layers
        Blocks.
    width
        Width of the stream, a multiple of 16.
    """
    training, held_out = study.parts
    dictionary = word_dictionary(training, n_words=words)
    tokenizer = dictionary.tokenizer(longest=LONGEST)
    parts = [token_sequences(tokenizer, part, longest=TRAINED) for part in (training, held_out)]
    n = len(dictionary)
    with torch.random.fork_rng():
        torch.manual_seed(study.seed)
        model = WikiLMForCausalLM(
            WikiLMConfig(
                vocab_size=n, d_model=width, num_layers=layers, attention_heads=width // 16,
                ffn_dim=4 * width, max_position_embeddings=LONGEST, cutoffs=[n // 4, n // 2],
                adaptive_factor=2.0, dropout=0.2,
            )
        )  # fmt: skip
    folder = report.out / "small-wikilm"
    run = train(model, parts[0], parts[1][:200], folder=folder, n_updates=updates, rate=2e-3, seed=study.seed)
    print(write_wikilm(model, dictionary, folder))
    perplexities = compare_with_ngrams(model, parts[0], parts[1])
    table = training_table(run, perplexities, model=NAME, corpus=held_out.name, n_held_out=200)
    unknown = sum(token == tokenizer.unk_token_id for tokens in parts[1] for token in tokens)
    origin = {
        "trained on": {"sentences": len(training), "fingerprint": training.fingerprint, "updates": updates},
        "minutes": run.seconds / 60, "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(), "seed": study.seed,
        "unknown": unknown / sum(len(tokens) - 1 for tokens in parts[1]),
    }  # fmt: skip
    report.write(NAME, table, origin, training_curves(table))
    for method, perplexity in perplexities.items():
        print(f"{method}: perplexity {perplexity.value:.1f} of {perplexity.n} held-out words")


if __name__ == "__main__":
    run_study(main, model=None)
