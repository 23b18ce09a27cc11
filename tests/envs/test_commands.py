import pytest

from unilab_fabric.envs.commands import check_range
from unilab_fabric.errors import UserError


@pytest.mark.parametrize("limits", [(0.0, 0.0), (-1.0, 2.0)])
def test_ranges_in_order_are_taken(limits):
    check_range("task.commands.forward", limits)


@pytest.mark.parametrize("limits", [(1.0, 0.0), (0.0,), (0.0, float("inf")), (float("nan"), 1.0)])
def test_other_ranges_are_refused_by_name(limits):
    with pytest.raises(UserError, match=r"task.commands.forward is \[.*\]; allowed: two finite numbers"):
        check_range("task.commands.forward", limits)
