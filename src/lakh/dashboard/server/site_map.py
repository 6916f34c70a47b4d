"""A map of sites and links as SVG, with what crosses each link in a plan of lakh plan across.

Sites are placed by the lengths of the links between them (classical multidimensional scaling). Colours are variables of
the page's style sheet, so that the map is dark or light with the page.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

__all__ = ["crossings", "site_map"]

WIDTH, HEIGHT, MARGIN_X, MARGIN_Y = 1100, 400, 240, 80
LEAST_RADIUS, MOST_RADIUS = 12.0, 30.0
LEAST_LINE, MOST_LINE = 2.0, 9.0
GAP, LINE_HEIGHT, BASELINE = 8.0, 16.0, 5.0
SIDEWAYS = 0.5
"""Labels are beside a point rather than above or below it from this share of its direction on."""
STYLES = {"pipeline": "var(--c1)", "data": "var(--c0)", "data and pipeline": "var(--c3)", "": "var(--faint)"}
Groups = Sequence[Mapping[str, int]]
Link = frozenset[str]


def site_map(sites: Mapping[str, Any], groups: Groups) -> str:
    """`sites` has lists of sites and links; `groups` are the replicas of the plan: site -> pipeline stages on it."""
    names = [site["name"] for site in sites["sites"]]
    places = _places(names, sites["links"])
    crossing = crossings(sites, groups)
    used = {name for group in groups for name in group}
    most_gpus = max(site["gpus"] for site in sites["sites"])
    rates = [link["bandwidth_Tbps"] for link in sites["links"]]
    parts = [_link(link, places, crossing, max(rates)) for link in sites["links"]]
    parts += [_site(site, places, used, groups, most_gpus) for site in sites["sites"]]
    label = escape(f"{len(names)} sites: " + "; ".join(_describe(link, crossing) for link in sites["links"]))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return head + "".join(parts) + "</svg>"


def crossings(sites: Mapping[str, Any], groups: Groups) -> dict[Link, str]:
    """Link -> the axis of parallelism that crosses it: pipeline, data, or both. Unused links are missing."""
    names = [site["name"] for site in sites["sites"]]
    paths = _paths(names, sites["links"])
    found: dict[Link, set[str]] = {}
    for group in groups:
        for pair in itertools.pairwise(group):
            for link in paths.get(pair, ()):
                found.setdefault(link, set()).add("pipeline")
    stages = [[name for name, count in group.items() for _ in range(count)] for group in groups]
    for number, mine in enumerate(stages if len(stages) > 1 else []):  # gradients travel in a ring of the replicas
        for pair in zip(mine, stages[(number + 1) % len(stages)], strict=False):
            for link in paths.get(pair, ()):
                found.setdefault(link, set()).add("data")
    return {link: " and ".join(sorted(axes)) for link, axes in found.items()}


def _paths(names: Sequence[str], links: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], tuple[Link, ...]]:
    """The links on the shortest way between every two sites."""
    length = {(name, name): 0.0 for name in names}
    paths: dict[tuple[str, str], tuple[Link, ...]] = {(name, name): () for name in names}
    for link in links:
        a, b = link["between"]
        length[a, b] = length[b, a] = link["distance_km"]
        paths[a, b] = paths[b, a] = (frozenset((a, b)),)
    for via in names:
        for a in names:
            for b in names:
                if (a, via) in length and (via, b) in length:
                    other = length[a, via] + length[via, b]
                    if other < length.get((a, b), math.inf):
                        length[a, b], paths[a, b] = other, paths[a, via] + paths[via, b]
    return paths


def _places(names: Sequence[str], links: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Sites on the picture, so that their distances are near those of the links."""
    lengths = {frozenset(link["between"]): link["distance_km"] for link in links}
    paths = _paths(names, links)
    far = 2 * sum(lengths.values()) + 1.0  # sites that nothing connects
    distance = np.array(
        [[sum(lengths[link] for link in paths[a, b]) if (a, b) in paths else far for b in names] for a in names]
    )
    centred = np.eye(len(names)) - 1 / len(names)
    values, vectors = np.linalg.eigh(-centred @ distance**2 @ centred / 2)
    order = np.argsort(values)[::-1][:2]
    found = np.zeros((len(names), 2))
    found[:, : len(order)] = vectors[:, order] * np.sqrt(np.maximum(values[order], 0.0))
    found *= np.where(found[0] < 0, 1.0, -1.0)  # the first site is on the left, so that the map is always the same
    room = np.array([WIDTH - 2 * MARGIN_X, HEIGHT - 2 * MARGIN_Y])
    size = np.maximum(np.ptp(found, axis=0), 1e-9)
    scale = min(room / size)
    middle = (found.max(axis=0) + found.min(axis=0)) / 2
    at = (found - middle) * scale + np.array([WIDTH / 2, HEIGHT / 2])
    return {name: (float(x), float(y)) for name, (x, y) in zip(names, at, strict=True)}


def _link(
    link: Mapping[str, Any], places: Mapping[str, tuple[float, float]], crossing: Mapping[Link, str], most_Tbps: float
) -> str:
    (x1, y1), (x2, y2) = (places[name] for name in link["between"])
    axis = crossing.get(frozenset(link["between"]), "")
    width = LEAST_LINE + (MOST_LINE - LEAST_LINE) * link["bandwidth_Tbps"] / most_Tbps
    dash = "" if axis else ' stroke-dasharray="4 6"'
    line = f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{STYLES[axis]}"'
    line += f' stroke-width="{width:.1f}"{dash}/>'
    lines = [f"{link['distance_km']:,.4g} km, {link['bandwidth_Tbps']:,.4g} Tbit/s", axis or "not used"]
    x, y, length = (x1 + x2) / 2, (y1 + y2) / 2, math.hypot(x2 - x1, y2 - y1) or 1.0
    dx, dy = _outwards(x, y, places)
    across = (y2 - y1) / length, (x1 - x2) / length  # perpendicular to the link
    side = 1 if dx * across[0] + dy * across[1] >= 0 else -1
    return line + _label(x, y, width / 2 + GAP, (side * across[0], side * across[1]), lines)


def _site(
    site: Mapping[str, Any],
    places: Mapping[str, tuple[float, float]],
    used: set[str],
    groups: Groups,
    most_gpus: int,
) -> str:
    name, (x, y) = site["name"], places[site["name"]]
    radius = LEAST_RADIUS + (MOST_RADIUS - LEAST_RADIUS) * math.sqrt(site["gpus"] / most_gpus)
    fill = "var(--accent)" if name in used else "var(--faint)"
    shares = [f"{group[name]} of {sum(group.values())} stages" for group in groups if name in group and len(group) > 1]
    below = f"{site['gpus']:,} GPUs" + (f", {shares[0]}" if shares else "" if name in used else ", not used")
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{fill}"/>'
    return circle + _label(x, y, radius + GAP, _outwards(x, y, places), [name, below], first_class="over name")


def _outwards(x: float, y: float, places: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    """The direction of a point from the middle of the map; upwards in the middle itself."""
    middle_x, middle_y = (sum(place[axis] for place in places.values()) / len(places) for axis in (0, 1))
    length = math.hypot(x - middle_x, y - middle_y)
    return ((x - middle_x) / length, (y - middle_y) / length) if length > 1 else (0.0, -1.0)


def _label(
    x: float, y: float, away: float, direction: tuple[float, float], lines: Sequence[str], first_class: str = "over"
) -> str:
    """Lines of text beside a point, in a direction from it."""
    dx, dy = direction
    anchor = "middle" if abs(dx) < SIDEWAYS else "end" if dx < 0 else "start"
    x, y = x + away * dx, y + away * dy
    if anchor != "middle":
        y += BASELINE - LINE_HEIGHT * (len(lines) - 1) / 2
    else:
        y += 2 * BASELINE if dy > 0 else -LINE_HEIGHT * (len(lines) - 1)
    return "".join(
        f'<text class="{"over" if row else first_class}" x="{x:.1f}" y="{y + LINE_HEIGHT * row:.1f}"'
        f' text-anchor="{anchor}">{escape(text)}</text>'
        for row, text in enumerate(lines)
    )


def _describe(link: Mapping[str, Any], crossing: Mapping[Link, str]) -> str:
    axis = crossing.get(frozenset(link["between"]), "")
    ends = " to ".join(link["between"])
    return f"{ends}, {link['distance_km']:g} km, {link['bandwidth_Tbps']:g} Tbit/s, {axis or 'not used'}"
