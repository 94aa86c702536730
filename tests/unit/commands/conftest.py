import contextlib
import json

import pytest
from tiny import CHAT_TEMPLATE, llama, tokenizer

# the score of `of_last_word` is known from the prompt, so a critic can know it too
REWARDS = """
def of_last_word(prompts, **kwargs):
    return [float(prompt.split()[-1].removeprefix("w")) % 4 for prompt in prompts]

def length(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def to_prompt(row):
    return {"prompt": f"w1 {row['question']}"}

def fails_late(completion_ids, trainer_state, **kwargs):
    if trainer_state.global_step:
        raise OSError("the disk is gone")
    return [float(len(ids)) for ids in completion_ids]

def of_texts(texts):
    return [float(len(text)) for text in texts]

class Walk:
    def reset(self, row, seed):
        return "w1 w2"

    def step(self, text):
        return "w3", 1.0, True

class Narrow(Walk):
    def reset(self, answer, seed):
        return "w1 w2"

class Judging:
    name = "judging"

    def score(self, batch):
        batch.log_metric("accuracy", 1.0)
        return [1.0] * len(batch)

judge = Judging()
not_a_reward = 3
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Models, datasets and rewards, as in the directory of a user."""
    path = tmp_path_factory.mktemp("workplace")
    for name, template in (("policy", CHAT_TEMPLATE), ("plain", None)):
        llama().save_pretrained(path / name)
        tokenizer(chat_template=template).save_pretrained(path / name)
    (path / "cli_rewards.py").write_text(REWARDS)
    (path / "configs").mkdir()
    (path / "splits").mkdir()
    prompts = [f"w{n + 9} w{n}" for n in range(12)]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    files = {"prompts": prompts, "splits/train": prompts, "splits/test": prompts, "chat": chats}
    for name, column in files.items():
        (path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in column)
        )
    (path / "questions.jsonl").write_text(
        "".join(json.dumps({"question": prompt}) + "\n" for prompt in prompts)
    )
    return path


@pytest.fixture
def there(workplace):
    with contextlib.chdir(workplace):
        yield workplace
