"""Each process takes a GPU of its own, or the launch is refused."""


def test_two_processes_on_the_same_gpu_are_refused(run_on_gpus) -> None:
    """As by srun or a script that shows the first one to each; torchrun's agent is refused before that."""
    [run] = run_on_gpus(2, {"same": []}, env={"PRETENDED_GPUS": "1"}).values()
    assert run.outcome == "refused" and run.text.startswith(
        "rank 1 has the same GPU as rank 0 on "
    ), run
