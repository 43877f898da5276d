"""Mutation testing kills a mistake that tests must see and spares a change that none can:
tests/tools/mutants.py on one function.
"""

import ast
import csv
import re
from collections import Counter

from tests.tools.mistakes import Mutant, functions_of, mutants_of
from tests.tools.mutants import (
    COLUMNS,
    EQUIVALENT,
    RESULTS,
    ROOT,
    TESTS,
    known_equivalent,
    survivors_of,
)

FILE = "gpurl/buffers/minibatches.py"


def test_a_mistake_is_killed_and_an_equivalent_one_is_spared() -> None:
    functions = dict(functions_of(ast.parse((ROOT / FILE).read_text())))

    def mutant(name: str, change: str) -> Mutant:
        return next(each for each in mutants_of(name, functions[name]) if each.change == change)

    wrong = mutant("PackedRows.__init__", "column.dim() == 2 -> column.dim() != 2")
    same = mutant("Minibatches.__init__", "self.rows = PackedRows({}) -> pass")  # pack sets it
    assert survivors_of(FILE, [wrong, same], [f"{ROOT}/tests/buffers/test_minibatches.py"]) == [
        same
    ]


def test_what_is_named_is_there() -> None:
    """A function that was changed leaves no line of the table behind."""
    assert EQUIVALENT.is_file()
    named: dict[str, set[str]] = {}
    for file, mutant in known_equivalent():
        named.setdefault(file, set()).add(mutant)
    assert named.keys() <= TESTS.keys()
    for file, mistakes in named.items():
        functions = functions_of(ast.parse((ROOT / file).read_text()))
        there = {
            f"{name}: {mutant.change}"
            for name, function in functions
            for mutant in mutants_of(name, function)
        }
        assert mistakes <= there, mistakes - there


def test_nine_mistakes_of_ten_were_seen_in_each_group() -> None:
    """By the table, which `make mutants` writes; mutants that nothing could detect are skipped."""
    rows = list(csv.DictReader(RESULTS.open()))
    assert tuple(rows[0]) == COLUMNS
    assert {row["file"] for row in rows} == set(TESTS)
    # a file that is new or has changed may be measured alone, at a later commit
    assert all(re.fullmatch("[0-9a-f]{7,}", row["commit"]) for row in rows)
    seen, tried = Counter[str](), Counter[str]()
    for row in rows:
        mutants, killed, equivalent, survivors = (
            int(row[name]) for name in ("mutants", "killed", "equivalent", "survivors")
        )
        assert mutants == killed + equivalent + survivors
        for name in (row["group"], "all"):
            seen[name] += killed
            tried[name] += mutants - equivalent
    assert len(tried) == 4
    assert all(seen[name] >= 0.9 * tried[name] for name in tried), (seen, tried)
