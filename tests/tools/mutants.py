"""Mutation testing: counts the small mistakes of mistakes.py that the tests of kernels' references,
losses and buffers detect.

    python -m tests.tools.mutants [FILE ...]

A process imports torch and the tests of a file, and forks for each mutant. The child replaces the
code of the function, runs the tests until one fails, and exits.
A row of results/mutants.csv has the number of all mutants of a file, of those that a test detected
(killed), of those in `mutants_equivalent.csv`, which no test could detect (skipped, each with its
reason), and of those that no test detected (survivors).
"""

import argparse
import ast
import csv
import importlib
import os
import resource
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from tests.tools.mistakes import Mutant, functions_of, mutants_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.csv"
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.csv")
GROUPS = {"kernels": "kernels' references", "gpurl/buffers": "buffers", "gpurl": "losses"}
SHORT = {
    "LAWS": "kernels/test_properties_kernels.py",
    "PPO": "kernels/triton/test_ppo_loss.py",
    "RANDOM": "kernels/test_random.py",
}
TESTS = {  # of each file, under tests/, the fastest first; ! deselects a test
    "gpurl/losses.py": "test_losses.py LAWS::rescaling_and_its_inverse_are_inverses_and_monotone",
    "gpurl/nn/normalizer.py": (
        "nn/test_normalizer.py LAWS::returns_come_back_from_the_critics_scale "
        "LAWS::any_split_gives_the_moments_of_all_rows_in_any_order"
    ),
    "gpurl/buffers/demonstrations.py": "buffers/test_demonstrations.py",
    "gpurl/memory.py": "buffers/test_replay_buffer.py",
    "gpurl/buffers/minibatches.py": "buffers/test_minibatches.py",
    "gpurl/buffers/prioritized.py": "buffers/test_replay_buffer.py",
    "gpurl/buffers/replay.py": "buffers/test_replay_buffer.py buffers/test_properties_replay.py",
    "gpurl/buffers/rollout.py": "buffers/test_rollout_buffer.py",
    "kernels/adam.py": (
        "kernels/test_c_kernels.py::test_a_step_of_float32_goes_to_c_and_one_of_float64_to_torch "
        "kernels/triton/test_adam.py"
    ),
    "kernels/categorical_projection.py": (
        "LAWS::a_projection_keeps_mass_and_the_mean_of_what_is_held_within_the_limits "
        "kernels/triton/test_categorical_projection.py "
        "!kernels/triton/test_categorical_projection.py::test_every_tile"
    ),
    "kernels/gae.py": (
        "LAWS::advantages_are_those_of_a_loop "
        "kernels/test_c_kernels.py::test_gae_of_shapes_that_do_not_fit_is_refused "
        "kernels/triton/test_gae.py::test_by_hand "
        "kernels/triton/test_gae.py::test_dispatch_and_strides"
    ),
    "kernels/linear_scan.py": "kernels/test_linear_scan.py",
    "kernels/moments.py": "kernels/triton/test_moments.py "
    "LAWS::any_split_gives_the_moments_of_all_rows_in_any_order",
    "kernels/newest_episodes.py": "LAWS::the_newest_episodes_are_those_of_a_loop "
    "kernels/triton/test_newest_episodes.py",
    "kernels/permutation.py": (
        "kernels/test_permutation.py::test_the_formula_in_integers "
        "kernels/test_permutation.py::test_every_row_once "
        "kernels/test_permutation.py::test_most_rows_may_walk "
        "kernels/test_permutation.py::test_rows_that_are_not_there_are_not_gathered "
        "LAWS::a_permutation_has_each_number_once "
        "kernels/test_permutation.py::test_nothing_is_looked_at"
    ),
    "kernels/ppo_loss.py": (
        "PPO::a_gaussian_by_hand PPO::a_categorical_by_hand "
        "PPO::which_ratios_pull PPO::of_equal_errors_the_plain_one_has_the_slope "
        "PPO::log_std_beyond_its_limits_is_not_moved "
        "PPO::a_loss_of_more_terms_has_the_gradient_of_all PPO::sequences_are_rows_in_a_row "
        "PPO::rows_without_weight_change_nothing PPO::strided_columns_give_the_same_bits "
        "PPO::the_kernel_is_its_specification"
    ),
    "kernels/prioritized.py": (
        "kernels/test_prioritized.py::test_wrong_arguments_are_named "
        "kernels/test_prioritized.py::test_by_hand "
        "kernels/test_prioritized.py::test_an_update_counts_in_the_next_draw "
        "kernels/test_prioritized.py::test_nothing_to_draw "
        "kernels/test_prioritized.py::test_the_first_and_the_last_number "
        "LAWS::an_entry_is_drawn_where_the_running_sum_says "
        "LAWS::the_greatest_of_equal_entries_is_kept_in_any_order"
    ),
    "kernels/random.py": (
        "RANDOM::streams_and_fractions_by_their_formulas_in_integers "
        "RANDOM::uniform_takes_24_bits_of_each_half_low_half_first "
        "RANDOM::two_draws_of_a_step_do_not_overlap "
        "RANDOM::uniform_bounds_may_be_numbers_or_tensors "
        "RANDOM::few_numbers_are_drawn_for_32_steps_in_one_call kernels/test_c_kernels.py "
        "kernels/test_random.py "
        "!kernels/test_random.py::test_pairs_across !kernels/test_c_kernels.py::test_gae"
    ),
    "kernels/replay.py": "kernels/test_replay.py buffers/test_properties_replay.py",
    "kernels/squash.py": "kernels/test_squash.py "
    "LAWS::the_likelihood_of_a_drawn_action_is_what_the_draw_said",
    "kernels/td_gradient.py": "kernels/test_td_gradient.py",
}
COLUMNS = ("group", "file", "mutants", "killed", "equivalent", "survivors", "commit")
MORE_MEMORY = 4 << 30  # of a child, so that a huge size is an error and does not block the machine
# a child hangs if it takes longer than both: seconds, and times the duration without a mutant
MIN_SECONDS, TIMES_USUAL = 10, 4


def apply(mutant: Mutant, module: types.ModuleType) -> None:
    """Replace the code of a function in place, also for modules that imported it; a method is
    replaced in its class.
    """
    class_name, _, name = mutant.function.rpartition(".")
    owner = getattr(module, class_name) if class_name else module
    original = getattr(owner, name)

    # compile; a method in a class of the same name, so that super() finds its cell
    body: list[ast.stmt] = [mutant.node]
    if class_name:
        body = [ast.parse(f"class {class_name}: pass").body[0]]
        body[0].body = [mutant.node]  # type: ignore[attr-defined]
    tree = ast.fix_missing_locations(ast.Module(body, type_ignores=[]))
    namespace: dict[str, Any] = {}
    code = compile(tree, str(module.__file__), "exec", dont_inherit=True)
    exec(code, module.__dict__, namespace)
    new = getattr(namespace[class_name], name) if class_name else namespace[name]

    # replace; the only free variable of a method is __class__
    if class_name:
        cells = tuple(types.CellType(owner) for _ in new.__code__.co_freevars)
        method = types.FunctionType(
            new.__code__, original.__globals__, name, new.__defaults__, cells
        )
        method.__kwdefaults__ = new.__kwdefaults__
        setattr(owner, name, method)
    else:
        original.__code__ = new.__code__
        original.__defaults__ = new.__defaults__
        original.__kwdefaults__ = new.__kwdefaults__


# ---- tests ----


class Mutating:
    """A plugin of pytest that runs the collected tests on the unchanged module, then in a child for
    each mutant.
    """

    def __init__(self, file: str, mutants: list[Mutant]) -> None:
        name = file.removesuffix(".py").replace("/", ".")
        self.module = importlib.import_module(name if name.startswith("gpurl") else f"gpurl.{name}")
        self.mutants = mutants
        self.survivors: list[Mutant] = []
        self.seconds = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for _ in range(2):  # the first time imports, and compiles C
            started = time.monotonic()
            if not session.items or not _all_pass(session):
                raise RuntimeError(
                    f"{self.module.__name__}: {session.testsfailed} of {len(session.items)} tests "
                    f"fail without a mutant"
                )
            self.seconds = time.monotonic() - started
        self.survivors = [mutant for mutant in self.mutants if self._survives(session, mutant)]
        return True

    def _survives(self, session: pytest.Session, mutant: Mutant) -> bool:
        """Whether all tests pass in a child with the mistake. One that hangs or dies counts as
        failed.
        """
        child = os.fork()
        if child == 0:
            # limit time and memory
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(MIN_SECONDS, TIMES_USUAL * self.seconds))
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(
                resource.RLIMIT_AS, (pages * resource.getpagesize() + MORE_MEMORY,) * 2
            )
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

            # run the tests without output
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
    """The mutants that no test detects; RuntimeError if a test fails without a mutant."""
    mutating = Mutating(file, mutants)
    options = ["-q", "-s", "--tb=no", "-Wignore", "--hypothesis-profile=mutants"]
    options += ["-p", "no:cacheprovider", "-p", "no:timeout", "-p", "no:xdist", "-k", "not _triton"]
    options += [f"--deselect={test[1:]}" for test in tests if test.startswith("!")]
    code = pytest.main(
        [*options, *(test for test in tests if not test.startswith("!"))], plugins=[mutating]
    )
    if code != 0:
        raise RuntimeError(f"pytest ended with {code!r} on {' '.join(tests)}")
    return mutating.survivors


def tests_of(file: str) -> list[str]:
    """The tests of a file, as paths and node ids of pytest; ! before deselected ones."""
    text = TESTS[file]
    for short, name in SHORT.items():
        text = text.replace(f"{short}::", f"{name}::test_")
    words = text.split()
    return [f"!tests/{word[1:]}" if word.startswith("!") else f"tests/{word}" for word in words]


def mutate_file(file: str, equivalent: dict[tuple[str, str], str]) -> dict[str, Any]:
    """The row of a file in the results; prints each survivor."""
    started = time.monotonic()
    functions = functions_of(ast.parse((ROOT / file).read_text()))
    mutants = [mutant for name, function in functions for mutant in mutants_of(name, function)]
    tried = [
        mutant
        for mutant in mutants
        if (file, f"{mutant.function}: {mutant.change}") not in equivalent
    ]
    survivors = survivors_of(file, tried, tests_of(file))
    for mutant in survivors:
        print(f"SURVIVES {file} {mutant.function}: {mutant.change}", flush=True)
    counts = {
        "killed": len(tried) - len(survivors),
        "equivalent": len(mutants) - len(tried),
        "survivors": len(survivors),
    }
    print(
        f"{file}: {len(mutants)} mutants, {counts}, {time.monotonic() - started:.0f} s", flush=True
    )
    group = next(GROUPS[start] for start in GROUPS if file.startswith(start))
    return {"group": group, "file": file, "mutants": len(mutants), **counts}


def known_equivalent() -> dict[tuple[str, str], str]:
    """(file, FUNCTION: BEFORE -> AFTER) -> the reason why no test can detect it."""
    with EQUIVALENT.open() as stream:
        return {(row["file"], row["mutant"]): row["why"] for row in csv.DictReader(stream)}


def main() -> None:
    """Mutate files, each in a process of its own, and write the results."""
    parser = argparse.ArgumentParser(description="Mutation testing")
    parser.add_argument("files", nargs="*", help="source files; default all")
    options = parser.parse_args()
    # autograd's threads for a GPU do not survive a fork
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if len(options.files) == 1:
        row = mutate_file(options.files[0], known_equivalent())
        row["commit"] = subprocess.check_output(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True
        ).strip()
        old = list(csv.DictReader(RESULTS.open())) if RESULTS.exists() else []
        rows = [row, *(other for other in old if other["file"] != row["file"])]
        with RESULTS.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(rows, key=lambda row: (row["group"], row["file"])))
        return
    for file in options.files or TESTS:
        subprocess.run([sys.executable, "-m", "tests.tools.mutants", file], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
