"""The run directory and its sinks: CSV first, then console, TensorBoard and Weights & Biases."""

from forethought.tracking.catalog import Catalog, Entry
from forethought.tracking.columns import TIME_COLUMNS
from forethought.tracking.csv_file import CsvFile, read_rows
from forethought.tracking.run_directory import RunDirectory
from forethought.tracking.sinks import Sink, make_sinks
from forethought.tracking.tracker import Tracker

__all__ = [
    "TIME_COLUMNS",
    "Catalog",
    "CsvFile",
    "Entry",
    "RunDirectory",
    "Sink",
    "Tracker",
    "make_sinks",
    "read_rows",
]
