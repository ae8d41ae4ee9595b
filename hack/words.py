"""Check the language of code and commits: words, first lines of docstrings, class names, commit subjects.

``python hack/words.py FOLDER...`` prints every finding as ``file:line: word -> use another``, and exits 1 if there is
any. The rules are:

* words: a word of ``words.txt`` occurs in the name of a module, class, function, parameter or field, in a docstring, a
  log line or an error.
* first: the docstring of a module, class or function starts with "Give", "Who", "What", "How" or "Whether".
* hint: the hint of an error starts with "Give", or ends with a full stop.
* class: two modules of the runtime or of the operator have a public class of the same name.
* commit: a subject has more than 72 characters, or its first word is not an imperative, as far as a short rule can
  detect this.

Invariant: the rules for code read syntax trees, so a comment, or a string that is only data, is never a finding.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
TABLE: Final = Path(__file__).with_suffix(".txt")
PACKAGES: Final = (ROOT / "runtime" / "asyncflow", ROOT / "operator" / "asyncflow_operator")
MOST: Final = 72
MOST_COMMITS: Final = 50
_NAMES_ONLY: Final = "names:"
_FIRST: Final = {
    "give": '"Return ..." or "Yield ..."',
    "gives": '"Return ..." or "Yield ..."',
    "who": "a noun as the subject, or an imperative",
    "what": "a noun as the subject, or an imperative",
    "how": "a noun as the subject, or an imperative",
    "whether": '"Return whether ..."',
}
_HINT: Final = re.compile(r"""^f?['"]Give |[^.]\.['"]$""")
_LEVELS: Final = frozenset(("debug", "info", "warning", "error", "exception", "critical"))
_LOGGERS: Final = frozenset(("_log", "log", "_logger", "logger"))
_ENDINGS: Final = re.compile(r"(?<=[a-z])(ed|ing|(?<!s)s)$")
_IMPERATIVES: Final = frozenset(
    ("bring", "embed", "exceed", "feed", "focus", "need", "ping", "proceed", "ring", "seed", "shed", "speed", "succeed")
)
"""Imperatives with the ending of a past tense, a gerund or a third person."""
_NO_VERBS: Final = frozenset(
    (
        "a",
        "an",
        "the",
        "this",
        "that",
        "it",
        "who",
        "what",
        "where",
        "when",
        "how",
        "whether",
        "why",
        "one",
        "two",
        "no",
    )
)

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One violation. where: ``file:line``, or a commit."""

    where: str
    rule: str
    found: str
    use: str

    def __str__(self) -> str:
        return f"{self.where}: {self.found} -> use {self.use}"


@dataclass(frozen=True, slots=True)
class Word:
    """A row of the table.

    names_only: whether the word is banned only in names; allowed: ``path:name`` or ``path:line`` without a finding.
    """

    pattern: str
    use: str
    names_only: bool
    allowed: re.Pattern[str] | None

    def in_name(self, name: str, path: str) -> str:
        """Return the part of a name that matches this word, "" if none does."""
        if self.allowed is not None and self.allowed.search(f"{path}:{name}"):
            return ""
        return next((part for part in _parts(name) if re.fullmatch(self.pattern, part, re.IGNORECASE)), "")

    def in_text(self, line: str, path: str) -> str:
        """Return the part of a line of text that matches this word, "" if none does."""
        if self.names_only or (self.allowed is not None and self.allowed.search(f"{path}:{line}")):
            return ""
        match = re.search(rf"\b(?:{self.pattern})\b", line, re.IGNORECASE)
        return match.group() if match is not None else ""


def read_table(text: str) -> tuple[Word, ...]:
    """Return the words of a table: ``WORD | SAY | EXCEPT``, one a line."""
    words = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            pattern, use, *allowed = (column.strip() for column in re.split(r" \| ?", line, maxsplit=2))
            names_only = use.startswith(_NAMES_ONLY)
            use = use.removeprefix(_NAMES_ONLY).strip()
            words.append(Word(pattern, use, names_only, re.compile(allowed[0]) if allowed else None))
    return tuple(words)


def check_module(source: str, path: str, words: tuple[Word, ...]) -> Iterator[Finding]:
    """Yield the findings in one module. path: relative to the repository."""
    nodes = list(ast.walk(ast.parse(source)))
    file = Path(path)
    some = _some(words)
    for line, name in ((1, file.parent.name if file.stem == "__init__" else file.stem), *_names(nodes)):
        for word in words if any(map(some.fullmatch, _parts(name))) else ():
            if part := word.in_name(name, path):
                yield Finding(f"{path}:{line}", "words", f"{part.lower()}, in the name {name}", word.use)
    for line, text in _texts(nodes):
        for word in words if some.search(text) else ():
            if part := word.in_text(text, path):
                yield Finding(f"{path}:{line}", "words", f'{part.lower()}, in "{text.strip()}"', word.use)
    for node in nodes:
        if isinstance(node, Documented) and (text := ast.get_docstring(node) or ""):
            first = text.split(maxsplit=1)[0].lower()
            if first in _FIRST:
                yield Finding(f"{path}:{node.body[0].lineno}", "first", f'"{text.splitlines()[0]}"', _FIRST[first])
        match node:
            case ast.keyword(arg="hint" | "fix", value=hint) | ast.Assign(targets=[ast.Name(id="hint")], value=hint):
                if _HINT.search(text := ast.unparse(hint)):
                    yield Finding(f"{path}:{hint.lineno}", "hint", text, '"Set ..." or "Use ...", without a full stop')


def check_classes(sources: dict[str, str]) -> Iterator[Finding]:
    """Yield a finding for each public class whose name another module also uses. sources: by path."""
    places: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append((path, node.lineno))
    for name, where in places.items():
        for path, line in where:
            if others := sorted({other for other, _ in where} - {path}):
                yield Finding(f"{path}:{line}", "class", f"{name}, also in {', '.join(others)}", "a name of its own")


def check_subject(commit: str, subject: str) -> Iterator[Finding]:
    """Yield the findings in the subject of a commit."""
    if len(subject) > MOST:
        yield Finding(commit, "commit", f'"{subject}" ({len(subject)} characters)', f"at most {MOST} characters")
    first = subject.partition(" ")[0]
    verb = first.lower() in _IMPERATIVES or not (_ENDINGS.search(first) or first.lower() in _NO_VERBS)
    if not (first[:1].isupper() and verb):
        yield Finding(commit, "commit", f'"{subject}"', "an imperative as the first word: Add, Fix, Fold")


def commits(base: str | None) -> list[tuple[str, str]]:
    """Return hash and subject of the commits since ``base``, without merges; none outside of a repository.

    By default, ``base`` is the commit where the branch left its upstream, or, without an upstream or on it, the commit
    that added this check. At most the latest 50 commits are returned.
    """
    if base is None:
        upstream = _git("merge-base", "HEAD", "@{upstream}").strip()
        base = upstream if upstream != _git("rev-parse", "HEAD").strip() else ""
    base = base or _git("log", "--diff-filter=A", "--format=%H", "-1", "--", "hack/words.py").strip()
    lines = _git(
        "log", "--no-merges", f"--max-count={MOST_COMMITS}", "--format=%h %s", f"{base or 'HEAD'}..HEAD"
    ).splitlines()
    return [(commit, subject) for commit, _, subject in (line.partition(" ") for line in lines)]


def check(folders: Sequence[Path], *, words: tuple[Word, ...], base: str | None) -> list[Finding]:
    """Return all findings in the folders and in the commits, in order."""
    sources = {_shown(path): path.read_text() for package in PACKAGES for path in sorted(package.rglob("*.py"))}
    chosen = {_shown(path) for folder in folders for path in folder.resolve().rglob("*.py")}
    found = [finding for path in chosen for finding in check_module((ROOT / path).read_text(), path, words)]
    found += (finding for finding in check_classes(sources) if finding.where.rpartition(":")[0] in chosen)
    found += (finding for commit, subject in commits(base) for finding in check_subject(commit, subject))
    return sorted(found, key=lambda finding: (finding.where.rpartition(":")[0], _line(finding), finding))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--base", help="check the commits since this one; by default since the upstream, or the last 50"
    )
    parser.add_argument("--summary", action="store_true", help="print only the number of findings of each rule")
    options = parser.parse_args(arguments)
    if empty := [folder for folder in options.folders if not any(folder.rglob("*.py"))]:
        parser.error(f"no Python file in {', '.join(map(str, empty))}")
    found = check(options.folders, words=read_table(TABLE.read_text()), base=options.base)
    counts = Counter(finding.rule for finding in found)
    lines = [f"{rule}: {count}" for rule, count in sorted(counts.items())] if options.summary else map(str, found)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 1 if found else 0


@cache
def _some(words: tuple[Word, ...]) -> re.Pattern[str]:
    """Return the pattern of any of the words: with it, most names and lines are searched once, not for each word."""
    return re.compile(rf"\b(?:{'|'.join(word.pattern for word in words)})\b", re.IGNORECASE)


def _parts(name: str) -> list[str]:
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)


def _names(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the names that a module defines, with their lines: classes, functions, parameters and fields."""
    for node in nodes:
        match node:
            case ast.ClassDef():
                yield node.lineno, node.name
                yield from _fields(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not node.name.startswith("__"):
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                yield node.lineno, node.attr


def _fields(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    for each in node.body:
        match each:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                yield each.lineno, name


def _texts(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the lines that people read, with their numbers: docstrings, log lines, errors and their hints."""
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                yield from _lines(node.value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=logger), attr=level)):
                if logger in _LOGGERS and level in _LEVELS and node.args:
                    yield from _lines(node.args[0])
            case ast.Raise(exc=ast.expr() as error):
                yield from _lines(error)
            case ast.Assign(targets=[ast.Name(id="hint")], value=value):
                yield from _lines(value)


def _lines(node: ast.AST) -> Iterator[tuple[int, str]]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield from ((each.lineno + number, line) for number, line in enumerate(each.value.splitlines()))


def _line(finding: Finding) -> int:
    number = finding.where.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def _shown(path: Path) -> str:
    return path.resolve().relative_to(ROOT).as_posix()


def _git(*arguments: str) -> str:
    """Return the output of a git command; "" if it fails, for example outside of a repository."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
