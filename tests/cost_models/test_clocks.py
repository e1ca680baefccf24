"""The clock of a job's products: what a board at its power limit gives, from products alone to hardly any."""

import msgspec
import pytest
import torch
from torch import nn

from paraplan.capture import capture
from paraplan.cost_models.clocks import StepWork, clock_share, step_work, with_clocks
from paraplan.cost_models.machine.catalog import catalog_device, parse_cluster
from paraplan.ir.errors import ClusterError
from paraplan.ir.machine.device import check_device
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.planner.assemble import Job

H200, CAPPED, A100 = (catalog_device(kind) for kind in ("H200", "H100-HBM2e-96", "A100-80"))
ADAMW = OPTIMIZERS["adamw"]


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x)).float().square().mean()


def program(width: int, rows: int, precision: str = "bf16") -> Program:
    with torch.device("meta"):
        return capture(Net(width), {"x": torch.empty(rows, width)}, precision=precision)


@pytest.mark.parametrize("rest_s", [0.0, 0.05, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("device", [H200, CAPPED], ids=lambda device: device.kind)
def test_mean_power_is_the_limit(device, rest_s: float) -> None:
    """In units of the limit: products at c draw c² / s, the rest ρ."""
    c = clock_share(device, StepWork(1.0, rest_s))
    products_s = 1.0 / c
    power = (products_s * c * c / device.power_share + rest_s * device.rest_power_share) / (products_s + rest_s)
    assert power == pytest.approx(1.0) if c < device.boost_share else power <= 1.0


def test_between_products_alone_and_the_highest_clock() -> None:
    clocks = [clock_share(H200, StepWork(1.0, rest_s)) for rest_s in (0.0, 0.1, 0.5, 1.0, 2.0, 9.0)]
    assert clocks[0] == pytest.approx(H200.power_share**0.5)
    assert clocks == sorted(clocks) and clocks[-1] == H200.boost_share == clock_share(H200, StepWork(0.0, 1.0))


def test_a_board_of_which_no_power_is_known_runs_as_products_alone() -> None:
    plain = msgspec.structs.replace(H200, rest_power_share=0.0)
    assert clock_share(plain, StepWork(1.0, 5.0)) == pytest.approx(H200.power_share**0.5)


def test_small_products_leave_a_board_cool() -> None:
    """The update and the norm take most of a step of few rows, products of one of many."""
    small, large = (clock_share(H200, step_work(H200, program(4096, rows), ADAMW)) for rows in (256, 65536))
    assert small == H200.boost_share
    assert H200.power_share**0.5 < large < 1.0


def test_float32_meets_no_limit() -> None:
    work = step_work(H200, program(1024, 4096, "fp32"), ADAMW)
    assert work.products_s == 0.0 and work.rest_s > 0.0


def test_a_job_has_its_clocks_once() -> None:
    made = Job(program(4096, 65536), parse_cluster("8xH100"), ADAMW, ModelRef(display="net"), {})
    device = made.cluster.groups[0].device
    assert device.clock_share == pytest.approx(clock_share(device, step_work(device, made.program, ADAMW)))
    assert with_clocks(made.cluster, program(4096, 256), ADAMW) is made.cluster
    for kind in ("A100-80", "cpu"):
        cluster = parse_cluster(f"8x{kind}")
        assert with_clocks(cluster, made.program, ADAMW) is cluster


def test_clocks_that_no_board_has_are_refused() -> None:
    with pytest.raises(ClusterError, match="clock_share"):
        check_device("c", msgspec.structs.replace(H200, clock_share=-1.0), "device")
    with pytest.raises(ClusterError, match=r"rest_power_share is 1\.5"):
        check_device("c", msgspec.structs.replace(H200, rest_power_share=1.5), "device")
