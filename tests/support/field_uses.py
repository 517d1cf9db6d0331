"""The fields of the wire protocol that the broker's code reads and sets, found in its source.

Types are followed inside a function: from annotations, constructors, returns of functions and
attributes of classes.  A container has the types of its elements.  That is enough for this code:
a use that it misses fails the test of the page, which has a row for it.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from google.protobuf.message import Message

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.hot_frames import encode_message_head, encode_send_receipt
from magnetar.protocol.hot_reads import encode_read_entries

ROOT: Final = Path(__file__).parents[2]
PLACES: Final = ("broker", "storage/managed_ledger", "magnetar/protocol")
"""The packages of a broker that see commands and messages."""
CLIENT_SIDE: Final = frozenset(
    {
        ROOT / "broker" / "placement" / "dialing.py",
        ROOT / "broker" / "scalable" / "relay_exchange.py",
    }
)
"""Modules in which a broker is the client of another one."""
MESSAGES: Final = {
    each.name: each
    for top in pb.DESCRIPTOR.message_types_by_name.values()
    for each in (top, *top.nested_types)
}
_CHANGES: Final = frozenset({"CopyFrom", "MergeFrom", "add", "append", "extend", "SetInParent"})
Types = frozenset[str]
_NO_TYPES: Final[Types] = frozenset()
Field = tuple[str, str]
"""A message and one of its fields."""


@dataclass(slots=True)
class Uses:
    """The fields that code reads and sets, and the messages that it makes."""

    read: set[Field] = field(default_factory=set)
    written: set[Field] = field(default_factory=set)
    made: set[str] = field(default_factory=set)


@cache
def uses_of_broker() -> Uses:
    """The uses in the code of the broker."""
    trees = [
        ast.parse(path.read_text("utf-8"))
        for place in PLACES
        for path in sorted((ROOT / place).rglob("*.py"))
        if not path.stem.endswith("_pb2") and path not in CLIENT_SIDE
    ]
    found = uses_in(trees)
    head = encode_message_head(
        1, 2, 3, 0, partition=1, redelivery_count=1, ack_set=(1,), consumer_epoch=1
    )
    entries = encode_read_entries(1, (2, 3), [(4, 5, b"data", pb.ReadEntry.OPEN)], at_end=True)
    for frame in (encode_send_receipt(1, 2, 3, 4, 5), head, b"".join(entries)):
        _note_encoded(pb.BaseCommand.FromString(frame[8:]), found)
    return found


def _note_encoded(message: Message, found: Uses) -> None:
    """Note the fields that an encoder writes without the generated code."""
    name = message.DESCRIPTOR.name
    found.made.add(name)
    for descriptor, value in message.ListFields():
        found.written.add((name, descriptor.name))
        if descriptor.message_type is not None:
            for each in value if descriptor.is_repeated else (value,):
                _note_encoded(each, found)


def uses_in(trees: Iterable[ast.Module]) -> Uses:
    """The uses in some modules."""
    modules = list(trees)
    names = _Names()
    for tree in modules:
        names.learn(tree)
    for _ in range(2):  # Attributes may have the types of other attributes.
        walkers = [_Walker(tree, names) for tree in modules]
        for walker in walkers:
            walker.walk()
    found = Uses()
    passed: dict[str, set[str]] = defaultdict(set)
    for walker in walkers:
        found.read |= walker.uses.read
        found.written |= walker.uses.written
        found.made |= walker.uses.made
        for protocol, types in walker.passed.items():
            passed[protocol] |= types
    _follow_protocols(found, passed)
    return found


def _follow_protocols(found: Uses, passed: Mapping[str, set[str]]) -> None:
    """Note uses by functions that take any message with some fields, of the messages they get."""
    for uses in (found.read, found.written):
        for owner, name in list(uses):
            uses.update((each, name) for each in passed.get(owner, ()) if _has(each, name))
        uses.intersection_update({each for each in uses if _has(*each)})


def _has(message: str, name: str) -> bool:
    return message in MESSAGES and name in MESSAGES[message].fields_by_name


class _Names:
    """The types of names, over all modules."""

    def __init__(self) -> None:
        self.attributes: dict[str, Types] = {}
        self.returns: dict[str, Types] = {}
        self.parameters: dict[str, list[tuple[str, ast.expr | None]]] = {}
        self.protocols: set[str] = set()
        self.aliases: dict[str, set[str]] = defaultdict(set)
        """Bounds of type variables."""
        self.forwarders: dict[str, str] = {}
        """Functions that make a message of their keyword arguments."""

    def learn(self, tree: ast.Module) -> None:
        imported = imported_messages(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                if any("Protocol" in ast.unparse(base) for base in node.bases):
                    self.protocols.add(node.name)
                for each in node.body:
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                        self.add_attribute(each.target.id, _messages_in(each.annotation, imported))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.returns[node.name] = self.returns.get(node.name, _NO_TYPES) | _messages_in(
                    node.returns, imported
                )
                self.parameters[node.name] = [
                    (each.arg, each.annotation) for each in (*node.args.args, *node.args.kwonlyargs)
                ]

    def add_attribute(self, name: str, types: Types) -> None:
        if types:
            self.attributes[name] = self.attributes.get(name, _NO_TYPES) | types


def imported_messages(tree: ast.Module) -> Mapping[str, str]:
    """The names of messages in a module."""
    return {
        each.asname or each.name: each.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("pulsar_pb2")
        for each in node.names
        if each.name in MESSAGES
    }


def _message_named(node: ast.AST, imported: Mapping[str, str]) -> str:
    """The message that an expression names, or nothing."""
    match node:
        case ast.Name(id=name):
            return imported.get(name, "")
        case ast.Attribute(value=ast.Name(id="pb" | "pulsar_pb2"), attr=attr):
            return attr if attr in MESSAGES else ""
    return ""


def _messages_in(annotation: ast.expr | None, imported: Mapping[str, str]) -> Types:
    """The messages that an annotation names, in strings too."""
    if annotation is None:
        return _NO_TYPES
    found: set[str] = set()
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                found |= _messages_in(ast.parse(node.value, mode="eval").body, imported)
            except SyntaxError:
                continue
        elif name := _message_named(node, imported):
            found.add(name)
    return frozenset(found)


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _note(uses: set[Field], types: Types, name: str) -> None:
    """Add a field of each of these messages."""
    uses.update((each, name) for each in types)


class _Walker(ast.NodeVisitor):
    """Walks a module, and notes what it does with fields of messages."""

    def __init__(self, tree: ast.Module, names: _Names) -> None:
        self.uses = Uses()
        self.passed: dict[str, set[str]] = defaultdict(set)
        """For each protocol class, the messages that are passed as one."""
        self._tree = tree
        self._names = names
        self._imported = imported_messages(tree)
        self._known: list[dict[str, Types]] = [{}]
        self._function: ast.FunctionDef | ast.AsyncFunctionDef | None = None

    def walk(self) -> None:
        self.visit(self._tree)

    # Types

    def _type_of(self, node: ast.expr | None) -> Types:  # noqa: PLR0911 - a case for each kind
        match node:
            case ast.Name(id=name):
                return self._type_of_name(name)
            case ast.Attribute(value=value, attr=attr):
                if name := _message_named(node, self._imported):
                    return frozenset({name})
                owners = self._type_of(value) & MESSAGES.keys()
                fields = frozenset(
                    kind.name
                    for owner in owners
                    if (found := MESSAGES[owner].fields_by_name.get(attr)) is not None
                    if (kind := found.message_type) is not None
                )
                return fields if owners else self._names.attributes.get(attr, _NO_TYPES)
            case ast.Call(func=func, args=args):
                return self._type_of_call(func, args)
            case ast.Await(value=value) | ast.Starred(value=value) | ast.Subscript(value=value):
                return self._type_of(value)
            case ast.IfExp(body=body, orelse=orelse):
                return self._type_of(body) | self._type_of(orelse)
            case ast.BoolOp(values=values) | ast.Tuple(elts=values) | ast.List(elts=values):
                return _NO_TYPES.union(*map(self._type_of, values))
            case ast.BinOp(left=left, right=right):
                return self._type_of(left) | self._type_of(right)
            case ast.NamedExpr(value=value):
                return self._type_of(value)
        return _NO_TYPES

    def _type_of_name(self, name: str) -> Types:
        for scope in reversed(self._known):
            if name in scope:
                return scope[name]
        return frozenset({self._imported[name]}) if name in self._imported else _NO_TYPES

    def _type_of_call(self, func: ast.expr, args: list[ast.expr]) -> Types:
        name = _last_name(func)
        if name == "cast":
            return _messages_in(args[0], self._imported) or self._annotated(args[0])
        if name in ("list", "tuple", "reversed", "sorted", "enumerate", "zip", "iter", "next"):
            return _NO_TYPES.union(*map(self._type_of, args))
        if isinstance(func, ast.Attribute) and func.attr in ("FromString", "add", "pop"):
            return self._type_of(func.value)
        made = _message_named(func, self._imported)
        return frozenset({made}) if made else self._called(func, name)

    def _called(self, func: ast.expr, name: str) -> Types:
        returned = self._names.returns.get(name, _NO_TYPES)
        return returned or (self._type_of(func) if isinstance(func, ast.Name) else _NO_TYPES)

    def _annotated(self, annotation: ast.expr | None) -> Types:
        """The types of a parameter: messages, or protocol classes that stand for messages."""
        if annotation is None:
            return _NO_TYPES
        found = set(_messages_in(annotation, self._imported))
        for node in ast.walk(annotation):
            name = _last_name(node)
            found |= ({name} | self._names.aliases.get(name, set())) & self._names.protocols
            if isinstance(node, ast.Name):
                found |= self._type_of_name(node.id)
        return frozenset(found)

    # Uses

    def _bind(self, target: ast.expr, types: Types) -> None:
        match target:
            case ast.Name(id=name):
                # In a branch it may have another type.
                self._known[-1][name] = self._known[-1].get(name, _NO_TYPES) | types
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self._bind(part, types)
            case ast.Attribute(value=ast.Name(id="self"), attr=attr):
                self._names.add_attribute(attr, types)
            case _:
                pass

    def visit_Attribute(self, node: ast.Attribute) -> None:
        read = isinstance(node.ctx, ast.Load)
        _note(self.uses.read if read else self.uses.written, self._owners(node), node.attr)
        self.visit(node.value)

    def _owners(self, node: ast.Attribute) -> Types:
        """The messages that the attribute is taken from; none for a value of an enum."""
        if _message_named(node.value, self._imported):
            return _NO_TYPES
        return self._type_of(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        types = self._type_of(node.value)
        if isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple):
            for part, value in zip(node.targets[0].elts, node.value.elts, strict=False):
                self._bind(part, self._type_of(value))
        else:
            for target in node.targets:
                self._bind(target, types)
        for target in node.targets:
            self.visit(target)
        self._learn_type_variable(node)

    def _learn_type_variable(self, node: ast.Assign) -> None:
        call = node.value
        if isinstance(call, ast.Call) and _last_name(call.func) == "TypeVar":
            for keyword in call.keywords:
                if keyword.arg == "bound":
                    variable = _last_name(node.targets[0])
                    self._names.aliases[variable].add(_last_name(keyword.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        self._bind(node.target, self._annotated(node.annotation) or self._type_of(node.value))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._bind(node.target, self._type_of(node.value))

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._bind(node.target, self._type_of(node.iter))
        for each in (*node.body, *node.orelse):
            self.visit(each)

    visit_AsyncFor = visit_For  # type: ignore[assignment]  # noqa: N815

    def _visit_comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> None:
        self._known.append({})
        for each in node.generators:
            self.visit(each.iter)
            self._bind(each.target, self._type_of(each.iter))
            for condition in each.ifs:
                self.visit(condition)
        parts = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        for part in parts:
            self.visit(part)
        self._known.pop()

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_comprehension  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        func = node.func
        name = _last_name(func)
        made = _message_named(func, self._imported) or self._names.forwarders.get(name, "")
        if made:
            self.uses.made.add(made)
            for keyword in node.keywords:
                if keyword.arg is not None:
                    self.uses.written.add((made, keyword.arg))
                elif self._function is not None and self._function.args.kwarg is not None:
                    self._names.forwarders[self._function.name] = made
        elif isinstance(func, ast.Attribute):
            self._note_method(node, func)
        elif name == "getattr" and len(node.args) > 1:
            self._note_getattr(node)
        self._note_passed(name, node)
        self.generic_visit(node)

    def _note_method(self, node: ast.Call, func: ast.Attribute) -> None:
        if func.attr == "HasField" and isinstance(node.args[0], ast.Constant):
            _note(self.uses.read, self._type_of(func.value), str(node.args[0].value))
        elif func.attr in _CHANGES:
            if isinstance(func.value, ast.Attribute):
                _note(self.uses.written, self._owners(func.value), func.value.attr)
            if func.attr == "add":
                added = self._type_of(func.value)
                self.uses.made |= added
                for keyword in node.keywords:
                    _note(self.uses.written, added, keyword.arg or "")

    def _note_getattr(self, node: ast.Call) -> None:
        """Note a field that a string names; a variable may be any string of the module."""
        types = self._type_of(node.args[0])
        constant = node.args[1]
        named = [constant] if isinstance(constant, ast.Constant) else list(ast.walk(self._tree))
        for each in named if types else ():
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                _note(self.uses.read, types, each.value)
                _note(self.uses.written, types, each.value)

    def _note_passed(self, name: str, node: ast.Call) -> None:
        """Note the messages that are passed as another type."""
        parameters = self._names.parameters.get(name, [])
        given = list(zip(parameters, node.args, strict=False))
        given += [
            (parameter, keyword.value)
            for keyword in node.keywords
            for parameter in parameters
            if parameter[0] == keyword.arg
        ]
        for (_, annotation), value in given:
            types = self._type_of(value) & MESSAGES.keys()
            for protocol in self._annotated(annotation) - MESSAGES.keys() if types else ():
                self.passed[protocol] |= types

    # Scopes

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        self._known.append({each.arg: self._annotated(each.annotation) for each in arguments})
        outer, self._function = self._function, node
        for each in node.body:
            self.visit(each)
        self._function = outer
        self._known.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._known.append(
            {
                each.arg: frozenset({"BaseCommand"}) if each.arg == "command" else _NO_TYPES
                for each in node.args.args
            }
        )
        self.visit(node.body)
        self._known.pop()
