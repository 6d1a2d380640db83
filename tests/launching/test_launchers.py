"""Each launcher's variables become the same eight; what contradicts or is missing is refused in one line."""

import pytest

from common.errors import Refused
from common.launching.launchers import Launch, complete, get_first_host, local_rank

pytestmark = pytest.mark.smoke


def parse_variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


def build_ompi(
    rank: int = 1, size: int = 2, local: int = 1, local_size: int = 2, **more: str
) -> dict[str, str]:
    """What Open MPI 4 gives to a process."""
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": local_size}
    main = "636485632.0;tcp://10.0.0.1,192.168.0.1:51331;tcp6://[fd00::2]:37211"
    job = {"OMPI_MCA_orte_hnp_uri": main, "PMIX_NAMESPACE": "636485633"}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()} | job | more


def build_slurm(
    rank: int = 1, size: int = 2, local: int = 1, node: int = 0, tasks: str = "2", **more: str
) -> dict[str, str]:
    """What srun gives to a task; NTASKS is of the job."""
    step = (
        f"STEP_NUM_TASKS={size} STEP_TASKS_PER_NODE={tasks} STEP_NODELIST=gpu[007-009,12],cpu1 "
        "STEP_ID=0 NTASKS=9"
    )
    numbers = parse_variables(f"PROCID={rank} LOCALID={local} NODEID={node} JOB_ID=4711 {step}")
    return {f"SLURM_{name}": value for name, value in numbers.items()} | more


MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
APART = {**MPICH, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}  # on two machines
EXPORTED = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
MAIN = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "3"}
AGENT = {
    **EXPORTED,
    **MAIN,
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "RANK": "3",
}
AGENT |= {"TORCHELASTIC_RUN_ID": "none"}
ACCELERATE = {"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_MIXED_PRECISION": "no"}


@pytest.mark.parametrize(
    "environ, launcher, numbers, main",
    [
        # rank, local rank, processes, those of this machine, machine, machines
        (AGENT, "torchrun", (3, 1, 4, 2, 1, 2), "10.0.0.1:3"),
        ({**AGENT, **ACCELERATE}, "accelerate launch", (3, 1, 4, 2, 1, 2), "10.0.0.1:3"),
        # a person's own variable
        ({**AGENT, "MIXED_PRECISION": "bf16"}, "torchrun", (3, 1, 4, 2, 1, 2), "10.0.0.1:3"),
        (
            {**AGENT, "NPROC": "2", "MIXED_PRECISION": "no", "ACCELERATE_MIXED_PRECISION": "bf16"},
            *("notebook_launcher", (3, 1, 4, 2, 1, 2), "10.0.0.1:3"),
        ),
        # srun torchrun
        (AGENT | build_slurm(1, 2, 0, 1, "1(x2)"), "torchrun", (3, 1, 4, 2, 1, 2), "10.0.0.1:3"),
        (build_ompi(2, 3, 0, 1, **MAIN), "Open MPI", (2, 0, 3, 1, None, None), "10.0.0.1:3"),
        (  # version 5
            build_ompi(
                2,
                3,
                0,
                1,
                OMPI_MCA_orte_hnp_uri="",
                PMIX_NAMESPACE="prterun-node-7-123@1",
                PMIX_HOSTNAME="node-8",
            ),
            *("Open MPI", (2, 0, 3, 1, None, None), "node-7"),
        ),
        # mpirun in a SLURM job
        (
            {**build_ompi(), **build_slurm(0, 2, 0, 1, "1(x2)")},
            "Open MPI",
            (1, 1, 2, 2, 0, 1),
            "127.",
        ),
        (MPICH, "MPICH", (1, 1, 2, 2, 0, 1), "127."),
        ({**MPICH, "I_MPI_HYDRA_UUID": "7c"}, "Intel MPI", (1, 1, 2, 2, 0, 1), "127."),
        ({**APART, "MASTER_ADDR": "first"}, "MPICH", (1, 0, 2, 1, None, None), "first:29500"),
        (build_slurm(), "srun", (1, 1, 2, 2, 0, 1), "127."),
        (build_slurm(4, 5, 1, 2, "1,2(x2)"), "srun", (4, 1, 5, 2, 2, 3), "gpu007"),
        # srun --mpi=pmi2
        ({**build_slurm(), "PMI_RANK": "1", "PMI_SIZE": "2"}, "srun", (1, 1, 2, 2, 0, 1), "127."),
        (EXPORTED, "exported variables", (1, 1, 2, 2, 0, 1), "127.0.0.1:29500"),
    ],
)
def test_what_a_launcher_leaves_out_is_completed(environ, launcher, numbers, main) -> None:
    completed = dict(environ)
    launch = complete(completed)
    assert launch.launcher == launcher
    assert tuple(launch.variables.values()) == (*numbers[:4], *numbers[4:])
    assert f"{launch.address}:{launch.port}".startswith(main) and launch.port > 0
    written = {
        name: completed.get(name) for name in (*launch.variables, "MASTER_ADDR", "MASTER_PORT")
    }
    numbered = [None if number is None else str(number) for number in numbers]
    assert list(written.values()) == [*numbered, launch.address, str(launch.port)]
    assert completed.items() >= environ.items()
    assert local_rank(completed) == str(numbers[1]) and local_rank(environ) in (
        str(numbers[1]),
        None,
    )
    second_environ = dict(completed)
    assert complete(second_environ) == launch and second_environ == completed


def test_a_single_process_forms_no_group() -> None:
    for environ, launcher in (
        ({}, "python"),
        (ACCELERATE, "accelerate launch"),
        ({"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": ""}, "python"),
        (build_slurm(0, 1, 0, 0, "1"), "srun"),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, "python"),  # a batch script
        ({"SLURM_NTASKS": "4", **ACCELERATE}, "accelerate launch"),
    ):
        completed = dict(environ)
        assert complete(completed) == Launch(launcher) and completed == environ


@pytest.mark.parametrize(
    "environ, message",
    [
        (
            build_ompi(RANK="0"),
            "RANK=0 contradicts Open MPI, which says 1 (rank 1 of 2): unset RANK",
        ),
        ({**build_slurm(), "LOCAL_RANK": "0"}, "LOCAL_RANK=0 contradicts srun, which says 1"),
        (build_ompi(rank=2), "Open MPI says that this is rank 2 of 2"),
        (build_ompi(local_size=3), "local rank 1 of 3, which can't be"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
        ({**EXPORTED, "RANK": "x"}, "RANK=x is not a whole number"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is exported, but RANK is not set"),
        ({**MAIN, "WORLD_SIZE": "2", "RANK": "1"}, "LOCAL_RANK is not set"),
        ({**EXPORTED, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "export MASTER_ADDR"),
        (
            build_ompi(0, 3, 0, 1, OMPI_MCA_orte_local_daemon_uri="636485632.1;tcp://10.0.0.2:5"),
            "mpirun -x MASTER_ADDR",
        ),
        (
            APART,
            "MPICH does not tell the processes of several machines where to meet: export "
            "MASTER_ADDR",
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_SIZE=2 is the number of all processes"),
        (
            build_slurm(tasks="1"),
            "SLURM_STEP_TASKS_PER_NODE=1 does not fit to SLURM_STEP_NUM_TASKS=2",
        ),
        (
            build_slurm(0, 3, 0, 1, "2,1"),
            "export MASTER_ADDR, the address of its machine, before srun",
        ),
        (
            {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
            "this SLURM job has 4 tasks, but python started only this process",
        ),
        ({"PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE=auto is for torchrun"),
        # a pod of a Kubernetes operator
        ({**EXPORTED, "PET_NNODES": "2"}, "start the recipe with torchrun"),
        (
            {**AGENT, "NPROC": "2", "MIXED_PRECISION": "bf16"},
            "notebook_launcher(mixed_precision='bf16') has no effect in Accelerate",
        ),
    ],
)
def test_what_contradicts_or_is_missing_is_refused_in_one_line(environ, message) -> None:
    untouched = dict(environ)
    with pytest.raises(Refused) as refusal:
        complete(untouched)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
    assert untouched == environ


def test_the_processes_of_each_job_meet_at_a_place_of_their_own() -> None:
    def find_address(environ: dict[str, str]) -> tuple[str, int]:
        launch = complete(dict(environ))
        return launch.address, launch.port

    assert (
        find_address(build_ompi(0, local=0))
        == find_address(build_ompi(1, local=1))
        != find_address(build_ompi(PMIX_NAMESPACE="636485634"))
    )
    assert (
        find_address(build_slurm(0, local=0))
        == find_address(build_slurm())
        != find_address(build_slurm(SLURM_JOB_ID="4712"))
    )
    assert find_address(build_slurm()) != find_address(build_slurm(SLURM_STEP_ID="1"))
    apart = [build_slurm(rank, local=0, node=rank, tasks="1(x2)") for rank in (0, 1)]
    assert find_address(apart[0]) == find_address(apart[1]) == ("gpu007", find_address(apart[0])[1])
    assert find_address(APART | {"MASTER_ADDR": "a"}) == ("a", 29500)


def test_the_first_host_of_a_list_is_that_of_slurm() -> None:
    lists = {
        "a": "a",
        "a,b": "a",
        "gpu[007-009,12],cpu1": "gpu007",
        "r[2-3]n[04,7]x": "r2n04x",
        "": "",
    }
    assert {hosts: get_first_host(hosts) for hosts in lists} == lists
