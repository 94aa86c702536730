"""A critic that reads what the policy must not: it changes no expected gradient, and stays out of everything else."""

import itertools
import json

import pytest
import torch
from runs_of_tiny import COMPLETIONS, PROMPTS, rollouts_of, sequences, trainer
from tiny import WORDS, config, llama, prompts

from trl_ppo_ext.modeling.loading import load_actor_critic
from trl_ppo_ext.ppo import math as ppo_math
from trl_ppo_ext.ppo.guards import stand_ins
from trl_ppo_ext.sequences import Sequences

SECRETS = [[20, 21], [22, 23, 24], [25]]
PRIVILEGED = {"critic": "adapter", "critic_kwargs": {"prompt": "answer"}}


def privileged(critic_prompts=SECRETS):
    return Sequences.from_token_ids(PROMPTS, COMPLETIONS, 0, "cpu", critic_prompts)


def moved(tmp_path, model=None):
    built = load_actor_critic(model or llama(), config(tmp_path, critic="adapter"))
    torch.manual_seed(1)
    for parameter in built.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return built


def secret_prompts(rows=16):
    dataset = prompts(rows)
    return dataset.add_column(
        "answer", [f"{WORDS[25 + row % 3]} {text}" for row, text in enumerate(dataset["prompt"])]
    )


def test_critic_reads_its_prompt_and_the_policy_its_own(tmp_path):
    built = moved(tmp_path)
    with torch.no_grad():
        plain, other = built(sequences()), built(privileged())
        read = built(sequences(prompts=SECRETS))  # what the policy would write after the secrets
    assert torch.equal(other.logprobs, plain.logprobs)
    torch.testing.assert_close(other.values, read.values)
    assert not torch.allclose(other.values, plain.values, atol=1e-2)


def test_rows_keep_their_critic_prompts():
    part = privileged().rows(torch.tensor([2, 0]))
    assert part.critic_prompt_ids.tolist() == [[0, 0, 25], [0, 20, 21]]
    assert part.critic_prompt_lengths.tolist() == [1, 2]
    assert part.for_critic.packed.input_ids[-5:].tolist() == SECRETS[0] + COMPLETIONS[0]
    assert sequences().for_critic.input_ids is not None and sequences().critic_prompt_ids is None


def test_stand_in_of_an_excluded_row_has_none_of_its_critic_prompt():
    given = stand_ins(privileged(), torch.tensor([False, True, False]), torch.clone).for_critic
    read = [row[mask.bool()].tolist() for row, mask in zip(given.input_ids, given.attention_mask)]
    assert read == [SECRETS[0] + COMPLETIONS[0], PROMPTS[0][:2], SECRETS[2] + COMPLETIONS[2]]


# ---- certified by enumeration: a hidden bit decides which completions are right


def enumerated(built, hidden, length):
    """Every completion of some tokens under every hidden bit, with its probability and log-probs."""
    completions = [list(x) for x in itertools.product(range(built.config.vocab_size), repeat=length)]
    rows = len(completions)
    batch = Sequences.from_token_ids([[4]] * rows, completions, 0, "cpu", [[26 + hidden, 4]] * rows)
    scores = built(batch)
    rewards = torch.zeros(rows, length)
    rewards[:, -1] = torch.tensor([float(ids[-1] % 2 == hidden) * (1 + ids[0] % 3) for ids in completions])
    return scores, rewards, torch.ones(rows, length, dtype=torch.bool)


def test_privilege_leaves_the_expected_gradient(tmp_path):
    built = moved(tmp_path, llama(vocab_size=28).double()).double()
    gradients = []
    for sees in (False, True):
        built.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for hidden in (0, 1):
            scores, rewards, mask = enumerated(built, hidden, length=2)
            values = scores.values if sees else enumerated(built, 0, length=2)[0].values  # the same for both bits
            advantages, _ = ppo_math.gae(rewards.double(), values.detach().double(), mask, 1.0, 1.0)
            probability = scores.logprobs.sum(1).exp().detach() / 2
            loss = loss + (probability * (advantages * scores.logprobs).sum(1)).sum()
        loss.backward()
        gradients.append(torch.cat([x.grad.flatten() for x in built.policy_parameters().values()]))
    assert gradients[0].norm() > 1e-3
    assert (gradients[0] - gradients[1]).norm() < 1e-6 * gradients[0].norm()


def test_privilege_takes_out_the_variance_that_the_hidden_bit_explains(tmp_path):
    built = moved(tmp_path, llama(vocab_size=28).double()).double()
    rewards, probabilities, scores = [], [], []
    for hidden in (0, 1):
        given, reward, mask = enumerated(built, hidden, length=1)
        scores.append(given.logprobs)
        rewards.append(reward[:, 0].double())
        probabilities.append(given.logprobs[:, 0].exp().detach())
    knowing = [(p * r).sum() for p, r in zip(probabilities, rewards)]  # the value with the bit
    blind = sum(knowing) / 2
    variances, of_gradients = [], []
    for values in ((blind, blind), knowing):
        variance, of_gradient = 0.0, 0.0
        for p, r, v, logprobs in zip(probabilities, rewards, values, scores):
            advantages, _ = ppo_math.gae(r[:, None], v.expand(len(r), 1), mask, 1.0, 1.0)
            variance += (p * advantages[:, 0] ** 2).sum() / 2
            for row in range(len(r)):
                policy = list(built.policy_parameters().values())
                gradient = torch.autograd.grad(advantages[row, 0] * logprobs[row, 0], policy, retain_graph=True)
                of_gradient += p[row] / 2 * sum((x**2).sum() for x in gradient)
        variances.append(variance)
        of_gradients.append(of_gradient)
    explained = sum((v - blind) ** 2 for v in knowing) / 2
    assert explained > 0.05
    torch.testing.assert_close(variances[0] - variances[1], explained, rtol=1e-6, atol=0)
    assert of_gradients[1] < 0.95 * of_gradients[0]


# ---- in a run


def test_secret_reaches_the_critic_alone(tmp_path):
    seen = []

    def reward(prompts, completion_ids, **kwargs):
        assert not [name for name in kwargs if "prompt_ids" in name]
        seen.extend(prompts)
        return [float(len(ids)) for ids in completion_ids]

    run = trainer(tmp_path, reward_funcs=reward, dataset=secret_prompts(), log_completions=True, **PRIVILEGED)
    generated, sample = [], run.actor_critic.sample
    run.actor_critic.sample = lambda ids, *args, **kwargs: (
        generated.extend(ids.tolist()) or sample(ids, *args, **kwargs)
    )
    rollouts = rollouts_of(run)
    run.train()
    secrets = {4 + 25, 4 + 26, 4 + 27}  # ids of the words that only the column has
    assert seen and generated and not any(secrets & set(ids) for ids in generated)
    assert not any(WORDS[25 + k] in text.split() for text in seen for k in range(3))
    sampled = rollouts[0][0].sequences
    assert all(secrets & set(row) for row in sampled.critic_prompt_ids.tolist())
    rows = [json.loads(line) for line in (tmp_path / "run_log.jsonl").read_text().splitlines()]
    logged = [row["prompt"] for entry in rows for row in entry.get("rows", [])]
    assert logged and not any(word in text.split() for text in logged for word in WORDS[25:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"critic_kwargs": {"prompt": "answer"}}, "'prompt': 'answer'}` needs `critic='adapter'`, got 'side'"),
        (PRIVILEGED | {"critic_kwargs": {"prompt": "solution"}}, "needs the column 'solution' of `critic_kwargs"),
        (PRIVILEGED | {"max_completion_length": 60}, "The critic's prompt has .* room for 4"),
    ],
)
def test_unfit_critic_prompt_raises(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, dataset=secret_prompts(), **settings)
