"""Sampling by steps over static memory: the draw, its independence of batches, and `generate`."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from families import FAMILIES, build
from packaging.version import Version
from peft import LoraConfig
from tiny import config, llama, with_mapped_logits
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FalconConfig,
    FalconForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
)

from trl_ppo_ext.episodes import static_sampler, static_step
from trl_ppo_ext.episodes.generator import cut_at_stop
from trl_ppo_ext.episodes.static_sampler import StaticSampler
from trl_ppo_ext.episodes.static_step import draw_tokens, score_filters
from trl_ppo_ext.episodes.transformers_generator import cache_argument, why_not_stepped
from trl_ppo_ext.modeling.actor_critic import four_bit_layers
from trl_ppo_ext.modeling.loading import load_actor_critic

STOPS = [1, 7, 9]
NEW = 20
ROWS = 12
GREEDY = {"do_sample": False}
PLAIN = {"do_sample": True, "top_k": 0}
FILTERED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
LATE = PLAIN | {"min_new_tokens": 5}


def model_of(family="Llama 3"):
    """A tiny model whose next tokens depend on all earlier ones."""
    return redrawn(build(family))


def redrawn(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(std=0.3)
    return model


def prompts_of(rows=ROWS, longest=9):
    generator = torch.Generator().manual_seed(2)
    lengths = [longest - row % 6 for row in range(rows)]
    return [torch.randint(10, 32, (n,), generator=generator).tolist() for n in lengths]


def noise_of(rows=ROWS, columns=NEW):
    generator = torch.Generator().manual_seed(3)
    return torch.rand(rows, columns, dtype=torch.float64, generator=generator)


def sampler_of(model, settings=PLAIN, block=16, read_every=4):
    generation_config = GenerationConfig(**settings)
    sampler = StaticSampler(
        model,
        cache_argument(model),
        score_filters(generation_config),
        STOPS,
        pad_token_id=0,
        min_new_tokens=generation_config.min_new_tokens or 0,
    )
    sampler.memory.block = block
    sampler.read_every = read_every
    return sampler


def tokens_of(sampler, *args, **kwargs):
    """Completions that a sampler draws."""
    return sampler.sample(*args, **kwargs).token_ids


def leave_at_once(sampler):
    """Let rows leave as soon as they have ended."""
    sampler._fewer_rows = lambda rows, live: live
    return sampler


def shapes_read(sampler):
    """Rows and columns of each forward to come."""
    shapes = []
    forward = sampler.step.forward

    def noted(ids, *args):
        shapes.append(tuple(ids.shape))
        return forward(ids, *args)

    sampler.step.forward = noted
    return shapes


def static_tensors(sampler):
    tensors = [*sampler.memory.rows.tensors().values(), *sampler.memory.keys_and_values()]
    step = sampler.step
    return [*tensors, step.at, step.first_stop, step.temperature, step.is_stop]


# ---- the draw ----


def test_shares_of_drawn_tokens_are_the_probabilities():
    draws = 200_000
    scores = torch.tensor([[0.0, 1.0, -2.0, float("-inf"), 2.0]]).expand(draws, 5)
    counts = draw_tokens(scores, noise_of(draws, 1))[:, 0].bincount(minlength=5).double()
    expected = draws * scores[0].double().softmax(-1)
    possible = expected > 0
    chi_square = ((counts - expected).square() / expected)[possible].sum()
    assert counts[3] == 0
    assert chi_square < 16.3  # 99.9 % of samples, 3 degrees of freedom


def test_both_ends_of_the_noise_draw_tokens_with_probability():
    scores = torch.full((2, 1000), float("-inf"))
    scores[:, 500:503] = torch.tensor([1.0, 0.0, -1.0])
    noise = torch.tensor([[0.0], [1 - 2.0**-53]], dtype=torch.float64)
    assert draw_tokens(scores, noise)[:, 0].tolist() == [500, 502]


def test_sums_of_shares_do_not_depend_on_their_order():
    """A parallel sum adds in another order; integers below 2^63 do not round."""
    scores = torch.randn(4, 50_000)
    noise = noise_of(4, 1)
    expected = draw_tokens(scores, noise)
    shares = scores.softmax(-1).double().mul(static_step.FIXED_POINT).long()
    blocks = shares.view(4, 100, 500)
    before = blocks.sum(-1).cumsum(-1) - blocks.sum(-1)
    ends = (blocks.cumsum(-1) + before[..., None]).view(4, -1)
    assert torch.equal(ends, shares.cumsum(-1)) and ends.max() < 2**51
    places = (noise * ends[:, -1:]).long()
    assert torch.equal(torch.searchsorted(ends, places, right=True), expected)


def test_scores_that_are_not_finite_draw_a_token_of_the_vocabulary():
    scores = torch.full((3, 8), float("nan"))
    assert draw_tokens(scores, noise_of(3, 1)).max() < 8


# ---- tokens of `generate` ----


def generated(model, prompts, noise, settings):
    """Completions of `generate`, whose `multinomial` reads the same noise."""
    model.generation_config = GenerationConfig()
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(x)) + x for x in prompts])
    mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in prompts])
    options = GenerationConfig(
        max_new_tokens=noise.shape[1], pad_token_id=0, eos_token_id=STOPS, **settings
    )
    columns = iter(noise.T[..., None].contiguous())

    def multinomial(probabilities, num_samples):
        ends = probabilities.double().cumsum(-1)
        return torch.searchsorted(ends / ends[:, -1:], next(columns), right=True)

    with mock.patch("torch.multinomial", multinomial), torch.no_grad():
        output = model.generate(ids, attention_mask=mask, generation_config=options)
    return [cut_at_stop(x, frozenset(STOPS)) for x in output[:, width:].tolist()]


def stepped(model, prompts, noise, settings):
    temperature = settings.get("temperature", 1.0) if settings["do_sample"] else 0.0
    sampler = leave_at_once(sampler_of(model, settings))
    return tokens_of(sampler, prompts, [noise.shape[1]] * len(prompts), temperature, noise=noise)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_has_the_tokens_of_generate_or_a_reason(tmp_path, family):
    model = model_of(family)
    actor_critic = load_actor_critic(model, config(tmp_path))
    reason = why_not_stepped(actor_critic, GenerationConfig(use_cache=True))
    assert (reason is None) == (
        family
        not in (
            "Qwen3.5",
            "Qwen3.5 MoE",
            "LFM2",
            "LFM2 MoE",
            "Granite 4",
            "Falcon-H1",
        )
    )
    if reason is not None:
        assert "keep another state than keys and values" in reason
        return
    base = actor_critic.policy.get_base_model().eval()
    for settings in (GREEDY, PLAIN, FILTERED):
        expected = generated(base, prompts_of(), noise_of(), settings)
        assert settings is not PLAIN or len({len(ids) for ids in expected}) > 2
        assert stepped(base, prompts_of(), noise_of(), settings) == expected


def gpt2(**kwargs):
    sizes = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return redrawn(GPT2LMHeadModel(GPT2Config(**sizes | kwargs)).eval())


@pytest.mark.parametrize("settings", [GREEDY, PLAIN, FILTERED, LATE], ids=str)
@pytest.mark.parametrize(
    "build_model",
    [gpt2, lambda: redrawn(with_mapped_logits("gemma2")), lambda: redrawn(llama())],
    ids=["gpt2", "gemma2", "llama"],
)
def test_other_models_have_the_tokens_of_generate(build_model, settings):
    model = build_model()
    expected = generated(model, prompts_of(), noise_of(), settings)
    assert stepped(model, prompts_of(), noise_of(), settings) == expected


def test_no_completion_stops_before_its_smallest_length():
    model = model_of()
    plain = stepped(model, prompts_of(), noise_of(), PLAIN)
    late = stepped(model, prompts_of(), noise_of(), LATE)
    assert min(map(len, plain)) <= 5 < min(map(len, late))


# ---- independence of the batch ----


def test_completions_do_not_depend_on_other_rows():
    model = model_of()
    prompts = prompts_of()
    noise = noise_of()
    together = tokens_of(sampler_of(model), prompts, [NEW] * ROWS, noise=noise)
    alone = []
    for row in range(ROWS):
        part = slice(row, row + 1)
        alone += tokens_of(sampler_of(model), prompts[part], [NEW], noise=noise[part])
    halves = []
    for part in (slice(0, 7), slice(7, ROWS)):
        rooms = [NEW] * len(prompts[part])
        halves += tokens_of(sampler_of(model), prompts[part], rooms, noise=noise[part])
    assert together == alone == halves


@pytest.mark.parametrize("block, read_every", [(8, 1), (64, 16), (256, 3)])
def test_completions_do_not_depend_on_blocks_and_reads(block, read_every):
    model = model_of("Gemma 3")
    expected = tokens_of(sampler_of(model), prompts_of(), [NEW] * ROWS, noise=noise_of())
    sampler = sampler_of(model, block=block, read_every=read_every)
    assert tokens_of(sampler, prompts_of(), [NEW] * ROWS, noise=noise_of()) == expected


def test_each_completion_keeps_to_its_room():
    model = model_of()
    rooms = [1 + row % NEW for row in range(ROWS)]
    longest = tokens_of(sampler_of(model), prompts_of(), [NEW] * ROWS, noise=noise_of())
    noise = noise_of()[:, : max(rooms)]
    short = tokens_of(sampler_of(model), prompts_of(), rooms, noise=noise)
    assert short == [ids[:room] for ids, room in zip(longest, rooms)]


def test_positions_of_rows_that_ended_stay_within_the_context():
    """A row at the end of the context waits for others, whose prompts are shorter."""
    model = gpt2(n_positions=24)
    prompts = [[10] * 23, [11] * 4]
    sampler = sampler_of(model)
    sampler.step.is_stop.zero_()
    completions = tokens_of(sampler, prompts, [1, 20])
    assert list(map(len, completions)) == [1, 20]


def rows_leave(model, leaves):
    """Check that rows leave, and that completions and log-probs stay."""
    prompts = prompts_of(40)
    waiting = sampler_of(model)
    waiting._fewer_rows = lambda rows, live: rows
    expected = tokens_of(waiting, prompts, [NEW] * 40, noise=noise_of(40))
    sampler = sampler_of(model, read_every=1)
    if leaves == "at once":
        leave_at_once(sampler)
    elif leaves == "by halves":
        by_halves = StaticSampler._fewer_rows
        captures = SimpleNamespace(step=SimpleNamespace(captures=True))
        sampler._fewer_rows = lambda rows, live: by_halves(captures, rows, live)
    numbers = []
    run = sampler.step.run
    sampler.step.run = lambda rows: (numbers.append(rows), run(rows))
    assert tokens_of(sampler, prompts, [NEW] * 40, noise=noise_of(40)) == expected
    assert len(set(numbers)) > 2 and numbers == sorted(numbers, reverse=True)
    if leaves == "by halves":
        assert set(numbers) <= {40, 20, 10, 5, 3, 2, 1}
    for got, wanted in zip(sampler.last.logprobs, waiting.last.logprobs):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("leaves", ["at once", "on a CPU", "by halves"])
def test_rows_that_leave_change_no_completion_and_no_logprob(leaves):
    rows_leave(model_of("Mistral"), leaves)


def test_a_sampler_that_is_used_again_and_grows_samples_as_a_new_one():
    model = model_of("Qwen3")
    sampler = sampler_of(model)
    for rows, longest in ((5, 9), (ROWS, 9), (ROWS, 30), (3, 4)):
        prompts = prompts_of(rows, longest) if longest > 6 else [[10], [11], [12]]
        noise = noise_of(rows)
        expected = tokens_of(sampler_of(model), prompts, [NEW] * rows, noise=noise)
        assert tokens_of(sampler, prompts, [NEW] * rows, noise=noise) == expected


def test_numbers_that_are_not_finite_do_not_outlive_a_call():
    model = model_of()
    sampler = sampler_of(model)
    expected = tokens_of(sampler, prompts_of(), [NEW] * ROWS, noise=noise_of())
    for x in sampler.memory.keys_and_values():
        x.fill_(float("nan"))
    assert tokens_of(sampler, prompts_of(), [NEW] * ROWS, noise=noise_of()) == expected
    sampler.release()
    assert not sampler.memory.keys_and_values()
    assert tokens_of(sampler, prompts_of(), [NEW] * ROWS, noise=noise_of()) == expected


def test_a_seed_of_the_cpu_gives_the_same_completions():
    model = model_of()
    sampler = sampler_of(model)
    torch.manual_seed(3)
    first = [tokens_of(sampler, prompts_of(), [NEW] * ROWS) for _ in range(2)]
    torch.manual_seed(3)
    sampler = sampler_of(model)
    again = [tokens_of(sampler, prompts_of(), [NEW] * ROWS) for _ in range(2)]
    assert first == again and first[0] != first[1]


def test_equal_prompts_are_read_once_and_sample_apart():
    model = model_of()
    prompts = [prompts_of()[row] for row in (0, 3, 0, 3, 3, 1)]
    noise = noise_of(6)
    expected = []
    for row, prompt in enumerate(prompts):
        expected += tokens_of(sampler_of(model), [prompt], [NEW], noise=noise[row : row + 1])
    sampler = sampler_of(model)
    shapes = shapes_read(sampler)
    assert tokens_of(sampler, prompts, [NEW] * 6, noise=noise) == expected
    assert shapes[0] == (3, 8) and shapes[1] == (6, 1)


def test_prompts_in_slices_sample_as_all_at_once(monkeypatch):
    model = model_of("Gemma 3")
    expected = tokens_of(sampler_of(model), prompts_of(), [NEW] * ROWS, noise=noise_of())
    monkeypatch.setattr(static_sampler, "PROMPT_TOKENS", 40)
    sampler = sampler_of(model)
    shapes = shapes_read(sampler)
    assert tokens_of(sampler, prompts_of(), [NEW] * ROWS, noise=noise_of()) == expected
    assert shapes[:3] == [(5, 8), (5, 8), (2, 8)]


def test_graphs_attend_to_few_numbers_of_columns():
    sampler = sampler_of(model_of(), block=256)
    sampler.reserve(1, 8192)
    for captures, most in ((True, 10), (False, 32)):
        sampler.step.captures = captures
        attended = [sampler._attended(columns) for columns in range(1, 8193)]
        assert all(columns <= x <= 8192 for columns, x in enumerate(attended, 1))
        assert len(set(attended)) == most
        assert attended[:1024] == [256 * -(-columns // 256) for columns in range(1, 1025)]


def test_graphs_attend_to_no_columns_that_are_not_there():
    sampler = sampler_of(model_of(), block=256)
    sampler.reserve(1, 1100)
    sampler.step.captures = True
    assert sampler._attended(1100) == sampler.memory.rows.ids.shape[1] == 1280


def test_autocast_casts_weights_anew_while_sampling_only():
    sampler = sampler_of(model_of())
    enabled = []
    run = sampler.step.run

    def noted(rows):
        enabled.append(torch.is_autocast_cache_enabled())
        run(rows)

    sampler.step.run = noted
    sampler.sample(prompts_of(), [2] * ROWS)
    assert enabled == [False] * 2 and torch.is_autocast_cache_enabled()


def test_logprobs_are_those_of_a_forward_at_the_temperature_before_filters():
    model = model_of()
    sampler = leave_at_once(sampler_of(model, FILTERED))
    completions = tokens_of(sampler, prompts_of(), [NEW] * ROWS, 0.8, noise=noise_of())
    for prompt, completion, got in zip(prompts_of(), completions, sampler.last.logprobs):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / 0.8).log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-4, atol=1e-5)


# ---- turns ----


def turns_continue(model, temperature):
    """Check turns of rows in any order against new samplers, which read all tokens."""
    sampler = leave_at_once(sampler_of(model, block=8))
    shapes = shapes_read(sampler)
    prompts = prompts_of()
    last = None
    rows = []
    for answered in (list(range(0, ROWS, 2))[::-1], [3, 1, 0], [1]):
        noise = noise_of(len(prompts), 7)
        rooms = [2 + row % 6 for row in range(len(prompts))]
        shapes.clear()
        noise = noise[:, : max(rooms)]
        sampled = sampler.sample(prompts, rooms, temperature, last, rows, noise)
        completions = sampled.token_ids
        assert completions == tokens_of(sampler_of(model), prompts, rooms, temperature, noise=noise)
        if last is not None:  # earlier turns are not read again
            assert max(width for _, width in shapes) <= 5
        last = sampled
        prompts = [prompts[row] + completions[row] + [15] * (row % 4) for row in answered]
        rows = answered


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_turns_continue_keys_and_values_of_rows_in_any_order(temperature):
    turns_continue(model_of(), temperature)


# ---- rules of a CUDA graph ----


READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "masked_select"}
READS |= {"unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
FROM_HOST = "lift_fresh"


class Reads(TorchDispatchMode):
    """Notes operations that wait for a device, or copy a new tensor to it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name in READS or name == FROM_HOST:
            self.names.append(name)
        return function(*args, **kwargs or {})


def python_numbers(sampler):
    memory = sampler.memory
    owners = [sampler, sampler.step, memory, memory.window, *memory.cache.layers]
    return [
        {name: x for name, x in vars(owner).items() if isinstance(x, int | float | list | tuple)}
        for owner in owners
    ]


makes_no_tensors = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="earlier versions of transformers make tensors on the host in steps of more models",
)


@makes_no_tensors
@pytest.mark.parametrize("settings", [GREEDY, FILTERED | {"min_new_tokens": 3}], ids=str)
@pytest.mark.parametrize("family", ["Llama 3", "Gemma 3", "Mistral", "gpt-oss", "Qwen3 MoE"])
def test_a_step_reads_nothing_and_changes_static_memory_only(family, settings):
    sampler = sampler_of(model_of(family), settings)
    temperature = 0.8 if settings["do_sample"] else 0.0
    tokens_of(sampler, prompts_of(), [3] * ROWS, temperature)
    addresses = [x.data_ptr() for x in static_tensors(sampler)]
    numbers = python_numbers(sampler)
    with Reads() as reads, torch.no_grad():
        sampler.step.run(ROWS)
    # top-p assigns a number to a slice, which is a tensor of the host on a CPU only
    expected = [FROM_HOST] if "top_p" in settings else []
    assert reads.names == expected
    assert [x.data_ptr() for x in static_tensors(sampler)] == addresses
    assert python_numbers(sampler) == numbers


class SimulatedGraphs:
    """Captures and replays of steps on a CPU: a capture leaves memory as it was."""

    def __init__(self, sampler, monkeypatch, error=None):
        self.sampler = sampler
        self.error = error
        self.steps = []
        self.replays = []
        self.pools = []
        run = sampler.step.run
        self.run = run

        def noted(rows):
            self.steps.append((rows, sampler.memory.window.end))
            run(rows)

        sampler.step.run = noted
        sampler.step.captures = True
        sampler.step.stream = mock.MagicMock()
        for name in ("current_stream", "stream"):
            monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self.Graph(self))
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    class Graph:
        def __init__(self, owner):
            self.owner = owner

        def pool(self):
            return "pool"

        def replay(self):
            sampler = self.owner.sampler
            self.owner.replays.append(self.shape)
            with mock.patch.object(sampler.memory.window, "end", self.shape[1]):
                self.owner.run(self.shape[0])

    @contextmanager
    def capture(self, graph, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.pools.append(pool)
        tensors = static_tensors(self.sampler)
        before = [x.clone() for x in tensors]
        yield
        for x, old in zip(tensors, before):
            x.copy_(old)
        graph.shape = self.steps.pop()
        if self.error is not None:
            raise RuntimeError(self.error)


def test_first_step_of_a_shape_is_captured_and_later_ones_are_replayed(monkeypatch):
    model = model_of("Gemma 3")
    expected = tokens_of(sampler_of(model), prompts_of(), [NEW] * ROWS, noise=noise_of())
    sampler = sampler_of(model, block=8)
    graphs = SimulatedGraphs(sampler, monkeypatch)
    assert tokens_of(sampler, prompts_of(), [NEW] * ROWS, noise=noise_of()) == expected
    shapes = len(graphs.steps)
    assert len(set(graphs.steps)) == shapes == len(sampler.step.graphs) > 2
    assert graphs.pools == [None] + ["pool"] * (shapes - 1)
    assert tokens_of(sampler, prompts_of(), [NEW] * ROWS, noise=noise_of()) == expected
    assert len(graphs.steps) == shapes
    # kinds of the draw have graphs of their own, and more memory has new addresses
    assert tokens_of(sampler, prompts_of(), [NEW] * ROWS, 0.0) == stepped(
        model, prompts_of(), noise_of(), GREEDY
    )
    assert len(graphs.steps) > shapes
    tokens_of(sampler, prompts_of(ROWS + 1), [1] * (ROWS + 1))
    assert len(sampler.step.graphs) == 1 and graphs.pools[-1] is None


def test_graphs_are_dropped_when_there_are_too_many(monkeypatch):
    model = model_of()
    sampler = sampler_of(model)
    expected = [stepped(model, prompts_of(n), noise_of()[:n], PLAIN) for n in (1, 2, 3)]
    SimulatedGraphs(sampler, monkeypatch)
    monkeypatch.setattr(static_step, "MOST_GRAPHS", 2)
    sampler.reserve(ROWS, 64)
    found = []
    for rows in (1, 2, 3):
        found.append(tokens_of(sampler, prompts_of(rows), [NEW] * rows, noise=noise_of()[:rows]))
        assert len(sampler.step.graphs) <= 2
    assert found == expected


def test_a_step_that_cannot_be_captured_runs_without_a_graph(monkeypatch, caplog):
    model = model_of()
    expected = tokens_of(sampler_of(model), prompts_of(), [NEW] * ROWS, noise=noise_of())
    sampler = sampler_of(model)
    monkeypatch.setattr(static_step.logging.get_logger("trl_ppo_ext"), "propagate", True)
    SimulatedGraphs(sampler, monkeypatch, error="operation not permitted")
    assert tokens_of(sampler, prompts_of(), [NEW] * ROWS, noise=noise_of()) == expected
    assert not sampler.step.captures and not sampler.step.graphs
    assert "cannot be captured: operation not permitted" in caplog.text


# ---- LoRA ----


@pytest.mark.parametrize("case", ["float32", "autocast", "NF4"])
def test_lora_at_kept_addresses_samples_as_peft_after_the_weights_moved(tmp_path, case):
    llama(hidden_size=64).save_pretrained(tmp_path)
    quantization = None
    if case == "NF4":
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantization)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    actor_critic = load_actor_critic(base, config(tmp_path), peft_config=lora)
    actor_critic.eval()
    sampler = sampler_of(actor_critic.policy.get_base_model())
    prompts = prompts_of()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast")
    tolerance = 0.1 if case == "autocast" else 1e-4
    before = None
    seen = []
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for weights in actor_critic.policy_parameters().values():
                weights.normal_(std=0.3)
        with autocast, actor_critic.stepping():
            completions = tokens_of(sampler, prompts, [NEW] * ROWS, noise=noise_of())
        addresses = [
            x.data_ptr()
            for copies in actor_critic._products.values()
            for pair in copies.values()
            for x in pair
        ]
        assert len(addresses) == 2 * 2 * 7
        assert before in (None, addresses)
        before = addresses
        seen.append(completions)
        # the forward of PEFT
        for prompt, completion, got in zip(prompts, completions, sampler.last.logprobs):
            with autocast, torch.no_grad():
                ids = torch.tensor([prompt + completion], device=actor_critic.device)
                logits = actor_critic.policy(ids).logits.float().cpu()
            logprobs = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0]
            assert (torch.tensor(got) - expected).abs().mean() < tolerance
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_a_4bit_base_have_its_logits(tmp_path, dtype):
    """Training dequantizes the same weights."""
    actor_critic = four_bit_policy(tmp_path)
    layers = four_bit_layers(actor_critic.policy)
    ids = torch.tensor([[5, 6, 7, 8]], device=actor_critic.device)
    copies = {}
    autocast = torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32)
    with autocast, actor_critic.stepping(copies) as base:
        assert copies.keys() == set(layers)
        of_copies = base(ids).logits
    addresses = [x.data_ptr() for x in copies.values()]
    with autocast, actor_critic.stepping(copies) as base:
        torch.testing.assert_close(base(ids).logits, of_copies)
    assert [x.data_ptr() for x in copies.values()] == addresses
    with autocast, actor_critic.stepping() as base:
        assert not any("forward" in vars(x) for x in layers)
        tolerance = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
        torch.testing.assert_close(base(ids).logits, of_copies, **tolerance)


def four_bit_policy(directory):
    """A policy on a base in NF4, with an adapter that is not zero."""
    llama(hidden_size=64).save_pretrained(directory)
    base = AutoModelForCausalLM.from_pretrained(
        directory,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    )
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    actor_critic = load_actor_critic(base, config(directory), peft_config=lora)
    with torch.no_grad():
        for weights in actor_critic.policy_parameters().values():
            weights.normal_(std=0.3)
    return actor_critic.eval()


def test_policy_is_active_and_its_layers_are_restored(tmp_path):
    actor_critic = load_actor_critic(llama(), config(tmp_path))
    with actor_critic.adapter(None), actor_critic.stepping() as base:
        assert actor_critic.active_adapter == actor_critic.policy_adapter
        assert any("forward" in vars(module) for module in base.modules())
    assert not any("forward" in vars(module) for module in actor_critic.modules())


def test_projection_is_not_copied_for_each_row_of_the_prompts(tmp_path):
    """torch would for states that are a slice; it took most of a rollout's time on a CPU."""
    actor_critic = load_actor_critic(llama(), config(tmp_path))
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.bmm.default:
                products.append([tuple(x.shape) for x in args])
            return function(*args, **kwargs or {})

    with actor_critic.stepping() as base:
        sampler = sampler_of(base)
        with Products():
            sampler.sample(prompts_of(), [2] * ROWS)
    vocabulary = base.config.vocab_size
    assert not [shapes for shapes in products if vocabulary in shapes[1]]


# ---- what falls back to `generate` ----


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({}, None),
        ({"temperature": 0.7, "top_k": 5, "min_new_tokens": 2, "repetition_penalty": 1.0}, None),
        ({"repetition_penalty": 1.2}, "`repetition_penalty` is set"),
        ({"cache_implementation": "dynamic"}, "`cache_implementation` is set"),
        ({"num_beams": 2}, "`num_beams` is set"),
        ({"suppress_tokens": [3]}, "`suppress_tokens` is set"),
        ({"use_cache": False}, "`use_cache` is off"),
    ],
)
def test_settings_that_only_generate_has_are_named(tmp_path, settings, reason):
    actor_critic = load_actor_critic(llama(), config(tmp_path))
    generation_config = GenerationConfig(**{"use_cache": True} | settings)
    assert why_not_stepped(actor_critic, generation_config) == reason


def test_models_that_need_more_than_a_mask_are_named(tmp_path):
    generation_config = GenerationConfig(use_cache=True)
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    falcon = FalconForCausalLM(FalconConfig(**sizes, alibi=True))
    actor_critic = load_actor_critic(falcon, config(tmp_path))
    reason = why_not_stepped(actor_critic, generation_config)
    assert reason == "FalconForCausalLM reads positions off its mask"


def test_flash_attention_is_replaced_while_sampling_and_only_there(tmp_path, monkeypatch):
    """It takes no mask. `flex_attention` is neither SDPA nor eager, and loads without a GPU."""
    actor_critic = load_actor_critic(model_of("Gemma 4 with images"), config(tmp_path))
    expected = tokens_of(
        sampler_of(actor_critic.policy.get_base_model()),
        prompts_of(),
        [NEW] * ROWS,
        noise=noise_of(),
    )
    base = actor_critic.policy.get_base_model()
    configs = [x.config for x in base.modules() if hasattr(x, "config")]
    for x in configs:
        x._attn_implementation = "flex_attention"
    with actor_critic.stepping():
        assert tokens_of(sampler_of(base), prompts_of(), [NEW] * ROWS, noise=noise_of()) == expected
    assert {x._attn_implementation for x in configs} == {"flex_attention"}
