import gc
import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# tiny models gain nothing from more, and lose much where something else is running
torch.set_num_threads(1)

EXTENSIONS = Path(__file__).parent.parent / ".pytest_cache" / "torch_extensions"


def pytest_configure(config):
    """Compile C++ extensions into the checkout; a lock that a killed run left would be waited
    for without end."""
    if not hasattr(config, "workerinput"):
        os.environ["TORCH_EXTENSIONS_DIR"] = str(EXTENSIONS)
        for lock in EXTENSIONS.rglob("lock"):
            lock.unlink()


def pytest_collection_finish():
    """Save what takes a tenth of the time of tiny runs each: garbage collection, and names of
    cached datasets."""
    from datasets import arrow_dataset, disable_caching, fingerprint

    disable_caching()  # a random name must not be found
    arrow_dataset.update_fingerprint = lambda *args: fingerprint.generate_random_fingerprint()
    gc.collect()
    gc.freeze()  # exempts all that was imported


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU, with the reason, where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def all_cores():
    """For the tests that train for a minute."""
    torch.set_num_threads(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Path of a tiny model with its tokenizer, which nobody may change."""
    from tiny import llama, tokenizer

    path = tmp_path_factory.mktemp("base")
    llama().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)
