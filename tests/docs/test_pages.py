"""Pages of the project: commands, targets, settings, tests, files, links that exist."""

import ast
import codeop
import re
from pathlib import Path
from typing import Final

import pytest
import typer.main
from typer.core import TyperGroup

from config.settings import ConfigurationError, load_settings
from magnetar import api
from magnetar.cli.main import build_app
from magnetar.spark.options import CONNECTION_OPTIONS
from magnetar.spark.sink_options import SINK_OPTIONS
from magnetar.spark.source_options import SOURCE_OPTIONS

ROOT: Final = Path(__file__).resolve().parents[2]
README: Final = (ROOT / "README.md").read_text("utf-8")
MAX_LINE: Final = 140
OF_SPARK_ITSELF: Final = frozenset({"queryName"})
"""Spark gives it to sinks, which have no use for it."""
FOLDERS: Final = (
    *("docs", "broker", "config", "magnetar", "security", "storage", "txn"),
    "tests/simulation",
)
PAGES: Final = (
    *sorted(ROOT.glob("*.md")),
    *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")),
)


PYTHON: Final = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def paste(code: str) -> None:
    """Compile lines one by one, as `python -m asyncio` does.  Raises SyntaxError."""
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    statement: list[str] = []
    for line in [*code.splitlines(), ""]:
        statement.append(line)
        if compiler("\n".join(statement)) is not None:
            statement.clear()
    assert not any(statement), f"It does not end: {statement[0]}"


def commands() -> TyperGroup:
    found = typer.main.get_command(build_app())
    assert isinstance(found, TyperGroup)
    return found


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_smallest_cluster_file_is_enough(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.+?)```", README, re.DOTALL)
    assert len(blocks) == 1
    file = tmp_path / "broker.toml"
    file.write_text(blocks[0], "utf-8")
    settings = load_settings(file)
    assert settings.in_cluster
    assert settings.ledger_ensemble_size == 2
    for name in ("metadata_store_url", "bookkeeper_metadata_service_uri"):
        smaller = tmp_path / "smaller.toml"
        lines = [line for line in blocks[0].splitlines() if not line.startswith(f"{name} ")]
        smaller.write_text("\n".join(lines), "utf-8")
        with pytest.raises(ConfigurationError, match="go together"):
            load_settings(smaller)


@pytest.mark.parametrize("command", sorted(set(re.findall(r"magnetar ([a-z]+)(?= )", README))))
def test_commands_exist(command: str) -> None:
    assert command in commands().commands


def test_every_command_is_named() -> None:
    shown = {name for name, command in commands().commands.items() if not command.hidden}
    assert shown <= set(re.findall(r"`magnetar ([a-z]+)", README))


def test_no_help_text_is_taken_for_markup() -> None:
    # Rich takes a word in brackets for a style, and prints nothing of it.
    pending: list[tuple[str, object]] = [("magnetar", commands())]
    while pending:
        name, command = pending.pop()
        pending += [
            (f"{name} {word}", each) for word, each in getattr(command, "commands", {}).items()
        ]
        texts = [getattr(command, "help", None)]
        texts += [getattr(each, "help", None) for each in getattr(command, "params", [])]
        for text in filter(None, texts):
            assert not re.search(r"\[[a-z#/@][^\[]*\]", text), (name, text)


@pytest.mark.parametrize("name", api.__all__)
def test_every_name_of_the_client_is_on_its_page(name: str) -> None:
    page = (ROOT / "docs/client.md").read_text("utf-8")
    assert re.search(rf"\b{name}\b", page)


@pytest.mark.parametrize(
    ("section", "options"),
    [
        ("Source", {*CONNECTION_OPTIONS, *SOURCE_OPTIONS}),
        ("Sink", {*SINK_OPTIONS} - {*CONNECTION_OPTIONS} - OF_SPARK_ITSELF | {"serviceUrl"}),
    ],
)
def test_the_table_of_options_has_what_the_format_knows(section: str, options: set[str]) -> None:
    page = (ROOT / "docs/spark.md").read_text("utf-8")
    (text,) = re.findall(rf"^## {section}\n(.+?)^## ", page, re.MULTILINE | re.DOTALL)
    (table,) = re.findall(r"^\| option \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    named = [
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    assert sorted(named) == sorted(options)


def test_every_option_of_a_job_is_on_its_page() -> None:
    jobs = commands().commands["pipeline"]
    assert isinstance(jobs, TyperGroup)
    options = {
        name: {text for each in job.params for text in (*each.opts, *each.secondary_opts)}
        for name, job in jobs.commands.items()
    }
    of_all = set.intersection(*options.values()) - {"--master"}
    for name, own in options.items():
        page = (ROOT / f"docs/pipeline-{name}.md").read_text("utf-8")
        asked = {each for each in own - of_all if each.startswith("--")}
        assert {"--master"} < asked
        assert asked <= set(re.findall(r"`(--[a-z-]+)", page))


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/client.md"], ids=ids)
def test_each_block_of_python_can_be_pasted(page: Path) -> None:
    text = page.read_text("utf-8")
    for block in PYTHON.finditer(text):
        try:
            paste(block[1])
        except SyntaxError as error:
            line = text[: block.start(1)].count("\n") + 1
            pytest.fail(f"{page}, the block from line {line} on: {error}: {error.text}")


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(
        re.findall(r"(?:`|^)make ([a-z]+(?:-[a-z]+)*)", page.read_text("utf-8"), re.MULTILINE)
    )
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        path = (page.parent / target) if target else page
        assert path.exists(), f"{page} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", each).lower().replace(" ", "-") for each in headings}
            assert anchor in slugs, f"{page} links to #{anchor}"


def test_tests_and_files_that_are_named_exist() -> None:
    texts = {path: path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")}
    functions = set(
        re.findall(r"^(?:async )?def (test_\w+)", "\n".join(texts.values()), re.MULTILINE)
    )
    known = functions | {path.stem for path in texts}
    for page in PAGES:
        text = page.read_text("utf-8")
        written = set(re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE))
        unknown = set(re.findall(r"\b(test_\w+)\b", text)) - known - written
        assert not unknown, f"{page} names {unknown}"
        for name in re.findall(r"`((?:tests|bench|scripts|deploy)/[\w/.-]+)`", text):
            assert (ROOT / name).exists(), f"{page} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_lines_of_text_are_short(page: Path) -> None:
    """Rows of tables cannot be wrapped; what they say is short where it can be."""
    lines = page.read_text("utf-8").splitlines()
    assert not [line for line in lines if len(line) > MAX_LINE and not line.startswith("|")]
