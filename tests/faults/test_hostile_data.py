"""Data to be imported that somebody made with bad intent: refused in a sentence, nothing run."""

import io
import pickle
import shutil
import stat
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from gymnasium import spaces

from forethought.cli import main
from forethought.config import ForethoughtError
from forethought.data import Dataset, from_gym_steps, verify, write_dataset
from forethought.data.importers import import_dataset
from forethought.files import FileError
from forethought.spaces.spec import EnvSpec
from tests.data_stubs import make_dataset
from tests.faults.forgery import forge, sign
from tests.import_stubs import (
    box_json,
    chunk_columns,
    minari_episode,
    spring,
    write_chunk,
    write_minari,
)

h5py = pytest.importorskip("h5py")
BOX = {"obs_space": box_json(3, -10.0, 10.0), "action_space": box_json(2, -2.0, 2.0)}


class Trap:
    """A pickle that shows whether it was executed: reading it makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return spring, (str(self.file),)


def refused(source, out, *said, **options):
    """The one sentence with which an import is refused; nothing may have been written."""
    before = sorted(out.parent.rglob("*"))
    with pytest.raises(ForethoughtError) as caught:
        import_dataset(source, out, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for part in said:
        assert part in sentence, sentence
    assert sorted(out.parent.rglob("*")) == before
    return sentence


@pytest.mark.parametrize("name", ["data.pt", "data.pkl", "data.hdf5", "data.zip"])
def test_case_06_a_pickle_posing_as_a_dataset_is_never_executed(tmp_path, name):
    trap = tmp_path / "executed"
    source = tmp_path / name
    source.write_bytes(pickle.dumps(Trap(trap)))
    refused(source, tmp_path / "out", name)
    for kind in ("minari", "tdmpc2"):
        refused(source, tmp_path / "out", name, format=kind)
    assert not trap.exists()


@pytest.mark.parametrize("among_tensors", [False, True])
def test_case_06_a_chunk_that_names_code_is_refused_by_that_name(tmp_path, among_tensors):
    trap, path = tmp_path / "executed", tmp_path / "chunk.pt"
    tensors = {"task": torch.zeros(1, 6), "obs": Trap(trap)}
    torch.save(tensors if among_tensors else Trap(trap), path)
    refused(
        path,
        tmp_path / "out",
        "holds more than tensors (tests.import_stubs.spring)",
        "nothing in it was run",
    )
    assert not trap.exists()


def test_case_06_the_allow_list_of_the_process_is_not_used_nor_changed(tmp_path):
    trap, path = tmp_path / "executed", tmp_path / "chunk.pt"
    torch.save(Trap(trap), path)
    with torch.serialization.safe_globals([spring]):
        before = set(torch.serialization.get_safe_globals())
        refused(path, tmp_path / "out", "holds more than tensors")
        assert set(torch.serialization.get_safe_globals()) == before
    assert not trap.exists()


def test_case_06_a_pickle_in_place_of_any_file_of_a_dataset_is_refused(tmp_path):
    place, trap = make_dataset(tmp_path / "d"), tmp_path / "executed"
    for file in sorted(path for path in place.rglob("*") if path.is_file()):
        content = file.read_bytes()
        manifest = (place / "manifest.json").read_bytes()
        name = file.relative_to(place).as_posix()
        if file.name == "manifest.json":
            file.write_bytes(pickle.dumps(Trap(trap)))
        else:
            forge(place, name, pickle.dumps(Trap(trap)))
        with pytest.raises(FileError, match=file.name.replace(".", r"\.")):
            verify(place)
        file.write_bytes(content)
        (place / "manifest.json").write_bytes(manifest)
    objects = np.array([Trap(trap)] * 4, dtype=object)
    buffer = io.BytesIO()
    np.save(buffer, objects, allow_pickle=True)
    forge(place, "shard-00000/obs.npy", buffer.getvalue())
    with pytest.raises(FileError, match=r"obs\.npy"):
        Dataset.open(place)
    assert not trap.exists()


BAD_NAMES = ["../outside", "a/../../outside", "/outside", "..\\outside", "C:\\outside"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_case_07_a_chunk_with_a_name_that_leads_outside_is_refused(tmp_path, name):
    path = write_chunk(tmp_path / "chunk.pt", chunk_columns([0]))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, "outside")
    refused(path, tmp_path / "out", repr(name), "lies outside: refused, and nothing was written")


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_case_07_an_archive_with_names_that_lead_outside_is_refused(tmp_path, name, kind):
    path = tmp_path / f"data.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data/metadata.json", "{}")
            archive.writestr(name, "outside")
    else:
        with tarfile.open(path, "w:gz" if kind == "tar.gz" else "w") as archive:
            archive.addfile(tarfile.TarInfo(name))
    refused(path, tmp_path / "out", repr(name), "lies outside")


def test_case_07_links_in_an_archive_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        link = zipfile.ZipInfo("data/link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    refused(tmp_path / "data.zip", tmp_path / "out", "'data/link', which is a link")
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        member = tarfile.TarInfo("data/link")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    refused(tmp_path / "data.tar", tmp_path / "out", "'data/link', which is a link or a device")


def test_case_07_an_honest_archive_is_to_be_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/metadata.json", "{}")
    refused(tmp_path / "data.zip", tmp_path / "out", "is an archive: unpack it")


def test_case_07_a_manifest_that_names_files_outside_is_refused(tmp_path):
    place = make_dataset(tmp_path / "d")
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    old = Dataset.open(place)
    assert old.rows
    entry = {"sha256": "0" * 64, "bytes": 6}
    sign(place, {"../secret": entry}, {"kind": "forethought-packed-episodes", "dataset_schema": 1})
    with pytest.raises(FileError, match="lies outside: refused"):
        verify(place)


def test_case_07_links_in_place_of_shards_and_columns_are_refused(tmp_path):
    place = make_dataset(tmp_path / "d")
    shutil.move(place / "shard-00000", tmp_path / "elsewhere")
    (place / "shard-00000").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError, match="is a link"):
        Dataset.open(place)
    (place / "shard-00000").unlink()
    shutil.move(tmp_path / "elsewhere", place / "shard-00000")
    column = place / "shard-00000" / "obs.npy"
    shutil.move(column, tmp_path / "obs.npy")
    column.symlink_to(tmp_path / "obs.npy")
    with pytest.raises(FileError, match="is a link"):
        verify(place)


@pytest.mark.parametrize("kind", ["external link", "soft link", "external bytes", "virtual"])
def test_case_07_hdf5_that_reaches_into_other_files_is_refused(tmp_path, kind):
    """HDF5's own ways to lead outside."""
    folder = write_minari(tmp_path / "m", [minari_episode(5)], **BOX)
    with h5py.File(tmp_path / "other.hdf5", "w") as other:
        other["secret"] = np.zeros((6, 3))
    (tmp_path / "raw").write_bytes(bytes(6 * 3 * 8))
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        episode = file["episode_0"]
        episode["mine"] = episode["observations"][()]
        del episode["observations"]
        if kind == "external link":
            episode["observations"] = h5py.ExternalLink("../../other.hdf5", "secret")
        elif kind == "soft link":
            episode["observations"] = h5py.SoftLink("/episode_0/mine")
        elif kind == "external bytes":
            where = [(str(tmp_path / "raw"), 0, h5py.h5f.UNLIMITED)]
            episode.create_dataset("observations", (6, 3), np.float64, external=where)
        else:
            layout = h5py.VirtualLayout((6, 3), np.float64)
            layout[:] = h5py.VirtualSource(str(tmp_path / "other.hdf5"), "secret", (6, 3))
            episode.create_virtual_dataset("observations", layout)
    refused(folder, tmp_path / "out", "observations", "refused, and nothing was written")


@pytest.mark.parametrize("packed", [{}, {"compression": "gzip"}, {"scaleoffset": 0}])
def test_a_column_that_is_packed_well_is_read(tmp_path, packed):
    """Equal rewards of a long episode, in a few kilobytes."""
    steps = 200_000
    folder = write_minari(tmp_path / "m", [minari_episode(steps)], **BOX)
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        del file["episode_0"]["rewards"]
        ones = np.ones(steps, np.int64)
        how = {"chunks": True} | packed
        file["episode_0"].create_dataset("rewards", data=ones, **how)
    shard = import_dataset(folder, tmp_path / "out").shards[0]
    assert np.array_equal(shard.columns["reward"][1:], np.ones(steps, np.float32))


@pytest.mark.parametrize("wrong", [1.0, "nothing"])
def test_a_single_number_in_place_of_a_column_is_refused(tmp_path, wrong):
    folder = write_minari(tmp_path / "m", [minari_episode(5)], **BOX)
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        del file["episode_0"]["rewards"]
        data = h5py.Empty("f8") if wrong == "nothing" else wrong
        file["episode_0"].create_dataset("rewards", data=data)
    refused(folder, tmp_path / "out", "/episode_0/rewards is not a column")


@pytest.mark.parametrize("chunks", [(1024,), None])
def test_a_column_of_terabytes_that_nobody_wrote_is_refused(tmp_path, chunks):
    """HDF5 takes no place for them, and would ask main memory for all."""
    folder = write_minari(tmp_path / "m", [minari_episode(5)], **BOX)
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        del file["episode_0"]["rewards"]
        file["episode_0"].create_dataset("rewards", (2**40,), np.float64, chunks=chunks)
    refused(folder, tmp_path / "out", "/episode_0/rewards says that it has 8,796,093,022,208 bytes")


def test_a_column_that_fits_into_no_memory_is_refused(tmp_path, monkeypatch):
    """Packed well, terabytes may have been written."""
    folder = write_minari(tmp_path / "m", [minari_episode(50_000)], **BOX)
    free = "forethought.replay.memory.available_bytes"
    monkeypatch.setattr(free, lambda device: 3_000_000)
    # Observations fit (twice 1.2 MB); actions (0.8 MB), which are in memory beside them, do not.
    said = "/episode_0, up to its column /episode_0/actions, takes 4.0 MB", "3.0 MB are free"
    refused(folder, tmp_path / "out", *said)
    # What its own columns have taken is not missing a second time.
    left = iter([6_000_000])
    monkeypatch.setattr(free, lambda device: next(left, 1_000_000))
    import_dataset(folder, tmp_path / "out")


def test_case_07_an_episode_that_is_a_link_is_refused(tmp_path):
    folder = write_minari(tmp_path / "m", [minari_episode(5)], **BOX, total_episodes=2)
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        file["episode_1"] = h5py.ExternalLink(str(tmp_path / "x.hdf5"), "/")
    refused(folder, tmp_path / "out", "episode_1 is a link to elsewhere")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9])
def test_case_04_truncated_sources_are_refused(tmp_path, share):
    path = write_chunk(tmp_path / "chunk.pt", chunk_columns([0, 1]))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    refused(path, tmp_path / "out", "chunk.pt")
    folder = write_minari(tmp_path / "m", [minari_episode(5)], **BOX)
    main_file = folder / "data" / "main_data.hdf5"
    content = main_file.read_bytes()
    main_file.write_bytes(content[: int(share * len(content))])
    refused(folder, tmp_path / "out", "main_data.hdf5")


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ({"gear": np.array([1, 4]), "keys": np.zeros((2, 2), np.int8)}, "action/gear 4 in row 2"),
        ({"gear": np.array([0, 1]), "keys": np.zeros((2, 2), np.int8)}, "action/gear 0 in row 1"),
        ({"gear": np.array([1, 1]), "keys": np.full((2, 2), 2, np.int8)}, "action/keys 2 in row 1"),
        ({"gear": np.array([1, 1])}, "but must have action/gear, action/keys"),
        ({"gear": np.array([1.5, 1]), "keys": np.zeros((2, 2), np.int8)}, "of type float64"),
    ],
)
def test_case_25_structured_actions_out_of_range_or_without_a_key_are_refused(
    tmp_path, action, said
):
    keys = {"gear": spaces.Discrete(3, start=1), "keys": spaces.MultiBinary(2)}
    obs = spaces.Box(-1, 1, (1,), np.float32)
    task = EnvSpec("stub:dict", obs, spaces.Dict(keys), None, 1, True)
    never = np.zeros(2, bool)
    rows = from_gym_steps(np.zeros((3, 1)), action, np.zeros(2), never, never)
    with (
        pytest.raises(ForethoughtError, match=said),
        write_dataset(tmp_path / "d", [task], ["random"], source="stub") as writer,
    ):
        writer.append_episode(rows)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_refuses_in_one_sentence_with_its_exit_code(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.pt").write_bytes(pickle.dumps(Trap(tmp_path / "executed")))
    assert main(["data", "import", "data.pt", "--out", "out"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "nothing in it was run" in err
    assert [x.name for x in tmp_path.iterdir()] == ["data.pt"]
