"""Numbers that depend on the rank and the microbatch, as text in the arguments of instructions.

"#0:256,m:1024" means
256 * coordinate on mesh axis 0 + 1024 * microbatch index. "#" alone is 0. "#0+3%4:256" is
256 * ((coordinate + 3) mod 4): where a block that goes round a ring of 4 came from. "+" is always 1: "#0:256,+:64".
"""

from __future__ import annotations


def place_of(coordinates: tuple[int, ...], mesh_shape: tuple[int, ...]) -> int:
    """The place of a rank among its mesh's devices, which are row-major."""
    place = 0
    for coordinate, size in zip(coordinates, mesh_shape, strict=True):
        place = place * size + coordinate
    return place


def parse_offset(text: str) -> tuple[tuple[str, int], ...]:
    """`"#0:256,m:1024"` to (("0", 256), ("m", 1024)).

    A key is a mesh axis number, "m", either turned ("0+3%4"), or "+".
    """
    body = text[1:]
    if not body:
        return ()
    return tuple((key, int(step)) for key, step in (term.split(":") for term in body.split(",")))


def offset_value(text: str, coordinates: tuple[int, ...], microbatch: int) -> int:
    """The number an offset stands for on a rank, in a microbatch.

    Args:
        text: of the offset.
        coordinates: of the rank on its mesh.
        microbatch: its number.
    """

    def place(key: str) -> int:
        if key == "+":
            return 1
        turned, _, size = key.partition("%")
        name, _, by = turned.partition("+")
        index = microbatch if name == "m" else coordinates[int(name)]
        return (index + int(by)) % int(size) if size else index

    return sum(step * place(key) for key, step in parse_offset(text))
