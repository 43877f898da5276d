"""Environment steps a second of whole trainings, one after the other in this process: PPO with
networks and precisions of several kinds and each update, populations, and other algorithms with
their presets.

For a GPU: all but members in turn run in CUDA graphs there, so Python is no part of their times.
"""

import argparse
import json
import sys
from typing import Any

import torch

from benchmarks.results_table import Row, machine, number, parser, save, table
from benchmarks.timing import median_seconds
from benchmarks.training import common_settings, engine_columns, ready_trainer, warm_up
from gpurl.errors import UsageError
from gpurl.run.presets.find import preset
from gpurl.run.settings import Settings, make_settings
from gpurl.run.setup import choose_device
from gpurl.run.trainer import Trainer

NUM_ENVS, HORIZON = 4096, 32
MOST_STEPS = 1_000_000_000  # no run gets there
ISAAC = {"network": {"hidden": [512, 256, 128], "activation": "elu"}, "horizon": 24, "epochs": 5}
MEDIUM = {"network": {"hidden": [128, 128]}}
MANY_INPUTS = {"env_options": {"dim": 7}}  # 28 observations
MEMBERS = {"num_envs": 512, "population": 8}
# (algorithm, task, settings in addition to those that all benchmarks share)
PPO_CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    f"{name}, {update}, {precision}": (
        "ppo",
        "chasing",
        shape | {"update": update, "precision": precision},
    )
    for name, shape in (("64x64", {}), ("512x256x128", ISAAC))
    for update in ("fused", "autograd")
    for precision in ("float32", "tf32")
} | {
    "64x64, 28 observations, fused": ("ppo", "chasing", MANY_INPUTS | {"update": "fused"}),
    "64x64, 28 observations, autograd": ("ppo", "chasing", MANY_INPUTS | {"update": "autograd"}),
    "128x128, fused": ("ppo", "chasing", MEDIUM | {"update": "fused"}),
    "128x128, autograd": ("ppo", "chasing", MEDIUM | {"update": "autograd"}),
    "8 members, side by side": ("ppo", "chasing", MEMBERS | {"stack": "auto"}),
    "8 members, in turn": ("ppo", "chasing", MEMBERS | {"stack": "off"}),
}
# (algorithm, task, settings in addition to the preset of the task)
PRESET_CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    f"{algorithm} {task}": (algorithm, task, {})
    for algorithm, task in (
        ("sac", "chasing"),
        ("fast_sac", "chasing"),
        ("flash_sac", "chasing"),
        ("dqn", "cart_pole"),
    )
} | {
    f"{algorithm} {task}, 4 members {way}": (algorithm, task, {"population": 4, "stack": stack})
    for algorithm, task in (("sac", "chasing"), ("dqn", "cart_pole"))
    for way, stack in (("side by side", "on"), ("in turn", "off"))
}
CASES = (*PPO_CASES, *PRESET_CASES)


def settings_of(case: str, num_envs: int | None) -> Settings:
    """Those of a case; num_envs in place of its own, for a quick look."""
    algorithm, task, changes = (PPO_CASES | PRESET_CASES)[case]
    of_all = common_settings(NUM_ENVS, HORIZON) if case in PPO_CASES else preset(algorithm, task)
    settings = (
        of_all
        | changes
        | {"total_steps": MOST_STEPS}
        | ({"num_envs": num_envs} if num_envs else {})
    )
    return make_settings(algorithm, task, **settings)


def settings_given(case: str) -> dict[str, Any] | str:
    """What a row says of the settings of a case."""
    if case in PPO_CASES:
        return PPO_CASES[case][2]
    changes = PRESET_CASES[case][2]
    return {"preset": True} | changes if changes else "preset"


def play_until_it_learns(trainer: Trainer) -> None:
    """What replay buffers need before their first update, then what graphs need."""
    starts = getattr(trainer.settings.algorithm_config, "learning_starts", 0)
    while trainer.engine.steps <= starts:
        trainer.iterate()
    warm_up(trainer)


def measure(case: str, num_envs: int | None, device: torch.device, seconds: float) -> Row:
    """The row of a case."""
    settings = settings_of(case, num_envs)
    trainer = ready_trainer(settings, device)
    play_until_it_learns(trainer)
    for note in trainer.engine.notes:
        if note.startswith("CUDA graph level"):  # why it is not possible
            print(f"{case}: {note}", flush=True)
    before = trainer.engine.steps
    trainer.iterate()
    members = settings.train.population
    steps = (trainer.engine.steps - before) * members
    taken = median_seconds({case: trainer.iterate}, device, seconds)[case]
    return {
        "case": case,
        "algorithm": settings.algorithm,
        "task": settings.env,
        "num_envs": str(trainer.env.num_envs),
        "members": str(members),
        "steps": str(steps),
        **engine_columns(trainer),
        "settings": json.dumps(settings_given(case)),
        "value": f"{steps / taken:.0f}",
        "unit": "env_steps/s",
        **machine(str(device)),
    }


def parse(words: list[str] | None) -> argparse.Namespace:
    """The options."""
    options = parser(__doc__, seconds=0.25)
    options.add_argument("--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE")
    options.add_argument("--num-envs", type=int, help="of every case; default its own")
    return options.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Measure, print and save; 1 if nothing could be measured."""
    options = parse(words)
    device = choose_device(options.device)
    rows: list[Row] = []
    for case in options.cases:
        try:
            rows.append(measure(case, options.num_envs, device, options.seconds))
        except UsageError as error:  # this device cannot
            print(f"{case}: skipped: {error}", flush=True)
            continue
        path = save("trainings", rows, options.out)  # kept if a later case is interrupted
        print(f"{case}: {number(float(rows[-1]['value']))} env-steps/s", flush=True)
    columns = ["case", "num_envs", "precision", "graph", "rollout", "update"]
    lines = [[*(row[name] for name in columns), number(float(row["value"]))] for row in rows]
    where = f"written to {path}" if rows else "nothing was measured"
    print(f"\n{table([*columns, 'env-steps/s'], lines)}\n{where}\n")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
