"""What mkdocs does besides when it builds the site (mkdocs.yml).

In: the pages of docs/, which link to files beside that folder as they would in the repository. Out: a site in which these links work,
because every such file is a page of it below `repository/`; and an error instead of a site that would load anything from elsewhere, or
holds a directory where a page is wanted.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS, OUTSIDE = "docs", "repository"
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)\s#]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".yml": "yaml"}
# What a browser fetches by itself: all `src`, and `href` of <link>. Links that a reader follows are not among them.
LOADS = re.compile(
    r"""(?:<(?!a\b)\w+\b[^>]*?\s(?:src|srcset|data|poster)|<link\b[^>]*?\shref)\s*=\s*["']?\s*((?:https?:)?//[^"'\s>]+)""",
    re.IGNORECASE,
)
STYLES = re.compile(r"""(?:@import\s+|url\(\s*)["']?\s*((?:https?:)?//[^"')\s]+)""", re.IGNORECASE)
# Such code blocks make the theme's script fetch a program that draws them.
DRAWN = re.compile(r"""<pre\b[^>]*class=["'][^"']*\bmermaid\b""")


def targets(text: str, place: str) -> Iterator[tuple[re.Match[str], str]]:
    """The links of a page that stands at `place` in the repository: each with the place it leads to. What is code holds none."""
    hidden = [m.span() for pattern in (FENCE, CODE) for m in pattern.finditer(text)]
    for link in LINK.finditer(text):
        if not any(begin <= link.start() < end for begin, end in hidden):
            yield link, posixpath.normpath(posixpath.join(posixpath.dirname(place), link[1]))


def place_of(source: str) -> str:
    """Where the repository has a page of the site."""
    return source.removeprefix(f"{OUTSIDE}/") if source.startswith(f"{OUTSIDE}/") else f"{DOCS}/{source}"


def page_of(place: str) -> str:
    """The page of the site for a file of the repository; for a folder the page of what introduces it."""
    if place.startswith(f"{DOCS}/"):
        return place.removeprefix(f"{DOCS}/")
    if (ROOT / place).is_dir():
        place = posixpath.join(place, "README.md")
    return f"{OUTSIDE}/{place}" if place.endswith(".md") else f"{OUTSIDE}/{place}.md"


def outside(texts: dict[str, str]) -> dict[str, str]:
    """All files beside docs/ that these pages lead to, by the page they become, with its text; also those that such pages lead to."""
    found: dict[str, str] = {}
    waiting = list(texts.items())
    while waiting:
        place, text = waiting.pop()
        for _, target in targets(text, place):
            page = page_of(target)
            if page.startswith(f"{OUTSIDE}/") and page not in found:
                file = ROOT / page.removeprefix(f"{OUTSIDE}/")
                body = file.read_text(encoding="utf-8") if file.exists() else shown(file.with_suffix(""))
                found[page] = body
                waiting += [(page.removeprefix(f"{OUTSIDE}/"), body)] if file.exists() else []
    return found


def shown(file: Path) -> str:
    """A file that is no page, as one."""
    text = file.read_text(encoding="utf-8")
    return f"# {file.name}\n\n```{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n```\n"


def relinked(text: str, source: str) -> str:
    """A page of the site with links to pages of the site in place of links to files of the repository."""
    parts, end = [], 0
    for link, target in targets(text, place_of(source)):
        to = posixpath.relpath(page_of(target), posixpath.dirname(source) or ".")
        parts += [text[end : link.start()], to, link[2] or ""]
        end = link.end()
    return "".join([*parts, text[end:]])


def named(nav: object) -> Iterator[str]:
    """The pages that the navigation in mkdocs.yml names."""
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from named(part)


def loads(name: str, text: str) -> list[str]:
    """What a file of the site would make a browser fetch from elsewhere."""
    if name.endswith(".css"):
        return STYLES.findall(text)
    if not name.endswith(".html"):
        return []
    return [*LOADS.findall(text), *STYLES.findall(text), *(["what draws mermaid blocks"] if DRAWN.search(text) else [])]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    pages = {f"{DOCS}/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    pages["nav"] = "".join(f"[]({place_of(page)})" for page in named(config.nav) if page.startswith(f"{OUTSIDE}/"))
    for page, text in outside(pages).items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return relinked(markdown, page.file.src_uri)


def on_post_build(config: MkDocsConfig) -> None:
    from mkdocs.exceptions import PluginError

    site = Path(config.site_dir)
    found = [
        f"{file.relative_to(site)}: {what}"
        for file in sorted(site.rglob("*"))
        if file.suffix in (".html", ".css")
        for what in loads(file.name, file.read_text(encoding="utf-8"))
    ]
    if found:
        raise PluginError("the site would load from elsewhere:\n  " + "\n  ".join(found))
