"""Small mistakes that can be made in a function: what mutation testing (mutants.py) plants, one at
a time.

Another comparison, operator or constant (by one), min for max and the like, a condition negated or
a sign lost, two arguments swapped, a keyword left out (then its default counts), a default changed,
a statement removed that only has an effect. Left out: annotations and docstrings; texts, so also
what is in an f-string or in the message of an error, but not whether it is raised; the keywords
`device` and `dtype`, as tests run on one device and most types are float32 anyway; the order of
arguments where it changes nothing (min, max); choices between forms that must give the same
(Triton, C, torch), and functions that launch Triton or C or are decorated, which tests compare with
the references; names and subscripts exchanged for others, of which there is no end.
"""

import ast
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

NOT_OF_TORCH = {
    "triton",
    "tl",
    "ctypes",
    "c_library",
}  # a function that names one of them is no reference
LAUNCHERS = ("_triton", "_c", "_tile")
SWAPPED: dict[type, type] = {
    **{
        ast.Add: ast.Sub,
        ast.Sub: ast.Add,
        ast.Mult: ast.Div,
        ast.Div: ast.Mult,
        ast.FloorDiv: ast.Div,
        ast.Mod: ast.Mult,
    },
    **{
        ast.Pow: ast.Mult,
        ast.BitAnd: ast.BitOr,
        ast.BitOr: ast.BitAnd,
        ast.BitXor: ast.BitAnd,
        ast.LShift: ast.RShift,
    },
    **{
        ast.RShift: ast.LShift,
        ast.And: ast.Or,
        ast.Or: ast.And,
        ast.Lt: ast.LtE,
        ast.LtE: ast.Lt,
        ast.Gt: ast.GtE,
        ast.GtE: ast.Gt,
    },
    **{
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
        ast.Is: ast.IsNot,
        ast.IsNot: ast.Is,
        ast.In: ast.NotIn,
        ast.NotIn: ast.In,
    },
}
PAIRS = [
    ("min", "max"),
    ("amin", "amax"),
    ("minimum", "maximum"),
    ("sum", "mean"),
    ("cos", "sin"),
    ("argmin", "argmax"),
]
RENAMED = {name: other for pair in PAIRS for name, other in (pair, pair[::-1])}
COMMUTE = {"min", "max", "minimum", "maximum", "promote_types"}
CHOICES = {
    "choose_kernel",
    "use_triton",
    "use_c",
    "in_triton",
    "on_cpu",
}  # between forms that give the same
STATEMENTS = (ast.Expr, ast.AugAssign, ast.Raise, ast.Break, ast.Continue)


class Mutant(NamedTuple):
    function: str  # its name in the module, with the class before a method's
    what: str  # `before -> after`, which names it where lines move
    node: ast.FunctionDef  # the function with the mistake in it


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Those that are mutated, methods as CLASS.NAME."""
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if (
                isinstance(inner, ast.FunctionDef)
                and not inner.decorator_list
                and not inner.name.endswith(LAUNCHERS)
            ):
                names = {name.id for name in ast.walk(inner) if isinstance(name, ast.Name)}
                if not names & NOT_OF_TORCH:
                    yield (
                        f"{node.name}.{inner.name}"
                        if isinstance(node, ast.ClassDef)
                        else inner.name,
                        inner,
                    )


def mutants_of(name: str, function: ast.FunctionDef) -> Iterator[Mutant]:
    """Every mistake in one function, each in a copy of it."""
    seen = set()
    for number, place in enumerate(_places(function)):
        for change in range(len(_changes(place))):
            twin = copy.deepcopy(function)
            node = _places(twin)[number]
            before = _text(node)
            after = _changes(node)[change](node)
            for parent in ast.walk(twin):  # put in its place
                for field, value in ast.iter_fields(parent):
                    if value is node:
                        setattr(parent, field, after)
                    elif isinstance(value, list):
                        value[:] = [after if item is node else item for item in value]
            what = f"{before} -> {_text(after)}"
            what += (
                f" (number {sum(other.startswith(what) for other in seen) + 1})"
                if what in seen
                else ""
            )
            seen.add(what)
            yield Mutant(name, what, ast.fix_missing_locations(twin))


def _text(node: ast.AST) -> str:
    """In one line: of a condition its head."""
    return ast.unparse(node).partition("\n")[0]


def _places(function: ast.FunctionDef) -> list[ast.AST]:
    """All nodes of a function's body and of its defaults but docstrings, annotations, and the
    messages of errors.
    """
    found: list[ast.AST] = []

    def walk(node: ast.AST) -> None:
        found.append(node)
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
    return found[1:]


def _changes(node: ast.AST) -> list[Any]:
    """Functions of the node that give the mistaken one."""
    changes: list[Any] = []
    asked = node.test if isinstance(node, ast.If) else node
    if isinstance(asked, ast.expr) and CHOICES & {
        name.id for name in ast.walk(asked) if isinstance(name, ast.Name)
    }:
        return changes
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
    if isinstance(node, STATEMENTS) or (
        isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple))
    ):
        changes.append(lambda node: ast.Pass())
    if isinstance(node, ast.Call):
        plain = not any(isinstance(item, ast.Starred) for item in node.args)
        commutes = ast.unparse(node.func).rpartition(".")[2] in COMMUTE
        if (
            plain
            and not commutes
            and len(node.args) > 1
            and ast.dump(node.args[0]) != ast.dump(node.args[1])
        ):
            changes.append(
                lambda node: _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
            )
        for place, keyword in enumerate(node.keywords):
            if keyword.arg not in (None, "device", "dtype"):  # one device, and float32 unless told
                changes.append(
                    lambda node, at=place: _with(
                        node, keywords=node.keywords[:at] + node.keywords[at + 1 :]
                    )
                )
    if isinstance(node, ast.Attribute) and node.attr in RENAMED:
        changes.append(lambda node: _with(node, attr=RENAMED[node.attr]))
    return changes


def _with(node: Any, **fields: Any) -> Any:
    twin = copy.copy(node)
    for name, value in fields.items():
        setattr(twin, name, value)
    return twin
