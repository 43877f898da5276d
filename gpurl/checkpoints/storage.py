"""A folder on other storage, by fsspec: s3://, gs://, az://, sftp://, hdfs://, ... Each protocol
needs the package that fsspec names, s3fs for s3://; credentials are where that package looks.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpurl.errors import UsageError, first_line

URL = re.compile(r"[a-z][a-z0-9+.-]*://.", re.IGNORECASE)
PASSWORD, PATTERN = re.compile(r"://[^/@]*:[^/@]*@"), re.compile(r"[*?\[\]]")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")  # of what is read from there


def is_url(place: str) -> bool:
    """Whether it is a URL, not a path."""
    return URL.match(place) is not None


class Storage:
    """The folder at a URL; names of files and folders are relative to it. Its methods raise OSError
    for whatever goes wrong there, FileNotFoundError where something is missing.
    """

    def __init__(self, url: str) -> None:
        """UsageError for an unknown protocol, one whose package is missing, and for a URL that
        is none of one folder.
        """
        self.url = url
        if PASSWORD.search(url):  # it would stand in logs and checkpoints
            raise UsageError(
                "the URL of a storage has a password: leave it where the package of the protocol "
                "looks for credentials"
            )
        if PATTERN.search(url):  # fsspec would delete all that match
            raise UsageError(f"{url} is a pattern, with one of * ? [ ]: it must name one folder")
        if "::" in url:
            raise UsageError(f"{url} is a chain of protocols, it must be one, such as s3://")
        try:
            import fsspec  # torch needs it, too

            protocol, mark, path = url.partition("://")
            self._files, root = fsspec.core.url_to_fs(f"{protocol.lower()}{mark}{path}")
        except Exception as error:  # of any type: packages that make connections
            raise UsageError(f"no storage at {url}: {first_line(error)}") from error
        self._root = root.rstrip("/")

    def read_file(self, name: str, limit: int) -> bytes:
        """Its content, of `limit` bytes at most."""
        with self._errors():
            content = bytes(self._files.cat_file(self._path(name), start=0, end=limit + 1))
        if len(content) > limit:
            raise OSError(f"{self.url}: {name} has more than {limit} bytes")
        return content

    def write_file(self, name: str, content: bytes) -> None:
        """Object stores write completely or not at all."""
        with self._errors():
            self._make_folder_of(name)
            self._files.pipe_file(self._path(name), content)

    def write_folder(self, name: str, folder: Path) -> None:
        """Copy the files of `folder`, which has no folders."""
        for file in sorted(folder.iterdir()):
            with self._errors():
                self._make_folder_of(f"{name}/{file.name}")
                self._files.put_file(str(file), self._path(f"{name}/{file.name}"))

    def read_folder(self, name: str, folder: Path) -> None:
        """Copy the files there into `folder`, which exists. ValueError for a name that would lead
        elsewhere.
        """
        with self._errors():
            self._files.invalidate_cache()  # of lists
            paths = self._files.ls(self._path(name), detail=False)
        for path in paths:
            file = path.rstrip("/").rpartition("/")[2]
            if not FILE_NAME.fullmatch(file):
                raise ValueError(f"a file in {name} is called {file[:80]!r}")
            with self._errors():
                self._files.get_file(path, str(folder / file))

    def remove_folder(self, name: str) -> None:
        """And all in it; nothing if there is none."""
        with self._errors():
            self._files.invalidate_cache()
            if self._files.exists(self._path(name)):
                self._files.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_folder_of(self, name: str) -> None:
        self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # those of packages may be of any class
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
            raise kind(f"{self.url}: {first_line(error)}") from error
        except Exception as error:  # of the package of the protocol
            raise OSError(f"{self.url}: {first_line(error)}") from error
