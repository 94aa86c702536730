"""What others wrote is data: none of their code runs unasked, and weights that do not fit are
refused by name."""

import ast
import json
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import config, length_reward, llama, prompts, qwen2, tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import trl_ppo_ext
from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.checkpoints.atomic import seal
from trl_ppo_ext.checkpoints.files import CheckpointError
from trl_ppo_ext.modeling.loading import load_actor_critic
from trl_ppo_ext.rewards import RewardAdapter


@pytest.fixture(scope="module")
def reward_adapter(base, tmp_path_factory):
    path = tmp_path_factory.mktemp("reward")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    get_peft_model(
        model, LoraConfig(r=2, target_modules="all-linear", task_type="SEQ_CLS")
    ).save_pretrained(path)
    return path


def like_saved(path):
    return config(path, critic="adapter", save_strategy="steps", save_steps=2, max_steps=2)


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    """A run with a checkpoint, whose critic has an adapter of its own."""
    path = tmp_path_factory.mktemp("run")
    PPOTrainer(
        base,
        length_reward,
        config(path, critic="adapter", save_strategy="steps", save_steps=2, max_steps=2),
        prompts(),
    ).train()
    return path / "checkpoint-2"


def copied(source, target):
    shutil.copytree(source, target)
    return target


class Mark:
    """Unpickled, it leaves a file: whoever reads it has run code from a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


@pytest.fixture
def mark(tmp_path):
    marked = tmp_path / "code-was-run"
    yield Mark(marked)
    assert not marked.exists(), "code from a file was run"


# ---- remote code ----

OWN_CODE = """
from pathlib import Path
Path({path!r}).touch()
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel
from transformers import PreTrainedTokenizerFast
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnTrunk(LlamaModel):
    config_class = OwnConfig
AutoModel.register(OwnConfig, OwnTrunk, exist_ok=True)
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnClassifier(LlamaForSequenceClassification):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def with_own_code(path, marked, model=None, tokenizer_too=False):
    if model is not None:
        model.save_pretrained(path)
        autos = {
            "AutoModelForCausalLM": "own.OwnModel",
            "AutoModelForSequenceClassification": "own.OwnClassifier",
        }
        edit_json(
            path / "config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"} | autos
        )
    tokenizer().save_pretrained(path)
    if tokenizer_too:
        names = {
            "tokenizer_class": "OwnTokenizer",
            "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
        }
        edit_json(path / "tokenizer_config.json", **names)
    (path / "own.py").write_text(OWN_CODE.format(path=str(marked)))
    return str(path)


def as_policy(path, tmp_path, **settings):
    PPOTrainer(path, length_reward, config(tmp_path / "run", **settings), prompts())


def as_reward(path, tmp_path, **settings):
    args = config(tmp_path / "run", reward_quantization="none", **settings)
    PPOTrainer(llama(), path, args, prompts(), processing_class=tokenizer())


@pytest.mark.parametrize("tokenizer_too", [False, True], ids=["model", "tokenizer"])
@pytest.mark.parametrize("use", [as_policy, as_reward])
def test_code_of_a_model_or_tokenizer_runs_only_on_request(tmp_path, use, tokenizer_too):
    marked = tmp_path / "ran"
    if use is as_reward:
        model = llama(classifier=True, num_labels=1)
    else:
        model = llama()
    (tmp_path / "own").mkdir()
    path = with_own_code(tmp_path / "own", marked, model, tokenizer_too)
    if tokenizer_too:  # the model is a plain one
        model.save_pretrained(path)
    with pytest.raises(ValueError, match="trust_remote_code"):
        use(path, tmp_path)
    assert not marked.exists()
    use(path, tmp_path, trust_remote_code=True)
    assert marked.exists()


def test_tokenizer_of_a_reward_adapter_never_runs_its_own_code(
    base, reward_adapter, tmp_path, monkeypatch
):
    asked = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(1) or "y")
    path = copied(reward_adapter, tmp_path / "adapter")
    with_own_code(path, tmp_path / "ran", tokenizer_too=True)
    # which is about models and tokenizers given as strings
    args = config(tmp_path / "run", trust_remote_code=True)
    with pytest.raises(ValueError, match="trust_remote_code"):
        PPOTrainer(base, RewardAdapter(str(path)), args, prompts())
    assert not (tmp_path / "ran").exists() and not asked


@pytest.mark.parametrize("trust", [False, True])
def test_every_loading_is_told_whether_to_trust(base, tmp_path, monkeypatch, trust):
    """None would mean to ask whoever sits at the terminal."""
    told = []
    for loader in (
        AutoConfig,
        AutoTokenizer,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    ):
        plain = loader.from_pretrained

        def recorded(*args, _plain=plain, _name=loader.__name__, **kwargs):
            told.append((_name, kwargs.get("trust_remote_code")))
            return _plain(*args, **kwargs)

        monkeypatch.setattr(loader, "from_pretrained", recorded)
    llama(classifier=True, num_labels=1).save_pretrained(tmp_path / "reward")
    tokenizer().save_pretrained(tmp_path / "reward")
    args = config(
        tmp_path / "run",
        reward_quantization="none",
        **({"trust_remote_code": True} if trust else {}),
    )
    PPOTrainer(base, str(tmp_path / "reward"), args, prompts())
    ours = {name for name, _ in told}
    assert ours == {
        "AutoConfig",
        "AutoTokenizer",
        "AutoModelForCausalLM",
        "AutoModelForSequenceClassification",
    }
    assert {given for _, given in told} == {trust}


# ---- pickles ----


def sources():
    folder = Path(trl_ppo_ext.__file__).parent
    return {str(file): ast.parse(file.read_text()) for file in folder.rglob("*.py")}


def test_the_package_neither_unpickles_nor_evaluates():
    forbidden = {
        "pickle",
        "cPickle",
        "dill",
        "cloudpickle",
        "joblib",
        "marshal",
        "shelve",
        "subprocess",
    }
    calls = {
        "torch.load",
        "eval",
        "exec",
        "compile",
        "os.system",
        "os.popen",
        "yaml.load",
        "np.load",
    }
    for file, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not {name.name.split(".")[0] for name in node.names} & forbidden, file
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in forbidden, file
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in calls, f"{file}:{node.lineno}"


def only_pickled(path, mark):
    """The same files, but weights as pickles that run code."""
    for file in [*path.rglob("adapter_model.safetensors"), *path.rglob("value_head.safetensors")]:
        with open(file.with_suffix(".bin"), "wb") as stream:
            pickle.dump(mark, stream)
        torch.save({"weight": mark}, file.with_suffix(".pt"))
        file.unlink()
    return path


def test_a_pickled_reward_adapter_is_refused_and_not_read(base, reward_adapter, tmp_path, mark):
    path = only_pickled(copied(reward_adapter, tmp_path / "adapter"), mark)
    with pytest.raises(
        ValueError, match=r"has no adapter_model.safetensors; only safetensors are read"
    ):
        PPOTrainer(base, RewardAdapter(str(path)), config(tmp_path / "run"), prompts())


@pytest.mark.parametrize("critic", ["head", "adapter"])
def test_a_pickled_critic_is_refused_and_not_read(
    base, saved, reward_adapter, tmp_path, mark, critic
):
    for number, source in enumerate([saved, reward_adapter]):
        path = only_pickled(copied(source, tmp_path / f"critic{number}"), mark)
        with pytest.raises(ValueError, match=r"safetensors"):
            load_actor_critic(base, config(tmp_path / "run", critic=critic, critic_init=str(path)))


def test_a_pickled_checkpoint_is_refused_and_not_read(base, saved, tmp_path, mark):
    path = copied(saved, tmp_path / "checkpoint-2")
    only_pickled(path, mark)
    seal(path)
    args = like_saved(tmp_path / "run")
    with pytest.raises(CheckpointError, match="safetensors"):
        PPOTrainer(base, length_reward, args, prompts()).train(resume_from_checkpoint=str(path))


@pytest.mark.parametrize(
    "file", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"]
)
def test_code_in_the_trainers_own_files_is_not_run(base, saved, tmp_path, mark, file):
    path = copied(saved, tmp_path / "checkpoint-2")
    torch.save(mark, path / file)
    seal(path)
    args = like_saved(tmp_path / "run")
    resumed = PPOTrainer(base, length_reward, args, prompts())
    # or it is not read at all; `mark` looks for what was run
    with suppress(pickle.UnpicklingError, ValueError):
        resumed.train(resume_from_checkpoint=str(path))


def test_a_pickled_base_is_not_run(base, tmp_path, mark):
    path = copied(base, tmp_path / "base")
    (path / "model.safetensors").unlink()
    torch.save({"lm_head.weight": mark}, path / "pytorch_model.bin")
    with pytest.raises((pickle.UnpicklingError, OSError, ValueError)):
        PPOTrainer(str(path), length_reward, config(tmp_path / "run"), prompts())


# ---- weights of other names ----


def renamed(file, change):
    weights = load_file(file)
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    change(weights)
    save_file(weights, file, about)


@pytest.mark.parametrize(
    "file, change, message",
    [
        ("value_head.safetensors", lambda w: w.update(extra=torch.zeros(1)), "extra"),
        ("value_head.safetensors", lambda w: w.update(w=w.pop("weight")), "weight"),
        ("value_head.safetensors", lambda w: w.pop("bias"), "bias"),
        (
            "adapter_model.safetensors",
            lambda w: w.update({"base_model.model.lm_head.weight": torch.ones(1)}),
            "lm_head",
        ),
        ("adapter_model.safetensors", lambda w: w.pop(next(iter(w))), "lora_A"),
        ("critic/adapter_model.safetensors", lambda w: w.update(other=torch.ones(1)), "other"),
    ],
)
def test_weights_of_other_names_are_refused_by_name(base, saved, tmp_path, file, change, message):
    path = copied(saved, tmp_path / "checkpoint-2")
    renamed(path / file, change)
    seal(path)
    args = like_saved(tmp_path / "run")
    with pytest.raises(CheckpointError, match=message):
        PPOTrainer(base, length_reward, args, prompts()).train(resume_from_checkpoint=str(path))
    if "critic" in file or "head" in file:
        with pytest.raises(ValueError, match=message):
            load_actor_critic(
                base, config(tmp_path / "run", critic="adapter", critic_init=str(path))
            )


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("adapter_model.safetensors", b"\0" * 100, "cannot be read .SafetensorError"),
        ("adapter_config.json", b"{", "cannot be read .JSONDecodeError"),
        ("adapter_config.json", b"[]", "cannot be read .TypeError"),
        ("adapter_config.json", b'{"peft_type": "OTHER"}', "cannot be read .KeyError"),
    ],
    ids=["weights of zeros", "no JSON", "a list", "an unknown type"],
)
def test_a_damaged_reward_adapter_is_refused_by_name(
    base, reward_adapter, tmp_path, file, content, message
):
    path = copied(reward_adapter, tmp_path / "adapter")
    (path / file).write_bytes(content)
    with pytest.raises(ValueError, match=rf"`{path / file}` {message}.*copy or save it anew"):
        PPOTrainer(base, RewardAdapter(str(path)), config(tmp_path / "run"), prompts())
    with pytest.raises(ValueError, match=rf"`{path / file}` {message}.*copy or save it anew"):
        load_actor_critic(base, config(tmp_path / "run", critic="adapter", critic_init=str(path)))


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_reward_adapter_with_biases_raises(reward_adapter, tmp_path, bias):
    """The base keeps its own biases."""
    path = copied(reward_adapter, tmp_path / "adapter")
    edit_json(path / "adapter_config.json", bias=bias)
    model = qwen2()  # it has biases
    before = {name: x.clone() for name, x in model.named_parameters()}
    reward = RewardAdapter(str(path), check_base=False)
    with pytest.raises(
        ValueError, match=f"has `bias='{bias}'`: it would put its biases into the base"
    ):
        PPOTrainer(model, reward, config(tmp_path / "run"), prompts(), processing_class=tokenizer())
    after = {name.replace("base_layer.", ""): x for name, x in model.named_parameters()}
    assert all(torch.equal(x, after[name]) for name, x in before.items())


# ---- names ----

NAMES = ["../../outside", "/tmp/a.b\n[red]☃", "default", ""]


@pytest.mark.parametrize("name", NAMES)
def test_reward_adapter_of_any_name_writes_nothing_outside(
    base, reward_adapter, tmp_path, name, capsys
):
    """It scores, and writes only into `output_dir`."""
    run = tmp_path / "deep" / "down" / "run"
    args = config(run, max_steps=2, save_strategy="steps", save_steps=2, log_completions=True)
    built = PPOTrainer(base, RewardAdapter(str(reward_adapter), name=name), args, prompts())
    built.train()
    assert {path.name for path in tmp_path.iterdir()} == {"deep"}
    assert {path.name for path in (tmp_path / "deep" / "down").iterdir()} == {"run"}
    assert set(built.actor_critic.policy.peft_config) >= {"default"}
    card = (run / "checkpoint-2" / "README.md").read_text()
    assert len([line for line in card.splitlines() if line.startswith("Rewards:")]) == 1
