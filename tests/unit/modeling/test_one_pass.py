"""One forward for policy, reference, critic and reward adapters says what a forward for each says."""

import copy
from itertools import permutations

import bitsandbytes as bnb
import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from test_trainer import micro_batches_of, rollouts_of, trainer, weights
from tiny import config, length_reward, llama, prompts, tokenizer
from transformers import BitsAndBytesConfig, LlamaForSequenceClassification

from trl_ppo_ext import PPOTrainer, RewardAdapter
from trl_ppo_ext.modeling import actor_critic, load_actor_critic, one_pass
from trl_ppo_ext.modeling.one_pass import AdapterRows, RewardRows, mixed_hidden_states
from trl_ppo_ext.rewards import AdapterReward
from trl_ppo_ext.rewards.model import last_states
from trl_ppo_ext.sequences import Sequences

# four rows: products over other multiples of four rows have the same bits on more CPUs than over any number
PROMPTS = [[4, 5, 6], [7], [8, 9, 10, 11], [20, 21]]
COMPLETIONS = [[12, 13, 1], [14, 15, 16, 17, 1], [1], [18, 19]]
TEXTS = [[4, 5, 6, 12, 1], [2, 7, 14, 15, 16, 1], [9, 1], [22, 23, 1]]  # what rewards read


def sequences():
    return Sequences.from_token_ids(PROMPTS, COMPLETIONS, pad_token_id=0, device="cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A base and two reward adapters of different kinds on it."""
    path = tmp_path_factory.mktemp("files")
    llama(hidden_size=64).save_pretrained(path / "base")
    tokenizer().save_pretrained(path / "base")
    for seed, name, peft_config in (
        (5, "polite", LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")),
        (6, "brief", LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="SEQ_CLS")),
    ):
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification.from_pretrained(path / "base", num_labels=1)
        model = get_peft_model(model, peft_config)
        move(model)
        model.save_pretrained(path / name)
    return path


def move(model):
    """Take adapters and value head away from zero, as training does."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "value_head" in name:
            parameter.data.normal_(std=0.2)


def quantized():
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


@pytest.fixture
def build(files):
    """An actor-critic, and the two reward adapters on its base."""

    def make(nf4=False, peft_model=False, **kwargs):
        model = str(files / "base")
        if peft_model:
            model = get_peft_model(llama(hidden_size=64), LoraConfig(r=4, target_modules="all-linear"))
            model.config._name_or_path = str(files / "base")
            move(model)
        args = config(files / "run", **{"num_generations": 4} | kwargs)
        built = load_actor_critic(model, args, quantized() if nf4 else None).eval()
        assert any(isinstance(module, bnb.nn.Linear4bit) for module in built.modules()) == nf4
        rewards = [
            AdapterReward(RewardAdapter(str(files / name)), built, tokenizer(), 4) for name in ("polite", "brief")
        ]
        torch.manual_seed(1)
        trained = [p for n, p in built.named_parameters() if p.requires_grad and ("lora_B" in n or "value_head" in n)]
        for parameter in trained:
            parameter.data.normal_(std=0.2)
        return built, rewards

    return make


def run(files, output_dir, reward_funcs, monitor_funcs=None, nf4=False, **kwargs):
    return PPOTrainer(
        str(files / "base"),
        reward_funcs,
        config(output_dir, **kwargs),
        prompts(),
        eval_dataset=prompts(6),
        quantization_config=quantized() if nf4 else None,
        monitor_funcs=monitor_funcs,
    )


@pytest.fixture(scope="module")
def same_bits():
    """Some CPUs round a row of a product otherwise where other rows are multiplied along with it."""
    torch.manual_seed(0)
    for inputs, outputs in ((32, 64), (64, 16), (16, 64), (64, 128), (128, 64)):
        rows, weight = torch.randn(200, inputs), torch.randn(outputs, inputs)
        whole = torch.nn.functional.linear(rows, weight)
        for count in range(4, 100):
            if not torch.equal(torch.nn.functional.linear(rows[:count], weight), whole[:count]):
                pytest.skip("on this CPU the bits of a product's row depend on the number of rows")


def padded(rows, width=0):
    width = max([width, *map(len, rows)])
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])


def reward_rows(rewards, texts=TEXTS):
    return [RewardRows(reward.adapter_name, texts) for reward in rewards]


def trunk_forwards(actor_critic, function):
    """How many rows each forward of the trunk has while a function runs."""
    rows = []
    hook = actor_critic.trunk.register_forward_hook(
        lambda *call: rows.append(len(call[2]["input_ids"])), with_kwargs=True
    )
    function()
    hook.remove()
    return rows


# ---- bit for bit


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize("nf4", [False, True])
@torch.no_grad()
def test_rows_of_a_mixed_batch_are_those_of_a_forward_of_each_in_any_order(build, nf4):
    """Of the same width and bit for bit, wherever the rows of an adapter stand."""
    built, (polite, brief) = build(nf4, critic="adapter")
    own = (sequences().input_ids, sequences().attention_mask)
    texts = padded(TEXTS)
    names = [built.policy_adapter, None, built.critic_adapter, polite.adapter_name, brief.adapter_name]
    expected = {}
    for name in names:
        ids, mask = own if name in names[:3] else padded(TEXTS, own[0].shape[1])
        with built.adapter(name):
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            hidden = built.trunk(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
            expected[name] = hidden.last_hidden_state[mask.bool()]
    assert len({x.sum().item() for x in expected.values()}) == 5
    for order in permutations(names):
        parts = [AdapterRows(name, *(own if name in names[:3] else texts)) for name in order]
        for part, hidden in zip(parts, mixed_hidden_states(built, parts)):
            assert hidden.shape[:2] == part.input_ids.shape
            assert torch.equal(hidden[part.attention_mask.bool()], expected[part.adapter])


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("critic", ["head", "adapter", "none"])
@pytest.mark.parametrize("with_kl", [False, True])
@torch.no_grad()
def test_tokens_are_those_of_separate_passes_bit_for_bit(build, nf4, critic, with_kl):
    built, rewards = build(nf4, critic=critic)
    expected = built(sequences(), 0.7, with_entropy=True, with_kl=with_kl)
    got = one_pass.one_pass(built, sequences(), reward_rows(rewards), 0.7, with_kl)
    assert (expected.values is None) == (critic == "none") and (expected.kls is None) == (not with_kl)
    for name, wanted in expected._asdict().items():
        assert wanted is getattr(got.tokens, name) is None or torch.equal(getattr(got.tokens, name), wanted), name
    assert torch.equal(got.ref_logprobs, built.reference_logprobs(sequences(), 0.7))
    assert (got.ref_logprobs - got.tokens.logprobs).abs().max() > 0.1


@pytest.mark.usefixtures("same_bits")
@torch.no_grad()
def test_reference_of_a_peft_model_is_its_frozen_adapter(build):
    built, _ = build(peft_model=True)
    got = one_pass.one_pass(built, sequences())
    assert torch.equal(got.ref_logprobs, built.reference_logprobs(sequences()))
    with built.adapter(None):
        assert (built(sequences()).logprobs - got.ref_logprobs).abs().max() > 0.1


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("longer", [(0, 0), (1, 1), (1, 0)])
@torch.no_grad()
def test_reward_scores_are_those_of_separate_passes_bit_for_bit(build, nf4, longer):
    """Of rows as wide as they are in the pass: the policy's, or their own where they are wider."""
    built, rewards = build(nf4)
    width = sequences().input_ids.shape[1]
    texts = [[*TEXTS[:3], list(range(4, 4 + width + more))] for more in longer]
    rows = [RewardRows(reward.adapter_name, of_reward) for reward, of_reward in zip(rewards, texts)]
    got = one_pass.one_pass(built, sequences(), rows).reward_states
    for reward, states, of_reward in zip(rewards, got, texts):
        with built.adapter(reward.adapter_name):
            expected = reward.score_states(last_states(built.trunk, *padded(of_reward, width)))
        assert torch.equal(reward.score_states(states), expected)
        torch.testing.assert_close(expected, reward._score_ids(of_reward), rtol=1e-5, atol=1e-5)
    assert not torch.equal(*(reward.score_states(x) for reward, x in zip(rewards, got)))


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize("longer", [0, 1])
def test_texts_longer_than_the_policys_rows_take_a_second_forward_and_change_no_bit(build, longer):
    built, rewards = build(critic="adapter")
    width = sequences().input_ids.shape[1]
    rows = reward_rows(rewards, [*TEXTS[:3], [5] * (width + longer)])
    alone, outputs = one_pass.one_pass(built, sequences()), []
    forwards = trunk_forwards(built, lambda: outputs.append(one_pass.one_pass(built, sequences(), rows)))
    assert forwards == ([12, 8] if longer else [20])
    assert all(torch.equal(x, y) for x, y in zip(outputs[0].tokens[:3], alone.tokens[:3]))


# ---- what it costs


def test_one_forward_projects_policy_and_reference_rows_at_response_positions_alone(build, monkeypatch):
    built, rewards = build(critic="adapter")
    projected, token_logprobs = [], actor_critic.token_logprobs

    def counting(hidden, *args, **kwargs):
        projected.append(len(hidden))
        return token_logprobs(hidden, *args, **kwargs)

    def refuse(*args):
        raise AssertionError("the output projection was called on whole rows")

    monkeypatch.setattr(actor_critic, "token_logprobs", counting)
    built.policy.get_base_model().get_output_embeddings().register_forward_hook(refuse)
    forwards = trunk_forwards(built, lambda: one_pass.one_pass(built, sequences(), reward_rows(rewards)))
    assert forwards == [5 * 4]
    assert projected == [int(sequences().completion_mask.sum())] * 2


def test_a_pass_leaves_no_trace(build):
    built, rewards = build(critic="adapter")
    trainable = [name for name, parameter in built.named_parameters() if parameter.requires_grad]
    expected = built(sequences()).logprobs
    one_pass.one_pass(built, sequences(), reward_rows(rewards))
    with pytest.raises(IndexError):
        one_pass.one_pass(built, sequences(), [RewardRows(rewards[0].adapter_name, [[999]] * 4)])
    assert torch.equal(built(sequences()).logprobs, expected)
    assert [name for name, parameter in built.named_parameters() if parameter.requires_grad] == trainable


# ---- in a run


def metrics(built):
    timed = ("time/", "_runtime", "_per_second", "train_")
    return [{k: x for k, x in log.items() if not any(part in k for part in timed)} for log in built.state.log_history]


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize(
    "kwargs",
    [
        {"critic": "head"},
        {"critic": "adapter", "gradient_accumulation_steps": 2},
        {"critic": "none", "num_generations": 4},
        {"kl_estimator": "exact", "kl_placement": "both"},
        {"peft_model": True},
    ],
    ids=str,
)
def test_a_run_is_the_same_bit_for_bit(tmp_path, kwargs):
    """Weights, metrics and evaluation, where no reward is an adapter: rows are as wide as in a pass of their own."""
    kwargs, runs = dict(kwargs), []
    model = llama()
    if kwargs.pop("peft_model", False):
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        move(model)
    for fused in (False, True):
        built = trainer(
            tmp_path,
            copy.deepcopy(model),
            one_pass_scoring=fused,
            eval_dataset=prompts(6),
            eval_strategy="steps",
            eval_steps=4,
            **{"max_steps": 8} | kwargs,
        )
        built.train()
        runs.append((weights(built), metrics(built)))
    (separate, logged), (fused, logged_fused) = runs
    assert logged == logged_fused and any("eval_reward" in log for log in logged)
    assert all(torch.equal(separate[name], weight) for name, weight in fused.items())
    assert separate.keys() == fused.keys()


def test_a_run_with_reward_adapters_is_the_same_up_to_rounding(files, tmp_path):
    """As a reward and as a monitor. In the pass their texts are padded to the policy's rows, alone less."""
    runs = []
    for fused in (False, True):
        reward_funcs = [RewardAdapter(str(files / "polite")), length_reward]
        monitors = RewardAdapter(str(files / "brief"))
        built = run(files, tmp_path, reward_funcs, monitors, one_pass_scoring=fused, critic="adapter", max_steps=8)
        rollouts = rollouts_of(built)
        built.train()
        runs.append((rollouts, metrics(built)))
    (separate, logged), (fused, logged_fused) = runs
    assert len(separate) == len(fused) == 2
    for (_, samples), (_, samples_fused) in zip(separate, fused):
        assert samples.batch.completion_ids == samples_fused.batch.completion_ids
        for name in ("rewards", "tokens"):
            wanted, got = getattr(samples.scored, name), getattr(samples_fused.scored, name)
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        assert samples.monitored.std() > 0.01
        torch.testing.assert_close(samples_fused.monitored, samples.monitored, rtol=1e-4, atol=1e-4)
    for log, log_fused in zip(logged, logged_fused):
        assert log.keys() == log_fused.keys() and log_fused == pytest.approx(log, rel=1e-2, abs=1e-3)


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize("nf4, longer", [(False, 0), (False, 20), (True, 0)])
def test_first_ratios_are_exactly_one_however_long_rewards_read(files, tmp_path, nf4, longer):
    rewards = [RewardAdapter(str(files / name)) for name in ("polite", "brief")]
    settings = {"critic": "adapter", "max_steps": 8, "learning_rate": 1e-2}
    built = run(files, tmp_path, rewards, nf4=nf4, one_pass_scoring=True, **settings)
    for reward in built.experience.rewards:
        reward.encode = lambda batch, encode=reward.encode: [ids + [5] * longer for ids in encode(batch)]
    seen, differences = micro_batches_of(built), []
    compute_loss = built.compute_loss

    def comparing(model, inputs, **kwargs):
        with torch.no_grad():
            outputs, rollout = built.actor_critic(inputs.rollout.sequences), inputs.rollout
        differences.append(
            (outputs.logprobs - rollout.old_logprobs).abs().max() + (outputs.values - rollout.old_values).abs().max()
        )
        return compute_loss(model, inputs, **kwargs)

    built.compute_loss = comparing
    built.train()
    assert len(seen) == 8
    assert differences[0] == differences[4] == 0
    assert all(difference > 0 for difference in differences[1:4] + differences[5:])


@pytest.mark.parametrize("fused", [False, True])
def test_first_kl_from_the_adapter_of_a_peft_model_is_zero_in_bfloat16(tmp_path, fused):
    model = get_peft_model(llama(dtype=torch.bfloat16), LoraConfig(r=4, target_modules="all-linear"))
    move(model)
    built = trainer(tmp_path, model, bf16=True, one_pass_scoring=fused, max_steps=1)
    built.train()
    assert built.state.log_history[0]["kl"] == 0 and built.state.log_history[0]["ratio/max"] == 1


def test_every_micro_batch_is_one_forward_in_training_and_in_evaluation(files, tmp_path):
    rewards = [RewardAdapter(str(files / name)) for name in ("polite", "brief")]
    built = run(
        files,
        tmp_path,
        rewards[0],
        rewards[1],
        one_pass_scoring=True,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=6,
    )
    forwards, score = [], built.experience.score_in_one_pass

    def counting(sequences, batch):
        tokens = []
        forwards.append(trunk_forwards(built.actor_critic, lambda: tokens.append(score(sequences, batch))))
        return tokens[0]

    built.experience.score_in_one_pass = counting
    for reward in (*built.experience.rewards, *built.experience.monitors):
        reward.encode = lambda batch: [[5, 1]] * len(batch)  # no longer than any row of the policy
        reward.score = None  # it is not asked again
    built.train()
    built.evaluate()
    assert forwards == [[8, 8], [8, 8, 8]]  # policy, reference, reward and monitor on two rows each


def test_a_monitor_that_cannot_read_a_batch_stops_nothing(files, tmp_path):
    built = run(files, tmp_path, length_reward, RewardAdapter(str(files / "brief")), one_pass_scoring=True)
    (monitor,) = built.experience.monitors
    monitor._encode = lambda batch: 1 / 0
    rollouts = rollouts_of(built)
    built.train()
    assert all(samples.monitored.isnan().all() for _, samples in rollouts)


# ---- what is refused


@pytest.mark.parametrize(
    "peft_config",
    [
        LoraConfig(target_modules="all-linear", use_dora=True),
        LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]),
        IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ],
    ids=["dora", "modules_to_save", "ia3"],
)
def test_adapters_that_peft_cannot_mix_are_refused_before_anything_is_sampled(tmp_path, peft_config):
    with pytest.raises(ValueError, match="`one_pass_scoring=True` mixes default, no adapter in one batch, which PEFT"):
        trainer(tmp_path, peft_config=copy.deepcopy(peft_config), one_pass_scoring=True)


def test_a_low_precision_base_without_mixed_precision_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a base in torch.bfloat16 needs mixed precision"):
        trainer(tmp_path, llama(dtype=torch.bfloat16), one_pass_scoring=True)
