"""CompletedWork has the interface of torch's Work."""

import pytest
import torch
import torch.distributed as dist

from lakh.c3.torch.work import CompletedWork


def test_completed_work_behaves_like_finished_work() -> None:
    tensor = torch.ones(3)
    work = CompletedWork([tensor])
    assert [work.wait(), work.is_completed(), work.is_success()] == [True] * 3
    assert work.exception() is None
    assert work.result()[0] is work.get_future().wait()[0] is tensor


@pytest.mark.parametrize("name", [name for name in vars(CompletedWork) if not name.startswith("_")])
def test_its_methods_exist_in_torch(name: str) -> None:
    assert hasattr(dist.Work, name)
