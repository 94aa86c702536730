"""Train a tiny model with random weights for two steps in the working directory."""

import torch
from datasets import Dataset
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_ppo_ext import PPOConfig, PPOTrainer

WORDS = ["<pad>", "<eos>", "<unk>", *"cat dog bird fish tree stone cloud river".split()]

wordlevel = Tokenizer(
    models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>")
)
wordlevel.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=wordlevel, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(WORDS),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
LlamaForCausalLM(config).save_pretrained("base")
tokenizer.save_pretrained("base")

trainer = PPOTrainer(
    "base",
    lambda completions, **kwargs: [float("cat" in text) for text in completions],
    PPOConfig(
        "out",
        generation_batch_size=8,
        num_mini_batches=1,
        per_device_train_batch_size=8,
        max_completion_length=4,
        max_steps=2,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        report_to="none",
    ),
    Dataset.from_dict({"prompt": [f"{word} tree" for word in WORDS[3:]]}),
)
trainer.train()
trainer.save_model()

# the saved files are a plain adapter
policy = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained("base"), "out")
policy(torch.tensor([[3, 4]]))
print(f"{trainer.state.global_step} steps, saved and loaded")
