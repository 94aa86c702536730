"""Judges and remote rewards of a server that misbehaves."""

import atexit
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path

from tiny import CHAT_TEMPLATE
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from trl_ppo_ext.concurrency import started
from trl_ppo_ext.rewards.http import Judge

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "templates" / "chat_multi_gpu"))
from remote_reward import RemoteReward

KEY = "sk-test-0123456789abcdef"
TEMPLATE = "Rate what follows.\nPROMPT {prompt}\nCOMPLETION {completion}"
SCORE = r"Score: (\S+?)(?:/1000)?$"
fresh = count()


@contextmanager
def serving(port=0):
    script = Path(__file__).parent / "misbehaving_server.py"
    process = subprocess.Popen(
        [sys.executable, "-S", str(script), str(port)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def scored(reward, batch):
    """Scores of a batch, which a run awaits."""
    return started(reward.score(batch)).result()


def judge(port, mode, part=None, **kwargs):
    settings = {"name": "rubric", "pattern": SCORE, "timeout": 1.0, "max_retries": 1} | kwargs
    return Judge(f"http://127.0.0.1:{port}/{mode}/{part or next(fresh)}", "m", TEMPLATE, **settings)


@cache
def classifier():
    """Path of a model, of which only the config and the tokenizer are read; a token per
    character, as its code."""
    path = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, path)
    vocabulary = {chr(code): code for code in range(128)} | {"<eos>": 128, "<bos>": 129}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    special = {"eos_token": "<eos>", "bos_token": "<bos>"}
    built = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=CHAT_TEMPLATE, **special)
    built.save_pretrained(path)
    LlamaConfig(vocab_size=130, pad_token_id=None).save_pretrained(path)
    return path


def remote(port, mode, part=None, **kwargs):
    settings = {"name": "house", "timeout": 1.0, "max_retries": 1} | kwargs
    return RemoteReward(
        f"http://127.0.0.1:{port}/{mode}/{part or next(fresh)}", classifier(), **settings
    )
