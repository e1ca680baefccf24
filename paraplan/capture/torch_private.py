"""What capture alone needs of torch's private or experimental modules: traces under way, exports, autograd's functions.

What it shares with kernels is in `kernels.torch_private`. Names here are ours; the tests passed with torch 2.13 and
2.11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    _DisableTorchDispatch,
    _dispatch_keys,
    _ExcludeDispatchKeyGuard,
    _FunctionBase,
    _len_torch_dispatch_stack,
)
from torch._C._functorch import peek_interpreter_stack
from torch._export import utils as _export_utils
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_impls import op_implementations_dict
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.export import exported_program as _exported_program
from torch.fx import Graph, Node, Proxy
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    set_proxy_slot,
)
from torch.jit import ScriptFunction, optimized_execution
from torch.nn.modules import module as _module
from torch.overrides import _get_current_function_mode_stack

from paraplan.ir.process.memo import SESSION

__all__ = [
    "Recording",
    "below_modes",
    "composites_known",
    "drop_refused",
    "functions_applied_by",
    "global_hook",
    "is_own",
    "is_region",
    "lazy_modules",
    "recording_graph",
    "recording_state",
    "run_function",
    "scripts_by_op",
    "storage_key",
    "trace_as",
    "trace_ops",
    "traced_as",
    "unrecorded",
]

trace_ops = make_fx


def is_region(target: object) -> bool:
    """Whether a call runs another graph (a no_grad region, a branch)."""
    return isinstance(target, HigherOrderOperator)


_GLOBAL_HOOKS = {
    "register_module_forward_hook": _module._global_forward_hooks,
    "register_module_forward_pre_hook": _module._global_forward_pre_hooks,
    "register_module_full_backward_hook": _module._global_backward_hooks,
    "register_module_full_backward_pre_hook": _module._global_backward_pre_hooks,
}


def global_hook() -> str:
    """What a hook of all modules was registered with, by other code than torch's (its own only look on); "" where there
    is none."""
    for name, hooks in _GLOBAL_HOOKS.items():
        if hooks and any(str(getattr(hook, "__module__", "")).split(".")[0] != "torch" for hook in hooks.values()):
            return name
    return ""


def lazy_modules() -> AbstractContextManager[None]:
    """Under it, a graph module writes its Python code when that is first run, not after every pass over its graph."""
    return _use_lazy_graph_module(True)


@contextmanager
def scripts_by_op() -> Iterator[None]:
    """Under it, functions of `torch.jit` run op by op: those compiled after a few calls have a backward of their own,
    which no trace sees."""
    function: Any = ScriptFunction
    run = function.__call__

    def call(self: Any, *args: object, **kwargs: object) -> object:
        self._debug_flush_compilation_cache()
        return run(self, *args, **kwargs)

    function.__call__ = call
    try:
        with optimized_execution(False):
            yield
    finally:
        function.__call__ = run


def recording_graph() -> Graph:
    """The fx graph the running `trace_ops` records into."""
    mode = get_proxy_mode()
    assert mode is not None, "recording_graph outside trace_ops"
    graph = mode.tracer.graph
    assert isinstance(graph, Graph)
    return graph


def traced_as(tensor: Tensor) -> object:
    """What a trace under way knows a tensor as; None where there is none, or it does not know the tensor."""
    mode = get_proxy_mode()
    return None if mode is None else get_proxy_slot(tensor, mode.tracer, None)


def is_own(tensor: Tensor) -> bool:
    """Whether the trace under way knows a tensor as what a call made, and no view."""
    known = traced_as(tensor)
    node = getattr(getattr(known, "proxy", None), "node", None)
    return node is not None and node.op == "call_function" and not tensor._is_view()


def trace_as(tensor: Tensor, known: object) -> None:
    """Has the trace under way know a tensor as this, which `traced_as` gave."""
    mode = get_proxy_mode()
    assert mode is not None, "trace_as outside a trace"
    set_proxy_slot(tensor, mode.tracer, known)


_LIBRARIES = ("torch", "paraplan")


_PRE_DISPATCH = DispatchKeySet(DispatchKey.PreDispatch)


class Recording:
    """The trace under way, and appending to it without tracing."""

    def __init__(self, tracer: Any) -> None:
        self.tracer, self._modes = tracer, _len_torch_dispatch_stack()

    @classmethod
    def of_library_modes(cls) -> Recording | None:
        """The trace under way; None where there is none, or a function mode is active that is neither torch's nor
        ours."""
        mode = get_proxy_mode()
        modes = _get_current_function_mode_stack()
        ours = all(type(each).__module__.partition(".")[0] in _LIBRARIES for each in modes)
        return cls(mode.tracer) if mode is not None and ours else None

    def is_current(self) -> bool:
        """Whether what is called now is recorded by this trace, no mode that was entered since having a say."""
        mode = get_proxy_mode()
        return mode is not None and mode.tracer is self.tracer and _len_torch_dispatch_stack() == self._modes

    def last(self) -> Node:
        """The node recorded last."""
        return next(iter(reversed(self.tracer.graph.nodes)))

    def node_of(self, x: Tensor) -> Node | None:
        """What a tensor is recorded as; None where it is not, is not dense, its value is known, or a size is not."""
        known = get_proxy_slot(x, self.tracer, None)
        if known is None or known.constant is not None or getattr(x, "constant", None) is not None:
            return None
        if x.layout is not torch.strided or x._has_symbolic_sizes_strides:
            return None
        node = known.proxy.node
        return node if isinstance(node, Node) else None

    def know(self, x: Tensor, node: Node) -> None:
        """Has a tensor recorded as a node."""
        set_proxy_slot(x, self.tracer, _ProxyTensor(Proxy(node, self.tracer), None))

    def described(self, x: Tensor) -> object:
        """What torch's functions see of a tensor without data."""
        keys = _dispatch_keys(x).raw_repr()
        return x.dtype, x.shape, x.stride(), x.storage_offset(), x.device, x.requires_grad, keys

    def append(self, target: Callable[..., Any], args: Any, kwargs: Any, meta: Mapping[str, Any]) -> Node:
        """A call after the last node, where the module being called now says.

        Args:
            target, args, kwargs: of the call.
            meta: of an equal call.
        """
        tracer = self.tracer
        packet = getattr(target, "overloadpacket", None)
        name = None if packet is None else tracer.graph._target_to_str(packet.__name__)
        traces, tracer.record_stack_traces = tracer.record_stack_traces, False
        try:
            node = tracer.create_node("call_function", target, args, kwargs, name)
        finally:
            tracer.record_stack_traces = traces
        node.meta |= {key: meta[key] for key in ("val", "tensor_meta", "stack_trace") if key in meta}
        assert isinstance(node, Node)
        return node

    def paused_functions(self) -> AbstractContextManager[Any]:
        """Under it, functions are called past all modes of functions."""
        return DisableTorchFunction()


def drop_refused() -> None:
    """Takes back what the trace under way recorded last, where torch refused to run it: an op without a result."""
    mode = get_proxy_mode()
    if mode is None:
        return
    for node in reversed(mode.tracer.graph.nodes):
        if node.op != "call_function" or "val" in node.meta:
            return
        if isinstance(node.target, OpOverload) and not node.users:
            mode.tracer.graph.erase_node(node)


def recording_state() -> object:
    """What of the state of the process has a say in what is recorded; None under autocast, a transform of `torch.func`
    or forward-mode derivatives."""
    if peek_interpreter_stack() is not None or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return None
    if forward_ad._current_level >= 0:
        return None
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        *(flag() for flag in _FLAGS),
    )


_KERNELS = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp", "mkldnn", "cudnn")


_FLAGS = [torch.are_deterministic_algorithms_enabled, *(getattr(torch._C, f"_get_{each}_enabled") for each in _KERNELS)]
"""Switches that kernels are chosen by, and the strides of their results with them."""


@contextmanager
def unrecorded() -> Iterator[None]:
    """Under it, a trace before dispatch records nothing, and functions are called past all modes of functions."""
    with _ExcludeDispatchKeyGuard(_PRE_DISPATCH), DisableTorchFunction():
        yield


def below_modes() -> AbstractContextManager[Any]:
    """Under it, ops are asked of no dispatch mode."""
    return _DisableTorchDispatch()  # type: ignore[no-any-return]


def storage_key(tensor: Tensor) -> int:
    """A number no other living storage has."""
    return int(tensor.untyped_storage()._cdata)


def run_function(cls: type, *args: Any, **kwargs: Any) -> Any:
    """`cls.apply(*args, **kwargs)` of an autograd.Function, past `functions_applied_by`."""
    return _FunctionBase.__dict__["apply"].__get__(None, cls)(*args, **kwargs)


@contextmanager
def functions_applied_by(apply: Callable[..., object]) -> Iterator[None]:
    """Under it, `F.apply(...)` of an autograd.Function is `apply(F, ...)`, also where `F.apply` was kept in a variable
    before: that calls what the base class has at the moment."""
    _SingleLevelFunction.apply = classmethod(apply)
    try:
        yield
    finally:
        del _SingleLevelFunction.apply


@contextmanager
def composites_known() -> Iterator[None]:
    """Under it, `run_decompositions` makes the tables that keep composite ops whole once a process, and lists these ops
    once a call: else both take longer than the export of a small model."""
    utils, program = _export_utils, _exported_program
    listed, listing = program._collect_all_valid_cia_ops, utils._materialize_cpp_cia_ops
    kept = program._override_composite_implicit_decomp

    def known() -> Any:
        listing()
        utils._materialize_cpp_cia_ops = lambda: None  # else again for every namespace
        try:
            return listed()
        finally:
            utils._materialize_cpp_cia_ops = listing

    @contextmanager
    def override(callables: dict[OpOverload, Callable[..., object]]) -> Iterator[None]:
        whole = [op for op, call in callables.items() if call is utils._special_op_to_preserve_cia]
        with kept({op: call for op, call in callables.items() if call is not utils._special_op_to_preserve_cia}):
            tables = {op: (op.py_kernels.copy(), op_implementations_dict.get(op)) for op in whole}
            try:
                for op, before in tables.items():
                    _keep_whole(op, before, kept)
                yield
            finally:
                for op, before in tables.items():
                    _set_tables(op, before)

    program._collect_all_valid_cia_ops, program._override_composite_implicit_decomp = known, override
    try:
        yield
    finally:
        program._collect_all_valid_cia_ops, program._override_composite_implicit_decomp = listed, kept


_Tables = tuple[dict[Any, Any], Any]
"""Of an op: its kernels in Python, and how a fake mode runs it."""


_WHOLE: dict[OpOverload, tuple[_Tables, _Tables]] = SESSION.owned("capture.torch_private.whole", {})
"""Tables as they were, and as they are where the op is kept whole."""


def _keep_whole(op: OpOverload, before: _Tables, kept: Callable[..., AbstractContextManager[None]]) -> None:
    known = _WHOLE.get(op)
    if known is None or known[0] != before:
        with kept({op: _export_utils._special_op_to_preserve_cia}):
            known = before, (op.py_kernels.copy(), op_implementations_dict.get(op))
        _WHOLE[op] = known
    _set_tables(op, known[1])


def _set_tables(op: OpOverload, tables: _Tables) -> None:
    kernels, fake = tables
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()
    if fake is None:
        op_implementations_dict.pop(op, None)
    else:
        op_implementations_dict[op] = fake
