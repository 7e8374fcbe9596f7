"""Makes `tests.stubs` importable for every test and worker, however pytest is started."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:
    sys.path.append(ROOT)  # worker processes inherit sys.path, not pytest's import mode
