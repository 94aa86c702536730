"""What an environment writes is encoded once; ids before it never change."""

import pytest
from tiny import byte_tokenizer, tokenizer
from trl.chat_template_utils import qwen3_template

from trl_ppo_ext.episodes.chat import ChatFormat

QUESTION = [{"role": "user", "content": "hi"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = [{"role": "tool", "name": "add", "content": "3"}]
SCHEMA = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
TURN = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
STOPS = frozenset({2})
TEMPLATES = ["qwen2_5", "qwen3", "qwen3_instruct_2507"]


def opened(template="qwen3", with_tools=True, **kwargs):
    chat = ChatFormat(byte_tokenizer(template), kwargs or None, conversational=True, with_tools=with_tools)
    render = chat.tokenizer.apply_chat_template
    settings = {"tokenize": True, "return_dict": False, **chat.template_kwargs}
    return chat, lambda messages, opening: render(messages, add_generation_prompt=opening, **settings)


@pytest.mark.parametrize("template", TEMPLATES)
def test_turns_add_up_to_the_conversation_that_the_template_renders(template):
    chat, render = opened(template)
    prompt = render(QUESTION, True)
    turn = render([*QUESTION, CALLING], False)[len(prompt) :]
    turn = turn[: turn.index(2) + 1]  # a policy samples no line break after its end
    ids = prompt + turn + chat.following(turn, RESULT, chat.template_kwargs, STOPS, 1000)
    assert chat.tokenizer.decode(ids) == chat.tokenizer.decode(render([*QUESTION, CALLING, *RESULT], True))
    message = chat.parsed(turn, prompt, [SCHEMA])
    assert message["tool_calls"] == [CALL]


@pytest.mark.parametrize("template", TEMPLATES)
def test_observation_of_a_plain_environment_is_a_message_of_the_user(template):
    chat, render = opened(template, with_tools=False)
    prompt = render(QUESTION, True)
    turn = chat.tokenizer("north<|im_end|>")["input_ids"]
    ids = (
        prompt
        + turn
        + chat.following(turn, [{"role": "user", "content": "a wall"}], chat.template_kwargs, STOPS, 1000)
    )
    text = chat.tokenizer.decode(ids)
    assert text.endswith("north<|im_end|>\n<|im_start|>user\na wall<|im_end|>\n<|im_start|>assistant\n")
    assert chat.parsed(turn, prompt, []) == {"role": "assistant", "content": "north"}


def test_turn_that_ends_in_another_way_is_closed_by_the_environment():
    chat, _ = opened()
    closed, opened_ = (chat.tokenizer(TURN + end)["input_ids"] for end in ("<|im_end|>", ""))
    after = [chat.following(turn, RESULT, chat.template_kwargs, STOPS, 1000) for turn in (closed, opened_)]
    assert after[1] == [2, *after[0]]


def test_text_that_cannot_fit_is_not_tokenized():
    chat, _ = opened()
    chat.tokenizer = None
    for length in (64 * 5 + 1, 10_000_000):
        message = [{"role": "tool", "name": "add", "content": "x" * length}]
        assert len(chat.following([2], message, {}, STOPS, 5)) > 5


def test_text_follows_text_without_a_template():
    chat = ChatFormat(tokenizer(), None, conversational=False, with_tools=False)
    assert chat.following([4, 1], [{"role": "user", "content": "w1 w2"}], None, frozenset({1}), 9) == [5, 6]
    with pytest.raises(ValueError, match="need chat messages as prompts, got text"):
        ChatFormat(tokenizer(), None, conversational=False, with_tools=True)


def test_template_without_tool_calls_is_refused():
    plain = byte_tokenizer()
    plain.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="that of the tokenizer drops them"):
        ChatFormat(plain, None, conversational=True, with_tools=True)


@pytest.mark.parametrize("anchor", ["<|im_start|>assistant\n", "<|im_start|> assistant\n"])
def test_header_that_the_parser_does_not_find_is_refused(anchor):
    """Otherwise a turn would call the tools of earlier turns again."""
    custom = byte_tokenizer("qwen3_training")
    custom.chat_template = custom.chat_template.replace("<|im_start|>assistant", "<|im_start|> assistant")
    custom.response_template = qwen3_template | {"start_anchor": anchor}
    if " " in anchor:
        ChatFormat(custom, None, conversational=True, with_tools=True)
        return
    with pytest.raises(ValueError, match=r"`start_anchor` .* got '<\|im_start\|>assistant\\n' for .* assistant\\n'"):
        ChatFormat(custom, None, conversational=True, with_tools=True)
