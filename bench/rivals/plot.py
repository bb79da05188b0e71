#!/usr/bin/env python3
"""Draws what compare.py measured: plot.py RESULTS.json > docs/rivals.svg

Above: GB/s over the size of a block, batches of 256 blocks (16 from 16 MiB on), one at a time. Below: p50 of one block.
Each for shm and tcp, written and read. Both axes are logarithmic. A missing point is a work that was refused.
"""
import html
import json
import math
import pathlib
import statistics
import sys

WIDTH, HEIGHT = 1080, 640
PANEL_WIDTH, PANEL_HEIGHT = 205, 215
LEFT, TOP, GAP_X, GAP_Y = 62, 62, 52, 62
STYLES = {"troupe.io": ("#0b63c5", ""), "NIXL": ("#4f8f00", "6 3"), "Mooncake": ("#c2410c", "2 3"),
          "troupe.io, polling": ("#7c3aed", "4 2")}
ROWS = ({"title": "GB/s, 256 blocks", "field": "gb_per_s", "scale": 1.0, "counts": lambda size: 256 if size < 16 << 20 else 16},
        {"title": "p50 of one block, us", "field": "p50_us", "scale": 1.0, "counts": lambda size: 1})


def text_of(size):
    for unit, name in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if size >= unit:
            return f"{size // unit} {name}B"
    return f"{size} B"


def lines_of(works, row, transport, direction):
    """By contender: (size of a block, figure), in order."""
    lines = {}
    for work in works:
        if ((work["transport"], work["direction"], work["threads"], work["pairs"]) == (transport, direction, 1, 1)
                and work["count"] == row["counts"](work["size"]) and work[row["field"]] and work["contender"] in STYLES):
            lines.setdefault(work["contender"], []).append((work["size"], statistics.median(work[row["field"]])))
    return {name: sorted(points) for name, points in lines.items()}


def decades(values):
    """Powers of ten around the values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


class Picture:
    def __init__(self):
        self._parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
                       f'font-size="11">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']

    def text(self, x, y, text, anchor="middle", fill="#333", size=11):
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}">'
                           f'{html.escape(text)}</text>')

    def line(self, points, colour, dash="", width=1.0):
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>')

    def dot(self, x, y, colour):
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>')

    def __str__(self):
        return "\n".join([*self._parts, "</svg>"])


def panel(picture, place, title, lines, sizes, scale):
    left = LEFT + place[0] * (PANEL_WIDTH + GAP_X)
    bottom = TOP + place[1] * (PANEL_HEIGHT + GAP_Y) + PANEL_HEIGHT
    low, high = scale

    def x_of(size):
        return left + PANEL_WIDTH * math.log2(size / sizes[0]) / max(1.0, math.log2(sizes[-1] / sizes[0]))

    def y_of(value):
        return bottom - PANEL_HEIGHT * (math.log10(value) - low) / (high - low)

    picture.text(left + PANEL_WIDTH / 2, bottom - PANEL_HEIGHT - 8, title, size=12)
    for power in range(low, high + 1):
        picture.line([(left, y_of(10.0 ** power)), (left + PANEL_WIDTH, y_of(10.0 ** power))], "#ddd")
        picture.text(left - 6, y_of(10.0 ** power) + 4, f"{10.0 ** power:g}", "end")
    for size in sizes[::max(1, len(sizes) // 4)]:
        picture.line([(x_of(size), bottom), (x_of(size), bottom + 4)], "#333")
        picture.text(x_of(size), bottom + 16, text_of(size))
    picture.line([(left, bottom - PANEL_HEIGHT), (left, bottom), (left + PANEL_WIDTH, bottom)], "#333")
    for name, points in lines.items():
        colour, dash = STYLES[name]
        picture.line([(x_of(size), y_of(value)) for size, value in points], colour, dash, 1.8)
        for size, value in points:
            picture.dot(x_of(size), y_of(value), colour)


def draw(results):
    picture, works = Picture(), results["works"]
    every = set()
    for y, row in enumerate(ROWS):
        panels = {(transport, direction): lines_of(works, row, transport, direction)
                  for transport in ("shm", "tcp") for direction in ("write", "read")}
        points = [point for lines in panels.values() for some in lines.values() for point in some]
        if not points:
            continue
        sizes = sorted({size for size, _ in points})
        scale = decades([value for _, value in points])
        for x, ((transport, direction), lines) in enumerate(panels.items()):
            every |= lines.keys()
            panel(picture, (x, y), f"{row['title']}: {transport} {direction}", lines, sizes, scale)
    at = LEFT
    for name in STYLES:
        if name in every:
            colour, dash = STYLES[name]
            picture.line([(at, 18), (at + 34, 18)], colour, dash, 2.0)
            label = f"{name} ({results['versions'][name].split()[-1]})" if name in ("NIXL", "Mooncake") else name
            picture.text(at + 40, 22, label, "start", size=12)
            at += 60 + 7.2 * len(label)
    picture.text(LEFT, HEIGHT - 14, f"{results['cores']} cores, two processes of one machine, blocks at scattered places; medians of "
                 f"{results['rounds']} rounds in turns. bench/run rivals", "start", "#666")
    return str(picture)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(draw(json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))))
