"""Counts the faults that the tests of a room catch: a mutant is the package with one small fault in it.

    python tools/mutants.py 200 --seed 0 --rooms data covariance methods tuning --jobs 8

A fault negates a comparison, drops a term of a sum or product, or exchanges two axes. The seed draws the mutants; the
kinds of faults and the rooms take turns. Each mutant is written into a copy of the checkout. The quick tests of its
room run there until one fails, or until they take much longer than without a fault, which also counts as caught. A
mutant that escapes shows a missing test, code that changes no result, or code that only tests of other rooms reach.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
QUICK = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow")
OPPOSITE = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
AXES = {"0": "1", "1": "0", "-1": "-2", "-2": "-1"}
NO_TERMS = (ast.JoinedStr, ast.List)
"""Operands that are concatenated or repeated."""
ALONG = ("sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "softmax", "logsumexp", "unsqueeze", "size")
"""Functions whose first argument is an axis, if it is one of `AXES`."""


class Mutant(NamedTuple):
    """A file with one fault: its line and kind, the code before and after, and the whole text."""

    line: int
    kind: str
    before: str
    after: str
    text: str


def main() -> None:
    """Draws mutants, tests them, and prints each one and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", default=["data", "covariance", "methods", "tuning"])
    parser.add_argument("--jobs", type=int, default=1, help="number of mutants that are tested at the same time")
    options = parser.parse_args()
    pairs, limits = drawn(options.count, options.seed, options.rooms), {}
    for room in sorted({path.parts[1] for path, _ in pairs}):
        start = time.monotonic()
        if is_caught(room):
            raise SystemExit(f"The quick tests of {room} fail without a fault. Mend them first.")
        limits[room] = 60 + 3 * options.jobs * (time.monotonic() - start)

    def is_caught_in_its_room(pair: tuple[Path, Mutant]) -> bool:
        path, mutant = pair
        caught = is_caught(path.parts[1], path, mutant.text, limits[path.parts[1]])
        place = f"{path}:{mutant.line}, {mutant.kind}"
        print("caught " if caught else "ESCAPED", f"{place}: {mutant.before}  ->  {mutant.after}", flush=True)
        return caught

    with ThreadPoolExecutor(options.jobs) as pool:
        caught = list(pool.map(is_caught_in_its_room, pairs))
    for room in limits:
        results = [each for each, (path, _) in zip(caught, pairs, strict=True) if path.parts[1] == room]
        print(f"{room}: {sum(results)} of {len(results)} mutants are caught")
    print(f"{sum(caught)} of {len(caught)} mutants are caught")


def drawn(count: int, seed: int, rooms: list[str]) -> list[tuple[Path, Mutant]]:
    """Returns mutants of the rooms, drawn by the seed; the kinds take turns, and so do the rooms."""
    groups: dict[tuple[str, str], list[tuple[Path, Mutant]]] = {}
    for room in rooms:
        for path in sorted((ROOT / "lapwing" / room).rglob("*.py")):
            for mutant in mutants(path.read_text(encoding="utf-8")):
                groups.setdefault((mutant.kind, room), []).append((path.relative_to(ROOT), mutant))
    order = random.Random(seed)
    turns = zip_longest(*(order.sample(group, len(group)) for _, group in sorted(groups.items())))
    return [each for turn in turns for each in turn if each][:count]


def mutants(source: str) -> Iterator[Mutant]:
    """Yields a source with each possible fault, except in f-strings and in what is raised."""
    raw, ahead = source.encode(), [ast.parse(source)]
    starts = [0, *(newline.end() for newline in re.finditer(b"\n", raw))]
    while ahead:
        node = ahead.pop()
        if isinstance(node, (ast.Raise, ast.JoinedStr)):
            continue
        ahead += reversed(list(ast.iter_child_nodes(node)))
        for kind, after in faults(node):
            first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            text = raw[:first] + f"({after})".encode() + raw[last:]
            yield Mutant(node.lineno, kind, ast.unparse(node), after, text.decode())


def faults(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields the kind of each fault of an expression, and the code that replaces the expression."""
    match node:
        case ast.Compare(left, [sign], right):
            yield "comparison", ast.unparse(ast.Compare(left, [OPPOSITE[type(sign)]()], right))
        case ast.BinOp(left, ast.Add() | ast.Mult(), right) if not {type(left), type(right)} & {*NO_TERMS}:
            yield from (("term", ast.unparse(rest)) for rest in (left, right))
        case ast.BinOp(left, ast.Sub() | ast.Div()):
            yield "term", ast.unparse(left)
        case ast.Attribute(value, "mT" | "T" | "mH" | "H", ast.Load()):
            yield "axes", ast.unparse(value)
        case ast.Call(ast.Attribute(value, "transpose" | "movedim"), [_, _]):
            yield "axes", ast.unparse(value)
        case ast.Call(ast.Attribute(_, "permute") as function, [*first, a, b]):
            yield "axes", ast.unparse(ast.Call(function, [*first, b, a], []))
        case ast.Call(ast.Attribute(_, "einsum") as function, [ast.Constant(str(letters)), *rest], keywords):
            exchanged = ast.Constant(re.sub(r"([a-zA-Z])([a-zA-Z])", r"\2\1", letters, count=1))
            yield "axes", ast.unparse(ast.Call(function, [exchanged, *rest], keywords))
        case ast.Call(ast.Attribute(_, name) as function, [axis, *rest], keywords) if name in ALONG:
            if ast.unparse(axis) in AXES:
                yield "axes", ast.unparse(ast.Call(function, [ast.Name(AXES[ast.unparse(axis)]), *rest], keywords))


def is_caught(room: str, path: Path | None = None, text: str = "", limit: float | None = None) -> bool:
    """Whether the quick tests of a room fail, or take longer than a limit in seconds, if a file has another text."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "checkout"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "_build"))
        if path:
            (copy / path).write_text(text, encoding="utf-8")
        run = subprocess.Popen(
            [sys.executable, *QUICK, f"tests/{room}"], cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            return run.wait(limit) != 0
        except subprocess.TimeoutExpired:
            return True
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()


if __name__ == "__main__":
    main()
