"""`make chaos`: kills runs at random, and compares what comes out."""

from tests.faults.campaign import main

main()
