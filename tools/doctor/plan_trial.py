"""Trial: one process that makes some real steps of a recipe in a layout, times their parts, and leaves nothing behind.

    python -m tools.doctor.plan_trial JOB.json

The rehearsal and --plan start it, once for each process of a layout, with the variables that a launcher would set. The
recipe's own `main` runs, with a `Run` that takes the time. The result is a JSON file.
"""

import contextlib
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.checkpoints.store import Checkpoints, verify
from common.data.batch_plan import BatchPlan
from common.data.loader import worker_count
from common.data.workers import end_with_parent
from common.distributed import launch
from common.distributed.collectives import all_or_none, broadcast_object, rank, world_size
from common.durable import replace_file
from common.errors import Refused
from common.run.run import Run
from tools.trained import load_recipe

_ENDLESS = 10**6  # steps: the trial ends when it has measured enough
_LEAST_STEPS, _MOST_STEPS = 10, 400  # of a phase that --plan measures
_BLOCK = 5  # steps whose mean is one measurement
_QUIET = 0.25  # share of the measurements that are quicker than the one that counts: others are disturbed by other work
_WARM_STEPS = 3
_DECODED_S = 1.0  # for how long a core makes samples
_EVALUATED = 1000  # a larger validation set is not evaluated here
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Trial(Run):
    """A run of some steps in each of several cuts of the global batch into micro-batches: its phases, smallest first.

    The job has `seconds` of steps for each phase (0: two steps), `phases`, how many, `rounds`, how often they take turns, and
    `threads`, those of this process.
    """

    job: dict
    made: "Trial"

    def __init__(self, config, accelerator):
        Trial.made = self
        if config.eval_only or config.dry_run:
            raise Refused("--eval_only and --dry_run: leave them out, steps are made here, and nothing is kept")
        torch.set_num_threads(self.job["threads"])
        self.result: dict[str, Any] = {"rank": rank(), "phases": [], "workers": worker_count(config.workers)}
        self._since, self._phase = time.perf_counter(), -1
        super().__init__(config, accelerator)

    def length(self, stream) -> int:
        return max(super().length(stream), _ENDLESS)

    def _fit(self, plan: BatchPlan) -> dict[str, str]:
        if self.job["seconds"] == 0:
            self.result |= self._make_samples(plan)
        rows = super()._fit(plan)
        self._inexact = {name: text for name, text in rows.items() if name != "memory"}
        return rows

    def _make_samples(self, plan: BatchPlan) -> dict:
        """How many samples one core reads, decodes and augments per second."""
        samples: Any = self._training.samples
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        began, made, step = time.perf_counter(), 0, 0
        while not made or time.perf_counter() - began < _DECODED_S:
            low, high = plan.span(rank(), 0)
            samples.__getitems__(samples.stream.positions(step, (low, min(high, low + 8))))
            made, step = made + min(8, high - low), step + 1
        seconds = time.perf_counter() - began
        torch.set_num_threads(threads)
        return {"samples_per_core_s": made / seconds}

    def prepare(self, model, optimizer, ema, *, data, rows, **others):
        network, wrapped = super().prepare(model, optimizer, ema, data=data, rows=rows, **others)
        gradients = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._evaluated = len(data[1]) <= _EVALUATED
        self._network, self._wrapped = network, [*wrapped] if isinstance(wrapped, Sequence) else [wrapped]
        assert self.plan  # `_fit` has made it
        self._plans = phases(self.plan, self.job["phases"]) * self.job["rounds"]
        self.result |= {
            "gradient_bytes": sum(parameter.numel() * parameter.element_size() for parameter in gradients),
            "state_bytes": sum(t.nbytes for tensors in self._state.tensors().values() for t in tensors.values()),
            "start_s": time.perf_counter() - self._since,
            "start_peak": peak_memory(self.accelerator.device),
            "plan": dataclasses.asdict(self.plan),
            "inexact": self._inexact
            | ({"batch norm": norm} if "depends" in (norm := rows.get("batch norm", "")) else {}),
        }
        self._begin_phase()
        return network, wrapped

    def _start(self, state, *others) -> None:
        super()._start(state, *others)
        self._state = state

    def _begin_phase(self) -> None:
        """Train on with the next cut of the global batch; end the run after the last one."""
        self._phase += 1
        if self._phase == len(self._plans):
            self.last = self.step
            return
        plan, workers = self._plans[self._phase], self.config.workers
        self._training.begin(self._network, self._wrapped, plan, self.config.seed, (self.step, self.last), workers)
        self._warm = _WARM_STEPS + min(9, -(-4 * self.result["workers"] // plan.micro_steps))
        self._steps: list[dict] = []
        self._count = 0
        reset_peak_memory(self.accelerator.device)

    def micro_batches(self) -> Iterator:
        self._gap, self._times, since = 0.0, [], self._began
        for batch in super().micro_batches():
            self._gap += time.perf_counter() - since
            began = self._mark()
            yield batch
            self._times.append((began, self._mark()))
            since = time.perf_counter()

    def _mark(self) -> Any:
        if self.accelerator.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end_step(self, grad_norm) -> None:
        began = time.perf_counter()
        super().end_step(grad_norm)
        now = time.perf_counter()
        times = {"step": now - self._began, "data": self._gap, "end": now - began, "micro": self._times}
        self._steps.append(times)
        if self.job["seconds"] == 0:
            if len(self._steps) == 2:
                self._end_phase(self._steps[1:])
        elif len(self._steps) == self._warm:
            typical = statistics.median(step["step"] for step in self._steps[-_WARM_STEPS:])
            count = min(_MOST_STEPS, max(_LEAST_STEPS, math.ceil(self.job["seconds"] / typical)))
            self._count = self._warm + broadcast_object(-(-count // _BLOCK) * _BLOCK)
        elif len(self._steps) == self._count:
            self._end_phase(self._steps[self._warm :])

    def _end_phase(self, steps: list[dict]) -> None:
        device = self.accelerator.device
        if device.type != "cpu":
            torch.accelerator.synchronize()
        plan = self._plans[self._phase]
        blocks: list[dict[str, Any]] = []
        for step in steps:
            step["earlier"], step["last"] = [seconds(*span) for span in step["micro"][:-1]], seconds(*step["micro"][-1])
        for at in range(0, len(steps), _BLOCK):
            block = steps[at : at + _BLOCK]
            earlier = [span for step in block for span in step["earlier"]]
            mean: dict[str, Any] = {
                f"{name}_s": statistics.fmean(step[name] for step in block) for name in ("step", "data", "last", "end")
            }
            blocks.append(mean | {"earlier_s": statistics.fmean(earlier) if earlier else None})
        blocks.sort(key=lambda block: block["step_s"])
        phase = {"micro_steps": plan.micro_steps, "samples": plan.global_batch_size / plan.parts, "steps": len(steps)}
        self.result["phases"].append(phase | blocks[int(_QUIET * len(blocks))] | {"peak": peak_memory(device)})
        if self.job["seconds"] == 0:
            self.result["alone_s"] = self._without_sending()
        self._begin_phase()

    def _without_sending(self) -> float:
        """Seconds of a forward and backward pass of the largest micro-batch whose gradients are not sent."""
        found = []
        for _ in range(3):
            began = self._mark()
            with self.accelerator.no_sync(self._network):
                self._training.attempt(self._network, self._plans[self._phase])
            ended = self._mark()
            if self.accelerator.device.type != "cpu":
                torch.accelerator.synchronize()
            found.append(seconds(began, ended))
        self._network.zero_grad()
        return statistics.median(found)

    def evaluates(self) -> bool:
        return self.step == self.last and self._evaluated

    def saves(self) -> bool:
        return self.step == self.last

    def evaluate(self, *words, **others):
        began = time.perf_counter()
        found = super().evaluate(*words, **others)
        self.result["evaluate_s"] = time.perf_counter() - began
        return found

    def save(self) -> None:
        """Save a checkpoint, and load it."""
        began = time.perf_counter()
        super().save()
        self._saving.wait()
        self.result["save_s"] = time.perf_counter() - began
        began = time.perf_counter()
        with all_or_none("loading a checkpoint"):
            if paths := Checkpoints(self.path / "checkpoints").paths():  # of a folder that this machine sees
                self._state.load(verify(paths[0]).tensors(), self._state.numbers())
                self.result["load_s"] = time.perf_counter() - began


def phases(plan: BatchPlan, count: int) -> list[BatchPlan]:
    """`plan` and cuts with 2 and 4 times as many micro-steps, as far as they exist; smallest micro-batches first."""
    found = {plan.micro_steps: plan}
    for factor in [2, 4][: count - 1] if not plan.whole else []:
        parts = plan.world_size * plan.micro_steps * factor
        if plan.units >= parts:
            cut = dataclasses.replace(plan, max_micro_batch_size=plan.unit * -(-plan.units // parts))
            found[cut.micro_steps] = cut
    return [found[micro_steps] for micro_steps in sorted(found, reverse=True)]


def seconds(began: Any, ended: Any) -> float:
    """Between two marks: times of the host, or events of a GPU that is done with them."""
    return ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1000


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has had at most since `reset_peak_memory`: of the GPU, else resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def reset_peak_memory(device: torch.device) -> None:
    """Count the peak from here on; without effect where the system can't."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")


def observe(job: dict) -> None:
    """Run the recipe of `job`, and write the result."""
    recipe = load_recipe(Path(job["recipe"]))
    if not hasattr(recipe, "Run") or not hasattr(recipe, "main"):
        raise Refused(f"{job['recipe']}: must import the name Run and have a function main, as recipes/cls.py does")
    Trial.job = job
    vars(recipe)["Run"] = Trial
    recipe.main()
    made = Trial.made
    made.result["end_peak"] = peak_memory(made.accelerator.device)
    made.result["processes"] = world_size()
    replace_file(Path(job["result"]).with_suffix(f".{rank()}.json"), json.dumps(made.result).encode())


def main() -> None:
    end_with_parent()
    job = json.loads(Path(sys.argv[1]).read_text())
    sys.argv = [job["recipe"], *job["words"]]
    launch.run(partial(observe, job))


if __name__ == "__main__":
    main()
