"""Token ids of text and of chats, for the policy and for everything that reads its completions.

Text of the dataset is the user's own: special tokens in it are tokens, as when the model is served.
What tools, environments and pages write, and what the policy samples, is text, whatever it spells:
[`protected`] marks the special tokens in it, and the functions below keep marked ones as text.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from trl import is_conversational

MARK = "\ufdd0"  # not a character: no text has it
OF_OTHERS = ("documents", "tools")  # arguments of a chat template that pages and tools write
_TAG = re.compile(r"</?\w+>")


# ---- chat messages ----


def without_none(x: Any) -> Any:
    """A copy without keys whose value is None: Arrow adds those that other rows have, and
    templates render them."""
    if isinstance(x, dict):
        return {key: without_none(value) for key, value in x.items() if value is not None}
    if isinstance(x, list):
        return [without_none(value) for value in x]
    return x


def text_only(message: dict) -> dict:
    """A message with text in place of parts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    return message | {"content": "".join(part["text"] for part in parts)}


def prefill(prompt: list[dict]) -> str:
    """Beginning of the answer, with which a prompt may end."""
    last = prompt[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        return ""
    return text_only(last).get("content") or ""


# ---- special tokens that others spell ----


@lru_cache(8)
def _special_tokens(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, template: str, with_tags: bool = False
) -> re.Pattern:
    """Pattern of the first character of each token that only the tokenizer or the chat template
    may write."""
    patterns = []
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        text = token.content
        is_of_template = bool(text.strip()) and text in template
        # tokens of a template need not be special; a prompt may name a tag such as <think>, a tool
        # may not write it
        if token.special or (is_of_template and (with_tags or not _TAG.fullmatch(text))):
            patterns.append(re.escape(text))
    return re.compile(f"(?=(?:{'|'.join(patterns) or '(?!)'}))(?s:.)")


def protected(
    texts: Any, tokenizer: PreTrainedTokenizerBase, template: Any = None, with_tags: bool = False
) -> Any:
    """A copy of what others wrote, with a mark in each special token that it spells."""
    if isinstance(texts, str):
        template = str(template or tokenizer.chat_template or "")
        return _special_tokens(tokenizer, len(tokenizer), template, with_tags).sub(
            rf"\g<0>{MARK}", texts
        )
    if isinstance(texts, dict):
        with_tags = with_tags or texts.get("role") == "tool"
        return dict(protected(list(pair), tokenizer, template, with_tags) for pair in texts.items())
    if isinstance(texts, list):
        return [protected(x, tokenizer, template, with_tags) for x in texts]
    return texts


@lru_cache(8)
def _delimiters(tokenizer: PreTrainedTokenizerBase, vocab_size: int, template: str) -> re.Pattern:
    """Pattern of the tokens with which the chat template delimits messages."""
    delimiters = {tokenizer.bos_token, tokenizer.eos_token} - {None, ""}
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        text = token.content
        # a prompt may name a tag, e.g. <think>, that is not special
        if text.strip() and text in template and (token.special or not _TAG.fullmatch(text)):
            delimiters.add(text)
    return re.compile("|".join(map(re.escape, sorted(delimiters, key=len, reverse=True))) or "(?!)")


def delimiter_in(
    messages: Sequence[dict], tokenizer: PreTrainedTokenizerBase, template: Any = None
) -> str | None:
    """The first delimiter of the chat template that a message of the user spells."""
    pattern = _delimiters(tokenizer, len(tokenizer), str(template or tokenizer.chat_template or ""))
    for message in messages:
        match = pattern.search(str(message.get("content") or ""))
        if match is not None and message.get("role") != "tool":
            return match[0]
    return None


def end_of_turn(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None = None
) -> str | None:
    """The special token with which the chat template ends an answer."""
    answer = "dummy"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(chat, **(template_kwargs or {}) | {"tokenize": False})
    except Exception:  # a template raises anything, e.g. for a chat without a system text
        return None
    rest = text.rpartition(answer)[2]
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = [token.content for token in added if token.special]
    after = [token for token in special if token in rest]
    return min(after, key=rest.index, default=None)


# ---- token ids ----


def encode_marked(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of text, split at its marks, without what the tokenizer adds."""

    def encoded(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False)["input_ids"]

    first, *rest = text.split(MARK)
    ids = encoded(first)
    if rest:
        line = encoded("\n")
    else:
        line = []
    for part in rest:
        after = encoded(f"\n{part}")  # some tokenizers add a space before the first word of a text
        ids += after[len(line) :] if after[: len(line)] == line else encoded(part)
    return ids


class EncodedText(NamedTuple):
    """Token ids of a text, and the special tokens that its tokenizer puts around it."""

    start: list[int]  # e.g. BOS; empty if the text itself begins with it
    ids: list[int]
    end: list[int]  # e.g. EOS or [SEP]; empty if the text itself ends with it


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> EncodedText:
    """Encode text that is not a chat; special tokens that a script has written into it are not
    added again."""
    own = text.split(MARK)[0]
    whole = tokenizer(own)["input_ids"]
    bare = tokenizer(own, add_special_tokens=False)["input_ids"]
    if bare:
        places = [place for place in range(len(whole)) if whole[place : place + len(bare)] == bare]
    else:
        places = [int(whole[:1] == [tokenizer.bos_token_id])]
    if not places:  # what is added cannot be told from the text
        return EncodedText([], whole, [])
    start = whole[: places[0]]
    ids = encode_marked(text, tokenizer)
    end = whole[places[0] + len(bare) :]
    if ids[: len(start)] == start:
        start = []
    if ids[len(ids) - len(end) :] == end:
        end = []
    return EncodedText(start, ids, end)


def encode_chat(
    messages: list[dict], tokenizer: PreTrainedTokenizerBase, template_kwargs: dict
) -> Any:
    """Token ids of chat messages; what documents, tools and marked text spell is text."""
    template = template_kwargs.get("chat_template")
    messages = [
        protected(x, tokenizer, template) if x.get("role") == "tool" else x for x in messages
    ]
    of_others = {name: template_kwargs[name] for name in OF_OTHERS if template_kwargs.get(name)}
    kwargs = template_kwargs | protected(of_others, tokenizer, template)
    if MARK not in json.dumps([messages, kwargs], ensure_ascii=False, default=str):
        return tokenizer.apply_chat_template(messages, return_dict=False, **kwargs)
    text = tokenizer.apply_chat_template(messages, **kwargs | {"tokenize": False})
    if kwargs.get("tokenize", True):
        return encode_marked(text, tokenizer)
    return text


def encode_completed(
    prompt: Any,
    completion: Any,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt with a completion, as TRL's `RewardTrainer` builds them, with one
    BOS and one EOS."""
    completion = protected(completion, tokenizer)
    if is_conversational({"prompt": prompt}):
        return encode_chat(join_messages(prompt, completion), tokenizer, template_kwargs or {})
    start, ids, end = encode_text(prompt + completion, tokenizer)
    eos = tokenizer.eos_token_id
    if not end and eos is not None and ids[-1:] != [eos]:
        end = [eos]
    return start + ids + end


def join_messages(prompt: list[dict], completion: list[dict]) -> list[dict]:
    """Messages of a chat whose last answer may have begun in the prompt, with text in place of
    parts."""
    begun = prefill(prompt)
    if completion and begun:
        answer = completion[0] | {"content": begun + completion[0]["content"]}
        messages = prompt[:-1] + [answer] + completion[1:]
    else:
        messages = prompt + completion
    return [text_only(message) for message in messages]
