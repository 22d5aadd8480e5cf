"""Pages and pictures that are made from the code: the state table and its drawing, errors, settings, commands."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from state_drawing import draw

from dramatiq_durable import errors, settings, states
from dramatiq_durable.cli import timeline
from dramatiq_durable.settings import PREFIX, Settings
from dramatiq_durable.states import TRANSITIONS

#: What is set as code wherever it stands in a text: options, variables, file names, names with an underscore or call.
_CODE = re.compile(r"(``[^`]+``|--[a-z][a-z-]+|\bDRAMATIQ_\w+|(?<!\w)\.env\b|\b\w+\(\)|\b[a-z]+_[a-z_]+\b)")


def _text(words: str) -> nodes.paragraph:
    """A paragraph in which names of code are set as code."""
    paragraph = nodes.paragraph()
    for i, part in enumerate(_CODE.split(" ".join(words.split()))):
        if part:
            paragraph += nodes.literal(text=part.strip("`")) if i % 2 else nodes.Text(part)
    return paragraph


def _code(text: str) -> nodes.paragraph:
    paragraph = nodes.paragraph()
    paragraph += nodes.literal(text=text)
    return paragraph


def _table(head: Sequence[str], rows: Sequence[Sequence[nodes.Node | str]]) -> nodes.table:
    table = nodes.table()
    group = nodes.tgroup(cols=len(head))
    table += group
    for _ in head:
        group += nodes.colspec(colwidth=1)
    for kind, lines in ((nodes.thead, [head]), (nodes.tbody, rows)):
        part = kind()
        for line in lines:
            row = nodes.row()
            for cell in line:
                entry = nodes.entry()
                entry += cell if isinstance(cell, nodes.Node) else _text(cell)
                row += entry
            part += row
        group += part
    return table


def _entries(entries: Sequence[tuple[str, str, str, str]]) -> nodes.definition_list:
    """A list of names, each with its anchor, a note beside it and what it means."""
    found = nodes.definition_list(classes=["durable-entries"])
    for anchor, name, note, meaning in entries:
        item = nodes.definition_list_item()
        term = nodes.term(ids=[anchor])
        term += nodes.literal(text=name)
        term += nodes.inline(text=note, classes=["durable-note"])
        definition = nodes.definition()
        definition += _text(meaning)
        item += [term, definition]
        found += item
    return found


def _section(anchor: str, title: str) -> nodes.section:
    section = nodes.section(ids=[anchor], names=[anchor])
    section += nodes.title(text=title)
    return section


class _FromCode(Directive):
    """A directive whose page is built again when the code has changed."""

    sources: tuple[Any, ...] = ()

    def run(self) -> list[nodes.Node]:
        for source in (inspect.getmodule(type(self)), *self.sources):
            self.state.document.settings.record_dependencies.add(inspect.getfile(source))
        made = list(self.make())
        for section in made:
            if isinstance(section, nodes.section):
                # Pages refer to it as to a label.
                self.state.document.note_explicit_target(section)
        return made

    def make(self) -> Iterator[nodes.Node]:
        raise NotImplementedError


class Transitions(_FromCode):
    """``durable-transitions``: the state table."""

    sources = (states,)

    def make(self) -> Iterator[nodes.Node]:
        rows = [[_code(t.source), _code(t.target), t.who, t.why] for t in TRANSITIONS]
        yield _table(["from", "to", "who", "when"], rows)


class StateDrawing(_FromCode):
    """``durable-states``: the state table, drawn."""

    sources = (states, draw)

    def make(self) -> Iterator[nodes.Node]:
        yield nodes.raw("", draw(), format="html")


class Errors(_FromCode):
    """``durable-errors``: a section for each error, its code as the anchor."""

    sources = (errors,)

    def make(self) -> Iterator[nodes.Node]:
        kinds = sorted((getattr(errors, name) for name in errors.__all__), key=lambda kind: kind.code)
        for kind in kinds:
            section = _section(kind.code.lower(), f"{kind.code} {kind.__name__}")
            section += _text(inspect.cleandoc(kind.__doc__).split("\n\n")[0])
            parents = [base for base in kind.__bases__ if base in kinds or base.__module__ == "builtins"]
            if parents:
                section += _text(f"A kind of {' and '.join(f'``{base.__name__}``' for base in parents)}.")
            yield section


class Reasons(_FromCode):
    """``durable-reasons``: what the reasons on rows mean."""

    sources = (timeline,)

    def make(self) -> Iterator[nodes.Node]:
        yield _entries([(f"reason-{name}", name, "", f"{words}.") for name, words in timeline.REASONS.items()])


class SettingsList(_FromCode):
    """``durable-settings``: every setting with its variable, default and meaning."""

    sources = (settings,)

    def make(self) -> Iterator[nodes.Node]:
        yield _entries([self._entry(name) for name in Settings.model_fields])

    def _entry(self, name: str) -> tuple[str, str, str, str]:
        field = Settings.model_fields[name]
        extra = field.json_schema_extra
        unit = str(extra.get("unit", "")) if isinstance(extra, dict) else ""
        default = f"{field.default:,} {unit}".strip() if type(field.default) is int else str(field.default)
        choices = [str(value) for value in typing.get_args(field.annotation)]
        kind = f" · one of {', '.join(choices)}" if choices else " · true or false" if field.annotation is bool else ""
        meaning = (field.description or "").removesuffix(f" (In {unit}.)")
        return f"setting-{name}", name, f"{PREFIX}{name.upper()} · default {default}{kind}", meaning


class CommandLine(_FromCode):
    """``durable-cli``: a section for each command, made from the program itself."""

    def make(self) -> Iterator[nodes.Node]:
        from typer.main import get_command

        from dramatiq_durable.cli.app import app

        yield from self._sections(get_command(app), "dramatiq-durable")

    def _sections(self, command: Any, name: str) -> Iterator[nodes.Node]:
        for child in getattr(command, "commands", {}).values():
            path = f"{name} {child.name}"
            if hasattr(child, "commands"):
                yield from self._sections(child, path)
            else:
                yield self._command(child, path)

    def _command(self, command: Any, path: str) -> nodes.section:
        anchor = path.replace(" ", "-")
        section = _section(anchor, path)
        arguments = [p for p in command.params if not p.opts[0].startswith("-")]
        usage = " ".join([path, *(str(_metavar(p)) for p in arguments), "[OPTIONS]"])
        section += nodes.literal_block(usage, usage, language="text")
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
            section += _text(paragraph)
        entries = []
        for parameter in command.params:
            name = parameter.opts[0].lstrip("-")
            shown = _metavar(parameter)
            if parameter not in arguments:
                shown = ", ".join(parameter.opts) + (f" {shown}" if shown else "")
            default = parameter.default
            note = f"default {default}" if type(default) in (int, str) else ""
            entries.append((f"{anchor}-{name}", shown, note, getattr(parameter, "help", "") or ""))
        section += _entries(entries)
        return section


def _metavar(parameter: Any) -> str:
    """What stands for the value of *parameter*: nothing for a switch."""
    if getattr(parameter, "is_flag", False):
        return ""
    return str(parameter.metavar or parameter.name.upper())


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("durable-transitions", Transitions)
    app.add_directive("durable-states", StateDrawing)
    app.add_directive("durable-errors", Errors)
    app.add_directive("durable-reasons", Reasons)
    app.add_directive("durable-cli", CommandLine)
    app.add_directive("durable-settings", SettingsList)
    return {"parallel_read_safe": True}
