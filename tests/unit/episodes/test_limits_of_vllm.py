"""What vLLM could not sample with is refused before it starts; tests/with_vllm has the tests
that start it."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from peft import LoraConfig
from runs_of_tiny import trainer
from tiny import config, llama

from trl_ppo_ext.episodes import vllm_generator as vllm
from trl_ppo_ext.modeling.loading import load_actor_critic


def lora(**kwargs):
    return LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | kwargs
    )


def policy(tmp_path, **kwargs):
    return load_actor_critic(llama(), config(tmp_path), peft_config=lora(**kwargs))


@pytest.fixture
def base(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.fixture
def no_engine(monkeypatch):
    monkeypatch.setattr(vllm, "ColocatedEngine", lambda *args: pytest.fail("vLLM was started"))


def test_requests_have_the_room_of_their_prompts():
    generator = SimpleNamespace(engine=SimpleNamespace(settings={}), temperature=1.0, limit=9)
    for rooms, expected in ((None, [9, 9]), ([5, 2, 3], [5, 2])):
        requests = vllm.VLLMGenerator._requests(generator, [[4], [6], [4]], rooms)
        assert [(x.prompt_ids, x.copies, x.max_tokens) for x in requests] == [
            ([4], 2, expected[0]),
            ([6], 1, expected[1]),
        ]


def test_missing_vllm_is_an_error_with_both_remedies(tmp_path, base, monkeypatch):
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs vLLM, .*docs/generation.*`vllm_mode='server'`"):
        trainer(tmp_path / "run", base, use_vllm=True)


def test_adapter_that_has_not_moved_is_loaded_once(tmp_path, base, monkeypatch):
    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setattr(vllm, "find_spec", lambda name: True)
    run = trainer(tmp_path / "run", base, use_vllm=True, vllm_enable_sleep_mode=True)
    generator = run.components.player.generator
    for _ in range(2):
        with generator.awake():
            pass
    llm = generator.engine.llm
    assert llm.llm_engine.add_lora.call_count == 1
    assert llm.sleep.call_count == 3 and llm.wake_up.call_count == 2


def test_sleep_mode_needs_a_version_that_frees_the_cache(tmp_path, base, monkeypatch):
    request = SimpleNamespace(LoRARequest=None)
    stubs = {
        "vllm": SimpleNamespace(LLM=object, __version__="0.30.0"),
        "vllm.lora": request,
        "vllm.lora.request": request,
    }
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(vllm, "find_spec", lambda name: True)
    with pytest.raises(
        ImportError, match=r"`vllm_enable_sleep_mode` needs vLLM 0\.31, got 0\.30\.0"
    ):
        trainer(tmp_path / "run", base, use_vllm=True, vllm_enable_sleep_mode=True)


@pytest.mark.parametrize(
    "ranks, reserved", [({"r": 1}, 1), ({}, 8), ({"rank_pattern": {"q_proj": 12}}, 16)]
)
def test_slot_has_the_next_rank_that_vllm_takes(tmp_path, ranks, reserved):
    assert vllm.reserved_rank(policy(tmp_path, **ranks)) == reserved


@pytest.mark.parametrize(
    "adapter, message",
    [
        (
            {"target_modules": ["q_proj", "embed_tokens"]},
            "not with other adapters or one on the embeddings",
        ),
        ({"target_modules": ["q_proj", "lm_head"]}, "must not be on the output projection"),
    ],
)
def test_adapter_that_vllm_cannot_load_raises_before_startup(
    tmp_path, base, no_engine, adapter, message
):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path / "run", base, peft_config=lora(**adapter), use_vllm=True)


def test_model_without_a_path_is_refused(tmp_path, no_engine):
    with pytest.raises(
        ValueError, match="no name or path that vLLM could load; save it, or set `vllm_kwargs="
    ):
        trainer(tmp_path, use_vllm=True)


def test_quantized_base_is_served_only_if_it_is_named(tmp_path):
    quantized = policy(tmp_path)
    settings = quantized.policy.get_base_model().config
    settings._name_or_path = "org/model"
    settings.quantization_config = SimpleNamespace(load_in_4bit=True)
    with pytest.raises(
        ValueError, match=r"vLLM would serve `org/model` unquantized: .*`recipes/dequantize.py`"
    ):
        vllm.served_base(quantized, config(tmp_path, use_vllm=True))
    named = config(tmp_path, use_vllm=True, vllm_base_model="org/dequantized")
    assert vllm.served_base(quantized, named) == "org/dequantized"
    plugin = config(tmp_path, use_vllm=True, generation_kwargs={"quantization": "bitsandbytes"})
    assert vllm.served_base(quantized, plugin) == "org/model"


def test_served_base_is_of_the_commit_of_the_policys(tmp_path):
    built = policy(tmp_path)
    built.policy.get_base_model().config._commit_hash = "5a1" * 13 + "5"
    assert vllm.served_revision(built, config(tmp_path, use_vllm=True)) == "5a1" * 13 + "5"
    # weights of another name have commits of their own
    named = config(tmp_path, use_vllm=True, vllm_base_model="org/dequantized")
    assert vllm.served_revision(built, named) is None


def test_engine_loads_the_commit_of_the_policys_base(tmp_path, base, monkeypatch):
    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setattr(vllm, "find_spec", lambda name: True)
    monkeypatch.setattr(vllm, "served_revision", lambda *given: "5a1")
    trainer(tmp_path / "run", base, use_vllm=True)
    assert sys.modules["vllm"].LLM.call_args.kwargs["revision"] == "5a1"
