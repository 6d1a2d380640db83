"""A recipe at a pace at which machines can come and go before it ends."""

# Alone it is slower still.
PACED = """
import os, runpy, sys, time
from common.data.loader import Prefetcher
take = Prefetcher.take
def take_slowly(feed):
    time.sleep(0.4 if os.environ["WORLD_SIZE"] == "1" else 0.03)
    return take(feed)
Prefetcher.take = take_slowly
sys.argv[0] = "recipes/cls.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
