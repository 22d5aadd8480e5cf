"""Pages and pictures that are made from the code: the state table and its drawing, the errors, the settings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

import dramatiq_durable.errors as errors
from dramatiq_durable.settings import Settings
from dramatiq_durable.states import TRANSITIONS


def _table(head: list[str], rows: list[list[nodes.Node | str]]) -> nodes.table:
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
                entry += cell if isinstance(cell, nodes.Node) else nodes.paragraph(text=cell)
                row += entry
            part += row
        group += part
    return table


def _code(text: str) -> nodes.paragraph:
    paragraph = nodes.paragraph()
    paragraph += nodes.literal(text=text)
    return paragraph


class Transitions(Directive):
    """``.. durable-transitions::`` – the state table."""

    def run(self) -> list[nodes.Node]:
        rows = [[_code(t.source), _code(t.target), t.who, t.why] for t in TRANSITIONS]
        return [_table(["from", "to", "who", "when"], rows)]


#: Where the boxes of the drawing stand: column and row.
_PLACES = {
    "scheduled": (0, 1),
    "queued": (1, 1),
    "claimed": (2, 1),
    "started": (3, 1),
    "completed": (4, 1),
    "parked": (1, 0),
    "denied": (2, 0),
    "in_doubt": (3, 0),
    "failed": (4, 0),
    "cancelled": (4, 2),
}
_WIDTH, _HEIGHT, _X, _Y = 104, 34, 150, 110


def _centre(state: str) -> tuple[float, float]:
    column, row = _PLACES[state]
    return 70 + column * _X, 50 + row * _Y


def _drawing() -> str:
    """Draw the state table; colours follow the text, so that it reads in light and dark."""
    parts = [
        '<svg viewBox="0 0 780 330" role="img" aria-label="States of a job and the moves between them" '
        'style="max-width:100%;height:auto;color:var(--color-foreground-primary,currentColor)" '
        'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="13">',
        '<defs><marker id="dd-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="currentColor"/></marker></defs>',
    ]
    pairs = {(t.source, t.target) for t in TRANSITIONS if t.source in _PLACES and t.target in _PLACES}
    for source, target in sorted(pairs):
        (x1, y1), (x2, y2) = _centre(source), _centre(target)
        parts.append(_edge(x1, y1, x2, y2, (target, source) in pairs))
    for state in _PLACES:
        x, y = _centre(state)
        dash = ' stroke-dasharray="4 3"' if state in ("claimed", "started") else ""
        parts.append(
            f'<rect x="{x - _WIDTH / 2}" y="{y - _HEIGHT / 2}" width="{_WIDTH}" height="{_HEIGHT}" rx="8" '
            f'fill="var(--color-background-secondary,#f8f9fb)" stroke="currentColor"{dash}/>'
            f'<text x="{x}" y="{y + 5}" text-anchor="middle" fill="currentColor">{state}</text>'
        )
    return "".join([*parts, "</svg>"])


def _edge(x1: float, y1: float, x2: float, y2: float, both: bool) -> str:
    dx, dy = x2 - x1, y2 - y1
    length = (dx * dx + dy * dy) ** 0.5
    # A pair of opposite moves is drawn side by side; long moves bow around what stands between.
    side = 5 if both else 0
    ox, oy = -dy / length * side, dx / length * side
    scale = min(_WIDTH / 2 / abs(dx) if dx else 9, _HEIGHT / 2 / abs(dy) if dy else 9)
    ax, ay, bx, by = x1 + dx * scale + ox, y1 + dy * scale + oy, x2 - dx * scale + ox, y2 - dy * scale + oy
    bend = 62 if abs(dx) > _X * 1.5 and dy == 0 else 0
    cx, cy = (ax + bx) / 2, (ay + by) / 2 + bend
    return (
        f'<path d="M{ax:.0f} {ay:.0f} Q{cx:.0f} {cy:.0f} {bx:.0f} {by:.0f}" fill="none" stroke="currentColor" '
        'stroke-opacity="0.55" marker-end="url(#dd-arrow)"/>'
    )


class StateDrawing(Directive):
    """``.. durable-states::`` – the state table, drawn."""

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", _drawing(), format="html")]


class Errors(Directive):
    """``.. durable-errors::`` – a section for each error, its code as the anchor."""

    def run(self) -> list[nodes.Node]:
        kinds = [getattr(errors, name) for name in errors.__all__]
        found: list[nodes.Node] = []
        for kind in sorted(kinds, key=lambda kind: kind.code):
            section = nodes.section(ids=[kind.code.lower()], names=[kind.code.lower()])
            section += nodes.title(text=f"{kind.code} {kind.__name__}")
            section += nodes.paragraph(text=" ".join((kind.__doc__ or "").split("\n\n")[0].split()))
            found.append(section)
        return found


class SettingsTable(Directive):
    """``.. durable-settings::`` – every setting with its variable, default and meaning."""

    def run(self) -> list[nodes.Node]:
        rows: list[list[nodes.Node | str]] = []
        for name, field in Settings.model_fields.items():
            extra = field.json_schema_extra
            unit = str(extra.get("unit", "")) if isinstance(extra, dict) else ""
            default = f"{field.default:,} {unit}".strip() if type(field.default) is int else str(field.default)
            rows.append(
                [_code(name), _code(f"DRAMATIQ_DURABLE_{name.upper()}"), _code(default), field.description or ""]
            )
        return [_table(["setting", "variable", "default", "what it does"], rows)]


class CommandLine(Directive):
    """``.. durable-cli::`` – a section for each command, made from the program itself."""

    def run(self) -> list[nodes.Node]:
        from typer.main import get_command

        from dramatiq_durable.cli.app import app

        return list(self._sections(get_command(app), "dramatiq-durable"))

    def _sections(self, command: Any, name: str) -> Iterator[nodes.Node]:
        for child in getattr(command, "commands", {}).values():
            path = f"{name} {child.name}"
            if hasattr(child, "commands"):
                yield from self._sections(child, path)
                continue
            anchor = path.replace(" ", "-")
            section = nodes.section(ids=[anchor], names=[anchor])
            section += nodes.title(text=path)
            for paragraph in inspect.cleandoc(child.help or "").split("\n\n"):
                section += nodes.paragraph(text=" ".join(paragraph.split()))
            rows: list[list[nodes.Node | str]] = []
            for parameter in child.params:
                names = " ".join(parameter.opts) if parameter.opts[0].startswith("-") else parameter.name.upper()
                rows.append([_code(names), getattr(parameter, "help", "") or ""])
            section += _table(["argument or option", "meaning"], rows)
            yield section


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("durable-transitions", Transitions)
    app.add_directive("durable-states", StateDrawing)
    app.add_directive("durable-errors", Errors)
    app.add_directive("durable-cli", CommandLine)
    app.add_directive("durable-settings", SettingsTable)
    return {"parallel_read_safe": True}
