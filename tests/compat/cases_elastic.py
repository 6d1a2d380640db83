"""Elastic states restore what was committed, the run decorator repeats after a failure, and the
sampler deals out the rest.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

import compat.horovod as hvd
from common.errors import Refused
from compat.horovod.exceptions import HostsUpdatedInterrupt


def build_state(**values: object) -> hvd.elastic.TorchState:
    torch.manual_seed(hvd.rank())
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    return hvd.elastic.TorchState(model, optimizer, schedule=schedule, scaler=scaler, **values)


def train(state: hvd.elastic.TorchState) -> torch.Tensor:
    state.optimizer.zero_grad()
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    state.schedule.step()
    state.scaler.load_state_dict({**state.scaler.state_dict(), "scale": 2.0})
    return state.model.weight.detach().clone()


def test_restored_as_committed() -> None:
    state = build_state(epoch=3, history=[1], word=str(hvd.rank()))
    state.sync()
    assert (state.epoch, state.word) == (3, "0")
    assert torch.equal(*hvd.allgather(state.model.weight.detach()).split(1)[:2])
    before = train(state)
    state.epoch = 4
    rate = state.optimizer.param_groups[0]["lr"]
    state.history.append(2)
    state.commit()
    for _ in range(2):  # training after a restore does not change the commit
        after = train(state)
        state.scaler.load_state_dict({**state.scaler.state_dict(), "scale": 1.0})
        state.epoch += 1
        state.history.append(3)
        assert not torch.equal(before, after) and state.optimizer.param_groups[0]["lr"] != rate
        state.restore()
        assert torch.equal(state.model.weight, before) and (state.epoch, state.history) == (
            4,
            [1, 2],
        )
        assert state.optimizer.param_groups[0]["lr"] == rate and state.schedule.last_epoch == 1
        assert state.scaler.get_scale() == 2.0
    assert torch.equal(train(state), after)  # the moments were restored too


def test_repeated_after_failures() -> None:
    state = build_state(step=0)
    calls = []
    resets = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def run(state: hvd.elastic.TorchState, word: str) -> str:
        """Fails once on all ranks, then is interrupted."""
        calls.append(state.step)
        while state.step < 6:
            state.step += 1
            if state.step == 2:
                state.commit()
            if state.step == 4 and len(calls) == 1:
                hvd.allreduce(torch.ones(1 + hvd.rank()), name="unequal")
            if state.step == 5 and len(calls) == 2:
                raise HostsUpdatedInterrupt
        return word

    assert run(state, "done") == "done" and run.__name__ == "run"
    # Rolled back to the commit, and then not.
    assert calls == [0, 2, 5] and resets == [hvd.size()] * 2

    @hvd.elastic.run
    def hopeless(state: hvd.elastic.TorchState) -> None:
        calls.append("again")
        hvd.allreduce(torch.ones(1 + hvd.rank()), name="unequal")

    with pytest.raises(hvd.HorovodInternalError, match="mismatched shapes"):
        hopeless(build_state())
    assert calls.count("again") == 4


def test_the_sampler_deals_out_the_rest() -> None:
    """Batches of 3 per rank of 20 samples: what is left after two is dealt out again."""
    data = range(20)
    size = hvd.size()

    def list_all(sampler) -> list[int]:
        indices = []
        for indices_of_rank in hvd.allgather_object(list(sampler)):
            indices += indices_of_rank
        return indices

    for shuffle in (False, True):
        sampler = hvd.elastic.ElasticSampler(data, shuffle=shuffle, seed=3)
        assert set(list_all(sampler)) == set(data) and len(list(sampler)) == len(sampler) == -(
            -20 // size
        )
        done = {index for own in hvd.allgather_object(list(sampler)[:6]) for index in own}
        for batch in range(2):
            sampler.record_batch(batch, 3)
        restored = hvd.elastic.ElasticSampler(data, shuffle=shuffle, seed=3)
        restored.load_state_dict(sampler.state_dict())
        assert set(list_all(restored)) == set(data) - done
        order = list_all(sampler)
        sampler.set_epoch(1)
        assert set(list_all(sampler)) == set(data) and (list_all(sampler) != order) == shuffle
        sampler.record_batch(0, 20)
        sampler.reset()
        assert list(sampler) == [] and len(sampler) == 0
    assert list(hvd.elastic.ElasticSampler(range(1))) == [0]  # fewer samples than ranks: repeated


class Odd:
    """A class that no reader knows."""


def test_commits_on_disk() -> None:
    """What does not fit to a script or can't be kept is refused. That a later start continues:
    test_elastic.py.
    """
    state = build_state(epoch=1)
    other_state = hvd.elastic.TorchState(nn.Linear(2, 1), other=1)
    state.commit()
    hvd.barrier()
    assert state._path.exists() and not list(state._path.parent.glob(".*"))
    other_state._path = state._path
    text = "holds epoch, model, optimizer, scaler, schedule, and this script's state model"
    with pytest.raises(ValueError, match=text):
        hvd.elastic.run(lambda state: None)(other_state)
    if hvd.rank() == 0:
        with pytest.raises(TypeError, match=r"the elastic state holds .*Odd"):
            hvd.elastic.TorchState(odd=Odd()).commit()
        state._remove()
        assert not state._path.exists()
        state._path = Path("/proc/nowhere/commit.pt")
        with pytest.raises(
            Refused, match=r"can't write the commit /proc/nowhere/.*set HOROVOD_ELASTIC_COMMITS"
        ):
            state.commit()
