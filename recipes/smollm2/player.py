"""SmolLM2-135M-Instruct as a player of text games: one command per turn, after a short supervised
start on walkthroughs."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing comes from the Hub
sys.path.append(str(Path(__file__).parent))

from smollm2 import base_model

# SmolLM2's, with marks for the supervised loss. A call of `command` is the text of a turn, and its
# answer one of the user, so that environments with tools, as TRL has them, read and write the same
# tokens.
TEMPLATE = """{%- for m in messages -%}
{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}
{%- if m.role == 'assistant' -%}
{% generation %}{% for call in m.tool_calls or [] %}
{{- call.function.arguments.command if call.function.name == 'command' else call.function | tojson }}
{%- endfor %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else -%}
{{ m.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant",
    "fields": {
        "tool_calls": {
            "open": "\n",
            "close_pattern": r"<\|im_end\|>\s*",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "command", "arguments": {"command": "{content}"}},
            },
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def teach(walkthroughs: list[list[dict]], folder: Path) -> None:
    """Show the base the messages of episodes once, and save it."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(base_model())
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = RESPONSES
    data = Dataset.from_list([{"messages": messages} for messages in walkthroughs])
    args = SFTConfig(
        f"{folder}.sft",
        assistant_only_loss=True,
        learning_rate=1e-4,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        model_init_kwargs={"dtype": "float32"},
        bf16=False,  # it takes eight times as long on CPUs without instructions for it
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=2,
    )
    trainer = SFTTrainer(
        base_model(), args=args, train_dataset=data.shuffle(0), processing_class=tokenizer
    )
    trainer.train()
    part = folder.with_suffix(".part")  # an interruption leaves no folder that looks complete
    trainer.save_model(part)
    part.rename(folder)
