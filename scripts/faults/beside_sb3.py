"""The same faults done to Stable-Baselines3 and to forethought, in one run, by real processes.

Kill in save, NaN reward, hanging environment, SIGTERM, full disk (a limit on file sizes), resume
equality, malicious file. Every cell of the table that it prints was measured just before; the
details go to docs/results/faults_beside_sb3.json, the table to docs/faults.md. Exits with 1 if ours
breaks a promise of that page.

    python scripts/faults/beside_sb3.py [--kills 20] [--seed 1] [--out FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kill_runs
import result_file
from forethought.tracking import RunDirectory
from processes import SCRIPTS, Done, end_all, run, terminate, wait_for_hang

HANG_SECONDS = 20.0  # waiting this long for an environment counts as hanging
TIMEOUT_SECONDS = 5.0  # what ours is told to wait for one environment
HALF_STEPS = 500  # in the comparison of resumes
KILLS = 20  # of each kind; fewer are a trial
TASK = "gym:Pendulum-v1"


@dataclass(frozen=True)
class Row:
    """One fault: what both did, in a few words, and all that was measured."""

    fault: str
    sb3: str
    ours: str
    right: bool
    """Ours did what docs/faults.md promises; the other side is only measured."""
    measured: dict[str, Any]


def sb3(*words: str) -> list[str]:
    return [str(SCRIPTS / "sb3_side.py"), *words]


def our_side(*words: str) -> list[str]:
    return [str(SCRIPTS / "our_side.py"), *words]


def train(out: Path, *words: str, task: str = TASK, steps: int = 300) -> list[str]:
    options = ["--preset", "debug", "--track.no-console", "--eval.every-agent-steps", "0"]
    few = ["--eval.episodes", "1", "--steps", str(steps), "--out", str(out)]
    return ["-m", "forethought", "train", "tdmpc2", task, *options, *few, *words]


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def short(error: str) -> str:
    """An error in the table: its first words."""
    return f"`{error[:31]}...`" if error else "no error"


def bad(texts: list[str]) -> str:
    return f"{sum(bool(text) for text in texts)} of {len(texts)}"


# -- the faults ------------------------------------------------------------------------------------


def kill_in_save(folder: Path, kills: int, seed: int) -> list[Row]:
    theirs = run(*sb3("kill-in-save", str(made(folder / "sb3")), str(kills), str(seed))).json
    ours = run(*our_side("kill-in-save", str(made(folder / "ours")), str(kills), str(seed))).json
    nothing = sum(text.startswith("nothing usable") for text in theirs["CheckpointCallback"])
    return [
        Row(
            "kill -9 while the same path is saved over and over",
            f"`model.save`: {bad(theirs['model.save'])} unreadable; "
            f"`save_replay_buffer`: {bad(theirs['save_replay_buffer'])} unreadable",
            f"`agent.save` (replay included): {bad(ours['agent.save'])} unreadable",
            not any(ours["agent.save"]),
            {"sb3": theirs, "ours": ours},
        ),
        Row(
            "kill -9 of training that saves at every step",
            "`CheckpointCallback` with buffer: newest unreadable "
            f"{bad(theirs['CheckpointCallback'])}, nothing usable {nothing} of {kills}; which one "
            "is good you find out by trying",
            f"newest unreadable {bad(ours['train'])}; `resume` finds it by itself",
            not any(ours["train"]),
            {},
        ),
    ]


def nan_reward(folder: Path) -> list[Row]:
    names = ("SAC", "TD3", "DQN")
    theirs = {name: run(*sb3("nan-reward", name, "plain")).json for name in names}
    checked = run(*sb3("nan-reward", "SAC", "checked")).json
    task = "gym:fault_envs:faults/NaNPendulum-v0"
    halt = run(*train(folder / "halt", task=task))
    left = run(*our_side("nonfinite", str(folder / "halt"))).json
    restart = run(*train(folder / "restart", "--env.on-env-error", "restart", task=task))
    restarts = count_events(folder / "restart", "env-restarted")
    words = [
        f"{name}: {short(found['error'])}, {found['nonfinite']} of {found['tensors']} tensors NaN"
        for name, found in theirs.items()
    ]
    optional = f"with the optional `VecCheckNan`: {checked['error']}"
    return [
        Row(
            "one reward is NaN",
            "; ".join([*words, optional]),
            f"exit {halt.code}: {halt.sentence!r}; {left['nonfinite']} of {left['tensors']} "
            f"tensors NaN; with `--env.on-env-error restart`: exit {restart.code}, {restarts} "
            "restarted",
            (halt.code, left["nonfinite"], restart.code, restarts > 0) == (1, 0, 0, True),
            {"sb3": theirs, "sb3_VecCheckNan": checked, "ours": told(halt) | left}
            | {"ours_restart": told(restart) | {"restarts": restarts}},
        )
    ]


def hang(folder: Path) -> list[Row]:
    position = folder / "sb3-position"
    theirs = wait_for_hang(*sb3("hang", str(position)), patience=HANG_SECONDS)
    theirs["stood_at"] = number_in(position)
    task = "gym:fault_envs:faults/HangingPendulum-v0"
    options = [
        "--env.num-envs",
        "2",
        "--env.workers",
        "--env.timeout-seconds",
        str(TIMEOUT_SECONDS),
    ]
    halt = run(*train(folder / "halt", *options, task=task, steps=600))
    again = [*options, "--env.on-env-error", "restart"]
    restart = run(*train(folder / "restart", *again, task=task, steps=400))
    restarts = count_events(folder / "restart", "env-restarted")
    return [
        Row(
            f"an environment in a worker hangs (time-out of ours: {TIMEOUT_SECONDS:g} s)",
            f"`SubprocVecEnv`: still hangs after {HANG_SECONDS:g} s, at step {theirs['stood_at']}"
            if theirs["hangs"]
            else f"ends: {theirs}",
            f"exit {halt.code}: {halt.sentence!r}; with `restart`: exit {restart.code}, "
            f"{restarts} restarted",
            (halt.code, restart.code, restarts > 0) == (1, 0, True),
            {"sb3": theirs, "ours": told(halt)}
            | {"ours_restart": told(restart) | {"restarts": restarts}},
        )
    ]


def terminated(folder: Path) -> list[Row]:
    theirs = made(folder / "sb3")
    position = theirs / "position"
    code, seconds = terminate(
        *sb3("terminated", str(theirs)), ready=lambda: number_in(position) > 230
    )
    stood = number_in(position)
    resumed = run(*sb3("go-on", str(theirs))).json
    lost = stood - resumed["checkpoint"]

    ours, stage = folder / "ours", folder / "stage"
    traced = [str(SCRIPTS / "traced_run.py"), str(stage), *train(ours, steps=100_000)[2:]]
    our_code, our_seconds = terminate(*traced, ready=lambda: number_in(stage) > 230)
    our_stood = number_in(stage)
    newest = kill_runs.newest_published(ours) or 0
    our_resumed = run("-m", "forethought", "resume", str(ours), "--steps", str(newest + 20))
    return [
        Row(
            "SIGTERM in training (a checkpoint every 100 steps)",
            f"exit {code} after {seconds:.1f} s, no checkpoint of that moment: {lost} steps lost; "
            "going on from the last one works, not exactly (below)",
            f"exit {our_code} after {our_seconds:.1f} s, checkpoint of that moment: "
            f"{our_stood - newest} steps lost; `resume`: exit {our_resumed.code}",
            (our_code, our_stood, our_resumed.code) == (143, newest, 0) and our_seconds < 10,
            {
                "sb3": {"exit": code, "seconds": seconds, "stood_at": stood, **resumed},
                "ours": {"exit": our_code, "seconds": our_seconds, "stood_at": our_stood}
                | {"checkpoint": newest, "resumed": told(our_resumed)},
            },
        )
    ]


def number_in(file: Path) -> int:
    """The steps that a process keeps in a file; 0 before there are any."""
    words = file.read_text().split() if file.exists() else []
    return int(words[0]) if words and words[0].isdigit() else 0


def full_disk(folder: Path) -> list[Row]:
    theirs = run(*sb3("full-disk", str(made(folder / "sb3")))).json
    ours = run(*our_side("full-disk", str(made(folder / "ours")))).json
    intact = {"": "intact"}
    return [
        Row(
            "the disk is full at the next checkpoint (RLIMIT_FSIZE)",
            f"`model.save` over the last: {theirs['error_in_place']}, the last good file "
            f"{intact.get(theirs['previous_in_place'], 'is destroyed')}; `CheckpointCallback`: "
            f"training dies at step {theirs['stopped_at']} ({theirs['error_callback']}), the file "
            f"before it {intact.get(theirs['previous_callback'], 'is destroyed')}",
            f"{ours['warned']} warnings, trains on to step {ours['trained_to']}, the last save "
            f"{'fails in one sentence' if ours['error'] else 'works'}; {ours['newest']} intact; "
            f"with space again `resume`: {ours['resumed']}",
            bool(ours["error"]) and not ours["skipped"] and ours["resumed"] == "done",
            {"sb3": theirs, "ours": ours},
        )
    ]


def resume_equality(folder: Path) -> list[Row]:
    theirs = str(made(folder / "sb3"))
    _ = run(*sb3("straight", theirs, str(2 * HALF_STEPS))).json
    _ = run(*sb3("first-half", theirs, str(HALF_STEPS))).json
    sb3_found = run(*sb3("second-half", theirs, str(HALF_STEPS))).json
    straight, halves = folder / "straight", folder / "halves"
    total = 2 * HALF_STEPS
    ran = [
        run(*train(straight, steps=total)),
        run(*train(halves, steps=HALF_STEPS)),
        run("-m", "forethought", "resume", str(halves), "--steps", str(total)),
    ]
    exits = [done.code for done in ran]
    found = run(*our_side("different-tensors", str(straight), str(halves))).json
    return [
        Row(
            f"{HALF_STEPS} steps, files, a new process, {HALF_STEPS} steps; against {total} at "
            "once",
            "SAC with its buffer: largest parameter difference "
            f"{sb3_found['largest_difference']:.2g}",
            f"{found['different']} of {found['tensors']} tensors differ in a bit, optimiser and "
            "random streams included",
            (found["different"], found["steps"], exits) == (0, [total, total], [0, 0, 0]),
            {"sb3": sb3_found, "ours": found | {"exits": exits}},
        )
    ]


def hostile(folder: Path) -> list[Row]:
    theirs = run(*sb3("hostile", str(made(folder / "sb3")))).json
    ours = run(*our_side("hostile", str(made(folder / "ours")))).json
    outcomes = list(ours["outcomes"].values())
    older = outcomes.count("older checkpoint")
    refused = len(outcomes) - older - outcomes.count("loaded")
    words = [
        f"`{verb}`: {'executed' if ran else 'not executed'}"
        for verb, ran in theirs["executed"].items()
    ]
    return [
        Row(
            "a pickle hidden in a saved file",
            "; ".join(words),
            f"{'EXECUTED' if ours['executed'] else 'never executed'} in {len(outcomes)} places: "
            f"{refused} refused by name, {older} passed over for an older checkpoint, "
            f"{outcomes.count('loaded')} loaded",
            not ours["executed"] and "loaded" not in outcomes,
            {"sb3": theirs, "ours": ours},
        )
    ]


def told(done: Done) -> dict[str, Any]:
    return {"exit": done.code, "seconds": done.seconds, "said": done.err.strip()[-1500:]}


def count_events(path: Path, kind: str) -> int:
    found = RunDirectory(path).events() if path.exists() else []
    return sum(event["kind"] == kind for event in found)


# -- the table -------------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    lines = [
        f"| fault | Stable-Baselines3 {version('stable-baselines3')} | forethought |",
        "|---|---|---|",
        *(f"| {row.fault} | {row.sb3} | {row.ours} |" for row in rows),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=KILLS, help="kills in save, of each kind")
    parser.add_argument("--seed", type=int, default=1, help="of the kills' moments")
    default = result_file.RESULTS / "faults_beside_sb3.json"
    parser.add_argument("--out", type=Path, default=default, help="where the JSON goes")
    arguments = parser.parse_args()
    if arguments.kills < KILLS and arguments.out == default:
        parser.error(f"fewer than {KILLS} kills are a trial: give it an --out of its own")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(2) as pool:
        folder = Path(temporary)
        waiting = [
            pool.submit(kill_in_save, folder / "kill", arguments.kills, arguments.seed),
            pool.submit(nan_reward, made(folder / "nan")),
            pool.submit(hang, made(folder / "hang")),
            pool.submit(terminated, folder / "terminated"),
            pool.submit(full_disk, folder / "full-disk"),
            pool.submit(resume_equality, folder / "resume"),
            pool.submit(hostile, folder / "hostile"),
        ]
        rows = []
        try:
            for future in waiting:
                rows += future.result()
                print(f"{rows[-1].fault}: measured, {time.monotonic() - began:.0f} s", flush=True)
        except BaseException:  # Ctrl-C, too: the processes have groups of their own
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise
    right = all(row.right for row in rows)
    seconds = round(time.monotonic() - began, 1)
    result = {
        "seed": arguments.seed,
        "stable_baselines3": version("stable-baselines3"),
        "seconds": seconds,
        "ours_all_right": right,
        "rows": [vars(row) for row in rows],
    }
    result_file.write(arguments.out, result)
    result_file.put_in_page("faults_beside_sb3", arguments.out, table(rows))
    print(f"\n{table(rows)}")
    for row in rows:
        if not row.right:
            print(f"ours is NOT as it must be: {row.fault}", file=sys.stderr)
    return 0 if right else 1


if __name__ == "__main__":
    result_file.carry_out(
        main,
        "All faults take three to five minutes; the first, the slowest, is told after one or two.",
    )
