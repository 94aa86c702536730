"""The optimizer steps that one rollout feeds."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..data.supervised import PTXSampler
from ..sequences import MicroBatch, Rollout, micro_batches, rollout_from_tensors, rollout_tensors, schedule
from .batch_plan import BatchPlan
from .metrics import Metrics
from .objective import LossTerms, Objective, loss_denominators
from .samples import Coefficients


class Updates:
    """Cuts a rollout into micro-batches, computes their losses, and says when its steps are over."""

    def __init__(
        self,
        args: Any,
        plan: BatchPlan,
        metrics: Metrics,
        all_sum: Callable[[Tensor], Tensor],
        ptx: PTXSampler | None = None,
    ):
        self.args = args
        self.plan = plan
        self.metrics = metrics
        self.all_sum = all_sum
        self.ptx = ptx
        self.objective = Objective(args, metrics)
        self.forget()

    def forget(self) -> None:
        """Drop what is left of a rollout."""
        self.rollout: Rollout | None = None
        self.rows = torch.zeros(0)
        self.micro_batches: Iterator[MicroBatch] = iter(())
        self.terms: LossTerms | None = None
        self.moved = torch.zeros(2, device=self.args.device)
        self.stopped_early = False
        self.empty = [False]
        self.step = 0
        self.finite: list[dict[str, Tensor]] = []

    def start(self, rollout: Rollout, coefficients: Coefficients, optimizer_step: int) -> None:
        """Begin with a rollout."""
        self._begin(rollout, schedule(rollout.sequences.lengths, self.plan), coefficients, optimizer_step)

    def _begin(self, rollout: Rollout, rows: Tensor, coefficients: Coefficients, optimizer_step: int) -> None:
        self.forget()
        args, plan, length = self.args, self.plan, self.args.max_completion_length
        number, done = divmod(optimizer_step, plan.optimizer_steps)
        self.rollout, self.rows = rollout, rows
        self.terms = LossTerms(
            coefficients, loss_denominators(rollout.response_mask, rows, args.loss_aggregation, length, self.all_sum)
        )
        ptx = None
        if self.ptx is not None:
            ptx = self.ptx.draw(number)
            tokens = loss_denominators(ptx.completion_mask, rows, "token", length, self.all_sum)
            self.terms = self.terms._replace(ptx_denominators=tokens)
        self.empty = self._empty(self.terms)
        if args.offload_rollout:
            self.rollout = rollout.to("cpu")
        cut = micro_batches(self.rollout, rows, done * plan.gradient_accumulation_steps, ptx)
        self.micro_batches = (micro_batch.to(args.device) for micro_batch in cut)

    def _empty(self, terms: LossTerms) -> list[bool]:
        """Which optimizer steps have nothing to learn from, over all processes: their denominators are counts."""
        counts = terms.denominators.float()
        if terms.ptx_denominators is not None:
            counts = counts + self.args.ptx_coef * terms.ptx_denominators
        return (counts == 0).tolist()

    def state_dict(self, optimizer_step: int) -> dict[str, Tensor]:
        """The rollout in progress, for a checkpoint; empty if there is none."""
        if self.rollout is None or self.terms is None or optimizer_step % self.plan.optimizer_steps == 0:
            return {}
        numbers = [*self.terms.coefficients, float(self.stopped_early)]
        numbers_and_rows = {"rows": self.rows, "numbers": torch.tensor(numbers, dtype=torch.float64)}
        return rollout_tensors(self.rollout) | numbers_and_rows

    def load_state_dict(self, state: Mapping[str, Tensor], optimizer_step: int) -> None:
        """Go on with the rollout that [`Updates.state_dict`] gave."""
        tensors = dict(state)
        rows, numbers = tensors.pop("rows"), tensors.pop("numbers").tolist()
        plan = self.plan
        sizes = (plan.optimizer_steps, plan.gradient_accumulation_steps, plan.micro_batch_size)
        if tuple(rows.shape) != sizes:
            raise ValueError(
                f"The checkpoint lies within a rollout of {tuple(rows.shape)} optimizer steps × micro-batches × "
                f"completions, and the config makes them {sizes}; resume with the sizes it had, or from a checkpoint "
                "between two rollouts."
            )
        rollout = rollout_from_tensors(tensors, self.args.device)
        self._begin(rollout, rows, Coefficients(*numbers[:-1]), optimizer_step)
        self.stopped_early = bool(numbers[-1])

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        """Loss of a micro-batch, as its share of the optimizer step's loss over all processes."""
        if self.terms is None:
            raise RuntimeError("There is no rollout to learn from; `start` begins with one.")
        if micro_batch.step != self.step:
            self.step, self.finite = micro_batch.step, []
        outputs = self.objective(model, micro_batch, self.terms)
        self.moved = self.moved + outputs.moved
        self.finite.append(outputs.finite)
        return outputs.loss

    def suspects(self) -> dict[str, list[int]]:
        """Rows for which the forwards of the newest optimizer step were not finite."""
        found: dict[str, list[int]] = {}
        for rows, finite in zip(self.rows[self.step], self.finite):
            for name, fine in finite.items():
                found.setdefault(name, []).extend(rows[~fine.cpu()].tolist())
        return {name: sorted(rows) for name, rows in found.items() if rows}

    def may_step(self) -> bool:
        """Whether an optimizer step, whose losses are there now, may be taken.

        Not once the policy has moved too far, and not where no process has a token to learn from: momentum and weight
        decay would move the weights for nothing.
        """
        target = self.args.target_kl
        if target is not None and not self.stopped_early:
            moved, tokens = self.all_sum(self.moved).tolist()
            self.stopped_early = moved > target * tokens
        self.moved = torch.zeros_like(self.moved)
        empty = not self.stopped_early and self.empty[self.step]
        self.metrics.mean("stopped_early", torch.full((), float(self.stopped_early), device=self.args.device))
        once = empty and self.args.process_index == 0  # it is the same on all processes, and they are summed
        self.metrics.total("empty_steps", torch.full((), float(once), device=self.args.device))
        return not (self.stopped_early or empty)


def set_learning_rate(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], learning_rate: float
) -> None:
    """Give some parameters of an optimizer that has not stepped yet a learning rate of their own."""
    chosen = {id(parameter) for parameter in parameters.values()}
    for group in list(optimizer.param_groups):
        theirs = [parameter for parameter in group["params"] if id(parameter) in chosen]
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in chosen]
        if theirs:
            optimizer.add_param_group(group | {"params": theirs, "lr": learning_rate})
