"""Files as other programs write them: Minari folders, and TD-MPC2 chunks of three generations.

tensordict need not be installed: torch.save stores a class by its name, so a class of that name in
a module of that name, there while the file is written, makes the same bytes.
"""

import copyreg
import json
import sys
import types
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

GENERATIONS = ("0.2", "0.3", "0.14")
"""Of tensordict: another module, then another way to rebuild."""


def spring(file):
    """What a hostile file calls, if it is let."""
    Path(file).touch()


@contextmanager
def fake_tensordict(generation):
    """The classes that tensordict of a version saves, importable by their names."""
    home = "tensordict.tensordict" if generation == "0.2" else "tensordict._td"

    class TensorDict:
        def __getstate__(self):
            return dict(self.__dict__)

    class _StringOnlyDict(dict):
        pass

    def _make_td(cls, state):
        raise AssertionError("only named, never called")

    modules = {name: types.ModuleType(name) for name in ("tensordict", "tensordict.utils", home)}
    modules["tensordict._reductions"] = types.ModuleType("tensordict._reductions")
    for name, module, thing in (
        ("TensorDict", home, TensorDict),
        ("_StringOnlyDict", "tensordict.utils", _StringOnlyDict),
        ("_make_td", "tensordict._reductions", _make_td),
    ):
        thing.__module__, thing.__qualname__ = module, name
        setattr(modules[module], name, thing)
    if generation == "0.14":
        copyreg.pickle(TensorDict, lambda td: (_make_td, (type(td), td.__getstate__())))
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield TensorDict, dict if generation == "0.14" else _StringOnlyDict
    finally:
        copyreg.dispatch_table.pop(TensorDict, None)
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})


def chunk_columns(tasks, rows=6, obs=5, action=3, widths=((5, 3), (2, 1)), seed=0):
    """Padded columns of one episode per entry of `tasks`, as the official data has them."""
    rng = np.random.default_rng(seed)
    count = len(tasks)
    columns = {
        "obs": np.zeros((count, rows, obs), np.float32),
        "action": np.zeros((count, rows, action), np.float32),
        "reward": rng.normal(size=(count, rows)).astype(np.float32),
        "task": np.repeat(np.array(tasks, np.int32)[:, None], rows, axis=1),
    }
    for episode, task in enumerate(tasks):
        o, a = widths[task]
        columns["obs"][episode, :, :o] = rng.normal(size=(rows, o))
        columns["action"][episode, :, :a] = rng.uniform(-1, 1, (rows, a))
    columns["action"][:, 0] = columns["reward"][:, 0] = np.nan
    return columns


def write_chunk(path, columns, generation="0.14"):
    """torch.save of a TensorDict with these columns."""
    with fake_tensordict(generation) as (tensor_dict, mapping):
        td = tensor_dict()
        td._tensordict = mapping({name: torch.from_numpy(x) for name, x in columns.items()})
        td._batch_size = torch.Size(columns["reward"].shape)
        td._device = torch.device("cpu") if generation == "0.2" else None
        td._td_dim_names, td._is_locked = None, False
        if generation == "0.2":
            td._is_shared, td._lock_id, td._locked_tensordicts = False, set(), []
        torch.save(td, path)
    return path


def write_minari(folder, episodes, obs_space, action_space, **metadata):
    """A folder in Minari's HDF5 layout; spaces as its JSON has them."""
    import h5py

    data = folder / "data"
    data.mkdir(parents=True)
    described = {
        "total_episodes": len(episodes),
        "total_steps": sum(len(e["rewards"]) for e in episodes),
        "data_format": "hdf5",
        "observation_space": json.dumps(obs_space),
        "action_space": json.dumps(action_space),
        "env_spec": json.dumps({"id": "Stub-v0", "max_episode_steps": 20}),
        "dataset_id": "stub/expert-v0",
        "algorithm_name": "SAC",
    }
    (data / "metadata.json").write_text(json.dumps({**described, **metadata}))
    with h5py.File(data / "main_data.hdf5", "w", track_order=True) as file:
        for number, episode in enumerate(episodes):
            put(file.create_group(f"episode_{number}"), episode)
    return folder


def put(group, values):
    for name, value in values.items():
        if isinstance(value, dict):
            put(group.create_group(name), value)
        else:
            group.create_dataset(name, data=value)


def box_json(n, low, high, dtype="float64"):
    return {"type": "Box", "dtype": dtype, "shape": [n], "low": [low] * n, "high": [high] * n}


def minari_episode(steps, obs=3, action=2, terminated=False, seed=0):
    rng = np.random.default_rng(seed)
    ends = np.arange(1, steps + 1) == steps
    return {
        "observations": rng.normal(size=(steps + 1, obs)),
        "actions": rng.uniform(-2, 2, (steps, action)),
        "rewards": rng.normal(size=steps),
        "terminations": ends & terminated,
        "truncations": ends & (not terminated),
    }
