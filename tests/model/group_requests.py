"""Pure: what a coordinator does about each request, one access of the store at a time.

`advance` makes one step: the world after it, and the request as it goes on, or its answer.  Each
rule that can be taken out has a name; `broken` holds those that are.
"""

from collections.abc import Callable, Mapping

from tests.model.group_state import (
    ABORTED,
    COMMITTED,
    NONE,
    OPEN,
    Answer,
    Commit,
    Fold,
    Header,
    Key,
    Named,
    Request,
    World,
    put,
)

BLOCK = 2
"""Indexes are reserved so many at once."""
QUERIES = 8
"""Earlier queries that a key remembers."""
NONCES = 16
"""Groups of its epoch that a key remembers by their nonces."""

Broken = frozenset[str]
Step = tuple[str, World, Request | Answer]


def folded(key: Key, header: Header | None, broken: Broken) -> Fold:
    """What the key remembers with its last transaction taken in."""
    last = key.last
    if last is None or last.told or header is None or header.state != COMMITTED:
        return key.fold
    if header.commit is None:
        return key.fold
    keep = 0 if "G5-queries" in broken else QUERIES
    return key.fold.with_commit(header.commit, keep=keep)


def _is_done(request: Request, broken: Broken) -> bool:
    key, batch = request.key, request.batch
    if key is None or batch is None or "G6-replay" in broken:
        return False
    fold = key.fold if "G6-header" in broken else folded(key, request.header, broken)
    if "G6-equal" in broken:
        return batch in fold.batches
    return fold.has(batch)


# OPEN_TRANSACTION_KEY


def _open(w: World, r: Request, broken: Broken) -> Step:
    if r.step == "key":
        step = "settle" if w.key.opener == r.driver else "take"
        if "G5-early" in broken and step == "take":
            step = "peek"
        return "reads the key", w, r._replace(key=w.key, step=step)
    key = r.key
    assert key is not None
    if r.step == "peek":
        header = None if key.last is None else w.read(key.last.group)
        return "reads the last header", w, r._replace(header=header, step="take")
    if r.step == "take":
        if w.key != key:
            return "finds the key changed", w, r._replace(step="key")
        kept = Fold() if "G5-carry" in broken else key.fold
        new = Key(key.epoch + 1, r.driver, before=key.last, fold=kept)
        return f"takes epoch {new.epoch}", w._replace(key=new), r._replace(key=new, step="settle")
    return _settle(w, r, key, broken)


def _settle(w: World, r: Request, key: Key, broken: Broken) -> Step:  # noqa: PLR0911 - an answer each
    if r.step == "again":
        return "reads the key again", w, Answer("opened", epoch=key.epoch, last=w.key.fold.last)
    fold = folded(key, r.header, broken) if "G5-early" in broken else key.fold
    known = Answer("opened", epoch=key.epoch, last=fold.last)
    last = key.before
    if last is None or last.told:
        return "has nothing to settle", w, known
    header = w.read(last.group)
    if r.step == "abort":
        if w.headers[last.group] != r.header or header is None:
            return f"finds group {last.group} changed", w, r._replace(step="settle")
        done = w.with_header(last.group, header._replace(state=ABORTED))
        return f"aborts group {last.group}", done, known
    if header is None:
        if "G5-gone" in broken:
            return f"finds group {last.group} collected", w, known
        return f"finds group {last.group} collected", w, r._replace(step="again")
    if header.state == OPEN:
        if "K2-abort" in broken:
            return f"leaves group {last.group} open", w, known
        return f"reads group {last.group}: open", w, r._replace(header=header, step="abort")
    if "G5-early" not in broken:
        known = known._replace(last=folded(key, header, broken).last)
    return f"reads group {last.group}: {header.state}", w, known


# BEGIN_ATTEMPT, NEW_TXN


def _fenced(w: World, r: Request, broken: Broken) -> bool:
    return w.key.epoch != r.epoch and "K4-epoch" not in broken


def _begin(w: World, r: Request, broken: Broken) -> Step:
    if r.step == "key":
        if _fenced(w, r, broken):
            return "is fenced", w, Answer("fenced")
        step = "create" if w.key.last is None else "last"
        return "reads the key", w, r._replace(key=w.key, header=None, step=step)
    if r.step == "again" and w.key != r.key:
        return "finds the key changed", w, r._replace(step="key")
    if r.step in ("last", "again"):
        return _find(w, r, broken)
    if r.step in ("create", "name", "undo"):
        return _name(w, r, broken)
    return _give(w, r, broken)


def _find(w: World, r: Request, broken: Broken) -> Step:
    key = r.key
    assert key is not None
    assert key.last is not None
    last = key.last
    header = w.read(last.group)
    r = r._replace(header=header)
    said = f"reads group {last.group}: {'collected' if header is None else header.state}"
    if header is None and not last.told and r.step == "last":
        return said, w, r._replace(step="again")
    if r.kind == "begin" and _is_done(r, broken):
        return said, w, Answer("done")
    is_mine = key.transaction == last and key.nonce == r.nonce != NONE
    if header is not None and header.state == OPEN:
        if is_mine:
            return said, w, r._replace(group=last.group, step="index")
        if "G3-busy" not in broken:
            return said, w, Answer("busy")
    if _had_group(key, r, broken):
        return said, w, Answer("refused")
    return said, w, r._replace(step="create")


def _had_group(key: Key, r: Request, broken: Broken) -> bool:
    if "G3-ended" in broken:
        return False
    known = key.nonces[-1:] if "G3-last" in broken else key.nonces
    return r.nonce in known


def _name(w: World, r: Request, broken: Broken) -> Step:
    key, made = r.key, r.made
    assert key is not None
    if r.step == "create":
        header = Header(OPEN, r.nonce, r.epoch, 0 if r.kind == "plain" else BLOCK)
        new = w._replace(headers=(*w.headers, header))
        return f"puts header {len(w.headers)}", new, r._replace(made=len(w.headers), step="name")
    if r.step == "undo":
        if w.headers[made].state == OPEN:
            w = w.with_header(made, w.headers[made]._replace(state=ABORTED))
        return f"aborts header {made}", w, r._replace(made=NONE, step="key")
    if w.key != key and "K3-version" not in broken:
        return "finds the key changed", w, r._replace(step="undo")
    if w.key != key:
        key = w.key
    is_kept = "G5-name" in broken or ("G5-plain" in broken and r.kind == "plain")
    fold = key.fold if is_kept else folded(key, r.header, broken)
    nonces = key.nonces if r.nonce == NONE else (*key.nonces, r.nonce)[-NONCES:]
    named = key._replace(transaction=Named(made), nonce=r.nonce, nonces=nonces, fold=fold)
    w = w._replace(key=named)
    if r.kind == "plain":
        return f"names {made}", w, Answer("given", made, 0)
    if r.kind == "commit":
        return f"names {made}", w, r._replace(step="key", made=NONE)
    w = w._replace(blocks=put(w.blocks, r.leader, (made, 1, BLOCK)))
    return f"names {made}", w, Answer("given", made, 0)


def _give(w: World, r: Request, broken: Broken) -> Step:
    group, (of, index, end) = r.group, w.blocks[r.leader]
    if r.step == "index":
        if of == group and index < end:
            w = w._replace(blocks=put(w.blocks, r.leader, (group, index + 1, end)))
            return "has an index", w, Answer("given", group, index)
        header = w.read(group)
        if header is None or header.state != OPEN:
            return f"finds group {group} ended", w, Answer("refused")
        if "G2-reserve" in broken:
            index = 0 if of != group else index
            w = w._replace(blocks=put(w.blocks, r.leader, (group, index + 1, index + 1)))
            return "counts in memory", w, Answer("given", group, index)
        return f"reads header {group}", w, r._replace(header=header, step="reserve")
    now, header = w.headers[group], r.header
    assert header is not None
    if now != header and "G2-version" not in broken:
        return f"finds header {group} changed", w, r._replace(step="index")
    first = header.reserved
    deadline = 0 if "G8-falls" in broken else header.deadline
    w = w.with_header(group, header._replace(reserved=first + BLOCK, deadline=deadline))
    w = w._replace(blocks=put(w.blocks, r.leader, (group, first + 1, first + BLOCK)))
    return f"reserves indexes {first} to {first + BLOCK - 1}", w, Answer("given", group, first)


# COMMIT_GROUP


def _commit(w: World, r: Request, broken: Broken) -> Step:  # noqa: PLR0911 - an answer each
    if r.step == "key":
        if _fenced(w, r, broken):
            return "is fenced", w, Answer("fenced")
        step = "create" if w.key.last is None else "last"
        return "reads the key", w, r._replace(key=w.key, header=None, step=step)
    if r.step == "again" and w.key != r.key:
        return "finds the key changed", w, r._replace(step="key")
    if r.step in ("last", "again"):
        return _judge(w, r, broken)
    if r.step in ("create", "name", "undo"):
        return _name(w, r, broken)
    group, header = r.made, r.header
    assert header is not None
    assert r.batch is not None
    now = w.headers[group]
    if now != header and not ("G4-version" in broken and r.step == "write"):
        return f"finds group {group} changed", w, r._replace(step="key", made=NONE)
    if r.step == "abort":
        new = w.with_header(group, header._replace(state=ABORTED))
        return f"aborts group {group}", new, Answer("done")
    commit = Commit(r.batch, group, r.winners)
    new = w.with_header(group, header._replace(state=COMMITTED, commit=commit))
    new = new._replace(commits=(*new.commits, commit))
    return f"commits group {group}", new, Answer("committed", group)


def _judge(w: World, r: Request, broken: Broken) -> Step:  # noqa: PLR0911 - an answer each
    key = r.key
    assert key is not None
    assert key.last is not None
    last = key.last
    header = w.read(last.group)
    r = r._replace(header=header, made=last.group)
    said = f"reads group {last.group}: {'collected' if header is None else header.state}"
    if header is None and not last.told and r.step == "last":
        return said, w, r._replace(step="again", made=NONE)
    is_mine = key.transaction == last and key.nonce == r.nonce
    is_open = header is not None and header.state == OPEN
    if "G4-again" in broken and is_mine and not is_open:
        return said, w, Answer("refused")
    if _is_done(r, broken):
        if is_mine and is_open and "G6-abort" not in broken:
            return said, w, r._replace(step="abort")
        return said, w, Answer("done")
    if not is_mine and r.group == NONE and not is_open:
        if "G4-empty" in broken:
            return said, w, Answer("done")
        if _had_group(key, r, broken):
            return said, w, Answer("refused")
        return said, w, r._replace(step="create", made=NONE)
    if not is_mine or not is_open or header is None:
        return said, w, Answer("refused")
    if any(x >= header.reserved for x in r.winners) and "G4-winners" not in broken:
        return said, w, Answer("refused")
    return said, w, r._replace(step="write")


# ABORT_GROUP, EXTEND_GROUP


def _abort(w: World, r: Request, broken: Broken) -> Step:
    if r.step == "key":
        named = w.key.transaction
        if (w.key.epoch != r.epoch and "G7-epoch" not in broken) or named is None:
            return "finds nothing of its epoch", w, Answer("nothing")
        return "reads the key", w, r._replace(group=named.group, step="read")
    if "G7-named" in broken and w.key.last is not None:
        r = r._replace(group=w.key.last.group)
    header = w.read(r.group)
    if header is None or (header.state != OPEN and "G7-open" not in broken):
        return f"finds group {r.group} ended", w, Answer("nothing")
    if r.step == "read":
        return f"reads group {r.group}", w, r._replace(header=header, step="write")
    if header != r.header and "G7-named" not in broken:
        return f"finds group {r.group} changed", w, r._replace(step="read")
    new = w.with_header(r.group, header._replace(state=ABORTED))
    return f"aborts group {r.group}", new, Answer("aborted", r.group)


def _extend(w: World, r: Request, broken: Broken) -> Step:
    if r.step == "key":
        if _fenced(w, r, broken):
            return "is fenced", w, Answer("fenced")
        return "reads the key", w, r._replace(step="read")
    header = w.read(r.group)
    if r.step == "read":
        if header is None or header.state != OPEN:
            return f"finds group {r.group} ended", w, Answer("refused")
        return f"reads group {r.group}", w, r._replace(header=header, step="write")
    if header != r.header and "G8-version" not in broken:
        return f"finds group {r.group} changed", w, r._replace(step="read")
    assert r.header is not None
    new = w.with_header(r.group, r.header._replace(deadline=1))
    return f"extends group {r.group}", new, Answer("extended", r.group)


# The collector


def _collect(w: World, r: Request, broken: Broken) -> Step:
    group, header = r.group, w.headers[r.group]
    if r.step == "key" and "K8-note" not in broken:
        new = _noted(w.key, group, header, broken)
        if new == w.key:
            return f"notes nothing of {group}", w, r._replace(step="delete")
        return f"reads the key for {group}", w, r._replace(key=w.key, step="note")
    if r.step == "note":
        if w.key != r.key:
            return "finds the key changed", w, Answer("given up")
        new = _noted(w.key, group, header, broken)
        return f"notes the end of {group}", w._replace(key=new), r._replace(step="delete")
    return f"deletes header {group}", w.with_header(group, header._replace(gone=True)), Answer("")


def _noted(key: Key, group: int, header: Header, broken: Broken) -> Key:
    """The key with the end of that transaction (K8), and folded in if it is the last one (G5)."""
    is_last = key.last == Named(group)
    if is_last and "G5-collect" not in broken:
        key = key._replace(fold=folded(key, header, broken))
    elif "G5-any" in broken and header.commit is not None and key.before == Named(group):
        key = key._replace(fold=key.fold.with_commit(header.commit, keep=QUERIES))
    told = Named(group, header.state)
    if key.transaction == Named(group):
        return key._replace(transaction=told)
    if key.before == Named(group):
        return key._replace(before=told)
    return key


_KINDS: Mapping[str, Callable[[World, Request, Broken], Step]] = {
    "open": _open,
    "begin": _begin,
    "plain": _begin,
    "commit": _commit,
    "abort": _abort,
    "extend": _extend,
    "collect": _collect,
}


def advance(world: World, request: Request, broken: Broken) -> Step:
    """One step of that request."""
    return _KINDS[request.kind](world, request, broken)
