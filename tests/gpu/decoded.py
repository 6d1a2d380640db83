"""Prints as JSON how far pixels that the first GPU decodes are from the CPU's, and the limits."""

import json

from tests.classification.test_device_decoding import MEAN, MOST, ODD, USUAL, batches, off

by_worker, by_device = (batches(USUAL | ODD, *where)[:-1] for where in (("worker",), ("device", "cuda:0")))
seen = [off(mine.images, theirs.images).float() for mine, theirs in zip(by_device, by_worker, strict=True)]
figures = {"most": max(each.max().item() for each in seen), "most allowed": MOST["cuda:0"]}
figures |= {"mean": max(each.mean((1, 2, 3)).max().item() for each in seen), "mean allowed": MEAN["cuda:0"]}
print(json.dumps(figures))
