"""Differential fuzzing of the header parser against safetensors' Rust.

    python tests/fuzz_header.py --inputs 200000 [--seed 0]

Each input is a whole file: a real header or a generated one, changed in its tokens, in its bytes and in what surrounds
it. Verdict, reason, names, dtypes, shapes and bytes must be Rust's; every eighth input goes through a file too, with
metadata and order. The run fails on a difference that is not explained, and when a class of inputs did not come up.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import safetensors.numpy

sys.path.insert(0, str(Path(__file__).parents[1]))

from dlpack_loader.dtype import BITS
from tests.header_oracle import ODDITIES, REASONS, Outcome, compare, compare_file, file_bytes

CLASSES = ("accepted", *REASONS, *ODDITIES)
"""What a run must have met."""

_FILE_EVERY = 8


class Node:
    """A JSON value that keeps its tokens: a scalar as it is written, an array, or an object with repeated names."""

    __slots__ = ("items", "kind", "token")

    def __init__(self, kind: str, token: str = "", items: list[tuple[str, Node]] | None = None) -> None:
        self.kind = kind  # "scalar", "array" (its items have no names), "object"
        self.token = token
        self.items = items if items is not None else []

    def copy(self) -> Node:
        return Node(self.kind, self.token, [(name, value.copy()) for name, value in self.items])

    def write(self, space: Callable[[], str]) -> str:
        if self.kind == "scalar":
            return self.token
        opening, closing = "[]" if self.kind == "array" else "{}"
        parts = []
        for name, value in self.items:
            label = f"{name}{space()}:{space()}" if self.kind == "object" else ""
            parts.append(f"{space()}{label}{value.write(space)}{space()}")
        return opening + ",".join(parts) + closing


def scalar(token: str) -> Node:
    return Node("scalar", token)


def array(*values: Node) -> Node:
    return Node("array", items=[("", value) for value in values])


def entry(dtype: str, shape: list[int], begin: int, end: int) -> Node:
    sizes = array(*(scalar(str(size)) for size in shape))
    offsets = array(scalar(str(begin)), scalar(str(end)))
    return Node("object", items=[('"dtype"', scalar(f'"{dtype}"')), ('"shape"', sizes), ('"data_offsets"', offsets)])


def parse(value: object) -> Node:
    """Make the tree of a decoded JSON value."""
    if isinstance(value, dict):
        return Node("object", items=[(json.dumps(name), parse(item)) for name, item in value.items()])
    if isinstance(value, list):
        return array(*map(parse, value))
    return scalar(json.dumps(value))


NUMBERS = (
    "0", "1", "2", "3", "4", "8", "16", "-0", "-1", "1.0", "2e0", "0e0", "01", "+1", "1.", ".5", "1e400", "1e-400",
    "18446744073709551615", "18446744073709551616", "9223372036854775808", "4294967296", "1099511627776",
    "1.7976931348623157e308", "1.7976931348623158e308", "17976931348623158e292", "17976931348623157e292",
    "179769313486231580793728971405301e276", "0.00000000000000000000000001e334", "0e999", "NaN", "Infinity",
)  # fmt: skip
SCALARS = ("null", "true", "false", '""', '"x"', '"a:b"', '"-"', '"F32"', "{}", "[]", "nul", "'x'")
STRINGS = (
    '"a"', '"b"', '""', '"../x"', '"a:b"', '"a-b"', '"w"', '"weight"', '"é"', '"😀"', '"\x7f"', '"\x01"', '"\u2028"',
    '"\\u003a"', '"\\u0061"', '"\\u0000"', '"\\ud83d\\ude00"', '"\\ud83d"', '"\\udc00x"', '"\\ud83d\\u0041"',
    '"\\/"', '"\\"\\\\"', '"\\x"', '"\\u12"', '"__metadata__"', '"\\u005f_metadata__"',
    '"dtype"', '"shape"', '"data_offsets"', '"d\\u0074ype"',
)  # fmt: skip
DTYPES = (*(f'"{code}"' for code in BITS), '"f32"', '"Q8"', '""', '"BF16 "', '"\\u004632"', '"F8"')


class Maker:
    """Makes files from one source of chance."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.real = [self._split(data) for data in _real_files()]
        weighted = {
            self.swap: 6, self.repeat: 5, self.repeat_changed: 5, self.drop: 5, self.number: 10, self.dtype: 5,
            self.offsets: 10, self.sizes: 8, self.rename: 6, self.add_field: 8, self.swap_field: 4, self.array_form: 3,
            self.map_form: 3, self.metadata: 6, self.empty: 6, self.value: 5, self.escape: 6, self.overflow: 5,
        }  # fmt: skip
        self.mutations = list(weighted)
        self.weights = list(weighted.values())

    @staticmethod
    def _split(data: bytes) -> tuple[Node, int]:
        length = int.from_bytes(data[:8], "little")
        return parse(json.loads(data[8 : 8 + length])), len(data) - 8 - length

    # Whole files

    def file(self) -> bytes:
        random = self.random
        tree, data_bytes = self._tree()
        for _ in range(random.choices((0, 1, 2, 3, 6), (4, 10, 4, 2, 1))[0]):
            random.choices(self.mutations, self.weights)[0](tree)
        raw = bytearray(self._write(tree).encode())
        if random.random() < 0.15:
            for _ in range(random.randint(1, 3)):
                self._change_bytes(raw)
        if random.random() < 0.04:
            data_bytes = max(0, data_bytes + random.choice((-4, -1, 1, 4, 100)))
        data = file_bytes(bytes(raw), data_bytes)
        if random.random() < 0.05:
            data = self._change_around(data)
        return data

    def _tree(self) -> tuple[Node, int]:
        random = self.random
        if random.random() < 0.4:
            tree, data_bytes = random.choice(self.real)
            return tree.copy(), data_bytes
        cursor = 0
        items = []
        for name in random.sample(STRINGS[:10], random.randint(0, 5)):
            dtype = random.choice(list(BITS))
            shape = [random.choice((0, 1, 1, 2, 2, 3, 4, 8)) for _ in range(random.randint(0, 3))]
            bits = int(np.prod(shape, dtype=int)) * BITS[dtype]
            if bits % 8 and random.random() < 0.9:
                shape.append(4)
                bits *= 4
            items.append((name, entry(dtype, shape, cursor, cursor + bits // 8)))
            cursor += bits // 8
        if random.random() < 0.3:
            random.shuffle(items)
        if random.random() < 0.4:
            pairs = [(name, scalar('"a:-b"')) for name in random.sample(STRINGS[:5], random.randint(0, 3))]
            items.insert(random.randint(0, len(items)), ('"__metadata__"', Node("object", items=pairs)))
        return Node("object", items=items), cursor

    def _write(self, tree: Node) -> str:
        random = self.random
        style = random.random()
        if style < 0.7:
            text = tree.write(lambda: "")
        elif style < 0.75:
            text = tree.write(lambda: random.choice(("", " ", "\n", "\t", "\r", "\x0b", "\xa0", "\ufeff")))
        else:
            text = tree.write(lambda: random.choice(("", "", " ", "\n\t", "\r\n")))
        around = random.random()
        if around < 0.2:
            text += " " * random.randint(1, 9)
        elif around < 0.3:
            text = (
                random.choice((" ", "\n", "\ufeff", "\0", "//x\n", ""))
                + text
                + random.choice(("\0", ",", "{}", "x", ""))
            )
        return text

    def _change_bytes(self, raw: bytearray) -> None:
        random = self.random
        at = random.randrange(len(raw)) if raw else 0
        kind = random.randrange(5)
        if kind == 0 and raw:
            raw[at] ^= 1 << random.randrange(8)
        elif kind == 1 and raw:
            del raw[at : at + random.choice((1, 1, 2, 8))]
        elif kind == 2:
            raw[at:at] = random.choice(
                (b"\xff", b"\xe2\x82", b"\xed\xa0\x80", b"\0", b" ", b",", b":", b"-", b'"', b"[" * 130)
            )
        elif kind == 3:
            end = random.randrange(len(raw) + 1)
            raw[at:at] = raw[min(at, end) : max(at, end)]
        else:
            del raw[at:]

    def _change_around(self, data: bytes) -> bytes:
        random = self.random
        kind = random.randrange(4)
        if kind == 0:
            return data[: random.randrange(len(data))]
        if kind == 1:
            return data[: random.randrange(9)]
        length = int.from_bytes(data[:8], "little")
        if kind == 2:
            length = max(0, length + random.choice((-8, -1, 1, 8)))
        else:
            length = random.choice((0, 1, 100_000_000, 100_000_001, 1 << 31, 1 << 32, (1 << 63) - 8, (1 << 64) - 1))
        return struct.pack("<Q", length) + data[8:]

    # Places in a tree

    def _objects(self, tree: Node) -> list[Node]:
        return [tree, *(value for _, value in tree.items if value.kind == "object")]

    def _object(self, tree: Node) -> Node:
        return self.random.choice(self._objects(tree))

    def _entry(self, tree: Node) -> Node:
        found = [value for name, value in tree.items if value.kind == "object" and name != '"__metadata__"']
        return self.random.choice(found) if found else entry("U8", [1], 0, 1)

    def _field(self, tree: Node, name: str) -> Node:
        one = self._entry(tree)
        return next((value for label, value in one.items if label == f'"{name}"'), scalar("0"))

    def _spot(self, node: Node) -> int:
        return self.random.randint(0, len(node.items))

    # Changes of a tree, each in place

    def swap(self, tree: Node) -> None:
        self.random.shuffle(self._object(tree).items)

    def repeat(self, tree: Node) -> None:
        node = self._object(tree)
        if node.items:
            name, value = self.random.choice(node.items)
            node.items.insert(self._spot(node), (name, value.copy()))

    def repeat_changed(self, tree: Node) -> None:
        node = self._object(tree)
        if len(node.items) > 1:
            (name, _), (_, value) = self.random.sample(node.items, 2)
            node.items.insert(self._spot(node), (name, value.copy()))

    def drop(self, tree: Node) -> None:
        node = self._object(tree)
        if node.items:
            del node.items[self.random.randrange(len(node.items))]

    def number(self, tree: Node) -> None:
        field = self._field(tree, self.random.choice(("shape", "data_offsets")))
        numbers = [value for _, value in field.items if value.kind == "scalar"]
        if numbers:
            self.random.choice(numbers).token = self.random.choice(NUMBERS)

    def dtype(self, tree: Node) -> None:
        self._field(tree, "dtype").token = self.random.choice(DTYPES)

    def offsets(self, tree: Node) -> None:
        shift = self.random.choice((-8, -4, -1, 1, 4, 8))
        numbers = [value for _, value in self._field(tree, "data_offsets").items if value.token.isdigit()]
        if self.random.random() < 0.2:
            numbers.reverse()
        elif self.random.random() < 0.6:
            numbers = numbers[: self.random.randint(0, 1)]
        if self.random.random() < 0.15 and len(numbers) == 2:
            numbers[0].token, numbers[1].token = numbers[1].token, numbers[0].token
        for value in numbers:
            value.token = str(max(0, int(value.token) + shift))

    def sizes(self, tree: Node) -> None:
        shape = self._field(tree, "shape")
        kind = self.random.randrange(4)
        if kind == 0:
            self.random.shuffle(shape.items)
        elif kind == 1 and shape.items:
            del shape.items[self.random.randrange(len(shape.items))]
        else:
            shape.items.insert(self._spot(shape), ("", scalar(self.random.choice(("0", "1", "1", "2", "3")))))

    def rename(self, tree: Node) -> None:
        node = self._object(tree)
        if node.items:
            at = self.random.randrange(len(node.items))
            node.items[at] = (self.random.choice(STRINGS), node.items[at][1])

    def add_field(self, tree: Node) -> None:
        node = self._entry(tree) if self.random.random() < 0.7 else self._object(tree)
        name = self.random.choice(('"x"', '"x"', '"x:y"', self.random.choice(STRINGS)))
        node.items.insert(self._spot(node), (name, scalar(self._junk())))

    def swap_field(self, tree: Node) -> None:
        """A known field becomes an unknown one: the count of members stays what it was."""
        node = self._entry(tree)
        at = self.random.randrange(len(node.items)) if node.items else 0
        node.items[at : at + 1] = [('"x"', scalar(self._junk()))]

    def array_form(self, tree: Node) -> None:
        node = self._entry(tree)
        node.kind = "array"
        if self.random.random() < 0.2:
            self.random.shuffle(node.items)

    def map_form(self, tree: Node) -> None:
        field = self._field(tree, "dtype")
        values = ("null", "null", "{}", "[]", "0", '"F32"')
        field.token = f"{{{field.token}:{self.random.choice(values)}}}"

    def metadata(self, tree: Node) -> None:
        kind = self.random.randrange(5)
        value = scalar(self.random.choice(SCALARS))
        if kind:
            pairs = [
                (self.random.choice(STRINGS), scalar(self.random.choice((*STRINGS, "null", "1"))))
                for _ in range(self.random.randint(0, 3))
            ]
            value = Node("object", items=pairs)
        if kind > 2:
            tree.items = [item for item in tree.items if item[0] != '"__metadata__"']
        tree.items.insert(self._spot(tree), ('"__metadata__"', value))

    def empty(self, tree: Node) -> None:
        """A tensor without bytes, mostly where the file allows one."""
        ends = [value.items[1][1].token for name, value in tree.items if _is_pair(value) for value in _offsets(value)]
        at = int(self.random.choice([end for end in ends if end.isdigit() and len(end) < 9] or ["0"]))
        at += self.random.choice((0, 0, 0, 1))
        shape = self.random.choice(([0], [0, 4], [3, 0], [0, 1 << 40], [0, (1 << 64) - 1]))
        name = self.random.choice(('"e"', '"E"', '"zz"', '"0"'))
        tree.items.insert(self._spot(tree), (name, entry(self.random.choice(list(BITS)), shape, at, at)))

    def overflow(self, tree: Node) -> None:
        sizes = self.random.choice(
            ([1 << 40, 1 << 40, 0], [0, 1 << 40, 1 << 40], [1 << 61, 8], [1 << 58], [1 << 60, 16])
        )
        tokens = [("", scalar(str(size))) for size in sizes]
        self._field(tree, "shape").items = tokens

    def value(self, tree: Node) -> None:
        node = self._object(tree)
        if node.items:
            at = self.random.randrange(len(node.items))
            node.items[at] = (node.items[at][0], scalar(self._junk()))

    def escape(self, tree: Node) -> None:
        """A name written with an escape: the same name to JSON."""
        node = self._object(tree)
        if node.items:
            at = self.random.randrange(len(node.items))
            name, value = node.items[at]
            inner = name[1:-1]
            if inner.isalnum():
                spot = self.random.randrange(len(inner))
                name = f'"{inner[:spot]}\\u{ord(inner[spot]):04x}{inner[spot + 1 :]}"' if inner.isascii() else name
            node.items[at] = (name, value)

    def _junk(self) -> str:
        random = self.random
        kind = random.choices(("arrays", "objects", NUMBERS, SCALARS, STRINGS), (1, 1, 4, 1, 2))[0]
        if kind == "arrays":
            depth = random.choice((1, 2, 64, 124, 125, 126, 127, 128, 129, 500))
            return "[" * depth + "]" * depth
        if kind == "objects":
            depth = random.choice((1, 2, 124, 125, 126, 127))
            return '{"n":' * depth + "1" + "}" * depth
        return random.choice(kind)


def _is_pair(value: Node) -> bool:
    return any(True for _ in _offsets(value))


def _offsets(value: Node) -> list[Node]:
    return [item for name, item in value.items if name == '"data_offsets"' and len(item.items) == 2]


def _real_files() -> list[bytes]:
    """Files as safetensors itself writes them."""
    random = np.random.default_rng(0)
    names = [f"model.layers.{i}.{part}" for i in range(3) for part in ("attn.q_proj.weight", "mlp.bias", "norm")]
    state = {name: random.normal(size=(2, i % 4 + 1)).astype(np.float32) for i, name in enumerate(names)}
    kinds = ("bool", "uint8", "int8", "int16", "uint16", "float16", "int32", "uint32", "complex64", "float64", "int64")
    mixed = {kind: np.ones((3,), kind) for kind in kinds}
    odd: dict[str, np.ndarray[Any, Any]] = {
        "scalar": np.ones(()),
        "none": np.ones((0, 4), np.float32),
        'a:b-c/"d"\\': np.ones(2),
    }
    return [
        safetensors.numpy.save(state, metadata={"a:b": "-1"}),  # one key: Rust writes several in no order
        safetensors.numpy.save(mixed),
        safetensors.numpy.save(odd, metadata={}),
        safetensors.numpy.save({}),
    ]


def shortest(data: bytes, problem: str) -> bytes:
    """Cut pieces out of the header for as long as the two still differ in the same way."""
    step = len(data) // 2
    while step:
        at = 0
        while at < int.from_bytes(data[:8], "little"):
            length = int.from_bytes(data[:8], "little")
            piece = min(step, length - at)
            cut = struct.pack("<Q", length - piece) + data[8 : 8 + at] + data[8 + at + piece :]
            if length < 100_000 and compare(cut).problem == problem:
                data = cut
            else:
                at += step
        step //= 2
    return data


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzz the header parser against safetensors' Rust.")
    parser.add_argument("--inputs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    maker = Maker(arguments.seed)
    seen: Counter[str] = Counter()
    explained: Counter[str] = Counter()
    failures: dict[str, tuple[bytes, Outcome]] = {}
    in_files = 0
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input.safetensors")
        for index in range(arguments.inputs):
            data = maker.file()
            outcome = compare(data)
            if not outcome.problem and index % _FILE_EVERY == 0:
                in_files += 1
                outcome = compare_file(data, path)
            seen[outcome.ours.reason or "accepted"] += 1
            explained[outcome.explained] += bool(outcome.explained)
            if outcome.problem:
                known = failures.get(outcome.problem)
                if known is None or len(data) < len(known[0]):
                    failures[outcome.problem] = data, outcome
    seconds = time.perf_counter() - begin

    print(f"{arguments.inputs:,} inputs, seed {arguments.seed}, {in_files:,} of them through files, {seconds:.1f} s")
    for name in CLASSES:
        print(f"  {name:29} {seen[name]:>9,}")
    print("differences explained:")
    for name, meaning in (
        ("DuplicateTensor", "a tensor named twice, refused on purpose"),
        ("EntryForm", "an entry or a dtype in another of serde's forms, refused on purpose"),
        ("Tie", "tensors at the same offsets: Rust's own error varies, ours is one of them"),
    ):
        print(f"  {name:29} {explained[name]:>9,}  {meaning}")
    print(f"differences unexplained: {len(failures)} kinds")
    for problem, (data, outcome) in failures.items():
        small = shortest(data, problem)
        print(f"\n{problem}\n  ours {outcome.ours}\n  the other {outcome.rust}\n  input {data!r}\n  shortest {small!r}")
    missing = [name for name in CLASSES if not seen[name]]
    if missing:
        print(f"no input of these classes came up, so the run proves nothing about them: {', '.join(missing)}")
    return 1 if failures or missing else 0


if __name__ == "__main__":
    sys.exit(main())
