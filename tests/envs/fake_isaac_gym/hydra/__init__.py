"""Stands for hydra: a configuration of JSON files, changed by overrides of keys that must be there,
or are added by a plus sign. A file may name another one in its place.
"""

import contextlib
import json
import os
import re
from typing import Any, Dict, Iterator, List, Optional

_folder = ""


@contextlib.contextmanager
def initialize_config_dir(config_dir: str) -> Iterator[None]:
    global _folder
    assert os.path.isabs(config_dir), config_dir
    _folder = config_dir
    yield
    _folder = ""


class Config:
    """What a DictConfig shows of itself here: its groups as attributes."""

    def __init__(self, groups: Dict[str, Any]) -> None:
        self.__dict__.update(groups)


def compose(config_name: str, overrides: Optional[List[str]] = None) -> Config:
    if not _folder:
        raise ValueError(
            "GlobalHydra is not initialized, use @hydra.main() or call one of the hydra "
            "initialization methods first"
        )
    groups = _read(config_name)
    if overrides is None:
        return Config(groups)
    chosen = dict(override.split("=", 1) for override in overrides)
    groups["task"] = _read(os.path.join("task", chosen.pop("task")))
    groups["train"] = _read(
        os.path.join("train", chosen.pop("train", groups["task"]["name"] + "PPO"))
    )
    for key, text in chosen.items():
        part, names = groups, key.lstrip("+").split(".")
        for name in names[:-1]:
            part = part[name]
        if names[-1] not in part and not key.startswith("+"):
            raise KeyError("Could not override {!r}: key is not in struct".format(key))
        try:
            part[names[-1]] = json.loads(text)
        except ValueError:
            part[names[-1]] = {"True": True, "False": False}.get(text, text)
    groups["task"]["env"]["numEnvs"] = groups["num_envs"]
    groups["task"]["sim"] = {"use_gpu_pipeline": groups["pipeline"] == "gpu"}
    return Config(groups)


def _read(name: str) -> Dict[str, Any]:
    with open(os.path.join(_folder, name + ".yaml")) as file:
        text = file.read()
    extended = re.search(r"^defaults:\n  - (\w+)$", text, re.MULTILINE)
    if extended:
        return _read(os.path.join(os.path.dirname(name), extended.group(1)))
    return json.loads(text)
