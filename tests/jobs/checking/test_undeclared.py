"""A checked run that needs more memory than predicted names the op whose rule says too little of its kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import paraplan
from examples.models.mlp import factory
from paraplan.jobs.run import run
from paraplan.jobs.run_options import RunOptions
from paraplan.kernels import reference_kernels


def test_the_op_that_allocates_what_its_rule_does_not_say_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = reference_kernels.linear_grad_weight

    def wasteful(g: Tensor, x: Tensor, *rest: object) -> object:
        torch.cat([x.flatten()] * 50).sum()
        return kernel(g, x, *rest)  # type: ignore[arg-type]

    model, batch = factory(batch=64)
    plan = paraplan.compile(model, "local:1", example_inputs=batch, precision="fp64", microbatches=1)
    options = RunOptions(steps=2, check=True, model="examples.models.mlp:factory")
    for function in (kernel, wasteful):
        monkeypatch.setattr(reference_kernels, "linear_grad_weight", function)
        result = run(plan.data, plan.programs, options, lambda step, loss, seconds: None)
        assert result.errors is not None and bool(result.errors.failure) == (function is wasteful)
    assert result.errors is not None and "paraplan.linear_grad_weight (" in result.errors.failure
    assert "its rule says" in result.errors.failure and "workspace" in result.errors.failure
