"""Contexts that read or change a model, and detection of edits, hooks and patches for provenance.

One thread at a time uses a model: modules of a bridge store what belongs to the running pass.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils import parametrize

from matlens.errors import InputError, checked
from matlens.models.randomness import is_random
from matlens.models.registry import families
from matlens.models.weights import fast_checksum, plain_model, plain_name

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

# What the model's own code hangs on it when it is built; such hooks are part of the plain model.
_BUILDERS = (
    "transformer_lens.model_bridge.",
    "transformers.",
    "transformers_modules.",
    "accelerate.",
    "matlens.models.families.",
)
# Backward hooks change Jacobians, and what is trained through a model.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ADAPTER = ("disable_adapters", "active_adapters", "merged_adapters", "scaling")  # of PEFT
_SETTINGS = ("n_heads", "eps", "uses_rms_norm", "scale_attn_by_inverse_layer_idx")  # read at every pass
_CHANGING = ("dynamic", "longrope")  # rotary embeddings whose frequencies follow the length of a text
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
_WAIT = 60.0  # seconds that a thread waits for another one that uses the model
_PROCESS = secrets.token_hex(3)
_NUMBERS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_COUNT = itertools.count(1)


class EndOfPass(Exception):
    """Raised by a hook of `reading` or `changing`: ends the pass, and with it the context."""


@dataclass(eq=False)
class _Context:
    """The thread that entered a context of this library, and the functions that change the model."""

    changes: Callable[[], Sequence[str]] = tuple
    functions: frozenset[int] = frozenset()
    thread: threading.Thread = field(default_factory=threading.current_thread)


class Plain(NamedTuple):
    """Modules, buffers and settings of the plain model, from its configuration or as they were at first."""

    parts: dict[str, str]
    buffers: dict[str, Tensor]
    settings: dict[str, Any]


_CONTEXTS: WeakKeyDictionary[nn.Module, list[_Context]] = WeakKeyDictionary()  # around each model
_LEFT = threading.Condition()


def _is_free(inner: nn.Module) -> bool:
    """Whether no other thread that still runs uses a model."""
    threads = {context.thread for context in tuple(_CONTEXTS.get(inner, ()))} - {threading.current_thread()}
    return not any(thread.is_alive() for thread in threads)


@contextmanager
def _entered(model: TransformerBridge, context: _Context) -> Iterator[list[_Context]]:
    """Wait until no other thread uses a model, and use it. Any thread can leave: generators are closed so."""
    inner = model.original_model
    with _LEFT:
        if not _LEFT.wait_for(lambda: _is_free(inner), _WAIT):
            raise InputError(
                "This model is patched, controlled or read in another thread. Wait until it has left its "
                "context, or load the model a second time."
            )
        contexts = _CONTEXTS.setdefault(inner, [])
        contexts.append(context)
    try:
        yield contexts
    finally:
        with _LEFT:
            contexts.remove(context)
            _LEFT.notify_all()


def _check_thread(inner: nn.Module, args: Any) -> None:
    """A hook that refuses passes of other threads; a copy of the model has it too, and is free."""
    if not _is_free(inner):
        raise InputError(
            "Another thread uses this model, and the vectors of both would be mixed. Wait until it has "
            "ended, or load the model a second time."
        )


@contextmanager
def _used(
    model: TransformerBridge,
    hooks: Sequence[tuple[str, Callable[..., Any]]],
    functions: Iterable[Callable[..., Any]] = (),
    changes: Callable[[], Sequence[str]] = tuple,
) -> Iterator[None]:
    """Add hooks that are known to be this library's, and refuse passes of other threads."""
    known = (*functions, *(function for _, function in hooks))
    with _entered(model, _Context(changes, frozenset(map(id, known)))):
        handle = model.original_model.register_forward_pre_hook(_check_thread)
        try:
            with suppress(EndOfPass), model.hooks(fwd_hooks=list(hooks)):
                yield
        finally:
            handle.remove()


@contextmanager
def reading(model: TransformerBridge, hooks: Sequence[tuple[str, Callable[..., Any]]]) -> Iterator[None]:
    """Add hooks that read the passes of this thread and change nothing."""
    here = threading.current_thread()

    def of_this_thread(function: Callable[..., Any]) -> Callable[..., Any]:
        def read(value: Any, hook: Any) -> None:
            if threading.current_thread() is here:  # a pass of another may have been under way
                function(value, hook=hook)

        return read

    with _used(model, [(name, of_this_thread(function)) for name, function in hooks]):
        yield


@contextmanager
def changing(
    model: TransformerBridge,
    changes: Callable[[], Sequence[str]],
    hooks: Sequence[tuple[str, Callable[..., Any]]],
    functions: Iterable[Callable[..., Any]] = (),
) -> Iterator[None]:
    """Change a model by hooks that survive ``model.reset_hooks()``, and by further functions.

    ``changes`` names what is changed, whenever it is asked for. Raises InputError at the end if the hooks
    were removed.
    """
    own = {id(function) for _, function in hooks}
    with _used(model, hooks, functions, changes):
        points = model.hook_points()
        handles = [handle for point in points for handle in point.fwd_hooks if id(handle.user_hook) in own]
        for handle in handles:
            handle.is_permanent = True
        try:
            yield
            if any(handle.hook.id not in handle.hook.hooks_dict_ref() for handle in handles):
                raise InputError(
                    "The hooks of this context were removed before it ended, as by model.reset_hooks("
                    "including_permanent=True): what ran since then was not the changed model."
                )
        finally:
            for handle in handles:
                handle.is_permanent = False  # so that they can be removed again


@checked
def changes_of(model: TransformerBridge) -> tuple[str, ...]:
    """Name everything that is changed in a model at the moment; ``()`` for the plain model.

    Replacements and coefficients by their values; hooks and replaced ``forward`` methods by the function;
    modules, buffers and PEFT adapters that differ from the configuration; dropout.
    """
    with _entered(model, _Context()) as contexts:
        ours = sorted(change for context in contexts for change in context.changes())
        functions = frozenset({id(_check_thread)}).union(*(context.functions for context in contexts))
        return (*ours, *_foreign_changes(model, functions))


@contextmanager
def unchanged(model: TransformerBridge, changes: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Raise InputError if a model gets other changes than these inside the context.

    Yields a quick check for between batches, which looks further only at another number of hooks: to look at
    everything takes longer than a batch on a GPU.
    """

    def count() -> int:
        return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())

    def check() -> None:
        found = changes_of(model)
        if found != tuple(changes):
            raise InputError(
                f"The model was changed while it was read: it had {describe_changes(changes)} at first, and "
                f"{describe_changes(found)} later. Read a model to the end before a context around it is "
                "entered or left, or a hook is added."
            )

    def check_hooks() -> None:
        if count() != n_hooks:
            check()

    check()
    n_hooks = count()
    yield check_hooks
    check()


@checked
def describe_changes(changes: Sequence[str] | None) -> str:
    """Changes as part of a sentence, a few of them by name."""
    if not changes:
        return "nothing replaced or hooked"
    more = f" and {len(changes) - 3} more changes" if len(changes) > 3 else ""
    return "; ".join(changes[:3]) + more


def function_name(function: Any) -> str:
    """A function by its name and a number that no other function has, in this process or another."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    parts = (function.__func__, function.__self__) if isinstance(function, MethodType) else (function,)
    try:
        number = ".".join(str(_NUMBERS.setdefault(part, next(_COUNT))) for part in parts)
    except TypeError:  # it cannot be hashed, or referred to weakly
        number = f"{id(function)}.0"
    process = f"{_PROCESS}-{os.getpid()}"
    return f"{name!r} of {getattr(function, '__module__', None)} (number {number} of process {process})"


def has_active_dropout(model: TransformerBridge) -> bool:
    """True if dropout or noise is on in any module, so that the vectors differ at every pass."""
    return is_random(module for _, module in _modules(model))


def _foreign_changes(model: TransformerBridge, ours: frozenset[int]) -> Iterator[str]:
    modules = list(_modules(model))
    known = ours.union(id(repair.hook) for family in families() for repair in family.repairs(model))

    def is_foreign(function: Any) -> bool:
        return id(function) not in known and not _is_builders(function)

    for name, module in modules:
        # Not getattr, which is slow for missing names of modules.
        of_points, own = set(), vars(module)
        # A hook point of TransformerLens has lists of its own.
        for handle in (*own.get("fwd_hooks", ()), *own.get("bwd_hooks", ())):
            of_points.add(handle.hook.id)
            if is_foreign(handle.user_hook):
                yield f"a hook {function_name(handle.user_hook)} at {name}"
        for kind in _HOOKS:
            for number, function in own[kind].items():
                if number not in of_points and is_foreign(function):
                    yield f"one of {kind}, {function_name(function)}, at {name}"
        if "parametrizations" in module._modules and parametrize.is_parametrized(module):
            yield f"a parametrization of {name}"
        forward = own.get("forward")
        if forward is not None and is_foreign(forward) and not _only_moves(module, forward):
            yield f"another forward {function_name(forward)} of {name}"
    for function in _replaced_methods(modules):
        yield f"another forward {function_name(function)} of a class"
    for kind in _HOOKS:
        for function in getattr(torch_modules, f"_global{kind}").values():
            yield f"a hook {function_name(function)} at all modules"
    parts, buffers, settings = remember_plain(model)
    present = _parts_of(model.original_model)
    for place, part in present.items():
        if parts.get(place, part) != part:
            yield f"another module {part} at {place or 'the top'}"
    yield from (f"no module at {place}" for place in parts if place not in present)
    for name, values in _buffers(model.original_model):
        if name in buffers and not _agree(values.detach().cpu(), buffers[name]):
            yield f"other values in the buffer {name} ({fast_checksum([(name, values.cpu())])[:16]})"
    for name, value in _settings(model).items():
        if value != settings[name]:
            yield f"the setting {name}={value!r} of the bridge, which was {settings[name]!r}"
    if has_active_dropout(model):
        yield "training mode, in which dropout makes every pass another"


def remember_plain(model: TransformerBridge) -> Plain:
    """The baseline of `changes_of`, stored at the first call."""
    if not hasattr(model, "matlens_plain"):
        # Quantization puts in other modules than the configuration's when the weights are read.
        quantized = getattr(model.original_model.config, "quantization_config", None) is not None
        plain = None if quantized else plain_model(model)
        parts = _parts_of(model.original_model if plain is None else plain)
        # An attribute, so that a copy of the bridge has it too.
        model.matlens_plain = Plain(parts, _plain_buffers(model, plain), _settings(model))
    return model.matlens_plain


def _settings(model: TransformerBridge) -> dict[str, Any]:
    return {name: getattr(model.cfg, name, None) for name in _SETTINGS}


def _parts_of(inner: nn.Module) -> dict[str, str]:
    """The class and settings of every module by its place, without those of bridges around them."""
    return {
        plain_name(path): _described(module)
        for path, module in inner.named_modules(remove_duplicate=False)
        if not type(module).__module__.startswith("transformer_lens.")
    }


def _described(module: nn.Module) -> str:
    kind = type(module)
    builtin = kind.__module__.startswith(("torch.", *_BUILDERS))
    name = f"{kind.__module__}.{kind.__qualname__}" if builtin else function_name(kind)
    settings = [(key, value) for key, value in vars(module).items() if type(value) in (float, str)]
    if isinstance(getattr(kind, _ADAPTER[0], None), property):
        settings += [(key, getattr(module, key, None)) for key in _ADAPTER]
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in sorted(settings) if key[0] != '_')})"


def _buffers(inner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a checkpoint does not hold, by their places in the model without a bridge."""
    for path, module in inner.named_modules():
        names = module._non_persistent_buffers_set
        if names and not any(kind in str(vars(module).get("rope_type")) for kind in _CHANGING):
            place = plain_name(path)
            for name in sorted(names):
                values = module._buffers.get(name)
                if values is not None and not values.is_meta and values.dtype != torch.bool:
                    yield f"{place}.{name}" if place else name, values


def _plain_buffers(model: TransformerBridge, plain: Any) -> dict[str, Tensor]:
    buffers = {name: values.detach().cpu().clone() for name, values in _buffers(model.original_model)}
    for path, module in plain.named_modules() if hasattr(plain, "_init_weights") else ():
        names = [name for name in module._non_persistent_buffers_set if f"{path}.{name}" in buffers]
        if not names:
            continue
        for name in names:
            module._buffers[name] = torch.full_like(module._buffers[name], -1, device="cpu")
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                plain._init_weights(module)
        except Exception:  # code that came with a model can ask for anything
            continue
        for name in names:
            made = module._buffers[name]
            if made.shape == buffers[f"{path}.{name}"].shape and not bool((made == -1).all()):
                buffers[f"{path}.{name}"] = made
    return buffers


def _agree(values: Tensor, plain: Tensor) -> bool:
    """Whether values are the same but for rounding to another precision, or on another device."""
    tolerance = _TOLERANCE.get(values.dtype, 0.0)
    if values.ndim == 2:
        values = values[: len(plain)]  # tables of positions grow in passes longer than the context
    return values.shape == plain.shape and torch.allclose(
        values.double(), plain.double(), rtol=tolerance, atol=0
    )


def _modules(model: TransformerBridge) -> Iterator[tuple[str, nn.Module]]:
    """Every module of a bridge and of the model in it, once."""
    seen: set[nn.Module] = set()
    yield from ((place or "the bridge", module) for place, module in model.named_modules(seen))
    for point in model.hook_points():
        if point not in seen:
            seen.add(point)
            yield point.name or "a hook point", point
    yield from model.original_model.named_modules(seen, "original_model")


def _is_builders(function: Any) -> bool:
    module = str(getattr(function, "__module__", ""))
    return module.startswith(_BUILDERS)


def _only_moves(module: nn.Module, forward: Any) -> bool:
    """Whether it is the class's forward, possibly wrapped by accelerate (`device_map`)."""
    hook, plain = vars(module).get("_hf_hook"), vars(module).get("_old_forward")
    by_accelerate = (getattr(forward, "func", None), type(hook))
    return (
        all(getattr(part, "__module__", None) == "accelerate.hooks" for part in by_accelerate)
        and type(hook).__name__ == "AlignDevicesHook"
        and getattr(plain, "__func__", None) is type(module).forward
    )


def _replaced_methods(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[Callable[..., Any]]:
    """Replacements of a module class's ``forward`` by another package."""
    for kind in sorted({type(module) for _, module in modules}, key=lambda kind: kind.__qualname__):
        owner = next(base for base in kind.__mro__ if "forward" in vars(base))
        forward = vars(owner)["forward"]
        package = str(getattr(forward, "__module__", "")).partition(".")[0]
        same = package == owner.__module__.partition(".")[0]
        if not same and package != "torch" and not _is_builders(forward):
            yield forward
