"""One optimizer step: this rank's micro-batches, their backward passes, and what came out of them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset

from common.data.batch_plan import BatchPlan
from common.data.loader import DeviceBatch, Prefetcher, training_loader
from common.data.stream import Stream
from common.distributed import devices
from common.distributed.collectives import rank
from common.errors import Refused
from common.randomness import key_of, seed_generators
from common.training import batch_norm, drop_path
from common.training.freezing import Freezing
from common.training.optimizer import clip_gradients, unscale_gradients
from common.training.warm_up import check_losses, warm_up


class Samples(Protocol):
    """A recipe's training samples, a `torch.utils.data.Dataset`."""

    source: Any  # of the images: `data.source.Source`, or `detection.data.annotated.Annotated`
    stream: Stream
    # Convolutions have few different shapes, so cuDNN may search for the fastest algorithm for
    # each.
    few_shapes: bool

    @property
    def unit(self) -> int:
        """Number of consecutive positions that stay together on a rank."""

    def __getitems__(self, positions: np.ndarray) -> DeviceBatch:
        """The samples at these positions of the stream: a pure function."""

    def describe(self) -> dict[str, str]:
        """Rows of the start table."""

    def blank(self, count: int) -> DeviceBatch:
        """`count` samples of noise with everything that a batch of the run can have, as large as any."""

    def shown(self, batch: Any) -> list[tuple[str, str, list]]:
        """Of each image of a batch, for people: what it shows, its name, and its boxes, (corners in
        pixels, class name).
        """


class Evaluated(Protocol):
    """How a recipe's images are evaluated, and so what an exported model expects; a dataclass, see
    `data.loader`.
    """

    source: Any

    def batches(self, most: int) -> list:
        """Indices of all images of the source, in batches of up to `most` that are the same on
        every layout.
        """

    def export(self, model: nn.Module, train: Any, results: dict, folder: Path) -> None:
        """Write a folder of `model`, trained on the source `train`, and of how to prepare its
        images: it becomes `best/`.
        """


class StepModule(Protocol):
    """A module of the model that is told of each step: a detector, or a head that compares with the
    classes of a step.

    Every module of a model with a method `prepare_step` is one, and has these members.
    """

    looks_ahead: bool
    """All micro-batches of a step are fetched before its first forward pass."""

    def prepare_step(
        self, step: int, batches: Sequence[Any], plan: BatchPlan, is_trial: bool
    ) -> None:
        """Called before the first forward pass of `step`, on every rank; it may be a collective.

        `batches` are this rank's micro-batches of the step, on the device; if no module of the
        model looks ahead, there are none. A micro-batch has up to `plan.micro_batch_sizes[0]`
        samples. In a trial, no other rank may be waited for, and there is one batch.
        """

    def describe(self) -> dict[str, str]:
        """Rows of the start table."""


class _Enough(Exception):
    """The model's input is known, and its output not needed."""


class StepOutcome(NamedTuple):
    """What one step made on this rank, of its n samples."""

    losses: Tensor  # [n], on the device
    positions: Tensor  # int64[n], of the stream
    data_wait: float  # seconds that were waited for data
    broken: tuple[str, ...] = ()  # images that could not be read: name and reason


class TrainingStep:
    """Makes the steps of `model` on batches of `samples`.

    `losses_of(network, batch)` is the recipe's forward pass and returns one loss per sample, [B].
    Modules of `model` may be told of a step before its first forward pass, see `StepModule`.
    `freezing` says what does not train in a step.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        samples: Samples,
        losses_of: Callable[[nn.Module, DeviceBatch], Tensor],
        freezing: Freezing,
    ):
        self.model, self.samples, self._freezing = model, samples, freezing
        self._accelerator, self._losses_of, self._device = (
            accelerator,
            losses_of,
            accelerator.device,
        )
        self._step_modules = find_step_modules(model)
        self._looks_ahead = any(module.looks_ahead for module in self._step_modules)
        self._losses: list[Tensor] = []  # of the micro-batches of the current step
        self._positions: list[Tensor] = []

    def attempt(self, network: nn.Module, plan: BatchPlan) -> None:
        """Add the gradient of the losses of the largest micro-batch of `plan`, on noise: the same
        in every call.

        Waits for no other rank. Losses of another shape than [B] are refused. `uses_generator` then
        tells whether a forward pass draws numbers, such as masks, from the global generator.
        """
        devices.seed_generator(0, self._device)
        count = plan.micro_steps if self._looks_ahead else 1  # as many as are on the device at once
        feed = Prefetcher(
            (self.samples.blank(plan.micro_batch_sizes[0]) for _ in range(count)), self._device
        )
        # Which stay there until the backward is done.
        batches: list[Any] = [next(feed) for _ in range(count)]
        self._prepare_step(0, batches[:1], plan, is_trial=network is self.model)
        drop_path.set_draws(self.model, batches[0].drop_path)
        state = devices.get_rng_state(self._device)
        losses = self._losses_of(network, batches[0])
        self.uses_generator = not torch.equal(devices.get_rng_state(self._device), state)
        check_losses(losses, plan.micro_batch_sizes[0])
        losses.sum().backward()

    @torch.no_grad()
    def check_draws(self, plan: BatchPlan) -> None:
        """Make up to 32 samples of the first step twice, and once more in two parts; raise
        `Refused` if they then differ.

        They would be drawn from the state of a global generator, which depends on the layout, as
        only dropout may.
        """
        first, end = plan.span(rank(), 0)
        units = min((end - first) // plan.unit, max(2, 32 // plan.unit))
        middle, end = first + units // 2 * plan.unit, first + units * plan.unit
        made: list[tuple] = []
        for _ in range(2):
            warm_up(
                self.model,
                self.model,
                lambda: made.append(self._made(plan, 1 + len(made), (first, end))),
            )
        (_, images, losses), (_, again, losses_again) = made
        spans = [span for span in ((first, middle), (middle, end)) if span[0] < span[1]]
        parts = torch.cat([self._made(plan, 3, span, only_images=True)[1] for span in spans])
        pairs = {
            "images": (images, again),
            "images in smaller batches": (images, parts),
            "losses": (losses, losses_again),
        }
        for what, (one, other) in pairs.items():
            if not torch.allclose(one, other, 1e-4, 1e-4, equal_nan=True):
                raise Refused(
                    f"the same samples, made again, have other {what}: an augmentation, the data "
                    "set or the loss draws from a global generator, so that the numbers depend "
                    "on the layout; draw them from the positions of the samples, as "
                    "common.randomness does (docs/change_it.md)"
                )

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def first_batch(
        self, plan: BatchPlan, limit: int
    ) -> Iterator[tuple[Tensor, list[tuple[str, str, list]]]]:
        """Up to `limit` samples of the first global batch: images [B, 3, H, W] as the model gets
        them, and what they show.

        Made in parts no larger than a micro-batch. No communication.
        """
        size = plan.micro_batch_sizes[0]
        end = min(plan.global_batch_size, -(-limit // plan.unit) * plan.unit)
        for start in range(0, end, size):
            batch, images, _ = self._made(
                plan, 0, (start, min(start + size, end)), only_images=True
            )
            yield images, self.samples.shown(batch)

    def _made(
        self, plan: BatchPlan, seed: int, span: tuple[int, int], only_images: bool = False
    ) -> tuple:
        """These samples of the first step as a batch of `plan`, as the model gets them, and their losses.

        `seed` goes to all global generators.
        """
        seen: list[Tensor] = []

        def reseed(number: int) -> None:
            seed_generators(number)
            devices.seed_generator(number, self._device)

        def before(_, arguments: tuple) -> None:
            seen.extend(arguments[:1])
            if only_images:
                raise _Enough
            reseed(0)  # of the masks of dropout

        reseed(seed)
        read = self.samples.__getitems__(self.samples.stream.positions(0, span))
        batch: Any = next(Prefetcher([read], self._device))
        reseed(seed)  # reading images has left the generators in a state of its own
        self._prepare_step(0, [batch], plan, is_trial=True)
        drop_path.set_draws(self.model, batch.drop_path)
        # Before what shards the model waits for others.
        begin = self.model.register_forward_pre_hook(before, prepend=True)
        end = self.model.register_forward_hook(lambda *_: reseed(seed))
        losses = None
        try:
            losses = self._losses_of(self.model, batch)
        except _Enough:
            pass
        finally:
            begin.remove()
            end.remove()
        return batch, seen[0].double(), losses

    def begin(
        self,
        network: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        plan: BatchPlan,
        seed: int,
        steps: tuple[int, int],
        workers: int,
    ) -> None:
        """Start the data workers for `steps`, (first, end)."""
        self.plan, self._network, self._optimizers, self._seed = plan, network, optimizers, seed
        loader = training_loader(cast(Dataset, self.samples), plan, *steps, workers)
        self._feed = Prefetcher(loader, self._device)
        # Once: to find them takes longer than to clip them.
        self._parameters = list(self.model.parameters())

    def micro_batches(self, step: int) -> Iterator[DeviceBatch]:
        """This rank's micro-batches of `step`, on the device. Gradients are sent to the other ranks
        with the last one.
        """
        self._freezing.begin(step)
        ahead: list[Any] = [
            next(self._feed) for _ in range(self.plan.micro_steps if self._looks_ahead else 0)
        ]
        self._prepare_step(step, ahead, self.plan, is_trial=False)
        for micro_step in range(self.plan.micro_steps):
            batch: Any = ahead[micro_step] if ahead else next(self._feed)
            devices.seed_generator(
                key_of(self._seed, "dropout", step, micro_step, rank()), self._device
            )
            drop_path.set_draws(self.model, batch.drop_path)
            self._positions.append(batch.positions)
            is_last = micro_step == self.plan.micro_steps - 1
            with contextlib.nullcontext() if is_last else self._accelerator.no_sync(self._network):
                yield batch

    def _prepare_step(
        self, step: int, batches: Sequence[Any], plan: BatchPlan, is_trial: bool
    ) -> None:
        for module in self._step_modules:
            module.prepare_step(step, batches, plan, is_trial)

    def backward(self, losses: Tensor) -> None:
        """Add the gradients of a micro-batch's losses, [B]; in the end they belong to the mean over
        the global batch.
        """
        check_losses(losses, len(self._positions[-1]))
        gradient, scaler = torch.full_like(losses, self.plan.loss_scale), self._accelerator.scaler
        # As of the scaled sum, in fewer kernels.
        losses.backward(scaler.scale(gradient) if scaler else gradient)
        self._losses.append(losses.detach())

    def clip_gradients(self, limit: float, mode: str) -> Tensor:
        """Leave out frozen stages, under fp16 undo the loss scale, then clip; see
        `optimizer.clip_gradients`.
        """
        self._freezing.leave_out_gradients()
        unscale_gradients(self._accelerator, self._optimizers, self._parameters)
        return clip_gradients(self._parameters, limit, mode)

    def end(self) -> StepOutcome:
        """Move batch norm's running statistics, and say what this rank made of the step."""
        batch_norm.update_running_statistics(self.model)
        if len(self._losses) != len(self._positions):
            called, count = len(self._losses), len(self._positions)
            raise RuntimeError(f"run.backward was called {called} times for {count} micro-batches")
        losses, positions = (
            each[0] if len(each) == 1 else torch.cat(each)
            for each in (self._losses, self._positions)
        )
        self._losses, self._positions = [], []
        return StepOutcome(losses, positions, *self._feed.take())


def find_step_modules(model: nn.Module) -> list[StepModule]:
    """The modules of `model` that are told of each step."""
    return [
        cast(StepModule, module) for module in model.modules() if hasattr(module, "prepare_step")
    ]


def describe_step_modules(model: nn.Module) -> dict[str, str]:
    """Rows of the start table about them."""
    rows: dict[str, str] = {}
    for module in find_step_modules(model):
        rows |= module.describe()
    return rows
