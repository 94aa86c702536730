"""A run on the Hub: its model card, and pushes in the background during training and at its end."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from urllib.parse import quote

from huggingface_hub import ModelCard, ModelCardData, create_repo, run_as_future, upload_folder
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import PushInProgress, logging

from ..arguments import as_list
from ..config import PPOConfig
from ..modeling.adapters import KINDS
from ..modeling.loading import model_kwargs, name_of_loader
from ..redaction import shortened
from ..rewards import no_reward
from ..tracking.completions import COMPLETIONS
from ..tracking.reading import REPORT, RUN_LOG
from ..tracking.run_log import package_versions
from .files import ADAPTER, CRITIC_FILES, STATE, run_settings
from .resume import EARLIER

logger = logging.get_logger(__name__)

# ---- the model card ----

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
METRICS = (
    "reward reward_std objective kl kl_per_completion entropy completions/mean_length "
    "completions/clipped_ratio value/explained_variance"
).split()
BASE_COPY = "path/to/your/copy/of/the/base"
PACKAGES = ("trl", "transformers", "peft", "accelerate", "torch")
# what a failed request has cost
PUSHED_LATER = (
    "Nothing is lost: its files are on disk, `trainer.push_to_hub()` pushes them, and large ones "
    "that arrived are not sent twice."
)
NOT_BEGUN = (
    "Nothing was trained yet; without `push_to_hub=True`, `trainer.push_to_hub()` pushes a run at "
    "its end."
)


def _one_line(text: Any) -> str:
    """A name for a code span: it ends neither the span nor its table cell."""
    printable = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(printable.replace("|", "\\|").replace("`", "'").split())


def _text(text: Any) -> str:
    """A name for prose, in which it acts neither as Markdown nor as HTML."""
    return re.sub(r"([\[\]()*_#!~])", r"\\\1", escape(_one_line(text), quote=False))


def _is_hub_id(name: str) -> bool:
    """Return `True` if a name is an id on the Hub, and not the path of a directory."""
    with suppress(HFValidationError):
        validate_repo_id(name)
        return not os.path.exists(name)
    return False


def logs_of_weights(trainer: Any) -> tuple[list[dict], str]:
    """Logs of the adapter's weights, which may be those of the best checkpoint, and a phrase that
    says of when they are."""
    state = trainer.state
    history = state.log_history
    step = trainer.best_step
    if step is None:
        if state.global_step < state.max_steps:
            return history, f"at step {state.global_step} of {state.max_steps}"
        return history, f"at the end of training (step {state.global_step})"
    until_best = [x for x in history[: trainer.logs_before_best] if x.get("step", 0) <= step]
    # evaluations after training; its summary is none of these weights
    later = [x for x in history[trainer.logs_before_best :] if "train_loss" not in x]
    when = (
        f"of the best checkpoint (step {step} of {state.global_step}, by "
        f"`{trainer.args.metric_for_best_model}`), whose weights these are"
    )
    return until_best + later, when


def model_card(trainer: Any, output_dir: str, **metadata: Any) -> ModelCard:
    """Build the card of a run, as saved in a directory; it contains no path of this machine."""
    actor_critic = trainer.actor_critic
    rewards = trainer.reward_func_names
    settings = run_settings(trainer.args)
    peft_config = actor_critic.policy.peft_config[actor_critic.policy_adapter]
    metadata = {key: value for key, value in metadata.items() if value is not None}
    base_model = metadata.pop("finetuned_from", actor_critic.config._name_or_path) or ""
    adapter = trainer.hub_model_id or os.path.abspath(output_dir)
    on_hub = _is_hub_id(base_model)
    adapter_on_hub = _is_hub_id(adapter)
    if adapter_on_hub:
        shown = adapter
    else:
        shown = os.path.basename(os.path.normpath(adapter))
    model_name = metadata.pop("model_name", shown.split("/")[-1])

    # 1. datasets, under any name that the Trainer and TRL use
    fields = ("datasets", "dataset", "dataset_name", "dataset_tags")
    names = [name for field in fields for name in as_list(metadata.pop(field, None))]
    datasets = [name for name in dict.fromkeys(names) if name and _is_hub_id(name)]

    # 2. metrics of training and of each evaluation set, as they were logged last for the weights
    history, when = logs_of_weights(trainer)
    # not NaN
    logged = {name: x for entry in history for name, x in entry.items() if x == x}
    if isinstance(trainer.eval_dataset, dict):
        sets = trainer.eval_dataset
    else:
        sets = {}
    prefixes = ["", "eval_"] + [f"eval_{name}_" for name in sets]
    names = list(METRICS) + [f"rewards/{name}/mean" for name in rewards]
    metrics = [prefix + name for prefix in prefixes for name in names if prefix + name in logged]

    # 3. the card
    kind = peft_config.peft_type.value
    given_tags = metadata.pop("tags", None)
    critic = getattr(actor_critic.value_head, "kind", "none")
    reference = ["adapter off"]
    if actor_critic.reference_adapter:
        reference = ["a frozen copy of the adapter it started from"]
    if trainer.args.reference_prompt is not None:
        reference.append("with a prompt of its own")
    located = {
        "revision": peft_config.revision,
        "subfolder": model_kwargs(trainer.args).get("subfolder"),
        "trust_remote_code": trainer.args.trust_remote_code,
    }
    table = settings | {
        name: getattr(peft_config, name, None) for name in ("r", "lora_alpha", "target_modules")
    }
    # which has no order
    table |= {name: sorted(x) for name, x in table.items() if isinstance(x, set)}
    card_data = ModelCardData(
        base_model=base_model if on_hub else None,
        datasets=datasets or None,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=list(
            dict.fromkeys(["trl_ppo_ext", "ppo", "trl", "rlhf", kind.lower(), *as_list(given_tags)])
        ),
        **metadata,
    )
    return ModelCard.from_template(
        card_data,
        template_path=str(TEMPLATE),
        model_name=_text(model_name),
        base_model=json.dumps(base_model if on_hub else BASE_COPY),  # a Python string
        base_name=_text(base_model),
        loader=name_of_loader(actor_critic.policy.get_base_model()),
        located="".join(
            f", {name}={True if x is True else json.dumps(x)}" for name, x in located.items() if x
        ),
        base_link=quote(base_model),
        on_hub=on_hub,
        adapter=json.dumps(shown, ensure_ascii=not shown.isprintable()),
        adapter_on_hub=adapter_on_hub,
        rewards=", ".join(f"`{_one_line(name)}`" for name in rewards if name != no_reward.__name__),
        adapter_type=kind,
        reference=", ".join(reference),
        critic=critic,
        loads_critic=critic in KINDS,
        settings={name: _text(value) for name, value in table.items() if value is not None},
        metrics={_one_line(name): f"{logged[name]:.4g}" for name in metrics},
        when=when,
        versions=", ".join(
            f"{name} {number}" for name, number in package_versions(PACKAGES).items()
        ),
    )


# ---- pushes ----

# deleted on the Hub if they are not pushed: of another kind of critic
WEIGHTS = ADAPTER + CRITIC_FILES
PUSHING = ".pushing-"  # prefix of the copies that are being pushed
# names in the run's folder that are not pushed: hidden ones, checkpoints, input of `trl-ppo
# report`, and the arguments that another Trainer has pickled, which hold the token
# the first pattern is of names, the second of paths
COMPLETION_FILES = (COMPLETIONS, f"{COMPLETIONS}/*")
NOT_PUSHED = (
    "_*",
    ".*",
    f"{PREFIX_CHECKPOINT_DIR}-*",
    f"{EARLIER}*",
    RUN_LOG,
    TRAINING_ARGS_NAME,
    *COMPLETION_FILES,
)


class PushError(OSError):
    """Raised when a push to the Hub failed; every file is still on this machine."""


@contextmanager
def push_errors(
    output_dir: str, when: str | None = None, remedy: str = PUSHED_LATER
) -> Iterator[None]:
    """Turn any error into a [`PushError`], or a warning of the push `when`, without tokens and
    signed URLs."""
    try:
        yield
    except Exception as error:
        links = [error, error.__cause__ or error.__context__]  # the cause is the Hub's answer
        texts = [
            " ".join(str(link).split()) or type(link).__name__ for link in links if link is not None
        ]
        reason = shortened(re.sub(r"\?\S+", "?...", ": ".join(dict.fromkeys(texts))))
        message = (
            f"`{output_dir}` was not pushed to the Hub ({reason}). Check `hub_model_id`, the "
            "connection, and the write access of the token (`hf auth login`, HF_TOKEN or "
            f"`hub_token`). {remedy}"
        )
        if when is None:
            raise PushError(message) from None
        logger.warning("The push of %s failed; training continues. %s", when, message)


def create_repository(args: PPOConfig) -> None:
    """Create the repository of a run, if it does not exist."""
    with push_errors(args.output_dir, remedy=NOT_BEGUN):
        name = args.hub_model_id or Path(args.output_dir).absolute().name
        create_repo(name, token=args.hub_token, private=args.hub_private_repo, exist_ok=True)


def push_run(
    trainer: Trainer,
    commit_message: str | None = "End of training",
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    private: bool | None = None,
    **metadata: Any,
) -> Any:
    """Save adapters, critic, card and report to `output_dir`, and push that folder without
    checkpoints.

    This is [`~transformers.Trainer.push_to_hub`]: all processes call it, and `metadata` are fields
    of the card.
    """
    folder = trainer.args.output_dir
    # 1. write everything to disk before the first request to the Hub
    trainer.save_model(_internal_call=True)
    if not trainer.is_world_process_zero():
        return None
    _write_report(folder)
    if trainer.hub_model_id is None:
        with push_errors(folder):
            trainer.init_hf_repo(token, private)
    # 2. write the card; when a push begins, trackers add their page to the model's tags
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    tags = as_list(metadata.get("tags")) + as_list(getattr(trainer.model, "model_tags", None))
    trainer.create_model_card(**metadata | {"tags": tags})
    # 3. upload, after the pushes of checkpoints
    trainer._finish_current_push()

    def push() -> Any:
        with push_errors(folder):
            ignored = [pattern for name in NOT_PUSHED for pattern in (name, f"{name}/*")]
            patterns = {"ignore_patterns": ignored, "delete_patterns": WEIGHTS}
            return _upload(trainer, folder, commit_message, token, revision, **patterns)

    if blocking:
        return push()
    job = run_as_future(push)
    trainer.push_in_progress = PushInProgress([job])
    return job


def push_in_background(trainer: Trainer, checkpoint_folder: str) -> None:
    """Push a checkpoint according to `hub_strategy`; a failure is a warning, and training
    continues."""
    args = trainer.args
    strategy = trainer.args.hub_strategy
    folder = trainer.args.output_dir
    if not trainer.is_world_process_zero() or strategy == HubStrategy.END:
        return  # other processes have no repository
    # 1. skip the push while an earlier one is in progress
    if trainer.push_in_progress is None or trainer.push_in_progress.is_done():
        for copy_of_killed_run in Path(folder).glob(f"{PUSHING}*"):
            shutil.rmtree(copy_of_killed_run, ignore_errors=True)
        trainer.push_in_progress = PushInProgress([])
    elif not args.hub_always_push:
        return
    places = {
        HubStrategy.CHECKPOINT: "last-checkpoint",
        HubStrategy.ALL_CHECKPOINTS: Path(checkpoint_folder).name,
    }
    place = places.get(strategy)
    when = f"step {trainer.state.global_step}"

    def push(copy: TemporaryDirectory) -> None:
        with copy, push_errors(folder, when):
            # also of an older checkpoint there
            stale = WEIGHTS if place is None else list(WEIGHTS) + [f"{place}/*"]
            _upload(
                trainer,
                copy.name,
                f"Training in progress, {when}",
                None,
                None,
                delete_patterns=stale,
            )

    with push_errors(folder, when):
        trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
        # 2. copy what `save_model` writes: it would gather sharded weights, which needs all
        # processes
        # weights that are missing are of another kind of critic
        for file in list(WEIGHTS) + [STATE, "README.md"]:
            source = Path(checkpoint_folder, file)
            target = Path(folder, file)
            target.unlink(missing_ok=True)
            if source.is_file():
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(source, target)
        trainer.processing_class.save_pretrained(folder)
        _write_report(folder)
        # 3. upload a copy, because the run overwrites and deletes its files meanwhile
        copy = TemporaryDirectory(prefix=PUSHING, dir=folder, ignore_cleanup_errors=True)
        skip = shutil.ignore_patterns(*NOT_PUSHED)
        shutil.copytree(
            folder,
            copy.name,
            ignore=lambda at, names: skip(at, names) if at == folder else (),
            dirs_exist_ok=True,
        )
        if place is not None:
            shutil.copytree(checkpoint_folder, os.path.join(copy.name, place))
        trainer.push_in_progress.jobs.append(run_as_future(push, copy))


def _upload(
    trainer: Trainer,
    folder: str,
    message: str | None,
    token: str | None,
    revision: str | None,
    **patterns: Any,
) -> Any:
    return upload_folder(
        repo_id=cast(str, trainer.hub_model_id),
        folder_path=folder,
        commit_message=message,
        token=token or trainer.args.hub_token,
        revision=revision or trainer.args.hub_revision,
        **patterns,
    )


def _write_report(output_dir: str) -> None:
    """Write the report of the run so far, if it has a log; without it, the push continues."""
    if not os.path.isfile(os.path.join(output_dir, RUN_LOG)):
        return
    try:
        from ..tracking.report import write_report  # imports bokeh, an extra

        write_report(output_dir, os.path.join(output_dir, REPORT))
    except Exception as error:  # a report must not end a push
        logger.warning("The report of the run cannot be written, and is not pushed: %s", error)
