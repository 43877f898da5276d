"""Output in a notebook: a table that is redrawn in its place, and a picture below the cell. Nothing
happens where no notebook runs; IPython is never imported by us.
"""

import html
import sys
from pathlib import Path
from typing import Any


def display_module() -> Any:
    """IPython's functions of display in a notebook, else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # a console of IPython has no kernel
    return None if shell is None or not hasattr(shell, "kernel") else sys.modules["IPython.display"]


def show_picture(path: Path) -> None:
    """Show a picture below the cell."""
    module = display_module()
    if module is not None and path.is_file():
        module.display(module.Image(filename=str(path), width=900))


class LiveTable:
    """A table below the cell: `show` draws it, and draws it again in its place."""

    def __init__(self) -> None:
        self._module = display_module()
        self._handle: Any = None

    def show(self, title: str, progress: str, share: float | None, cells: dict[str, str]) -> None:
        """progress: in words. share: of the way, 0 to 1. cells: label and text of the numbers."""
        table = _Table(title, progress, share, cells)
        if self._handle is None:
            self._handle = self._module.display(table, display_id=True)
        else:
            self._handle.update(table)


class _Table:
    """Its forms as HTML and as text."""

    def __init__(
        self, title: str, progress: str, share: float | None, cells: dict[str, str]
    ) -> None:
        self.title = title
        self.progress = progress
        self.share = share
        self.cells = cells

    def __repr__(self) -> str:
        lines = [f"{label:<18}{text}" for label, text in self.cells.items()]
        return "\n".join([self.title, self.progress, *lines])

    def _repr_html_(self) -> str:
        bar = ""
        if self.share is not None:
            bar = f'<progress value="{self.share:.4f}" max="1" style="width: 16em"></progress> '
        cells = list(self.cells.items())
        # two columns of label and text, read downwards
        height = -(-len(cells) // 2)
        rows = [
            "".join(
                f'<td style="text-align: left; opacity: 0.7">{html.escape(label)}</td>'
                f'<td style="text-align: left; padding-right: 3em">{html.escape(text)}</td>'
                for label, text in cells[row::height]
            )
            for row in range(height)
        ]
        table = "".join(f"<tr>{row}</tr>" for row in rows)
        return (
            f"<div><b>{html.escape(self.title)}</b><br>{bar}{html.escape(self.progress)}"
            f"<table>{table}</table></div>"
        )
