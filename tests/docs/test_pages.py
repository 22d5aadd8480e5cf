"""The documentation says everything, and builds without a warning."""

from __future__ import annotations

import html
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dramatiq_durable import errors
from dramatiq_durable.cli.timeline import REASONS
from dramatiq_durable.middleware.record import DurableRecord
from dramatiq_durable.settings import Settings
from dramatiq_durable.states import LEGAL, JobState, Phase

ROOT = Path(__file__).parents[2]

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(ROOT / "docs"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def _text(site: Path, page: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", (site / page).read_text()))


def _commands() -> Iterator[tuple[list[str], Any]]:
    """Every command with the words that name it."""
    from typer.main import get_command

    from dramatiq_durable.cli.app import app

    def walk(command: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
        for child in command.commands.values():
            if hasattr(child, "commands"):
                yield from walk(child, [*words, child.name])
            else:
                yield [*words, child.name], child

    yield from walk(get_command(app), ["dramatiq-durable"])


# Everything is said


def test_every_setting_is_described(site: Path) -> None:
    text = _text(site, "reference/settings.html")
    for name, field in Settings.model_fields.items():
        assert f"DRAMATIQ_DURABLE_{name.upper()}" in text
        assert field.description and field.description.split(".")[0] in text
        assert f'id="setting-{name}"' in (site / "reference/settings.html").read_text()


def test_every_error_has_a_section_with_its_code_as_the_anchor(site: Path) -> None:
    page = (site / "reference/errors.html").read_text()
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert f'id="{kind.code.lower()}"' in page
        assert f"{kind.code} {name}" in _text(site, "reference/errors.html")
    assert len({getattr(errors, name).code for name in errors.__all__}) == len(errors.__all__)


def test_every_command_and_option_is_described(site: Path) -> None:
    text = _text(site, "reference/cli.html")
    for words, command in _commands():
        assert " ".join(words) in text
        assert command.help, f"{words} does not say what it does"
        for parameter in command.params:
            if parameter.opts[0].startswith("--"):
                assert parameter.opts[0] in text
                assert getattr(parameter, "help", None), f"{words} {parameter.opts[0]}"


def test_every_actor_option_is_described(site: Path) -> None:
    page = (site / "guide/record.html").read_text()
    for option in DurableRecord().actor_options:
        assert re.search(rf"<dt>.*>{option}<", page), option


def test_every_state_and_every_move_is_in_the_table_and_in_the_drawing(site: Path) -> None:
    page = (site / "concepts/states.html").read_text()
    drawing = page[page.index('<svg class="durable-states"') : page.index("</svg>", page.index("durable-states"))]
    boxes = set(re.findall(r'data-state="(\w+)"', drawing))
    assert boxes == {*JobState, *Phase, "new"} - {JobState.ACTIVE}
    moves = ",".join(re.findall(r'data-moves?="([^"]+)"', drawing)).split(",")
    assert {tuple(move.split()) for move in moves} == LEGAL
    for word in (*JobState, *REASONS):
        assert word in _text(site, "concepts/states.html")


# What is said is so


def test_every_command_in_a_code_block_exists() -> None:
    known = list(_commands())
    for page in PAGES:
        for block in re.findall(r"```(?:sh|console)\n(.*?)```", page.read_text(), re.S):
            for line in re.findall(r"^(?:\$ )?(?:.*&& \S*/)?(dramatiq-durable .*)$", block, re.M):
                words = shlex.split(line)
                found = [command for names, command in known if words[: len(names)] == names]
                assert found, f"{page.name}: {line}"
                options = {option for parameter in found[0].params for option in parameter.opts}
                assert {word for word in words if word.startswith("--")} <= options, f"{page.name}: {line}"


def test_what_the_tour_shows_of_the_demo_is_what_the_demo_says() -> None:
    table = (ROOT / "docs/tour.md").read_text().split("\njobs sent ")[1].split("```")[0]
    shown = re.findall(r"^([\w ]+?) +\d+$", "jobs sent " + table, re.M)
    assert len(shown) >= 10
    code = ROOT / "dramatiq_durable"
    source = "".join(path.read_text() for path in [code / "cli/demo.py", *(code / "demo").glob("*.py")])
    for label in shown:
        assert f'"{label}"' in source, label


def test_every_setting_that_is_mentioned_exists() -> None:
    for page in PAGES:
        for name in re.findall(r"DRAMATIQ_DURABLE_([A-Z_]+)", page.read_text()):
            assert name.lower() in Settings.model_fields, f"{page.name}: {name}"


def test_every_code_of_an_error_that_is_mentioned_exists() -> None:
    codes = {getattr(errors, name).code for name in errors.__all__}
    for page in PAGES:
        assert set(re.findall(r"\bDD\d{3}\b", page.read_text())) <= codes, page


# Links and pictures


class _Links(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.add(found.get("id") or "")
        for name in ("href", "src"):
            if found.get(name) and tag in ("a", "img", "script", "link"):
                self.links.add(found[name] or "")


def test_every_link_of_the_site_resolves_and_none_needs_a_network_to_show_a_page(site: Path) -> None:
    pages = {}
    for path in site.glob("**/*.html"):
        pages[path] = _Links()
        pages[path].feed(path.read_text())
    assert len(pages) > 15
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"(https?|mailto|data):", link):
                continue
            target, _, anchor = link.partition("#")
            file = (path.parent / target.partition("?")[0]).resolve() if target else path
            assert file.exists(), f"{path}: {link}"
            if anchor and file in pages:
                assert anchor in pages[file].anchors, f"{path}: {link}"
        text = path.read_text()
        assert not re.search(r'<(script|img)[^>]+src="https?:', text), path
        assert not re.search(r'<link[^>]+rel="(stylesheet|preload)"[^>]+href="https?:', text), path


def test_every_link_of_the_readme_resolves() -> None:
    for target in re.findall(r"\]\((?!https?://)([^)]+)", (ROOT / "README.md").read_text()):
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.M)
            assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, target


def test_the_readme_begins_with_the_problem_and_has_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    title, problem, heading = text.split("\n\n")[:3]
    assert title.startswith("# ") and not problem.startswith("#") and heading == "## Quick start"
    blocks = re.findall(r"```sh\n(.*?)```", text.split("## Quick start")[1].split("\n## ")[0], re.S)
    assert len(blocks) == 2
    assert all(block.count("\n") == 1 for block in blocks)
