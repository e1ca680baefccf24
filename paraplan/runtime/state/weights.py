"""Where a rank's shards get their values: a model in memory, seeded initialisation, or safetensors files.

None of the last two ever holds the model. A file gives slices: a rank reads its own part of each tensor. Seeded
initialisation makes one module at a time (its own parameters and buffers, not its children's), keeps this rank's
parts of them and frees the rest. What a module becomes is a function of the seed, the module's name and the model's
class alone: its `reset_parameters` (or `_reset_parameters`), then the `_init_weights` of the Hugging Face model
around it for the module and each module above it, all under a seed derived from (seed, module name). So it is the
same on every rank, under every plan, and in `initialise(model, seed)`, which fills a whole model on one device. It
is not what the model's constructor would have drawn; weights that a constructor itself writes are not reproduced.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.machine.mesh import Layout
from paraplan.ir.model.program import Program, Source, source_of
from paraplan.runtime.state.params import Dims, Values, Whole, cut, full_tensors, slices


def values_of(program: Program, model: nn.Module, weights: str | Path | None = None, seed: int = 0) -> Values:
    """The source of a model's values.

    Args:
        program: names them.
        model: with values, or on meta.
        weights: safetensors files; see `FileValues`. They go before the model's own values.
        seed: of the initialisation of what is on meta and in no file.
    Raises:
        PlanMismatchError: something has no value, or another shape than the program says.
    """
    if weights is None and not _on_meta(program, model):
        return Whole(full_tensors(program, model))
    seeded = SeededValues(program, model, seed)
    return seeded if weights is None else FileValues(program, weights, seeded)


def _on_meta(program: Program, model: nn.Module) -> bool:
    named = dict(model.named_parameters(remove_duplicate=False))
    return any(name in named and named[name].is_meta for name in program.params)


def module_seed(seed: int, module: str) -> int:
    """The seed a module is initialised under, in [0, 2^63)."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{module}".encode()).digest()[:8], "big") >> 1


def module_values(model: nn.Module, name: str, seed: int) -> dict[str, Tensor]:
    """What the parameters and buffers of one module, children left out, become; by their names in it.

    Those with values keep them. The model itself is unchanged.

    Args:
        model: that has the module.
        name: of the module in it.
        seed: of the run.
    Raises:
        PlanMismatchError: the module does not initialise one of them.
    """
    module = model.get_submodule(name)
    slots = [(module._parameters, key, x) for key, x in module._parameters.items() if x is not None]
    slots += [(module._buffers, key, x) for key, x in module._buffers.items() if x is not None]
    fresh: dict[str, Tensor] = {}
    try:
        for slot, key, old in slots:
            if old.is_meta:
                blank = torch.full_like(old, float("nan"), device="cpu") if _may_be_nan(old) else None
                fresh[key] = torch.empty_like(old, device="cpu") if blank is None else blank
                slot[key] = nn.Parameter(fresh[key], old.requires_grad) if slot is module._parameters else fresh[key]
        if fresh:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(module_seed(seed, name))
                _initialise(model, name)
        found = {key: slot[key].detach() for slot, key, _ in slots}
    finally:
        for slot, key, old in slots:
            slot[key] = old
    for key, value in found.items():
        whole = _may_be_nan(value) and not bool(value.isnan().any())
        if key in fresh and not whole:
            what = f"{name}.{key}" if name else key
            raise PlanMismatchError(
                f"{what} is on meta and {type(module).__name__} does not initialise it: give the module a "
                "reset_parameters() (the Hugging Face model: an _init_weights) that does, pass weights=, or build the "
                "model under paraplan.runtime.state.weights.parameters_on_meta(), which keeps buffers"
            )
    return found


def _may_be_nan(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _initialise(model: nn.Module, name: str) -> None:
    """Run the initialisations that concern one module, as it would be after its construction."""
    module = model.get_submodule(name)
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()
    parts = name.split(".") if name else []
    above = [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
    owners = [at for at in above if callable(getattr(model.get_submodule(at), "_init_weights", None))]
    for at in above:
        owner = next((each for each in owners if at == each or at.startswith(f"{each}.") or not each), None)
        if owner is not None:
            model.get_submodule(owner)._init_weights(model.get_submodule(at))  # type: ignore[operator]


class SeededValues:
    """A model on meta, initialised module by module; see the module's head.

    Args:
        program: names parameters and buffers.
        model: unchanged but while a module is initialised.
        seed: the same on every rank.
    """

    def __init__(self, program: Program, model: nn.Module, seed: int) -> None:
        self.model, self.seed = model, seed
        self.specs = {f"param:{name}": spec.spec for name, spec in program.params.items()}
        self.specs |= {f"buffer:{name}": spec for name, spec in program.buffers.items()}
        self._held: tuple[str, dict[str, Tensor]] = ("", {})

    def shard(self, name: str, layout: Layout, mesh_shape: Dims, coordinates: Dims) -> Tensor:
        """Part of a tensor; its module's tensors are held until another module is asked for.

        Args:
            name, layout, mesh_shape, coordinates: as of `Values.shard`.
        """
        module, _, key = source_of(name)[1].rpartition(".")
        if not self._held[1] or self._held[0] != module:
            self._held = ("", {})
            self._held = (module, module_values(self.model, module, self.seed))
        full = self._held[1][key]
        if tuple(full.shape) != self.specs[name].shape:
            raise PlanMismatchError(f"{name}: the plan says {self.specs[name].shape}, the model {tuple(full.shape)}")
        return cut(full, layout, mesh_shape, coordinates)


def initialise(model: nn.Module, seed: int) -> nn.Module:
    """Give a model on meta the values that ranks of a plan give their shards; in place, on cpu.

    Raises:
        PlanMismatchError: as `module_values`.
    """
    made = {name: module_values(model, name, seed) for name, _ in model.named_modules()}
    kept: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # what is replaced lives on, lest its id be given again
    for name, values in made.items():
        module = model.get_submodule(name)
        for key, value in values.items():
            if key in module._buffers:
                module._buffers[key] = value
                continue
            old = module._parameters[key]
            assert old is not None
            module._parameters[key] = kept.setdefault(id(old), (old, nn.Parameter(value, old.requires_grad)))[1]
    return model


def fill(program: Program, model: nn.Module, values: Values) -> nn.Module:
    """Give a model every value a plan's ranks have shards of, whole; in place, on cpu.

    All values are made before any is given: a module is initialised with what is above it in the model, which would
    write over parameters that have their values already.

    Args:
        program: whose parameters and buffers.
        model: that is filled.
        values: where they come from.
    """
    full = {name: values.shard(f"param:{name}", (), (), ()) for name in program.params}
    buffers = {name: values.shard(f"buffer:{name}", (), (), ()).clone() for name in program.buffers}
    for name, spec in program.params.items():
        old = model.get_parameter(name)
        made = nn.Parameter(full.pop(name).to(old.dtype, copy=True), old.requires_grad)
        for each in (name, *spec.aliases):
            module, _, key = each.rpartition(".")
            model.get_submodule(module)._parameters[key] = made
    for name, value in buffers.items():
        module, _, key = name.rpartition(".")
        model.get_submodule(module)._buffers[key] = value
    return model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have their parameters on meta, and their buffers and single numbers as they are made."""
    register: Callable[..., None] = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.dim() and not param.is_meta:
            param = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class FileValues:
    """Tensors in safetensors files.

    Args:
        program: names them; a tied parameter may stand under any of its names.
        path: a file, an index (`*.safetensors.index.json`), or a directory with either.
        rest: gives buffers that are in no file.
    Raises:
        PlanMismatchError: no such file, or parameters that are in none of them.
    """

    def __init__(self, program: Program, path: str | Path, rest: Values) -> None:
        self.path, self.rest = Path(path), rest
        where = _tensor_files(self.path)
        wanted = {f"param:{name}": (name, *spec.aliases) for name, spec in program.params.items()}
        wanted |= {f"buffer:{name}": (name,) for name in program.buffers}
        self.shapes = {f"param:{name}": spec.spec.shape for name, spec in program.params.items()}
        self.shapes |= {f"buffer:{name}": spec.shape for name, spec in program.buffers.items()}
        self.found = _match(where, wanted) or _match(where, wanted, inner=True)
        sources = [source_of(name) for name in wanted if name not in self.found]
        missing = [name for source, name in sources if source is Source.PARAMETER]
        if missing:
            raise PlanMismatchError(
                f"{self.path} lacks {', '.join(missing[:5])} ({len(missing)} of {len(program.params)} parameters); its "
                f"names look like {', '.join(list(where)[:3])}. Give the weights of this model, or rename them"
            )

    def shard(self, name: str, layout: Layout, mesh_shape: Dims, coordinates: Dims) -> Tensor:
        """This rank's part of a tensor, and nothing more, read from its file.

        Args:
            name, layout, mesh_shape, coordinates: as of `Values.shard`.
        """
        at = self.found.get(name)
        if at is None:
            return self.rest.shard(name, layout, mesh_shape, coordinates)
        file, key = at
        with safe_open(file) as opened:
            part = opened.get_slice(key)
            shape = tuple(part.get_shape())
            if shape != self.shapes[name]:
                raise PlanMismatchError(
                    f"{name.replace(':', ' ')}: the plan says {self.shapes[name]}, {file} has {shape}"
                )
            return part[slices(shape, layout, mesh_shape, coordinates)] if shape else opened.get_tensor(key)  # type: ignore[no-any-return]


def safe_open(file: Path) -> Any:
    """A safetensors file, open for reading on cpu.

    Raises:
        PlanMismatchError: it is none, or safetensors is not installed.
    """
    try:
        import safetensors  # noqa: PLC0415 - optional
    except ImportError as fault:
        raise PlanMismatchError(f"weights= needs safetensors ({fault}); pip install 'paraplan[hf]'") from None
    try:
        return safetensors.safe_open(file, framework="pt", device="cpu")
    except (safetensors.SafetensorError, OSError) as fault:
        raise PlanMismatchError(f"{file} is no readable safetensors file: {fault}") from None


def _tensor_files(path: Path) -> dict[str, tuple[Path, str]]:
    """Tensor name -> the file it is in and its name there."""
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors.index.json"))
        files = sorted(path.glob("*.safetensors"))
        if not indices and not files:
            raise PlanMismatchError(f"weights: {path} holds no *.safetensors file")
        return (
            _tensor_files(indices[0]) if indices else {k: v for file in files for k, v in _tensor_files(file).items()}
        )
    if not path.exists():
        raise PlanMismatchError(f"weights: there is no {path}")
    if path.suffix == ".json":
        try:
            listed: Mapping[str, str] = json.loads(path.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as fault:
            raise PlanMismatchError(f"weights: {path} is no index of safetensors files: {fault!r}") from None
        return {name: (path.parent / file, name) for name, file in listed.items()}
    with safe_open(path) as opened:
        return {name: (path, name) for name in opened.keys()}  # noqa: SIM118 - no mapping


def _match(
    where: Mapping[str, tuple[Path, str]], wanted: Mapping[str, tuple[str, ...]], inner: bool = False
) -> dict[str, tuple[Path, str]]:
    """Where each value is, under any of its names; `inner`: names without their first part, as a model saved without
    the head around it has them."""
    found = {}
    for name, keys in wanted.items():
        known = [key.partition(".")[2] if inner else key for key in keys]
        at = next((where[key] for key in known if key in where), None)
        if at is not None:
            found[name] = at
    return found
