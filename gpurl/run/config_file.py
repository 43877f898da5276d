"""YAML files of settings: read with limits, and written so that they read back as they were."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from gpurl.checkpoints.plain_files import Json, read_at_most
from gpurl.errors import UsageError

MAX_CONFIG_BYTES = 1 << 20
MAX_CONFIG_VALUES = 10_000
MAX_NUMBER_LENGTH = 400


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as in YAML 1.2 (PyYAML reads it as text). Merge keys are
    refused: a few hundred bytes of them expand to millions of values.
    """

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for name, _ in node.value:
            if name.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, "merge keys (<<) are not allowed, write the values", name.start_mark
                )
        super().flatten_mapping(node)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Numbers to base 60 (1:30) take hours if they are long."""
        if len(node.value) > MAX_NUMBER_LENGTH:
            raise yaml.constructor.ConstructorError(
                None, None, f"a number has {len(node.value)} characters", node.start_mark
            )
        is_int = node.tag == "tag:yaml.org,2002:int"
        return self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)
# numbers with an exponent need no point and no sign
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
        list("-+0123456789"),
    )  # type: ignore[attr-defined]


def as_yaml(values: Mapping[str, Json]) -> bytes:
    """A file that `read_config` reads as `values`; strings must be printable."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True).encode()


def read_options(words: Iterable[str]) -> dict[str, Json]:
    """{name: value} of words NAME=VALUE, whose values are written as in YAML."""
    options: dict[str, Json] = {}
    for word in words:
        name, separator, text = word.partition("=")
        try:
            value = _Loader(text).get_single_data()
        except Exception:  # as in `read_config`
            separator = ""
        if not separator or not name.isidentifier():
            raise UsageError(f"options are NAME=VALUE, got {word!r}")
        options[name] = value
    return options


def read_config(path: str | Path, follows: bool = False) -> dict[str, Json]:
    """Values of a YAML file of settings; UsageError says what is wrong with it. follows: also where
    it is a link, as a user may name one.
    """
    # the file may be a user's, another program's or damaged
    try:
        text = read_at_most(Path(path).resolve() if follows else Path(path), MAX_CONFIG_BYTES)
        values = _Loader(text.decode("utf-8")).get_single_data()
        _check_size(values, MAX_CONFIG_VALUES)
    except FileNotFoundError:
        raise UsageError(f"there is no config file {path}") from None
    except Exception as error:  # what is damaged raises errors of any type in PyYAML
        raise UsageError(f"cannot read {path} as YAML: {error or type(error).__name__}") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise UsageError(f"{path} must hold `name: value` lines, got {type(values).__name__}")
    return values


def _check_size(value: Json, remaining: int) -> int:
    """`remaining` minus the number of values in `value`; ValueError below 0, which happens when
    aliases name each other over and over, and for a name that is no text.
    """
    remaining -= 1
    if remaining < 0:
        raise ValueError(f"it expands to more than {MAX_CONFIG_VALUES} values")
    if isinstance(value, dict) and (keys := [key for key in value if type(key) is not str]):
        raise ValueError(f"it must hold `name: value` lines, {keys[0]!r} is no name")
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        remaining = _check_size(item, remaining)
    return remaining
