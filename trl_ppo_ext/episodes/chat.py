"""Token ids of what an environment writes, and messages of what the policy sampled."""

from contextlib import suppress
from operator import eq
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging
from trl import add_response_schema, get_training_chat_template, supports_tool_calling

from ..data import PromptError
from ..text import MARK, encode_chat, encode_marked, protected

logger = logging.get_logger(__name__)

_QUESTION = {"role": "user", "content": "dummy"}
_RESPONSE = {"role": "tool", "name": "dummy", "content": "dummy"}
# of one token: a longer text is not even tokenized if its tokens could not fit
CHARACTERS = 64


def encodable(texts: Any) -> Any:
    """A copy of text or messages without lone surrogates, e.g. half an emoji in the JSON of a
    tool call, which no tokenizer encodes."""
    if isinstance(texts, str):
        return texts.encode("utf-8", "replace").decode("utf-8")
    if isinstance(texts, dict):
        return {encodable(name): encodable(x) for name, x in texts.items()}
    if isinstance(texts, list):
        return [encodable(x) for x in texts]
    return texts


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
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_ids = {
            *tokenizer.all_special_ids,
            *(number for number, token in added.items() if token.special),
        }
        if with_tools and not conversational:
            raise ValueError(
                "`tools` and environments with tools need chat messages as prompts, got text."
            )
        if not conversational:
            return
        if with_tools and not supports_tool_calling(tokenizer):
            raise ValueError(
                "`tools` and environments with tools need a chat template that renders tool calls "
                "and responses, but that of the tokenizer drops them; set "
                "`tokenizer.chat_template`, or use another model."
            )
        response_template = getattr(tokenizer, "response_template", None)
        if with_tools and not isinstance(response_template, dict | None):
            raise TypeError(
                "`tokenizer.response_template` must be a mapping, as `parse_response` takes it, "
                f"got {type(response_template).__name__}; set one, or None for templates that TRL "
                "knows."
            )
        if with_tools and response_template is None:
            add_response_schema(tokenizer)  # raises an error for a template that it does not know
        following = [_RESPONSE if with_tools else _QUESTION]
        end = None
        # some templates take arguments as text only; their training template does not
        with suppress(TypeError):
            end = self._end(*self._stand_in(following, self.template_kwargs))
        if end is None:
            self.template_kwargs["chat_template"] = get_training_chat_template(tokenizer)
        if not with_tools:
            return
        # no call would ever be found, or those of earlier turns again
        called, start, prefix = self._stand_in(
            following, self.template_kwargs | {"tokenize": False}
        )
        turns = (called[start:], called[:start]), ("dummy", prefix)
        if [bool((self._read(*turn) or {}).get("tool_calls")) for turn in turns] != [True, False]:
            anchor = tokenizer.response_template.get("start_anchor")
            end = prefix[-40:]
            raise ValueError(
                "`tokenizer.response_template` must read calls as the chat template writes them, "
                f"such as {called[start:]!r}, and its `start_anchor` must match the text with "
                f"which the template begins a turn, got {anchor!r} for a template that ends with "
                f"{end!r}; use one that fits."
            )

    def encoded(self, text: str) -> list[int]:
        """Token ids of text that others wrote, none of which is a delimiter."""
        return encode_marked(protected(text, self.tokenizer), self.tokenizer)

    def _stand_in(
        self, messages: list[dict], template_kwargs: dict[str, Any]
    ) -> tuple[Any, int, Any]:
        """Token ids up to the end of a stand-in for a turn, where it begins, and ids up to the
        end of its answer."""
        turn: dict[str, Any] = {"role": "assistant", "content": "dummy"}
        # some templates repeat the name of the call in the header of its response
        if messages[0]["role"] == "tool":
            function = {"name": messages[0]["name"], "arguments": {}}
            # its id is of no answer: templates that look for one by its id take the answer's name
            call = {"type": "function", "id": "dummy", "function": function}
            turn |= {"content": "", "tool_calls": [call]}
        opened = template_kwargs | {"add_generation_prompt": True}
        header = encode_chat([_QUESTION], self.tokenizer, opened)
        before = encode_chat([_QUESTION, turn], self.tokenizer, template_kwargs)
        after = encode_chat([_QUESTION, turn] + messages, self.tokenizer, opened)
        return before, [*map(eq, before, header), False].index(False), after

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
            # after a mark: some tokenizers write a space before what they take for the beginning
            return encode_marked(MARK + protected("".join(texts), self.tokenizer), self.tokenizer)
        # only what follows a turn is rendered, after a stand-in for it: sampled ids are never
        # tokenized again
        marked = protected(messages, self.tokenizer, template_kwargs.get("chat_template"))
        before, start, after = self._stand_in(marked, template_kwargs)
        end = self._end(before, start, after, stop_token_ids)
        if end is None:
            raise PromptError(
                "The chat template changes earlier messages when others follow; use another "
                "template."
            )
        if end < len(before) and before[end] not in stop_token_ids:
            wrong = (
                f"ends a turn with {self.tokenizer.decode(before[end])!r}, at which the policy "
                "does not stop"
            )
            logger.warning_once(
                f"The chat template {wrong}; add {before[end]} to `stop_token_ids`."
            )
        return after[end + (turn[-1] in (after[end], *before[end : end + 1])) :]

    def _end(
        self, before: list[int], start: int, after: list[int], stops: frozenset[int] = frozenset()
    ) -> int | None:
        """Place of the token that ends a stand-in for a turn also when messages follow; `None`
        if they change it."""
        same = [*map(eq, before, after), False].index(False)
        # its last delimiter, after which often a line break follows, or an end of the text, which
        # no policy samples
        for delimiters in (self.special_ids, stops):
            if ends := [place for place in range(start, same) if before[place] in delimiters]:
                if same < len(before):
                    left = before[ends[-1] + 1 :]
                else:
                    left = []
                if not self.tokenizer.decode(left, skip_special_tokens=True).strip():
                    return ends[-1]
        if same == len(before) - 1 and {before[same], after[same]} <= self.special_ids:
            return same  # the last turn ends with another delimiter than earlier ones
        if same == len(before):
            return len(before)  # then the header of the next message ends it
        return None

    def _read(self, turn: Any, prefix: Any, schemas: Any = None) -> dict[str, Any] | None:
        """Parse a turn as a message; `None` if its tool calls are invalid."""
        try:
            message = self.tokenizer.parse_response(turn, prefix=prefix, tools=schemas)
            for call in message.get("tool_calls") or ():
                function = call.get("function", call)
                if not isinstance(function["name"], str):
                    return None
                # some templates omit those of a call without any
                if function.get("arguments") is None:
                    function["arguments"] = {}
            return message | {"content": message.get("content") or ""}
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            return None

    def parsed(
        self, turn: list[int], prefix: list[int], schemas: list[dict]
    ) -> tuple[dict[str, Any], bool]:
        """The policy's turn as a message with its tool calls, and whether one of them is malformed,
        which makes all of it text."""
        if schemas:
            message = self._read(turn, prefix, schemas)
        else:
            message = None
        if message is None:
            text = self.tokenizer.decode(turn, skip_special_tokens=True)
            return {"role": "assistant", "content": text}, bool(schemas and text)
        if not self.special_ids.intersection(turn[-1:]):
            return message, False
        # the parser keeps the token that ended the turn, and some models stop at several
        end = self.tokenizer.decode(turn[-1:])
        texts = {name: x.removesuffix(end) for name, x in message.items() if isinstance(x, str)}
        return message | texts, False
