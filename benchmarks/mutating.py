"""Mutants of a module: one small fault each, of the kinds that a wrong number comes from.

Comparisons and signs turned, neighbours of numbers, ``min`` for ``max`` and the like, sorting the other
way, masks without their ``~``, exchanged arguments, operands and keywords left out, branches and names
(``mat`` for ``id``, ``before`` for ``after``) exchanged, statements dropped. What is printed, raised or
annotated is left alone: no number comes from it.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_PAIRS = (
    ("min", "max"), ("amin", "amax"), ("argmin", "argmax"), ("any", "all"), ("sum", "mean"), ("head", "tail"),
    ("nsmallest", "nlargest"), ("floor", "ceil"), ("ones_like", "zeros_like"), ("ones", "zeros"),
    ("softmax", "log_softmax"), ("exp", "log"), ("abs", "sign"), ("median", "mean"), ("std", "var"),
    ("idxmin", "idxmax"), ("triu", "tril"), ("cumsum", "cumprod"), ("flip", "clone"),
)  # fmt: skip
CALLS = dict([*_PAIRS, *((b, a) for a, b in _PAIRS)])
_NAMES = (
    ("mat", "id"), ("before", "after"), ("dominant", "random"), ("low", "high"), ("all", "sampled"),
    ("not-sink", "not-first"), ("score", "lift"), ("odds", "lift"), ("blocks", "mat"), ("ffn", "attn"),
    ("layer", "target"), ("saturation", "elimination"), ("extreme", "sampled"), ("values", "random"),
    ("values", "updates"), ("train", "validation"), ("words", "tokens"), ("rank", "score"), ("left", "right"),
    ("top", "bottom"), ("mat_ffn", "mat_ln1_ln2"), ("precision", "surprisal"), ("final", "before"),
)  # fmt: skip
NAMES = dict([*_NAMES, *((b, a) for a, b in reversed(_NAMES))])
# Keywords of labels and checks, without effect on numbers.
_UNHEARD = (
    "desc", "unit", "leave", "disable", "delay", "progress", "dtype", "ours", "theirs", "way", "made_by",
    "strict",
)  # fmt: skip
SILENT = {"tqdm", "print", "write", "Console", "Option", "cast", "TypeVar", "isinstance", "InputError"}


@dataclass(frozen=True)
class Mutant:
    """One fault in a module.

    Attributes
    ----------
    line
        Where it is.
    key
        What names it whatever lines come before it: the function, what was written and what stands there now.
    source
        The whole module with the fault.
    part
        The function, class or other statement of the module that has the fault in it.
    """

    line: int
    key: str
    source: str
    part: str


def mutants(source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    encoded, counted, made = source.encode(), Counter[str](), list[Mutant]()
    for statement in tree.body:
        first, last = _extent(statement, starts)
        for function, node, fault in _faults(statement, ""):
            start, end = _extent(node, starts)
            before, after = encoded[start:end].decode(), ast.unparse(fault) if fault is not None else "pass"
            if isinstance(fault, ast.expr):
                after = f"({after})"
            key = f"{function}: {_short(before)} -> {_short(after)}"
            counted[key] += 1
            changed = (encoded[:start] + after.encode() + encoded[end:]).decode()
            part = (encoded[first:start] + after.encode() + encoded[end:last]).decode()
            number = f" [{counted[key]}]" if counted[key] > 1 else ""
            made.append(Mutant(node.lineno, key + number, changed, part))
    return sorted(made, key=lambda mutant: (mutant.line, mutant.key))


def _extent(node: Any, starts: list[int]) -> tuple[int, int]:
    """Where a node starts and ends in the module's bytes."""
    last = starts[(node.end_lineno or node.lineno) - 1]
    return starts[node.lineno - 1] + node.col_offset, last + (node.end_col_offset or 0)


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 90 else f"{flat[:60]} ... {flat[-25:]}"


def _faults(node: ast.AST, function: str) -> Iterator[tuple[str, Any, ast.AST | None]]:
    """Function, node and what stands in its place, for all of a node's parts that numbers come from."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        inside = f"{function}.{node.name}" if function else node.name
        for statement in node.body:
            yield from _faults(statement, inside)
        if isinstance(node, ast.FunctionDef):
            for default in _heard_defaults(node.args):
                yield from _faults(default, inside)
        return
    if _is_silent(node):
        return
    for fault in _replacements(node):
        yield function, node, fault
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.AnnAssign) and child is node.annotation:
            continue
        yield from _faults(child, function)


def _heard_defaults(arguments: ast.arguments) -> list[ast.expr]:
    """The defaults of a function's parameters that numbers come from."""
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    pairs = [
        *zip(with_default, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    # tests/test_checks.py tests that all default seeds are 0.
    return [default for of, default in pairs if default is not None and of.arg not in (*_UNHEARD, "seed")]


def _is_silent(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.keyword) and node.arg in _UNHEARD:
        return True
    if isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Raise):
        return not node.orelse  # a refusal
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    return isinstance(node, ast.Call) and (_name_of(node.func) in SILENT or _refuses(node.func))


def _refuses(function: ast.expr) -> bool:
    """Whether a function only raises errors."""
    return _name_of(function).lstrip("_").startswith(("check_", "refuse_"))


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _replacements(node: ast.AST) -> Iterator[ast.AST | None]:
    """What can stand in a node's place; None where it is dropped."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for other in COMPARISONS.get(type(node.ops[0]), ()):
            yield _with(node, ops=[other()])
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield _with(node, op=ARITHMETIC[type(node.op)]())
        yield node.left
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        yield node.values[0]
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.UAdd):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield _with(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node)
    elif isinstance(node, ast.Call):
        yield from _other_calls(node)
    elif isinstance(node, ast.AugAssign):
        yield None
        if type(node.op) in ARITHMETIC:
            yield _with(node, op=ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if not _is_silent(node.value):
            yield None
    elif isinstance(node, ast.comprehension):
        return
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
        for i, generator in enumerate(node.generators):
            if generator.ifs:
                generators = list(node.generators)
                generators[i] = _with(generator, ifs=[])
                yield _with(node, generators=generators)
    elif isinstance(node, ast.Slice):
        return


def _other_constants(node: ast.Constant) -> Iterator[ast.AST]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node.value, float):
        yield ast.Constant(2 * node.value if node.value else 1.0)
    elif isinstance(node.value, str) and node.value in NAMES:
        yield ast.Constant(NAMES[node.value])


def _other_calls(node: ast.Call) -> Iterator[ast.AST]:
    name = _name_of(node.func)
    if name in CALLS:
        function = (
            _with(node.func, attr=CALLS[name])
            if isinstance(node.func, ast.Attribute)
            else ast.Name(CALLS[name])
        )
        yield _with(node, func=function)
    if name in ("topk", "sort", "argsort") and not any(keyword.arg == "largest" for keyword in node.keywords):
        arg, value = ("largest", False) if name == "topk" else ("descending", True)
        yield _with(node, keywords=[*node.keywords, ast.keyword(arg, ast.Constant(value))])
    simple = (ast.Name, ast.Attribute, ast.Subscript)
    for i, (first, second) in enumerate(zip(node.args, node.args[1:], strict=False)):
        if isinstance(first, simple) and isinstance(second, simple):
            swapped = [*node.args[:i], second, first, *node.args[i + 2 :]]
            yield _with(node, args=swapped)
    for i, keyword in enumerate(node.keywords):
        if keyword.arg not in (None, *_UNHEARD):
            yield _with(node, keywords=[*node.keywords[:i], *node.keywords[i + 1 :]])


def _with(node: Any, **changed: Any) -> Any:
    other = copy.copy(node)
    for name, value in changed.items():
        setattr(other, name, value)
    return other
