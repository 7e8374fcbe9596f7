"""What Stable-Baselines3 does under one fault: `python scripts/faults/sb3_side.py FAULT ...`.

Used as its documentation says: `save` and `load`, `save_replay_buffer`, `CheckpointCallback` with
the replay buffer, `SubprocVecEnv`, `VecCheckNan`. The last line printed is JSON.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import resource
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import torch
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecCheckNan

import fault_envs
import hostile_pickle
from random_kills import kill_repeatedly

LEARNING_STARTS = 100
SAVE_EVERY = 100  # steps
NOTHING_USABLE = "nothing usable"


def sac(env: Any = "Pendulum-v1", **options: Any) -> SAC:
    chosen = {"seed": 1, "device": "cpu", "buffer_size": 10_000, "learning_starts": LEARNING_STARTS}
    return SAC("MlpPolicy", env, **chosen, **options)


def nonfinite(model: Any) -> tuple[int, int]:
    """Tensors of the policy with a NaN or infinity in them, and all of its tensors."""
    tensors = [x for x in model.policy.state_dict().values() if x.is_floating_point()]
    return sum(not torch.isfinite(x).all().item() for x in tensors), len(tensors)


def reads(load: Callable[[], Any]) -> str:
    """'' if it loads, else the error."""
    try:
        load()
    except Exception as error:  # noqa: BLE001 - whatever it raises is the measurement
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


# -- the faults ------------------------------------------------------------------------------------


def kill_in_save(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Overwriting one file, as `model.save(path)` does, and CheckpointCallback at every step."""
    model = sac()
    model.learn(200)
    zip_file, buffer_file = folder / "model.zip", folder / "buffer.pkl"

    def over_and_over(save: Callable[[], None]) -> Callable[[int], None]:
        def write(i: int) -> None:
            for _ in itertools.count():
                save()

        return write

    def with_callback(i: int) -> None:
        saver = CheckpointCallback(1, str(folder / f"callback-{i}"), save_replay_buffer=True)
        model.learn(10**6, callback=saver, reset_num_timesteps=False)

    def newest_pair(i: int) -> str:
        place = folder / f"callback-{i}"
        steps = max(int(file.stem.split("_")[-2]) for file in place.glob("*.zip"))

        def read(n: int) -> str:
            loaded = lambda: SAC.load(place / f"rl_model_{n}_steps")  # noqa: E731
            buffer = place / f"rl_model_replay_buffer_{n}_steps"
            return reads(lambda: loaded().load_replay_buffer(buffer))

        newest = read(steps)
        older = range(steps - 1, steps - len(list(place.glob("*.zip"))), -1)
        usable = not newest or any(not read(n) for n in older)
        return newest if usable else f"{NOTHING_USABLE}: {newest}"

    ways: dict[str, tuple[Any, Any, Any]] = {
        "model.save": (
            over_and_over(lambda: model.save(zip_file)),
            lambda i: zip_file.exists(),
            lambda i: reads(lambda: SAC.load(zip_file)),
        ),
        "save_replay_buffer": (
            over_and_over(lambda: model.save_replay_buffer(buffer_file)),
            lambda i: buffer_file.exists(),
            lambda i: reads(lambda: sac().load_replay_buffer(buffer_file)),
        ),
        "CheckpointCallback": (
            with_callback,
            lambda i: len(list((folder / f"callback-{i}").glob("*.zip"))) >= 2,
            newest_pair,
        ),
    }
    return {way: kill_repeatedly(kills, seed, *how) for way, how in ways.items()}


def nan_reward(algorithm: str, checked: bool) -> dict[str, Any]:
    """One NaN reward; `checked` wraps the environment in VecCheckNan."""
    cls = {"SAC": SAC, "TD3": TD3, "DQN": DQN}[algorithm]
    task = "NaNCartPole" if algorithm == "DQN" else "NaNPendulum"
    env: Any = DummyVecEnv([lambda: gymnasium.make(f"faults/{task}-v0")])
    if checked:
        env = VecCheckNan(env, raise_exception=True)
    model = cls(
        "MlpPolicy",
        env,
        seed=1,
        device="cpu",
        buffer_size=10_000,
        learning_starts=LEARNING_STARTS,
    )
    error = reads(lambda: model.learn(2 * fault_envs.FAULT_STEP))
    bad, total = nonfinite(model)
    return {"error": error, "steps": model.num_timesteps, "nonfinite": bad, "tensors": total}


def hang(position: Path) -> dict[str, Any]:
    """An environment that hangs in a worker; the caller decides how long to wait, and finds in
    `position` how far it came."""
    env = make_vec_env("faults/HangingPendulum-v0", n_envs=2, vec_env_cls=SubprocVecEnv)
    model = sac(env)
    print("learning", flush=True)
    return {"error": reads(lambda: model.learn(1000, callback=Position(position)))}


class Position(BaseCallback):
    """Keeps the number of steps in a file, for the one who sends a signal."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def _on_step(self) -> bool:
        os.pwrite(self.descriptor, f"{self.num_timesteps:>9}".encode(), 0)
        return True


def terminated(folder: Path) -> dict[str, Any]:
    """Trains with a checkpoint every SAVE_EVERY steps, until somebody sends SIGTERM."""
    saver = CheckpointCallback(SAVE_EVERY, str(folder), save_replay_buffer=True)
    sac().learn(10**6, callback=[Position(folder / "position"), saver])
    return {}


def go_on(folder: Path) -> dict[str, Any]:
    """Continues from the newest checkpoint in `folder`."""
    steps = max(int(file.stem.split("_")[-2]) for file in folder.glob("*.zip"))
    model = SAC.load(folder / f"rl_model_{steps}_steps", env=gymnasium.make("Pendulum-v1"))
    model.load_replay_buffer(folder / f"rl_model_replay_buffer_{steps}_steps")
    model.learn(20, reset_num_timesteps=False)
    return {"checkpoint": steps, "steps": model.num_timesteps}


def full_disk(folder: Path) -> dict[str, Any]:
    """No file may grow over half of a checkpoint: overwriting one path, and CheckpointCallback."""
    path = folder / "model.zip"
    model = sac()
    saver = CheckpointCallback(SAVE_EVERY, str(folder / "callback"), save_replay_buffer=True)
    model.learn(SAVE_EVERY, callback=saver)
    model.save(path)
    before = reads(lambda: SAC.load(path))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size // 2, limit[1]))
    in_place = reads(lambda: model.save(path))
    training = reads(lambda: model.learn(2 * SAVE_EVERY, callback=saver, reset_num_timesteps=False))
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return {
        "before": before,
        "error_in_place": in_place,
        "previous_in_place": reads(lambda: SAC.load(path)),
        "error_callback": training,
        "stopped_at": model.num_timesteps,
        "previous_callback": reads(
            lambda: SAC.load(folder / "callback" / f"rl_model_{SAVE_EVERY}_steps")
        ),
    }


def straight(folder: Path, steps: int) -> dict[str, Any]:
    model = sac()
    model.learn(steps)
    torch.save(model.policy.state_dict(), folder / "straight.pt")
    return {}


def first_half(folder: Path, steps: int) -> dict[str, Any]:
    model = sac()
    model.learn(steps)
    model.save(folder / "half")
    model.save_replay_buffer(folder / "half_buffer")
    return {}


def second_half(folder: Path, steps: int) -> dict[str, Any]:
    """Goes on in this new process, and compares with the run of `straight`."""
    model = SAC.load(folder / "half", env=gymnasium.make("Pendulum-v1"), device="cpu")
    model.load_replay_buffer(folder / "half_buffer")
    model.learn(steps, reset_num_timesteps=False)
    other = torch.load(folder / "straight.pt", weights_only=True)
    ours = model.policy.state_dict()
    gaps = {name: (ours[name] - other[name]).abs().max().item() for name in ours}
    worst = max(gaps, key=lambda name: gaps[name])
    return {"largest_difference": gaps[worst], "in": worst, "steps": model.num_timesteps}


def hostile(folder: Path) -> dict[str, Any]:
    """A model file and a replay buffer that carry a pickle of their own."""
    model = sac()
    model.save(folder / "good.zip")
    bad, marker = folder / "bad.zip", folder / "executed-by-load"
    with zipfile.ZipFile(folder / "good.zip") as source, zipfile.ZipFile(bad, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name == "data":
                data = json.loads(content)
                text = base64.b64encode(hostile_pickle.that_makes(marker)).decode()
                data["anything"] = {":type:": "any", ":serialized:": text}
                content = json.dumps(data).encode()
            target.writestr(name, content)
    buffer, buffer_marker = folder / "bad.pkl", folder / "executed-by-buffer"
    buffer.write_bytes(hostile_pickle.that_makes(buffer_marker))
    errors = {
        "load": reads(lambda: SAC.load(bad)),
        "load_replay_buffer": reads(lambda: model.load_replay_buffer(buffer)),
    }
    executed = {"load": marker.exists(), "load_replay_buffer": buffer_marker.exists()}
    return {"executed": executed, "errors": errors}


FAULTS: dict[str, Callable[..., dict[str, Any]]] = {
    "kill-in-save": lambda folder, kills, seed: kill_in_save(Path(folder), int(kills), int(seed)),
    "nan-reward": lambda algorithm, checked: nan_reward(algorithm, checked == "checked"),
    "hang": lambda position: hang(Path(position)),
    "terminated": lambda folder: terminated(Path(folder)),
    "go-on": lambda folder: go_on(Path(folder)),
    "full-disk": lambda folder: full_disk(Path(folder)),
    "straight": lambda folder, steps: straight(Path(folder), int(steps)),
    "first-half": lambda folder, steps: first_half(Path(folder), int(steps)),
    "second-half": lambda folder, steps: second_half(Path(folder), int(steps)),
    "hostile": lambda folder: hostile(Path(folder)),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(FAULTS[sys.argv[1]](*sys.argv[2:])))
