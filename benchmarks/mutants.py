"""Mutation testing: one small mistake at a time in kernels' references, losses and buffers, and whether their tests see it.

    python -m benchmarks.mutants [FILE ...] [--per-function N]

A process that has imported torch and the tests of a file forks once a mutant; the child gives the live function the mistaken code, runs the
tests up to the first that fails, and dies. Mistakes: another comparison, operator, constant or function of its kind, a condition negated,
two arguments swapped, a keyword left out, a default changed, a statement removed. Left alone: messages of errors, the choice between
Triton, C and torch, launchers, functions under a decorator. `mutants_equivalent.csv` lists those that change nothing a test could see.
"""

import argparse
import ast
import copy
import csv
import importlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS, EQUIVALENT = ROOT / "benchmarks" / "results" / "mutants.csv", ROOT / "benchmarks" / "mutants_equivalent.csv"
GROUPS = {"kernels": "kernels' references", "gpurl/buffers": "buffers", "gpurl": "losses"}
TESTS = {  # of each file, the quickest first, under tests/; LAWS is test_properties_kernels.py
    "gpurl/losses.py": "gpurl/test_losses.py",
    "gpurl/value_losses.py": "gpurl/test_value_losses.py",
    "gpurl/normalizer.py": "LAWS::any_split_gives_the_moments_of_all_rows_in_any_order LAWS::returns_come_back_from_the_critics_scale",
    "gpurl/buffers/demonstrations.py": "gpurl/test_demonstrations.py",
    "gpurl/buffers/memory.py": "gpurl/test_replay_buffer.py",
    "gpurl/buffers/minibatches.py": "gpurl/test_ppo.py",
    "gpurl/buffers/packed.py": "gpurl/test_packed.py gpurl/test_replay_buffer.py",
    "gpurl/buffers/prioritized.py": "gpurl/test_replay_buffer.py",
    "gpurl/buffers/replay.py": "test_properties_replay.py gpurl/test_replay_buffer.py",
    "gpurl/buffers/rollout.py": "gpurl/test_ppo.py",
    "kernels/adam.py": "kernels/test_adam.py",
    "kernels/categorical_projection.py": (
        "LAWS::a_projection_keeps_mass_and_the_mean_of_what_is_held_within_the_limits kernels/test_categorical_projection.py"
    ),
    "kernels/episode_sums.py": "LAWS::sums_over_episodes_in_any_pieces kernels/test_episode_sums.py",
    "kernels/gae.py": (
        "LAWS::advantages_are_those_of_a_loop test_c_kernels.py::test_gae_of_shapes_that_do_not_fit_is_refused "
        "kernels/test_gae.py::test_by_hand kernels/test_gae.py::test_dispatch_and_strides"
    ),
    "kernels/moments.py": "LAWS::any_split_gives_the_moments_of_all_rows_in_any_order kernels/test_moments.py",
    "kernels/permutation.py": "LAWS::a_permutation_has_each_number_once test_permutation.py",
    "kernels/ppo_loss.py": "kernels/test_ppo_loss.py",
    "kernels/prioritized.py": (
        "LAWS::an_entry_is_drawn_where_the_running_sum_says "
        "LAWS::the_greatest_of_equal_entries_is_kept_in_any_order "
        "kernels/test_prioritized.py::test_dispatch "
        "test_prioritized.py::test_nothing_to_draw "
        "test_prioritized.py::test_by_hand"
    ),
    "kernels/random.py": "test_random.py test_c_kernels.py",
    "kernels/replay.py": "test_properties_replay.py test_replay.py",
    "kernels/squash.py": "LAWS::the_likelihood_of_a_drawn_action_is_what_the_draw_said test_squash.py",
}
COLUMNS = ("group", "file", "mutants", "killed", "equivalent", "survivors", "commit")
NOT_OF_TORCH = {"triton", "tl", "ctypes", "c_library"}  # a function that names one of them is no reference
LAUNCHERS = ("_triton", "_c", "_tile")
MORE_MEMORY = 4 << 30  # of a child: a size that became huge is an error, not a machine that stands still
AT_LEAST_SECONDS, TIMES_USUAL = 10, 4  # after which a child counts as one that hangs

SWAPPED: dict[type, type] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.Mult},
    **{ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd, ast.LShift: ast.RShift},
    **{ast.RShift: ast.LShift, ast.And: ast.Or, ast.Or: ast.And, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
PAIRS = [("min", "max"), ("amin", "amax"), ("minimum", "maximum"), ("sum", "mean"), ("cos", "sin"), ("argmin", "argmax")]
RENAMED = {name: other for pair in PAIRS for name, other in (pair, pair[::-1])}
COMMUTE = {"min", "max", "minimum", "maximum", "promote_types"}
CHOICES = {"use_triton", "use_c", "in_triton", "on_cpu"}  # between forms that give the same
STATEMENTS = (ast.Expr, ast.AugAssign, ast.Raise, ast.Break, ast.Continue)


class Mutant(NamedTuple):
    function: str  # its name in the module, with the class before a method's
    what: str  # `before -> after`, which names it where lines move
    node: ast.FunctionDef  # the function with the mistake in it


# ---- mistakes ----


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Those that are mutated, methods as CLASS.NAME."""
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef) and not inner.decorator_list and not inner.name.endswith(LAUNCHERS):
                names = {name.id for name in ast.walk(inner) if isinstance(name, ast.Name)}
                if not names & NOT_OF_TORCH:
                    yield f"{node.name}.{inner.name}" if isinstance(node, ast.ClassDef) else inner.name, inner


def mutants_of(name: str, function: ast.FunctionDef) -> Iterator[Mutant]:
    """Every mistake in one function, each in a copy of it."""
    seen = set()
    for number, place in enumerate(_places(function)):
        for change in range(len(_changes(place))):
            twin = copy.deepcopy(function)
            node = _places(twin)[number]
            before = ast.unparse(node)
            after = _changes(node)[change](node)
            for parent in ast.walk(twin):  # put in its place
                for field, value in ast.iter_fields(parent):
                    if value is node:
                        setattr(parent, field, after)
                    elif isinstance(value, list):
                        value[:] = [after if item is node else item for item in value]
            what = f"{before} -> {ast.unparse(after)}"
            what += f" (number {sum(other.startswith(what) for other in seen) + 1})" if what in seen else ""
            seen.add(what)
            yield Mutant(name, what, ast.fix_missing_locations(twin))


def _places(function: ast.FunctionDef) -> list[ast.AST]:
    """All nodes of a function's body and of its defaults but docstrings, annotations, and the messages of errors."""
    found: list[ast.AST] = []

    def walk(node: ast.AST) -> None:
        found.append(node)
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)):
            return
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "ctx"):
                continue
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.AST) and not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)):
                    walk(item)

    walk(function)
    return found[1:]


def _changes(node: ast.AST) -> list[Any]:
    """Functions of the node that give the mistaken one."""
    changes: list[Any] = []
    if isinstance(node, ast.expr) and CHOICES & {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}:
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
        changes.append(lambda node: ast.Constant(not node.value if type(node.value) is bool else node.value + 1))
    if isinstance(node, STATEMENTS) or (isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple))):
        changes.append(lambda node: ast.Pass())
    if isinstance(node, ast.Call):
        plain = not any(isinstance(item, ast.Starred) for item in node.args)
        commutes = ast.unparse(node.func).rpartition(".")[2] in COMMUTE
        if plain and not commutes and len(node.args) > 1 and ast.dump(node.args[0]) != ast.dump(node.args[1]):
            changes.append(lambda node: _with(node, args=[node.args[1], node.args[0], *node.args[2:]]))
        for place, keyword in enumerate(node.keywords):
            if keyword.arg not in (None, "device", "dtype"):  # one device, and float32 unless told
                changes.append(lambda node, at=place: _with(node, keywords=node.keywords[:at] + node.keywords[at + 1 :]))
    if isinstance(node, ast.Attribute) and node.attr in RENAMED:
        changes.append(lambda node: _with(node, attr=RENAMED[node.attr]))
    return changes


def _with(node: Any, **fields: Any) -> Any:
    twin = copy.copy(node)
    for name, value in fields.items():
        setattr(twin, name, value)
    return twin


def apply(mutant: Mutant, module: types.ModuleType) -> None:
    """Give the live function the mistaken code, wherever it was imported to; a method is another function of its class."""
    holder, _, name = mutant.function.rpartition(".")
    owner = getattr(module, holder) if holder else module
    live = getattr(owner, name)
    body: list[ast.stmt] = [mutant.node]
    if holder:  # in a class of this name, so that super() finds its cell
        body = [ast.ClassDef(name=holder, bases=[], keywords=[], body=body, decorator_list=[], type_params=[])]
    made: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(ast.Module(body, type_ignores=[])), str(module.__file__), "exec", dont_inherit=True)
    exec(code, module.__dict__, made)
    new = getattr(made[holder], name) if holder else made[name]
    if holder:
        cells = tuple(types.CellType(owner) for _ in new.__code__.co_freevars)  # __class__, of which there can be no other
        twin = types.FunctionType(new.__code__, live.__globals__, name, new.__defaults__, cells)
        twin.__kwdefaults__ = new.__kwdefaults__
        setattr(owner, name, twin)
    else:
        live.__code__, live.__defaults__, live.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__


# ---- tests ----


class Mutating:
    """A plugin of pytest: once its tests are collected, it runs them for the module as it is, then in a child for every mutant."""

    def __init__(self, file: str, mutants: list[Mutant]) -> None:
        name = file.removesuffix(".py").replace("/", ".")
        self.module = importlib.import_module(name if name.startswith("gpurl") else f"gpurl.{name}")
        self.mutants, self.survivors, self.seconds = mutants, list[Mutant](), 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for _ in range(2):  # the first time imports, and compiles C
            started = time.monotonic()
            if not session.items or not _all_pass(session):
                raise RuntimeError(f"{self.module.__name__}: {session.testsfailed} of {len(session.items)} tests fail without a mutant")
            self.seconds = time.monotonic() - started
        self.survivors = [mutant for mutant in self.mutants if self._survives(session, mutant)]
        return True

    def _survives(self, session: pytest.Session, mutant: Mutant) -> bool:
        """Whether all tests pass in a child that has the mistake; one that hangs or dies does not."""
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(AT_LEAST_SECONDS, TIMES_USUAL * self.seconds))
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MORE_MEMORY,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            code = 1
            try:
                silence = os.open(os.devnull, os.O_RDWR)
                for stream in (0, 1, 2):
                    os.dup2(silence, stream)
                apply(mutant, self.module)
                code = 0 if _all_pass(session) else 1
            finally:
                os._exit(code)
        return os.waitpid(child, 0)[1] == 0


def _all_pass(session: pytest.Session) -> bool:
    for item, following in zip(session.items, [*session.items[1:], None]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return False
    return True


def survivors_of(file: str, mutants: list[Mutant], tests: list[str]) -> list[Mutant]:
    """Those that no test sees; RuntimeError where a test fails anyway."""
    mutating = Mutating(file, mutants)
    options = ["-q", "-s", "--tb=no", "-Wignore", "--hypothesis-profile=mutants"]
    options += ["-p", "no:cacheprovider", "-p", "no:timeout", "-p", "no:xdist"]
    code = pytest.main([*options, *tests], plugins=[mutating])
    if code != 0:
        raise RuntimeError(f"pytest ended with {code!r} on {' '.join(tests)}")
    return mutating.survivors


def mutate_file(file: str, per_function: int, equivalent: dict[tuple[str, str], str]) -> dict[str, Any]:
    """A row of the results; prints each survivor."""
    tree, mutants, started = ast.parse((ROOT / file).read_text()), list[Mutant](), time.monotonic()
    for name, function in functions_of(tree):
        all_of_it = list(mutants_of(name, function))
        mutants += random.Random(name).sample(all_of_it, min(per_function, len(all_of_it)))
    tried = [mutant for mutant in mutants if (file, f"{mutant.function}: {mutant.what}") not in equivalent]
    survivors = survivors_of(
        file, tried, [f"tests/{test}" for test in TESTS[file].replace("LAWS::", "test_properties_kernels.py::test_").split()]
    )
    for mutant in survivors:
        print(f"SURVIVES {file} {mutant.function}: {mutant.what}", flush=True)
    counts = {"killed": len(tried) - len(survivors), "equivalent": len(mutants) - len(tried), "survivors": len(survivors)}
    print(f"{file}: {len(mutants)} mutants, {counts}, {time.monotonic() - started:.0f} s", flush=True)
    return {"group": next(GROUPS[start] for start in GROUPS if file.startswith(start)), "file": file, "mutants": len(mutants), **counts}


def known_equivalent() -> dict[tuple[str, str], str]:
    """(file, FUNCTION: BEFORE -> AFTER) -> why no test can see it."""
    with EQUIVALENT.open() as stream:
        return {(row["file"], row["mutant"]): row["why"] for row in csv.DictReader(stream)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutation testing")
    parser.add_argument("files", nargs="*", help="by default all")
    parser.add_argument("--per-function", type=int, default=40, help="mutants of a function at most, drawn by its name as the seed")
    options = parser.parse_args()
    # a GPU's threads of autograd outlive no fork
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if len(options.files) == 1:
        row = mutate_file(options.files[0], options.per_function, known_equivalent())
        row["commit"] = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
        kept = list(csv.DictReader(RESULTS.open())) if RESULTS.exists() else []
        rows = sorted([*(old for old in kept if old["file"] != row["file"]), row], key=lambda row: row["file"])
        with RESULTS.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(rows, key=lambda row: str(row["group"])))
        return
    for file in options.files or TESTS:  # a process each: tests of one do not meet the modules of another
        command = [sys.executable, "-m", "benchmarks.mutants", file, "--per-function", str(options.per_function)]
        subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
