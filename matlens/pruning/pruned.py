"""The job: choose blocks, leave them out, fold maps in their place, and build a plain model of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from matlens.data.examples import Examples
from matlens.errors import Between, InputError, NonNegative, Seed, check_choice, checked
from matlens.models.identity import ModelIdentity, Provenance
from matlens.pruning.calibration import Calibration
from matlens.pruning.choices import Choice, Method, usual_penalty
from matlens.pruning.healing import heal as train_folded
from matlens.pruning.spans import parse_blocks, spans_of

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_MOST_HEALED = 10**9  # tokens


@dataclass(frozen=True)
class Pruned:
    """A plain Hugging Face model with blocks left out, and how it was made.

    Attributes
    ----------
    model
        A model of transformers' own, to be run, saved or trained like any other.
    tokenizer
        The tokenizer of the whole model.
    blocks
        Numbers, in the whole model, of the blocks that were left out.
    method
        What became of the matrix before each span of them.
    provenance
        The whole model, the calibration text, and the settings.
    attention
        Numbers of the blocks whose attention writes nothing.
    """

    model: Any
    tokenizer: Any
    blocks: tuple[int, ...]
    method: Method
    provenance: Provenance
    attention: tuple[int, ...] = ()

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Runs of blocks that were left out, each as its first block and the one after its last."""
        return spans_of(self.blocks)


@checked
def prune(
    model: TransformerBridge,
    windows: Examples,
    blocks: int | Sequence[int],
    *,
    method: str = Method.chain,
    choice: str = Choice.greedy,
    penalty: NonNegative | None = None,
    heal: Annotated[int, Between(0, _MOST_HEALED)] = 0,
    seed: Seed = 0,
    progress: bool = True,
) -> Pruned:
    """Leave blocks out of a model and fold maps into the weights before them (definitions, section 11).

    Of several spans each map is fitted on the stream of the model that is pruned so far.

    Parameters
    ----------
    model
        A decoder whose FFNs write into the stream as it is: the kinds of GPT-2, Llama, GPT-NeoX and GPT-J.
        By ``out`` blocks are left out of others too, such as mixtures of experts.
    windows
        Calibration text, see `matlens.data.make_windows`; windows that are shorter than the first are not
        read. A refitted matrix needs several times as many tokens as it has columns.
    blocks
        How many blocks to leave out, or which: numbers from 1 on, since the map needs a block before it.
    method
        What becomes of the matrix before a span: ``chain``, ``refit``, ``replaceme``, ``magnitude`` or
        ``out``, see `Method`.
    choice
        How blocks are chosen of which only the number is given: ``greedy``, ``loss``, ``angle`` or ``r2``,
        see `Choice`; on the first 2,048 tokens of the calibration text, by ``r2`` on four times as many as
        the stream has coordinates where that is more.
    penalty
        How much the folded map is held near what the model has; by default 0.3 for
        ``chain``, 0.1 for ``refit`` and 0 otherwise.
    heal
        On how many tokens of the text, at least, the changed matrices are then trained towards what the
        whole model says, in updates of some 1,024; by default not at all. It takes some five times as long
        as reading so many tokens.
    seed
        Seed of the order in which texts are read then.
    progress
        Whether to show bars.

    Raises
    ------
    InputError
        The model cannot be folded into, and the message says why; or blocks, text or settings are not usable.
    """
    method = Method(check_choice(method, Method, "method"))
    choice = Choice(check_choice(choice, Choice, "choice"))
    wanted = parse_blocks(blocks, model.cfg.n_layers)
    if heal and (method == Method.out or not wanted):
        raise InputError(
            "There is no folded matrix to heal. Expected blocks to leave out, and another method than out."
        )
    calibration = Calibration.run(model, windows, fold=method != Method.out, progress=progress)
    gone = calibration.choose(wanted, choice, progress=progress) if isinstance(wanted, int) else wanted
    penalty = usual_penalty(method) if penalty is None else penalty
    details = _settings(calibration, "blocks_left_out", gone, method, penalty)
    details["choice"] = choice.value if isinstance(wanted, int) else "given"
    made = calibration.without(gone, method, penalty, progress=progress)
    if heal:
        healed = train_folded(calibration.streams, made, gone, method, heal, seed=seed, progress=progress)
        details["healed"] = {**healed._asdict(), "seed": seed}
    provenance = Provenance(ModelIdentity.from_model(model), data=windows.provenance, details=details)
    return Pruned(made, model.tokenizer, gone, method, provenance)


@checked
def prune_attention(
    model: TransformerBridge,
    windows: Examples,
    attention: int | Sequence[int],
    *,
    method: str = Method.refit,
    penalty: NonNegative | None = None,
    progress: bool = True,
) -> Pruned:
    """Leave the attention of some blocks out, and fold a map in its place into the FFN before it.

    Its output matrix becomes zero. A plain model has no block without attention, so what is left of it is
    still computed and cached: neither time nor memory is saved until an engine skips it.

    Parameters
    ----------
    model, windows, method, penalty, progress
        See `prune`; there is no ``chain``. A map can be folded where the FFN reads what attention adds:
        GPT-2, Llama and their like.
    attention
        How many, those without which the loss on the first 2,048 tokens rises least, each for itself; or the
        numbers of the blocks, from 1 on.

    Raises
    ------
    InputError
        The model cannot be folded into, such as where attention and FFN stand side by side; or blocks, text
        or settings are not usable.
    """
    method = Method(check_choice(method, Method, "method"))
    if method == Method.chain:
        others = ", ".join(known for known in Method if known != Method.chain)
        raise InputError(
            "The method chain refits the FFNs behind blocks that are left out, and is not there for "
            f"attention alone. Expected one of {others}."
        )
    wanted = parse_blocks(attention, model.cfg.n_layers, "attentions")
    penalty = usual_penalty(method) if penalty is None else penalty
    calibration = Calibration.run(model, windows, fold=method != Method.out, progress=progress)
    made, layers = calibration.without_attention(wanted, method, penalty, progress=progress)
    details = _settings(calibration, "attention_left_out", layers, method, penalty)
    details["choice"] = "loss" if isinstance(wanted, int) else "given"
    provenance = Provenance(ModelIdentity.from_model(model), data=windows.provenance, details=details)
    return Pruned(made, model.tokenizer, (), method, provenance, layers)


def _settings(
    calibration: Calibration, what: str, gone: Sequence[int], method: Method, penalty: float
) -> dict[str, Any]:
    n_tokens = calibration.streams.tokens.numel()
    return {what: list(gone), "method": method.value, "penalty": penalty, "n_tokens": n_tokens}
