"""A hook of mkdocs: links from a page to files outside docs/ lead to the repository.

In the repository such a link is relative, as in ``[records](../../results/records)``. The site has no such page, so the
link becomes one to ``repo_url``; where that is not set, the path as text.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of one page."""
    folder = Path(page.file.abs_src_path).resolve().parent
    docs = Path(config["docs_dir"]).resolve()

    def rewritten(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        path = (folder / target).resolve()
        if path.is_relative_to(docs) or not path.is_relative_to(ROOT) or not path.exists():
            return link[0]  # of the site, or broken, which mkdocs reports
        name = path.relative_to(ROOT).as_posix()
        if config["repo_url"]:
            kind = "tree" if path.is_dir() else "blob"
            return f"[{text}]({config['repo_url'].rstrip('/')}/{kind}/main/{name}{anchor or ''})"
        return text if text.strip("`") == name else f"{text} (`{name}`)"

    return _LINK.sub(rewritten, markdown)
