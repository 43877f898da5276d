"""One HTML page of a run that needs nothing beside it: curves, video, times, settings, machine,
versions and changes. It is made from the files of the run alone; nothing of them is executed,
neither by gpurl nor by the browser.
"""

import base64
import json
import math
import shlex
from collections.abc import Iterable, Sequence
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from gpurl import __version__
from gpurl.checkpoints.plain_files import Json, read_at_most, replace_file
from gpurl.colors import BLUE, GREEN, INK, ORANGE, PALE, PURPLE
from gpurl.errors import GpurlError, UsageError
from gpurl.run.config_file import read_config
from gpurl.run.display import counted
from gpurl.run.listing import RunEntry, find_runs, is_run
from gpurl.run.plot import (
    STYLE,
    Series,
    curve_figure,
    file_content,
    finish_axes,
    new_figure,
    read_metrics,
)
from gpurl.run.records import RECORDS, SOURCES_FOLDER
from gpurl.run.run_folder import EPISODE, VIDEOS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_VIDEO_BYTES = 32 << 20  # of a video inside the page
MAX_PICTURE_BYTES = 8 << 20
MAX_TEXT_BYTES = 1 << 20  # of command.txt and of each file of a record
MAX_DIFF_CHARACTERS = 100_000  # that are shown
MAX_PANELS = 60
COLUMNS = 4  # of small panels
VIDEO_TYPES = {".mp4": "video/mp4", ".gif": "image/gif"}
# they are in the learning curve, or only count
NOT_DRAWN = ("time/", "eval/std_reward", "eval/episodes")
MIN_REST = 0.01  # of the training's time, from which what is in no phase is told
GROUP_COLORS = {"rollout": BLUE, "eval": ORANGE, "train": PURPLE, "env": GREEN}
# a page that holds a stranger's texts may load and execute nothing
POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
CSS = f"""
body {{ font: 15px/1.5 system-ui, sans-serif; color: {INK}; max-width: 64rem; margin: 2rem auto;
  padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; margin: 0 0 .6rem; }} h2 {{ font-size: 1.1rem; margin: 2rem 0 .5rem; }}
img, video {{ max-width: 100%; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: .15rem .8rem .15rem 0; border-bottom: 1px solid {PALE}; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }}
td:first-child {{ overflow-wrap: normal; }}
pre {{ background: #f6f7f9; padding: .6rem; overflow-x: auto; font-size: 13px; }}
pre.command {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
summary {{ cursor: pointer; }}
"""


def write_report(folder: Path, out: Path | None = None, video: Path | None = None) -> Path:
    """Write the page of the run in `folder`, by default to report.html there; returns its path.

    video: to show, .mp4 or .gif; by default the newest one in the run folder. UsageError if
    `folder` is no run or the video cannot be shown, GpurlError if the page cannot be written.
    """
    if not is_run(folder):
        raise UsageError(f"{folder} is not a run folder")
    out = folder / "report.html" if out is None else out
    if not out.parent.is_dir():
        raise UsageError(
            f"cannot write {out}: there is no folder {out.parent}; make it, or choose another "
            f"place with --out"
        )
    (entry,) = find_runs(folder)
    series = read_metrics(folder)
    sections = [
        _summary(entry, series),
        _section("Learning curve", _picture(curve_figure(folder), "learning curve")),
        _section("One episode", _episode(folder)),
        _section("Video", _video(folder, video)),
        _section("Where the time went", _times(series)),
        _section("All metrics", _metrics(series)),
        _section("Settings", _settings(folder)),
        _section("Commands", _commands(folder)),
        *_records(folder),
    ]
    title = escape(_title(entry))
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<title>{title}</title><style>{CSS}</style></head>\n<body><h1>{title}</h1>\n"
        f"{''.join(sections)}<p>gpurl {escape(__version__)}</p></body></html>\n"
    )
    try:
        replace_file(out, page.encode(errors="replace"))
    except OSError as error:
        raise GpurlError(f"cannot write {out}: {error.strerror or error}") from error
    return out


def _title(entry: RunEntry) -> str:
    names = (entry.env, entry.algorithm, f"seed {entry.settings.get('seed', '?')}")
    return " · ".join(name or "?" for name in names)


# ---- parts of the page ----


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{content}\n" if content else ""


def _table(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """HTML of rows of texts, "" without rows."""
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>\n" for row in rows
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}\n{body}</table>" if body else ""


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n{content}</details>\n" if content else ""


def _summary(entry: RunEntry, series: Series) -> str:
    """How far the run came and how good it became."""
    reason = f" ({entry.reason})" if entry.reason else ""
    rows: list[tuple[str, str]] = [("state", f"{entry.state}{reason}")]
    if entry.steps is not None:
        rows.append(("environment steps", f"{entry.steps:,}"))
    if entry.best_return is not None:
        rows.append(("best evaluation", f"{entry.best_return:,.4g}"))
    last, spread, count = (
        _last(series, f"eval/{name}") for name in ("mean_reward", "std_reward", "episodes")
    )
    if last is not None:
        text = f"{last:,.4g}" if spread is None else f"{last:,.4g} ± {spread:,.3g}"
        if count is not None:
            text += f", {counted(int(count), 'episode')}"
        rows.append(("last evaluation", text))
    if (seconds := _last(series, "time/time_elapsed")) is not None:
        rows.append(("training time", str(timedelta(seconds=round(seconds)))))
        if entry.steps and seconds > 0:
            # steps are those of one member of a population
            members = {
                name
                for part, _, rest in (tag.partition("/") for tag in series)
                if part == "members" and (name := rest.partition("/")[0]).isdigit()
            }
            speed = entry.steps * max(len(members), 1) / seconds
            rows.append(("environment steps/s", f"{speed:,.0f}"))
    return _table(rows)


def _last(series: Series, tag: str) -> float | None:
    values = [value for value in series.get(tag, ([], []))[1] if math.isfinite(value)]
    return values[-1] if values else None


def _picture(figure: "Figure", description: str) -> str:
    """The figure inside the page."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        source = _data("image/png", file_content(figure))
    return f'<img alt="{escape(description)}" src="{source}">'


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _video(folder: Path, given: Path | None) -> str:
    """`given` or the newest video of the run; a sentence if there is none that can be shown."""
    path = given or _newest_video(folder)
    if path is None:
        words = ["gpurl", "play", str(folder), "--video", str(folder / "episodes.mp4")]
        return f"<p>None yet: <code>{escape(shlex.join(words))}</code></p>"
    if path.suffix.lower() not in VIDEO_TYPES:
        raise UsageError(f"a video is a file .mp4 or .gif, got {str(path)!r}")
    try:
        content = read_at_most(path, MAX_VIDEO_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        if given is not None:
            raise UsageError(f"cannot show {path}: {reason}") from error
        return f"<p>{escape(path.name)} is not shown: {escape(str(reason))}</p>"
    kind = VIDEO_TYPES[path.suffix.lower()]
    source = _data(kind, content)
    name = escape(path.name)
    if kind.startswith("image"):
        return f'<img alt="{name}" src="{source}"><p>{name}</p>'
    return f'<video controls loop muted autoplay src="{source}"></video><p>{name}</p>'


def _newest_video(folder: Path) -> Path | None:
    found = [
        path
        for parent in (folder, folder / VIDEOS)
        for path in parent.glob("*")
        if path.suffix.lower() in VIDEO_TYPES and path.is_file() and not path.is_symlink()
    ]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _episode(folder: Path) -> str:
    """The picture that `gpurl play` has drawn; "" without one."""
    try:
        content = read_at_most(folder / EPISODE, MAX_PICTURE_BYTES)
    except (OSError, ValueError):
        return ""
    return f'<img alt="one episode" src="{_data("image/png", content)}">'


def _times(series: Series) -> str:
    """Seconds of each phase, summed over the log entries, and what is left of the training."""
    phases = {
        tag.removeprefix("time/").removesuffix("_seconds"): sum(filter(math.isfinite, values))
        for tag, (_, values) in series.items()
        if tag.startswith("time/") and tag.endswith("_seconds")
    }
    total = sum(phases.values())
    if not total:
        return ""
    elapsed = _last(series, "time/time_elapsed") or 0.0
    if (rest := elapsed - total) > MIN_REST * elapsed:
        phases["evaluations, files and the rest"] = rest
        total = elapsed
    rows = [(name, f"{spent:,.1f} s", f"{spent / total:.0%}") for name, spent in phases.items()]
    return _table(rows, ("phase", "time", "share"))


def _metrics(series: Series) -> str:
    """A small panel for each metric."""
    import matplotlib as mpl

    tags = [tag for tag in sorted(series) if "/" in tag and not tag.startswith(NOT_DRAWN)]
    finite = [tag for tag in tags if any(map(math.isfinite, series[tag][1]))]
    drawn = finite[:MAX_PANELS]
    if not drawn:
        return ""
    rows = -(-len(drawn) // COLUMNS)
    with mpl.rc_context(STYLE | {"font.size": 7.0}):
        figure = new_figure(0.3 + 1.5 * rows, "")
        panels = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
        for axes, tag in zip(panels, drawn):
            points = series[tag]
            color = GROUP_COLORS.get(tag.partition("/")[0], INK)
            axes.plot(*points, color=color, linewidth=1.0, marker="." if len(points[0]) < 3 else "")
            axes.set_title(tag, fontsize=7.0, parse_math=False)
            finish_axes(axes, "", ticks=4)
        for axes in panels[len(drawn) :]:
            axes.set_visible(False)
    note = f"<p>The first {MAX_PANELS} of {len(finite)}.</p>" if len(finite) > MAX_PANELS else ""
    return _picture(figure, "all metrics over environment steps") + note


def _settings(folder: Path) -> str:
    try:
        config = read_config(folder / "config.yaml")
    except UsageError as error:
        return f"<p>{escape(str(error))}</p>"
    rows = [(name, _as_text(value)) for name, value in config.items()]
    return _folded(f"{len(rows)} settings", _table(rows))


def _commands(folder: Path) -> str:
    text = _read_text(folder / "command.txt")
    return f'<pre class="command">{escape(text)}</pre>' if text else ""


def _records(folder: Path) -> Iterable[str]:
    """A section for the start of the run and for each resume."""
    numbers = sorted(
        int(path.name) for path in (folder / RECORDS).glob("*") if path.name.isdecimal()
    )
    for place, number in enumerate(numbers):
        record = folder / RECORDS / str(number)
        versions, about = _read_json(record / "versions.json"), _read_json(record / "git.json")
        packages = versions.pop("packages", None)
        machine = [(name, _in_words(value)) for name, value in versions.items()]
        if commit := about.get("commit"):
            machine.append(("commit", _as_text(commit)))
        content = _table(machine)
        if isinstance(packages, dict):
            content += _folded(counted(len(packages), "package"), _table(packages.items()))
        if diff := _read_text(record / "git.diff"):
            cut = "\n…" if len(diff) > MAX_DIFF_CHARACTERS else ""
            shown = escape(diff[:MAX_DIFF_CHARACTERS] + cut)
            content += _folded("uncommitted changes", f"<pre>{shown}</pre>")
        sources = record / SOURCES_FOLDER
        for path in sorted(sources.rglob("*.py")):
            text = escape(_read_text(path)[:MAX_DIFF_CHARACTERS])
            content += _folded(str(path.relative_to(sources)), f"<pre>{text}</pre>")
        untracked = record / "untracked"
        names = [(str(path.relative_to(untracked)),) for path in sorted(untracked.rglob("*.*"))]
        title = f"{counted(len(names), 'file')} that git did not know"
        content += _folded(title, _table(names))
        yield _section("Machine and versions" if not place else f"Resume {place}", content)


# ---- files of the run, which may be damaged or hostile ----


def _read_text(path: Path) -> str:
    try:
        return read_at_most(path, MAX_TEXT_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def _read_json(path: Path) -> dict[str, Json]:
    try:
        values = json.loads(_read_text(path))
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _in_words(value: Json) -> str:
    """ "none", "cpu, cuda"; other values as in JSON."""
    if value is None:
        return "none"
    return ", ".join(map(_as_text, value)) if isinstance(value, list) else _as_text(value)


def _as_text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value)
