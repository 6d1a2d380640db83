"""The sample of anchors and proposals that an R-CNN learns from is a function of the image's position."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.detection.models.sampling import draws_of, sample
from common.randomness import mix


@given(st.integers(0, 2**64 - 1))
def test_lots_are_the_hash_of_the_other_modules_in_torch(key):
    ids = torch.arange(1000)
    wanted = mix(np.arange(1000), key) >> np.uint64(3)
    assert np.array_equal(draws_of(ids, key).numpy(), wanted.astype(np.int64))


@given(st.data())
def test_a_sample_has_foreground_first_up_to_its_share_and_background_for_the_rest(data):
    kinds = data.draw(st.lists(st.sampled_from(["foreground", "background", "neither"]), min_size=1, max_size=60))
    size = data.draw(st.integers(1, 40))
    foreground = torch.tensor([kind == "foreground" for kind in kinds])
    background = torch.tensor([kind == "background" for kind in kinds])
    chosen, valid = sample(foreground, background, draws_of(torch.arange(len(kinds)), 7), size, 0.25)
    drawn = chosen[valid]
    assert len(set(drawn.tolist())) == len(drawn) and len(chosen) == min(size, len(kinds))
    assert (foreground | background)[drawn].all()
    count = min(int(size * 0.25), int(foreground.sum()))
    assert foreground[drawn].sum() == count and foreground[drawn[:count]].all()
    assert len(drawn) == min(size, count + int(background.sum()))


def test_a_sample_does_not_hang_on_the_order_of_the_places():
    ids = torch.arange(200)
    foreground, background = ids % 5 == 0, ids % 5 > 1
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    chosen, valid = sample(foreground, background, draws_of(ids, 3), 64, 0.25)
    other, also = sample(foreground[order], background[order], draws_of(ids[order], 3), 64, 0.25)
    assert valid.all() and also.all() and torch.equal(chosen, order[other])
