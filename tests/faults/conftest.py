"""What fault tests share: the stub agent, moments of a run, and a run that nothing happened to."""

from __future__ import annotations

import pytest

from forethought.training.loop import train_run
from tests.stub_agent import register, stub_run, training_record

MOMENTS = {
    "random play": "evaluation-0-10",
    "seed phase": "step-42",
    "burst": "update-17",
    "mid-episode": "step-250",
    "evaluation": "evaluation-1-10",
    "saving": "save-300",
}
TWO = {"env": {"num_envs": 2}}


@pytest.fixture(autouse=True)
def _stub_agent(monkeypatch):
    register(monkeypatch)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The record of a run of two environments that nothing happened to."""
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        path = train_run(stub_run(**TWO), tmp_path_factory.mktemp("undisturbed") / "run").path
    return training_record(path)
