"""What holds in every state, of groups of attempts."""

from tests.model.group_requests import Broken, folded
from tests.model.group_state import COMMITTED, NONE, OPEN, Answer, Request, World


def broken(before: World, after: World, rules: Broken) -> str | None:
    """The promise that this move breaks, or that is broken after it."""
    if after.problem:
        return after.problem
    if after.headers is not before.headers:
        found = _moved(before, after) or _exactly_once(after) or _one_open(after)
        if found:
            return found
    if after.rows is not before.rows or after.commits is not before.commits:
        found = _rows(after, rules)
        if found:
            return found
    if after.attempts is not before.attempts:
        found = _attempts(after) or _one_open(after)
        if found:
            return found
    if after.key is not before.key or after.headers is not before.headers:
        return _remembered(after)
    return None


def _moved(before: World, after: World) -> str | None:
    for group, (x, y) in enumerate(zip(before.headers, after.headers, strict=False)):
        if x.state not in (y.state, OPEN):
            return f"group {group} went from {x.state} to {y.state}"
        if y.deadline < x.deadline:
            return f"the deadline of group {group} fell"
        if x.state != y.state and y.state == COMMITTED and x.nonce != NONE and y.commit is None:
            return f"group {group} is committed for no batch"
        if x.state != y.state and y.state == COMMITTED and x.epoch < before.answered:
            return f"group {group} of epoch {x.epoch} commits after {before.answered} was answered"
    return None


def _exactly_once(world: World) -> str | None:
    batches = [x.batch for x in world.commits]
    for commit in world.commits:
        if batches.count(commit.batch) > 1:
            return f"batch {tuple(commit.batch)} was committed twice"
    return None


def _rows(world: World, rules: Broken) -> str | None:
    """Of a committed batch each task (there is one) is visible once."""
    for commit in world.commits:
        header = world.headers[commit.group]
        if any(x >= header.reserved for x in commit.winners):
            return f"a winner of group {commit.group} was never given"
        seen = [
            x
            for x in world.rows
            if x[0] == commit.group and (x[1] in commit.winners or "G1-winners" in rules)
        ]
        if len(seen) != len(commit.winners):
            return f"batch {tuple(commit.batch)} shows {len(seen)} rows of {len(commit.winners)}"
    return None


def _one_open(world: World) -> str | None:
    given = {x.group for x in world.attempts if x.group != NONE}
    given |= {x.group for x in (world.key.transaction, world.key.before) if x is not None}
    opened = [x for x in sorted(given) if world.headers[x].state == OPEN]
    if len(opened) > 1:
        return f"groups {opened} are open at once"
    for group in opened:
        if world.headers[group].epoch < world.answered:
            return f"group {group} is open though epoch {world.answered} was answered"
    return None


def _attempts(world: World) -> str | None:
    groups: dict[int, int] = {}
    seen: set[tuple[int, int]] = set()
    for attempt in world.attempts:
        if attempt.group == NONE:
            continue
        if (attempt.group, attempt.number) in seen:
            return f"attempt {attempt.group}.{attempt.number} was given twice"
        seen.add((attempt.group, attempt.number))
        nonce = world.headers[attempt.group].nonce
        if nonce != NONE and groups.setdefault(nonce, attempt.group) != attempt.group:
            return f"nonce {nonce} has groups {groups[nonce]} and {attempt.group}"
    return None


def _remembered(world: World) -> str | None:
    """What can be known from the key and its last header is what was committed last."""
    last = world.key.last
    header = None if last is None else world.read(last.group)
    fold = folded(world.key, header, frozenset())
    if fold.last != (world.commits[-1] if world.commits else None):
        return f"of commits {len(world.commits)} the last is not what the key and its header tell"
    return None


def meddled(before: World, after: World, request: Request) -> str | None:
    """What a fenced driver changed: nothing but what it has put itself, and nobody was told of."""
    if request.kind in ("open", "collect") or request.epoch >= before.answered:
        return None
    if after.key != before.key:
        return f"driver {request.driver} changes the key, though it is fenced"
    for group, (x, y) in enumerate(zip(before.headers, after.headers, strict=False)):
        if x != y and x.epoch != request.epoch:
            return f"driver {request.driver} changes group {group}, though it is fenced"
    return None


def wrong_answer(  # noqa: PLR0911 - a reason each
    world: World, request: Request, answer: Answer, *, current: bool
) -> str | None:
    """Why that answer should not have been given; `current`: to the nonce its driver is at."""
    holds = world.key.epoch == request.epoch
    batches = [x.batch for x in world.commits]
    nonces = {world.headers[x.group].nonce for x in world.commits}
    if request.kind == "open":
        known = world.commits[-1] if world.commits else None
        if world.key.epoch == answer.epoch and answer.last != known:
            return "OPEN tells another batch than the last one committed"
    elif answer.verdict == "done" and request.batch is not None:
        if not any(x.query == request.batch.query and x >= request.batch for x in batches):
            return f"batch {tuple(request.batch)} is told done, and is not"
        if request.kind == "commit":
            return _left_open(world, request)
    elif answer.verdict == "committed" and request.batch not in batches:
        return "COMMIT is told done, and is not"
    elif request.kind == "commit" and answer.verdict == "refused" and request.nonce in nonces:
        return "COMMIT is refused, though its group committed" if holds else None
    elif answer.verdict == "busy" and holds and current:
        return "the holder of the key is told that its key is busy"
    elif request.kind == "abort" and not any(x and x.kind == "commit" for x in world.requests):
        return _left_open(world, request)
    return None


def _left_open(world: World, request: Request) -> str | None:
    named = world.key.transaction
    if named is not None and world.key.epoch == request.epoch:
        header = world.headers[named.group]
        if header.state == OPEN and header.nonce == request.nonce:
            return f"group {named.group} is left open"
    return None
