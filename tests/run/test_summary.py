"""The closing lines of a run, and its table in a notebook."""

from pathlib import Path

import gpurl
from gpurl.run.summary import html_summary, summary
from gpurl.run.trainer import Outcome

VALUES = {"eval/mean_reward": 2.0, "eval/std_reward": 0.5, "eval/episodes": 1.0}


def test_one_is_no_plural() -> None:
    text = summary(Path("run"), Outcome("total_steps", 1, VALUES, new_steps=1), {})
    assert "evaluated return 2.00 ± 0.50 over 1 episode\n" in text
    assert "ended after 1 step: total_steps reached\n" in text
    values = VALUES | {"eval/episodes": 2.0}
    text = summary(Path("run"), Outcome("total_steps", 2000, values, new_steps=9), {})
    assert "over 2 episodes\nended after 2,000 steps: total_steps reached\n" in text


def test_a_notebook_gets_a_table_that_executes_nothing() -> None:
    outcome = Outcome("<script>alert(1)</script>", 12_000, VALUES, unsaved="disk <full>")
    run = gpurl.Run(Path("<b>run</b>"), outcome, VALUES | {"eval/mean_reward": 7.0})
    page = run._repr_html_()
    assert page == html_summary(run.folder, run.outcome, run.baseline)
    assert "&lt;b&gt;run&lt;/b&gt;" in page
    assert "12,000 steps: &lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "disk &lt;full&gt;" in page
    assert "<script" not in page
    for text in ("2.00 ± 0.50 over 1 episode", "scripted policy", "7.00 ± 0.50"):
        assert text in page
    assert page.count("<tr>") == page.count("</tr>") == 5


def test_a_run_without_an_evaluation_has_no_return() -> None:
    page = html_summary(Path("run"), Outcome("max_seconds", 5, {}), {})
    assert "return" not in page
    assert "5 steps: time limit (max_seconds)" in page


def test_only_public_names_are_offered() -> None:
    names = dir(gpurl)
    assert {name for name in names if not name.startswith("_")} == set(gpurl.__all__)
    assert "__version__" in names
