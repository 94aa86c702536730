"""`trl-ppo probe`: whether a critic pays on a task, before anything is trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from transformers.hf_argparser import HfArg

from ..config import PPOConfig
from ..tools.probe import COMPLETIONS, probe
from .launch import build_trainer, load_datasets, parse


@dataclass(repr=False)
class ProbeConfig(PPOConfig):
    """[`PPOConfig`] of a run to probe."""

    _argument_group_name = (
        "training (fields of PPOConfig; those about updates and the Hub have no effect)"
    )

    completions: int = HfArg(default=COMPLETIONS, help="Completions to sample.")

    def __post_init__(self):
        self.push_to_hub = False  # it would create the repository
        super().__post_init__()


def main(argv: Sequence[str]) -> None:
    """Probe a task, and print the table and the verdict."""
    description = (
        "Measure on completions of the frozen policy whether a critic pays, before anything is "
        "trained."
    )
    script, args, model = parse("trl-ppo probe", argv, description, ProbeConfig)
    trainer = build_trainer(script, args, model, load_datasets(script))
    result = probe(trainer, cast(ProbeConfig, args).completions)
    print(
        f"{result['completions']} completions of {result['prompts']} prompts; all earn the same in",
        end=" ",
    )
    print(f"{result['groups_without_signal']:.0%} of the groups of {result['num_generations']}")
    print(
        "explained variance of the returns by the policy's states: "
        f"{result['explained_variance']:.2f}"
    )
    for name, share in result["foreseen"].items():
        print(f"of the scores of `{name}`, its scores of prefixes foresee {share:.2f} (noise: 0)")
    print(
        f"agreement of a rollout of {result['rollout']} with the exact gradient (1; noise: 0), "
        "with 90 % intervals"
    )
    print(
        "Half the agreement takes four times the completions. lam=... has a critic with that λ, "
        "the others none."
    )
    for name, values in result["agreement"].items():
        print(
            f"{name:9} ",
            "{:5.2f}   {:5.2f} to {:.2f}".format(*values) if values else "cannot be told",
        )
    print(result["verdict"])
    trainer.end()
