"""CSV files that only grow, and can be cut back."""

import math

import numpy as np
import pytest

from forethought.files import FileError
from forethought.tracking import CsvFile, read_rows


def test_cells_are_exact_and_read_back(tmp_path):
    file = CsvFile(tmp_path / "x.csv", ["a", "b", "c"])
    file.append({"a": 0.1 + 0.2, "b": None, "c": 'two, "quoted"\nlines'})
    file.append({"a": np.float32(0.1), "b": True, "c": math.inf})
    rows, note = read_rows(tmp_path / "x.csv")
    assert note is None
    assert rows[0] == {"a": "0.30000000000000004", "b": "", "c": 'two, "quoted" lines'}
    assert rows[1] == {"a": "0.10000000149011612", "b": "1", "c": "inf"}
    assert (tmp_path / "x.csv").read_bytes().count(b"\n") == 3


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n3\n5,6\n")
    with pytest.raises(FileError, match="line 3 has 1 cells, but the header has 2"):
        read_rows(tmp_path / "x.csv")


def test_cut_drops_later_rows_and_says_when_earlier_ones_are_missing(tmp_path):
    file = CsvFile(tmp_path / "x.csv", ["a"])
    file.append({"a": 1})
    state = file.state()
    assert state["bytes"] == len("a\n1\n")
    file.append({"a": 2})
    assert file.cut(state) is None
    assert (tmp_path / "x.csv").read_text() == "a\n1\n"
    (tmp_path / "x.csv").write_text("a\n")
    assert CsvFile(tmp_path / "x.csv", ["a"]).cut(state) == (
        "x.csv has lost 2 bytes of rows since then."
    )


def test_a_file_with_other_columns_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(FileError, match=r"x\.csv has other columns"):
        CsvFile(tmp_path / "x.csv", ["a", "c"])
    with pytest.raises(FileError, match="column a twice"):
        CsvFile(tmp_path / "y.csv", ["a", "a"])
