"""How often the host waits for the GPU in a step of each recipe is an exact number, on real GPUs and on pretended ones.

The runtime of pretended GPUs also reports waits that torch does not, and so shows that there are no others.
"""

import json
import re
from collections import Counter

import pytest
import torch

from tests.host_waits import CLS, DET, command
from tests.recipes.copied import CHANGES, copy

pytestmark = pytest.mark.gpu
IS_REAL = torch.cuda.is_available()

WAITING = """Two waits: torch sees the first; the second is of memory that is not pinned. Logs do not wait.
@@
                 run.backward(losses)  # gradients are sent with the last micro-batch
+                run.log({"train/squared": losses.detach() ** 2, "train/own": 0.5})
@@
+            print(losses.mean().item())
+            torch.ones(3).to(accelerator.device, non_blocking=True)
             run.end_step(grad_norm)
"""
# A wait that torch does not report: for events of earlier steps, which have passed.
REPORT = {"cudaEventSynchronize run/step_reports.py": 1}


@pytest.fixture(scope="module")
def count(gpus, tmp_path_factory):
    """Runs cases by name."""
    folder = tmp_path_factory.mktemp("waits")

    def run(cases, devices=1):
        """Returns for each case, by name, the counted steps of all ranks."""
        commands = [command(name, recipe, *words, folder) for name, (recipe, *words) in cases.items()]
        file = folder / "CASES.json"
        file.write_text(json.dumps(commands))
        done = gpus.fork("tests/host_waits.py", file, devices=devices)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        ranks = [json.loads((folder / f"WAITS.{rank}.json").read_text()) for rank in range(devices)]
        return {
            name: [wait for of_rank in of_ranks for wait in of_rank]
            for name, *of_ranks in zip(cases, *ranks, strict=True)
        }

    return run


def both(step):
    """The waits of a step that torch reports, and those that only the runtime reports; without line numbers."""
    hidden = Counter()
    for heard, often in step["runtime"].items():
        what, place = heard.split(" ", 1)
        if what == "cudaStreamSynchronize":  # one for each wait that torch reports
            often -= step["torch"].get(place, 0)
        if often and not (what == "cudaMemcpyAsync" and place in step["torch"]):
            hidden[heard] += often
    return without_lines(step["torch"]), without_lines(hidden)


def without_lines(places):
    result = Counter()
    for place, often in places.items():
        result[re.sub(r":\d+", "", place)] += often
    return result


def check(steps, waits, hidden=None):
    """Every step has exactly these waits; `hidden`: those that only the pretended runtime reports."""
    assert steps
    for step in steps:
        of_torch, of_runtime = both(step)
        assert of_torch == waits, step
        assert IS_REAL or of_runtime == REPORT | (hidden or {}), step


def of_cls(*names):
    return {name: ("recipes/cls.py", *CLS[name]) for name in names}


def of_det(*names):
    return {name: ("recipes/det.py", DET[name][0], f"--detector {name} {DET[name][1]}") for name in names}


def check_all(found):
    for name in found.keys() & CLS.keys():
        check(found[name], {})
    for name in found.keys() & DET.keys():
        check(found[name], DET[name][2])


def test_steps_wait_for_nothing_but_what_a_detector_has_to_know(count):
    check_all(count(of_cls("groups") | of_det("faster_rcnn")))


def test_on_two_gpus_steps_wait_for_nothing_and_one_that_does_is_found(count, tmp_path):
    """Also with numbers that a copied recipe logs: only the waits that were added are there."""
    steps = count({"waiting": (copy(tmp_path / "waiting" / "cls.py", WAITING), *CLS["varied"])}, devices=2)["waiting"]
    timed = {"cudaEventSynchronize waiting/cls.py, parallel/distributed.py": 8}  # by DDP in its first ten steps
    check(steps, {"waiting/cls.py": 1}, timed | {"cudaMemcpyAsync waiting/cls.py": 1})


@pytest.mark.long
def test_a_head_that_is_cut_by_class_waits_for_nothing(count, tmp_path):
    """Although it knows only on the device which classes occur in a step."""
    change = CHANGES["hundreds-of-thousands-of-classes"].replace("share=1.0", "share=0.1")
    words = "--model test_vit --clip 1 --ema_decay 0.9 --max_micro_batch_size 4"
    steps = count({"head": (copy(tmp_path / "head" / "cls.py", change), "fp16", words)}, devices=2)["head"]
    check(steps, {}, {"cudaEventSynchronize head/cls.py, parallel/distributed.py": 8})


@pytest.mark.long
def test_no_option_and_no_detector_makes_a_step_wait_for_more(count):
    check_all(count(of_cls(*CLS) | of_det(*DET)))
