"""`--compile` compiles the graphs that it should. A backend that runs graphs as they are makes the same number of them."""

import json


def test_training_compiles_once_for_each_micro_batch_size_and_in_the_parts_that_ddp_sends(run_several) -> None:
    """Neither the trial of the micro-batch nor an evaluation compiles: three functions for each of two sizes.

    A graph that was compiled in the trial, before DDP, would be used in training as a whole: no gradient would be sent
    before the last is there.
    """
    flags = "--model test_resnet --compile --max_steps 2 --eval_every 1".split()
    case = {"two sizes": [*flags, *"--global_batch_size 50 --max_micro_batch_size 17".split()]}
    outcomes = run_several(2, case, recipe="tests/recipes/counted.py", env={"COMPILE_BACKEND": "eager"})
    counted = json.loads(outcomes["two sizes"].stdout.splitlines()[-1])
    assert counted["compiled"] == 6 and counted["cut"] == [2, 2] and not counted["broken"]
