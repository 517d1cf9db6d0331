"""Writes the clients for threads of `magnetar/sync` from those for tasks (`make sync`).

A method of the client for tasks becomes one of the same name, parameters and docstring that runs it
on the client's own thread and waits. What it opens or gives is wrapped in its counterpart of
`magnetar/sync`. What is not a mere call (producers, consumers, transactions) is written by hand,
and so are the first and the last part of each file here.

`--check` writes nothing, and ends with 1 if a file is not what would be written.
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
WRAPPERS: Final = {
    "Producer": "Producer",
    "QueueConsumer": "QueueConsumer",
    "NamespaceQueueConsumer": "QueueConsumer",
    "StreamConsumer": "StreamConsumer",
    "NamespaceStreamConsumer": "StreamConsumer",
    "CheckpointConsumer": "CheckpointConsumer",
    "Transaction": "Transaction",
    "AttachedTransaction": "AttachedTransaction",
    "TransactionKey": "TransactionKey",
    "Attempt": "Attempt",
}
"""The counterpart in `magnetar/sync` of each class that methods open or give."""
GENERATED: Final = "Generated from {} by `make sync`: edit that file."

CLIENT_HEAD: Final = '''"""The client for threads: an asyncio client on a thread of its own.

{generated}
"""

from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, TypeVar, Unpack, overload

import magnetar
from magnetar.bounds import READ_BYTES
from magnetar.checkpoint import Checkpoint
from magnetar.consume.settings import CheckpointOptions, QueueOptions, StreamOptions
from magnetar.errors import AlreadyClosed
from magnetar.layout import Layout
from magnetar.opening import Openable, Opening
from magnetar.options import ProducerOptions
from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import TxnId
from magnetar.reads.entries import StoredEntry
from magnetar.reads.plan import RangePlan
from magnetar.schema.plain import BYTES
from magnetar.schema.schema import Schema
from magnetar.settings import ClientOptions
from magnetar.sync.bridge import Bridge, ClosedAfterwards
from magnetar.sync.consumers import CheckpointConsumer, QueueConsumer, StreamConsumer
from magnetar.sync.producer import Producer
from magnetar.sync.transaction import AttachedTransaction, Transaction
from magnetar.sync.transaction_key import TransactionKey

__all__ = ["Client", "connect"]

T = TypeVar("T")
O = TypeVar("O", bound=Openable)  # noqa: E741 - what is opened
_NO_PROPERTIES: Final[Mapping[str, str]] = MappingProxyType({{}})


def connect(url: str, **settings: Unpack[ClientOptions]) -> "Client":
    """Connect to the brokers at `url`; see `magnetar.connect`.

    To be used by `with`, or closed.

    Settings:
{settings}
    """
    bridge = Bridge()
    try:
        core = bridge.run(lambda: magnetar.connect(url, **settings))
    except BaseException:
        bridge.close()
        raise
    return Client(bridge, core)


class Client(ClosedAfterwards):
    """A `magnetar.Client` for threads; any thread may use it. Made by `connect`.

    Objects that it returns are open, and are closed with the client at the latest. If the caller is
    interrupted while one is opened (by Ctrl-C, say), it is closed again.
    """

    def __init__(self, bridge: Bridge, core: magnetar.Client) -> None:
        self._bridge = bridge
        self._core = core
        bridge.at_end(core.close)

'''
CLIENT_TAIL: Final = '''
    def close(self) -> None:
        """Close all that the client has opened, its connections and its thread. Idempotent."""
        self._bridge.close()

    def _opened(self, opening: Opening[O]) -> O:
        return self._bridge.run_or_hand(self._close_unclaimed, lambda: opening)

    def _close_unclaimed(self, opened: Openable) -> None:
        # Its caller was interrupted, so no one else closes it.
        self._bridge.run(opened.close)

    def _lists_of(
        self, reading: AsyncGenerator[list[StoredEntry], None]
    ) -> Generator[list[StoredEntry], None, None]:
        try:
            while entries := self._bridge.run(anext, reading, []):
                yield entries
        finally:
            with suppress(AlreadyClosed):
                self._bridge.run(reading.aclose)
'''
KEY_HEAD: Final = '''"""Transaction keys for threads.

{generated}
"""

from collections.abc import Sequence

from magnetar.errors import AlreadyClosed
from magnetar.protocol.txn_id import TxnId
from magnetar.sync.bridge import Bridge, ClosedAfterwards
from magnetar.sync.transaction import Attempt
from magnetar.transactions.groups import CommittedGroup, GroupRecord, Winner
from magnetar.transactions.key_holder import LastTransaction
from magnetar.transactions.keys import TransactionKey as AsyncTransactionKey

__all__ = ["TransactionKey"]


class TransactionKey(ClosedAfterwards):
    """A `magnetar.TransactionKey` for threads."""

    def __init__(self, bridge: Bridge, core: AsyncTransactionKey) -> None:
        self._core = core
        self._bridge = bridge

    @property
    def core(self) -> AsyncTransactionKey:
        """The asyncio key."""
        return self._core

    @property
    def name(self) -> str:
        """The key's name."""
        return self._core.name

    @property
    def epoch(self) -> int:
        """The epoch of the key, with which other processes can attach."""
        return self._core.epoch

    @property
    def is_fenced(self) -> bool:
        """Whether a newer epoch has fenced it."""
        return self._core.is_fenced

    @property
    def last_transaction(self) -> LastTransaction | None:
        """The last transaction of earlier epochs, as opening found it."""
        return self._core.last_transaction

    @property
    def last_group(self) -> GroupRecord | None:
        """The last batch that a group of any epoch committed, as opening found it."""
        return self._core.last_group

'''
KEY_TAIL: Final = '''
    def close(self) -> None:
        """Close it; the epoch stays valid for other holders. Idempotent."""
        try:
            self._bridge.run(self._core.close)
        except AlreadyClosed:
            return
'''


@dataclass(frozen=True)
class Face:
    """One class for tasks, and the file of its counterpart."""

    source: str
    class_name: str
    target: str
    head: str
    tail: str
    by_hand: frozenset[str] = frozenset({"open", "close"})


FACES: Final = (
    Face("magnetar/client.py", "Client", "magnetar/sync/client.py", CLIENT_HEAD, CLIENT_TAIL),
    Face(
        "magnetar/transactions/keys.py",
        "TransactionKey",
        "magnetar/sync/transaction_key.py",
        KEY_HEAD,
        KEY_TAIL,
    ),
)
Method = ast.FunctionDef | ast.AsyncFunctionDef


def generate(face: Face) -> str:
    """Return the text of the counterpart's file."""
    tree = ast.parse((ROOT / face.source).read_text("utf-8"))
    found = next(
        each
        for each in tree.body
        if isinstance(each, ast.ClassDef) and each.name == face.class_name
    )
    methods = [
        each
        for each in found.body
        if isinstance(each, Method) and each.name[0] != "_" and each.name not in face.by_hand
    ]
    given: dict[str, str] = {}
    generated = GENERATED.format(face.source)
    parts = [face.head.format(generated=generated, settings=_settings_of_connect(tree))]
    parts += [_counterpart(method, given) for method in methods]
    return _formatted("\n".join([*parts, face.tail]), face.target)


def _settings_of_connect(tree: ast.Module) -> str:
    """Return the settings in the docstring of `connect`; empty in a file that lacks it."""
    for each in tree.body:
        if isinstance(each, ast.FunctionDef) and each.name == "connect":
            text = ast.get_docstring(each, clean=False) or ""
            return text.partition("    Settings:\n")[2].rstrip()
    return ""


def _counterpart(method: Method, given: dict[str, str]) -> str:
    """Return the method for threads.  `given` keeps what overloads give, for those behind them."""
    returns = method.returns
    assert returns is not None, f"{method.name} says nothing of what it returns."
    if ast.unparse(returns).startswith("Opening[") and isinstance(returns, ast.Subscript):
        opened: ast.expr = returns.slice
    else:
        opened = returns
    wrapper = given.get(method.name)
    for name in _names(opened):
        if name in WRAPPERS:
            wrapper = given[method.name] = WRAPPERS[name]
    result = _result(opened, wrapper)
    signature = f"def {method.name}({ast.unparse(method.args)}) -> {result}:"
    if any(ast.unparse(each) == "overload" for each in method.decorator_list):
        return f"    @overload\n    {signature} ..."
    docstring = ast.get_docstring(method, clean=False)
    assert docstring is not None, f"{method.name} has no docstring."
    docstring = docstring.replace("`async with`", "`with`")
    body = "\n".join(f"        {line}" for line in _body(method, returns, wrapper))
    return f'    {signature}\n        """{docstring}"""\n{body}\n'


def _result(opened: ast.expr, wrapper: str | None) -> str:
    """Return the annotation of what the method for threads gives."""
    text = ast.unparse(opened)
    if wrapper is not None and text == "Any":
        return f"{wrapper}[Any]"
    for name, ours in WRAPPERS.items():
        if text == name or text.startswith((f"{name}[", f"{name} |")):
            return ours + text.removeprefix(name)
    if text.startswith("AsyncGenerator["):
        return text.replace("AsyncGenerator[", "Generator[").removesuffix("]") + ", None]"
    return text


def _body(method: Method, returns: ast.expr, wrapper: str | None) -> Iterator[str]:
    arguments = ", ".join(_arguments(method.args))
    text = ast.unparse(returns)
    called = f"self._core.{method.name}"
    following = f", {arguments}" if arguments else ""
    if text.startswith("Opening["):
        # The overloads are for callers; what they give on here is of none of them alone.
        ignored = "  # type: ignore[call-overload]\n" if text == "Opening[Any]" else ""
        yield f"opening = {called}({ignored}{arguments})"
        yield f"return {wrapper}(self._bridge, self._opened(opening))"
    elif text.startswith("AsyncGenerator["):
        yield f"return self._lists_of(self._bridge.call({called}{following}))"
    elif wrapper is None:
        before = "" if text == "None" else "return "
        yield f"{before}self._bridge.{_way(method)}({called}{following})"
    else:
        yield f"core = self._bridge.{_way(method)}({called}{following})"
        nothing = "None if core is None else " if text.endswith("| None") else ""
        yield f"return {nothing}{wrapper}(self._bridge, core)"


def _way(method: Method) -> str:
    return "run" if isinstance(method, ast.AsyncFunctionDef) else "call"


def _arguments(parameters: ast.arguments) -> Iterator[str]:
    """Give each parameter on, and the core of what has its counterpart here."""
    positional = [*parameters.posonlyargs, *parameters.args][1:]
    for each in positional:
        yield _core_of(each)
    for each in parameters.kwonlyargs:
        yield f"{each.arg}={_core_of(each)}"
    if parameters.kwarg is not None:
        yield f"**{parameters.kwarg.arg}"


def _core_of(parameter: ast.arg) -> str:
    annotation = "" if parameter.annotation is None else ast.unparse(parameter.annotation)
    if annotation.removesuffix(" | None") not in WRAPPERS:
        return parameter.arg
    return f"None if {parameter.arg} is None else {parameter.arg}.core"


def _names(expression: ast.expr) -> list[str]:
    return [each.id for each in ast.walk(expression) if isinstance(each, ast.Name)]


def _formatted(text: str, target: str) -> str:
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(ROOT / target), "-"]
    done = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


def main() -> int:
    """Write, or check, every file; return the exit code."""
    parser = argparse.ArgumentParser(description="Writes the clients for threads.")
    parser.add_argument("--check", action="store_true", help="write nothing: say what is stale")
    check = parser.parse_args().check
    stale = [
        (face, text) for face in FACES if (text := generate(face)) != _text_of(ROOT / face.target)
    ]
    for face, text in stale:
        if check:
            print(f"{face.target} is not what {face.source} gives: run `make sync`.")
        else:
            (ROOT / face.target).write_text(text, "utf-8")
            print(f"Wrote {face.target}.")
    return 1 if check and stale else 0


def _text_of(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
