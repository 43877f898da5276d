"""Where the modules of a run are: its environment or algorithm may be a file beside the folder that
it was trained in, and not where the command is called.
"""

import shlex
from collections.abc import Iterable
from os.path import isfile  # False for what is no path
from pathlib import Path

from gpurl.discovery import is_importable
from gpurl.errors import GpurlError
from gpurl.run.config_file import read_config


def module_hint(words: Iterable[str], error: str) -> str:
    """A sentence for each run folder among `words` whose modules `error` names, cannot be imported
    here, but are in a folder around the run; "" if there is none.
    """
    sentences = []
    for folder in [Path(word) for word in words if isfile(Path(word, "config.yaml"))]:
        try:
            settings = read_config(folder / "config.yaml")
        except GpurlError:
            continue
        for key in ("env", "algorithm"):
            module = str(settings.get(key)).partition(":")[0]
            file = Path(*module.split(".")).with_suffix(".py")
            around = [parent for parent in folder.resolve().parents if (parent / file).is_file()]
            if around and module in error and not is_importable(module):
                sentences.append(
                    f"{module} of this run is {around[0] / file}: call the command from "
                    f"{shlex.quote(str(around[0]))}, or with PYTHONPATH={around[0]}"
                )
    return "\n".join(sentences)
