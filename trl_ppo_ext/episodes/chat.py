"""Token ids of what an environment writes, and messages of what the policy sampled."""

from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl import add_response_schema, get_training_chat_template, supports_tool_calling
from trl.chat_template_utils import parse_response

from ..data import PromptError

_QUESTION = {"role": "user", "content": "dummy"}
_RESPONSE = {"role": "tool", "name": "dummy", "content": "dummy"}
# of one token: a longer text is not even tokenized if its tokens could not fit
CHARACTERS = 64


def encodable(text: str) -> str:
    """Text without lone surrogates, e.g. half an emoji in the JSON of a tool call, which no tokenizer encodes."""
    return text.encode("utf-8", "replace").decode("utf-8")


class ChatFormat:
    """Turns of a conversation as token ids, with the delimiters of the chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: dict[str, Any] | None,
        conversational: bool,
        with_tools: bool,
    ):
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        if with_tools and not conversational:
            raise ValueError("`tools` and environments with tools need chat messages as prompts, got text.")
        if not conversational:
            return
        if with_tools and not supports_tool_calling(tokenizer):
            raise ValueError(
                "`tools` and environments with tools need a chat template that renders tool calls and responses, but "
                "that of the tokenizer drops them; set `tokenizer.chat_template`, or use another model."
            )
        if with_tools and getattr(tokenizer, "response_template", None) is None:
            add_response_schema(tokenizer)  # raises an error for a template that it does not know
        following = _RESPONSE if with_tools else _QUESTION
        if not self._keeps_prefixes(following):
            self.template_kwargs["chat_template"] = get_training_chat_template(tokenizer)
        if with_tools:  # else a turn whose beginning is not found would call the tools of earlier turns again
            conversation = [*self._opened_by(following), following]
            prefix = self._render(conversation, self.template_kwargs, add_generation_prompt=True)
            turn = tokenizer("dummy", add_special_tokens=False)["input_ids"]
            if parse_response(tokenizer, turn, prefix=prefix).get("tool_calls"):
                anchor, end = tokenizer.response_template.get("start_anchor"), tokenizer.decode(prefix)[-40:]
                raise ValueError(
                    "`start_anchor` of `tokenizer.response_template` must match the text with which the chat template "
                    f"begins a turn, got {anchor!r} for a template that ends with {end!r}; use the end of that text."
                )

    def _render(self, messages: list[dict], template_kwargs: dict[str, Any], **kwargs: Any) -> list[int]:
        kwargs = {"tokenize": True, "return_dict": False, **template_kwargs, **kwargs}
        return self.tokenizer.apply_chat_template(messages, **kwargs)

    @staticmethod
    def _opened_by(following: dict) -> list[dict]:
        """A question and the policy's turn, which precede a message."""
        if following["role"] != "tool":
            return [_QUESTION, {"role": "assistant", "content": "dummy"}]
        # some templates repeat the name of the call in the header of its response
        call = {"type": "function", "function": {"name": following["name"], "arguments": {}}}
        return [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]

    def _keeps_prefixes(self, following: dict) -> bool:
        opening = self._opened_by(following)
        try:
            before = self._render(opening, self.template_kwargs)
            after = self._render([*opening, following], self.template_kwargs, add_generation_prompt=True)
        except TypeError:  # some templates take arguments as text only; their training template does not
            return False
        return after[: len(before)] == before

    def following(
        self,
        turn: list[int],
        messages: list[dict],
        template_kwargs: dict[str, Any] | None,
        stop_token_ids: frozenset[int],
        room: int,
    ) -> list[int]:
        """Token ids of messages after a turn of the policy, up to where its next turn begins."""
        texts = [message["content"] for message in messages]
        if sum(map(len, texts)) > CHARACTERS * room:
            return [0] * (room + 1)  # the caller drops what does not fit
        if template_kwargs is None:  # the conversation is text
            return self.tokenizer("".join(texts), add_special_tokens=False)["input_ids"]
        # only what follows a turn is rendered, after a stand-in for it: sampled ids are never tokenized again
        opening = self._opened_by(messages[0])
        before = self._render(opening, template_kwargs)
        after = self._render([*opening, *messages], template_kwargs, add_generation_prompt=True)
        # the stand-in ends with the token that ends a turn, and often with a line break, which no policy samples
        ends = [place for place, token in enumerate(before) if token in stop_token_ids]
        end = ends[-1] + 1 if ends else len(before)
        if after[:end] != before[:end]:
            raise PromptError("The chat template changes earlier messages when others follow; use another template.")
        is_closed = not ends or turn[-1] == before[end - 1]
        return after[end if is_closed else end - 1 :]

    def parsed(self, turn: list[int], prefix: list[int], schemas: list[dict]) -> dict[str, Any]:
        """The policy's turn as a message, with its tool calls."""
        if schemas:
            # JSON that is nested too deeply is text, as other malformed calls are
            with suppress(RecursionError):
                return parse_response(self.tokenizer, turn, prefix=prefix, tools=schemas)
        return {"role": "assistant", "content": self.tokenizer.decode(turn, skip_special_tokens=True)}
