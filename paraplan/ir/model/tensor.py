"""What a tensor is before it has values: shape and dtype."""

from __future__ import annotations

import math

from paraplan.ir.struct import Value

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}

COMPLEX = frozenset({"complex64", "complex128"})
FLOATS8 = frozenset({"float8_e4m3fn", "float8_e5m2"})
FLOATS = FLOATS8 | {"float64", "float32", "bfloat16", "float16"}
INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8"})


class TensorSpec(Value, frozen=True, array_like=True):
    """Shape (global unless said otherwise) and dtype (torch's name, e.g. `float32`)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a dense tensor of this spec."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def is_float(self) -> bool:
        """Whether values may carry gradients."""
        return self.dtype in FLOATS or self.dtype in COMPLEX

    @property
    def real_bytes(self) -> int:
        """Bytes of one real number of an element, which say what it is rounded to."""
        return DTYPE_BYTES[self.dtype] // (2 if self.dtype in COMPLEX else 1)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"
