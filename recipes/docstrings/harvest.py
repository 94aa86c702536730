"""Corpus: summary lines of the docstrings on this machine, read with `ast`, without imports."""

import ast
import hashlib
import json
import multiprocessing
import os
import sysconfig
import warnings
from collections import Counter
from pathlib import Path

MAX_SIGNATURE = 80
SKIPPED_DIRS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
BLOCKS = ("body", "orelse", "handlers", "finalbody")


def harvest(cache_file: str | os.PathLike) -> list[dict[str, str]]:
    """
    Collect (signature, summary line) pairs from the standard library and the installed packages.

    The first call parses every source file, which takes about half a minute, and writes `cache_file`; later calls read
    it.

    Args:
        cache_file (`str` or `os.PathLike`):
            JSON Lines file in which the corpus is kept.

    Returns:
        `list[dict[str, str]]`:
            One dictionary per function, with the keys `signature`, `docstring` and `module`, in an order that depends
            only on the files. No docstring and no signature occurs twice.
    """
    cache_file = Path(cache_file)
    if not cache_file.exists():
        with multiprocessing.Pool(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None) as pool:
            files = pool.map(read_file, source_files(), chunksize=64)
        corpus = unique(row for rows in files for row in rows)
        # a rename is atomic, so a cache is always complete
        partial = cache_file.with_suffix(".partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text("".join(json.dumps(row) + "\n" for row in corpus))
        partial.rename(cache_file)
    return [json.loads(line) for line in cache_file.read_text().splitlines()]


def source_files() -> list[tuple[str, str]]:
    """List `(root, path below it)` of the sources of the standard library and of the installed packages."""
    paths = sysconfig.get_paths()
    roots = dict.fromkeys(paths[key] for key in ("stdlib", "purelib", "platlib"))
    files = []
    for root in roots:
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_DIRS)
            files += [
                (root, os.path.relpath(os.path.join(folder, n), root)) for n in sorted(names) if n.endswith(".py")
            ]
    return files


def read_file(file: tuple[str, str]) -> list[dict[str, str]]:
    """Read the documented functions of one source file; an empty list if it does not parse."""
    root, path = file
    module = path.removesuffix(".py").replace(os.sep, ".")
    source = Path(root, path).read_bytes()
    if b'"""' not in source and b"'''" not in source:  # a fifth of the files need no parsing
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # e.g. invalid escapes in installed packages
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    rows = []
    for function in functions(tree):
        summary = summary_line(ast.get_docstring(function))
        if summary is not None:
            rows.append({"signature": signature(function), "docstring": summary, "module": module})
    return rows


def functions(node: ast.AST):
    """Yield the functions below `node`, in statements, not in expressions."""
    for block in BLOCKS:
        for child in getattr(node, block, ()):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield child
            yield from functions(child)


def summary_line(docstring: str | None) -> str | None:
    """Return the first paragraph of a docstring if it is one plain ASCII line of prose, else `None`."""
    if docstring is None:
        return None
    line = docstring.strip().split("\n\n")[0].rstrip()
    one_line = "\n" not in line and 10 <= len(line) <= 100 and line.isascii() and line.isprintable()
    prose = line[:1].isalpha() and " " in line and not line.endswith(":") and "::" not in line
    return line if one_line and prose else None


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Render the head of a function on one line, without annotations; truncate long parameter lists."""
    arguments = function.args
    every = arguments.posonlyargs + arguments.args + arguments.kwonlyargs + [arguments.vararg, arguments.kwarg]
    for argument in every:
        if argument is not None:
            argument.annotation = None
    text = ast.unparse(arguments)
    room = MAX_SIGNATURE - len(f"def {function.name}():")
    if len(text) > room:
        text = text[: max(room, 0)]
        text = text[: text.rfind(",") + 1] + " ..." if "," in text else "..."
    return f"def {function.name}({text}):"


def unique(rows) -> list[dict[str, str]]:
    """Keep the first row of each docstring and of each signature."""
    seen, kept = set(), []
    for row in rows:
        keys = {("docstring", row["docstring"]), ("signature", row["signature"])}
        if keys.isdisjoint(seen) and row["signature"].isascii():
            kept.append(row)
            seen |= keys
    return kept


def split(corpus: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """
    Split the corpus into a training part and a held-out tenth.

    Only the hash of the signature decides, so that a function stays in its part with any installed packages.
    """
    train, held_out = [], []
    for row in corpus:
        digest = hashlib.sha256(row["signature"].encode()).digest()
        (held_out if digest[0] < 26 else train).append(row)
    return train, held_out


def first_words(corpus: list[dict[str, str]]) -> Counter:
    """Count the words that open the docstrings, lower-cased."""
    return Counter(row["docstring"].split()[0].lower() for row in corpus)
