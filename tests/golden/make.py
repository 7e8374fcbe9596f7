"""Makes the golden run of the present schema: python tests/golden/make.py (see README.md).

It never writes over one that is there: an older schema stays as it was published.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from forethought import presets
from forethought.agents.registry import config_class
from forethought.config import build_run_config
from forethought.files import SCHEMA, sha256
from forethought.training.loop import train_run

SMALLER = {
    "steps": 170,
    "agent": {"model": {"mlp_units": 8, "encoder_units": 8, "latent_dim": 8, "num_q": 2}},
    "train": {"checkpoint_every_agent_steps": 0},
    "eval": {"every_agent_steps": 0},
    "track": {"console": False},
}
"""Beside the preset `debug`: one checkpoint, in the middle of an episode, and 100 kB in all."""


def main() -> None:
    """Trains in a path relative to here, so that no file tells where it was made."""
    layers = [presets.for_agent("debug", "tdmpc2"), SMALLER]
    config = build_run_config("tdmpc2", "gym:Pendulum-v1", config_class("tdmpc2"), layers)
    with contextlib.chdir(Path(__file__).parent):
        run = train_run(config, Path(f"schema-{SCHEMA}"))
        (run.path / "lock").unlink()
        files = sorted(path for path in run.path.rglob("*") if path.is_file())
        sums = [f"{sha256(path)}  {path.as_posix()}\n" for path in files]
        run.path.with_suffix(".sha256").write_text("".join(sums))


if __name__ == "__main__":
    main()
