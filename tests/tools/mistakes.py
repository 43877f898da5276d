"""Makes small mistakes in a function, one at a time, for mutation testing (mutants.py).

Mistakes: another comparison, operator or constant (by one), min instead of max and the like, a
negated condition, a lost sign, two swapped arguments, a missing keyword, a changed default, a
missing statement. Not changed: annotations, docstrings and messages of errors; the keywords
`device` and `dtype`, because tests run on one device and most tensors are float32; the order of
arguments if it does not matter (min, max); choices between forms with equal results (Triton, C,
torch); functions that are decorated or launch Triton or C, which tests compare with the references;
names and subscripts.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# a function that uses one of these names is not a reference
NOT_OF_TORCH = {"triton", "tl", "ctypes", "c_library"}
LAUNCHERS = ("_triton", "_c", "_tile")
# operators that replace each other, and operators that are replaced
OPERATOR_PAIRS = (
    "Add Sub, Mult Div, BitAnd BitOr, LShift RShift, And Or, Lt LtE, Gt GtE, Eq NotEq, Is IsNot, "
    "In NotIn"
)
OPERATORS = {"FloorDiv": "Div", "Mod": "Mult", "Pow": "Mult", "BitXor": "BitAnd"}
NAME_PAIRS = "min max, amin amax, minimum maximum, sum mean, cos sin, argmin argmax"


def _both_ways(pairs: str) -> dict[str, str]:
    words = [pair.split() for pair in pairs.split(",")]
    return {one: other for pair in words for one, other in (pair, pair[::-1])}


SWAPPED: dict[type, type] = {
    getattr(ast, one): getattr(ast, other)
    for one, other in (OPERATORS | _both_ways(OPERATOR_PAIRS)).items()
}
RENAMED = _both_ways(NAME_PAIRS)
COMMUTE = {"min", "max", "minimum", "maximum", "promote_types"}
CHOICES = {
    "choose_kernel",
    "use_triton",
    "use_c",
    "in_triton",
    "on_cpu",
}  # between forms with equal results
Change = Callable[[Any], Any]  # node -> node with a mistake
STATEMENTS = (ast.Expr, ast.AugAssign, ast.Raise, ast.Break, ast.Continue)


class Mutant(NamedTuple):
    """A function with one mistake."""

    function: str  # NAME, or CLASS.NAME of a method
    change: str  # `before -> after`; independent of line numbers
    node: ast.FunctionDef  # with the mistake


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """(name, function) of all functions to mutate, methods as CLASS.NAME."""
    for node in tree.body:
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if not isinstance(inner, ast.FunctionDef) or inner.decorator_list:
                continue
            if inner.name.endswith(LAUNCHERS) or _names(inner) & NOT_OF_TORCH:
                continue
            yield prefix + inner.name, inner


def mutants_of(name: str, function: ast.FunctionDef) -> Iterator[Mutant]:
    """All mistakes in one function, each in a copy of it."""
    seen = set[str]()
    for number, original in enumerate(_nodes(function)):
        for index in range(len(_changes(original))):
            # make the mistake in a copy
            mutant = copy.deepcopy(function)
            node = _nodes(mutant)[number]
            before = _text(node)
            after = _changes(node)[index](node)
            for parent in ast.walk(mutant):
                for field, value in ast.iter_fields(parent):
                    if value is node:
                        setattr(parent, field, after)
                    elif isinstance(value, list):
                        value[:] = [after if item is node else item for item in value]

            # name it; equal changes in one function are numbered
            change = f"{before} -> {_text(after)}"
            if change in seen:
                change += f" (number {sum(other.startswith(change) for other in seen) + 1})"
            seen.add(change)
            yield Mutant(name, change, ast.fix_missing_locations(mutant))


def _names(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def _text(node: ast.AST) -> str:
    """The source in one line; of a compound statement its head."""
    return ast.unparse(node).partition("\n")[0]


def _nodes(function: ast.FunctionDef) -> list[ast.AST]:
    """All nodes of the body and the defaults of a function, without docstrings, annotations and the
    messages of errors.
    """
    nodes: list[ast.AST] = []

    def walk(node: ast.AST) -> None:
        nodes.append(node)
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)):
            return
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "ctx"):
                continue
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.AST) and not (
                    isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
                ):
                    walk(item)

    walk(function)
    return nodes[1:]


def _changes(node: ast.AST) -> list[Change]:
    """The mistakes that can be made in a node."""
    changes: list[Change] = []
    expression = node.test if isinstance(node, ast.If) else node
    if isinstance(expression, ast.expr) and CHOICES & _names(expression):
        return changes

    # operators, conditions and constants
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in SWAPPED:
        changes.append(lambda node: _with(node, op=SWAPPED[type(node.op)]()))
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        changes.append(lambda node: _with(node, ops=[SWAPPED[type(node.ops[0])](), *node.ops[1:]]))
    if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        changes.append(lambda node: node.operand)
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        changes.append(lambda node: _with(node, test=ast.UnaryOp(ast.Not(), node.test)))
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        changes.append(
            lambda node: ast.Constant(
                not node.value if type(node.value) is bool else node.value + 1
            )
        )

    # statements
    if isinstance(node, STATEMENTS) or (
        isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple))
    ):
        changes.append(lambda node: ast.Pass())

    # arguments and names
    if isinstance(node, ast.Call):
        has_star = any(isinstance(item, ast.Starred) for item in node.args)
        commutes = ast.unparse(node.func).rpartition(".")[2] in COMMUTE
        if not (has_star or commutes or len(set(map(ast.dump, node.args[:2]))) < 2):
            changes.append(
                lambda node: _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
            )
        for place, keyword in enumerate(node.keywords):
            if keyword.arg not in (None, "device", "dtype"):
                changes.append(
                    lambda node, at=place: _with(
                        node, keywords=node.keywords[:at] + node.keywords[at + 1 :]
                    )
                )
    if isinstance(node, ast.Attribute) and node.attr in RENAMED:
        changes.append(lambda node: _with(node, attr=RENAMED[node.attr]))
    return changes


def _with(node: ast.AST, **fields: Any) -> Any:
    """A copy of a node with other fields."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
