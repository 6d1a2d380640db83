"""One optimizer step: this rank's micro-batches, their backward passes, and the outcome."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset

from common.data.batch_plan import BatchPlan
from common.data.loader import DeviceBatch, Prefetcher, create_train_loader
from common.data.stream import Stream
from common.distributed import devices
from common.distributed.collectives import rank
from common.errors import Refused
from common.randomness import key_of, seed_generators
from common.training import batch_norm, drop_path
from common.training.freezing import Freezing
from common.training.optimizer import clip_gradients, unscale_gradients
from common.training.warm_up import check_losses, warm_up


class TrainDataset(Protocol):
    """A recipe's training samples, a `torch.utils.data.Dataset`."""

    source: Any  # of the images: `data.source.Source`, or `detection.data.annotated.Annotated`
    stream: Stream
    # Convolutions have few different shapes, so cuDNN may search for the fastest algorithm for
    # each.
    has_few_shapes: bool

    @property
    def unit_size(self) -> int:
        """Number of consecutive positions that stay together on a rank."""

    def __getitems__(self, positions: np.ndarray) -> DeviceBatch:
        """The samples at these positions of the stream: a pure function."""

    def describe(self) -> dict[str, str]:
        """Rows of the start table."""

    def make_noise(self, num_samples: int) -> DeviceBatch:
        """Samples of noise with everything that a batch of the run can have, as large as any."""

    def describe_images(self, batch: Any) -> Sequence[tuple]:
        """Of each image of a batch, for people: (what it shows, its name, its boxes).

        A box is (corners in pixels, class name). Colours uint8[H, W, 4] of a mask may follow.
        """


class EvalDataset(Protocol):
    """How a recipe's images are evaluated, and so what an exported model expects.

    A dataclass, see `data.loader`.
    """

    source: Any

    def batches(self, limit: int) -> list:
        """Indices of all images of the source, in batches of up to `limit`: the same on every layout."""

    def export(self, model: nn.Module, train: Any, results: dict, folder: Path) -> None:
        """Write a folder of `model`, trained on the source `train`: it becomes `best/`.

        The folder says how to prepare images for the model.
        """


class StepModule(Protocol):
    """A module of the model that prepares for each step.

    It may be a detector, or a head that compares with the classes of a step. Every module of a
    model with a method `prepare_step` is one, and has these members.
    """

    needs_whole_step: bool
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


class _StopForward(Exception):
    """The model's input is known, and its output not needed."""


class StepOutcome(NamedTuple):
    """The outcome of a step on this rank, of its n samples."""

    losses: Tensor  # [n], on the device
    positions: Tensor  # int64[n], of the stream
    data_wait: float  # seconds that were waited for data
    broken: tuple[str, ...] = ()  # images that could not be read: name and reason


class _Forward(NamedTuple):
    """A forward pass over some samples of the first step."""

    batch: Any
    images: Tensor  # float64, as the model gets them
    losses: Any  # [n], or None if the pass was stopped at the model


class TrainingStep:
    """Makes the steps of `model` on batches of `samples`.

    `compute_losses(network, batch)` is the recipe's forward pass and returns one loss per sample,
    [B]. Modules of `model` may prepare for a step before its first forward pass, see `StepModule`.
    `freezing` says what does not train in a step.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        samples: TrainDataset,
        compute_losses: Callable[[nn.Module, DeviceBatch], Tensor],
        freezing: Freezing,
    ):
        self.model = model
        self.samples = samples
        self._freezing = freezing
        self._accelerator = accelerator
        self._device = accelerator.device
        self._compute_losses = compute_losses
        self._step_modules = find_step_modules(model)
        self._needs_whole_step = any(module.needs_whole_step for module in self._step_modules)
        self._losses: list[Tensor] = []  # of the micro-batches of the current step
        self._positions: list[Tensor] = []

    def run_trial(self, network: nn.Module, plan: BatchPlan) -> None:
        """Add the gradient of the losses of the largest micro-batch of `plan`, on noise.

        It is the same in every call, and waits for no other rank. Losses of another shape than [B]
        are refused. `uses_generator` then tells whether a forward pass draws numbers, such as
        masks, from the global generator.
        """
        devices.seed_generator(0, self._device)
        batch_size = plan.micro_batch_sizes[0]
        # As many as are on the device at once. They stay there until the backward is done.
        num_batches = plan.micro_steps if self._needs_whole_step else 1
        noise = (self.samples.make_noise(batch_size) for _ in range(num_batches))
        prefetcher = Prefetcher(noise, self._device)
        batches: list[Any] = [next(prefetcher) for _ in range(num_batches)]
        self._prepare_step(0, batches[:1], plan, is_trial=network is self.model)
        drop_path.set_uniforms(self.model, batches[0].drop_path)
        state = devices.get_rng_state(self._device)
        losses = self._compute_losses(network, batches[0])
        self.uses_generator = not torch.equal(devices.get_rng_state(self._device), state)
        check_losses(losses, batch_size)
        losses.sum().backward()

    @torch.no_grad()
    def check_reproducible(self, plan: BatchPlan) -> None:
        """Make up to 32 samples of the first step twice, and once more in two batches.

        Raises `Refused` if they then differ: they would be drawn from the state of a global
        generator, which depends on the layout, as only dropout may.
        """
        start, end = plan.get_span(rank(), 0)
        num_units = min((end - start) // plan.unit_size, max(2, 32 // plan.unit_size))
        middle = start + num_units // 2 * plan.unit_size
        end = start + num_units * plan.unit_size
        passes: list[_Forward] = []

        def add_pass() -> None:
            seed = 1 + len(passes)
            passes.append(self._forward_first_step(plan, seed, (start, end)))

        for _ in range(2):
            warm_up(self.model, self.model, add_pass)
        first, second = passes
        chunks = []
        for span in ((start, middle), (middle, end)):
            if span[0] < span[1]:
                chunk = self._forward_first_step(plan, 3, span, only_images=True)
                chunks.append(chunk.images)
        pairs = {
            "images": (first.images, second.images),
            "images in smaller batches": (first.images, torch.cat(chunks)),
            "losses": (first.losses, second.losses),
        }
        for name, (expected, actual) in pairs.items():
            if not torch.allclose(expected, actual, rtol=1e-4, atol=1e-4, equal_nan=True):
                raise Refused(
                    f"the same samples, made again, have other {name}: an augmentation, the data "
                    "set or the loss draws from a global generator, so that the numbers depend "
                    "on the layout; draw them from the positions of the samples, as "
                    "common.randomness does (docs/change_it.md)"
                )

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def iterate_first_batch(
        self, plan: BatchPlan, limit: int
    ) -> Iterator[tuple[Tensor, Sequence[tuple]]]:
        """Up to `limit` samples of the first global batch, in chunks no larger than a micro-batch.

        Yields images [B, 3, H, W] as the model gets them, and their `describe_images`. No
        communication.
        """
        batch_size = plan.micro_batch_sizes[0]
        num_units = math.ceil(limit / plan.unit_size)
        end = min(plan.global_batch_size, num_units * plan.unit_size)
        for start in range(0, end, batch_size):
            span = (start, min(start + batch_size, end))
            forward = self._forward_first_step(plan, 0, span, only_images=True)
            yield forward.images, self.samples.describe_images(forward.batch)

    def _forward_first_step(
        self, plan: BatchPlan, seed: int, span: tuple[int, int], only_images: bool = False
    ) -> _Forward:
        """Run the forward pass over some samples of the first step, as a batch of `plan`.

        `seed` goes to all global generators. With `only_images` the pass ends before the model's.
        """
        inputs: list[Tensor] = []

        def seed_all(seed: int) -> None:
            seed_generators(seed)
            devices.seed_generator(seed, self._device)

        def record_inputs(_, args: tuple) -> None:
            inputs.extend(args[:1])
            if only_images:
                raise _StopForward
            seed_all(0)  # of the masks of dropout

        seed_all(seed)
        host_batch = self.samples.__getitems__(self.samples.stream.get_positions(0, span))
        batch: Any = next(Prefetcher([host_batch], self._device))
        seed_all(seed)  # reading images has left the generators in a state of its own
        self._prepare_step(0, [batch], plan, is_trial=True)
        drop_path.set_uniforms(self.model, batch.drop_path)
        # Before what shards the model waits for others.
        pre_hook = self.model.register_forward_pre_hook(record_inputs, prepend=True)
        post_hook = self.model.register_forward_hook(lambda *_: seed_all(seed))
        losses = None
        try:
            losses = self._compute_losses(self.model, batch)
        except _StopForward:
            pass
        finally:
            pre_hook.remove()
            post_hook.remove()
        return _Forward(batch, inputs[0].double(), losses)

    def start(
        self,
        network: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        plan: BatchPlan,
        seed: int,
        steps: tuple[int, int],
        workers: int,
    ) -> None:
        """Start the data workers for `steps`, (first, end)."""
        self.plan = plan
        self._network = network
        self._optimizers = optimizers
        self._seed = seed
        dataset = cast(Dataset, self.samples)
        loader = create_train_loader(dataset, plan, steps[0], steps[1], workers)
        self._prefetcher = Prefetcher(loader, self._device)
        # Once: to find them takes longer than to clip them.
        self._parameters = list(self.model.parameters())

    def load_micro_batches(self, step: int) -> Iterator[DeviceBatch]:
        """This rank's micro-batches of `step`, on the device.

        Gradients are sent to the other ranks with the last one.
        """
        self._freezing.start_step(step)
        batches: list[Any] = []
        if self._needs_whole_step:
            batches = [next(self._prefetcher) for _ in range(self.plan.micro_steps)]
        self._prepare_step(step, batches, self.plan, is_trial=False)
        for micro_step in range(self.plan.micro_steps):
            batch: Any = batches[micro_step] if batches else next(self._prefetcher)
            devices.seed_generator(
                key_of(self._seed, "dropout", step, micro_step, rank()), self._device
            )
            drop_path.set_uniforms(self.model, batch.drop_path)
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
        """Add the gradients of a micro-batch's losses, [B].

        In the end they belong to the mean over the global batch.
        """
        check_losses(losses, len(self._positions[-1]))
        gradient = torch.full_like(losses, self.plan.loss_scale)
        scaler = self._accelerator.scaler
        if scaler:
            gradient = scaler.scale(gradient)
        losses.backward(gradient)  # as of the scaled sum, in fewer kernels
        self._losses.append(losses.detach())

    def clip_gradients(self, limit: float, mode: str) -> Tensor:
        """Drop frozen gradients, undo fp16's loss scale, then clip; see `optimizer.clip_gradients`."""
        self._freezing.drop_gradients()
        unscale_gradients(self._accelerator, self._optimizers, self._parameters)
        return clip_gradients(self._parameters, limit, mode)

    def finish(self) -> StepOutcome:
        """Update batch norm's running statistics, and return the outcome of the step on this rank."""
        batch_norm.update_running_statistics(self.model)
        num_batches = len(self._positions)
        if len(self._losses) != num_batches:
            raise RuntimeError(
                f"run.backward was called {len(self._losses)} times for {num_batches} micro-batches"
            )
        losses = _concat(self._losses)
        positions = _concat(self._positions)
        self._losses = []
        self._positions = []
        data_wait, broken = self._prefetcher.pop_stats()
        return StepOutcome(losses, positions, data_wait, broken)


def _concat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def find_step_modules(model: nn.Module) -> list[StepModule]:
    """The modules of `model` that prepare for each step."""
    modules = [module for module in model.modules() if hasattr(module, "prepare_step")]
    return cast(list[StepModule], modules)


def describe_step_modules(model: nn.Module) -> dict[str, str]:
    """Rows of the start table about them."""
    rows: dict[str, str] = {}
    for module in find_step_modules(model):
        rows |= module.describe()
    return rows
