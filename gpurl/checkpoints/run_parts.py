"""What the parts of a run's checkpoint must hold, checked before any of it is used."""

from types import NoneType

from torch import Tensor

from gpurl.checkpoints.state_files import State
from gpurl.errors import CheckpointError

Parts = dict[str, State]

# without them a checkpoint still says what its run is
LARGE_PARTS = ("model", "training", "env", "replay")
# read to the host: the replay buffer into which it is copied may fill the device
ON_HOST = ("replay",)

# types of the values that are read before the checkpoint is compared with the run
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
    "trainer.statistics": {
        "newest": (Tensor,),
        "began": (int,),
        "logged_episodes": (float, int),
        "terms": (dict,),
    },
    "meta.settings": {
        "algorithm": (str,),
        "env": (str,),
        "env_options": (dict,),
        "num_envs": (int,),
    },
}


def check_parts(parts: Parts) -> None:
    """CheckpointError if a run wrote `parts` and they are not of its form."""
    # a dump of NaN, or the parts of another program, may hold anything
    if "meta" not in parts or "model" not in parts:
        return
    is_run = {"training", "env", "trainer", "replay"} <= parts.keys()
    if not is_run or not isinstance(parts["meta"].get("settings"), dict):
        raise CheckpointError(f"it holds {', '.join(parts)} and is no checkpoint of a run")
    # every value that is read has one of its types; booleans are no integers here
    for path, types in FORM.items():
        part, _, inner = path.partition(".")
        state = parts[part][inner] if inner else parts[part]
        for name, allowed in types.items():
            if name not in state or type(state[name]) not in allowed:
                got = f"is a {type(state[name]).__name__}" if name in state else "is missing"
                expected = " or ".join(kind.__name__ for kind in allowed)
                raise CheckpointError(f"its {path}.{name} {got}, wanted {expected}")
