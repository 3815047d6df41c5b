"""``ceiba flags``: the table of flags for people and programs. Owns how it looks; the rows are ``config.reference``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ceiba.config import reference


def main(argv: list[str]) -> int:
    """Print the flags that work on this machine. Returns 0, or 1 when nothing matches."""
    parser = argparse.ArgumentParser(prog="ceiba flags", description="The server's flags and what works here.")
    parser.add_argument("text", nargs="?", default="", help="only flags with this text in name or description")
    parser.add_argument("--all", action="store_true", help="also those that are known and refused, with the reason")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--markdown", action="store_true", help="the reference page, for every machine")
    args = parser.parse_args(argv)
    if args.markdown:
        print(reference.markdown(), end="")
        return 0

    from ceiba.launch.facts import device_facts

    facts = device_facts()
    rows = reference.rows(args.text, refused=args.all, device=facts)
    if args.json:
        print(json.dumps(rows, ensure_ascii=False, indent=1))
    else:
        _render(rows, f"{facts.kind}, {facts.name}, {facts.cores} cores")
    if not rows:
        more = "" if args.all else "; --all looks among the refused ones too"
        print(f"No flag matches {args.text!r}{more}.")
        return 1
    return 0


def _render(rows: list[dict[str, Any]], machine: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    colours = {"works": "green", "hint": "yellow", "refused": "red"}
    for component in dict.fromkeys(row["component"] for row in rows):
        table = Table(title=component, title_justify="left", expand=False, show_edge=False, pad_edge=False)
        for heading, width in (("flag", 30), ("value", 16), ("default", 10), ("", None)):
            table.add_column(heading, overflow="fold", min_width=min(width or 20, 20), max_width=width)
        for row in (row for row in rows if row["component"] == component):
            colour = colours[row["status"]]
            kind = " ".join(row["values"]) or row["type"]
            default = "" if row["default"] in (None, False) else str(row["default"])
            text = f"(hint) {row['description']}" if row["status"] == "hint" else row["description"]
            names = ", ".join([row["flag"], *row["aliases"]])
            table.add_row(f"[{colour}]{escape(names)}[/]", escape(kind), escape(default), escape(text))
        console.print(table)
        console.print()
    counts = [f"{sum(row['status'] == status for row in rows)} {label}" for status, label in
              (("works", "work"), ("hint", "are hints"), ("refused", "are refused"))]  # fmt: skip
    console.print(f"On this machine ({machine}): {', '.join(counts)}.", highlight=False)
