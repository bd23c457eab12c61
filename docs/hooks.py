"""What the documentation's site needs beyond its pages.

Pages link to files of the repository (`../examples/turso2kafka.yaml`), so that the links work wherever the
repository is read. The site has copies of those files, and the links lead there.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_SHOWN = ("examples/**/*.yaml", "examples/**/*.py", "docker/**/*.y*ml", "docker/**/*.json")
_LINK = re.compile(r"\]\(\.\./((?:examples|docker)/[^)#]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's files that pages may link to, and a list of the decisions."""
    root = Path(config.config_file_path).parent
    for pattern in _SHOWN:
        for path in sorted(root.glob(pattern)):
            uri = path.relative_to(root).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    decisions = "".join(
        f"- [{_title(path)}]({path.name})\n" for path in sorted(root.glob("docs/adr/[0-9]*.md"))
    )
    files.append(
        File.generated(
            config, "adr/index.md", content=f"# Decisions\n\nOne page each.\n\n{decisions}"
        )
    )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - MkDocs passes them by name
    """Let links into the repository lead to the site's copies."""
    return _LINK.sub(lambda found: f"]({found[1]})", markdown)


def _title(path: Path) -> str:
    """Return the page's heading."""
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
