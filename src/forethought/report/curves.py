"""Pictures: learning curves, performance profiles and probabilities of improvement.

Lines are named where they end rather than in a legend, colours are told apart by colour-blind
people (Okabe and Ito), and each picture comes as PNG or as SVG whose colours follow the page.
matplotlib is imported only here, when a picture is drawn, and without its global state.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from forethought.config import ForethoughtError
from forethought.extras import install_extra
from forethought.report import statistics
from forethought.report.groups import Collection, Group
from forethought.report.published import Published
from forethought.report.statistics import Array, Estimate, Scores, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, PAPER = "#1a1a19", "#6f6e69", "#ffffff"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b0609c", "#c28100", "#3d9bd1")
VARIABLES = {INK: "--ink", FAINT: "--faint", **{c: f"--c{i}" for i, c in enumerate(PALETTE)}}
"""Colours that an SVG takes from the page's CSS, so that it suits a light and a dark page."""
WIDTH, HEIGHT = 8.4, 4.8  # inches of one panel
TITLE = 44  # letters that fit above a panel
FEW_POINTS = 12  # up to here each evaluation is a dot
LINES = {"-": "", (0, (5, 2)): "dashed", (0, (1, 1.2)): "dotted", (0, (6, 2, 1, 2)): "dash-dotted"}
"""Lines of the groups after the first round of colours, and of the rounds after it, in words."""
POINTS = {"D": "◆", "s": "■"}
"""Markers of published points, and how a caption writes them."""
REACH = 2.0  # a published point up to this many times the frames of the runs widens the picture
STYLE: dict[Any, Any] = {
    "font.size": 14,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.unicode_minus": False,  # as in every other number of the page
    "text.parse_math": False,  # a dollar sign in a run's name is a dollar sign
    "svg.fonttype": "none",
    "svg.hashsalt": "forethought",  # the same picture twice is the same text
}


@dataclass(frozen=True)
class _Look:
    """How a group is drawn, the same in every picture of a page."""

    colour: str
    line: Any = "-"

    @property
    def words(self) -> str:
        """What a name must add where colours repeat."""
        return f" ({LINES[self.line]})" if LINES[self.line] else ""


@dataclass(frozen=True)
class _Label:
    """A name to write beside the end of a line, at a height in data units."""

    height: float
    text: str
    colour: str
    bold: bool = False


def learning_curves(collection: Collection, task: str | None = None) -> Figure:
    """One panel per task: means with intervals, single seeds, random play, published points.

    A single `task` comes without a title, for the page says it.
    """
    chosen = list(collection.tasks) if task is None else [task]
    lines = max(len(_captions(collection.tasks[name])) for name in chosen)
    top = 0.23 * lines + (0.62 if task is None else 0.27)  # inches above a panel
    columns = 1 if len(chosen) == 1 else 2
    rows = -(-len(chosen) // columns)
    with _style():
        figure = _figure(WIDTH * columns, HEIGHT * rows)
        looks = _looks(list(collection.methods))
        for place, name in enumerate(chosen):
            axes = figure.add_subplot(rows, columns, place + 1)
            _draw_task(axes, name, collection.tasks[name], looks)
            if task is None:
                # Two titles may begin alike, and two may end alike: the middle goes.
                half = TITLE // 2 - 3
                title = name if len(name) <= TITLE else f"{name[:half]} ... {name[-half:]}"
                axes.set_title(title, loc="left", weight="bold", fontsize=17, pad=10 + 16 * lines)
        # The right third of a panel belongs to the names of its lines.
        wide, high = WIDTH * columns, HEIGHT * rows
        figure.subplots_adjust(
            left=1.1 / wide,
            right=1 - 2.5 / wide,
            top=1 - top / high,
            bottom=0.75 / high,
            wspace=3.6 / (WIDTH - 3.6),
            hspace=(0.75 + top) / (HEIGHT - 0.75 - top),
        )
    return figure


def _draw_task(axes: Axes, task: str, groups: Sequence[Group], looks: Mapping[str, _Look]) -> None:
    right = _right(groups)
    labels = []
    for group in groups:
        labels += _draw_group(axes, group, looks[group.label], right)
    for marker, paper in zip(POINTS, _papers(groups)):
        inside = _inside(paper, right)
        if inside:
            # Points alone: a line over 100,000 frames would say how the paper's agent learned
            # between them, and a shorter run would stand above a slope that nobody measured.
            drawn: dict[str, Any] = {"color": INK, "ms": 8, "zorder": 4, "clip_on": False}
            axes.plot(*zip(*inside), marker, **drawn)
            frames, score = inside[-1]
            labels.append(_Label(score, _named(score, paper.label, frames), INK))
    random = [group.random_score for group in groups if group.random_score is not None]
    if random:
        level = float(np.mean(random))
        axes.axhline(level, color=FAINT, ls=(0, (6, 4)), lw=1.6, zorder=1)
        labels.append(_Label(level, _named(level, "random play"), FAINT))
    axes.set_xlim(0, 1.005 * max(right, 1))  # an evaluation at frame 0 may be all there is
    if task.startswith("dmc:"):
        axes.set_ylim(0, 1000)
    axes.grid(axis="y", color=FAINT, alpha=0.2, lw=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(lambda value, _: frames_text(value))
    axes.locator_params(axis="x", nbins=5)
    axes.locator_params(axis="y", nbins=6)
    axes.set_xlabel("environment frames" if groups[0].unit == "frames" else groups[0].unit)
    axes.set_ylabel("return")
    caption = "\n".join(_captions(groups))
    axes.text(0, 1.03, caption, transform=axes.transAxes, color=FAINT, fontsize=12, va="bottom")
    _write_labels(axes, labels)


def _papers(groups: Sequence[Group]) -> list[Published]:
    every = [group.published for group in groups]
    return list({curve.label: curve for curve in every if curve is not None}.values())


def _right(groups: Sequence[Group]) -> int:
    """The last frames of a panel: of the runs, or of a published point that is not far beyond."""
    end = max(max(run.evaluations) for group in groups for run in group.runs)
    next_points = [paper.at(end)[0] for paper in _papers(groups)]
    return max([end, *(at for at in next_points if at <= REACH * end)])


def _inside(paper: Published, right: int) -> list[tuple[int, float]]:
    """Published points within a panel, but for the one before any training."""
    return [(x, y) for x, y in zip(paper.frames, paper.means) if 0 < x <= right]


def _draw_group(axes: Axes, group: Group, look: _Look, right: int) -> list[_Label]:
    several = len(group.runs) > 1
    for run in group.runs:
        frames, scores = group.curve(run)
        # Without a line to draw, a point must do.
        alone = len(frames) == 1
        dots = "o" if alone or (not several and len(frames) <= FEW_POINTS) else None
        line: dict[str, Any] = {"lw": 2.8, "ls": look.line}
        if several:
            line = {"lw": 1.0, "alpha": 0.4}
        # Dots at the first and the last frame lie half outside of the axes.
        line = {**line, "marker": dots, "ms": 6, "clip_on": dots is None}
        axes.plot(frames, scores, color=look.colour, **line)
    found = group.mean_curve()
    end = float(group.scores.mean())
    if found is not None and several:
        frames, curves = found
        dots = "o" if len(frames) <= FEW_POINTS else None
        line = {"color": look.colour, "lw": 2.8, "ls": look.line, "zorder": 3}
        axes.plot(frames, curves.mean(axis=0), marker=dots, ms=6, clip_on=dots is None, **line)
        band = statistics.curve_band(curves)
        if band is not None:
            axes.fill_between(frames, *band, color=look.colour, alpha=0.2, lw=0)
    # Where the name cannot stand beside the end, it says where that is, and a dot shows it.
    at = group.last_frames if group.last_frames < right else None
    if at is not None or found is None:
        dot: dict[str, Any] = {"color": look.colour, "ms": 9, "zorder": 3, "clip_on": False}
        axes.plot([group.last_frames], [end], "o", **dot)
    return [_Label(end, _named(end, group.label, at) + look.words, look.colour, bold=True)]


def _named(score: float, name: str, at: int | None = None) -> str:
    """A name may end or begin with a number, as in `steps 400`: the dot keeps the score apart."""
    where = "" if at is None else f" at {frames_text(at)}"
    return f"{number(score)}{where} · {name}"


def _captions(groups: Sequence[Group]) -> list[str]:
    """What the lines are; then what the published points are, or where the first one would be."""
    counts = {len(group.runs) for group in groups}
    low, high = min(counts), max(counts)
    seeds = f"{high}" if low == high else f"{low} to {high}"
    banded = any(len(group.runs) > 1 and group.mean_curve() is not None for group in groups)
    shaded = ", 95 % interval shaded" if banded else ""
    found = ["one seed, so no interval" if high == 1 else f"mean of {seeds} seeds{shaded}"]
    right = _right(groups)
    for sign, paper in zip(POINTS.values(), _papers(groups)):
        if _inside(paper, right):
            gap = paper.spacing
            every = "" if gap is None else f", a point every {frames_text(gap)} frames"
            found.append(f"{sign} {paper.label}{every}")
        else:
            frames, score = paper.at(right)
            text = f"{paper.label}: {number(score)} at {frames_text(frames)} frames"
            found.append(f"{text}, beyond this picture")
    return [*found, *sorted({group.held_otherwise for group in groups if group.held_otherwise})]


def _write_labels(axes: Axes, labels: Sequence[_Label]) -> None:
    """Writes names to the right of the panel, moved apart so that none covers another."""
    low, high = axes.get_ylim()
    line = 0.068  # of the panel's height, for one line of text
    texts = ["\n".join(wrap(label.text)) for label in labels]
    order = sorted(range(len(labels)), key=lambda place: labels[place].height)
    sizes = [line * (texts[place].count("\n") + 1) for place in order]
    middles = [(labels[place].height - low) / (high - low) for place in order]
    for place, middle in zip(order, apart(middles, sizes)):
        axes.text(
            1.02,
            middle,
            texts[place],
            transform=axes.transAxes,
            color=labels[place].colour,
            weight="bold" if labels[place].bold else "normal",
            fontsize=13,
            va="center",
            linespacing=1.05,
        )


def wrap(text: str, width: int = 22, lines: int = 3) -> list[str]:
    """A name in few short lines, broken after commas first: a key stays beside its value."""
    found: list[str] = []
    for part in re.split(r"(?<=,) ", text):
        if found and len(found[-1]) + 1 + len(part) <= width:
            found[-1] += f" {part}"
        else:
            found += textwrap.wrap(part, width) or [part]
    return found if len(found) <= lines else [*found[: lines - 1], f"{found[lines - 1]} …"]


def apart(middles: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Rising middles of boxes, moved as little as is easy so that boxes stack within 0 and 1."""
    placed: list[float] = []
    floor = -0.02
    for middle, size in zip(middles, sizes):
        placed.append(max(middle, floor + size / 2))
        floor = placed[-1] + size / 2
    ceiling = max(1.04, sum(sizes))
    for place in reversed(range(len(placed))):
        placed[place] = min(placed[place], ceiling - sizes[place] / 2)
        ceiling = placed[place] - sizes[place] / 2
    return placed


def profiles(
    scores: Mapping[str, Scores],
    unit: str = "normalised score",
    methods: Sequence[str] | None = None,
) -> Figure:
    """The share of runs above each score, per method, with intervals.

    `methods` are those whose colours are given out, in their order; by default these.
    """
    every = np.concatenate([task for tasks in scores.values() for task in tasks])
    low, high = float(every.min()), float(every.max())
    if unit == "normalised score":
        low, high = min(0.0, low), max(1.0, high)
    margin = 0.05 * (high - low) or 1.0
    low, high = low - margin, high + margin
    thresholds = np.linspace(low, high, 201)

    def profile(tasks: Scores) -> Array:
        return statistics.performance_profile(tasks, thresholds)

    with _style():
        figure = _figure(WIDTH, HEIGHT)
        axes = figure.add_subplot()
        looks = _looks(list(scores) if methods is None else methods)
        for label, tasks in scores.items():
            look = looks[label]
            line: dict[str, Any] = {"color": look.colour, "ls": look.line, "lw": 2.8}
            axes.plot(thresholds, profile(tasks), label=label, drawstyle="steps-post", **line)
            band = statistics.interval(profile, tasks)
            if band is not None:
                low_end, high_end = band
                shade: dict[str, Any] = {"color": look.colour, "alpha": 0.18, "lw": 0}
                axes.fill_between(thresholds, low_end, high_end, step="post", **shade)
        axes.set_xlim(low, high)
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.grid(color=FAINT, alpha=0.2, lw=0.8)
        axes.set_xlabel(unit)
        axes.set_title("Share of runs above a score", loc="left", weight="bold", pad=14)
        axes.legend(frameon=False, loc="lower left", labelcolor="linecolor", handlelength=2.2)
        figure.subplots_adjust(left=0.11, right=0.97, top=0.87, bottom=0.16)
    return figure


def improvements(pairs: Mapping[tuple[str, str], Estimate]) -> Figure:
    """The chance that a run of the first beats one of the second, with intervals."""
    height = 1.6 + 0.85 * len(pairs)
    with _style():
        figure = _figure(WIDTH, height)
        axes = figure.add_subplot()
        axes.axvline(0.5, color=FAINT, ls=(0, (6, 4)), lw=1.6)
        for place, ((better, worse), chance) in enumerate(pairs.items()):
            if chance.low is not None and chance.high is not None:
                bar: dict[str, Any] = {"lw": 9, "alpha": 0.3, "solid_capstyle": "butt"}
                axes.plot([chance.low, chance.high], [place] * 2, color=PALETTE[0], **bar)
            axes.plot(chance.value, place, "o", color=PALETTE[0], ms=11, clip_on=False)
            names = f"{_cut(better)}\nover {_cut(worse)}"
            axes.text(-0.04, place, names, fontsize=13, va="center", ha="right")
            told = f"{100 * chance.value:.0f} %"
            axes.text(chance.value, place - 0.28, told, fontsize=13, va="center", ha="center")
        axes.set_xlim(-0.01, 1.01)
        axes.set_ylim(len(pairs) - 0.6, -0.7)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.set_xlabel("chance that a run of one beats a run of the other")
        title: dict[str, Any] = {"fontsize": 17, "weight": "bold", "va": "center"}
        figure.text(0.02, 1 - 0.3 / height, "Probability of improvement", **title)
        figure.subplots_adjust(left=0.38, right=0.95, top=1 - 0.55 / height, bottom=0.85 / height)
    return figure


def png(figure: Figure) -> bytes:
    """The picture on white."""
    data = io.BytesIO()
    with _style():
        figure.savefig(data, format="png", dpi=120, facecolor=PAPER, metadata={"Software": None})
    return data.getvalue()


def svg(figure: Figure) -> str:
    """The picture for a page: transparent, its colours the page's variables, without ids."""
    data = io.StringIO()
    with _style():
        figure.savefig(data, format="svg", transparent=True, metadata={"Date": None})
    text = data.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # figure_1 would stand in the page many times
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable}, {colour})")
    return text


def frames_text(value: float) -> str:
    """60000 as 60k, 1500000 as 1.5M."""
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e3 else f"{value:g}"


def _looks(labels: Sequence[str]) -> dict[str, _Look]:
    """Colours first; when they are used up, the same colours with other lines."""
    every = [_Look(colour, line) for line in LINES for colour in PALETTE]
    return {label: every[place % len(every)] for place, label in enumerate(labels)}


def _cut(text: str) -> str:
    return textwrap.shorten(text, 30, placeholder="…")


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def _style() -> AbstractContextManager[Any]:
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ForethoughtError(
            f"Pictures need matplotlib: run {install_extra('report')}."
        ) from error
    return rc_context(STYLE)
