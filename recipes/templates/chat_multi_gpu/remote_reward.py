"""A sequence classifier behind `vllm serve MODEL --runner pooling` as a reward."""

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from trl_ppo_ext.rewards import ScoringBatch
from trl_ppo_ext.rewards.http import HttpReward
from trl_ppo_ext.rewards.model import pooled_place, template_kwargs_of
from trl_ppo_ext.text import encode_completed


@dataclass(eq=False, repr=False)
class RemoteReward(HttpReward):
    """Sequence classifier behind `/classify` of `vllm serve`.

    It gets the token ids that a classifier in the run would get, up to the one at which that reads
    its score: vLLM reads the last one. Its raw output is the score.

    Args:
        url (`str`): Address of the server, e.g. `http://localhost:8001`.
        model (`str`): Model id or path of the classifier, for its tokenizer and its pad token.
        label (`int`, *optional*): Output of a model with several.
        name, api_key_env, concurrency, timeout, max_retries: As those of [`~trl_ppo_ext.Judge`].
    """

    label: int | None = None

    def __post_init__(self):
        self.url = self.url.rstrip("/").removesuffix("/classify") + "/classify"
        super().__post_init__()
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.pad_token_id = AutoConfig.from_pretrained(self.model).get_text_config().pad_token_id

    def _body(self, batch: ScoringBatch, row: int) -> dict[str, Any]:
        kwargs = template_kwargs_of(batch, row)
        ids = encode_completed(batch.prompts[row], batch.completions[row], self.tokenizer, kwargs)
        return {"input": ids[: pooled_place(ids, self.pad_token_id) + 1], "use_activation": False}

    def _read(self, answer: Any) -> float:
        outputs = answer["data"][0]["probs"]
        if self.label is None and len(outputs) == 1:
            label = 0
        else:
            label = self.label
        if label not in range(len(outputs)):
            raise ValueError(f"`label` must be one of its {len(outputs)} outputs, got {self.label}")
        return float(outputs[label])
