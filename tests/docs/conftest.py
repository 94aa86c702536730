"""Models that stand in for those of the Hub, written once."""

import pytest
import stand_ins


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    stand_ins.build(folder)
    return folder


@pytest.fixture
def working_directory(tmp_path, models, monkeypatch):
    """Where documented code runs."""
    stand_ins.place(models, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
