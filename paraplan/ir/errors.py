"""The one exception tree: what went wrong, where, the numbers, and what to do next.

Every message names the place (op and source line, file and field, stage, rank), the numbers that did not
fit, and a way out. `assert` is kept for bugs of our own.
"""

from __future__ import annotations

from collections.abc import Callable

from paraplan.ir.option_words import PYTHON, Flags, Phrase


class ParaplanError(Exception):
    """Base of every error a user can meet.

    Args:
        message: what is known. Where parts follow, each `{}` stands for the next of them (`option_words.Phrase`).
        parts: such as options, which Python and the command line write differently; other errors.
    """

    def __init__(self, message: str | Phrase = "", *parts: object) -> None:
        super().__init__(message, *parts)

    def __str__(self) -> str:
        return self.written(PYTHON)

    def written(self, flags: Flags) -> str:
        """The message in the words of an interface."""
        message, *parts = self.args or ("",)
        return message.written(flags) if isinstance(message, Phrase) else Phrase(str(message), *parts).written(flags)


class CaptureError(ParaplanError):
    """The model cannot be traced; carries the user's own source line and the remedy."""


class UnsupportedOpError(ParaplanError):
    """An op has no meaning in the program (not merely no sharding rule)."""


class ClusterError(ParaplanError):
    """A cluster description is malformed or describes no machine."""


class CostModelError(ParaplanError):
    """A cost was asked for with arguments that make no sense."""


class ProfileError(ParaplanError):
    """A profile cannot be read, or holds what no measurement gives."""


class ConstraintError(ParaplanError):
    """The user's pinned choices contradict each other, the model or the cluster."""


class MixedSamples(ConstraintError):
    """An op mixes samples; `op` names it and the user's line."""

    def __init__(self, message: str, op: str) -> None:
        super().__init__(message)
        self.op = op


class NoPlanError(ParaplanError):
    """No plan was found.

    A search meets many of these and shows one, and how much is missing may take a solver to say: `explained` runs it,
    which a search calls of the error it ends with. Reading the text never does.

    Args:
        message: what is known.
        explain: finds out more, and gives the whole message.

    Attributes:
        over_bytes: by how much the leanest of what was tried does not fit; 0 where that is not known.
    """

    over_bytes = 0

    def __init__(self, message: str | Phrase, explain: Callable[[], str] | None = None) -> None:
        super().__init__(message)
        self._explain = explain

    def explained(self) -> NoPlanError:
        """This error with all there is to say."""
        return self if self._explain is None else type(self)(self._explain())

    def __reduce__(self) -> tuple[type[NoPlanError], tuple[str]]:
        return type(self), (str(self),)


class InfeasibleError(NoPlanError):
    """Proved: no plan exists under the given limits."""


class SolverLimitError(NoPlanError):
    """Not proved: what was tried, in the time there was, did not fit."""

    @classmethod
    def of_over(cls, message: str, over_bytes: int) -> SolverLimitError:
        """With what the leanest of what was tried is over by."""
        found = cls(message)
        found.over_bytes = over_bytes
        return found


class InvalidPlanError(ParaplanError):
    """A plan (or a piece of one) breaks a rule of legality."""


class PlanMismatchError(ParaplanError):
    """A legal plan meant for another model, cluster or version."""


class CodegenError(ParaplanError):
    """A rank program could not be turned into modules."""


class RuntimeFailure(ParaplanError):
    """Running a plan failed; names the rank and the action."""


class CheckError(ParaplanError):
    """A step is not that of the user's eager model, of the program on one device, or not what was predicted."""
