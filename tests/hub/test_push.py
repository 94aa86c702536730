"""Push to a local server with the Hub's endpoints, by the Hub's own client, and load what it
then holds."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hub_client import READER, TESTS, TOKEN, FailedError
from hub_server import sha256
from safetensors.torch import load, load_file
from tiny import config

from trl_ppo_ext.checkpoints.hub import push_in_background

PLAIN = {
    "README.md",
    "adapter_config.json",
    "adapter_model.safetensors",
    "value_head.safetensors",
    "ppo_state.json",
}
PLAIN |= {".gitattributes", "tokenizer.json", "tokenizer_config.json", "report.html"}
FIRST_BLOCKS = re.compile(r"```python\n(.*?)```", re.DOTALL)
SEEN = """
ids = torch.randint(4, 32, (3, 9), generator=torch.Generator().manual_seed(7))
with torch.no_grad():
    seen = {"logits": policy(input_ids=ids).logits}
"""


def train(client, repo, *, token=TOKEN, **settings):
    """Train in the client, for a repository; `built` is the trainer there."""
    settings = {"push_to_hub": True, "hub_model_id": f"me/{repo}", "hub_token": token} | settings
    client.run(f"built = make({repo!r}, **{settings!r})\nbuilt.train()")
    return client.home / repo


def contents(folder):
    """Every file of a run, by what is in it."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): sha256(path.read_bytes()) for path in files}


def held(hub, repo, folder=""):
    files = hub.repositories[f"me/{repo}"].files
    return {
        path.removeprefix(folder): sha256(data)
        for path, data in files.items()
        if path.startswith(folder)
    }


def push_base(client, repo):
    for made in ("llama", "tokenizer"):
        client.run(f"{made}().push_to_hub({repo!r}, token={TOKEN!r})")


def test_push_of_the_model_publishes_no_other_role(hub, client):
    """As its own `save_pretrained`."""
    client.run("built = make('roles', critic='adapter')")
    client.run(f"built.model.push_to_hub('me/roles', token={TOKEN!r})")
    names = {path for path in hub.repositories["me/roles"].files if "adapter_" in path}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}


def test_pushed_adapter_loads_as_the_trained_policy_exactly(hub, client, reader):
    """The card's code loads base and adapter from the server in another process, without this
    package: bit for bit."""
    push_base(client, "me/base")
    client.run(f"os.environ['HF_TOKEN'] = {TOKEN!r}")
    folder = train(client, "whole", base="me/base", critic="adapter")
    client.run("built.push_to_hub(dataset='me/prompts')")
    client.run(f"policy = built.actor_critic.policy.eval()\n{SEEN}save_file(seen, 'trained')")

    files = hub.repositories["me/whole"].files
    assert files.keys() == PLAIN | {
        "critic/adapter_config.json",
        "critic/adapter_model.safetensors",
    }
    assert b"Completions" in files["report.html"]
    local = contents(folder)
    assert all(
        local[path] == digest
        for path, digest in held(hub, "whole").items()
        if path != ".gitattributes"
    )
    assert not hub.repositories["me/whole"].commits[-1].large - {
        path for path in files if "safetensors" in path
    }

    code = "".join(FIRST_BLOCKS.findall(files["README.md"].decode()))
    assert '"me/base"' in code and '"me/whole"' in code and str(client.home) not in code
    reader.run("import sys\nsys.modules['trl_ppo_ext'] = None  # importing it would fail")
    reader.run(
        f"{code}\nimport torch\nfrom safetensors.torch import save_file\npolicy = model\n{SEEN}"
    )
    reader.run("save_file(seen, 'loaded')\ndel sys.modules['trl_ppo_ext']")
    trained, loaded = (
        load_file(path)["logits"] for path in (client.home / "trained", reader.home / "loaded")
    )
    assert torch.equal(trained, loaded)
    client.run(
        f"policy = AutoModelForCausalLM.from_pretrained('base')\n{SEEN}save_file(seen, 'untrained')"
    )
    assert not torch.allclose(load_file(client.home / "untrained")["logits"], trained, atol=1e-3)


def test_push_after_a_failed_push_completes_it(hub, client):
    folder = train(client, "failed", seed=2, hub_strategy="end")
    client.run("built.save_model(_internal_call=True)")
    before = contents(folder)
    hub.uploads.clear()
    hub.expired.add(before["adapter_model.safetensors"])
    with pytest.raises(FailedError) as caught:
        client.run("built.push_to_hub()")
    assert caught.value.kind == "PushError" and "adapter_model.safetensors" in caught.value.message
    for said in ("`failed` was not pushed", "403", "Nothing is lost", "trainer.push_to_hub()"):
        assert said in caught.value.message
    assert TOKEN not in str(caught.value) and "sign=s" not in str(caught.value)
    after = contents(folder)
    assert all(after[path] == digest for path, digest in before.items() if path != "README.md")
    repository = hub.repositories["me/failed"]
    assert repository.messages == ["initial commit"] and repository.files.keys() == {
        ".gitattributes"
    }

    arrived = set(hub.objects)
    hub.uploads.clear()
    hub.expired.clear()
    client.run("built.push_to_hub()")
    assert hub.uploads and not arrived & set(hub.uploads)
    local = contents(folder)
    assert held(hub, "failed").keys() == PLAIN
    assert all(
        local[path] == digest
        for path, digest in held(hub, "failed").items()
        if path != ".gitattributes"
    )
    load(hub.repositories["me/failed"].files["adapter_model.safetensors"])


def test_wrong_token_is_rejected_before_training(hub, client):
    hub.echo = True
    wrong = "hf_wrongWrongWrongWrong"
    with pytest.raises(FailedError) as caught:
        train(client, "nobody", token=wrong)
    assert caught.value.kind == "PushError" and wrong not in str(caught.value)
    for said in ("401", "hf auth login", "hub_token"):
        assert said in caught.value.message
    assert (
        "me/nobody" not in hub.repositories
        and not (client.home / "nobody" / "run_log.jsonl").exists()
    )


def test_rejected_push_keeps_all_files_and_hides_the_token(hub, client):
    hub.echo = True
    folder = train(client, "refused", token=None, push_to_hub=False)
    for token, status in (("hf_wrongWrongWrongWrong", 401), (READER, 403)):
        with pytest.raises(FailedError) as caught:
            client.run(f"built.push_to_hub(token={token!r})")
        assert caught.value.kind == "PushError" and str(status) in caught.value.message
        assert (
            token not in str(caught.value)
            and f"`{folder.name}` was not pushed" in caught.value.message
        )
        assert contents(folder).keys() >= PLAIN - {".gitattributes"}
        assert token.encode() not in client.output.read_bytes()
    client.run(f"built.push_to_hub(token={TOKEN!r})")
    assert held(hub, "refused").keys() == PLAIN


def test_run_with_rejected_pushes_warns_and_trains_to_its_end(hub, client):
    """The repository exists, so the run begins; a read-only token fails at the first push."""
    client.run(
        f"from huggingface_hub import create_repo\ncreate_repo('me/closed', token={TOKEN!r})"
    )
    hub.echo = True
    printed = client.output.stat().st_size
    settings = {
        "save_strategy": "steps",
        "save_steps": 1,
        "hub_strategy": "checkpoint",
        "hub_always_push": True,
    }
    folder = train(client, "closed", token=READER, **settings)
    assert client.run("result = built.state.global_step") == 2
    assert (folder / "checkpoint-1").is_dir() and (
        folder / "checkpoint-2" / "manifest.json"
    ).is_file()
    assert not list(folder.glob(".pushing*"))
    said = client.output.read_bytes()[printed:].decode()
    assert (
        "The push of step 2 failed" in said
        and "403" in said
        and "write access" in said
        and READER not in said
    )
    assert hub.repositories["me/closed"].messages == ["initial commit"]


STEPS = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "hub_always_push": True}


def test_hub_strategy_end_pushes_only_on_request(hub, client):
    folder = train(client, "at-end", hub_strategy="end", **STEPS)
    (folder / "training_args.bin").write_bytes(b"pickled by another Trainer, with its token")
    (folder / "completions").mkdir()
    (folder / "completions" / "completions_00002.parquet").write_bytes(b"prompts")
    assert hub.repositories["me/at-end"].messages == ["initial commit"]
    client.run("built.push_to_hub('The end')")
    assert hub.repositories["me/at-end"].messages == ["initial commit", "The end"]
    assert hub.repositories["me/at-end"].files.keys() == PLAIN


def test_hub_strategy_every_save_pushes_each_checkpoints_weights(hub, client):
    """Even if the run has overwritten its files, and deleted the checkpoint, before the push
    begins."""
    card = client.home / "each" / "README.md"
    hub.hold = lambda: card.is_file() and "(step 4)" in card.read_text()
    folder = train(client, "each", hub_strategy="every_save", save_total_limit=1, **STEPS)
    first, second = hub.repositories["me/each"].commits[1:]
    assert [first.message, second.message] == [
        "Training in progress, step 2",
        "Training in progress, step 4",
    ]
    assert first.files.keys() == second.files.keys() == PLAIN
    assert (
        not any("checkpoint" in path for path in second.files)
        and not (folder / "checkpoint-2").exists()
    )
    step_4 = contents(folder / "checkpoint-4")
    name = "adapter_model.safetensors"
    assert sha256(second.files[name]) == step_4[name] != sha256(first.files[name])
    for commit, when in ((first, "at step 2 of 4"), (second, "at the end of training (step 4)")):
        load(commit.files[name])
        assert f"Metrics {when}:" in commit.files["README.md"].decode()


def test_hub_strategy_checkpoint_pushes_one_that_resumes_exactly(hub, client):
    folder = train(client, "last", hub_strategy="checkpoint", lr_scheduler_type="constant", **STEPS)
    assert (
        held(hub, "last", "last-checkpoint/").items() >= contents(folder / "checkpoint-4").items()
    )
    paths = [
        path for path in held(hub, "last") if path.startswith(("checkpoint", "last-checkpoint"))
    ]
    assert {path.split("/")[0] for path in paths} == {"last-checkpoint"}
    resumed = """
from huggingface_hub import snapshot_download
constant = {"lr_scheduler_type": "constant", "max_steps": 6}
whole = make("whole", **constant)
whole.train()
again = make("again", resume_with_changed_settings=True, **constant)
again.train(resume_from_checkpoint=os.path.join(snapshot_download("me/last"), "last-checkpoint"))
pairs = zip(whole.actor_critic.trained_weights().values(), again.actor_critic.trained_weights().values())
result = again.state.global_step == 6 and all(torch.equal(one, other) for one, other in pairs)
"""
    assert client.run(resumed)


def test_hub_strategy_all_checkpoints_pushes_each(hub, client):
    """Even one that `save_total_limit` has deleted before its push begins."""
    hub.hold = (client.home / "all" / "checkpoint-4").is_dir
    folder = train(client, "all", hub_strategy="all_checkpoints", save_total_limit=1, **STEPS)
    assert not (folder / "checkpoint-2").exists()
    assert held(hub, "all", "checkpoint-4/").items() >= contents(folder / "checkpoint-4").items()
    files = hub.repositories["me/all"].files
    listed = json.loads(files["checkpoint-2/manifest.json"])
    assert listed and all(
        sha256(files[f"checkpoint-2/{name}"]) == entry["sha256"] for name, entry in listed.items()
    )


def test_push_in_background_skips_other_processes(tmp_path):
    """They have no repository and no `push_in_progress`."""
    other = SimpleNamespace(args=config(tmp_path), is_world_process_zero=lambda: False)
    assert push_in_background(other, str(tmp_path)) is None and not list(tmp_path.iterdir())


def test_push_deletes_files_of_another_critic(hub, client):
    settings = {"push_to_hub": True, "hub_model_id": "me/shared", "hub_token": TOKEN}
    for critic in ("adapter", "head"):
        client.run(f"make('run-{critic}', critic={critic!r}, **{settings!r}).push_to_hub()")
    assert held(hub, "shared").keys() == PLAIN - {"report.html"}  # nothing was trained


def test_pushed_files_hold_no_token_and_no_pickle(hub, client):
    """In any commit of the tests above."""
    assert len(hub.repositories) > 5
    for repo, repository in hub.repositories.items():
        for commit in repository.commits:
            for path, data in commit.files.items():
                assert TOKEN.encode() not in data and READER.encode() not in data, (repo, path)
                assert (
                    not path.endswith((".bin", ".pkl"))
                    and ".saving" not in path
                    and ".pushing" not in path
                )
    for path in client.home.rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path


def test_trainer_does_not_load_plots_servers_or_judges(reader):
    loaded = """
import sys, trl_ppo_ext.checkpoints.hub, trl_ppo_ext.trainer
result = sorted({"bokeh", "openai", "trl_ppo_ext.rewards.http"} & sys.modules.keys())
"""
    assert reader.run(loaded) == []
    assert reader.run(
        "from trl_ppo_ext import Judge\nresult = 'trl_ppo_ext.rewards.http' in sys.modules"
    )


def test_dequantized_base_of_the_hub_records_its_commit(hub, client):
    push_base(client, "me/base-4bit")
    client.run(
        f"import sys\nsys.path.insert(0, {str(TESTS.parent / 'recipes')!r})\nimport dequantize"
    )
    client.run("dequantize.main(['me/base-4bit', 'plain', '--device', 'cpu'])")
    files = contents(client.home / "plain")
    record = json.loads((client.home / "plain" / "dequantized.json").read_text())
    assert record["base_model"] == "me/base-4bit"
    assert record["revision"] == hub.repositories["me/base-4bit"].commits[-1].oid
    copied = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert all(
        files[name] == digest for name, digest in held(hub, "base-4bit").items() if name in copied
    )
