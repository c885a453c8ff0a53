"""A report as one HTML file that needs nothing else: sentences, tables, and pictures inside."""

import base64
import html
from collections.abc import Iterable, Sequence
from datetime import datetime

SHORT = 24  # characters of a cell that stay on one line
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; overflow-wrap: anywhere;
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; }
h2 { font-size: 1.1rem; margin-top: 2.2rem; }
ul { padding-left: 1.2rem; }
.about { color: #5b6875; margin-top: 0; }
.note { color: #5b6875; font-size: 13px; }
.verdict { display: inline-block; padding: .15rem .7rem; border-radius: .3rem;
  color: #fff; font-weight: 600; }
.good { background: #3a9c5f; }
.bad { background: #c6283a; }
.doubt { background: #b97a12; }
/* What is wider than a phone is pushed aside by a finger; the first column stays. */
.wide { overflow-x: auto; }
img { width: 100%; min-width: 40rem; }
table { border-collapse: collapse; font-size: 13px; margin: .6rem 0; overflow-wrap: normal; }
th { text-align: left; vertical-align: bottom; border-bottom: 2px solid #c9d0d8; font-weight: 600; }
td { vertical-align: top; border-bottom: 1px solid #e6e9ed; }
th, td { padding: .2rem .9rem .2rem 0; }
th:first-child, td:first-child { position: sticky; left: 0; background: #fff; }
.short { white-space: nowrap; }
.long { min-width: 9rem; overflow-wrap: anywhere; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
"""


class Page:
    """Grows from top to bottom."""

    def __init__(self, title: str, about: str) -> None:
        self._title = title
        self._parts = [f"<h1>{_text(title)}</h1>", f'<p class="about">{_text(about)}</p>']

    def verdict(self, word: str, kind: str, why: Iterable[str]) -> None:
        """The word that counts, and the sentences behind it; kind is good, bad or doubt."""
        self._parts.append(f'<p><span class="verdict {kind}">{_text(word)}</span></p>')
        self.bullets(why)

    def heading(self, text: str) -> None:
        """Begin a part."""
        self._parts.append(f"<h2>{_text(text)}</h2>")

    def note(self, text: str) -> None:
        """Something said in small print."""
        self._parts.append(f'<p class="note">{_text(text)}</p>')

    def bullets(self, lines: Iterable[str]) -> None:
        """A list of sentences."""
        self._parts.append("<ul>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + "</ul>")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table; columns of numbers go to the right."""
        numbers = [
            all(isinstance(row[at], int | float) for row in rows) and bool(rows) for at in range(len(columns))
        ]
        head = "".join(_cell("th", column, right) for column, right in zip(columns, numbers, strict=True))
        body = "".join(
            "<tr>"
            + "".join(_cell("td", cell, right) for cell, right in zip(row, numbers, strict=True))
            + "</tr>"
            for row in rows
        )
        self._parts.append(f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>')

    def picture(self, png: bytes, what: str) -> None:
        """A picture, and what it shows for those who cannot see it."""
        data = base64.b64encode(png).decode()
        self._parts.append(
            f'<div class="wide"><img alt="{_text(what)}" src="data:image/png;base64,{data}"></div>'
        )

    def html(self) -> str:
        """The whole."""
        head = (
            '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{_text(self._title)}</title><style>{_STYLE}</style>"
        )
        return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(self._parts)}</body></html>\n"


def shown_time(at: datetime) -> str:
    """A time as reports have it."""
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def shown_ms(value: int) -> str:
    """A number of milliseconds, in the unit that fits."""
    if value < 1_000:
        return f"{value} ms"
    return f"{value / 1_000:.2f} s" if value < 60_000 else f"{value / 60_000:.1f} min"


def _cell(tag: str, value: object, right: bool) -> str:
    text = (
        f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)
    )
    length = "" if tag == "th" else " short" if len(text) <= SHORT else " long"
    return f'<{tag} class="{"number" if right else "text"}{length}">{_text(text)}</{tag}>'


def _text(text: str) -> str:
    return html.escape(text, quote=True)
