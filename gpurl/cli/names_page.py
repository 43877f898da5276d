"""What `gpurl train --help` prints: the algorithms and environments to choose from. It needs no
torch, which takes seconds to import.
"""

import shutil
import textwrap

from gpurl.discovery import algorithm_names, env_names

PIPE_WIDTH = 100  # letters in a line where no terminal is
HELP = {"-h", "--help", "--help-all"}


def asks_for_names(words: list[str]) -> bool:
    """Whether the words behind a command ask for help and name nothing."""
    return bool(words) and HELP.issuperset(words)


def names_page(command: str) -> str:
    """How `gpurl COMMAND` begins, and the names that it takes."""
    lines = [
        f"gpurl {command} ALGORITHM ENV [settings], for example gpurl {command} ppo chasing",
        f"algorithms: {', '.join(algorithm_names())}, or the module path of your own",
        f"environments: {', '.join(env_names())}, an id of Gymnasium, or the module path of your "
        f"own; gpurl envs explains them",
        f"gpurl {command} ALGORITHM ENV --help lists the settings",
    ]
    width = shutil.get_terminal_size((PIPE_WIDTH, 0)).columns
    return "\n".join(textwrap.fill(line, width, subsequent_indent="    ") for line in lines)
