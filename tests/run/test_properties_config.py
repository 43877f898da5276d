"""Any settings written as words, or as config.yaml, and read back are the settings: for every
algorithm, drawn from its fields.
"""

import dataclasses
import tempfile
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from gpurl.algorithms import algorithm_names, config_class, resolve_algorithm
from gpurl.cli.settings import parse_train
from gpurl.errors import UsageError
from gpurl.run.config_file import as_yaml, read_config
from gpurl.run.settings import Settings, TrainConfig, make_settings

CHOSEN = {  # what such a field may be; all others are drawn by their type
    "device": ["auto", "cpu", "cuda:1"],
    "save_every": ["60s", "1.5s", "100i", "3it"],
    "tag_style": ["sb3", "cleanrl", "rsl_rl"],
    "nan": ["raise", "skip", "reset-envs"],
    "graph": ["auto", "full", "off"],
    "rollout": ["auto", "persistent", "steps"],
    "update": ["auto", "fused", "autograd"],
    "precision": ["float32", "tf32", "bf16"],
    "root": ["runs", "a folder", "true,x", "1e3", "a=b", "true", "None", "[a]", "-1", ""],
    "schedule": ["constant", "linear"],
    "threads": [1],
    "batch_size": [
        1,
        64,
        100,
    ],  # what fits one field fits the others too, or most examples would be refused
    "learning_starts": [100, 1000, 10**6],
    "replay_size": [10**6, 10**9],
    "updates": [2, 6, 10**6],
    "policy_delay": [1, 2],
    "num_critics": [2, 10],
    "target_subset": [1, 2],
    "activation": ["tanh", "elu", "relu", "silu", "gelu"],
    "memory": ["none", "gru", "lstm", "mingru"],
    "storage": ["float32", "bfloat16"],
}
SHARES = {  # from 0 to 1, where other real numbers may be larger
    *(
        "gamma",
        "gae_lambda",
        "q_lambda",
        "tau",
        "final_obs_fraction",
        "epsilon_start",
        "epsilon_end",
        "epsilon_fraction",
    ),
    *("per_alpha", "per_beta", "priority_decay"),
}
REFUSED = {  # settings that an algorithm takes no other value of
    "a2c": frozenset({"epochs", "minibatches", "clip_range", "clip_range_value", "target_kl"}),
    "bc": frozenset({"n_step", "reward_scale", "prioritized"}),
}
WHOLE = st.integers(1, 100) | st.sampled_from([10**6, 10**9])
SHARE = st.floats(0.0, 1.0, exclude_min=True) | st.sampled_from([1e-5, 3e-4, 0.1])
REAL = SHARE | st.floats(1.0, 1e9) | st.sampled_from([1e16, 2.0])


def value_of(name: str, hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field: of its type, and mostly such as settings have."""
    if dataclasses.is_dataclass(hint):
        return some_fields(typing.cast(type, hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return st.one_of(
            [
                st.none() if part is type(None) else value_of(name, part)
                for part in typing.get_args(hint)
            ]
        )
    if typing.get_origin(hint) is dict:  # options of a trunk of one's own: there is none
        return st.nothing()
    if typing.get_origin(hint) is tuple:
        return st.lists(value_of(name, typing.get_args(hint)[0]), min_size=1, max_size=3).map(tuple)
    if name in CHOSEN:
        return st.sampled_from(CHOSEN[name])
    return {
        bool: st.booleans(),
        int: WHOLE,
        float: SHARE if name in SHARES else REAL,
        str: st.nothing(),
    }[hint]


def some_fields(
    kind: type, without: frozenset[str] = frozenset()
) -> st.SearchStrategy[dict[str, Any]]:
    """name -> value of some of a dataclass's fields."""
    hints = typing.get_type_hints(kind)
    optional = {}
    for item in dataclasses.fields(kind):
        values = value_of(item.name, hints[item.name])
        if item.name not in without and not values.is_empty:
            optional[item.name] = values
    return st.fixed_dictionaries({}, optional=optional)


def words_of(values: dict[str, Any], before: str = "") -> list[str]:
    """Flags, as someone would type them."""
    words: list[str] = []
    for name, value in values.items():
        flag = f"--{before}{name.replace('_', '-')}"
        if isinstance(value, dict):
            words += words_of(value, f"{before}{name.replace('_', '-')}.")
        elif isinstance(value, bool):
            words.append(flag if value else f"--{before}no-{name.replace('_', '-')}")
        else:
            words += [flag, *map(str, value if isinstance(value, tuple) else [value])]
    return words


def assumed(algorithm: str, env: str, values: dict[str, Any]) -> Settings:
    """The settings; what is refused as a whole, though each value is of its type, is no example."""
    try:
        return make_settings(algorithm, env, **values)
    except UsageError:
        reject()


@pytest.mark.parametrize("algorithm", algorithm_names())
@settings(
    max_examples=max(settings().max_examples // 15, 1)
)  # tyro takes its time, and there are many algorithms
@given(data=st.data())
def test_words_and_files_give_the_settings_they_were_made_of(algorithm: str, data: Any) -> None:
    kind = config_class(resolve_algorithm(algorithm))
    values = data.draw(some_fields(TrainConfig)) | data.draw(
        some_fields(kind, REFUSED.get(algorithm, frozenset()))
    )
    expected = assumed(algorithm, "chasing", values)
    assert parse_train([algorithm, "chasing", *words_of(values)])[0] == expected
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_bytes(as_yaml(expected.to_dict()))
        read = read_config(file)
    written = dict(read)
    again = make_settings(read.pop("algorithm"), read.pop("env"), **read)
    assert again == dataclasses.replace(
        expected, train=dataclasses.replace(expected.train, run_dir=None)
    )
    assert again.to_dict() == written


def test_a_text_that_looks_like_a_number_stays_one(tmp_path: Path) -> None:
    """PyYAML writes 1e3 as it is, being of YAML 1.1; who reads YAML 1.2 reads a number."""
    values = {
        "root": "1e3",
        "tag": "-2E-5",
        "rates": [1e-05, "1e-05"],
        "name": "true",
        "steps": 1000,
    }
    (tmp_path / "config.yaml").write_bytes(as_yaml(values))
    assert read_config(tmp_path / "config.yaml") == values
    (tmp_path / "config.yaml").write_text("root: 1e3_runs\nlearning_rate: 1e-3\n")
    assert read_config(tmp_path / "config.yaml") == {"root": "1e3_runs", "learning_rate": 0.001}
