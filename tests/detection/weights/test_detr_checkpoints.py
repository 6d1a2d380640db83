"""Checkpoints of RT-DETR's and D-FINE's authors are taken over tensor by tensor, and then find the same boxes."""

import importlib.machinery
import itertools
import re
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch

from common.detection.models.detr import DETR
from common.detection.models.spec import DetectorSpec
from common.detection.weights import detr_checkpoints
from common.errors import Refused

pytest.importorskip("transformers")
HERE = Path(__file__).parent
# As the authors' program builds it (see the files) -> ours.
LISTED = {"rtdetr_r18vd": "rtdetr_v2_r18vd", "rtdetrv2_r18vd": "rtdetr_v2_r18vd", "dfine_s": "dfine_s"}
TWICE = ("decoder.up", "decoder.reg_scale")  # of D-FINE; decoder.decoder has them, too
LEFT_OUT = r"decoder\.(anchors|valid_mask)|.*\.num_batches_tracked"


def convert(state):
    return detr_checkpoints.convert(state, lambda: False)


def shapes_of(name):
    if name == "rtdetrv2_r18vd":  # the first version's, but for these
        shapes = {}
        for key, shape in shapes_of("rtdetr_r18vd").items():
            key = key.replace("enc_output.0.", "enc_output.proj.").replace("enc_output.1.", "enc_output.norm.")
            shapes[key] = shape
            if key.endswith("cross_attn.output_proj.bias"):
                shapes[key.replace("output_proj.bias", "num_points_scale")] = (12,)
        return shapes | {"decoder.anchors": (1, 8400, 4), "decoder.valid_mask": (1, 8400, 1)}
    shapes = {}
    for line in (HERE / f"{name}.txt").read_text().splitlines():
        if not line.startswith("#"):
            modules, _, tensors = line.partition(": ")
            parts = [part.split(",") for part in re.split("[{}]", modules)]  # layers.{0,1}.bn: of both layers
            for module, tensor in itertools.product(map("".join, itertools.product(*parts)), tensors.split(", ")):
                name, _, shape = tensor.partition(" ")
                shapes[f"{module}.{name}"] = tuple(map(int, shape.split("x"))) if shape else ()
    return shapes


def numbered(name):
    """A state dict whose tensors have their number, in the order of the list, as every value."""
    return {key: torch.full(shape, float(number)) for number, (key, shape) in enumerate(shapes_of(name).items(), 1)}


@pytest.mark.parametrize("name", LISTED)
def test_every_tensor_becomes_one_of_ours_and_none_is_left(name):
    state = numbered(name)
    state |= {f"decoder.{twice}": state[f"decoder.decoder.{twice}"] for twice in ("up", "reg_scale") if "dfine" in name}
    assert detr_checkpoints.matches(state)
    weights = convert(state)
    family = LISTED[name].rpartition("_")[0] if "dfine" in name else "rtdetr_v2"
    assert weights.settings == {"detector": family, "model": LISTED[name], "short_sides": "640"}
    assert (weights.mean, weights.std) == ((0, 0, 0), (1, 1, 1))
    detector = DETR(DetectorSpec(family, LISTED[name], 80))
    detector.load_state_dict(weights.tensors)  # names and shapes are those of our module, all of them

    made = {key: value for key, value in weights.tensors.items() if not re.fullmatch(LEFT_OUT, key)}
    made = {key: value for key, value in made.items() if value.eq(value.flatten()[0]).all() and value.flatten()[0] >= 1}
    used = sorted({int(value.flatten()[0]) for value in made.values()})
    kept = [key for key in state if not re.fullmatch(LEFT_OUT, key)]
    assert used == [number for number, key in enumerate(state, 1) if key in kept and key not in TWICE]
    assert len(made) == len(used) + 2 * sum("in_proj_" in key for key in state)
    assert (*weights.classes[:2], weights.classes[-1], len(weights.classes)) == ("person", "bicycle", "toothbrush", 80)


def test_rows_of_other_classes_have_no_names():
    state = {key: tensor for key, tensor in numbered("dfine_s").items() if key not in TWICE}
    for key in state:
        if "_score_head" in key or "denoising_class" in key:
            state[key] = state[key][:1].expand(366 + ("denoising" in key), *state[key].shape[1:])
    weights = convert(state)
    assert weights.classes == (None,) * 366
    assert weights.notes == (", trained on Objects365, whose classes it does not name",)


def test_other_checkpoints_are_refused_in_one_line():
    state = numbered("dfine_s")
    with pytest.raises(Refused, match=r"two values for model\.decoder\.up"):
        convert(state)
    del state["decoder.up"], state["decoder.reg_scale"]
    with pytest.raises(
        Refused, match=r"with 2 decoder layers and 256 channels, that is none of dfine_n, dfine_s, dfine_m, dfine_l"
    ):
        convert({key: tensor for key, tensor in state.items() if ".dec_score_head.2." not in key})
    with pytest.raises(Refused, match=r"DEIMv2's authors: .* give a model of transformers"):
        convert(state | {"decoder.decoder.layers.0.swish_ffn.w12.weight": torch.zeros(1)})
    assert not detr_checkpoints.matches({"backbone.body.conv1.weight": torch.zeros(1)})


@pytest.fixture(scope="module")
def authors(tmp_path_factory):
    """Modules of libreyolo, in which the authors' networks are under their names. It isn't installed, but taken apart."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "libreyolo==1.6.0", "--dest", folder]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("libreyolo 1.6.0 can't be downloaded")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    packages = ("", ".models", ".models.rtdetr", ".models.rtdetrv2", ".models.dfine")
    for name in (f"libreyolo{package}" for package in packages):  # whose __init__ would import what isn't needed
        module = types.ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    from libreyolo.models.dfine.nn import LibreDFINEModel
    from libreyolo.models.rtdetr.nn import RTDETRModel
    from libreyolo.models.rtdetrv2.nn import RTDETRv2Model

    yield {"rtdetr": RTDETRModel, "rtdetrv2": RTDETRv2Model, "dfine": LibreDFINEModel}
    for name in [name for name in sys.modules if name.split(".")[0] == "libreyolo"]:
        del sys.modules[name]


_R18 = {"backbone_depth": 18, "num_decoder_layers": 3, "expansion": 0.5}


@pytest.mark.long
@pytest.mark.parametrize(
    "program, options",
    [
        ("rtdetr", _R18),
        ("rtdetrv2", _R18),
        ("rtdetrv2", {"backbone_depth": 50, "num_decoder_layers": 6, "expansion": 1.0}),
        ("dfine", {"config": "n"}),
        ("dfine", {"config": "s"}),
        ("dfine", {"config": "x"}),
    ],
)
def test_with_equal_weights_the_authors_network_has_the_same_outputs(program, options, authors):
    """In float64: the layers are the same ones, not only their shapes."""
    network = authors[program](**options, eval_spatial_size=(256, 256)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in network.named_buffers():
            if name.endswith("running_var"):
                buffer *= 0.5 + torch.rand(buffer.shape, generator=generator)
            elif name.endswith("running_mean"):
                buffer += 0.1 * torch.randn(buffer.shape, generator=generator)
    state = network.state_dict()
    assert detr_checkpoints.matches(state)
    weights = convert(state)
    detector = DETR(DetectorSpec(weights.settings["detector"], weights.settings["model"], 80)).eval()
    detector.load_state_dict(weights.tensors)
    images = torch.rand(2, 3, 256, 256, generator=generator).double()
    with torch.no_grad():
        expected, found = network.double()(images), detector.double()._predict(images)
    torch.testing.assert_close(found.intermediate_logits[:, -1], expected["pred_logits"], rtol=0, atol=1e-6)
    torch.testing.assert_close(found.intermediate_reference_points[:, -1], expected["pred_boxes"], rtol=0, atol=1e-6)
