"""What the plugin relies on in SGLang, and whether the installed SGLang still has it.

Read from SGLang's source without importing it: a worker module takes seconds to import, and an
attribute that `__init__` sets is not on the class.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Call:
    """A function or method that the plugin calls.

    Args:
        target: its dotted path, as SGLang's hook registry takes it.
        positional: its first parameters in this order, after `self` or `cls`, separated by spaces.
        keywords: further parameters that are passed by name, separated by spaces.
    """

    target: str
    positional: str = ""
    keywords: str = ""


@dataclass(frozen=True)
class Hook(Call):
    """A function or method that the plugin hooks; what it does not name here it passes on."""


@dataclass(frozen=True)
class Attributes:
    """Attributes, fields, methods or enum members that the plugin reads or sets.

    Args:
        target: the dotted path of their class.
        names: theirs, separated by spaces.
    """

    target: str
    names: str


Symbol = Call | Attributes


def problems(symbols: Iterable[Symbol], root: Path) -> list[tuple[Symbol, str]]:
    """Say of each symbol that is missing or has another signature what is wrong with it.

    Args:
        symbols: what an adapter declares.
        root: the folder in which SGLang's package lies.
    """
    # Syntax trees are no garbage, and a collection goes through all that SGLang has imported.
    collects = gc.isenabled()
    gc.disable()
    try:
        sources = Sources(root)
        return [(symbol, text) for symbol in symbols for text in _problems(symbol, sources)]
    finally:
        if collects:
            gc.enable()


@dataclass
class Module:
    """The top level of one source file."""

    name: str
    is_package: bool
    definitions: dict[str, ast.AST] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)

    def add(self, statements: Iterable[ast.stmt]) -> None:
        for node in statements:
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    self.definitions[node.name] = node
                case ast.ImportFrom():
                    self._add_import(node)
                case ast.If() | ast.Try():
                    self.add([*node.body, *node.orelse])

    def _add_import(self, node: ast.ImportFrom) -> None:
        parts = self.name.split(".")
        above = parts[: len(parts) + self.is_package - node.level] if node.level else []
        source = ".".join([*above, *filter(None, [node.module])])
        for alias in node.names:
            if alias.name == "*":
                self.stars.append(source)
            else:
                self.imports[alias.asname or alias.name] = (source, alias.name)


Found = tuple[Module, ast.AST]


class Sources:
    """Parses the modules of a package on demand, and follows imports and base classes in it.

    Args:
        root: the folder in which the package's folder lies.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module | None] = {}
        self._members: dict[ast.ClassDef, dict[str, ast.AST]] = {}

    def module(self, name: str) -> Module | None:
        """The parsed module, None if there is no such file."""
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def find(self, target: str) -> Found | None:
        """A module's function or class, or a class's member, by its dotted path."""
        parts = target.split(".")
        for end in range(len(parts) - 1, 0, -1):
            module = self.module(".".join(parts[:end]))
            if module:
                found = self._top_level(module, parts[end])
                for name in parts[end + 1 :]:
                    found = found and self.member(*found, name)
                return found
        return None

    def member(self, module: Module, node: ast.AST, name: str) -> Found | None:
        """What a class or one of its bases defines or assigns under this name."""
        if not isinstance(node, ast.ClassDef):
            return None
        if node not in self._members:
            self._members[node] = _members(node)
        if name in self._members[node]:
            return module, self._members[node][name]
        for base in node.bases:
            if isinstance(base, ast.Name):
                parent = self._top_level(module, base.id, apart_from=node)
                found = parent and self.member(*parent, name)
                if found:
                    return found
        return None

    def _parse(self, name: str) -> Module | None:
        path = self.root.joinpath(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not file.is_file():
            return None
        module = Module(name=name, is_package=path.is_dir())
        module.add(ast.parse(file.read_bytes()).body)
        return module

    def _top_level(
        self, module: Module, name: str, apart_from: ast.AST | None = None
    ) -> Found | None:
        node = module.definitions.get(name)
        if node and node is not apart_from:
            return module, node
        places = [module.imports[name]] if name in module.imports else []
        for source, original in (*places, *((star, name) for star in module.stars)):
            origin = self.module(source)
            found = origin and self._top_level(origin, original)
            if found:
                return found
        return None


def installed() -> Path:
    """The folder in which the installed SGLang's package lies.

    Raises:
        ValueError: there is none.
    """
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("SGLang is not installed in this environment: pip install sglang")
    return Path(spec.submodule_search_locations[0]).parent


def _members(class_: ast.ClassDef) -> dict[str, ast.AST]:
    """What the class body binds, and what its methods assign to `self`."""
    members: dict[str, ast.AST] = {}
    for node in ast.walk(class_):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                members[name] = node
            case ast.Call(
                func=ast.Attribute(attr="register_buffer"), args=[ast.Constant(value=name), *_]
            ):
                members[name] = node
    for node in class_.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                members[name] = node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                members[name] = node
    return members


def _problems(symbol: Symbol, sources: Sources) -> Iterator[str]:
    if isinstance(symbol, Attributes):
        yield from _missing(symbol, sources)
    elif problem := _mismatch(symbol, sources):
        yield problem


def _missing(symbol: Attributes, sources: Sources) -> Iterator[str]:
    found = sources.find(symbol.target)
    if found is None:
        yield f"{symbol.target} does not exist"
        return
    for name in symbol.names.split():
        if sources.member(*found, name) is None:
            yield f"{symbol.target} has no {name}"


def _mismatch(symbol: Call, sources: Sources) -> str | None:
    found = sources.find(symbol.target)
    if found is None or not isinstance(found[1], ast.FunctionDef | ast.AsyncFunctionDef):
        return f"{symbol.target} does not exist"
    function, arguments = found[1], found[1].args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    required = set(names[: len(names) - len(arguments.defaults)])
    if names[:1] in (["self"], ["cls"]):
        required.discard(names.pop(0))
    positional, keywords = symbol.positional.split(), symbol.keywords.split()
    by_name = {*names[len(positional) :], *(a.arg for a in arguments.kwonlyargs)}
    required |= {
        a.arg
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    }
    fits = (
        names[: len(positional)] == positional
        and (arguments.kwarg or by_name.issuperset(keywords))
        and (isinstance(symbol, Hook) or required.issubset([*positional, *keywords]))
    )
    if fits:
        return None
    wanted = ", ".join([*positional, *(f"{name}=" for name in keywords)])
    return f"{symbol.target} takes ({ast.unparse(function.args)}), not ({wanted})"
