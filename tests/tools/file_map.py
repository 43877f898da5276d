"""The list of files in docs/architecture.md: the first sentence of each package and each file.

    python -m tests.tools.file_map

writes it again after a file was added, renamed or reworded; a test compares it with the sources.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
START = "# Files\n"
FOLDERS = (
    "gpurl",
    *(
        f"gpurl/{name}"
        for name in (
            "algorithms",
            "nn",
            "buffers",
            "engine",
            "guards",
            "checkpoints",
            "run",
            "video",
            "run/presets",
            "run/trackers",
            "tuning",
            "cluster",
            "cli",
            "cli/convert",
            "export",
            "adapters",
        )
    ),
    *(
        "envs",
        "envs/isaac_gym",
        "envs/numpy",
        "envs/mujoco",
        "kernels",
        "benchmarks",
        "tests/tools",
    ),
)


def file_map() -> str:
    """The page from START on."""
    lines = [START, "The first sentence of each file; `python -m tests.tools.file_map` writes it."]
    for folder in FOLDERS:
        files = sorted(path for path in (ROOT / folder).glob("*.py") if path.stem != "__init__")
        rows = [f"| {path.name} | {first_sentence(path)} |" for path in files]
        about = first_sentence(ROOT / folder / "__init__.py")
        lines += [f"\n## {folder}/\n", f"{about}.\n", "| file | |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, in one line, without its full stop."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    sentence = re.split(r"(?<!et al)\. ", " ".join(paragraph.split()))[0]
    return sentence.removesuffix(".").removesuffix(":").replace("|", "\\|")


def main() -> None:
    """Write the page."""
    text = PAGE.read_text().partition(START)[0]
    PAGE.write_text(text + file_map())


if __name__ == "__main__":
    main()
