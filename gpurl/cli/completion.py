"""Completion for bash, zsh and fish: `gpurl completion bash` prints a script that holds all names
and flags, so that the shell answers without starting Python. It is written anew after an update.
"""

import dataclasses
import typing
from collections.abc import Iterable, Mapping

import tyro

from gpurl.algorithms import algorithm_names, config_class, resolve_algorithm
from gpurl.checks import choices_of
from gpurl.cli.env_options import options_class
from gpurl.cli.settings import (
    ClusterOptions,
    ConfigOptions,
    ConvertOptions,
    ProfileOptions,
    TrainOptions,
    TuneOptions,
)
from gpurl.envs.registry import env_names
from gpurl.errors import UsageError
from gpurl.run.settings import TrainConfig

OPTIONS = {
    "train": TrainOptions,
    "tune": TuneOptions,
    "pbt": ClusterOptions,
    "tournament": ClusterOptions,
    "config": ConfigOptions,
    "profile": ProfileOptions,
    "convert": ConvertOptions,
}
# words of a command in place of a run folder or a file
NAMES = {"envs", "check-env"}
RUNS = {"eval", "export", "play", "plot", "report", "soup"}


@dataclasses.dataclass(frozen=True)
class Words:
    """All that can be completed."""

    commands: tuple[str, ...]
    algorithms: tuple[str, ...]
    envs: tuple[str, ...]
    flags: Mapping[str, tuple[str, ...]]  # of a command, an algorithm or an environment
    choices: Mapping[str, tuple[str, ...]]  # of a flag


def completion_script(shell: str, commands: Mapping[str, object]) -> str:
    """The script for a shell; UsageError for one that is not known. commands: {name: function}."""
    if shell not in TEMPLATES:
        raise UsageError(f"gpurl completion takes {', '.join(TEMPLATES)}, got {shell or 'nothing'}")
    words = completion_words(commands)
    parts = {
        "COMMANDS": " ".join(words.commands),
        "ALGORITHMS": " ".join(words.algorithms),
        "ENVS": " ".join(words.envs),
        "TRAINING": "|".join(OPTIONS) if shell != "fish" else " ".join(OPTIONS),
        "RUNS": "|".join(sorted(RUNS)) if shell != "fish" else " ".join(sorted(RUNS)),
        "NAMES": "|".join(sorted(NAMES)) if shell != "fish" else " ".join(sorted(NAMES)),
        "FLAGS": _cases(shell, words.flags),
        "CHOICES": _cases(shell, words.choices),
    }
    script = TEMPLATES[shell]
    for name, text in parts.items():
        script = script.replace(f"@{name}@", text)
    return script


def completion_words(commands: Mapping[str, object]) -> Words:
    """The names and flags of this version."""
    flags = {f"command:{name}": tuple(_flags(kind)) for name, kind in OPTIONS.items()}
    for name in OPTIONS:
        flags[f"command:{name}"] += (*_flags(TrainConfig), "--help", "--help-all")
    for name, function in commands.items():
        if name not in OPTIONS and name != "bench":
            flags[f"command:{name}"] = (*_parameters(function), "--help")
    choices = _choices(TrainConfig) | _choices(TuneOptions)
    for function in commands.values():
        for name, hint in typing.get_type_hints(function).items():
            if typing.get_origin(hint) is typing.Literal:
                choices[f"--{name.replace('_', '-')}"] = typing.get_args(hint)
    for name in algorithm_names():
        config = config_class(resolve_algorithm(name))
        flags[f"algorithm:{name}"] = tuple(_flags(config))
        # a flag may have other choices in another algorithm
        for flag, values in _choices(config).items():
            choices[flag] = tuple(dict.fromkeys((*choices.get(flag, ()), *values)))
    for name in env_names():
        flags[f"env:{name}"] = tuple(_flags(options_class(name), "env."))
    return Words(tuple(commands), tuple(algorithm_names()), tuple(env_names()), flags, choices)


def _flags(kind: type, group: str = "") -> Iterable[str]:
    """Of a dataclass, nested ones included; both forms of a switch."""
    for _, hint, name in _fields(kind, group):
        if tyro.conf.Positional in getattr(hint, "__metadata__", ()):
            continue
        yield f"--{name}"
        if hint is bool:
            head, dot, last = name.rpartition(".")
            yield f"--{head}{dot}no-{last}"


def _choices(kind: type) -> dict[str, tuple[str, ...]]:
    found = {}
    for item, _, name in _fields(kind, ""):
        owner, field = item
        if field in (known := choices_of(owner)):
            found[f"--{name}"] = known[field]
    return found


def _fields(kind: type, group: str) -> Iterable[tuple[tuple[type, str], object, str]]:
    """((dataclass, field), its type, its name on the command line)."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for item in dataclasses.fields(kind):
        hint = hints[item.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _fields(hint, f"{group}{item.name.replace('_', '-')}.")
        else:
            yield (kind, item.name), hint, f"{group}{item.name.replace('_', '-')}"


def _parameters(function: object) -> Iterable[str]:
    """Flags of a command whose options are its parameters."""
    import inspect

    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        if parameter.kind is not parameter.POSITIONAL_ONLY and parameter.name != "words":
            yield f"--{parameter.name.replace('_', '-')}"


def _cases(shell: str, table: Mapping[str, tuple[str, ...]]) -> str:
    """The rows of `case` in bash and zsh, of `switch` in fish."""
    rows = [(key, " ".join(row)) for key, row in table.items()]
    if shell == "fish":
        return "\n".join(f"        case '{key}'\n            echo {row}" for key, row in rows)
    return "\n".join(f'        {key}) echo "{row}" ;;' for key, row in rows)


# the function that all three have in common: flags of what stands on the line, else names
SHARED = """_gpurl_flags() {
    case "$1" in
@FLAGS@
    esac
}

_gpurl_choices() {
    case "$1" in
@CHOICES@
    esac
}

_gpurl_runs() {
    local folder
    for folder in "$1"*/ runs/*/*/*/ ; do
        [ -e "${folder}config.yaml" ] && echo "${folder%/}"
    done
}

# candidates for the word $1, after the words of the line before it
_gpurl_candidates() {
    local word="$1" previous="" command="" algorithm="" env="" each place=0
    shift
    for each in "$@"; do
        case "$each" in -*) ;; *)
            [ $place = 0 ] && command="$each"
            [ $place = 1 ] && algorithm="$each"
            [ $place = 2 ] && env="$each"
            [ "${previous#-}" = "$previous" ] && place=$((place + 1)) ;;
        esac
        previous="$each"
    done
    [ $place = 0 ] && { echo "@COMMANDS@"; return; }
    case "$word" in -*)
        _gpurl_flags "command:$command"
        case "$command" in @TRAINING@)
            _gpurl_flags "algorithm:$algorithm"
            _gpurl_flags "env:${env%%:*}" ;;
        esac
        return ;;
    esac
    case "$previous" in
        --resume|--teacher|--init-from) _gpurl_runs "$word"; return ;;
        --env) echo "@ENVS@"; return ;;
        --algorithm) echo "@ALGORITHMS@"; return ;;
        -*) _gpurl_choices "$previous"; return ;;
    esac
    case "$command" in
        @TRAINING@)
            [ $place = 1 ] && echo "@ALGORITHMS@"
            [ $place = 2 ] && echo "@ENVS@" ;;
        @RUNS@) _gpurl_runs "$word" ;;
        @NAMES@) echo "@ENVS@" ;;
        completion) echo "bash zsh fish" ;;
    esac
}
"""
BASH = f"""# completion of gpurl for bash: gpurl completion bash > \
~/.local/share/bash-completion/completions/gpurl
{SHARED}
_gpurl() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}"
    local before=("${{COMP_WORDS[@]:1:COMP_CWORD-1}}")
    COMPREPLY=($(compgen -W "$(_gpurl_candidates "$word" "${{before[@]}}")" -- "$word"))
}}
complete -o default -F _gpurl gpurl
"""
ZSH = f"""#compdef gpurl
# completion of gpurl for zsh: gpurl completion zsh > FOLDER/_gpurl, a folder of fpath
{SHARED}
_gpurl() {{
    setopt localoptions nonomatch
    local candidates
    candidates=("${{(@)=$(_gpurl_candidates "${{words[CURRENT]}}" "${{(@)words[2,CURRENT-1]}}")}}")
    compadd -- "${{candidates[@]}}" || _files
}}
if [ "$funcstack[1]" = "_gpurl" ]; then _gpurl "$@"; else compdef _gpurl gpurl; fi
"""
FISH = """# completion of gpurl for fish:
# gpurl completion fish > ~/.config/fish/completions/gpurl.fish
function __gpurl_flags
    switch $argv[1]
@FLAGS@
    end
end

function __gpurl_choices
    switch $argv[1]
@CHOICES@
    end
end

function __gpurl_runs
    for folder in $argv[1]*/ runs/*/*/*/
        test -e "$folder"config.yaml; and string trim --right --chars=/ $folder
    end
end

function __gpurl_candidates
    set -l word (commandline -ct)
    set -l before (commandline -opc)[2..]
    set -l names
    set -l previous ""
    for each in $before
        if not string match -q -- '-*' $each; and not string match -q -- '-*' $previous
            set -a names $each
        end
        set previous $each
    end
    if test (count $names) = 0
        string split ' ' "@COMMANDS@"
        return
    end
    if string match -q -- '-*' $word
        for key in command:$names[1] algorithm:$names[2] env:(string split -f1 : -- "$names[3]")
            __gpurl_flags $key | string split ' '
        end
        return
    end
    switch $previous
        case --resume --teacher --init-from
            __gpurl_runs $word
        case --env
            string split ' ' "@ENVS@"
        case --algorithm
            string split ' ' "@ALGORITHMS@"
        case '-*'
            __gpurl_choices $previous | string split ' '
        case '*'
            switch $names[1]
                case @TRAINING@
                    test (count $names) = 1; and string split ' ' "@ALGORITHMS@"
                    test (count $names) = 2; and string split ' ' "@ENVS@"
                case @RUNS@
                    __gpurl_runs $word
                case @NAMES@
                    string split ' ' "@ENVS@"
                case completion
                    string split ' ' "bash zsh fish"
            end
    end
end

complete -c gpurl -a '(__gpurl_candidates)'
"""
TEMPLATES = {"bash": BASH, "zsh": ZSH, "fish": FISH}
