"""Checks the Markdown files: relative links lead somewhere, Python blocks are Python."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def markdown_files() -> Iterator[Path]:
    """Yield the project's own Markdown files."""
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "csrc/**/*.md",
        "tests/**/*.md",
        "benchmarks/**/*.md",
    ):
        yield from sorted(ROOT.glob(pattern))


def broken_links(path: Path, text: str) -> Iterator[str]:
    """Yield a sentence for each relative link that leads nowhere."""
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", target) and not (path.parent / target).exists():
            yield f"{path.relative_to(ROOT)}: the link to {target} leads nowhere"


def broken_code(path: Path, text: str) -> Iterator[str]:
    """Yield a sentence for each Python block that does not compile."""
    for block in re.finditer(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, block.start(1)) + 1
        try:
            compile(block[1], str(path), "exec")
        except SyntaxError as error:
            at = line + (error.lineno or 1) - 1
            yield f"{path.relative_to(ROOT)}:{at}: {error.msg}"


def main() -> int:
    """Print what is wrong; return 1 if anything is."""
    found: list[str] = []
    files = list(markdown_files())
    for path in files:
        text = path.read_text()
        found += [*broken_links(path, text), *broken_code(path, text)]
    print("\n".join(found) or f"{len(files)} files: links and code blocks are in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
