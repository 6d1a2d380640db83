"""A training state loaded from a checkpoint continues bit for bit like the uninterrupted training."""

import copy
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import timm.optim
import torch
from torch import nn

from common.checkpoints.state import Tensors, TrainingState
from common.checkpoints.store import Checkpoints, verify
from common.config.fields import OptimizationConfig, RunConfig
from common.errors import Refused
from common.training.optimizer import (
    _UNSUPPORTED,
    build_ema,
    build_optimizer,
    set_learning_rate,
)
from tests.harness.outcomes import identical


@dataclass
class Config(OptimizationConfig, RunConfig):
    """What every recipe has."""


class Network(nn.Module):
    """Convolutions, norms with buffers, tied and scalar weights, and a layer that is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        )
        self.first = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)
        self.tied.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        # Never has a gradient, so that the optimizer has no state for it.
        self.unused = nn.Linear(2, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images).mean((2, 3))
        x = self.tied(self.first(x).relu()).relu()
        return self.head(self.frozen(x)) * self.scale

    def group_matcher(self, coarse: bool = False) -> dict:
        """Layers for --layer_decay, as timm's models name them."""
        return {"stem": r"^stem", "blocks": [(r"^(?:first|tied|frozen)", (1,)), (r"^head", (99,))]}


@dataclass
class Training:
    """A run of some steps, as a recipe makes them."""

    options: dict
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    fp16: bool = False
    several: bool = False  # optimizers, each with parameters of its own
    state: TrainingState = field(init=False)

    def __post_init__(self):
        self.config = Config(**{"lr": 0.02, "ema_decay": 0.9, **self.options})
        model = Network().to(dtype=self.dtype, memory_format=self.memory_format)
        self.ema = build_ema(self.config, model)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**10, growth_interval=3, enabled=self.fp16
        )
        optimizer = build_optimizer(self.config, model.stem if self.several else model)
        if self.several:
            optimizer = [
                torch.optim.SGD([model.head.weight, model.first.weight], lr=0.1, momentum=0.9),
                optimizer,
                torch.optim.Adam([model.scale]),
            ]
        self.state = TrainingState(
            model,
            optimizer,
            ema=self.ema.module if self.ema else None,
            scaler=self.scaler if self.fp16 else None,
        )

    def train(self, first: int, last: int, overflows: Collection[int] = ()) -> "Training":
        model = self.state.model.train()
        optimizers = self.state.optimizer if self.several else [self.state.optimizer]
        for step in range(first, last):
            for optimizer in optimizers:
                set_learning_rate(optimizer, 0.02 / (1 + step))
            images = torch.randn(6, 3, 7, 7, generator=torch.Generator().manual_seed(step))
            logits = model(images.to(self.dtype))
            loss = nn.functional.cross_entropy(logits, torch.arange(6) % 5)
            if step in overflows:
                loss = loss * math.inf
            self.scaler.scale(loss).backward()
            for optimizer in optimizers:
                self.scaler.unscale_(optimizer)
                self.scaler.step(optimizer)
                self.scaler.update()
            model.zero_grad()
            if self.ema:
                self.ema.update(model, step + 1)
        return self

    def resume(self, folder: Path) -> "Training":
        """Another start of the same run: new objects, which take over a checkpoint."""
        record = {"step": 1, "numbers": self.state.get_values()}
        checkpoint = verify(Checkpoints(folder).save(record, self.state.get_tensors()))
        resumed = replace(self)
        resumed.state.check(checkpoint.read_shapes(), str(folder))
        resumed.state.load(checkpoint.load_tensors(), checkpoint.record["numbers"])
        return resumed


def assert_equal(left: Training, right: Training) -> None:
    actual = left.state.get_tensors()
    expected = right.state.get_tensors()
    assert actual.keys() == expected.keys()
    assert left.state.get_values() == right.state.get_values()
    for file, tensors in actual.items():
        assert identical(tensors, expected[file]), file
        for name, tensor in tensors.items():
            assert tensor.stride() == expected[file][name].stride(), name


OPTIMIZERS = {
    "adamw": {},
    "sgd": {"weight_decay": 1e-4},
    "momentum": {"momentum": 0.0},  # nothing to remember
    "lamb": {},  # counts its steps in the parameter groups
    "adan": {},  # likewise
    "lion": {},
    "adafactor": {},  # rows and columns
    "madgrad": {},  # whole numbers beside the tensors
    "nadamlegacy": {},  # fractions beside the tensors
    "muon": {"lr": 0.002},  # switches beside the tensors
}


CHANNELS_LAST = {"memory_format": torch.channels_last}
CASES = [
    ("layers", {"layer_decay": 0.5}, {}),
    ("no average", {"ema_decay": 0.0}, {}),
    ("float64", {}, {"dtype": torch.float64}),
    ("fp16", {}, {"fp16": True}),
    ("several optimizers", {"opt": "lamb"}, {"several": True}),
    ("all", {"opt": "lamb"}, {"dtype": torch.float64, "fp16": True, **CHANNELS_LAST}),
]
for opt, options in OPTIMIZERS.items():
    CASES.append((opt, {"opt": opt, **options}, {}))
    CASES.append((opt, {"opt": opt, **options}, CHANNELS_LAST))


@pytest.mark.parametrize("name, options, kwargs", CASES)
def test_a_resumed_run_is_bit_equal(name: str, options: dict, kwargs: dict, tmp_path: Path) -> None:
    """Fused optimizers walk through memory: a state has to have the layout of its weights."""
    whole = Training(options, **kwargs).train(0, 4)
    resumed = whole.resume(tmp_path)
    assert_equal(whole, resumed)
    assert_equal(whole.train(4, 9), resumed.train(4, 9))
    assert resumed.state.model.tied.weight is resumed.state.model.first.weight  # still tied
    if whole.fp16:
        # It has grown three times.
        assert whole.state.scaler.get_scale() == 2.0**13 == resumed.state.scaler.get_scale()


def get_trained(state: TrainingState) -> tuple[Tensors, Tensors]:
    """Weights and the optimizer's tensors; running statistics have seen steps that overflowed, too."""
    weights = {name: weight.detach() for name, weight in state.model.named_parameters()}
    return weights, state.get_tensors()["optimizer"]


def copy_values(state: TrainingState) -> dict:
    """The values as a checkpoint keeps them."""
    return json.loads(json.dumps(state.get_values()))


def test_steps_that_overflow_change_nothing(request) -> None:
    """As if they had not been there, in the first steps and later, also after a resume."""
    torch.use_deterministic_algorithms(True)  # memory that nobody has written holds NaN
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    tested = set()
    for name in timm.optim.list_optimizers(exclude_filters=_UNSUPPORTED):
        options = {"opt": name, "ema_decay": 0.0, **OPTIMIZERS.get(name, {})}
        try:
            plain = Training(options, torch.float64)
        except Refused:
            assert name.startswith(("bnb", "fused")), name
            continue
        plain.train(2, 4).train(5, 6)
        before = Training(options, torch.float64, fp16=True).train(0, 1, {0})
        scaled = Training(options, torch.float64, fp16=True)
        scaled.state.load(before.state.get_tensors(), copy_values(before.state))
        scaled.train(1, 6, {1, 4})
        expected_tensors = get_trained(plain.state)
        for actual, expected in zip(get_trained(scaled.state), expected_tensors, strict=True):
            assert identical(actual, expected), name
            assert all(value.isfinite().all() for value in actual.values()), name
        tested.add(name)
    assert {"adam", "adamw", "sgd", "momentum", "adagrad", "lamb", "muon"} <= tested
    assert len(tested) > 70


def test_a_run_in_fp16_resumes_in_another_precision() -> None:
    whole = Training({}, fp16=True).train(0, 3)
    resumed = Training({})
    resumed.state.load(copy.deepcopy(whole.state.get_tensors()), copy_values(whole.state))
    assert resumed.state.get_values()["optimizer"] == whole.state.get_values()["optimizer"]
    assert all(map(identical, get_trained(resumed.state), get_trained(whole.state)))
    resumed.train(3, 5)


def test_the_tensors_of_another_model_are_named() -> None:
    state = TrainingState(Network())
    before = copy.deepcopy(state.model.state_dict())
    network = Network()
    network.head = nn.Linear(8, 7)
    network.extra = nn.Linear(1, 1, bias=False)
    del network.scale
    shapes = {"model": {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}}
    with pytest.raises(Refused) as raised:
        state.check(shapes, "runs/a/step_00000003")
    assert str(raised.value) == (
        "runs/a/step_00000003 is of another model: extra.weight ((1, 1) there, missing here), "
        "head.bias ((7,) there, (5,) here), head.weight ((7, 8) there, (5, 8) here), scale "
        "(missing there, () here)"
    )
    assert identical(state.model.state_dict(), before)
    with pytest.raises(Refused, match=r"\(missing there, .* and 20 more$"):
        state.check({}, "x")


class LeftOut(nn.Linear):
    """A layer that only training needs, so that no `state_dict` and no export has it."""

    _save_to_state_dict = _load_from_state_dict = lambda *_: None


def test_weights_that_a_state_dict_leaves_out_have_a_file() -> None:
    network = Network()
    network.extra = LeftOut(2, 2)
    state = TrainingState(network, torch.optim.SGD(network.parameters(), lr=0.1))
    files = copy.deepcopy(state.get_tensors())
    assert files["extra"].keys() == {"weight", "bias"} and "extra.weight" not in files["model"]
    nn.init.zeros_(network.extra.weight)
    state.load(files, state.get_values())
    assert torch.equal(network.extra.weight, files["extra"]["weight"])
    with pytest.raises(Refused, match=r"bias \(missing there"):
        state.check(
            {"model": {name: tuple(tensor.shape) for name, tensor in files["model"].items()}}, "x"
        )
    network.extra.requires_grad_(False)
    assert TrainingState(network).get_tensors().keys() == {"model", "optimizer"}, (
        "what is not trained, as a teacher"
    )
    with pytest.raises(
        Refused,
        match=r"^model.weight is trained, but not in the model's state_dict: .* model, optimizer",
    ):
        TrainingState(nn.ModuleDict({"model": LeftOut(2, 2)}))


def test_a_failed_load_leaves_weights_untouched() -> None:
    """Whatever is missing or odd beside the weights."""
    trained = Training({}).train(0, 1).state
    files = copy.deepcopy(trained.get_tensors())
    values = trained.get_values()
    unknown = files["optimizer"] | {"stranger/exp_avg": torch.zeros(2)}
    not_trained = files["optimizer"] | {"frozen.weight/exp_avg": torch.zeros(8, 8)}
    without_optimizer = {"model": files["model"], "ema": files["ema"]}
    cases = [
        (without_optimizer, values),
        (files | {"optimizer": unknown}, values),
        (files | {"optimizer": not_trained}, values),
        (files, values | {"group_steps": []}),
    ]
    for missing in values:
        other_values = {key: value for key, value in values.items() if key != missing}
        cases.append((files, other_values))
    for bad_files, bad_values in cases:
        fresh = Training({}).state
        before = Training({}).state.get_tensors()
        with pytest.raises((KeyError, ValueError)):
            fresh.load(bad_files, bad_values)
        for file in ("model", "ema"):
            assert identical(fresh.get_tensors()[file], before[file])


def test_a_checkpoint_has_the_average_beside_the_weights() -> None:
    training = Training({}).train(0, 4)
    files = training.state.get_tensors()
    assert identical(files["ema"], training.ema.module.state_dict())
    assert identical(files["model"], training.state.model.state_dict())
    assert not torch.equal(files["ema"]["head.weight"], files["model"]["head.weight"])
