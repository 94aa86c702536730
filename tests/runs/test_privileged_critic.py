"""What the policy must not read: a critic that does changes no expected gradient, a reference
that does teaches."""

import itertools

import pytest
import torch
from runs_of_tiny import (
    COMPLETIONS,
    PROMPTS,
    plain_logprobs,
    rollouts_of,
    sequences,
    trainer,
    weights,
)
from tiny import config, llama, prompts
from transformers.utils import logging

from trl_ppo_ext import ppo_math
from trl_ppo_ext.modeling.loading import load_actor_critic
from trl_ppo_ext.ppo.guards import stand_ins
from trl_ppo_ext.sequences import ROLES, Sequences
from trl_ppo_ext.tracking.report import write_report

SECRETS = [[20, 21], [22, 23, 24], [25]]
PRIVILEGED = {"critic": "adapter", "critic_kwargs": {"prompt": "answer"}}
TEACHER = {"reference_prompt": "answer"}
EXACT = {"kl_estimator": "exact", "kl_placement": "both"}


def privileged(role="critic"):
    return Sequences.from_token_ids(PROMPTS, COMPLETIONS, 0, "cpu", {role: SECRETS})


def moved(tmp_path, model=None):
    built = load_actor_critic(model or llama(), config(tmp_path, critic="adapter"))
    torch.manual_seed(1)
    for parameter in built.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return built


SECRET = "w25 w26 w27 w25"  # too long to be sampled by chance


def secret_prompts(rows=16, secret=f"{SECRET} "):
    dataset = prompts(rows)
    return dataset.add_column("answer", [f"{secret}{text}" for text in dataset["prompt"]])


def test_critic_reads_its_prompt_and_the_policy_its_own(tmp_path):
    built = moved(tmp_path)
    with torch.no_grad():
        plain = built(sequences())
        other = built(privileged())
        read = built(sequences(prompts=SECRETS))  # what the policy would write after the secrets
    assert torch.equal(other.logprobs, plain.logprobs)
    torch.testing.assert_close(other.values, read.values)
    assert not torch.allclose(other.values, plain.values, atol=1e-2)


def test_reference_reads_its_prompt_and_the_policy_its_own(tmp_path):
    built = moved(tmp_path)
    given = privileged("reference")
    with torch.no_grad():
        plain = built(sequences(), with_kl=True)
        other = built(given, with_kl=True)
        ours = built.reference_logprobs(given)
        expected = built.reference_logprobs(sequences(prompts=SECRETS))
        assert torch.equal(other.logprobs, plain.logprobs) and torch.equal(
            other.values, plain.values
        )
        torch.testing.assert_close(ours, expected)
        for row, (prompt, secret, ids) in enumerate(zip(PROMPTS, SECRETS, COMPLETIONS)):

            def all_logprobs(read, ids=ids):
                logits = built(input_ids=torch.tensor([read + ids])).logits[0, len(read) - 1 : -1]
                return logits.log_softmax(-1)

            policy = all_logprobs(prompt)
            with built.reference():
                reference = all_logprobs(secret)
                torch.testing.assert_close(
                    ours[row, : len(ids)], plain_logprobs(built, secret, ids)
                )
            kls = (policy.exp() * (policy - reference)).sum(1)
            torch.testing.assert_close(other.kls[row, : len(ids)], kls)
    assert not torch.allclose(other.kls, plain.kls, atol=1e-2)


@pytest.mark.parametrize("role", ROLES)
def test_rows_keep_the_prompts_of_other_roles(role):
    part = privileged(role).rows(torch.tensor([2, 0]))
    assert getattr(part, f"{role}_prompt_ids").tolist() == [[0, 0, 25], [0, 20, 21]]
    assert getattr(part, f"{role}_prompt_lengths").tolist() == [1, 2]
    assert (
        getattr(part, f"for_{role}").packed.input_ids[-5:].tolist() == SECRETS[0] + COMPLETIONS[0]
    )
    [other] = set(ROLES) - {role}
    assert getattr(part, f"for_{other}") is part


@pytest.mark.parametrize("role", ROLES)
def test_stand_ins_of_excluded_rows_omit_other_roles_prompts(role):
    given = getattr(
        stand_ins(privileged(role), torch.tensor([False, True, False]), torch.clone), f"for_{role}"
    )
    read = [row[mask.bool()].tolist() for row, mask in zip(given.input_ids, given.attention_mask)]
    assert read == [SECRETS[0] + COMPLETIONS[0], PROMPTS[0][:2], SECRETS[2] + COMPLETIONS[2]]


# ---- certified by enumeration: a hidden bit decides which completions are right


def enumerated(built, hidden, length):
    """Every completion of some tokens under every hidden bit, with its probability and
    log-probs."""
    completions = [
        list(x) for x in itertools.product(range(built.config.vocab_size), repeat=length)
    ]
    rows = len(completions)
    batch = Sequences.from_token_ids(
        [[4]] * rows, completions, 0, "cpu", {"critic": [[26 + hidden, 4]] * rows}
    )
    scores = built(batch)
    rewards = torch.zeros(rows, length)
    rewards[:, -1] = torch.tensor(
        [float(ids[-1] % 2 == hidden) * (1 + ids[0] % 3) for ids in completions]
    )
    return scores, rewards, torch.ones(rows, length, dtype=torch.bool)


def test_privilege_leaves_the_expected_gradient(tmp_path):
    built = moved(tmp_path, llama(vocab_size=28).double()).double()
    gradients = []
    for sees in (False, True):
        built.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for hidden in (0, 1):
            scores, rewards, mask = enumerated(built, hidden, length=2)
            # the same for both bits
            if sees:
                values = scores.values
            else:
                values = enumerated(built, 0, length=2)[0].values
            advantages, _ = ppo_math.gae(rewards.double(), values.detach().double(), mask, 1.0, 1.0)
            probability = scores.logprobs.sum(1).exp().detach() / 2
            loss = loss + (probability * (advantages * scores.logprobs).sum(1)).sum()
        loss.backward()
        gradients.append(torch.cat([x.grad.flatten() for x in built.policy_parameters().values()]))
    assert gradients[0].norm() > 1e-3
    assert (gradients[0] - gradients[1]).norm() < 1e-6 * gradients[0].norm()


def test_privilege_removes_the_variance_of_the_hidden_bit(tmp_path):
    built = moved(tmp_path, llama(vocab_size=28).double()).double()
    rewards = []
    probabilities = []
    scores = []
    for hidden in (0, 1):
        given, reward, mask = enumerated(built, hidden, length=1)
        scores.append(given.logprobs)
        rewards.append(reward[:, 0].double())
        probabilities.append(given.logprobs[:, 0].exp().detach())
    knowing = [(p * r).sum() for p, r in zip(probabilities, rewards)]  # the value with the bit
    blind = sum(knowing) / 2
    variances = []
    of_gradients = []
    for values in ((blind, blind), knowing):
        variance = 0.0
        of_gradient = 0.0
        for p, r, v, logprobs in zip(probabilities, rewards, values, scores):
            advantages, _ = ppo_math.gae(r[:, None], v.expand(len(r), 1), mask, 1.0, 1.0)
            variance += (p * advantages[:, 0] ** 2).sum() / 2
            for row in range(len(r)):
                policy = list(built.policy_parameters().values())
                gradient = torch.autograd.grad(
                    advantages[row, 0] * logprobs[row, 0], policy, retain_graph=True
                )
                of_gradient += p[row] / 2 * sum((x**2).sum() for x in gradient)
        variances.append(variance)
        of_gradients.append(of_gradient)
    explained = sum((v - blind) ** 2 for v in knowing) / 2
    assert explained > 0.05
    torch.testing.assert_close(variances[0] - variances[1], explained, rtol=1e-6, atol=0)
    assert of_gradients[1] < 0.95 * of_gradients[0]


# ---- in a run


@pytest.mark.parametrize(
    "role, settings",
    [("critic", PRIVILEGED), ("reference", TEACHER), ("reference", TEACHER | EXACT)],
)
def test_secret_reaches_one_role_alone(tmp_path, capsys, role, settings):
    seen = []
    generated = []

    def reward(prompts, completion_ids, **kwargs):
        assert not [name for name in kwargs if "prompt_ids" in name]
        seen.extend(prompts)
        return [float(len(ids)) for ids in completion_ids]

    saving = {"save_strategy": "steps", "save_steps": 3, "log_completions": True}
    run = trainer(tmp_path, reward_funcs=reward, dataset=secret_prompts(), **saving, **settings)
    generator = run.components.player.generator
    generate = generator.generate
    generator.generate = lambda prompts: generated.extend(prompts) or generate(prompts)
    rollouts = rollouts_of(run)
    run.train()
    run.save_model()
    run.create_model_card()
    write_report(tmp_path, tmp_path / "report.html")
    secret = run.processing_class(SECRET)["input_ids"]

    # 1. That role reads it, in each rollout; nobody else does.
    for rollout, samples in rollouts:
        given = rollout.sequences
        assert all(set(secret) <= set(row) for row in getattr(given, f"{role}_prompt_ids").tolist())
        [other] = set(ROLES) - {role}
        assert getattr(given, f"{other}_prompt_ids") is None
        assert not set(secret) & set(given.prompt_ids.flatten().tolist())
        assert SECRET not in str(samples.batch.completions)
    table = capsys.readouterr().out
    assert seen and "completion" in table and SECRET not in f"{seen} {table}"
    assert generated and not any(set(secret) & set(ids) for ids in generated)

    # 2. No file has it, except for the rollout in progress of a checkpoint.
    ids = torch.tensor(secret).numpy().tobytes()
    found = [
        x.name
        for x in tmp_path.rglob("*")
        if x.is_file() and any(y in x.read_bytes() for y in (SECRET.encode(), ids))
    ]
    assert set(found) == {"run_state_0.safetensors"}
    assert {"README.md", "report.html", "run_log.jsonl", "adapter_model.safetensors"} <= {
        x.name for x in tmp_path.iterdir()
    }


@pytest.mark.parametrize(
    "settings", [{"kl_placement": "reward"}, EXACT], ids=["k1 in the reward", "exact"]
)
def test_reference_with_the_prompt_of_the_policy_changes_no_bit(tmp_path, settings):
    runs = []
    for given in ({}, TEACHER):
        run = trainer(tmp_path, dataset=secret_prompts(secret=""), **settings, **given)
        rollouts = rollouts_of(run)
        run.train()
        logs = [
            {k: x for k, x in log.items() if "time" not in k and "per_second" not in k}
            for log in run.state.log_history
        ]
        runs.append((weights(run), [rollout.tensors for rollout, _ in rollouts], logs))
    (plain, rollouts, logs), (taught, others, other_logs) = runs
    assert all(torch.equal(x, taught[name]) for name, x in plain.items())
    assert all(
        torch.equal(x, two[name]) for one, two in zip(rollouts, others) for name, x in one.items()
    )
    assert [x.keys() for x in logs] == [x.keys() for x in other_logs] and logs[:-1] == other_logs[
        :-1
    ]


KL_DEFAULTS = [
    ({}, ("k1", "reward")),
    ({"kl_placement": "loss"}, ("exact", "loss")),
    ({"kl_placement": "both"}, ("exact", "both")),
    ({"kl_estimator": "k3"}, ("k3", "reward")),
    (TEACHER, ("exact", "loss")),
    (TEACHER | {"kl_estimator": "k2"}, ("k2", "loss")),
    (TEACHER | {"kl_estimator": "k1"}, ("k1", "reward")),
    (TEACHER | {"kl_placement": "reward"}, ("k1", "reward")),
    (TEACHER | {"kl_placement": "both"}, ("exact", "both")),
]


@pytest.mark.parametrize(("settings", "expected"), KL_DEFAULTS, ids=str)
def test_kl_left_open_is_the_one_that_fits_the_rest(
    tmp_path, caplog, monkeypatch, settings, expected
):
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    args = config(tmp_path, **settings)
    assert (args.kl_estimator, args.kl_placement) == expected
    assert "hardly limits the policy" not in caplog.text


def test_distillation_follows_the_gradient_of_the_exact_kl(tmp_path):
    """With the defaults: the mean over tokens of Σ π·(log π − log π_ref), and nothing else."""
    settings = {"num_mini_batches": 1, "num_ppo_epochs": 1, "max_steps": 1, "kl_coef": 0.7}
    run = trainer(tmp_path, None, None, secret_prompts(), **settings, **TEACHER)
    torch.manual_seed(1)
    policy = list(run.actor_critic.policy_parameters().values())
    for x in policy:
        x.data += 0.2 * torch.randn_like(x)
    batches = []
    rollouts = rollouts_of(run)
    compute_loss = run.compute_loss

    def recording(model, inputs, **kwargs):
        loss = compute_loss(model, inputs, **kwargs)
        batches.append(torch.autograd.grad(loss, policy, retain_graph=True))
        return loss

    run.compute_loss = recording
    start = [x.detach().clone() for x in policy]
    run.train()
    [(rollout, samples)], [given] = rollouts, batches
    assert run.state.log_history[0]["kl"] > 0.01 and run.state.log_history[0]["objective"] == 0
    assert run.actor_critic.value_head is None and not rollout.advantages.any()

    for x, before in zip(policy, start):
        x.data.copy_(before)
    model = run.actor_critic.policy
    kls = []
    answers = {text: f"{SECRET} {text}" for text in prompts()["prompt"]}
    for episode in samples.batch.episodes:
        told = run.processing_class(answers[episode.prompt])["input_ids"]
        ours, theirs = (
            torch.tensor([[*ids, *episode.completion_ids]]) for ids in (episode.prompt_ids, told)
        )
        response = slice(-len(episode.completion_ids) - 1, -1)
        logprobs = model(input_ids=ours).logits[0, response].log_softmax(-1)
        with torch.no_grad(), model.disable_adapter():
            reference = model(input_ids=theirs).logits[0, response].log_softmax(-1)
        kls.append((logprobs.exp() * (logprobs - reference)).sum(-1))
    expected = torch.autograd.grad(0.7 * torch.cat(kls).mean(), policy)
    for one, two in zip(given, expected):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-6)
    assert max(x.abs().max() for x in expected) > 1e-3


@pytest.mark.parametrize(
    "settings", [{"kl_placement": "reward"}, {"missing_eos_penalty": 1.0}, {"critic": "head"}]
)
def test_distillation_has_a_critic_if_useful_or_requested(tmp_path, settings):
    """It is useful when there is something to predict."""
    run = trainer(tmp_path, None, None, secret_prompts(), **settings, **TEACHER)
    assert run.actor_critic.value_head is not None


@pytest.mark.parametrize(
    "settings", [{"kl_placement": "loss", "kl_estimator": "exact"}, {"kl_placement": "reward"}]
)
def test_reference_that_sees_more_teaches_without_a_reward(tmp_path, caplog, monkeypatch, settings):
    monkeypatch.setattr(logging.get_logger("trl_ppo_ext"), "propagate", True)
    sizes = {
        "per_device_train_batch_size": 32,
        "num_mini_batches": 1,
        "num_ppo_epochs": 1,
        "max_completion_length": 3,
    }
    settings |= sizes | {
        "critic": "none",
        "advantage_estimator": "reinforce",
        "learning_rate": 1e-2,
        "kl_coef": 1.0,
    }
    run = trainer(tmp_path, None, None, secret_prompts(), max_steps=8, **settings, **TEACHER)
    run.train()
    kls = [log["kl_per_completion"] for log in run.state.log_history if "kl_per_completion" in log]
    rewards = [log["reward"] for log in run.state.log_history if "reward" in log]
    assert kls[0] > 0.05 and sum(kls[-3:]) < 2.4 * kls[0], kls
    assert set(rewards) == {0.0} and "teaches nothing" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"critic_kwargs": {"prompt": "answer"}},
            "'prompt': 'answer'}` needs `critic='adapter'`, got 'side'",
        ),
        (
            PRIVILEGED | {"critic_kwargs": {"prompt": "solution"}},
            "needs the column 'solution' of `critic_kwargs",
        ),
        (PRIVILEGED | {"max_completion_length": 57}, "The critic's prompt has .* room for 7"),
        ({"reference_prompt": "solution"}, "needs the column 'solution' of `reference_prompt`"),
        (TEACHER | {"max_completion_length": 57}, "The reference's prompt has .* room for 7"),
        (TEACHER | {"kl_coef": 0}, "`reference_prompt='answer'` needs a `kl_coef` above 0"),
        (
            {"reference_prompt": "privileged_state"},
            "'privileged_state' needs an environment with that method",
        ),
    ],
)
def test_unfit_prompt_of_another_role_raises(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, dataset=secret_prompts(), **settings)


@pytest.mark.parametrize(
    "settings",
    [TEACHER, {"critic": "adapter", "critic_kwargs": {"prompt": "answer"}}],
    ids=["reference", "critic"],
)
def test_column_of_another_role_with_an_environment_raises(tmp_path, settings):
    """It would lack the observation that the policy reads first."""

    class Game:
        def reset(self, row, seed):
            return "w3"

        def step(self, text):
            return "w4", 1.0, True

    with pytest.raises(
        ValueError, match=r"The column 'answer' cannot be .*: it lacks what an environment"
    ):
        trainer(tmp_path, dataset=secret_prompts(), environment_factory=Game, **settings)
