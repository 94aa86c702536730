"""Critics of each kind: their inputs, gradients, checkpoints and starts; and training without
one."""

import itertools
import json
import re
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from runs_of_tiny import (
    COMPLETIONS,
    PROMPTS,
    plain_logprobs,
    sequences,
    trainable,
    trainer,
    weights,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import config, llama, prompts, qwen2, tokenizer
from transformers import (
    BitsAndBytesConfig,
    EarlyStoppingCallback,
    GenerationConfig,
    LlamaForSequenceClassification,
    TrainerCallback,
)
from transformers.utils import logging

from trl_ppo_ext.checkpoints.files import (
    CheckpointError,
    load_actor_critic_weights,
    save_actor_critic,
)
from trl_ppo_ext.modeling.adapters import read_adapter
from trl_ppo_ext.modeling.loading import load_actor_critic

HEAD, SIDE, ADAPTER = ({"critic": kind} for kind in ("head", "side", "adapter"))
NONE = {"critic": "none", "num_generations": 2}
SAMPLING = GenerationConfig(
    do_sample=True, top_k=0, max_new_tokens=3, eos_token_id=1, pad_token_id=0
)
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}


def move(model, seed=1):
    """Take adapters and heads away from where they start, as training does."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)


def actor_critic(tmp_path, settings=ADAPTER, model=None, moved=True, **kwargs):
    torch.manual_seed(0)
    built = load_actor_critic(model or llama(), config(tmp_path, **settings), **kwargs)
    if moved:
        move(built)
    return built


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    llama(hidden_size=64).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def save_reward_adapter(base, path, labels=1):
    """A reward adapter as people train them: PEFT on a sequence classifier of the same base."""
    torch.manual_seed(5)
    model = LlamaForSequenceClassification.from_pretrained(base, num_labels=labels)
    model = get_peft_model(
        model, LoraConfig(task_type="SEQ_CLS", lora_dropout=0.1, lora_alpha=6, **LORA)
    )
    move(model)
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def starts(base, tmp_path_factory):
    """What a critic may start from, or not: checkpoints of each kind, and reward adapters."""
    path = tmp_path_factory.mktemp("starts")
    for kind, settings in (("head", HEAD), ("side", SIDE), ("adapter", ADAPTER), ("none", NONE)):
        save_actor_critic(actor_critic(path, settings, base), str(path / kind))
    save_reward_adapter(base, path / "reward")
    save_reward_adapter(base, path / "reward2", labels=2)
    return path


def gradients(built, with_kl=False, of=("logprobs", "values", "entropies", "kls")):
    built.zero_grad()
    outputs = built(sequences(), with_entropy=True, with_kl=with_kl)
    sum(
        x.square().sum() for name, x in outputs._asdict().items() if name in of and x is not None
    ).backward()
    return {name: p.grad.clone() for name, p in built.named_parameters() if p.grad is not None}


def same(gradients, others):
    return gradients.keys() == others.keys() and all(
        torch.equal(x, others[name]) for name, x in gradients.items()
    )


# ---- what the critic sees, and what trains it


def passes(built, reward):
    """Whatever else the base is used for between two updates."""
    prompts = torch.tensor([[4, 5], [6, 7]])

    def generate():
        built.sample(prompts, torch.ones_like(prompts), SAMPLING)

    def score():
        with built.adapter(reward):
            built.trunk(input_ids=prompts)

    def compare():
        with torch.no_grad():
            built(sequences(), with_kl=True)

    return [generate, score, compare, lambda: built.reference_logprobs(sequences())]


def test_gradients_do_not_depend_on_other_uses_of_the_base(base, starts, tmp_path):
    built = actor_critic(tmp_path, model=base)
    files = read_adapter(str(starts / "reward"))
    reward = built.add_frozen_adapter("polite", files.config, files.weights)
    trained = trainable(built)
    expected = gradients(built)
    wanted = {id(p) for p in (built.policy_parameters() | built.critic_parameters()).values()}
    assert {id(p) for name, p in built.named_parameters() if name in expected} == wanted
    assert all(gradient.any() for gradient in expected.values())
    for order in itertools.permutations(passes(built, reward), 3):
        for run in order:
            run()
        assert trainable(built) == trained
        assert same(gradients(built), expected)


def test_side_critic_reads_policy_states_and_trains_only_itself(tmp_path):
    """Recomputed from a plain forward with every hidden state."""
    built = actor_critic(tmp_path, SIDE)
    head = built.value_head
    prompt = PROMPTS[0]
    completion = COMPLETIONS[0]
    hidden = built.policy(
        input_ids=torch.tensor([prompt + completion]), output_hidden_states=True
    ).hidden_states
    states = [hidden[layer][0, len(prompt) - 1 : -1] for layer in (0, 1, 2)]
    of_prompt = states[1][:1].expand_as(states[1])
    normalized = [
        x / (x.square().mean(1, keepdim=True) + torch.finfo().eps).sqrt()
        for x in [of_prompt, *states]
    ]
    size = states[0].shape[1]
    length = config(tmp_path).max_completion_length
    position = torch.zeros(len(completion), size)
    for t in range(len(completion)):
        for k in range(16):
            position[t, k] = (size / 16) ** 0.5 * torch.cos(torch.tensor(torch.pi * k * t / length))
    # no rewards so far
    inputs = torch.cat([*normalized, position, torch.zeros(len(completion), 1)], 1)
    inputs *= 256 / inputs.shape[1]
    gate, up = torch.nn.functional.linear(inputs, *head.first.parameters()).split(256, 1)
    terms = gate * gate.sigmoid() * up * head.weight
    values = built(sequences()).values[0, : len(completion)]
    # processors sum in other orders, and the terms are a hundred times as large as their sum
    rounding = 2 * torch.finfo().eps * terms.abs().sum(1).max().item()
    torch.testing.assert_close(values, terms.sum(1) + head.bias, rtol=0, atol=rounding)

    trained = gradients(built, of=("values",))
    assert {name for name, x in trained.items() if x.any()} == set(built.critic_parameters())


def test_error_in_the_critic_leaves_the_policy_active(tmp_path):
    built = actor_critic(tmp_path)
    trained = trainable(built)
    expected = gradients(built)
    with pytest.raises(RuntimeError), built.adapter(built.critic_adapter):
        raise RuntimeError
    assert trainable(built) == trained and same(gradients(built), expected)


def plain_values(model, head, prompt, completion):
    hidden = model(
        input_ids=torch.tensor([prompt + completion]), output_hidden_states=True
    ).hidden_states[-1]
    return torch.nn.functional.linear(
        hidden[0, len(prompt) - 1 : -1], head["weight"], head["bias"]
    )[:, 0]


def test_saved_policy_and_critic_load_with_plain_peft(tmp_path):
    built = actor_critic(tmp_path)
    save_actor_critic(built, str(tmp_path))
    with torch.no_grad():
        outputs = built(sequences())
        policy = PeftModel.from_pretrained(llama(), tmp_path)
        critic = PeftModel.from_pretrained(llama(), tmp_path / "critic")
        head = load_file(tmp_path / "value_head.safetensors")
        for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS)):
            of_row = (row, slice(len(completion)))
            torch.testing.assert_close(
                outputs.logprobs[of_row], plain_logprobs(policy, prompt, completion)
            )
            torch.testing.assert_close(
                outputs.values[of_row], plain_values(critic, head, prompt, completion)
            )
    assert outputs.values[outputs.logprobs != 0].unique().numel() > 6


@pytest.mark.parametrize(
    "settings, value_loss_trains_policy",
    [(ADAPTER, False), (HEAD | {"critic_backprop": False}, False), (HEAD, True)],
)
def test_each_loss_reaches_its_own_parameters(tmp_path, settings, value_loss_trains_policy):
    built = actor_critic(tmp_path, settings)
    names = {id(parameter): name for name, parameter in built.named_parameters()}
    policy = {names[id(parameter)] for parameter in built.policy_parameters().values()}
    critic = {names[id(parameter)] for parameter in built.critic_parameters().values()}
    assert policy and critic and not policy & critic and policy | critic == set(trainable(built))
    assert gradients(built, with_kl=True, of=("logprobs", "entropies", "kls")).keys() == policy
    assert gradients(built, of=("values",)).keys() == (
        critic | policy if value_loss_trains_policy else critic
    )


def test_activation_checkpointing_recomputes_with_its_adapter(tmp_path):
    built = actor_critic(tmp_path).train()
    expected = gradients(built, with_kl=True)
    trained = trainable(built)
    built.activation_checkpointing_enable()
    assert built.policy.get_base_model().is_activation_checkpointing
    assert same(gradients(built, with_kl=True), expected)
    assert trainable(built) == trained


def test_reentrant_checkpointing_with_a_critic_adapter_raises(tmp_path):
    kwargs = {"use_reentrant": True}
    built = actor_critic(tmp_path)
    for enable in (built.activation_checkpointing_enable, built.gradient_checkpointing_enable):
        with pytest.raises(
            ValueError,
            match=r"must be False .*recompute the critic's layers under the policy's adapter",
        ):
            enable(kwargs)
    built = trainer(
        tmp_path, **ADAPTER, gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs
    )
    with pytest.raises(
        ValueError, match="`use_reentrant` in `gradient_checkpointing_kwargs` must be False"
    ):
        built.train()


# ---- three adapters


@pytest.mark.parametrize("name", ["default", "critic", "reference"])
def test_given_adapter_has_its_own_reference_and_critic(tmp_path, name):
    lora = LoraConfig(lora_dropout=0.1, modules_to_save=["embed_tokens"], **LORA)
    model = get_peft_model(llama(), lora, adapter_name=name)
    move(model)
    model.eval()
    expected = plain_logprobs(model, PROMPTS[0], COMPLETIONS[0]).detach()
    built = actor_critic(tmp_path, model=model, moved=False).train()
    assert len(built.policy.peft_config) == 3
    with torch.no_grad():
        start = built(sequences(), with_kl=True)
        reference = built.reference_logprobs(sequences())
        assert torch.equal(start.logprobs, reference) and not start.kls.any()
        torch.testing.assert_close(reference[0, :3], expected)
        built.value_head.weight.normal_()
        values = built(sequences()).values
        for parameter in built.policy_parameters().values():
            parameter += 0.1 * torch.randn_like(parameter)
        assert not torch.allclose(built(sequences()).logprobs, reference, atol=1e-2)
        assert torch.equal(built.reference_logprobs(sequences()), reference)
        # the critic reads the base's own embedding
        assert torch.equal(built(sequences()).values, values)
    embeddings = [key for key in trainable(built) if "embed_tokens" in key]
    assert len(embeddings) == 1 and embeddings[0].endswith(f"{name}.weight")
    assert not any("embed" in key for key in built.critic_parameters())
    save_actor_critic(built, str(tmp_path))
    with torch.no_grad():
        alone = PeftModel.from_pretrained(llama(), tmp_path / "critic")
        head = built.value_head.state_dict()
        torch.testing.assert_close(
            values[0, :3], plain_values(alone, head, PROMPTS[0], COMPLETIONS[0])
        )
        alone = PeftModel.from_pretrained(llama(), tmp_path)
        moved = plain_logprobs(alone, PROMPTS[0], COMPLETIONS[0])
        torch.testing.assert_close(built(sequences()).logprobs[0, :3], moved)


def test_adapter_that_trains_biases_of_the_base_raises(tmp_path):
    lora = LoraConfig(bias="lora_only", **LORA)
    for model, peft_config in ((qwen2(), lora), (get_peft_model(qwen2(), lora), None)):
        with pytest.raises(
            ValueError,
            match=(
                "`bias` of the adapter must be 'none', got 'lora_only': biases of the base are "
                "shared"
            ),
        ):
            trainer(tmp_path, model, peft_config=peft_config)


@pytest.mark.parametrize("bf16", [False, True])
def test_rollout_on_a_4bit_base_keeps_the_gradients(base, tmp_path, monkeypatch, bf16):
    """Where the CPU has AVX512-BF16, bitsandbytes repacks a layer at a forward in eval mode, and
    loses gradients."""

    def build():
        nf4 = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
        return actor_critic(tmp_path, ADAPTER | {"bf16": bf16}, base, quantization_config=nf4)

    with monkeypatch.context() as never_repacked:
        never_repacked.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
        expected = gradients(build().train())
    assert all(gradient.any() for gradient in expected.values())
    built = build().eval()
    with torch.no_grad():
        built(sequences())
        for run in passes(built, built.critic_adapter):
            run()
    assert same(gradients(built.train()), expected)


# ---- learning: warm-up, learning rates


class Recorder(TrainerCallback):
    """Gradients, weights and learning rates of every optimizer step."""

    def __init__(self):
        self.gradients = []
        self.weights = []
        self.rates = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )

    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        self.weights.append(
            {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.rates.append(
            {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
        )


def names_of(built):
    names = {id(parameter): name for name, parameter in built.actor_critic.named_parameters()}
    policy = built.actor_critic.policy_parameters()
    critic = built.actor_critic.critic_parameters()
    return [names[id(p)] for p in policy.values()], [names[id(p)] for p in critic.values()]


@pytest.mark.parametrize("settings", [HEAD, HEAD | {"critic_backprop": False}, ADAPTER])
def test_warm_up_trains_only_the_critic(tmp_path, settings):
    recorder = Recorder()
    decay = 0.1
    epsilon = 1e-5
    rate = 1e-3
    built = trainer(
        tmp_path,
        reward_funcs=lambda completion_ids, **kwargs: [
            float(sum(ids) % 7) for ids in completion_ids
        ],
        callbacks=[recorder],
        value_warmup_steps=3,
        weight_decay=decay,
        learning_rate=rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_mini_batches=1,
        num_ppo_epochs=2,
        max_steps=4,
        **settings,
    )
    start, (policy, critic) = weights(built), names_of(built)
    built.train()
    for step in range(3):
        assert all(torch.equal(recorder.weights[step][name], start[name]) for name in policy)
        assert recorder.gradients[step].keys() == set(critic)
    assert not any(torch.equal(recorder.weights[2][name], start[name]) for name in critic)
    state = built.optimizer.state
    for name, parameter in built.actor_critic.named_parameters():
        if name in policy:
            gradient = recorder.gradients[3][name]
            step = rate * gradient / (gradient.abs() + epsilon)
            torch.testing.assert_close(
                recorder.weights[3][name], (1 - rate * decay) * start[name] - step
            )
            assert state[parameter]["step"] == 1
        elif name in critic:
            assert state[parameter]["step"] == 4
    assert any(not torch.equal(recorder.weights[3][name], start[name]) for name in policy)


def test_critic_learning_rate_applies_only_to_the_critic(tmp_path):
    for settings in (HEAD, ADAPTER):
        built = trainer(
            tmp_path, critic_learning_rate=1e-2, learning_rate=1e-3, weight_decay=0.1, **settings
        )
        groups, (policy, critic) = built.create_optimizer().param_groups, names_of(built)
        names = {id(parameter): name for name, parameter in built.actor_critic.named_parameters()}
        rates = [(names[id(p)], group["lr"]) for group in groups for p in group["params"]]
        assert sorted(rates) == sorted(
            [(name, 1e-3) for name in policy] + [(name, 1e-2) for name in critic]
        )
        undecayed = [
            names[id(p)] for group in groups for p in group["params"] if not group["weight_decay"]
        ]
        assert undecayed == ["value_head.bias"]
    built = trainer(tmp_path, critic_learning_rate=1e-2, **ADAPTER)
    built.optimizer = made = torch.optim.SGD(built.actor_critic.parameters(), lr=0.5)
    assert built.create_optimizer() is made
    assert len(made.param_groups) == 1 and made.param_groups[0]["lr"] == 0.5


# ---- saving and going on


FILES = {
    "side": {"value_head.safetensors"},
    "adapter": {
        "value_head.safetensors",
        "critic/adapter_model.safetensors",
        "critic/adapter_config.json",
    },
    "none": set(),
}


@pytest.mark.parametrize(
    "settings", [x | {"critic_learning_rate": 1e-2} for x in (ADAPTER, SIDE)] + [NONE]
)
def test_run_with_a_critic_resumes_bit_for_bit(tmp_path, settings):
    settings = settings | {
        "num_ppo_epochs": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
    }
    whole = Recorder()
    again = Recorder()
    first = trainer(tmp_path / "whole", callbacks=[whole], **settings)
    first.train()
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    files = {str(file.relative_to(checkpoint)) for file in checkpoint.glob("**/*")}
    assert {file for file in files if "critic/" in file or "value_head" in file} == FILES[
        settings["critic"]
    ]
    assert {"adapter_model.safetensors", "adapter_config.json"} <= files

    second = trainer(tmp_path / "again", callbacks=[again], **settings)
    second.train(resume_from_checkpoint=str(checkpoint))
    assert len(again.weights) == 2
    for step in (0, 1):
        assert same(again.weights[step], whole.weights[2 + step])
        assert again.rates[step] == whole.rates[2 + step]
    rates, (policy, critic) = whole.rates[1], names_of(first)
    assert {rates[name] for name in policy} == {0.5 * 1e-3}  # half of the linear schedule is over
    assert {rates[name] for name in critic} == ({0.5 * 1e-2} if critic else set())


def shrink(path, key, rows):
    """Cut a tensor of a file."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    name = next(name for name in tensors if key in name)
    save_file(tensors | {name: tensors[name][:, :rows].contiguous()}, path, about)


def edit_config(path, **fields):
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def nothing(path):
    pass


def without_adapter(path):
    (path / "critic/adapter_model.safetensors").unlink()


def narrow_head(path):
    shrink(path / "value_head.safetensors", "weight", 8)


UNFIT = [
    ("adapter", ADAPTER, without_adapter, "critic/adapter_model"),
    (
        "adapter",
        ADAPTER,
        lambda x: shrink(x / "critic/adapter_model.safetensors", "lora_A", 8),
        r"is \(16, 8\)",
    ),
    (
        "adapter",
        ADAPTER,
        lambda x: (x / "value_head.safetensors").unlink(),
        "'none' .*got 'adapter'",
    ),
    ("adapter", ADAPTER, narrow_head, r"value_head.* is \(1, 8\)"),
    ("adapter", ADAPTER, lambda x: shutil.rmtree(x / "critic"), "critic/adapter_model"),
    ("adapter", HEAD, nothing, "'adapter' .*got 'head'; set `critic='adapter'`"),
    ("side", HEAD, nothing, "'side' .*got 'head'"),
    ("head", SIDE, nothing, "'head' .*got 'side'"),
    ("head", NONE, nothing, "'head' .*got 'none'"),
    ("none", HEAD, nothing, "'none' .*got 'head'; set `critic='none'`"),
]


@pytest.mark.parametrize("kind, settings, damage, message", UNFIT)
def test_checkpoint_with_another_critic_raises(
    base, starts, tmp_path, kind, settings, damage, message
):
    shutil.copytree(starts / kind, tmp_path / "saved")
    damage(tmp_path / "saved")
    built = actor_critic(tmp_path, settings, base, moved=False)
    with pytest.raises((CheckpointError, FileNotFoundError), match=message):
        load_actor_critic_weights(built, str(tmp_path / "saved"))


def test_saved_critic_replaces_one_of_another_kind(base, starts, tmp_path):
    shutil.copytree(starts / "adapter", tmp_path / "saved")
    for settings in (HEAD, NONE, SIDE, ADAPTER, SIDE):
        built, again = (
            actor_critic(tmp_path, settings, base, moved=moved) for moved in (True, False)
        )
        save_actor_critic(built, str(tmp_path / "saved"))
        load_actor_critic_weights(again, str(tmp_path / "saved"))
        assert same(dict(built.named_parameters()), dict(again.named_parameters()))


# ---- what a critic starts from


def test_critic_init_reads_rewards_so_far_in_saved_units(tmp_path):
    """Also if it predicts in the unit of the rewards."""

    def per_token(completion_ids, **kwargs):
        return [[float(x) for x in ids] for ids in completion_ids]

    llama().save_pretrained(tmp_path / "base")
    settings = {
        "model": str(tmp_path / "base"),
        "critic": "side",
        "normalize_values": False,
        "max_steps": 4,
    }
    first = trainer(tmp_path / "first", reward_funcs=per_token, **settings)
    first.train()
    first.save_model()
    again = trainer(
        tmp_path / "second", reward_funcs=per_token, **settings, critic_init=str(tmp_path / "first")
    )
    assert (
        again.run_state.critic.rewards == pytest.approx(first.run_state.critic.rewards)
        and again.run_state.critic.rewards.weight > 0
    )
    assert (
        not again.actor_critic.value_head.is_normalized
        and again.run_state.critic.returns.weight == 0
    )


def test_critic_init_restores_the_critic_of_a_checkpoint(base, starts, tmp_path):
    for settings in (HEAD, SIDE, ADAPTER):
        source = actor_critic(tmp_path, settings, base)
        kind = settings["critic"]
        built = actor_critic(
            tmp_path, settings | {"critic_init": str(starts / kind)}, base, moved=False
        )
        expected = source.critic_parameters()
        assert same(built.critic_parameters(), expected)
        assert all(parameter.requires_grad for parameter in built.critic_parameters().values())
        # the policy is new
        assert torch.equal(built(sequences()).logprobs, built.reference_logprobs(sequences()))


@pytest.mark.parametrize("name, label", [("reward", 0), ("reward2", 1)])
def test_first_values_equal_the_reward_adapters_scores(base, starts, tmp_path, name, label):
    settings = ADAPTER | {"critic_init": str(starts / name), "reward_label": label}
    built = actor_critic(tmp_path, settings, base, moved=False)
    classifier = LlamaForSequenceClassification.from_pretrained(base, num_labels=1 + label)
    classifier = PeftModel.from_pretrained(classifier, str(starts / name)).eval()
    with torch.no_grad():
        values = built(sequences()).values
        for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS)):
            for position in range(len(completion)):
                prefix = torch.tensor([prompt + completion[:position]])
                torch.testing.assert_close(
                    values[row, position], classifier(input_ids=prefix).logits[0, label]
                )
    assert values[values != 0].std() > 0.01
    ranks = {name: lora.r for name, lora in built.policy.peft_config.items()}
    assert ranks == {"default": 16, "critic": 4}
    wanted = {id(p) for p in (built.policy_parameters() | built.critic_parameters()).values()}
    move(built)
    assert {id(p) for n, p in built.named_parameters() if n in gradients(built)} == wanted


def test_label_of_rewards_is_none_of_a_start_with_one(base, starts, tmp_path):
    given = {"critic_init": str(starts / "reward")}
    built = actor_critic(tmp_path, ADAPTER | given, base, moved=False)
    for label in (1, "good"):  # of a reward model with two
        labeled = actor_critic(
            tmp_path, ADAPTER | given | {"reward_label": label}, base, moved=False
        )
        assert same(labeled.critic_parameters(), built.critic_parameters())


def other_base(path):
    edit_config(path, base_model_name_or_path="somebody/else")


def empty(path):
    shutil.rmtree(path)
    path.mkdir()


NO_START = [
    ("adapter", HEAD, nothing, "'adapter', and `critic` is 'head'; set"),
    ("side", HEAD, nothing, "'side', and `critic` is 'head'"),
    ("head", HEAD | {"normalize_values": False}, nothing, "`normalize_values` must be True"),
    ("reward", ADAPTER | {"normalize_values": True}, nothing, "`normalize_values` must be False"),
    ("reward", HEAD, nothing, "is a reward adapter"),
    ("reward2", ADAPTER, nothing, "number from 0 to 1, .* got None: .* 2 labels"),
    ("reward2", ADAPTER | {"reward_label": 2}, nothing, "from 0 to 1, .* got 2: "),
    (
        "reward2",
        ADAPTER | {"reward_label": [1, "good"]},
        nothing,
        "of all rewards too, got .1, 'good'.:",
    ),
    ("head", HEAD, other_base, "'somebody/else'"),
    ("adapter", ADAPTER, lambda x: other_base(x / "critic"), "'somebody/else'"),
    ("reward", ADAPTER, other_base, "'somebody/else'"),
    ("none", ADAPTER, nothing, "neither a value_head.safetensors nor an adapter"),
    ("none", HEAD, empty, "neither a value_head.safetensors nor an adapter"),
    ("none", HEAD, shutil.rmtree, "saved` must be a directory"),
    ("adapter", ADAPTER, without_adapter, "has no adapter_model"),
    ("head", HEAD, narrow_head, r"does not fit.*\(1, 8\)"),
    (
        "reward",
        ADAPTER,
        lambda x: shrink(x / "adapter_model.safetensors", "lora_A", 8),
        r"does not fit.*\(4, 8\)",
    ),
]


@pytest.mark.parametrize("kind, settings, damage, message", NO_START)
def test_unfit_critic_init_raises(base, starts, tmp_path, kind, settings, damage, message):
    shutil.copytree(starts / kind, tmp_path / "saved")
    damage(tmp_path / "saved")
    with pytest.raises(ValueError, match=message):
        actor_critic(tmp_path, settings | {"critic_init": str(tmp_path / "saved")}, base)


# ---- no critic


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce", "rebn"])
def test_run_without_a_critic_has_no_values(tmp_path, estimator):
    """`test_choices.py` compares its gradients."""
    built = trainer(
        tmp_path, critic="none", advantage_estimator=estimator, num_generations=4, max_steps=2
    )
    start = weights(built)
    assert built.actor_critic.value_head is None and not built.actor_critic.critic_parameters()
    built.train()
    assert any(not torch.equal(weight, start[name]) for name, weight in weights(built).items())
    logged = set().union(*built.state.log_history)
    assert {"loss/policy", "kl"} <= logged
    assert not any(name.startswith("value/") or name == "loss/value" for name in logged)


NEED_A_CRITIC = {
    "gamma": 0.9,
    "critic_kwargs": {"warmup_steps": 3, "lam": 0.9},
    "critic_learning_rate": 1e-3,
    "critic_init": "somewhere",
}
GDPO = NONE | {
    "multi_objective_aggregation": "normalize_then_sum",
    "num_generations": 2,
    "kl_coef": 0.0,
}
REFUSED = [
    (
        GDPO | {"advantage_estimator": "rloo"},
        "_sum'` needs `advantage_estimator='grpo'`, got 'rloo'",
    ),
    *(
        (GDPO | shaping, "_sum'` needs rewards as they are: .*`kl_placement='loss'`")
        for shaping in ({"kl_coef": 0.1}, {"normalize_rewards": True}, {"missing_eos_penalty": 1.0})
    ),
    ({"critic": "both"}, "`critic` must be one of .*'both'"),
    (NONE | {"advantage_estimator": "gae"}, "`critic='none'`; use .*'grpo'"),
    (HEAD | {"advantage_estimator": "grpo", "num_generations": 2}, "`critic='head'`; use 'gae'"),
    (ADAPTER | {"advantage_estimator": "reinforce"}, "`critic='adapter'`"),
    *(
        (NONE | {"advantage_estimator": x, "num_generations": 1}, "`num_generations`")
        for x in ("grpo", "dr_grpo", "rloo")
    ),
    *(
        (NONE | {name: value}, f"`{name}={re.escape(repr(value))}` needs a critic")
        for name, value in NEED_A_CRITIC.items()
    ),
    *(
        (
            NONE | {"advantage_level": level, "advantage_estimator": x},
            f"`advantage_level='{level}'` needs a critic.*'{x}'",
        )
        for level, x in (("turn", "reinforce"), ("both", "reinforce"), ("both", "rebn"))
    ),
    ({"advantage_level": "turns"}, "`advantage_level` must be one of .*'both'"),
    (
        ADAPTER | {"critic_kwargs": {"backprop": False}},
        r"`critic_kwargs\['backprop'\]` must be True",
    ),
    ({"critic_learning_rate": 0.0}, "`critic_learning_rate` must be above 0"),
    ({"critic_kwargs": {"warmup_steps": -1}}, r"`critic_kwargs\['warmup_steps'\]`.*-1"),
    ({"critic_kwargs": {"warmup_steps": 1.5}}, r"`critic_kwargs\['warmup_steps'\]`.*1.5"),
    ({"critic_kwargs": {"warm_up": 1}}, "`critic_kwargs`.*'warm_up'.*backprop"),
]


def test_warm_up_of_a_whole_run_is_told(tmp_path, caplog, monkeypatch):
    """It may be meant, by who tries a preset for a few steps."""
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    config(tmp_path, critic_kwargs={"warmup_steps": 3}, max_steps=4)
    assert "for the policy" not in caplog.text
    config(tmp_path, critic_kwargs={"warmup_steps": 4}, max_steps=4)
    assert "warmup_steps']=4` leaves no step for the policy" in caplog.text


def test_critic_warns_that_rewards_normalized_apart_are_summed(tmp_path, caplog, monkeypatch):
    """A script of `GRPOTrainer` runs with its settings."""
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    config(tmp_path, multi_objective_aggregation="normalize_then_sum", num_generations=2)
    assert "with a critic they are summed as they are, by `reward_weights`" in caplog.text


def test_kl_in_the_loss_goes_with_rewards_normalized_apart(tmp_path):
    assert config(
        tmp_path, **GDPO | {"kl_coef": 0.1, "kl_placement": "loss", "kl_estimator": "k3"}
    ).uses_reference


@pytest.mark.parametrize("settings, message", REFUSED)
def test_settings_that_contradict_the_critic_raise(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings)


@pytest.mark.parametrize("source", ["checkpoint", "pretrained"])
@pytest.mark.parametrize("kind", ["side", "head", "adapter"])
def test_critic_of_another_gamma_is_no_start(tmp_path, source, kind):
    """Its values are of returns that discount otherwise."""
    settings = {"critic": kind, "max_steps": 1}
    saved = trainer(tmp_path / "saved", gamma=0.9, **settings)
    saved.save_model()
    if source == "pretrained":
        (tmp_path / "saved" / "ppo_state.json").unlink()
        (tmp_path / "saved" / "critic.json").write_text('{"gamma": 0.9}')
    given = settings | {"critic_init": str(tmp_path / "saved")}
    with pytest.raises(
        ValueError,
        match=r"`critic_init=.*` predicts returns of `gamma=0.9`, and .* 1.0; set `gamma",
    ):
        trainer(tmp_path / "other", **given)


def test_record_of_a_critic_that_cannot_be_read_is_named(tmp_path):
    trainer(tmp_path / "saved", critic="side").save_model()
    (tmp_path / "saved" / "ppo_state.json").write_text("{")
    with pytest.raises(ValueError, match=r"ppo_state.json` cannot be read"):
        trainer(tmp_path / "other", critic="side", critic_init=str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"eval_steps": 1}, True),
        ({"eval_steps": 1, "lr_scheduler_type": "reduce_lr_on_plateau"}, True),
        ({"eval_steps": 1, "eval_delay": 2}, False),
        ({"eval_steps": 3}, False),
    ],
)
def test_early_stopping_by_a_policy_that_waits_for_the_critic_draws_a_warning(
    tmp_path, caplog, monkeypatch, settings, warns
):
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    logging.get_logger("trl_ppo_ext").warning_once.cache_clear()
    follows = "lr_scheduler_type" in settings
    run = trainer(
        tmp_path,
        eval_dataset=prompts(4),
        eval_strategy="steps",
        metric_for_best_model="eval_reward",
        critic_kwargs={"warmup_steps": 2},
        max_steps=4,
        callbacks=[] if follows else [EarlyStoppingCallback(9)],
        **settings,
    )
    run.train()
    assert ("a policy that has not moved yet" in caplog.text) == warns
