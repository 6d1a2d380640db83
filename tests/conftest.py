"""The order of the tests, and the fixtures of those that run the real scripts."""

import contextlib
import fcntl
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from hypothesis import settings

from common.files import CACHE
from tests.harness import several
from tests.harness.drawings import draw_regions, draw_scenes, draw_stripes
from tests.harness.forked import Forks
from tests.harness.launching import ROOT, Launcher, add_small_defaults
from tests.harness.machines import Node, machines, require_namespaces
from tests.harness.outcomes import Outcome
from tests.harness.processes import Processes

# The same examples in every run, and no time limit on a busy machine.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# The slowest modules, slowest first, then the other folders of slow tests: of neighbours, and of
# the ground floor.
SLOW = """
tests/cluster/ tests/launching/test_started_by tests/compat/ tests/tools/test_doctor
tests/faults/test_elastic tests/pretended_gpu/test_equal tests/recipes/test_cls_resume
tests/recipes/test_copies tests/recipes/test_layout
tests/faults/test_campaign tests/faults/test_one_rank
tests/recipes/test_refusals tests/recipes/test_cls_signals
tests/pretended_gpu/ tests/test_readme tests/recipes/ tests/faults/ tests/test_
""".split()
NEIGHBOURS = ("tools", "compat", "cluster")
# Whose tests they are, where the folder does not say it. Those of several machines need namespaces
# or packages of the system.
ROOM_OF = {
    "faults": "recipes",
    "pretended_gpu": "recipes",
    "test_accelerate_configs.py": "launching",
    "test_benchmarks.py": "tools",
    "test_coming_from.py": "tools",
    "test_comparison.py": "tools",
    "test_readme.py": "tools",
    "faults/test_elastic.py": "cluster",
    "faults/test_strangers.py": "cluster",
    "faults/test_two_nodes.py": "cluster",
    "pretended_gpu/test_two_machines.py": "cluster",
    "launching/test_started_by.py": "cluster",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = (
        "only tests of these rooms, joined by commas, and of rooms that import them; ground: all "
        "but"
    )
    parser.addoption("--room", help=f"{help_text} {', '.join(NEIGHBOURS)}")


@functools.cache
def list_rooms_above(room: str) -> set[str]:
    """The room and all that import it. Recipes are above all of `common`; neighbours are asked for
    by their own names.
    """
    modules = [path for path in (ROOT / "common").iterdir() if not path.name.startswith("__")]
    names = {path.stem for path in modules} | {"recipes", *NEIGHBOURS}
    if room not in names:
        raise pytest.UsageError(f"--room {room}: is none of ground, {', '.join(sorted(names))}")
    if room in NEIGHBOURS:
        return {room}
    import grimp  # only here: it takes a moment

    above = grimp.build_graph("common").find_downstream_modules(f"common.{room}", as_package=True)
    return {room, "recipes"} | {name.split(".")[1] for name in above}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what `--room` does not name."""
    rooms = config.getoption("--room")
    if not rooms or collection_path.suffix != ".py":
        return None
    path = collection_path.relative_to(Path(__file__).parent)
    top = path.parts[0]
    room = ROOM_OF.get(top, top.removeprefix("test_").removesuffix(".py"))
    room = ROOM_OF.get(path.as_posix(), room)
    if rooms == "ground":
        is_selected = room not in NEIGHBOURS
    else:
        is_selected = any(room in list_rooms_above(name) for name in rooms.split(","))
    return None if is_selected else True


def pytest_configure(config: pytest.Config) -> None:
    """What tests read in this process leaves no index behind; tests of the index name a place.

    One thread per process: tests run two at a time, and threads that wait for each other on a busy
    core cost several times what they compute.
    """
    for room in (config.getoption("--room") or "ground").split(","):
        if room != "ground":
            list_rooms_above(room)  # refuses one that is not there
    os.environ[CACHE] = os.devnull
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow ones first: of two processes that run tests, the last to end is then not much later
    than the other.
    """

    def rank(item: pytest.Item) -> int:
        for index, path in enumerate(SLOW):
            if item.nodeid.startswith(path):
                return index
        return len(SLOW)

    items.sort(key=rank)


def pytest_report_header() -> list[str]:
    """The real GPUs, whose figures are worth nothing without."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if not names:
        return []
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return [f"GPUs: {', '.join(names)}; torch {torch.__version__}, NCCL {nccl}"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the figures that tests have recorded (`record_property`)."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    for report in reports:
        if report.when == "call":
            test = report.nodeid.partition("::")[2]
            for name, figure in report.user_properties:
                terminalreporter.write_line(f"{test}: {name} {figure:.4g}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Of tests that run two at a time, those marked `alone` wait for the other one's end and keep
    its next one waiting.
    """
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    # Two locks, on files that are there anyway: who waits for the second keeps others from going on
    # before.
    with (ROOT / "pyproject.toml").open("rb") as turn, (ROOT / "Makefile").open("rb") as floor:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(floor, kind)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            # Also for processes that a test has forked and left behind.
            fcntl.flock(floor, fcntl.LOCK_UN)


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """`launch("multi_cpu", [script, "--seed", 1], flags=["--num_processes", 3])`; `launch.start`
    doesn't wait for it.
    """
    return Launcher(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """`processes.run(case, *arguments, ranks=2)` runs a function on 1 to 3 gloo processes, started once."""
    started = Processes(4)
    yield started
    started.close()


@pytest.fixture(scope="session")
def run_several(forks, tmp_path_factory) -> Callable[..., dict[str, Outcome]]:
    """Run a recipe's `main` for each of several named command lines, in one world of `processes` ranks.

    run_several(2, {"a": ["--model", "test_vit"]}, recipe="recipes/cls.py") -> {"a": Outcome}. A
    case's run folder is <output_dir>/<its name>; without --output_dir it is in a new temporary
    folder. Pictures are drawn only if asked for. A run has the settings of a small one, but with
    `as_typed`: that one has no tracker and no data workers unless it says so. An unexpected error
    in any case fails the test. The ranks are forks, which start much sooner than a launch;
    `run_main` takes the forks of another server.
    """

    def run(
        processes: int,
        cases: Mapping[str, Sequence[object]],
        *,
        recipe: str | Path = "recipes/cls.py",
        pictures: bool = False,
        as_typed: bool = False,
        timeout: float = 300,
        env: Mapping[str, str] | None = None,
        run_main: Callable[..., CompletedProcess] | None = None,
    ) -> dict[str, Outcome]:
        scratch = tmp_path_factory.mktemp("several")
        commands = []
        folders = []
        for name, args in cases.items():
            args = list(map(str, args))
            if not as_typed:
                has_recipe = "".join(args[:1]).endswith(".py")
                args = list(map(str, add_small_defaults(args, args[0] if has_recipe else recipe)))
            defaults = {
                "--name": name,
                "--output_dir": scratch / "runs",
                "--tracker": "none",
                "--workers": 0,
            }
            for flag, value in defaults.items():
                if flag not in args:
                    args += [flag, str(value)]
            commands.append(args)
            output_dir = args[args.index("--output_dir") + 1]
            folders.append(Path(output_dir) / args[args.index("--name") + 1])
        file = scratch / "CASES.json"
        file.write_text(json.dumps(commands))
        main = functools.partial(several.main, Path(recipe), file, pictures)
        environment = {CACHE: None}
        if env:
            environment |= env
        done = (run_main or forks.run_main)(processes, main, environment, timeout=timeout)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        outcomes = json.loads((scratch / "OUTCOMES.json").read_text())
        return {
            name: Outcome(**outcome, folder=folder)
            for name, outcome, folder in zip(cases, outcomes, folders, strict=True)
        }

    return run


@pytest.fixture(scope="session")
def thorough(request) -> bool:
    """True if long tests are among those that run: fixtures then make the runs that only long tests
    look at.
    """
    return any(item.get_closest_marker("long") for item in request.session.items)


@pytest.fixture(scope="session")
def stripes(tmp_path_factory) -> Path:
    """199 + 23 photographs of five striped stuffs, some rarer than others: soon learnt, also when
    varied a lot.
    """
    folder = tmp_path_factory.mktemp("stripes")
    draw_stripes(folder / "train", (67, 51, 40, 27, 14))
    draw_stripes(folder / "val", (7, 5, 5, 3, 3), seed=1)
    return folder


@pytest.fixture(scope="session")
def scenes(tmp_path_factory) -> Path:
    """25 + 7 scenes of digits in COCO's format, of many sizes; every third has no box, so that some
    ranks have none.
    """
    folder = tmp_path_factory.mktemp("scenes")
    draw_scenes(folder)
    return folder


@pytest.fixture(scope="session")
def regions(tmp_path_factory) -> Path:
    """25 + 7 images with masks of three classes, of many sizes; some have no labelled pixel."""
    folder = tmp_path_factory.mktemp("regions")
    draw_regions(folder)
    return folder


@pytest.fixture(scope="session")
def rf_detr(tmp_path_factory) -> Path:
    """A small RF-DETR that knows two of the digits, as a folder of transformers."""
    pytest.importorskip("transformers")
    from tests.harness import small_rf_detr

    folder = tmp_path_factory.mktemp("rf_detr")
    small_rf_detr.build(3).export(folder, ("7", "2", "x"), small_rf_detr.SIDE)
    return folder


@pytest.fixture(scope="session")
def rf_detr_seg(tmp_path_factory) -> Path:
    """As `rf_detr`, with masks."""
    pytest.importorskip("transformers")
    from tests.harness import small_rf_detr

    folder = tmp_path_factory.mktemp("rf_detr_seg")
    detector = small_rf_detr.build(3, "rf_detr_seg")
    detector.export(folder, ("7", "2", "x"), small_rf_detr.SIDE)
    return folder


@pytest.fixture(scope="session")
def forks(tmp_path_factory) -> Forks:
    """`forks(["--max_steps", 5])` runs recipes/cls.py in a fork of a process that has imported it,
    see forked.py.
    """
    return Forks(tmp_path_factory.mktemp("forks"))


@pytest.fixture
def nodes(tmp_path_factory) -> Iterator[Callable[..., list[Node]]]:
    """`nodes(2)` gives two machines; `nodes(2, own={1: {path: other}})` two of which the second has
    `other` at `path`.
    """
    require_namespaces(tmp_path_factory.mktemp("trial"))
    with contextlib.ExitStack() as stack:

        def make(
            count: int, own: Mapping[int, Mapping[Path, Path]] | None = None, **options
        ) -> list[Node]:
            return stack.enter_context(
                machines(count, tmp_path_factory.mktemp("machines"), own, **options)
            )

        yield make
