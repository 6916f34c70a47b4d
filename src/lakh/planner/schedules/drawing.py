"""A pipeline timeline as SVG: one row per rank, one box per operation, and the activations held along the way."""

from __future__ import annotations

from xml.sax.saxutils import escape

from lakh.planner.schedules.operations import BACKWARD, FORWARD, INPUT, WEIGHT
from lakh.planner.schedules.timeline import PipelineTimeline

__all__ = ["timeline_svg"]

COLOURS = {FORWARD: "#4c78a8", BACKWARD: "#54a24b", INPUT: "#72b7b2", WEIGHT: "#eeca3b"}
NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward, inputs", WEIGHT: "backward, weights"}
WIDTH, ROW, LEFT, TOP, BAR = 1200.0, 26.0, 60.0, 44.0, 18.0
LEAST_LABEL = 14.0
"""Width of a box from which its micro-batch is printed."""


def timeline_svg(timeline: PipelineTimeline) -> str:
    """The picture as text. Boxes of a later stage of the same rank are lighter."""
    schedule, scale = timeline.schedule, (WIDTH - LEFT - 150) / timeline.total_s
    height = TOP + ROW * schedule.ranks + 30
    title = (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.micro_batches} micro-batches, {timeline.total_s:.4g} s, "
        f"bubble {timeline.bubble_share:.1%} (simulated)"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:g}" height="{height:g}" font-family="sans-serif">',
        f'<text x="{LEFT:g}" y="18" font-size="14">{escape(title)}</text>',
    ]
    first = {rank: min(s for s, r in enumerate(schedule.stage_ranks) if r == rank) for rank in range(schedule.ranks)}
    for rank, operations in enumerate(timeline.ranks):
        y = TOP + ROW * rank
        parts.append(f'<text x="4" y="{y + 13:g}" font-size="11">rank {rank}</text>')
        for one in operations:
            kind, stage, micro_batch = one.operation
            x, width = LEFT + one.start_s * scale, (one.end_s - one.start_s) * scale
            faint = "" if stage == first[rank] else ' fill-opacity="0.55"'
            tip = f"{NAMES[kind]}, stage {stage}, micro-batch {micro_batch}: {one.start_s:.4g} to {one.end_s:.4g} s"
            parts.append(
                f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{BAR:g}" fill="{COLOURS[kind]}"{faint} '
                f'stroke="white" stroke-width="0.5"><title>{escape(tip)}</title></rect>'
            )
            if width >= LEAST_LABEL:
                label = f'<text x="{x + width / 2:.2f}" y="{y + 13:g}" font-size="9" text-anchor="middle">'
                parts.append(f"{label}{micro_batch}</text>")
        held = f"holds at most {timeline.peak_in_flight(rank):g}"
        parts.append(f'<text x="{WIDTH - 145:g}" y="{y + 13:g}" font-size="11">{held}</text>')
    used = [kind for kind in COLOURS if any(one.operation.kind == kind for rank in timeline.ranks for one in rank)]
    for number, kind in enumerate(used):
        x, y = LEFT + 150 * number, height - 20
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 16:g}" y="{y + 10:g}" font-size="11">{NAMES[kind]}</text>')
    return "\n".join([*parts, "</svg>", ""])
