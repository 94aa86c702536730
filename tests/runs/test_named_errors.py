"""What a library's own error would say without a name: the argument, what was given, and what to
do."""

import pickle

import pandas
import pytest
import torch
from datasets import Dataset
from tiny import byte_tokenizer, config, length_reward, llama, prompts, tokenizer
from transformers import BitsAndBytesConfig, Mxfp4Config, T5Config, T5ForConditionalGeneration

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.modeling import loading

CHATS = Dataset.from_dict({"prompt": [[{"role": "user", "content": "hi"}]] * 4})


def trainer(
    folder, model=None, reward=length_reward, data=None, built=None, settings=None, **given
):
    args = config(folder, **settings or {})
    data = prompts() if data is None else data
    return PPOTrainer(
        model or llama(), reward, args, data, processing_class=built or tokenizer(), **given
    )


def kind(x):
    return type(x).__name__


def chat_trainer(folder, **given):
    given = {"data": CHATS, "built": byte_tokenizer()} | given
    return trainer(folder, model=llama(vocab_size=259, max_position_embeddings=1024), **given)


def add(a: int) -> int:
    """Add.

    Args:
        a: A number.
    """
    return a


class OnlyLength:
    def __len__(self):
        return 3


@pytest.mark.parametrize(
    "data", [pandas.DataFrame({"prompt": ["w1", "w2"]}), OnlyLength(), "w1"], ids=kind
)
def test_dataset_without_rows_by_number_is_named(tmp_path, data):
    with pytest.raises(
        TypeError, match=r"`train_dataset` must be a `datasets.Dataset`.*got \w+; .*from_pandas"
    ):
        trainer(tmp_path, data=data)


def test_encoder_decoder_is_refused(tmp_path):
    sizes = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    model = T5ForConditionalGeneration(T5Config(vocab_size=32, **sizes))
    with pytest.raises(
        ValueError, match=r"`model` must be a causal .* no encoder, got T5ForConditionalGeneration"
    ):
        trainer(tmp_path, model=model)


@pytest.mark.parametrize(
    "kwargs",
    [{"tokenize": False}, {"return_dict": True}, {"return_tensors": "pt"}, {"max_length": 9}],
    ids=str,
)
@pytest.mark.parametrize("place", ["config", "row"])
def test_arguments_of_tokenizing_are_no_arguments_of_a_template(tmp_path, kwargs, place):
    if place == "row":
        data = CHATS.map(lambda _: {"chat_template_kwargs": kwargs})
    else:
        data = CHATS
    if place == "config":
        settings = {"chat_template_kwargs": kwargs}
    else:
        settings = {}
    with pytest.raises(
        ValueError, match=rf"`chat_template_kwargs` must be .*got \['{next(iter(kwargs))}'\]"
    ):
        chat_trainer(tmp_path, data=data, settings=settings)


def test_response_template_that_is_no_mapping_is_named(tmp_path):
    built = byte_tokenizer()
    built.response_template = "<|im_start|>"
    with pytest.raises(
        TypeError, match=r"`tokenizer.response_template` must be a mapping, .*got str"
    ):
        chat_trainer(tmp_path, built=built, tools=[add])


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize("rollout", [1, 2])
def test_evaluation_within_a_reward_is_refused(tmp_path, method, rollout):
    """It would record its own states as those of the rollout."""
    calls = []

    def reward(completions, **kwargs):
        calls.append(1)
        if len(calls) == rollout:
            getattr(built, method)(*([built.eval_dataset] if method == "predict" else []))
        return [float(len(x)) for x in completions]

    built = trainer(tmp_path, reward=reward, settings={"max_steps": 8}, eval_dataset=prompts())
    with pytest.raises(
        ValueError, match=r"must not be called while a rollout is collected.* `TrainerCallback`"
    ):
        built.train()
    assert built.evaluate()["eval_reward"] > 0  # afterwards it runs


def test_trainer_is_not_pickled(tmp_path):
    with pytest.raises(TypeError, match=r"cannot be pickled; `save_model\(\)` saves its adapters"):
        pickle.dumps(trainer(tmp_path))


async def later(episodes, scores):
    return episodes + 1


@pytest.mark.parametrize(
    "curriculum, got",
    [
        (lambda episodes, scores: None, "NoneType"),
        (later, "coroutine"),
        (lambda episodes, scores: "easy", "str"),
        (lambda episodes, scores: torch.ones(3), "Tensor"),
        (lambda episodes, scores: -torch.ones(16), "Tensor"),
        (lambda episodes, scores: [[1.0], 2.0], "list"),
    ],
)
def test_curriculum_without_weights_is_named(tmp_path, curriculum, got):
    with pytest.raises(ValueError, match=rf"`curriculum` must return a weight .*got {got}"):
        trainer(tmp_path, curriculum=curriculum).train()


NO_FACTORY = [
    ({"easy": 3}, r"\['easy'\]` .*got int"),
    ({"a": None}, r"\['a'\]` .*got NoneType"),
    (7, "` .*got int"),
]


@pytest.mark.parametrize("factory, got", NO_FACTORY)
def test_environment_that_is_no_factory_is_named(tmp_path, factory, got):
    with pytest.raises(TypeError, match=rf"`environment_factory{got}"):
        chat_trainer(tmp_path, environment_factory=factory)


@pytest.mark.parametrize("shown", [["w3", None], ["w3", ""], ["w3", "w4"]])
def test_missing_prompt_of_another_role_is_named_with_its_column(tmp_path, shown):
    data = Dataset.from_dict({"prompt": ["w1", "w2"], "shown": shown})
    settings = {"reference_prompt": "shown", "kl_coef": 0.1}
    if shown[1] is not None:
        trainer(tmp_path, data=data, settings=settings)
        return
    with pytest.raises(
        ValueError,
        match=r"Row 1 of `train_dataset`: The reference's prompt, in the column 'shown': .*got None",
    ):
        trainer(tmp_path, data=data, settings=settings)


@pytest.mark.parametrize(
    "quantizer",
    [BitsAndBytesConfig(load_in_4bit=True), Mxfp4Config(dequantize=True)],
    ids=kind,
)
def test_quantizer_reaches_the_model(tmp_path, monkeypatch, quantizer):
    """Others than bitsandbytes have no compute dtype to set."""
    given = {}

    def from_pretrained(model_id, **kwargs):
        given.update(kwargs)
        return llama(), {"missing_keys": [], "mismatched_keys": []}

    llama().config.save_pretrained(tmp_path)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    loading.load_base(str(tmp_path), config(tmp_path), quantizer, torch.device("cpu"))
    assert type(given["quantization_config"]) is type(quantizer)
