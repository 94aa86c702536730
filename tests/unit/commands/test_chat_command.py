"""`trl-ppo chat`: base and adapter answer the same prompts, as plain PEFT has them."""

import io
import json
import shutil
from pathlib import Path

import families
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModelForCausalLM, get_peft_model
from tiny import CHAT_TEMPLATE, WORDS, config, length_reward, llama, tokenizer
from transformers import AutoModelForCausalLM

from trl_ppo_ext import PPOTrainer
from trl_ppo_ext.commands import main as cli
from trl_ppo_ext.commands.chat import Voice, load


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A base, and an adapter on it that changes every answer; both on disk."""
    folder = tmp_path_factory.mktemp("chat")
    base = llama()
    base.generation_config.repetition_penalty = 1e3  # training has none, and ignores the base's
    base.save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(folder / "run")
    tokenizer().save_pretrained(folder / "run")
    return folder


def greedy(model, text, tokens=6):
    ids = tokenizer()(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return tokenizer().decode(ids[0, -tokens:], skip_special_tokens=True)


def voices(adapter, chats, template=None):
    model, words, _ = load(str(adapter / "run"), "auto")
    words.chat_template = template
    model.generation_config.eos_token_id = model.get_base_model().generation_config.eos_token_id = (
        None
    )
    return [Voice(model, words, has, chats) for has in (False, True)]


def test_base_and_adapter_answer_as_without_this_package(adapter):
    base, tuned = voices(adapter, chats=False)
    expected = greedy(AutoModelForCausalLM.from_pretrained(adapter / "base"), "w3 w4")
    assert base.answer("w3 w4", {"max_new_tokens": 6, "do_sample": False}) == expected
    answer = tuned.answer("w3 w4", {"max_new_tokens": 6, "do_sample": False})
    assert answer == greedy(tuned.model, "w3 w4") != expected


def test_each_sampled_answer_has_its_own_seed_and_both_voices_the_same(adapter):
    model, words, _ = load(str(adapter / "run"), "auto")
    sampling = {"max_new_tokens": 8, "do_sample": True, "temperature": 2.0, "top_k": 0}

    def answers(seed, has_adapter=False):
        voice = Voice(model, words, has_adapter, chats=False, seed=seed)
        return [voice.answer("w3 w4", sampling) for _ in range(3)]

    first = answers(0)
    assert len(set(first)) == 3 and answers(0) == first != answers(7)
    assert answers(1)[0] == first[1]


def test_answers_end_where_completions_of_training_do(adapter):
    model, words, _ = load(str(adapter / "run"), "auto")
    stops = model.generation_config.eos_token_id
    assert words.eos_token_id in stops
    assert model.generation_config.repetition_penalty in (None, 1.0)  # by version


# it renders arguments as words
WITH_ARGUMENTS = (
    CHAT_TEMPLATE + "{% if thinking is defined %}{{ 'w8 ' if thinking else 'w9 ' }}{% endif %}"
    "{% if style %}{{ style }}{% endif %}"
)


def words_of_run():
    """A tokenizer for stop strings, which look up how tokens are written after a word."""
    return tokenizer(["abcdef", "user", "assistant", *WORDS[:25]], WITH_ARGUMENTS)


@pytest.fixture(scope="module")
def trained(adapter):
    """An adapter that a run with arguments of its template and stops of its own has saved."""
    args = config(
        adapter / "trained",
        chat_template_kwargs={"thinking": False, "style": "w7"},
        stop_token_ids=[30],
        stop_strings=["w3"],
    )
    words = words_of_run()
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "w1"}]}])
    base = str(adapter / "base")
    PPOTrainer(base, length_reward, args, rows, processing_class=words).save_model()
    return adapter / "trained"


def prompts_of_chat(run, capsys, monkeypatch, *arguments):
    """Prompts that both voices read, as text."""
    prompts = []
    generate = PeftModelForCausalLM.generate

    def recorded(model, input_ids, **settings):
        prompts.append(words_of_run().decode(input_ids[0]))
        return generate(model, input_ids=input_ids, **settings)

    arguments = ["--prompt", "w1", "--max_new_tokens", "2", *arguments]
    with monkeypatch.context() as patch:
        patch.setattr(PeftModelForCausalLM, "generate", recorded)
        assert cli.main(["chat", str(run), *arguments]) == 0, capsys.readouterr().err
    return prompts


@pytest.mark.parametrize(
    ("override", "ending"), [(None, "w9 w7"), ('{"thinking": true}', "w8 w7"), ("{}", "w9 w7")]
)
def test_chat_renders_prompts_with_arguments_of_training(
    trained, capsys, monkeypatch, override, ending
):
    arguments = () if override is None else ("--chat_template_kwargs", override)
    prompts = prompts_of_chat(trained, capsys, monkeypatch, *arguments)
    assert prompts == [f"<bos> user w1 <bos> assistant {ending}"] * 2


def test_chat_takes_arguments_for_adapter_without_saved_ones(
    trained, tmp_path, capsys, monkeypatch
):
    """As of another trainer, or of an earlier version."""
    for file in trained.iterdir():
        if file.name.startswith(("adapter_", "chat_template", "tokenizer")):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    prompt = "<bos> user w1 <bos> assistant"
    assert prompts_of_chat(tmp_path, capsys, monkeypatch) == [prompt] * 2
    state = json.loads((trained / "ppo_state.json").read_text())
    del state["chat_template_kwargs"]
    (tmp_path / "ppo_state.json").write_text(json.dumps(state))
    assert prompts_of_chat(tmp_path, capsys, monkeypatch) == [prompt] * 2
    arguments = ("--chat_template_kwargs", '{"thinking": true}')
    assert prompts_of_chat(tmp_path, capsys, monkeypatch, *arguments) == [f"{prompt} w8"] * 2
    (tmp_path / "chat_template.jinja").unlink()
    assert prompts_of_chat(tmp_path, capsys, monkeypatch) == ["w1"] * 2
    arguments = ("--chat_template_kwargs", json.dumps({"chat_template": CHAT_TEMPLATE}))
    assert prompts_of_chat(tmp_path, capsys, monkeypatch, *arguments) == [prompt] * 2


def test_chat_ends_answers_at_stops_of_training(trained):
    model, words, _ = load(str(trained), "auto")
    voice = Voice(model, words, has_adapter=True, chats=False)
    sampling = {"max_new_tokens": 8, "do_sample": True, "temperature": 2.0, "top_k": 0}
    answers = [voice.answer("w4 w5", sampling).split() for _ in range(40)]
    stops = {words.convert_ids_to_tokens(30), "w3"}
    assert {answer[-1] for answer in answers if answer} >= stops
    assert not any(stops & set(answer[:-1]) for answer in answers)


def test_chat_refuses_a_temperature_below_0(capsys):
    assert cli.main(["chat", "run", "--temperature", "-1"]) == 2
    assert "`--temperature` must be at least 0, which is greedy, got -1" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[1]", "thinking"])
def test_chat_names_wrong_arguments_of_the_template(text, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["chat", "run", "--chat_template_kwargs", text])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert "argument --chat_template_kwargs: must be the JSON of a mapping, e.g." in error
    assert f"got {text!r}" in error


@pytest.mark.parametrize(
    "plain, reason", [([], "a tokenizer without one"), (["--plain"], "`--plain`")]
)
def test_arguments_of_the_template_are_refused_without_it(adapter, plain, reason, capsys):
    arguments = ["chat", str(adapter / "run"), "--prompt", "w3", *plain]
    assert cli.main([*arguments, "--chat_template_kwargs", '{"enable_thinking": true}']) == 2
    assert f"needs a chat template, got {reason}; remove it." in capsys.readouterr().err


def test_chat_lists_the_dtypes_in_place_of_another_name(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["chat", "run", "--dtype", "bf16"])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert "argument --dtype: invalid choice: 'bf16'" in error and "bfloat16" in error


def test_chat_names_a_state_that_cannot_be_read(trained, tmp_path, capsys):
    for file in trained.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    Path(tmp_path, "ppo_state.json").write_text("{")
    assert cli.main(["chat", str(tmp_path), "--prompt", "w1"]) == 2
    assert "ppo_state.json` cannot be read" in capsys.readouterr().err


def test_each_voice_keeps_its_own_conversation(adapter):
    both = voices(adapter, chats=True, template=CHAT_TEMPLATE)
    for text in ("w1", "w2"):
        for voice in both:
            voice.answer(text, {"max_new_tokens": 4, "do_sample": False})
    for voice in both:
        assert [x["role"] for x in voice.messages] == ["user", "assistant"] * 2
        assert [x["content"] for x in voice.messages[::2]] == ["w1", "w2"]
    assert both[0].messages[1]["content"] != both[1].messages[1]["content"]


def test_prompts_of_the_command_line_are_answered_and_the_command_ends(adapter, capsys):
    arguments = ["chat", str(adapter / "run"), "--max_new_tokens", "4", "--plain"]
    assert cli.main([*arguments, "--prompt", "w3", "--prompt", "w5"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("> w3") < printed.index("> w5")
    assert printed.count("base") == printed.count("adapter") == 2


def test_chat_ends_at_an_empty_line_or_the_end_of_the_input(adapter, capsys, monkeypatch):
    for typed in ("w3\n\nw5\n", "w3\n/new\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        assert cli.main(["chat", str(adapter / "run"), "--max_new_tokens", "4"]) == 0
        printed = capsys.readouterr().out
        assert "An empty line ends the chat" in printed
        assert printed.count("adapter") == 1


def test_empty_prompt_is_refused(adapter, capsys):
    assert cli.main(["chat", str(adapter / "run"), "--prompt", " "]) == 2
    assert "`--prompt` must have text" in capsys.readouterr().err


def test_directory_without_an_adapter_names_what_to_pass(tmp_path, capsys):
    assert cli.main(["chat", str(tmp_path)]) == 2
    assert "pass the `output_dir` of a run after `trainer.save_model()`" in capsys.readouterr().err


def test_adapter_may_be_without_a_tokenizer_and_its_base_with_images(adapter, tmp_path, capsys):
    """The first is what PEFT itself saves."""
    shutil.copytree(adapter / "run", tmp_path / "plain")
    for file in (tmp_path / "plain").glob("*token*"):
        file.unlink()
    tokenizer().save_pretrained(adapter / "base")
    base = families.build("Ministral 3 with images")
    base.save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    rows = Dataset.from_list([{"prompt": "w1 w2"}])
    args = config(tmp_path / "images", max_completion_length=4)
    PPOTrainer(str(tmp_path / "base"), length_reward, args, rows).save_model()
    for run in ("plain", "images"):
        arguments = ["chat", str(tmp_path / run), "--prompt", "w1 w2", "--max_new_tokens", "2"]
        assert cli.main(arguments) == 0, capsys.readouterr().err
        assert "> w1 w2" in capsys.readouterr().out
