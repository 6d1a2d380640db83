"""`--compile` compiles the graphs that it should. A backend that runs graphs as they are makes the same number of them."""

import json


def test_training_compiles_once_for_each_micro_batch_size_and_in_the_parts_that_ddp_sends(run_several) -> None:
    """Neither the trial of the micro-batch nor an evaluation compiles: three functions for each size.

    A graph that was compiled in the trial, before DDP, would be used in training as a whole: no gradient would be sent
    before the last is there. The function of the losses does not depend on the size of images.
    """
    flags = "--model test_resnet --compile --max_steps 2 --eval_every 1".split()
    sizes = {
        "two sizes": "--global_batch_size 50 --max_micro_batch_size 17".split(),
        "two sizes of images": "--image_sizes 24,32 --seed 5".split(),  # one in each step
    }
    cases = {name: [*flags, *size] for name, size in sizes.items()}
    outcomes = run_several(2, cases, recipe="tests/recipes/counted.py", env={"COMPILE_BACKEND": "eager"})
    for name, graphs, models in (("two sizes", 6, 2), ("two sizes of images", 5, 2)):
        counted = json.loads(outcomes[name].stdout.splitlines()[-1])
        assert counted["compiled"] == graphs
        assert counted["cut"] == [2] * models
        assert not counted["broken"]
