"""The tables of docs/scaling.md, from the newest rows of the benches.

    python -m bench.scale.plan [--write]

Prints the page's tables; --write puts them into the page. A figure that no bench has measured yet
is the project's own bar or an assumption, and the table says so.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.results import RESULTS_DIR
from bench.scale.figures import figure_table, flat_table, newest, values_of
from bench.scale.limits import limit_table
from bench.scale.load import load_table

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


def fill(page: str, blocks: Mapping[str, str]) -> str:
    """The page with each block between its two marks replaced."""
    for name, text in blocks.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    return page


def main(arguments: Sequence[str], show: Callable[[str], object] = print) -> int:
    """Print or write the tables; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench.scale.plan", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    parser.add_argument("--results-dir", type=Path, default=RESULTS_DIR)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    rows = newest(options.results_dir)
    blocks = {
        "loads": load_table(values_of(rows)),
        "limits": limit_table(values_of(rows)),
        "figures": figure_table(rows),
        "curves": flat_table(rows),
    }
    if options.write:
        options.page.write_text(fill(options.page.read_text(), blocks))
    else:
        show("\n\n".join(blocks.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
