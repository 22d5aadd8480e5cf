"""The documentation says everything, and builds without a warning."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dramatiq_durable import errors
from dramatiq_durable.settings import Settings
from dramatiq_durable.states import LEGAL, JobState, Phase

ROOT = Path(__file__).parents[2]


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


def test_every_setting_is_described(site: Path) -> None:
    text = _text(site, "reference/settings.html")
    for name, field in Settings.model_fields.items():
        assert f"DRAMATIQ_DURABLE_{name.upper()}" in text
        assert field.description and field.description.split(".")[0] in text


def test_every_error_has_a_section_with_its_code_as_the_anchor(site: Path) -> None:
    page = (site / "reference/errors.html").read_text()
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert f'id="{kind.code.lower()}"' in page
        assert f"{kind.code} {name}" in _text(site, "reference/errors.html")


def test_every_command_and_option_is_described(site: Path) -> None:
    from typer.main import get_command

    from dramatiq_durable.cli.app import app

    text = _text(site, "reference/cli.html")

    def check(command: object, path: str) -> None:
        for child in getattr(command, "commands", {}).values():
            check(child, f"{path} {child.name}")
            if not hasattr(child, "commands"):
                assert f"{path} {child.name}" in text
                assert child.help, f"{path} {child.name} does not say what it does"
                for parameter in child.params:
                    if parameter.opts[0].startswith("--"):
                        assert parameter.opts[0] in text
                        assert getattr(parameter, "help", None), f"{path} {child.name} {parameter.opts[0]}"

    check(get_command(app), "dramatiq-durable")


def test_every_state_and_every_move_is_in_the_table_and_in_the_drawing(site: Path) -> None:
    page = (site / "concepts/states.html").read_text()
    drawing = page[page.index('<svg class="durable-states"') : page.index("</svg>", page.index("durable-states"))]
    boxes = set(re.findall(r'data-state="(\w+)"', drawing))
    assert boxes == {*JobState, *Phase, "new"} - {JobState.ACTIVE}
    moves = ",".join(re.findall(r'data-moves?="([^"]+)"', drawing)).split(",")
    assert {tuple(move.split()) for move in moves} == LEGAL
    for state in JobState:
        assert state in _text(site, "concepts/states.html")


def test_links_between_files_of_the_readme_resolve() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (ROOT / target).exists(), target
