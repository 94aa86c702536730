"""Sequence classifiers behind a real `vllm serve` as rewards: the scores of the same classifier
in the run."""

import httpx2
import pytest
import torch
from http_rewards import RemoteReward, scored
from tiny import CHAT_TEMPLATE, WORDS, llama, tokenizer
from vllm_servers import VLLM, served

from trl_ppo_ext import RewardError
from trl_ppo_ext.rewards import ClassifierReward, ScoringBatch, load_classifier

pytestmark = pytest.mark.skipif(not VLLM.exists(), reason="needs vLLM, see `make test-vllm`")


@pytest.fixture(scope="module", params=[1, 3], ids="{} labels".format)
def running(request, tmp_path_factory):
    """A server of a classifier, with its path and a label of it."""
    path = tmp_path_factory.mktemp("classifier")
    sizes = {
        "hidden_size": 64,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "num_labels": request.param,
    }
    llama(classifier=True, **sizes).save_pretrained(path)
    words = tokenizer()
    words.chat_template = CHAT_TEMPLATE
    words.save_pretrained(path)
    with served(str(path), path / "log", ("--runner", "pooling")) as server:
        yield server, str(path), None if request.param == 1 else 2


def batch(chat=False):
    texts = [" ".join(["", *WORDS[row % 5 : row % 9 + 6]]) for row in range(40)]
    if chat:
        prompts = [[{"role": "user", "content": "w3 w4"}]] * 40
        return ScoringBatch(
            prompts, [[{"role": "assistant", "content": text}] for text in texts], [[1]] * 40
        )
    return ScoringBatch(["w3 w4"] * 40, texts, [[1]] * 40)


@pytest.mark.parametrize("chat", [False, True])
def test_served_classifier_scores_as_in_this_process(running, chat):
    server, path, label = running
    here = ClassifierReward(load_classifier(path, torch.float32, "none"), label=label).score(
        batch(chat)
    )
    there = scored(RemoteReward(server.url, path, label=label), batch(chat))
    assert there == pytest.approx(here, abs=1e-4)
    assert len({round(score, 3) for score in here}) > 5


def test_unusable_requests_fail_with_the_cause_and_a_remedy(running):
    server, path, label = running
    (error,) = scored(
        RemoteReward(server.url, path, label=label), ScoringBatch(["w1"], [" w2" * 300], [[1]])
    )
    assert (
        isinstance(error, RewardError) and "BadRequestError" in str(error) and "256" in str(error)
    )
    errors = scored(RemoteReward(server.url, path, label=7), batch())
    assert "`label` must be one of its" in str(errors[0])
    assert httpx2.get(f"{server.url}/health").is_success
