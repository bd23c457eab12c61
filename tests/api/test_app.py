"""The page `/docs`: every call of the OpenAPI document, and nothing that a browser would fetch from elsewhere."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from html.parser import HTMLParser

from deltaforge_dagster.api.app import page
from tests.api.conftest import Api


class Elements(HTMLParser):
    """Collects elements with their attributes, and the text of code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.code: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Remember an element."""
        self.elements.append((tag, dict(attrs)))
        self._inside = tag == "code"

    def handle_data(self, data: str) -> None:
        """Remember the text of code."""
        if self._inside:
            self.code.append(data)
        self._inside = False


def test_it_has_every_call_and_loads_nothing(api: Api) -> None:
    """Each path with its method; no script, no picture, no address of another server; links lead to the page itself."""
    answer = api.client.get("/docs")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    found = Elements(answer.text)
    document = api.client.get("/openapi.json").json()
    calls = {
        f"{method.upper()} {path}" for path, one in document["paths"].items() for method in one
    }
    assert len(calls) > 30
    assert calls <= set(found.code)
    assert "/docs" not in document["paths"]
    tags = {tag for tag, _ in found.elements}
    assert not tags & {"script", "link", "img", "iframe", "form", "object"}
    ids = {attributes.get("id") for _, attributes in found.elements}
    links = [attributes["href"] or "" for tag, attributes in found.elements if tag == "a"]
    assert "/openapi.json" in links
    assert all(link == "/openapi.json" or link.removeprefix("#") in ids for link in links)
    assert not re.search(r"(src|action|url\()", answer.text.partition("</style>")[0])


def test_it_needs_the_token(serve: Callable[..., Api]) -> None:
    """What one may call is nobody else's business."""
    assert serve(token="of-this-test").client.get("/docs").status_code == 401


def test_texts_are_text() -> None:
    """A description is never taken for HTML."""
    evil = "<script>alert(1)</script> `<b>`"
    call = {
        "description": evil,
        "parameters": [{"name": "<i>", "in": "query", "description": evil}],
        "responses": {"200": {"description": evil, "content": {"<u>": {"schema": {"x": evil}}}}},
    }
    document = {
        "info": {"title": evil, "version": "1"},
        "paths": {"/<p>": {"get": call}},
        "components": {"schemas": {"A": {"$ref": "#/components/schemas/A", "y": evil}}},
    }
    text = page(document)
    assert {tag for tag, _ in Elements(text).elements} & {"script", "b", "i", "u"} == set()
    assert text.count(html.escape("<script>", quote=False)) >= 5
    assert '<a href="#A">A</a>' in text
