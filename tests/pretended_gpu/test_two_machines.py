"""Two machines with two GPUs each, and NCCL between them, train what one CPU process trains."""

import numpy as np

from tests.harness.launching import ROOT
from tests.harness.outcomes import Outcome

WORDS = (
    "--tracker none --workers 1 --log_every 1 --max_steps 3 --eval_every 3 --checkpoint_every 3 "
    "--dtype float64 "
)
WORDS += "--batch_norm global --mixup 0.2 --random_erasing 0.3 --ema_decay 0.9 --clip 1"


def test_two_machines_with_two_gpus_each_train_what_a_cpu_trains(forks, gpus, nodes, tmp_path):
    """In float64, in network namespaces, with the README's command."""
    argv = WORDS.split() + ["--output_dir", tmp_path, "--name"]
    machines = nodes(2)
    flags = ["--main_process_ip", machines[0].address, "--num_processes", 4]
    run = ROOT / "tests/pretended_gpu/run.py"
    env = gpus.environment | {"PRETENDED_GPUS": "2"}
    started = [
        node.start("2node", [run, "recipes/cls.py"] + argv + ["gpus"], flags=flags, env=env)
        for node in machines
    ]
    done = [each.finish(200) for each in started]
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    assert "4 processes on 2 nodes, Pretended GPU (nccl), fp64" in done[0].stdout, done[0].stdout
    assert forks(argv + ["cpu"]).code == 0
    on_gpus, on_cpu = (Outcome(folder=tmp_path / name) for name in ("gpus", "cpu"))
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        np.testing.assert_allclose(on_gpus.column(key), on_cpu.column(key), rtol=1e-10)
