"""Real kills: runs that save as often as they can are ended by SIGKILL at random moments, resumed,
killed again, and in the end compared with a run that nobody disturbed.

A chain is one run: train, kill, resume, kill, ... until it is done. Each process is killed with its
workers. A part of the kills falls between a process's start and the moment at which the one before
it began to work, so that imports, reading the checkpoint and stepping open episodes again are hit;
the others fall after it began to work.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import traced_run
from compare_runs import differences
from forethought import files
from forethought.tracking import RunDirectory

OPTIONS = {
    "preset": "debug",
    "seed": 1,
    "steps": 120,
    "track.every-agent-steps": 1,
    "train.seed-agent-steps": 20,
    "train.seed-updates": 8,
    "env.max-episode-steps": 15,
    "replay.block-rows": 16,
}
KINDS = {
    "one environment, a checkpoint at every step": {
        "train.checkpoint-every-agent-steps": 1,
        "eval.every-agent-steps": 20,
    },
    "two environments in workers, a checkpoint at every step of both": {
        "train.checkpoint-every-agent-steps": 2,
        "eval.every-agent-steps": 30,
        "env.num-envs": 2,
    },
    "one environment, a checkpoint at every fifth step, many evaluations": {
        "train.checkpoint-every-agent-steps": 5,
        "eval.every-agent-steps": 5,
    },
}
EARLY = 0.25  # share of kills in the start-up of a resume
WORK_SECONDS = 2.0  # the others: at most this long after it began to work
PATIENCE_SECONDS = 300.0
TASK = "gym:Pendulum-v1"


@dataclass
class Kill:
    """One kill, and what came of it."""

    chain: str
    kind: str
    interval: int
    """Agent steps between two checkpoints."""
    seconds: float
    """From the start of the process."""
    stage: str
    """The last fault point that the process passed."""
    phase: str
    stood_at: int
    """Agent steps that the run had taken."""
    newest_checkpoint: int
    """The newest that was published at that moment."""
    resumed_at: int | None = None
    """Where the next process that lived long enough went on; None: none ever did."""

    @property
    def lost(self) -> int | None:
        return None if self.resumed_at is None else self.stood_at - self.resumed_at

    @property
    def right(self) -> bool:
        """It was resumed, from the newest published checkpoint or a newer one, and lost at most
        one interval."""
        if self.resumed_at is None or self.lost is None:
            return False
        return self.lost <= self.interval and self.resumed_at >= self.newest_checkpoint

    def row(self) -> dict[str, Any]:
        return asdict(self) | {"lost": self.lost, "right": self.right}


@dataclass
class Chain:
    """A run that is killed again and again."""

    name: str
    kind: str
    run: Path
    kills: list[Kill] = field(default_factory=list)
    stood_at: int = 0
    """Agent steps that it had taken when its last process ended."""
    resumes: int = 0
    """Lines in events.jsonl so far that tell of a resume."""
    differences: list[str] | None = None
    """From the undisturbed run; None while it is not done."""
    failure: str | None = None

    def look(self) -> None:
        """Takes in what the last process did: if it resumed, then where the kills before it led."""
        events = RunDirectory(self.run).events()
        told = [int(event["agent_steps"]) for event in events if event["kind"] == "resumed"]
        if len(told) > self.resumes:
            self.resumes, self.stood_at = len(told), told[-1]
            self.settle()

    def settle(self) -> None:
        for kill in self.kills:
            if kill.resumed_at is None:
                kill.resumed_at = self.stood_at

    def note_kill(self, launch: Launch) -> Kill:
        """What is known right after a kill, before a resume could mend anything."""
        self.look()
        steps, stage = launch.stage()
        newest = newest_published(self.run)
        self.stood_at = self.stood_at if steps is None else steps
        kill = Kill(
            chain=self.name,
            kind=self.kind,
            interval=KINDS[self.kind]["train.checkpoint-every-agent-steps"],
            seconds=round(launch.seconds, 3),
            stage=stage,
            phase=phase_of(stage),
            stood_at=self.stood_at,
            newest_checkpoint=-1 if newest is None else newest,
        )
        self.kills.append(kill)
        return kill

    def finish(self, launch: Launch, undisturbed: Path) -> None:
        """The process that was not killed: it must come to the end, and the same end."""
        code, said = launch.finish()
        if code != 0:
            self.failure = f"ended with exit code {code}: {said[-2000:]}"
            return
        self.look()
        if any(kill.resumed_at is None for kill in self.kills):
            # The kill fell after the last checkpoint; the resume found the run complete.
            self.stood_at = newest_published(self.run) or 0
            self.settle()
        self.differences = differences(undisturbed, self.run)


def phase_of(stage: str) -> str:
    """The part of a run's life that follows a fault point."""
    name = stage.partition("-")[0]
    return {
        "start": "start-up: imports, reading the checkpoint, restoring",
        "write": "saving: writing the tensors",
        "save": "saving: writing the rest",
        "manifest": "saving: hashes and manifest",
        "rename": "saving: publishing",
        "after": "catalog, pruning, the next decision",
        "step": "what follows a decision",
        "update": "learning",
        "evaluation": "evaluating",
    }.get(name, stage)


def train_words(kind: str, out: Path) -> list[str]:
    options = OPTIONS | KINDS[kind]
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    switches = ["--track.no-console", *(["--env.workers"] if "workers" in kind else [])]
    return ["train", "tdmpc2", TASK, *words, *switches, "--out", str(out)]


def newest_published(run: Path) -> int | None:
    """The step of the newest checkpoint, by name alone."""
    found = files.published(run / "checkpoints")
    return int(found[-1].name.rpartition("-")[2]) if found else None


class Killer:
    """Shares a number of kills among the threads that carry them out."""

    def __init__(self, folder: Path, kills: int, seed: int) -> None:
        self.folder, self.wanted, self.seed = folder, kills, seed
        self.references = {kind: folder / f"undisturbed-{i}" for i, kind in enumerate(KINDS)}
        self.chains: list[Chain] = []
        self._taken = 0
        self._lock = threading.Lock()
        self._launches: list[Launch] = []
        self._abandoned = False

    @property
    def kills(self) -> list[Kill]:
        return [kill for chain in self.chains for kill in chain.kills]

    def take(self) -> bool:
        """Whether one more kill is wanted; then it is this caller's."""
        with self._lock:
            wanted = self._taken < self.wanted
            self._taken += wanted
            return wanted

    def give_back(self) -> None:
        with self._lock:
            self._taken -= 1

    def undisturbed(self, kind: str) -> None:
        """Makes the run that the chains of a kind must equal."""
        command = [sys.executable, "-m", "forethought", *train_words(kind, self.references[kind])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")

    def next_chain(self) -> Chain | None:
        """A new run to kill, each kind in its turn; None when no kills are left."""
        with self._lock:
            if self._taken >= self.wanted:
                return None
            number = len(self.chains)
            kind = list(KINDS)[number % len(KINDS)]
            chain = Chain(f"chain-{number:02d}", kind, self.folder / f"chain-{number:02d}")
            self.chains.append(chain)
            return chain

    def work(self) -> None:
        """One thread: chains until the kills are used up."""
        while chain := self.next_chain():
            # The chain's own stream: the same delays, however the threads share the chains.
            self.carry_out(chain, random.Random(f"{self.seed} {chain.name}"))

    def abandon(self) -> None:
        """Ends everything, for somebody does not want to wait for it."""
        with self._lock:
            self._taken, self._abandoned = self.wanted, True
            for launch in self._launches:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    if launch.process.poll() is None:
                        os.killpg(launch.process.pid, signal.SIGKILL)

    def launch(self, words: list[str], stage_file: Path) -> Launch | None:
        """A process, unless nobody waits for it any more."""
        with self._lock:
            if self._abandoned:
                return None
            self._launches.append(Launch(words, stage_file))
            return self._launches[-1]

    def carry_out(self, chain: Chain, rng: random.Random) -> None:
        """Kills and resumes one run until it is done, and compares it."""
        stage_file = self.folder / f"{chain.name}.stage"
        words, start_up = train_words(chain.kind, chain.run), None
        while True:
            mine = self.take()
            launch = self.launch(words, stage_file)
            if launch is None:
                return
            killed = mine and launch.kill(chain.run, start_up, rng)
            if self._abandoned:
                return  # what ended it was no kill of ours
            if not killed:
                break
            print_kill(len(self.kills) + 1, self.wanted, chain.note_kill(launch))
            words, start_up = ["resume", str(chain.run)], launch.start_up or start_up
        if mine:
            self.give_back()
        chain.finish(launch, self.references[chain.kind])


class Launch:
    """One process of a chain, in a group of its own together with its workers."""

    def __init__(self, words: list[str], stage_file: Path) -> None:
        self.stage_file = stage_file
        stage_file.unlink(missing_ok=True)
        self.began = time.monotonic()
        self.seconds = 0.0
        self.start_up: float | None = None
        """Seconds until it worked; None if nobody waited for that."""
        self.process = subprocess.Popen(
            [sys.executable, traced_run.__file__, str(stage_file), *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def kill(self, run: Path, start_up: float | None, rng: random.Random) -> bool:
        """Kills it at a random moment; False if it ended by itself before that.

        `start_up` is how long an earlier process of the run took to begin its work. The very first
        one has None, and is safe until its first checkpoint, of step 0, is there: before that there
        is nothing to resume.
        """
        early, delay = rng.random() < EARLY, rng.random() * WORK_SECONDS
        if start_up is not None and early:
            delay *= start_up / WORK_SECONDS
        elif not self.wait_for(
            self.working if start_up else lambda: newest_published(run) is not None
        ):
            return False
        try:
            self.process.wait(delay)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.seconds = time.monotonic() - self.began
            self.process.communicate()
            return self.process.returncode == -signal.SIGKILL
        return False

    def wait_for(self, ready: Callable[[], bool]) -> bool:
        while not ready():
            if self.process.poll() is not None:
                return False
            if time.monotonic() - self.began > PATIENCE_SECONDS:
                os.killpg(self.process.pid, signal.SIGKILL)
                return False
            time.sleep(0.005)
        self.start_up = time.monotonic() - self.began
        return True

    def working(self) -> bool:
        return self.stage()[1] != traced_run.START

    def stage(self) -> tuple[int | None, str]:
        """Agent steps taken in this process (None: none yet), and the last fault point."""
        words = self.stage_file.read_text().split() if self.stage_file.exists() else []
        if len(words) != 2:
            return None, traced_run.START
        return None if words[0] == "-" else int(words[0]), words[1]

    def finish(self) -> tuple[int, str]:
        """Waits for the end; exit code and what it said."""
        try:
            _, text = self.process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            _, text = self.process.communicate()
        return self.process.returncode, text


def print_kill(number: int, wanted: int, kill: Kill) -> None:
    print(
        f"kill {number:>3}/{wanted}  {kill.chain}  step {kill.stood_at:<4} {kill.stage}", flush=True
    )
