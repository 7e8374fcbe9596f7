"""Does the DQN family learn? Plain, modern and Rainbow on MinAtar's Breakout, beside random play.

    python benchmarks/dqn_learning.py [--members plain ...] [--out FOLDER] [--seeds 1 2 3]

Each run has 500,000 decisions and one core. The last checkpoint is evaluated over 30 episodes. What
is asked: 6 at least for each member, and of modern no less than of plain. Runs that FOLDER already
holds are resumed or, where complete, only evaluated. Writes docs/results/dqn_learning.json and
docs/pictures/dqn_learning.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from learning_kinds import outcome, summary
from results import ROOT, carry_out, write
from runs import at_once, is_trial, train_or_resume

TASK = "minatar:breakout"
AIM = 6.0
MEMBERS = {
    "plain": ("dqn_minatar",),
    "modern": ("dqn_modern", "dqn_minatar"),
    "rainbow": ("dqn_rainbow", "dqn_minatar"),
}


def learn(member: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run, and its last checkpoint beside random play."""
    run = options.out / f"{member}-seed{seed}"
    presets = [word for name in MEMBERS[member] for word in ("--preset", name)]
    length = ["--steps", str(options.steps)] if options.steps else []
    train_or_resume(run, "dqn", TASK, *presets, *length, "--seed", str(seed))
    return outcome(run, seed, options.episodes)


def draw(
    members: dict[str, dict[str, Any]],
    title: str,
    path: Path,
    published: dict[str, Any] | None = None,
) -> None:
    """The evaluations of every run, a colour for each member; at their end the mean of the last
    checkpoints with its interval over seeds; random play as a line, a published point as a star."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, found) in enumerate(members.items()):
        for number, run in enumerate(found["runs"]):
            x, y = zip(*run["curve"], strict=True)
            axes.plot(x, y, color=f"C{place}", alpha=0.6, label=None if number else name)
        ends = max(run["curve"][-1][0] for run in found["runs"]) * (1.02 + 0.02 * place)
        mean, interval = found["return_mean"], found["interval_over_seeds"]
        bars = None if interval is None else [[mean - interval[0]], [interval[1] - mean]]
        axes.errorbar([ends], [mean], yerr=bars, color=f"C{place}", marker="o", capsize=3)
    random = next(iter(members.values()))["random_return_mean"]
    axes.axhline(random, color="gray", linestyle=":", label="random play")
    if published:
        at, label = published["env_frames"], f"{published['label']} at {published['env_frames']:,}"
        axes.plot([at], [published["return_mean"]], "k*", markersize=11, label=label)
    axes.set(title=title, xlabel="environment frames", ylabel="return of evaluations")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--members", nargs="+", choices=list(MEMBERS), default=list(MEMBERS))
    parser.add_argument("--out", type=Path, default=Path("runs/dqn_learning"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--episodes", type=int, default=30, help="evaluation episodes")
    parser.add_argument("--steps", type=int, help="decisions, instead of the preset's; a trial")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    options = parser.parse_args()
    trial = is_trial(parser, options)
    # Seed by seed, so that a benchmark cut short has something of every member.
    work = [(seed, member) for seed in options.seeds for member in options.members]
    outcomes = at_once(options.jobs, lambda pair: learn(pair[1], pair[0], options), work)
    found: dict[str, Any] = {}
    for member in options.members:
        runs = [x for (_, name), x in zip(work, outcomes, strict=True) if name == member]
        found[member] = {"presets": MEMBERS[member], **summary(runs, AIM)}
        facts = found[member]
        print(
            f"{member}: {facts['return_mean']:.1f} {facts['interval_over_seeds']}, random play "
            f"{facts['random_return_mean']:.1f} {facts['random_interval']}, aim {AIM}"
        )
    result: dict[str, Any] = {"task": TASK, "episodes": options.episodes, "members": found}
    if {"plain", "modern"} <= found.keys():
        plain, modern = (found[name]["return_mean"] for name in ("plain", "modern"))
        result["modern_at_least_plain"] = modern >= plain
        print(f"modern at least plain: {'yes' if modern >= plain else 'no'}")
    if not trial:
        print(f"written: {write('dqn_learning', result)}")
    folder = options.out if trial else ROOT / "docs" / "pictures"
    draw(found, TASK, folder / "dqn_learning.png")


if __name__ == "__main__":
    carry_out(main)
