"""The form of what a run's checkpoint holds, checked before anything of it is used."""

from types import NoneType

from torch import Tensor

from gpurl.checkpoints.state_files import State
from gpurl.errors import CheckpointError

Parts = dict[str, State]

# of what is read before anything can say that it does not fit
FORM: dict[str, dict[str, tuple[type, ...]]] = {
    "meta": {
        "settings": (dict,),
        "observation_space": (dict,),
        "action_space": (dict,),
        "state_space": (dict, NoneType),
    },
    "trainer": {
        "steps": (int,),
        "iteration": (int,),
        "elapsed": (float, int),
        "threads": (int,),
        "best_return": (float, int),
        "obs": (Tensor,),
        "policy_state": (list,),
        "statistics": (dict,),
        "evaluation": (dict,),
    },
    "meta.settings": {
        "algorithm": (str,),
        "env": (str,),
        "env_options": (dict,),
        "num_envs": (int,),
    },
}


def check_parts(parts: Parts) -> None:
    """CheckpointError where `parts` are those of a run and not of its form."""
    if "meta" not in parts or "model" not in parts:  # a dump, or somebody's own
        return
    is_run = {"training", "env", "trainer", "replay"} <= parts.keys()
    if not is_run or not isinstance(parts["meta"].get("settings"), dict):
        raise CheckpointError(f"it holds {', '.join(parts)} and is no checkpoint of a run")
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
