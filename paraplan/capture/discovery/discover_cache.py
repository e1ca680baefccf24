"""Discovered rules kept between runs: a JSON file per torch version under the user's cache folder.

Data only, decoded strictly; a file that cannot be read so is ignored with a warning, an entry that does not fit its
op is found anew. Only torch's own ops are kept on disk: what another op does may change under the same name.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from paraplan.ir.model.graph import Op
from paraplan.ir.model.op_rule import OpRule
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.struct import Value
from paraplan.rules.carried_rules import rule_fault

VERSION = 6  # of what discovery does: rules that another version found are found anew
MAX_RULES = 4096


class RulesFile(Value, frozen=True, kw_only=True):
    """What the file holds: rules by `rule_key`."""

    version: int
    torch: str
    rules: dict[str, OpRule]


def cache_path() -> Path:
    """The file for this torch version and this version of discovery."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "paraplan" / f"rules-v{VERSION}-{torch.__version__}.json"


@dataclass(frozen=True)
class RuleCache:
    """Rules known before.

    Attributes:
        path: of the file.
        known: what it held.
    """

    path: Path
    known: dict[str, OpRule]

    @classmethod
    def load(cls) -> RuleCache:
        """The file's rules; none, with a warning, where it cannot be trusted."""
        path = cache_path()
        return cls(path, _read(path))

    def get(self, key: str, op: Op, values: dict[str, TensorSpec]) -> OpRule | None:
        """The rule kept under a key, if there is one and it fits the op.

        Args:
            key: of `discover.rule_key`.
            op: of a graph.
            values: specs of the graph's values.
        """
        kept = self.known.get(key)
        if kept is None:
            return None
        wrong = rule_fault(msgspec.structs.replace(op, rule=kept), values)
        if wrong:
            warnings.warn(f"{self.path}: the rule kept for {key} is not used: {wrong}", stacklevel=2)
            return None
        return kept

    def save(self, fresh: dict[str, OpRule]) -> None:
        """Writes new rules, together with what others wrote meanwhile; a folder that cannot be written is left."""
        if not fresh:
            return
        rules = {**_read(self.path), **fresh}
        latest = dict(list(rules.items())[-MAX_RULES:])
        data = msgspec.json.encode(RulesFile(version=VERSION, torch=str(torch.__version__), rules=latest))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, delete=False) as file:
                file.write(data)
            os.replace(file.name, self.path)
        except OSError:
            return


def _read(path: Path) -> dict[str, OpRule]:
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    try:
        found = msgspec.json.decode(data, type=RulesFile)
    except msgspec.DecodeError as fault:
        warnings.warn(f"{path} is not used: {fault}; delete it", stacklevel=3)
        return {}
    if found.version != VERSION or found.torch != str(torch.__version__):
        warnings.warn(f"{path} is not used: it is version {found.version} for torch {found.torch}", stacklevel=3)
        return {}
    return found.rules
