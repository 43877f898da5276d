"""Checkpoints of older formats in the present form: one function from each format to the next, and
nowhere else is an old one thought of.

A change to what the parts of a run's checkpoint hold raises the format: add a function to
MIGRATIONS, and a checkpoint that was written before to tests/old_checkpoints/. A setting that is
new needs none: where a checkpoint lacks it, its default counts.
"""

from collections.abc import Callable
from types import NoneType

from torch import Tensor

from gpurl.checkpoints.state_files import State
from gpurl.errors import CheckpointError

Parts = dict[str, State]


def _format_2(parts: Parts) -> Parts:
    """What was added, renamed or dropped one by one while all was called format 1."""
    meta, settings, model, training = (
        parts["meta"],
        parts["meta"]["settings"],
        parts["model"],
        parts["training"],
    )
    if any(name.startswith(("network.actor.layers.", "network.trunk.")) for name in model):
        raise CheckpointError(
            "its networks are those of the first days of 0.1.0, whose optimiser fits none of "
            "today: train again"
        )
    if settings.get("nan") == "stop":
        settings["nan"] = "raise"
    elif (
        settings.get("nan") == "skip" and "state_space" not in meta
    ):  # skipping and restarting were one thing
        settings["nan"] = "reset-envs"
    if settings["algorithm"] in ("ppo", "a2c") and "state_space" not in meta:
        settings["asymmetric"] = (
            False  # critics read observations, whatever the environment shows today
        )
    settings.pop("run_dir", None)
    meta.setdefault("state_space", None)
    if "optimizer" in training:
        training.setdefault(
            "set_rate", {name: settings[name] for name in ("schedule", "learning_rate")}
        )
    if "shuffle_random" in training:  # was one stream an environment, of which the first drew
        random = training["shuffle_random"]
        training["shuffle_random"] = random | {name: random[name][:1] for name in ("key", "gamma")}
    parts["trainer"].setdefault("threads", None)
    parts["trainer"].pop("next_eval", None)
    parts["trainer"]["statistics"].pop("num_terms", None)
    parts.setdefault("replay", {})
    return parts


MIGRATIONS: dict[int, Callable[[Parts], Parts]] = {
    1: _format_2
}  # by the format that each begins with
FORMAT_VERSION = max(MIGRATIONS) + 1
OLDEST_FORMAT = min(MIGRATIONS)


FORM: dict[
    str, dict[str, tuple[type, ...]]
] = {  # of what is read before anything can say that it does not fit
    "meta": {
        "settings": (dict,),
        "observation_space": (dict,),
        "action_space": (dict,),
        "state_space": (dict, NoneType),
    },
    "trainer": {
        **{
            "steps": (int,),
            "iteration": (int,),
            "elapsed": (float, int),
            "threads": (int, NoneType),
            "best_return": (float, int),
        },
        **{"obs": (Tensor,), "carry": (list,), "statistics": (dict,), "evaluation": (dict,)},
    },
    "meta.settings": {
        "algorithm": (str,),
        "env": (str,),
        "env_options": (dict,),
        "num_envs": (int,),
    },
}


def _check_form(parts: Parts) -> None:
    for place, kinds in FORM.items():
        part, _, inner = place.partition(".")
        state = parts[part][inner] if inner else parts[part]
        for name, kind in kinds.items():
            if name not in state or type(state[name]) not in kind:
                got = f"is a {type(state[name]).__name__}" if name in state else "is missing"
                raise CheckpointError(
                    f"its {place}.{name} {got}, wanted "
                    f"{' or '.join(each.__name__ for each in kind)}"
                )


def migrate(parts: Parts, version: int) -> Parts:
    """`parts` of format `version` as this gpurl writes them."""
    if "meta" not in parts or "model" not in parts:  # a dump, or somebody's own
        return parts
    if not {"training", "env", "trainer"} <= parts.keys() or not isinstance(
        parts["meta"].get("settings"), dict
    ):
        raise CheckpointError(f"it holds {', '.join(parts)} and is no checkpoint of a run")
    for number in range(version, FORMAT_VERSION):
        parts = MIGRATIONS[number](parts)
    _check_form(parts)
    return parts
