"""The real server still answers as the one of the quick tests."""

import json

import pytest
import recording
from vllm_servers import VLLM, served

pytestmark = pytest.mark.skipif(not VLLM.exists(), reason="needs vLLM, see `make test-vllm`")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recording")
    recording.prepare(folder)
    return folder


def check(found):
    recorded = json.loads(recording.RECORDED.read_text())
    assert found == {name: recorded[name] for name in found}


def test_server_answers_as_recorded(folder):
    with served(str(folder / "base"), folder / "log") as server:
        check(recording.answers(server, folder))


@pytest.mark.slow
def test_servers_of_other_options_answer_as_recorded(folder):
    check(recording.answers_of_others(str(folder / "base"), folder))
