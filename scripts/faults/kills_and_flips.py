"""Real kills and flipped bits, counted: does every run resume, is every damage noticed?

Kills: runs of the tiny preset that save as often as they can are killed with -9 (their workers too)
at random moments, two at a time, and resumed; each must lose at most one checkpoint interval, and
the finished run must equal an undisturbed one bit for bit. Flips: one random bit of a random file
of a checkpoint or replay block; the loader must notice and name the file. Prints a table, writes
docs/results/faults.json and the table in docs/faults.md, exits with 1 if anything is not as it must
be.

    python scripts/faults/kills_and_flips.py [--kills 200] [--flips 200] [--seed 1] [--out FILE]
        [--keep DIR]
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flip_bits
import kill_runs
import result_file

AT_A_TIME = 2
WANTED = 200  # kills, and flips; fewer are a trial


def kills(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Carries out the kills; the figures, and every single one."""
    began = time.monotonic()
    killer = kill_runs.Killer(folder, count, seed)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(killer.undisturbed, kill_runs.KINDS if count else ()))
        print(f"undisturbed runs made, {time.monotonic() - began:.0f} s", flush=True)
        waiting = [pool.submit(killer.work) for _ in range(AT_A_TIME)]
        try:
            for future in waiting:
                future.result()
        except BaseException:  # Ctrl-C, too: the runs have process groups of their own
            killer.abandon()
            raise
    done = killer.kills
    lost = [kill.lost for kill in done if kill.lost is not None]
    chains = killer.chains
    return {
        "kills": len(done),
        "resumed": sum(kill.resumed_at is not None for kill in done),
        "right": sum(kill.right for kill in done),
        "most_lost_agent_steps": max(lost, default=None),
        "most_lost_intervals": max(
            (kill.lost / kill.interval for kill in done if kill.lost is not None), default=None
        ),
        "lost_a_published_checkpoint": sum(
            kill.resumed_at is not None and kill.resumed_at < kill.newest_checkpoint
            for kill in done
        ),
        "runs": len(chains),
        "runs_equal_to_undisturbed": sum(chain.differences == [] for chain in chains),
        "phases": dict(Counter(kill.phase for kill in done).most_common()),
        "seconds": round(time.monotonic() - began, 1),
        "chains": [
            {
                "chain": chain.name,
                "kind": chain.kind,
                "kills": len(chain.kills),
                "differences": chain.differences and chain.differences[:5],
                "equal": chain.differences == [],
                "failure": chain.failure,
            }
            for chain in chains
        ],
        "each": [kill.row() for kill in done],
    }


def flips(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Carries out the bit flips; the figures, and every single one."""
    began = time.monotonic()
    run = flip_bits.make_run(folder / "flips", seed)
    flip_bits.check_unhurt(run)
    rng = random.Random(f"{seed} flips")
    done = [flip_bits.flip(run, rng) for _ in range(count)]
    flip_bits.check_unhurt(run)
    tensors = [flip for flip in done if flip.tensors_load is not None]
    return {
        "flips": count,
        "detected": sum(flip.detected for flip in done),
        "outcomes": dict(Counter(flip.outcome for flip in done)),
        "files": dict(Counter(flip.kind for flip in done).most_common()),
        "in_safetensors_files": len(tensors),
        "of_these_safetensors_alone_reads": sum(bool(flip.tensors_load) for flip in tensors),
        "seconds": round(time.monotonic() - began, 1),
        "each": [flip.row() for flip in done],
    }


def figures(killed: dict[str, Any], flipped: dict[str, Any]) -> dict[str, str]:
    """The figures, for a person."""
    runs = f"{killed['runs_equal_to_undisturbed']} of {killed['runs']}"
    alone = f"{flipped['of_these_safetensors_alone_reads']} of {flipped['in_safetensors_files']}"
    return {
        "kills that were resumed": f"{killed['resumed']} of {killed['kills']}",
        "kills that cost at most one interval": f"{killed['right']} of {killed['kills']}",
        "most agent steps lost, in intervals": f"{killed['most_lost_intervals']}",
        "finished runs equal to the undisturbed one": runs,
        **{f"killed in {phase}": str(number) for phase, number in killed["phases"].items()},
        "flipped bits detected": f"{flipped['detected']} of {flipped['flips']}",
        **{f"flipped in {kind}": str(number) for kind, number in flipped["files"].items()},
        "flips in tensors that safetensors alone reads": alone,
    }


def all_right(killed: dict[str, Any], flipped: dict[str, Any]) -> bool:
    return bool(
        killed["right"] == killed["kills"]
        and killed["runs_equal_to_undisturbed"] == killed["runs"]
        and flipped["detected"] == flipped["flips"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=WANTED, help="real kills")
    parser.add_argument("--flips", type=int, default=WANTED, help="bit flips")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and the bits")
    default = result_file.RESULTS / "faults.json"
    parser.add_argument("--out", type=Path, default=default, help="where the JSON goes")
    parser.add_argument("--keep", type=Path, help="keep the run directories here")
    arguments = parser.parse_args()
    if min(arguments.kills, arguments.flips) < WANTED and arguments.out == default:
        parser.error(f"fewer than {WANTED} are a trial: give it an --out of its own")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        flipped = flips(folder, arguments.flips, arguments.seed)
        killed = kills(folder, arguments.kills, arguments.seed)
    right = all_right(killed, flipped)
    result = {
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - began, 1),
        "all_right": right,
        "kills": killed,
        "flips": flipped,
    }
    result_file.write(arguments.out, result)
    found = figures(killed, flipped)
    rows = [f"| {name} | {value} |" for name, value in found.items()]
    result_file.put_in_page("faults", arguments.out, "\n".join(["| | |", "|---|---|", *rows]))
    print("\n".join(f"{name:<66}{value}" for name, value in found.items()))
    print("all as it must be" if right else "NOT as it must be")
    return 0 if right else 1


if __name__ == "__main__":
    result_file.carry_out(
        main,
        "Two hundred flips and kills take about ten minutes; the first are told within a minute.",
    )
