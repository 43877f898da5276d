"""Mutation testing: whether the tests of kernels' references, losses and buffers see each of the
small mistakes of mistakes.py.

    python -m tests.tools.mutants [FILE ...]

A process that has imported torch and the tests of a file forks once a mutant; the child gives the
live function the mistaken code, runs the tests up to the first that fails, and dies.
A row of results/mutants.csv: all mistakes there are in a file, how many a test saw, how many are in
`mutants_equivalent.csv` (with the reason why no test could see them; they are left out), and how
many no test saw.
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
RESULTS, EQUIVALENT = (
    ROOT / "benchmarks" / "results" / "mutants.csv",
    Path(__file__).with_name("mutants_equivalent.csv"),
)
GROUPS = {"kernels": "kernels' references", "gpurl/buffers": "buffers", "gpurl": "losses"}
SHORT = {
    "LAWS": "kernels/test_properties_kernels.py",
    "PPO": "kernels/triton/test_ppo_loss.py",
    "RANDOM": "kernels/test_random.py",
}
TESTS = {  # of each file, the quickest first, under tests/; what follows a ! is left out
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
    "kernels/episode_sums.py": "LAWS::sums_over_episodes_in_any_pieces "
    "kernels/triton/test_episode_sums.py",
    "kernels/gae.py": (
        "LAWS::advantages_are_those_of_a_loop "
        "kernels/test_c_kernels.py::test_gae_of_shapes_that_do_not_fit_is_refused "
        "kernels/triton/test_gae.py::test_by_hand "
        "kernels/triton/test_gae.py::test_dispatch_and_strides"
    ),
    "kernels/moments.py": "kernels/triton/test_moments.py "
    "LAWS::any_split_gives_the_moments_of_all_rows_in_any_order",
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
}
COLUMNS = ("group", "file", "mutants", "killed", "equivalent", "survivors", "commit")
MORE_MEMORY = (
    4 << 30
)  # of a child: a size that became huge is an error, not a machine that stands still
MIN_SECONDS, TIMES_USUAL = 10, 4  # after which a child counts as one that hangs


def apply(mutant: Mutant, module: types.ModuleType) -> None:
    """Give the live function the mistaken code, wherever it was imported to; a method is another
    function of its class.
    """
    holder, _, name = mutant.function.rpartition(".")
    owner = getattr(module, holder) if holder else module
    live = getattr(owner, name)
    body: list[ast.stmt] = [mutant.node]
    if holder:  # in a class of this name, so that super() finds its cell
        body = [
            ast.ClassDef(
                name=holder, bases=[], keywords=[], body=body, decorator_list=[], type_params=[]
            )
        ]
    made: dict[str, Any] = {}
    code = compile(
        ast.fix_missing_locations(ast.Module(body, type_ignores=[])),
        str(module.__file__),
        "exec",
        dont_inherit=True,
    )
    exec(code, module.__dict__, made)
    new = getattr(made[holder], name) if holder else made[name]
    if holder:
        cells = tuple(
            types.CellType(owner) for _ in new.__code__.co_freevars
        )  # __class__, of which there can be no other
        twin = types.FunctionType(new.__code__, live.__globals__, name, new.__defaults__, cells)
        twin.__kwdefaults__ = new.__kwdefaults__
        setattr(owner, name, twin)
    else:
        live.__code__, live.__defaults__, live.__kwdefaults__ = (
            new.__code__,
            new.__defaults__,
            new.__kwdefaults__,
        )


# ---- tests ----


class Mutating:
    """A plugin of pytest: once its tests are collected, it runs them for the module as it is, then
    in a child for every mutant.
    """

    def __init__(self, file: str, mutants: list[Mutant]) -> None:
        name = file.removesuffix(".py").replace("/", ".")
        self.module = importlib.import_module(name if name.startswith("gpurl") else f"gpurl.{name}")
        self.mutants, self.survivors, self.seconds = mutants, list[Mutant](), 0.0

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
        """Whether all tests pass in a child that has the mistake; one that hangs or dies does
        not.
        """
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(MIN_SECONDS, TIMES_USUAL * self.seconds))
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(
                resource.RLIMIT_AS, (pages * resource.getpagesize() + MORE_MEMORY,) * 2
            )
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
    options += ["-p", "no:cacheprovider", "-p", "no:timeout", "-p", "no:xdist", "-k", "not _triton"]
    options += [f"--deselect={test[1:]}" for test in tests if test.startswith("!")]
    code = pytest.main(
        [*options, *(test for test in tests if not test.startswith("!"))], plugins=[mutating]
    )
    if code != 0:
        raise RuntimeError(f"pytest ended with {code!r} on {' '.join(tests)}")
    return mutating.survivors


def tests_of(file: str) -> list[str]:
    """Their names as pytest has them; a ! before those to leave out."""
    text = TESTS[file]
    for short, name in SHORT.items():
        text = text.replace(f"{short}::", f"{name}::test_")
    words = text.split()
    return [f"!tests/{word[1:]}" if word.startswith("!") else f"tests/{word}" for word in words]


def mutate_file(file: str, equivalent: dict[tuple[str, str], str]) -> dict[str, Any]:
    """A row of the results; prints each survivor."""
    functions, started = functions_of(ast.parse((ROOT / file).read_text())), time.monotonic()
    mutants = [mutant for name, function in functions for mutant in mutants_of(name, function)]
    tried = [
        mutant
        for mutant in mutants
        if (file, f"{mutant.function}: {mutant.what}") not in equivalent
    ]
    survivors = survivors_of(file, tried, tests_of(file))
    for mutant in survivors:
        print(f"SURVIVES {file} {mutant.function}: {mutant.what}", flush=True)
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
    """(file, FUNCTION: BEFORE -> AFTER) -> why no test can see it."""
    with EQUIVALENT.open() as stream:
        return {(row["file"], row["mutant"]): row["why"] for row in csv.DictReader(stream)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutation testing")
    parser.add_argument("files", nargs="*", help="by default all")
    options = parser.parse_args()
    # a GPU's threads of autograd outlive no fork
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if len(options.files) == 1:
        row = mutate_file(options.files[0], known_equivalent())
        row["commit"] = subprocess.check_output(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True
        ).strip()
        kept = list(csv.DictReader(RESULTS.open())) if RESULTS.exists() else []
        rows = sorted(
            [*(old for old in kept if old["file"] != row["file"]), row], key=lambda row: row["file"]
        )
        with RESULTS.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(rows, key=lambda row: str(row["group"])))
        return
    for file in (
        options.files or TESTS
    ):  # a process each: tests of one do not meet the modules of another
        subprocess.run([sys.executable, "-m", "tests.tools.mutants", file], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
