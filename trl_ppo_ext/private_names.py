"""Private names of other packages that this package touches, and what is lost without each.

Another version may rename one: a method that overrides it is then never called, and a flag that is
set does nothing, without an error. So each trainer looks the names up, and says once which are
missing.
"""

import inspect
import re
from functools import cache, reduce
from importlib import import_module
from importlib.metadata import version

from packaging.version import Version
from transformers.utils import logging

logger = logging.get_logger(__name__)

# owner, as module:attribute; name; what is lost
PRIVATE_NAMES = [
    # hooks of the loop, which `PPOTrainer` overrides
    ("transformers:Trainer", "_clip_grad_norm", "steps whose gradient is not finite are taken"),
    ("transformers:Trainer", "_get_grad_norm", "steps whose gradient is not finite are taken"),
    (
        "transformers:Trainer",
        "_get_dataloader",
        "rollouts are not repeated for their micro-batches",
    ),
    (
        "transformers:Trainer",
        "_prepare_for_training",
        "checks and the state of the run before its first step",
    ),
    ("transformers:Trainer", "_load_from_checkpoint", "resuming"),
    (
        "transformers:Trainer",
        "_load_optimizer_and_scheduler",
        "resuming the optimizer and the schedule",
    ),
    (
        "transformers:Trainer",
        "_load_callback_state",
        "callbacks of the script go on when a run is resumed",
    ),
    ("transformers:Trainer", "_load_best_model", "`load_best_model_at_end`"),
    (
        "transformers:Trainer",
        "_maybe_log_save_evaluate",
        "measured updates, and one log per rollout",
    ),
    ("transformers:Trainer", "_evaluate", "a resumed run evaluates nothing twice"),
    ("transformers:Trainer", "_finalize_training", "the report at the end of a run"),
    ("transformers:Trainer", "_save_checkpoint", "sealed checkpoints with the critic"),
    (
        "transformers:TrainingArguments",
        "_VALID_DICT_FIELDS",
        "mappings of the config in YAML files",
    ),
    # what these hooks call or set
    ("transformers:Trainer", "_save_rng_state", "random states in checkpoints"),
    ("transformers:Trainer", "_save_scaler", "the scale of fp16 in checkpoints"),
    ("transformers:Trainer", "_finish_current_push", "waiting for a push at the end of a run"),
    ("transformers:Trainer", "_total_loss_scalar", "the logged loss after resuming"),
    ("transformers:Trainer", "_globalstep_last_logged", "the logged loss after resuming"),
    ("transformers:Trainer", "_initial_global_step", "the speed that is logged after resuming"),
    (
        "transformers.integrations.deepspeed:",
        "_hf_deepspeed_config_weak_ref",
        "reward models beside ZeRO-3",
    ),
    ("accelerate:Accelerator", "_models", "training on several ranks after an evaluation"),
    (
        "accelerate:Accelerator",
        "_is_accelerate_prepared",
        "training on several ranks after an evaluation",
    ),
    ("accelerate:PartialState", "_shared_state", "several trainers in one process"),
    (
        "accelerate.state:GradientState",
        "_set_sync_gradients",
        "skipped steps under gradient accumulation",
    ),
    # models
    ("transformers:PreTrainedConfig", "_attn_implementation", "forwards over rows without padding"),
    ("transformers:PreTrainedModel", "_supports_flash_attn", "forwards over rows without padding"),
    ("transformers:PreTrainedModel", "_supports_sdpa", "speed: sampling beside flash attention"),
    ("transformers:PreTrainedModel", "_no_split_modules", "FSDP layer by layer"),
    ("transformers:PreTrainedModel", "is_backend_compatible", "forwards over rows without padding"),
    ("transformers:PreTrainedModel", "is_remote_code", "reuse of keys and values between turns"),
    ("transformers:PreTrainedConfig", "_name_or_path", "the base's name in adapters and cards"),
    (
        "transformers.modeling_utils:",
        "ALL_ATTENTION_FUNCTIONS",
        "forwards over rows without padding",
    ),
    (
        "transformers.integrations.sdpa_attention:",
        "sdpa_attention_forward",
        "forwards over rows without padding",
    ),
    (
        "transformers.utils.output_capturing:",
        "selected_hidden_states",
        "memory: all hidden states are kept",
    ),
    (
        "transformers.cache_utils:",
        "DynamicLayer",
        "rows that leave, and reuse of keys and values between turns",
    ),
    (
        "transformers.cache_utils:DynamicLayer",
        "is_compileable",
        "speed: the host reads the mask in each step",
    ),
    # adapters
    ("peft.tuners.tuners_utils:BaseTunerLayer", "_disable_adapters", "the reference"),
    ("peft.tuners.tuners_utils:BaseTunerLayer", "_active_adapter", "critic and reward adapters"),
    (
        "peft.tuners.lora:LoraLayer",
        "cast_input_dtype_enabled",
        "speed: inputs are cast under autocast",
    ),
    (
        "peft.utils.other:AuxiliaryTrainingWrapper",
        "_adapters",
        "`modules_to_save` beside several adapters",
    ),
    (
        "peft.utils.other:AuxiliaryTrainingWrapper",
        "_disable_adapters",
        "the reference beside `modules_to_save`",
    ),
    (
        "peft.utils.other:AuxiliaryTrainingWrapper",
        "_active_adapter",
        "`modules_to_save` beside several adapters",
    ),
    (
        "bitsandbytes.nn:Linear4bit",
        "support_avx512bf16_for_cpu",
        "gradients of a 4-bit base on some CPUs",
    ),
    # the loop's parts outside of its class
    ("transformers.trainer_callback:", "ExportableState", "states of callbacks in checkpoints"),
    ("transformers.utils:", "PushInProgress", "pushes during training"),
    (
        "transformers.integrations.integration_utils:",
        "INTEGRATION_TO_CALLBACK",
        "checks of `report_to`",
    ),
    (
        "accelerate.utils.deepspeed:",
        "DeepSpeedSchedulerWrapper",
        "the schedule in checkpoints under DeepSpeed",
    ),
    ("trl:", "add_response_schema", "tool calls of templates that TRL knows"),
    ("trl:", "get_training_chat_template", "templates that change earlier turns"),
    ("trl:", "supports_tool_calling", "the check that a template renders tools"),
]


# names that older versions lack without a loss: what they are for is newer
SINCE = {
    "selected_hidden_states": ("transformers", "5.23"),
    "support_avx512bf16_for_cpu": ("bitsandbytes", "0.50"),
}


def is_newer_than_installed(name: str) -> bool:
    """Whether a name was added to its package after the installed version, so that its absence is
    no loss."""
    package, since = SINCE.get(name, ("", "0"))
    return bool(package) and Version(version(package)) < Version(since)


def exists(owner: str, name: str) -> bool:
    """Whether a module or class has a name, as an attribute or in its source: some are set on
    instances only."""
    module, _, attributes = owner.partition(":")
    found = reduce(getattr, attributes.split(".") if attributes else (), import_module(module))
    return hasattr(found, name) or re.search(rf"\b{name}\b", inspect.getsource(found)) is not None


def missing_names() -> list[tuple[str, str, str]]:
    """Entries of the list that the installed versions do not have."""
    missing = []
    for owner, name, lost in PRIVATE_NAMES:
        try:
            is_there = exists(owner, name)
        except (ImportError, AttributeError, OSError):
            is_there = False
        if not is_there and not is_newer_than_installed(name):
            missing.append((owner, name, lost))
    return missing


@cache
def warn_of_missing_names() -> None:
    """Say once which names are missing, and what is lost."""
    for owner, name, lost in missing_names():
        logger.warning(
            f"`{owner.rstrip(':').replace(':', '.')}` has no `{name}` any more, which this package "
            f"relies on. Lost without it: {lost}. Install the versions of constraints.txt."
        )
