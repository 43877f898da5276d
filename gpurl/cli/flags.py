"""Refuses wrong flags in one sentence: names that are none, values that are missing, words that are
no numbers.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from gpurl.checks import MAX_INTEGER
from gpurl.errors import UsageError, did_you_mean

MODULE = "MODULE:CLASS"  # among choices: one of the user's own


def check_flags(
    words: list[str],
    kinds: Mapping[str, object],
    command: str,
    algorithms_with: Callable[[str], list[str]] | None = None,
) -> None:
    """UsageError for the first wrong one of the words, all of them flags and their values.

    kinds: {name in the form of `flag_name`: type}. algorithms_with: the algorithms that have a
    setting of this name, for one that is not in `kinds`.
    """
    place = 0
    while place < len(words):
        word, has_value, value = words[place].partition("=")
        name = flag_name(word)
        flag = f"--{name}" if word.startswith("--") else word
        # --no-quiet, --network.no-shared
        positive = re.sub(r"(^|\.)no-", r"\1", name)
        is_switch = bool in (kinds.get(name), kinds.get(positive))
        if not flag.startswith("-"):
            raise UsageError(
                f"{words[place]!r} is the value of no setting; settings are written --name value "
                f"or name=value, which {command} --help lists"
            )
        if name not in kinds and not is_switch:
            alike = [f"--{known}" for known in kinds if known.count(".") == name.count(".")]
            near = did_you_mean(f"--{name}", alike, cutoff=0.75)
            if not near and algorithms_with and (others := algorithms_with(name)):
                near = f"it is a setting of {', '.join(others)}; "
            raise UsageError(f"{flag} is not known; {near}{command} --help lists what there is")
        behind = words[place + 1 : place + 2]
        if is_switch and not has_value and behind and not behind[0].startswith("-"):
            has_value, (value,) = "=", behind
        if has_value and is_switch:
            raise UsageError(f"{flag} is true or false, got {value!r}")
        given = [value] if has_value else [] if is_switch else _values(words[place + 1 :])
        if not is_switch:
            given = _checked_values(flag, given, kinds[name], command)
        place += 1 + (0 if has_value else len(given))


def check_known_flags(words: list[str], kinds: Mapping[str, object], command: str) -> None:
    """UsageError for a missing or wrong value of a flag in `kinds`; other words are for others."""
    for place, word in enumerate(words):
        flag, has_value, value = word.partition("=")
        kind = kinds.get(flag_name(flag), bool) if flag.startswith("--") else bool
        if kind is not bool:
            given = [value] if has_value else _values(words[place + 1 :])
            _checked_values(f"--{flag_name(flag)}", given, kind, command)


def check_options(words: list[str], command: Callable[..., int], name: str) -> None:
    """UsageError for the first wrong flag of a command whose parameters are its options."""
    hints = typing.get_type_hints(command)
    parameters = inspect.signature(command).parameters.values()
    flags = [each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY]
    kinds = {flag_name(each): hints[each] for each in flags}
    for word in words:
        if (
            word.startswith("--")
            and word != "--"
            and flag_name(word.partition("=")[0]) not in kinds
        ):
            check_flags([word], kinds, name)
    check_known_flags(words, kinds, name)


def _values(words: list[str]) -> list[str]:
    """The words before the next flag."""
    flags = [place for place, word in enumerate(words) if re.match(r"--\w", word)]
    return words[: flags[0]] if flags else words


def _checked_values(flag: str, words: list[str], kind: object, command: str) -> list[str]:
    """Those of the words behind a flag that are its values."""
    if typing.get_origin(kind) is tuple:
        for word in words:
            _check_value(flag, word, typing.get_args(kind)[0])
    if typing.get_origin(kind) is dict and (len(words) % 2 or not words):
        raise UsageError(f"{flag} takes pairs, as in {flag} NAME VALUE, got {' '.join(words)!r}")
    # also tuple[int, ...] | None, of a user's own environment
    if {typing.get_origin(each) for each in (kind, *typing.get_args(kind))} & MANY:
        return words
    if not words:
        raise UsageError(f"{flag} needs a value; {command} --help explains it")
    _check_value(flag, words[0], kind)
    return words[:1]


def _check_value(flag: str, word: str, kind: object) -> None:
    """UsageError for a word that is no number, or none of the choices, where one is wanted."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in UNIONS else (kind,)
    if word == "None" and type(None) in kinds:
        return
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        if word not in choices and not (MODULE in choices and ":" in word):
            guess = did_you_mean(word, choices, cutoff=0.75)
            raise UsageError(f"{flag} is {word!r}; {guess}it must be one of {', '.join(choices)}")
    for number, convert in NUMBERS.items():
        if number not in kinds or not {*kinds} <= {number, type(None)}:
            continue
        try:
            convert(word)
        except ValueError:
            wanted = "a number" if number is float else "a whole number"
            wanted += " below 2^63" if word.isdecimal() else ""
            raise UsageError(f"{flag} must be {wanted}, got {word[:40]!r}") from None


def whole_number(word: str) -> int:
    """An integer below 2^63, which may be written 1e6; ValueError for any other word."""
    has_exponent = re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d+", word)
    is_whole = has_exponent and float(word).is_integer()  # not inf
    number = int(float(word)) if is_whole else int(word)
    if abs(number) > MAX_INTEGER:
        raise ValueError(f"{word[:20]} is not below 2^63")
    return number


def flag_name(word: str) -> str:
    """`run-dir` of `--run_dir` or `run_dir`."""
    return word.removeprefix("--").replace("_", "-")


MANY = {tuple, list, dict, set}
UNIONS = (typing.Union, types.UnionType)
NUMBERS: dict[type, Callable[[str], float]] = {int: whole_number, float: float}

WHOLE_NUMBERS = ConstructorRegistry()  # for tyro


@WHOLE_NUMBERS.primitive_rule
def _whole_number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    """Integers are also written 1e6."""
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: whole_number(words[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )
