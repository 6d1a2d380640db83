"""The command lines of tools: a wrong flag is refused in one line, once, and with exit code 2."""


def test_one_of_two_processes_says_what_is_wrong(launch) -> None:
    done = launch("multi_cpu", "-m", "tools.doctor", "--wait", "soon")
    [line] = [line for line in done.stderr.splitlines() if "--wait" in line]
    assert done.returncode == 2 and line.startswith("doctor: ") and "--help" in line and "usage:" not in done.stderr
