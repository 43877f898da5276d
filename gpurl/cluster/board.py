"""The board of a population: the states that members may go on from, in the folder of a
leaderboard. It is given the folders of checkpoints, so that weights go from storage to storage.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from gpurl.checkpoints.folders import load_checkpoint
from gpurl.checkpoints.leaderboard import Entry, Leaderboard
from gpurl.checkpoints.storage import Storage
from gpurl.errors import CheckpointError, first_line


class Board(Protocol):
    """What members and the driver ask of a board; CheckpointError if its folder fails."""

    def submit(self, entry: Mapping[str, Any], checkpoint: str) -> bool:
        """Enter the state in a run's checkpoint, if it is good enough; returns whether it was."""

    def entries(self) -> list[Entry]:
        """The best first."""

    def remove(self, names: Collection[str]) -> None:
        """Drop entries."""


class FolderBoard:
    """The board itself."""

    def __init__(self, folder: str, capacity: int, url: str = "") -> None:
        """url: of other storage, of which the folder is a copy. UsageError for what cannot be
        written.
        """
        storage = Storage(url) if url else None
        self._leaderboard = Leaderboard(Path(folder), capacity, storage)

    def submit(self, entry: Mapping[str, Any], checkpoint: str) -> bool:
        """entry: fields of an Entry. Of the checkpoint weights and optimiser are kept."""
        parts, _ = load_checkpoint(Path(checkpoint), quiet=True, without=("replay",))
        state = {"weights": parts["model"], "learning": parts["training"]}
        return self._leaderboard.submit(Entry(**entry), state)

    def entries(self) -> list[Entry]:
        return [*self._leaderboard.entries()]

    def remove(self, names: Collection[str]) -> None:
        self._leaderboard.remove(names)


class BoardOfRows:
    """A board in another process, that answers in plain values: what it refuses is a
    CheckpointError here, too, and so is that it does not answer.
    """

    def __init__(self, ask: Any) -> None:
        """ask: calls a method of `BoardRows` there, ask(name, *arguments)."""
        self._ask = ask

    def submit(self, entry: Mapping[str, Any], checkpoint: str) -> bool:
        return bool(self._answer("submit", dict(entry), checkpoint))

    def entries(self) -> list[Entry]:
        return [Entry(**row) for row in self._answer("entries")]

    def remove(self, names: Collection[str]) -> None:
        self._answer("remove", sorted(names))

    def _answer(self, name: str, *arguments: Any) -> Any:
        try:
            answer = self._ask(name, *arguments)
        except Exception as error:  # of Ray: the process has ended, or cannot be reached
            reason = first_line(error) or type(error).__name__
            raise CheckpointError(f"the board does not answer: {reason}") from error
        if "error" in answer:
            raise CheckpointError(answer["error"])
        return answer["value"]


class BoardRows:
    """The other end of `BoardOfRows`."""

    def __init__(self, folder: str, capacity: int, url: str = "") -> None:
        self._board = FolderBoard(folder, capacity, url)

    def ask(self, name: str, *arguments: Any) -> dict[str, Any]:
        """{"value": the answer} or {"error": a text}."""
        try:
            value = getattr(self._board, name)(*arguments)
        except CheckpointError as error:
            return {"error": str(error)}
        return {"value": [asdict(each) for each in value] if name == "entries" else value}
