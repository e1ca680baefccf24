"""What a captured step has as constants of its model: modes, hooks, and the options of torch's own modules.

Changing one afterwards (`model.bn.eval()`, `model.drop.p = 0`, `register_forward_hook`) changes what the model computes
and not what was captured, so it is looked for before every step.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from paraplan.ir.errors import PlanMismatchError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPTION = (bool, int, float, str, type(None))


class Settings:
    """Those of a model as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self._said = [(name, module, _options(module), _of(module)) for name, module in model.named_modules()]

    def check(self) -> None:
        """Whether they still are so.

        Raises:
            PlanMismatchError: one is not; names module and setting.
        """
        for name, module, options, said in self._said:
            now = _of(module, options)
            if now == said:
                continue
            key = next(key for key in said if now[key] != said[key])
            where = f"{type(module).__name__} {name!r}" if name else type(module).__name__
            if key in _HOOKS:
                raise PlanMismatchError(
                    f"{where} has other hooks than when fit was called, and a captured step runs those of then; "
                    "register them before fit, and call fit again"
                )
            raise PlanMismatchError(
                f"{where} was captured with {key}={said[key]!r} and has {key}={now[key]!r} now; set it back, or call "
                "fit again with the model as it is to train"
            )


def _options(module: nn.Module) -> tuple[str, ...]:
    """Names of the options of a module of torch's own."""
    if not type(module).__module__.startswith("torch.nn.modules"):
        return ()
    return tuple(key for key, value in vars(module).items() if key[0] != "_" and isinstance(value, _OPTION))


def _of(module: nn.Module, options: tuple[str, ...] | None = None) -> dict[str, Any]:
    own = module.__dict__
    found = {key: own.get(key) for key in (_options(module) if options is None else options)}
    found |= {key: tuple(own.get(key) or ()) for key in _HOOKS}
    return {"training": module.training, **found}
