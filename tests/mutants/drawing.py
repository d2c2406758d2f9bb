"""Every mutant of the mutated files, and a seeded draw of some of them.

The mutations are mutmut's: another operator or comparison, a number plus one, another name or key, an argument left out
or None, a value that is None, a condition forced. mutmut does not look into functions with decorators (properties,
fixtures). Not drawn are mutants that only change what a person reads or what nothing can notice:

- texts with a space, and all that is inside a `raise` (that it is raised counts, its words do not);
- `description=` and `help=`; `strict=` of `zip`, which guards against mistakes of the code itself;
- the names of type variables and `__all__`.
"""

from __future__ import annotations

import ast
import difflib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import libcst as cst
import libcst.matchers as m
from mutmut.mutation.file_mutation import create_mutations  # pyright: ignore[reportMissingImports]

from tests.mutants.sources import ROOT

UNNOTICED = {"description", "help", "strict"}
"""Keyword arguments whose mutants are not drawn."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the lines that it replaces and those that it puts there."""

    path: str
    line: int  # of the first line that differs
    before: str
    after: str
    code: str  # the whole file with the change

    @property
    def diff(self) -> str:
        """The change as people read it."""
        old = (ROOT / self.path).read_text(encoding="utf-8").splitlines()
        return "\n".join(difflib.unified_diff(old, self.code.splitlines(), self.path, lineterm="", n=1))


def draw(paths: list[str], number: int, seed: int) -> list[Mutant]:
    """Draw `number` of all mutants of `paths`, each as likely as any other, in the order of the draw."""
    modules = [_mutations(path) for path in paths]
    ends = list(accumulate(len(changes) for _, changes in modules))
    chosen = random.Random(seed).sample(range(ends[-1]), min(number, ends[-1]))
    found = []
    for index in chosen:
        file = next(place for place, end in enumerate(ends) if index < end)
        module, changes = modules[file]
        before = ends[file - 1] if file else 0
        found.append(_mutant(paths[file], module, *changes[index - before]))
    return found


def every(path: str) -> list[Mutant]:
    """Return all mutants of one file."""
    module, changes = _mutations(path)
    return [_mutant(path, module, *change) for change in changes]


def statement_lines(code: str, line: int) -> range:
    """Return the lines of the innermost statement at `line`: of one with a body, its head alone."""
    best = range(line, line + 1)
    size = None
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        lines = range(node.lineno, max(last, node.lineno) + 1)
        if line in lines and (size is None or len(lines) < size):
            best, size = lines, len(lines)
    return best


def runs_on_import(code: str, line: int) -> bool:
    """Return whether a line is outside all bodies of functions."""
    functions = (
        node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return not any(node.body[0].lineno <= line <= (node.end_lineno or line) for node in functions)


def _mutations(path: str) -> tuple[cst.Module, list[tuple[cst.CSTNode, cst.CSTNode]]]:
    """Parse a file; return its tree and the pairs of a node and what replaces it."""
    module, mutations, _, _ = create_mutations(path, (ROOT / path).read_text(encoding="utf-8"))
    silent = {id(node) for node in _silent(module)}
    pairs = [(one.original_node, one.mutated_node) for one in mutations]
    return module, [(old, new) for old, new in pairs if id(old) not in silent and not _only_words(old, new)]


def _silent(module: cst.Module) -> Iterator[cst.CSTNode]:
    """Yield the nodes whose mutants are not drawn because of where they stand."""
    names = m.Assign(targets=[m.AssignTarget(target=m.Name("__all__"))]) | m.Assign(
        value=m.Call(func=m.Name("TypeVar") | m.Name("ParamSpec"))
    )
    for top in m.findall(module, m.Raise() | names):
        yield from _below(top)
    for argument in m.findall(module, m.Arg(keyword=m.Name())):
        if isinstance(argument, cst.Arg) and argument.keyword and argument.keyword.value in UNNOTICED:
            yield from _below(argument)


def _below(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _below(child)


def _only_words(old: cst.CSTNode, new: cst.CSTNode) -> bool:
    """Return whether a mutation changes nothing but a text for people, or an argument that is not noticed."""
    if isinstance(old, cst.SimpleString):
        return " " in old.value
    if isinstance(old, cst.Call) and isinstance(new, cst.Call):
        gone = [argument for argument in old.args if all(argument is not kept for kept in new.args)]
        return any(argument.keyword is not None and argument.keyword.value in UNNOTICED for argument in gone)
    return False


def _mutant(path: str, module: cst.Module, old: cst.CSTNode, new: cst.CSTNode) -> Mutant:
    code = module.deep_replace(old, new).code  # pyright: ignore[reportAttributeAccessIssue]
    was, now = module.code.splitlines(), code.splitlines()
    changes = [
        one
        for one in difflib.SequenceMatcher(None, was, now, autojunk=False).get_opcodes()
        if one[0] != "equal"
    ]
    if not changes:
        return Mutant(path, 1, "", "", code)
    first, last = changes[0], changes[-1]
    return Mutant(
        path, first[1] + 1, "\n".join(was[first[1] : last[2]]), "\n".join(now[first[3] : last[4]]), code
    )
