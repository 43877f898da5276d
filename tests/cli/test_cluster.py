"""`gpurl pbt` and `gpurl tournament`: their words, their table, and what they say of a cluster that
is not there.
"""

import importlib.util
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from gpurl.cli.cluster import best_member, member_table
from gpurl.cli.main import main
from gpurl.cli.settings import parse_population
from gpurl.cluster import ray_places
from gpurl.cluster.driver import Plan, settings_of_members
from gpurl.cluster.ray_places import HELLO, check_answers, room
from gpurl.errors import UsageError
from tests.cluster.here import EVERY, new_schedule, result
from tests.small_runs import exit_code

WORDS = ["ppo", "pendulum", "--population", "3", "num_envs=16", "horizon=8", "minibatches=2"]


# ---- words ----


def test_options_and_settings_are_told_apart() -> None:
    words = ["--cpus", "0.5", "--address", "auto", "--synchronous", "--pbt-every", "256"]
    words += ["--explore.gamma", "0.9", "0.99", "--member.gamma", "0.9", "0.95", "0.99"]
    settings, options = parse_population([*WORDS, *words], "pbt")
    assert (options.cpus, options.gpus, options.address) == (0.5, 0.0, "auto")
    assert options.synchronous
    assert settings.train.pbt
    assert settings.train.population == 3
    # without GPUs of its share a member takes none
    assert settings.train.device == "cpu"
    made = settings_of_members(Plan(settings, Path("x"), threads=2))
    assert [each["gamma"] for each in made] == [0.9, 0.95, 0.99]
    assert {(each["population"], each["pbt"], each["threads"]) for each in made} == {(1, False, 2)}


def test_the_members_device_decides_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the machine where the command runs."""
    words = ["ppo", "half_cheetah", "--population", "3"]
    for has_gpu in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda has=has_gpu: has)
        few, _ = parse_population(words, "pbt")
        many, _ = parse_population([*words, "--gpus", "0.5"], "pbt")
        assert (few.train.device, few.train.num_envs) == ("cpu", 64)
        assert (many.train.device, many.train.num_envs) == ("cuda", 4096)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pbt", "ppo", "pendulum"], "pbt selects among members, population is 1"),
        (["pbt", *WORDS, "--cpus", "0"], "a member takes --cpus 0 and --gpus 0"),
        (["pbt", *WORDS, "--gpus", "-1"], "a member takes --cpus 1 and --gpus -1"),
        (["pbt", *WORDS, "--gpus", "1", "device=cpu"], "--gpus 1 with device cpu"),
        (["pbt", *WORDS, "device=cuda"], "device cuda without --gpus"),
        (["pbt", *WORDS, "--pbt-leaderboard", "x"], "gpurl tournament has a leaderboard"),
        (["pbt", *WORDS, "--explore.gama", "0.9", "0.99"], "explore.gama"),
        (["pbt", *WORDS, "eval_episodes=0"], "by their evaluations, but eval_episodes is 0"),
        (["tournament", *WORDS, "--address", "here"], "--address is 'here'; it must be auto"),
        (["tournament", *WORDS, "--synchronous"], "gpurl tournament with --synchronous"),
        (
            ["tournament", *WORDS, "--pbt-rule", "generation"],
            "gpurl tournament with --pbt-rule generation",
        ),
    ],
)
def test_wrong_words(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for place in ("gpurl.cli.cluster", "gpurl.cluster.ray_places"):
        monkeypatch.setattr(f"{place}.check_installed", lambda: None)
    monkeypatch.chdir(tmp_path)
    assert exit_code(words) == 2
    assert message in capsys.readouterr().err


def test_a_search_space_that_names_no_setting(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    for name in ("clip_rang", "horizon"):
        file.write_text(f"explore: {{{name}: [1, 2]}}\n")
        with pytest.raises(UsageError, match=f"'{name}' cannot change in a run"):
            parse_population([*WORDS, "--config", str(file)], "pbt")


def test_help_has_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["pbt", "ppo", "pendulum", "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("usage: gpurl pbt ppo pendulum [settings]")
    for flag in ("--address", "--cpus FLOAT", "--gpus FLOAT", "--[no-]synchronous"):
        assert flag in page


def test_without_ray_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    assert importlib.util.find_spec("ray") is None
    for command in ("pbt", "tournament"):
        assert main([command, *WORDS]) == UsageError.exit_code
        error = capsys.readouterr().err
        assert "members on a cluster need Ray, which is missing: pip install -e" in error
        assert "[ray]" in error
    assert not list(tmp_path.iterdir())


# ---- addresses ----


def listener(answer: bytes, received: list[bytes]) -> str:
    """The address of a program that answers once."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server, server.accept()[0] as connection:
            received.append(connection.recv(100))
            connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_an_address_where_nothing_or_something_else_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(UsageError, match=f"no cluster of Ray at {free}: .*refused; ray start"):
        check_answers(free)
    received: list[bytes] = []
    other = listener(b"HTTP/1.1 400 Bad Request\r\n\r\n", received)
    with pytest.raises(UsageError, match=f"at {other}: another program listens there; ray start"):
        check_answers(other)
    # a server of HTTP/2 begins with its settings
    check_answers(listener(bytes((0, 0, 6, 4, 0, 0, 0, 0, 0)), received))
    assert received == [HELLO, HELLO]
    monkeypatch.setattr(ray_places, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UsageError, match="timed out"):
            check_answers(address)
    for known in ("auto", "local", "ray://head:10001"):
        check_answers(known)


def test_with_tls_it_is_enough_that_something_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that waits for TLS gives no settings before it."""
    monkeypatch.setattr(ray_places, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for switch in ("1", "true", "True"):
            monkeypatch.setenv("RAY_USE_TLS", switch)
            check_answers(address)
        monkeypatch.setenv("RAY_USE_TLS", "0")
        with pytest.raises(UsageError, match="timed out"):
            check_answers(address)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with pytest.raises(UsageError, match="refused"):
        check_answers(address)


class Nodes:
    """Ray, as far as its nodes are asked for."""

    def __init__(self, *resources: dict[str, float]) -> None:
        self.rows: list[dict[str, Any]] = [{"Alive": True, "Resources": x} for x in resources]

    def nodes(self) -> list[dict[str, Any]]:
        return self.rows


def test_room_for_members() -> None:
    ray: Any = Nodes({"CPU": 4.0, "GPU": 2.0}, {"CPU": 3.0}, {"CPU": 16.0, "GPU": 1.0})
    ray.rows[2]["Alive"] = False
    assert room(ray, 1.0, 0.0) == 7
    assert room(ray, 2.0, 0.0) == 3
    assert room(ray, 1.0, 0.25) == 4
    assert room(ray, 0.0, 0.25) == 8
    assert room(ray, 0.1, 0.0) == 70
    assert room(ray, 1.0, 4.0) == 0


# ---- the table ----


def test_the_table_and_the_best(tmp_path: Path) -> None:
    schedule = new_schedule(tmp_path, population=3, explore={"gamma": (0.9, 0.999)})
    assert best_member(schedule) is None
    for k, score in enumerate((-20.5, 7.25, None)):
        schedule.begin(k)
        schedule.finish(k, result(EVERY, score, settings={"gamma": 0.91 + k / 100}))
    schedule.members[0].lost = "it always fails"
    lines = member_table(schedule).splitlines()
    assert lines[0].split() == [
        *("member", "state", "slices", "steps", "return", "taken", "over", "gamma")
    ]
    assert lines[1].split() == ["0", "lost", "1", "256", "-20.5", "0", "0.91"]
    assert lines[2].split() == ["1", "goes", "on", "1", "256", "7.25", "0", "0.92"]
    assert lines[3].split() == ["2", "goes", "on", "1", "256", "nan", "0", "0.93"]
    assert lines[4] == "3 members, 2 of them live"
    assert best_member(schedule) == 1
