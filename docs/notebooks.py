"""Run the notebooks of docs/notebooks and store what their cells print: `python docs/notebooks.py`.

The cells of a notebook run in this process, in an empty folder and in one namespace. What is printed, the value of a
last expression and open figures become the outputs, so that a reader sees them without running anything.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parent / "notebooks"


def run(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a notebook.

    Args:
        path: The file.

    Returns:
        The notebook with new outputs, and the names that its cells have defined.
    """
    os.environ.setdefault("MPLBACKEND", "agg")
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    before = list(sys.path)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        sys.path.insert(0, folder)
        try:
            code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
            for number, cell in enumerate(code, 1):
                cell["execution_count"] = number
                cell["outputs"] = run_cell("".join(cell["source"]), names, f"{path.name}, cell {number}")
        finally:
            sys.path[:] = before
    return notebook, names


def run_cell(source: str, names: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """Run the code of a cell; return its outputs as a notebook stores them."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, place, "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), place, "eval"), names)
        if value is not None:
            print(value)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    return outputs + [{"data": {"image/png": png}, "metadata": {}, "output_type": "display_data"} for png in figures()]


def figures() -> list[str]:
    """Take the open figures of matplotlib, as base64 of PNG files."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    drawn = []
    for number in pyplot.get_fignums():
        with io.BytesIO() as file:
            pyplot.figure(number).savefig(file, dpi=80, bbox_inches="tight", metadata={"Software": None})
            drawn.append(base64.b64encode(file.getvalue()).decode())
    pyplot.close("all")
    return drawn


def markdown(notebook: dict[str, Any]) -> str:
    """Write a notebook as a page: text, code, and what was printed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).strip()
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                parts.append(f"![figure](data:image/png;base64,{output['data']['image/png']})")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook, _ = run(path)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path.name)


if __name__ == "__main__":
    main()
