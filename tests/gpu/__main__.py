"""`make gpu`: the checks on this machine's GPUs."""

from tests.gpu.report import main

main()
