"""Detects edits, hooks and patches of a model, for provenance.

Read-only hooks of this library are ignored.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils import parametrize

from matlens.errors import InputError, checked
from matlens.models.hooks import LOCK, record_of
from matlens.models.registry import families
from matlens.models.weights import is_quantized, modules_below, plain_model, plain_place

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
_HOOKS = {
    "forward hook": "_forward_hooks",
    "forward pre-hook": "_forward_pre_hooks",
    "backward hook": "_backward_hooks",  # which change Jacobians, and what is trained through a model
    "backward pre-hook": "_backward_pre_hooks",
}
_CHANGING = ("dynamic", "longrope")  # rotary embeddings whose frequencies follow the length of a text
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
_READ = "matlens_settings"  # an attribute, so that a copy of the bridge has it too
_SETTINGS = (
    "n_heads", "n_key_value_heads", "d_head", "d_model", "n_layers", "eps", "act_fn", "attention_dir",
    "positional_embedding_type", "rotary_adjacent_pairs", "rotary_interleaved_cos_sin", "gated_q_proj",
    "qk_norm_after_rope", "rmsnorm_uses_offset", "uses_rms_norm", "parallel_attn_mlp",
    "scale_attn_by_inverse_layer_idx", "attn_scale",
)  # fmt: skip
_PROCESS = secrets.token_hex(3)
_NUMBERS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_COUNT = itertools.count(1)


class _Plain(NamedTuple):
    """Modules and buffers that a model's configuration creates, by name."""

    parts: dict[str, str]
    buffers: dict[str, Tensor]


_PLAIN: WeakKeyDictionary[Any, _Plain] = WeakKeyDictionary()


@checked
def changes_of(model: TransformerBridge) -> tuple[str, ...]:
    """Name everything that is changed in a model at the moment; ``()`` for the plain model.

    Replacements and coefficients of this library by their values; hooks of others, even if they only read,
    and replaced ``forward`` methods by the function; modules and buffers other than the configuration makes;
    changed settings of the bridge; PEFT adapters and whether they are on; dropout that is on.
    """
    with LOCK:  # lists of hooks must not change while they are read
        present = record_of(model).present
        hung = frozenset[int]().union(*(presence.functions for presence in present))
        ours = sorted(change for presence in present for change in presence.changes())
        return (*ours, *_foreign_changes(model, hung))


def remember_as_loaded(model: TransformerBridge) -> None:
    """Take the modules that a model has now, as it was loaded, for those of the plain model."""
    _PLAIN[model] = _Plain(_parts_of(model.original_model), _plain(model).buffers)
    remember_settings(model)


def remember_settings(model: TransformerBridge) -> None:
    """Take the settings that a bridge has now for its own."""
    setattr(model, _READ, _settings(model))


def _plain(model: TransformerBridge) -> _Plain:
    if model not in _PLAIN:
        plain = None if is_quantized(model) else plain_model(model)
        parts = _parts_of(model.original_model if plain is None else plain)
        _PLAIN[model] = _Plain(parts, _plain_buffers(model, plain))
    return _PLAIN[model]


def check_eval_mode(model: TransformerBridge) -> None:
    """Raise InputError for a model in training mode with dropout."""
    if _drops_out(model, _modules(model)):
        raise InputError(
            f"{model.cfg.model_name} must be in eval mode, got training mode with dropout. "
            "Call model.eval() first."
        )


@contextmanager
def unchanged(model: TransformerBridge, changes: Sequence[str]) -> Iterator[None]:
    """Refuse a pass during which the model is not changed as it was said to be."""
    record = record_of(model)
    before, found = record.changed_elsewhere(), changes_of(model)
    if found == tuple(changes):
        yield
        found = changes_of(model)
    if found != tuple(changes) or record.changed_elsewhere() != before:
        raise InputError(
            f"The model was changed while it was read: it had {describe_changes(changes)} at first, and "
            f"{describe_changes(found)} later. Read a model to the end before a context around it is "
            "entered or left, or a hook is added."
        )


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
        with LOCK:
            number = ".".join(str(_NUMBERS.setdefault(part, next(_COUNT))) for part in parts)
    except TypeError:  # it cannot be hashed, or referred to weakly
        number = f"{id(function)}.0"
    process = f"{_PROCESS}-{os.getpid()}"
    return f"{name!r} of {getattr(function, '__module__', None)} (number {number} of process {process})"


def _foreign_changes(model: TransformerBridge, ours: frozenset[int]) -> Iterator[str]:
    """Hooks that somebody else has hung on a model, and other ways to change what its modules do."""
    modules = list(_modules(model))
    repairs = (repair.hook for family in families() for repair in family.repairs(model))
    ours = ours.union(map(id, repairs))
    for name, module in modules:
        # Not getattr, which is slow for missing names of modules.
        of_points, own = set(), vars(module)
        # A hook point of TransformerLens has lists of its own.
        for handle in (*own.get("fwd_hooks", ()), *own.get("bwd_hooks", ())):
            of_points.add(handle.hook.id)
            if id(handle.user_hook) not in ours and not _is_builders(handle.user_hook):
                yield f"a hook {function_name(handle.user_hook)} at {name}"
        for kind, of_kind in _HOOKS.items():
            for number, function in own[of_kind].items():
                if number not in of_points and id(function) not in ours and not _is_builders(function):
                    yield f"a {kind} {function_name(function)} at {name}"
        if "parametrizations" in module._modules and parametrize.is_parametrized(module):
            yield f"a parametrization of {name}"
        forward = own.get("forward")
        if forward is None or id(forward) in ours or _is_builders(forward):
            continue
        if not _only_moves(module, forward):
            yield f"another forward {function_name(forward)} of {name}"
    for function in _replaced_methods(modules):
        yield f"another forward {function_name(function)} of a class"
    everywhere = (getattr(torch_modules, f"_global{of_kind}") for of_kind in _HOOKS.values())
    for function in itertools.chain(*(hooks.values() for hooks in everywhere)):
        yield f"a hook {function_name(function)} at all modules"
    yield from _other_parts(model)
    yield from _other_constants(model)
    yield from _adapters(module for _, module in modules)
    if _drops_out(model, modules):
        yield "training mode, in which dropout makes every pass another"


def _other_parts(model: TransformerBridge) -> Iterator[str]:
    """Modules that are not those that the model's configuration makes."""
    plain, now = _plain(model).parts, _parts_of(model.original_model)
    for place, part in now.items():
        if plain.get(place, part) != part:
            yield f"another module {part} at {place or 'the top'}"
    yield from (f"no module at {place}" for place in plain if place not in now)


def _parts_of(inner: nn.Module) -> dict[str, str]:
    """The class and settings of every module by its place, without those of bridges around them."""
    return {
        plain_place(path): _described(module)
        for path, module in modules_below("", inner, None)
        if not type(module).__module__.startswith("transformer_lens.")
    }


def _described(module: nn.Module) -> str:
    kind = type(module)
    builtin = kind.__module__.startswith(("torch.", *_BUILDERS))
    name = f"{kind.__module__}.{kind.__qualname__}" if builtin else function_name(kind)
    settings = sorted((key, value) for key, value in vars(module).items() if type(value) in (float, str))
    return f"{name}({', '.join(f'{key}={value!r:.60}' for key, value in settings if key[0] != '_')})"


def _other_constants(model: TransformerBridge) -> Iterator[str]:
    """Name buffers with other values than the configuration gives, and settings that were changed."""
    for name, values in _buffers(model.original_model):
        plain = _plain(model).buffers.get(name)
        if plain is not None and not _agree(values, plain):
            flat = values.detach().double().flatten().cpu()
            total = flat @ torch.arange(1, len(flat) + 1, dtype=torch.float64)
            dtype = str(values.dtype).removeprefix("torch.")
            yield f"other numbers in the buffer {name} ({len(flat)} of {dtype}, in all {total:.17g})"
    if not hasattr(model, _READ):
        remember_settings(model)
    kept, now = getattr(model, _READ), _settings(model)
    for name in _SETTINGS:
        if now[name] != kept[name]:
            yield f"the setting {name}={now[name]!r:.60} of the bridge, which was {kept[name]!r:.60}"


def _settings(model: TransformerBridge) -> dict[str, Any]:
    return {name: getattr(model.cfg, name, None) for name in _SETTINGS}


def _buffers(inner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a checkpoint does not hold, by their places in the model without a bridge."""
    for path, module in modules_below("", inner, set()):
        names = module._non_persistent_buffers_set
        if names and not any(kind in str(vars(module).get("rope_type")) for kind in _CHANGING):
            place = plain_place(path)
            for name in sorted(names):
                values = module._buffers.get(name)
                if values is not None and not values.is_meta and values.dtype != torch.bool:
                    yield f"{place}.{name}" if place else name, values


def _plain_buffers(model: TransformerBridge, plain: Any) -> dict[str, Tensor]:
    """Buffers that the configuration creates; current values if it cannot create them."""
    present = {name: values.detach().cpu() for name, values in _buffers(model.original_model)}
    made: dict[str, Tensor] = {}
    for path, module in plain.named_modules() if hasattr(plain, "_init_weights") else ():
        names = [name for name in module._non_persistent_buffers_set if f"{path}.{name}" in present]
        for name in names:
            module._buffers[name] = torch.full_like(module._buffers[name], -1, device="cpu")
        if names:
            try:
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    plain._init_weights(module)
            except Exception:  # code that came with a model can ask for anything
                continue
            filled = {f"{path}.{name}": module._buffers[name] for name in names}
            made |= {name: values for name, values in filled.items() if not bool((values == -1).all())}
    alike = {name: values for name, values in made.items() if values.shape == present[name].shape}
    return {name: alike[name] if name in alike else values.clone() for name, values in present.items()}


def _agree(values: Tensor, plain: Tensor) -> bool:
    if values.shape != plain.shape:
        return False
    now = values.detach().cpu()
    if not now.is_floating_point():
        return torch.equal(now, plain.to(now.dtype))
    # Rounded to another precision, or computed on another device, they are the same.
    return torch.allclose(now.double(), plain.double(), rtol=_TOLERANCE.get(now.dtype, 1e-5), atol=0)


def _adapters(modules: Iterable[nn.Module]) -> Iterator[str]:
    """The adapters of PEFT that are in a model, and whether they are on."""
    states: Counter[str] = Counter()
    for module in modules:
        if isinstance(getattr(type(module), "disable_adapters", None), property):
            state = "off" if module.disable_adapters else "on"
            active, merged, scaling = (
                getattr(module, name, None) for name in ("active_adapters", "merged_adapters", "scaling")
            )
            states[f"{active!r} switched {state}, merged {merged!r}, scaled {scaling!r}"] += 1
    yield from (f"the adapters {state}, in {n} modules" for state, n in sorted(states.items()))


def _modules(model: TransformerBridge) -> Iterator[tuple[str, nn.Module]]:
    """Every module of a bridge and of the model in it, once."""
    seen: set[int] = set()
    yield from ((place or "the bridge", module) for place, module in modules_below("", model, seen))
    for point in model.hook_points():
        if id(point) not in seen:
            seen.add(id(point))
            yield point.name or "a hook point", point
    yield from modules_below("original_model", model.original_model, seen)


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
    """A replacement of a module's ``forward`` by another package."""
    for kind in sorted({type(module) for _, module in modules}, key=lambda kind: kind.__qualname__):
        owner = next(base for base in kind.__mro__ if "forward" in vars(base))
        forward = vars(owner)["forward"]
        package = str(getattr(forward, "__module__", "")).partition(".")[0]
        same = package == owner.__module__.partition(".")[0]
        if not same and package != "torch" and not _is_builders(forward):
            yield forward


def _drops_out(model: TransformerBridge, modules: Iterable[tuple[str, nn.Module]]) -> bool:
    training = [module for _, module in modules if module.training]
    if not training:
        return False
    if any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in training):
        return True
    # Attention drops out by a number of the configuration, without a module of its own.
    settings = model.original_model.config.to_dict()
    rates = [value for key, value in settings.items() if "drop" in key and isinstance(value, float)]
    return model.original_model.training and any(rate > 0 for rate in rates)
