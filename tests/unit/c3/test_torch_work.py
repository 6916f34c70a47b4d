"""What synchronous calls return speaks as torch's own Work does."""

import pytest
import torch
import torch.distributed as dist

from lakh.c3.torch_work import DoneWork


def test_a_finished_operation_answers_what_users_ask_of_work() -> None:
    tensor = torch.ones(3)
    work = DoneWork([tensor])
    assert [work.wait(), work.is_completed(), work.is_success()] == [True] * 3
    assert work.exception() is None
    assert work.result()[0] is work.get_future().wait()[0] is tensor


@pytest.mark.parametrize("name", [name for name in vars(DoneWork) if not name.startswith("_")])
def test_its_words_are_those_of_torch(name: str) -> None:
    assert hasattr(dist.Work, name)
