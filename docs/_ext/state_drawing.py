"""The state table, drawn: boxes and routes are placed here, what is connected comes from the table alone."""

from __future__ import annotations

from dramatiq_durable.states import FINAL, HELD, TRANSITIONS

__all__ = ["draw"]

#: Where the boxes stand: the middle of each.  A state that is missing here stops the build.
PLACES = {
    "parked": (245, 70),
    "denied": (440, 70),
    "in_doubt": (610, 70),
    "cancelled": (805, 70),
    "new": (55, 205),
    "queued": (245, 205),
    "claimed": (440, 205),
    "started": (610, 205),
    "completed": (805, 205),
    "scheduled": (245, 350),
    "failed": (805, 350),
}

WIDTH, HEIGHT = 112, 36

#: Where the words about people stand, if not under the box.
NOTES = {"queued": (143, 223)}

#: Where a move leaves and arrives (as offsets from the middle of each box) and how far it bows; what is not here goes
#: straight from box to box.
ROUTES = {
    ("queued", "claimed"): ((56, -7), (-56, -7), 0),
    ("claimed", "queued"): ((-56, 7), (56, 7), 0),
    ("queued", "parked"): ((-12, -18), (-12, 18), 0),
    ("parked", "queued"): ((12, 18), (12, -18), 0),
    ("claimed", "parked"): ((-40, -18), (56, 12), 0),
    ("claimed", "denied"): ((0, -18), (0, 18), 0),
    ("started", "in_doubt"): ((0, -18), (0, 18), 0),
    ("claimed", "cancelled"): ((36, -18), (-56, -4), 0),
    ("started", "cancelled"): ((40, -18), (-56, 10), 0),
    ("claimed", "failed"): ((40, 18), (-56, -8), 0),
    ("started", "failed"): ((40, 18), (-30, -18), 0),
    ("started", "queued"): ((-40, 18), (30, 18), 46),
    ("claimed", "scheduled"): ((-30, 18), (44, -18), 0),
    ("started", "scheduled"): ((-16, 18), (56, -6), 20),
    ("scheduled", "queued"): ((0, -18), (0, 18), 0),
    ("scheduled", "failed"): ((56, 8), (-56, 8), 0),
    ("queued", "failed"): ((-30, 18), (-56, 0), 0),
}


def draw() -> str:
    """Return the drawing as SVG.  Its colours are the page's, so that it reads in light and dark."""
    by_person = {(t.source, t.target) for t in TRANSITIONS if t.who.startswith("person")}
    drawn = {(t.source, t.target) for t in TRANSITIONS} - by_person
    parts = [
        '<svg class="durable-states" viewBox="0 40 880 390" role="img" xmlns="http://www.w3.org/2000/svg" '
        'aria-label="The states of a job and the moves between them; the table below says the same in words">',
        '<defs><marker id="dd-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>',
        # The two phases are one state.
        '<rect class="active" x="372" y="172" width="306" height="66" rx="12"/>'
        '<text class="note" x="386" y="254">active</text>',
    ]
    parts += [_route(source, target) for source, target in sorted(drawn)]
    parts += [_box(state) for state in PLACES]
    for state in sorted({target for _, target in by_person}):
        sources = sorted(source for source, target in by_person if target == state)
        parts.append(_people(state, sources))
    return "".join([*parts, "</svg>"])


def _box(state: str) -> str:
    x, y = PLACES[state]
    kind = "final" if state in FINAL else "held" if state in HELD else "new" if state == "new" else "open"
    return (
        f'<g class="{kind}" data-state="{state}"><rect x="{x - WIDTH / 2:.0f}" y="{y - HEIGHT / 2:.0f}" '
        f'width="{WIDTH}" height="{HEIGHT}" rx="9"/><text x="{x}" y="{y + 5}">{state}</text></g>'
    )


def _route(source: str, target: str) -> str:
    (x1, y1), (x2, y2) = PLACES[source], PLACES[target]
    leaves, arrives, bow = ROUTES.get((source, target)) or _straight(x2 - x1, y2 - y1)
    ax, ay, bx, by = x1 + leaves[0], y1 + leaves[1], x2 + arrives[0], y2 + arrives[1]
    middle = f"{(ax + bx) / 2:.0f} {(ay + by) / 2 + bow * 1.6:.0f}"
    return f'<path data-move="{source} {target}" d="M{ax:.0f} {ay:.0f} Q{middle} {bx:.0f} {by:.0f}"/>'


def _straight(dx: float, dy: float) -> tuple[tuple[float, float], tuple[float, float], float]:
    """From the edge of one box to the edge of the other, along the line between their middles."""
    part = min(WIDTH / 2 / abs(dx) if dx else 9, HEIGHT / 2 / abs(dy) if dy else 9)
    return (dx * part, dy * part), (-dx * part, -dy * part), 0


def _people(state: str, sources: list[str]) -> str:
    """What only a person does is written beside the state that it leads to; as arrows it would hide the rest."""
    x, y = NOTES.get(state) or (PLACES[state][0], PLACES[state][1] + HEIGHT // 2 + 15)
    words = ["by a person from", *(", ".join(sources[i : i + 2]) for i in range(0, len(sources), 2))]
    spans = "".join(f'<tspan x="{x}" dy="{13 if i else 0}">{word}</tspan>' for i, word in enumerate(words))
    moves = ",".join(f"{source} {state}" for source in sources)
    return f'<text class="people" data-moves="{moves}" x="{x}" y="{y}">{spans}</text>'
